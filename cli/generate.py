"""``quantkit generate``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.help import Command
from quantkit.cli.processes import together
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup


@dataclass(frozen=True)
class Asked:
    """What the user asked for; None and False where nothing was said."""

    path: Path
    prompt: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    dtype: str | None
    backend: str | None
    device: str | None
    tp: int | None
    multi_host: bool
    int8_cache: bool
    compiled: bool | None
    draft: Path | None
    draft_tokens: int | None
    weights: str | None

    def sampling(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p,
            "seed": self.seed,
        }  # fmt: skip

    def require_sense(self) -> None:
        """
        Raises:
            RequestError: if options do not go together.
        """
        steps = self.int8_cache or self.compiled is not None
        xla, drafts = self.backend == "xla", self.draft is not None
        for wrong, problem in (
            (not self.prompt, "the prompt is empty"),
            (xla and (steps or drafts or self.draft_tokens is not None or self.device is not None),
             "--device, --int8-cache, --compile, --eager and --draft do not go with --backend xla"),
            (not xla and (self.tp is not None or self.multi_host), "--tp and --multi-host go with --backend xla"),
            (not drafts and self.draft_tokens is not None, "--draft-tokens goes with --draft"),
            (drafts and (self.int8_cache or self.compiled), "--draft goes with neither --int8-cache nor --compile"),
        ):  # fmt: skip
            if wrong:
                raise RequestError(problem)


@click.command(cls=Command)
@click.argument("path", type=options.PATH)
@click.option("--prompt", required=True, help="The text to continue; special tokens may be spelled out.")
@click.option("--max-new-tokens", type=int, default=100, show_default=True, help="Tokens to generate at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus of probability to draw from.")
@click.option("--seed", type=int, help="Of the draw; unpredictable by default.")
@options.dtype
@options.backend(" xla runs the whole model on TPUs; see docs/parallel.md.")
@options.device
@click.option("--tp", type=int, help="With xla: devices that share the model; all by default.")
@click.option("--multi-host", is_flag=True, help="With xla: the devices of all hosts, this command run on each.")
@click.option("--int8-cache", is_flag=True, help="Keep keys and values in 8 bits; see docs/kernels.md for the cost.")
@options.compiled
@click.option("--draft", type=options.PATH, help="A smaller model that proposes tokens.")
@click.option("--draft-tokens", type=int, help="Proposed at a time; 4 by default.")
@options.weights
def generate(**given: Any) -> None:
    """Continue a prompt with the model in PATH.

    Under torchrun all processes share the model.
    """
    asked = Asked(**given)
    if asked.backend == "xla":
        asked.require_sense()
        _say(_on_devices(asked))
        return
    alike = {name: value for name, value in given.items() if name not in ("path", "draft")}
    with together(alike, asked.device) as group:
        asked.require_sense()
        pieces = _pieces(asked, group)
        _say(pieces if group.first else ("" for _ in pieces))


def _say(pieces: Iterator[str]) -> None:
    for piece in pieces:
        raise_if_interrupted()
        click.echo(piece, nl=False)


def _pieces(asked: Asked, group: ProcessGroup) -> Iterator[str]:
    """The prompt, and the text as it grows, ended by a new line."""
    import torch

    from quantkit.jobs.load import load
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import generate as job
    from quantkit.runtime.speculative import DRAFT_TOKENS, speculate
    from quantkit.runtime.stream import text_pieces

    how: dict[str, Any] = {
        "device": group.device or asked.device, "dtype": asked.dtype, "backend": asked.backend, "tp": group,
    }  # fmt: skip
    model, tokenizer = load(asked.path, weights=asked.weights, **how)
    ids = tokenizer.encode(asked.prompt, specials=True)
    if asked.draft is None:
        cache = torch.int8 if asked.int8_cache else None
        engine = Engine(model, len(ids) + asked.max_new_tokens, cache_dtype=cache, compiled=asked.compiled)
        tokens = job(engine, ids, **asked.sampling())
    else:
        small, other = load(asked.draft, **how)
        if other.encode(asked.prompt, specials=True) != ids:
            raise RequestError("the draft model reads the prompt as other tokens", path=asked.draft)
        proposed = DRAFT_TOKENS if asked.draft_tokens is None else asked.draft_tokens
        tokens = speculate(model, small, ids, draft_tokens=proposed, **asked.sampling())
    yield asked.prompt
    yield from text_pieces(tokenizer, ids, tokens)
    yield "\n"


def _on_devices(asked: Asked) -> Iterator[str]:
    """The same through XLA; of several hosts only the first has something to say."""
    from quantkit.jobs.load import load_xla
    from quantkit.runtime.stream import text_pieces

    with ProgressDisplay() as progress:
        model, tokenizer = load_xla(
            asked.path, devices=asked.tp, dtype=asked.dtype, weights=asked.weights,
            multi_host=asked.multi_host, progress=progress,
        )  # fmt: skip
    ids = tokenizer.encode(asked.prompt, specials=True)
    tokens = model.generate(ids, **asked.sampling())
    shown = asked.prompt if model.first else ""
    yield shown
    for piece in text_pieces(tokenizer, ids, tokens):
        yield piece if model.first else ""
    yield "\n" if model.first else ""
