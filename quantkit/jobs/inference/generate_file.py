"""Continue the prompts in a file, several at a time, into another file; an interrupted run can be
continued.

`quantkit.jobs.inference.prompts_file` describes the lines of prompts. Each continuation is a line
with

    index              of the prompt, from 0
    id                 the prompt's own, if it has one
    sample             number of this continuation of the prompt, from 0
    text               new text, without what a stop string cut off; with `echo` the prompt's text
                       before it
    finish_reason      "stop" for an end token or a stop string, "length" for the maximum number of
                       tokens
    stop               the stop string that was found, else null
    prompt_tokens      of the prompt, with BOS
    completion_tokens  new ones, without an end token
    truncated          true, only if the beginning of the prompt was cut off
    token_ids          if the prompt was given as such: new ones; with `echo` the prompt's before
                       them
    logprobs           if requested, for each token: ``token`` (its text), ``token_id``, ``logprob``
                       (null for the first token of a prompt) and ``top_logprobs``, a list of the
                       most likely tokens with the same three keys

A request in OpenAI's batch format is answered by one line in OpenAI's
(`quantkit.openai.batch`).

The file appears when all prompts are done, with lines in the order of the prompts. Until then
``OUT.partial`` is a folder: its ``lines.jsonl`` has the lines in the order in which prompts end,
those of one prompt together, each with its sha256 as ``check``. A run with `resume` drops a torn
line at its end and continues with the missing prompts, if model, prompts and options are the same;
batch size, device and processes may differ.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from quantkit.base.arguments import as_integer, as_path, require_flags
from quantkit.base.progress import Progress, skip_repeated_reports
from quantkit.errors import RequestError
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer, tokenizer_files
from quantkit.formats.output.destination import require_absent
from quantkit.formats.output.lines import ResumableLines
from quantkit.formats.output.staging import name_partial_folder, require_room_to_build
from quantkit.jobs.inference.prompt_lines import build_line
from quantkit.jobs.inference.prompts_file import PromptLine, read_prompts
from quantkit.jobs.inference.standard_input import read_input
from quantkit.openai.batch import build_batch_line, is_batch_response, read_batch_number
from quantkit.openai.responses import ResponseBuilder
from quantkit.prompts.builder import PromptBuilder
from quantkit.prompts.options import parse_request_options
from quantkit.prompts.prompt import Prompt
from quantkit.runtime.request import (
    BATCH_SIZE,
    MAX_NEW_TOKENS,
    create_prompt_logprobs_error,
    describe_warm_up,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.runtime.token_texts import TokenTexts
from quantkit.text.tokenizer import Tokenizer, load_tokenizer
from quantkit.version import __version__

if TYPE_CHECKING:
    import torch

    from quantkit.distributed.group import ProcessGroup
    from quantkit.formats.detect import WeightKind
    from quantkit.kernels import BackendName
    from quantkit.model.decoder import Decoder
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import Runner
    from quantkit.runtime.generate_batch import BatchModel
    from quantkit.runtime.request import Completion, Request
    from quantkit.tensors.dtypes import FloatName

_log = logging.getLogger(__name__)

# Of a result, besides its tokens.
_LINE_BYTES = 200
# Of the text of a token.
_TOKEN_BYTES = 5
# Of each likely token.
_LOGPROB_BYTES = 60
Line = Mapping[str, Any]


@dataclass(frozen=True)
class GeneratedFile:
    """The result of a run.

    Attributes:
        output: the file; None if the lines went elsewhere.
        prompts: number of prompts in the file; a request in OpenAI's format counts as one.
        resumed: how many of them an interrupted run had done.
        tokens: new tokens of this run.
        seconds: the time they took, without loading the model.
    """

    output: Path | None
    prompts: int
    resumed: int
    tokens: int
    seconds: float

    def lines(self) -> list[str]:
        """Write the report for people."""
        parts = [_pluralize(self.prompts, "prompt"), _pluralize(self.tokens, "token")]
        if self.resumed:
            parts[0] += f", {self.resumed} of them from before"
        if self.tokens and self.seconds:
            parts.append(f"{self.tokens / self.seconds:.1f} tokens/s")
        report = ", ".join(parts)
        if self.output is None:
            return [report]
        return [f"{self.output}: {report}"]

    def to_json(self) -> dict[str, Any]:
        """Convert all of it to plain values."""
        output = None if self.output is None else str(self.output)
        return {**asdict(self), "output": output}


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
    allow_slow: bool = False,
    weights: WeightKind | None = None,
    progress: Progress | None = None,
    **sampling: Unpack[SamplingOptions],
) -> GeneratedFile:
    """Continue the prompts in a file, several at a time; the module describes the lines of the
    result.

    Args:
        path: the model's folder.
        prompts: a file of JSON lines.
        output: the file to make.
        max_new_tokens, stop, n, logprobs, echo, sampling: as for `quantkit.generate_batch`, unless
            a line has its own values. For conversations the sampling options of the model's
            generation_config.json apply, unless given.
        template: for conversations; see `quantkit.chat_format`.
        truncate: cut off the beginning of a prompt that is too long, instead of failing.
        batch_size: maximum number of sequences that run together.
        resume: continue an interrupted run, if there is one.
        device, dtype, backend, allow_slow, weights: as for `quantkit.load`; the backend may be
            ``xla``.
        progress: called for every prompt that ends.

    Raises:
        RequestError: for an invalid line, with its number, before anything is computed.
        DestinationError: if the file exists, or cannot be written.
        ResumeError: if there is an interrupted run and `resume` is not set, or it had other inputs.
        QuantkitError: as `quantkit.load` does.

    Example:
        >>> print(*quantkit.generate_file("model-int4", "prompts.jsonl", "answers.jsonl",
        max_new_tokens=50).lines())
    """
    continuation = {
        "max_new_tokens": max_new_tokens,
        "stop": stop,
        "n": n,
        "logprobs": logprobs,
        "echo": echo,
        **sampling,
    }
    job = FileJob(
        as_path("path", path),
        as_path("prompts", prompts),
        as_path("output", output),
        continuation,
        template=template,
        truncate=truncate,
        batch_size=batch_size,
        resume=resume,
        device=device,
        dtype=dtype,
        backend=backend,
        allow_slow=allow_slow,
        weights=weights,
    )
    job.prepare()
    return job.run(progress=skip_repeated_reports(progress))


@dataclass
class FileJob:
    """`generate_file` in two steps: `prepare` needs no torch, and only rank 0 calls it; each
    process calls `run`.

    Attributes:
        prompts: a file, or ``-`` for stdin.
        output: a file, or a function that gets every line as soon as its prompt is done; such a run
            cannot be resumed.
        continuation: how prompts are continued, with the keys of
            `quantkit.prompts.options.OPTIONS`.
        device, dtype, backend, allow_slow, weights: see `quantkit.load`; ``xla`` takes neither a
            device nor the last three.
        devices: for ``xla``, number of devices that share the model; None is all.
        int8_cache, compiled: see `quantkit.runtime.engine.Engine`.
        warm_up: compile all steps before the first prompt.
    """

    path: Path
    prompts: Path
    output: Path | Callable[[Line], None]
    continuation: Mapping[str, Any]
    _: KW_ONLY
    template: str | None = None
    truncate: bool = False
    batch_size: int = BATCH_SIZE
    resume: bool = False
    device: str | torch.device | None = None
    dtype: FloatName | torch.dtype | None = None
    backend: BackendName | Literal["xla"] | None = None
    allow_slow: bool = False
    devices: int | None = None
    weights: WeightKind | None = None
    int8_cache: bool = False
    compiled: bool | None = None
    warm_up: bool = False
    _read: list[PromptLine] = field(default_factory=list, init=False)
    _fingerprint: dict[str, object] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raise a `RequestError` for invalid options."""
        require_flags(truncate=self.truncate, resume=self.resume, allow_slow=self.allow_slow)
        request, _ = parse_request_options(self.continuation)
        # The programs compiled for XLA return no log-probabilities of prompts.
        if request.scores_prompt and self.backend == "xla":
            raise create_prompt_logprobs_error("echo")
        if as_integer("batch_size", self.batch_size) < 1:
            raise RequestError("batch_size must be at least 1", found=self.batch_size)

    def prepare(self) -> None:
        """Read and check the prompts, and check whether the output can be written.

        Raises:
            QuantkitError: as `generate_file` does.
        """
        from quantkit.grammar.grammars import Grammars

        # An output that cannot be written is reported before the prompts are read.
        if isinstance(self.output, Path):
            require_absent(self.output)
            require_room_to_build(name_partial_folder(self.output), resume=self.resume)
        checkpoint: Checkpoint = open_checkpoint(self.path, self.weights, text_part=True)
        require_runnable(checkpoint)
        tokenizer = load_checked_tokenizer(checkpoint)[0] or load_tokenizer(self.path)
        content = read_input(self.prompts, "prompts")
        config = checkpoint.config
        xla = self.backend == "xla"
        # A batch on XLA is padded to one length. Up to this limit, the angles of rotary positions
        # do not depend on it. Grammars are not supported there.
        if xla:
            max_tokens = config.max_unscaled_context
            grammars = None
        else:
            max_tokens = config.max_positions
            grammars = Grammars(tokenizer, config.vocab_size, config.eos_token_ids)
        builder = PromptBuilder(
            self.path,
            config,
            tokenizer,
            self.continuation,
            template=self.template,
            truncate=self.truncate,
            max_tokens=max_tokens,
            prompt_logprobs=not xla,
            grammars=grammars,
        )
        self._read = read_prompts(content, str(self.prompts), builder, self.path.name)
        # A resumed run must have these in common with the interrupted one.
        self._fingerprint = {
            "job": "generate",
            "quantkit": __version__,
            "model": manifest.identity([*checkpoint.files(), *tokenizer_files(self.path)]),
            "prompts": hashlib.sha256(content).hexdigest(),
            **{f"option {key}": value for key, value in self.continuation.items()},
            "option template": self.template,
            "option truncate": self.truncate,
        }

    def run(
        self,
        *,
        tp: ProcessGroup | None = None,
        progress: Progress,
        counted: Callable[[int], None] | None = None,
    ) -> GeneratedFile:
        """Load the model and continue the prompts.

        Args:
            tp: the processes that share the model; each makes this call.
            counted: called after each step with the number of new tokens.

        Raises:
            QuantkitError: as `generate_file` does.
        """
        from quantkit.distributed.group import SINGLE

        group = tp or SINGLE
        tokens = 0
        seconds = 0.0

        def count(new: int) -> None:
            nonlocal tokens
            tokens += new
            if counted is not None:
                counted(new)

        with self._open_output(group) as out:
            # Only rank 0 has read the prompts and the partial output.
            resumed = group.broadcast_from_rank0(len(out.done))
            done = resumed
            total = group.broadcast_from_rank0(len(self._read))
            missing: list[tuple[int, PromptLine]] = []
            for number, line in enumerate(self._read):
                if number not in out.done:
                    missing.append((number, line))
            todo = group.broadcast_from_rank0(missing)
            if todo:
                requests: list[Request] = []
                for _, line in todo:
                    for prompt in line.prompts:
                        requests.append(prompt.request)
                engine, tokenizer = self._load_engine(requests, group, progress)
                progress("generate", done, total, "prompts")
                begun = time.perf_counter()
                for number, lines in _continue_lines(
                    engine, tokenizer, todo, self.path.name, count
                ):
                    out.add(number, lines)
                    done += 1
                    progress("generate", done, total, "prompts")
                seconds = time.perf_counter() - begun
            out.commit()
        if isinstance(self.output, Path):
            written = self.output
        else:
            written = None
        return GeneratedFile(
            output=written, prompts=total, resumed=resumed, tokens=tokens, seconds=seconds
        )

    def _open_output(
        self, group: ProcessGroup
    ) -> AbstractContextManager[ResumableLines | _Callback]:
        """Open the destination of the lines; other processes than rank 0 drop theirs."""
        if not group.is_rank0:
            return nullcontext(_Callback(None))
        if not isinstance(self.output, Path):
            return nullcontext(_Callback(self.output))
        # These change logits, so a resumed run with others would mix two kinds of results.
        numeric = {"dtype": self.dtype, "backend": self.backend, "int8_cache": self.int8_cache}
        computed_by: dict[str, str | None] = {}
        for name, value in numeric.items():
            computed_by[f"option {name}"] = None if value is None else str(value)
        # A request in OpenAI's format is answered by one line with all its choices.
        sizes: list[int] = []
        likely = 0
        for line in self._read:
            sizes.append(1 if line.batch else line.prompts[0].request.samples)
            for prompt in line.prompts:
                likely += _likely_bytes(prompt)
        fingerprint = {**self._fingerprint, **computed_by}
        return ResumableLines(
            self.output, fingerprint, sizes, _read_number, likely_bytes=likely, resume=self.resume
        )

    def _load_engine(
        self, requests: Sequence[Request], group: ProcessGroup, progress: Progress
    ) -> tuple[Engine | Runner[Any], Tokenizer]:
        """Load the model and build what runs requests on it; also return the tokenizer."""
        # Here because `prepare` works without torch.
        import torch

        from quantkit.jobs.inference.load import (
            Placement,
            load_opened,
            load_xla,
            measure_opened,
            open_with_tokenizer,
        )
        from quantkit.runtime.engine import Engine
        from quantkit.runtime.generate_batch import choose_engine_size, engine_for

        model: Decoder | BatchModel
        if self.backend == "xla":
            model, tokenizer = load_xla(
                self.path,
                devices=self.devices,
                dtype=self.dtype,
                weights=self.weights,
                progress=progress,
            )
        else:
            placement: Placement = {
                "device": group.device or self.device,
                "dtype": self.dtype,
                "backend": self.backend,
                "allow_slow": self.allow_slow,
                "tp": group,
                "progress": progress,
            }
            checkpoint, tokenizer = open_with_tokenizer(self.path, self.weights, self.dtype)
            length, slots = choose_engine_size(requests, self.batch_size)
            memory = measure_opened(
                checkpoint, length=length, slots=slots, int8_cache=self.int8_cache, **placement
            )
            # Lines for a pipe come without notes beside them.
            if group.is_rank0 and isinstance(self.output, Path):
                _log.info("%s: memory to run: %s", self.path, memory.text(length, slots))
            model = load_opened(checkpoint, **placement)
        engine = engine_for(
            model,
            requests,
            self.batch_size,
            cache_dtype=torch.int8 if self.int8_cache else None,
            compiled=self.compiled,
        )
        if self.warm_up and isinstance(engine, Engine):
            compiled = engine.warm_up()
            if group.is_rank0:
                _log.info("%s", describe_warm_up(compiled))
        return engine, tokenizer


