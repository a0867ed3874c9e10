"""``quantkit generate``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.help import Command
from quantkit.cli.output import mention
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.formats.detect import is_model_folder
from quantkit.runtime.request import checked_count
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.tensors.dtypes import FloatName

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup
    from quantkit.formats.detect import WeightKind
    from quantkit.runtime.stream import Pace

STDIN = "-"
_HOW = (
    'put it after the folder: quantkit generate DIR "Once upon a time"; or name a file: --prompt-file FILE, - for stdin'
)


@dataclass(frozen=True)
class Asked:
    """What the user asked for; None and False where nothing was said."""

    path: Path
    text: str | None
    prompt: str | None
    prompt_file: str | None
    max_new_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    dtype: FloatName | None
    backend: str | None
    device: str | None
    tp: int | None
    multi_host: bool
    int8_cache: bool
    compiled: bool | None
    draft: Path | None
    draft_tokens: int | None
    weights: WeightKind | None
    stop: tuple[str, ...] = ()

    def sampling(self) -> dict[str, Any]:
        """What was said of how tokens are drawn."""
        said = {name: getattr(self, name) for name in SamplingOptions.__annotations__ if hasattr(self, name)}
        return {name: value for name, value in said.items() if value is not None}

    def require_sense(self) -> None:
        """
        Raises:
            RequestError: unless one prompt is given, if options do not go together, or if numbers are out of range.
            CheckpointError: if there is no model.
        """
        sources = {"PROMPT": self.text, "--prompt": self.prompt, "--prompt-file": self.prompt_file}
        given = [name for name, value in sources.items() if value is not None]
        if not given:
            raise RequestError("there is no prompt", hint=_HOW)
        if len(given) > 1:
            raise RequestError("the prompt is given twice", found=" and ".join(given), expected="one of them")
        if "" in (self.text, self.prompt):
            raise RequestError("the prompt is empty")
        steps = self.int8_cache or self.compiled is not None
        xla, drafts = self.backend == "xla", self.draft is not None
        for wrong, problem in (
            (xla and (steps or drafts or self.draft_tokens is not None or self.device is not None),
             "--device, --int8-cache, --compile, --eager and --draft do not go with --backend xla"),
            (xla and not self.sampling().keys() <= {"temperature", "top_p", "seed"},
             "--top-k, --min-p and --repetition-penalty do not go with --backend xla yet"),
            (not xla and (self.tp is not None or self.multi_host), "--tp and --multi-host go with --backend xla"),
            (not drafts and self.draft_tokens is not None, "--draft-tokens goes with --draft"),
            (drafts and (self.int8_cache or self.compiled), "--draft goes with neither --int8-cache nor --compile"),
        ):  # fmt: skip
            if wrong:
                raise RequestError(problem)
        SamplingParams(**self.sampling())
        checked_count(self.max_new_tokens)
        if self.text is not None and not self.path.exists() and is_model_folder(Path(self.text)):
            raise RequestError(
                "the model comes first, then the prompt", hint=f"quantkit generate {shlex.quote(self.text)} PROMPT"
            )
        require_models(self.path, self.draft)

    def read_prompt(self) -> str:
        """The prompt; where it is read from a file, without the new line at its end.

        Raises:
            RequestError: if the file cannot be read, or holds no text.
        """
        file = STDIN if self.text == STDIN else self.prompt_file
        if file is None:
            return self.prompt or self.text or ""
        prompt = _content(file).removesuffix("\n").removesuffix("\r")
        if not prompt:
            raise RequestError("the prompt is empty", path=file)
        return prompt


def _content(file: str) -> str:
    try:
        with open(0 if file == STDIN else file, "rb", closefd=file != STDIN) as source:
            return source.read().decode()
    except OSError as error:
        raise RequestError(f"the prompt cannot be read: {error.strerror}", path=file) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            "the prompt is not a text", path=file, found=f"byte {error.start}", expected="UTF-8"
        ) from error


class _WithPrompt(Command):
    """Says how to give a prompt that was taken for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.possibilities:
                raise
            told = error.format_message().rstrip(".")
            raise click.UsageError(f"{told}; for a prompt that begins with a dash: --prompt=TEXT", ctx) from error


