"""Continue the prompts in a file, several at a time, into another file that can be gone on with.

Of what a line of prompts may hold tells `quantkit.jobs.prompts_file`. Of each continuation comes a line with

    index              of the prompt, from 0
    id                 the prompt's own, where it has one
    sample             the number of the continuation among those of the prompt, from 0
    text               new text, without what a stop string cut off; with `echo` the prompt's before it
    finish_reason      "stop" for an end token or a stop string, "length" for as many tokens as were asked for
    stop               the stop string that was found, else null
    prompt_tokens      of the prompt, with BOS
    completion_tokens  new ones, without an end token
    truncated          true, only where the prompt's beginning was cut off
    token_ids          where the prompt was given so: new ones; with `echo` the prompt's before them
    logprobs           where asked for, of each token in its place: ``token`` (its text), ``token_id``, ``logprob``
                       (null for the first token of a prompt) and ``top_logprobs``, a list of the likeliest with the
                       same three keys

The file appears when all prompts are done, with lines in the order of the prompts. Until then ``OUT.partial`` is a
folder: ``lines.jsonl`` in it has the lines in the order in which prompts end, those of one prompt together, each with
its sha256 as ``check``. A run with `resume` drops a torn line at its end and goes on with the prompts that are missing,
if model, prompts and options are the same; batch size, device and processes may be others.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

from quantkit.arguments import as_path, as_whole, require_flags
from quantkit.errors import RequestError
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer, tokenizer_files
from quantkit.formats.output.destination import require_absent
from quantkit.formats.output.lines import ResumableLines
from quantkit.formats.output.staging import partial_folder, require_room_to_build
from quantkit.jobs.prompts_file import Prompt, PromptReader, checked
from quantkit.progress import Progress, deduplicated
from quantkit.runtime.request import BATCH_SIZE, MAX_NEW_TOKENS, no_prompt_logprobs
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.text.tokenizer import Tokenizer, load_tokenizer
from quantkit.version import __version__

if TYPE_CHECKING:
    import torch

    from quantkit.distributed.group import ProcessGroup
    from quantkit.formats.detect import WeightKind
    from quantkit.kernels.registry import BackendName
    from quantkit.model.decoder import Decoder
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import Runner
    from quantkit.runtime.generate_batch import BatchModel
    from quantkit.runtime.request import Request
    from quantkit.tensors.dtypes import FloatName

_log = logging.getLogger(__name__)

STDIN = "-"
_LINE_BYTES = 200  # of a result, besides its tokens
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 60  # of what a token could be
Line = Mapping[str, Any]


@dataclass(frozen=True)
class GeneratedFile:
    """What a run has done.

    Attributes:
        output: the file; None where lines went elsewhere.
        prompts: in the file.
        resumed: of these, that an interrupted run had done.
        tokens: new ones, of this run.
        seconds: that they took, without loading the model.
    """

    output: Path | None
    prompts: int
    resumed: int
    tokens: int
    seconds: float

    def lines(self) -> list[str]:
        """For people."""
        parts = [_counted(self.prompts, "prompt"), _counted(self.tokens, "token")]
        if self.resumed:
            parts[0] += f", {self.resumed} of them from before"
        if self.tokens and self.seconds:
            parts.append(f"{self.tokens / self.seconds:.1f} tokens/s")
        return [("" if self.output is None else f"{self.output}: ") + ", ".join(parts)]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "output": None if self.output is None else str(self.output)}


@dataclass(frozen=True)
class Runtime:
    """How a model runs; see `quantkit.load` and `quantkit.runtime.engine.Engine`.

    Attributes:
        backend: also ``xla``, for the devices that JAX finds, with neither the device nor what follows the weights.
        devices: that share the model, for ``xla``; None takes all.
        warm_up: compile all steps before the first prompt.
    """

    device: str | torch.device | None = None
    dtype: FloatName | torch.dtype | None = None
    backend: BackendName | Literal["xla"] | None = None
    devices: int | None = None
    weights: WeightKind | None = None
    int8_cache: bool = False
    compiled: bool | None = None
    warm_up: bool = False


class _Lines(Protocol):
    """Where lines go."""

    @property
    def done(self) -> set[int]: ...
    def add(self, number: int, lines: Sequence[Line]) -> None: ...
    def commit(self) -> None: ...


def generate_file(
    path: str | Path,
    prompts: str | Path,
    output: str | Path,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop: str | Sequence[str] = (),
    n: int = 1,
    logprobs: int | None = None,
    echo: bool = False,
    template: str | None = None,
    truncate: bool = False,
    batch_size: int = BATCH_SIZE,
    resume: bool = False,
    device: str | torch.device | None = None,
    dtype: FloatName | torch.dtype | None = None,
    backend: BackendName | Literal["xla"] | None = None,
    weights: WeightKind | None = None,
    progress: Progress | None = None,
    **sampling: Unpack[SamplingOptions],
) -> GeneratedFile:
    """Continue the prompts in a file, several at a time; see the module for what lines hold.

    Args:
        path: the model's folder.
        prompts: a file of JSON lines.
        output: the file to make.
        max_new_tokens, stop, n, logprobs, echo, sampling: as for `quantkit.generate_batch`, of lines that say nothing
            else; tokens of conversations are drawn as the model's generation_config.json says, unless said here.
        template: for conversations; see `quantkit.chat_format`.
        truncate: cut too long a prompt at its beginning, instead of refusing it.
        batch_size: sequences that run together at most.
        resume: go on where an interrupted run stopped, if there is one.
        device, dtype, backend, weights: as for `quantkit.load`; the backend may be ``xla``.
        progress: told of every prompt that ends.

    Raises:
        RequestError: for a line that makes no sense, with its number, before anything is computed.
        DestinationError: if the file is there, or cannot be written.
        ResumeError: if an interrupted run is there that is not to be gone on with, or had other inputs.
        QuantkitError: as `quantkit.load` does.

    Example:
        >>> print(*quantkit.generate_file("model-int4", "prompts.jsonl", "answers.jsonl", max_new_tokens=50).lines())
    """
    runtime = Runtime(device=device, dtype=dtype, backend=backend, weights=weights)
    options = {
        "max_new_tokens": max_new_tokens, "stop": stop, "n": n, "logprobs": logprobs, "echo": echo, **sampling
    }  # fmt: skip
    job = FileJob(
        path, prompts, as_path("output", output), options, runtime, template=template, truncate=truncate,
        batch_size=batch_size, resume=resume,
    )  # fmt: skip
    job.prepare()
    return job.run(progress=deduplicated(progress))


class FileJob:
    """`generate_file` in two steps, of which the first needs no torch; of several processes the first one takes it."""

    def __init__(
        self, path: str | Path, prompts: str | Path, output: Path | Callable[[Line], None], options: Mapping[str, Any],
        runtime: Runtime, *, template: str | None = None, truncate: bool = False, batch_size: int = BATCH_SIZE,
        resume: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            prompts: also ``-`` for stdin.
            output: also a function that is given every line as soon as its prompt is done; such a run cannot be
                gone on with.
            options: how prompts are continued, of `prompts_file.OPTIONS`.

        Raises:
            RequestError: for options that make no sense.
        """
        require_flags(truncate=truncate, resume=resume)
        asked = checked(options)
        if asked.scores_prompt and runtime.backend == "xla":
            raise no_prompt_logprobs("echo")
        self._path, self._file, self._output = as_path("path", path), as_path("prompts", prompts), output
        self._options, self._template, self._truncate = dict(options), template, truncate
        self._batch_size = as_whole("batch_size", batch_size)
        if self._batch_size < 1:
            raise RequestError("batch_size must be at least 1", found=batch_size)
        self._resume, self._runtime = resume, runtime
        self._prompts: list[Prompt] = []
        self._fingerprint: dict[str, object] = {}

    def prepare(self) -> None:
        """Read and check the prompts, and whether the output can be made.

        Raises:
            QuantkitError: as `generate_file` does.
        """
        if isinstance(self._output, Path):
            require_absent(self._output)
            require_room_to_build(partial_folder(self._output), resume=self._resume)
        checkpoint: Checkpoint = open_checkpoint(self._path, self._runtime.weights)
        require_runnable(checkpoint)
        tokenizer = checked_tokenizer(checkpoint)[0] or load_tokenizer(self._path)
        content = _content(self._file)
        config, xla = checkpoint.config, self._runtime.backend == "xla"
        reader = PromptReader(
            self._path, config, tokenizer, self._options, template=self._template, truncate=self._truncate,
            most=config.max_unscaled_context if xla else config.max_positions, prompt_logprobs=not xla,
        )  # fmt: skip
        self._prompts = reader.read(content, str(self._file))
        self._fingerprint = {
            "job": "generate",
            "quantkit": __version__,
            "model": manifest.identity([*checkpoint.files(), *tokenizer_files(self._path)]),
            "prompts": hashlib.sha256(content).hexdigest(),
            **{f"option {key}": value for key, value in self._options.items()},
            "option template": self._template,
            "option truncate": self._truncate,
        }

    def run(
        self, *, tp: ProcessGroup | None = None, progress: Progress, counted: Callable[[int], None] | None = None
    ) -> GeneratedFile:
        """Load the model and continue the prompts.

        Args:
            tp: the processes that share the model, each of which calls this.
            counted: told of so many new tokens after each step.

        Raises:
            QuantkitError: as `generate_file` does.
        """
        from quantkit.distributed.group import SINGLE
        from quantkit.jobs.answer_lines import answers

        group = tp or SINGLE
        tokens, seconds = 0, 0.0

        def count(new: int) -> None:
            nonlocal tokens
            tokens += new
            if counted is not None:
                counted(new)

        with self._opened(group) as out:
            resumed = done = group.broadcast_from_rank0(len(out.done))
            total = group.broadcast_from_rank0(len(self._prompts))
            missing = [(number, one) for number, one in enumerate(self._prompts) if number not in out.done]
            todo = group.broadcast_from_rank0(missing)
            if todo:
                engine, tokenizer = self._loaded([prompt.request for _, prompt in todo], group, progress)
                progress("generate", done, total, "prompts")
                begun = time.perf_counter()
                for number, lines in answers(engine, tokenizer, todo, count):
                    out.add(number, lines)
                    done += 1
                    progress("generate", done, total, "prompts")
                seconds = time.perf_counter() - begun
            out.commit()
        written = self._output if isinstance(self._output, Path) else None
        return GeneratedFile(written, total, resumed, tokens, seconds)

    def _opened(self, group: ProcessGroup) -> AbstractContextManager[_Lines]:
        """Where lines go; of several processes those of the first one do."""
        if not group.is_rank0:
            return nullcontext(_Given(None))
        if not isinstance(self._output, Path):
            return nullcontext(_Given(self._output))
        how = self._runtime
        numeric = {"dtype": how.dtype, "backend": how.backend, "int8_cache": how.int8_cache}
        computed_by = {f"option {name}": None if value is None else str(value) for name, value in numeric.items()}
        sizes = [one.request.samples for one in self._prompts]
        fingerprint, likely = {**self._fingerprint, **computed_by}, sum(map(_likely_bytes, self._prompts))
        return ResumableLines(self._output, fingerprint, sizes, likely_bytes=likely, resume=self._resume)

    def _loaded(
        self, requests: Sequence[Request], group: ProcessGroup, progress: Progress
    ) -> tuple[Engine | Runner[Any], Tokenizer]:
        """What runs requests, and the tokenizer."""
        import torch

        from quantkit.jobs.load import load, load_xla
        from quantkit.runtime.engine import Engine
        from quantkit.runtime.generate_batch import engine_for

        how = self._runtime
        model: Decoder | BatchModel
        if how.backend == "xla":
            model, tokenizer = load_xla(
                self._path, devices=how.devices, dtype=how.dtype, weights=how.weights, progress=progress
            )
        else:
            model, tokenizer = load(
                self._path, device=group.device or how.device, dtype=how.dtype, backend=how.backend,
                weights=how.weights, tp=group, progress=progress,
            )  # fmt: skip
        engine = engine_for(
            model, requests, self._batch_size, cache_dtype=torch.int8 if how.int8_cache else None,
            compiled=how.compiled,
        )  # fmt: skip
        if how.warm_up and isinstance(engine, Engine):
            compiled = engine.warm_up()
            if group.is_rank0:
                _log.info("%s", warmed_up(compiled))
        return engine, tokenizer