class _Callback:
    """Passes lines to a function, if there is one."""

    def __init__(self, callback: Callable[[Line], None] | None) -> None:
        self.done: set[int] = set()
        self._callback = callback

    def add(self, number: int, lines: Sequence[Line]) -> None:
        for line in lines:
            if self._callback is not None:
                self._callback(line)

    def commit(self) -> None:
        pass


def _likely_bytes(prompt: Prompt) -> int:
    """Estimate the size of a prompt's lines on disk, as if no answer ended early."""
    request = prompt.request
    tokens = request.max_new_tokens
    if request.echo:
        tokens += len(request.prompt)
    if request.logprobs is None:
        entries = 0
    else:
        entries = 1 + request.logprobs
    line_bytes = _LINE_BYTES + tokens * (_TOKEN_BYTES + entries * _LOGPROB_BYTES)
    # Twice, as the partial file and the final one exist together at the end.
    return 2 * request.samples * line_bytes


def _pluralize(count: int, noun: str) -> str:
    plural = "" if count == 1 else "s"
    return f"{count} {noun}{plural}"


def _continue_lines(
    engine: Engine | Runner[Any],
    tokenizer: Tokenizer,
    todo: Sequence[tuple[int, PromptLine]],
    model_name: str,
    counted: Callable[[int], None],
) -> Iterator[tuple[int, list[Line]]]:
    """Continue the prompts of lines, and yield the answer to each line, with its number, once all
    of it has ended.
    """
    from quantkit.grammar.grammars import Grammars
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate_batch import completions

    texts = TokenTexts(tokenizer)
    prompts: list[Prompt] = []
    requests: list[Request] = []
    stops: list[list[str]] = []
    line_places: list[int] = []
    # The number of each line's first prompt among all prompts.
    first_numbers: list[int] = []
    # How many continuations each line gets.
    num_choices: list[int] = []
    for place, (_, line) in enumerate(todo):
        first_numbers.append(len(prompts))
        num_choices.append(sum(prompt.request.samples for prompt in line.prompts))
        for prompt in line.prompts:
            prompts.append(prompt)
            requests.append(prompt.request)
            stops.append(prompt.stop)
            line_places.append(place)
    if any(prompt.grammar is not None for prompt in prompts):
        # Each process binds its own constraints, which cannot be sent between processes.
        assert isinstance(engine, Engine)
        config = engine.model.config
        grammars = Grammars(tokenizer, config.vocab_size, config.eos_token_ids)
        requests = [prompt.bind_grammar(grammars) for prompt in prompts]
    ended: dict[int, list[Completion]] = {}
    for completion in completions(engine, requests, tokenizer, stops, counted):
        place = line_places[completion.prompt]
        number, line = todo[place]
        # The engine numbers the prompts of all lines, a response those of its line.
        line_completions = ended.setdefault(place, [])
        prompt_number = completion.prompt - first_numbers[place]
        line_completions.append(replace(completion, prompt=prompt_number))
        if len(line_completions) < num_choices[place]:
            continue
        del ended[place]
        yield number, _build_lines(number, line, line_completions, texts, model_name)


def _build_lines(
    number: int,
    line: PromptLine,
    completions: Sequence[Completion],
    texts: TokenTexts,
    model_name: str,
) -> list[Line]:
    """Build the answer to a line: a line per sample, or the response to a batch request."""
    if line.batch is not None:
        # Identifiers and the time are fixed, so that the same inputs give the same bytes.
        responses = ResponseBuilder(
            request=line.batch.request,
            prompts=line.prompts,
            texts=texts,
            request_id=str(number),
            model=model_name,
        )
        return [build_batch_line(number, line.batch.custom_id, responses.build(completions))]
    lines: list[Line] = []
    # Completions end in any order; lines are written in that of the samples.
    for completion in sorted(completions, key=lambda completion: completion.sample):
        prompt = line.prompts[completion.prompt]
        lines.append(build_line(number, line.known_by, prompt, completion, texts))
    return lines


def _read_number(line: Line) -> Any:
    """Read from a line of results which prompt it answers."""
    if is_batch_response(line):
        return read_batch_number(line)
    return line["index"]