@click.command(cls=_WithPrompt)
@click.argument("path", type=options.PATH)
@click.argument("text", metavar="[PROMPT]", required=False)
@click.option("--prompt", metavar="TEXT", help="Instead of PROMPT: for a text that begins with a dash.")
@click.option(
    "--prompt-file", metavar="FILE", shell_complete=options.complete_files,
    help="Instead of PROMPT: a file to read it from; - is stdin.",
)  # fmt: skip
@options.sampling(100)
@options.dtype
@options.backend("xla", more=" xla runs the whole model on TPUs; see docs/parallel.md.")
@options.device
@click.option("--tp", type=int, help="With xla: devices that share the model; all by default.")
@click.option("--multi-host", is_flag=True, help="With xla: the devices of all hosts, this command run on each.")
@options.int8_cache
@options.compiled
@click.option("--draft", type=options.PATH, help="A smaller model that proposes tokens.")
@click.option("--draft-tokens", type=int, help="Proposed at a time; 4 by default.")
@options.weights
def generate(**given: Any) -> None:
    """Continue a prompt with the model in PATH.

    PROMPT is the text, or - to read it from stdin. It is taken as the shell gives it: \\n stays a backslash and an n.
    Of a file or stdin the last new line is left out. Special tokens may be spelled out, such as <|eot_id|>.

    The text appears as it is generated; on a terminal a line on stderr says in the end how fast that was. Under
    torchrun all processes share the model.
    """
    asked = Asked(**given)
    if asked.backend == "xla":
        asked.require_sense()
        _say(_on_devices(asked, asked.read_prompt()))
        return
    alike = {name: value for name, value in given.items() if name not in ("path", "draft", "prompt_file")}
    with together(alike, asked.device, check=asked.require_sense) as group:
        prompt = group.agree(asked.read_prompt() if group.first else "")
        pieces = _pieces(asked, prompt, group)
        _say(pieces if group.first else ("" for _ in pieces))


def _say(pieces: Iterator[str]) -> None:
    for piece in pieces:
        raise_if_interrupted()
        click.echo(piece, nl=False)


def _tell(pace: Pace) -> None:
    if sys.stderr.isatty():
        mention(pace.line(), err=True)


def _pieces(asked: Asked, prompt: str, group: ProcessGroup) -> Iterator[str]:
    """The prompt, and the text as it grows, ended by a new line."""
    import torch

    from quantkit.jobs.load import load
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import generate as job
    from quantkit.runtime.request import text_ids
    from quantkit.runtime.speculative import DRAFT_TOKENS, speculate
    from quantkit.runtime.stream import Pace, text_pieces

    how: dict[str, Any] = {
        "device": group.device or asked.device, "dtype": asked.dtype, "backend": asked.backend, "tp": group,
    }  # fmt: skip
    small = None
    with ProgressDisplay(show=group.first and sys.stderr.isatty()) as progress:
        model, tokenizer = load(asked.path, weights=asked.weights, progress=progress, **how)
        if asked.draft is not None:
            small, other = load(asked.draft, progress=progress, **how)
    ids = text_ids(tokenizer, prompt, specials=True)
    if small is None:
        cache = torch.int8 if asked.int8_cache else None
        engine = Engine(model, len(ids) + asked.max_new_tokens, cache_dtype=cache, compiled=asked.compiled)
        tokens = job(engine, ids, max_new_tokens=asked.max_new_tokens, **asked.sampling())
    else:
        if other.encode(prompt, specials=True) != ids:
            raise RequestError("the draft model reads the prompt as other tokens", path=asked.draft)
        proposed = DRAFT_TOKENS if asked.draft_tokens is None else asked.draft_tokens
        tokens = speculate(
            model, small, ids, draft_tokens=proposed, max_new_tokens=asked.max_new_tokens, **asked.sampling()
        )
    pace = Pace()
    yield prompt
    yield from text_pieces(tokenizer, ids, pace.timed(tokens), asked.stop)
    yield "\n"
    if group.first:
        _tell(pace)


def _on_devices(asked: Asked, prompt: str) -> Iterator[str]:
    """The same through XLA; of several hosts only the first has something to say."""
    from quantkit.jobs.load import load_xla
    from quantkit.runtime.request import text_ids
    from quantkit.runtime.stream import Pace, text_pieces

    with ProgressDisplay() as progress:
        model, tokenizer = load_xla(
            asked.path, devices=asked.tp, dtype=asked.dtype, weights=asked.weights,
            multi_host=asked.multi_host, progress=progress,
        )  # fmt: skip
    ids = text_ids(tokenizer, prompt, specials=True)
    pace = Pace(at_once=model.tokens_at_once)
    tokens = pace.timed(model.generate(ids, max_new_tokens=asked.max_new_tokens, **asked.sampling()))
    shown = prompt if model.first else ""
    yield shown
    for piece in text_pieces(tokenizer, ids, tokens, asked.stop):
        yield piece if model.first else ""
    yield "\n" if model.first else ""
    if model.first:
        _tell(pace)