def warmed_up(steps: int) -> str:
    """What to say of so many steps that were compiled."""
    return f"{_counted(steps, 'step')} compiled" if steps else "nothing is compiled: the steps are eager"


class _Given:
    """Hands lines on."""

    def __init__(self, take: Callable[[Line], None] | None) -> None:
        self.done: set[int] = set()
        self._take = take

    def add(self, number: int, lines: Sequence[Line]) -> None:
        for line in lines:
            if self._take is not None:
                self._take(line)

    def commit(self) -> None:
        pass


def _likely_bytes(prompt: Prompt) -> int:
    """What the lines of a prompt take on the disk, within a factor of a few: nobody knows where they will end."""
    asked = prompt.request
    tokens = asked.max_new_tokens + (len(asked.prompt) if asked.echo else 0)
    entries = 0 if asked.logprobs is None else 1 + asked.logprobs
    return 2 * asked.samples * (_LINE_BYTES + tokens * (_TOKEN_BYTES + entries * _LOGPROB_BYTES))


def _content(file: Path) -> bytes:
    name = str(file)
    try:
        with open(0 if name == STDIN else file, "rb", closefd=name != STDIN) as source:
            return source.read()
    except OSError as error:
        raise RequestError(f"the prompts cannot be read: {error.strerror}", path=name) from error


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
