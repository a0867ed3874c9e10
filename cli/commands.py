"""The commands: parse, call one job, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from quantkit.cli.processes import is_first, together
from quantkit.cli.progress import bar
from quantkit.cli.xla import float_type, generate_on_devices
from quantkit.errors import RequestError

_WEIGHTS = click.option(
    "--weights",
    type=click.Choice(["meta", "safetensors", "bin"]),
    help="Which set of weights to read where a folder holds several.",
)
_RESUME = click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command.")
_NONFINITE = click.option("--allow-nonfinite", is_flag=True, help="Write NaN, Inf and overflowing floats as they are.")
_SRC = click.argument("src", type=click.Path(path_type=Path))
_DST = click.argument("dst", type=click.Path(path_type=Path))


def writing(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that all commands which write a checkpoint have."""
    for option in (_NONFINITE, _RESUME, _WEIGHTS, _DST, _SRC):
        command = option(command)
    return command


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Keep the checkpoints in this new folder.")
def demo(output: Path | None) -> None:
    """Run the whole job on a small model that ships with quantkit."""
    from quantkit.evals.demo import run_demo

    with bar("demo", unit="step") as progress:
        report = run_demo(output, progress=progress)
    for line in report.lines():
        click.echo(line)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@_WEIGHTS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: Path, weights: str | None, as_json: bool) -> None:
    """Say what PATH is, from headers alone."""
    from quantkit.jobs.inspect import inspect as job

    found = job(path, weights=weights)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))


@click.command()
@writing
@click.option("--to", type=click.Choice(["hf", "meta"]), default="hf", show_default=True, help="Target format.")
@click.option("--mp", type=int, default=1, show_default=True, help="Number of Meta model-parallel shards.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Float type; the source's own by default.")
def convert(
    src: Path, dst: Path, weights: str | None, resume: bool, allow_nonfinite: bool, to: str, mp: int, dtype: str | None
) -> None:
    """Write the model in SRC to the new folder DST, in another format, sharding or float type."""
    from quantkit.jobs.convert import convert as job

    with bar("convert") as progress:
        notes = job(
            src, dst, to=to, mp=mp, dtype=dtype, weights=weights, resume=resume, allow_nonfinite=allow_nonfinite,
            progress=progress,
        )  # fmt: skip
    done(dst, notes)


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path), required=False)
def verify(a: Path, b: Path | None) -> None:
    """Prove that A and B are the same model, or say how far apart they are.

    With A alone, hold its files against the sha256 in its manifest, and a quantized
    model against the perplexities there.
    Exit code: 0 the same, 10 within the bound of the scheme, 11 different.
    """
    from quantkit.jobs.verify import verify as job
    from quantkit.jobs.verify import verify_files

    if b is None:
        with bar("verify", unit="step") as progress:
            lines = verify_files(a, progress=progress)
        click.echo("\n".join(lines))
        return
    with bar("verify", unit="step") as progress:
        report = job(a, b, progress=progress)
    click.echo("\n".join(report.lines()))
    sys.exit(report.verdict.value)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The text to continue; special tokens may be spelled out.")
@click.option("--max-new-tokens", type=int, default=100, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus of probability to draw from.")
@click.option("--seed", type=int, help="Of the draw; unpredictable by default.")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Of activations; the model's own by default."
)
@click.option(
    "--backend",
    help="Of quantized layers: cpu-exact, cpu-fast, triton or reference; see docs/kernels.md. "
    "xla runs the whole model on TPUs; see docs/parallel.md.",
)
@click.option("--tp", type=int, help="With xla: devices that share the model; all by default.")
@click.option("--multi-host", is_flag=True, help="With xla: the devices of all hosts, this command run on each.")
@click.option("--int8-cache", is_flag=True, help="Keep keys and values in 8 bits; see docs/kernels.md for the cost.")
@click.option("--compile/--eager", "compiled", default=None, help="Through torch.compile; by default on GPUs only.")
@click.option("--draft", type=click.Path(path_type=Path), help="A smaller model that proposes tokens.")
@click.option("--draft-tokens", type=int, help="Proposed at a time; 4 by default.")
@_WEIGHTS
def generate(
    path: Path, prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int | None,
    dtype: str | None, backend: str | None, tp: int | None, multi_host: bool, int8_cache: bool,
    compiled: bool | None, draft: Path | None, draft_tokens: int | None, weights: str | None,
) -> None:  # fmt: skip
    """Continue a prompt with the model in PATH; under torchrun all processes share it."""
    import torch

    from quantkit.jobs.load import load
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import generate as job
    from quantkit.runtime.speculative import DRAFT_TOKENS, speculate
    from quantkit.runtime.stream import text_pieces

    chosen = float_type(dtype)
    cache = torch.int8 if int8_cache else None
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed,
    }  # fmt: skip
    options = click.get_current_context().params.items()
    if backend == "xla":
        if int8_cache or compiled is not None or draft is not None or draft_tokens is not None:
            raise RequestError("--int8-cache, --compile, --eager and --draft do not go with --backend xla")
        generate_on_devices(path, prompt, sampling, chosen, weights, tp, multi_host)
        return
    if tp is not None or multi_host:
        raise RequestError("--tp and --multi-host go with --backend xla")
    with together({name: value for name, value in options if name not in ("path", "draft")}) as group:
        if not prompt:
            raise RequestError("the prompt is empty")
        device = "cpu" if group is None else group.device
        if draft is None and draft_tokens is not None:
            raise RequestError("--draft-tokens goes with --draft")
        if draft is not None and (int8_cache or compiled):
            raise RequestError("--draft goes with neither --int8-cache nor --compile")
        model, tokenizer = load(path, weights=weights, device=device, dtype=chosen, backend=backend, tp=group)
        ids = tokenizer.encode(prompt, specials=True)
        if draft is None:
            engine = Engine(model, len(ids) + max_new_tokens, cache_dtype=cache, compiled=compiled)
            tokens = job(engine, ids, **sampling)
        else:
            small, other = load(draft, device=device, dtype=chosen, backend=backend, tp=group)
            if other.encode(prompt, specials=True) != ids:
                raise RequestError("the draft model reads the prompt as other tokens", path=draft)
            tokens = speculate(
                model, small, ids, draft_tokens=DRAFT_TOKENS if draft_tokens is None else draft_tokens, **sampling
            )
        say = click.echo if is_first(group) else _nothing
        say(prompt, nl=False)
        for piece in text_pieces(tokenizer, ids, tokens):
            say(piece, nl=False)
        say()


def _nothing(text: str = "", nl: bool = True) -> None:
    """What processes say that do not speak."""


def done(dst: Path, notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(f"quantkit: note: {note}", err=True)
    click.echo(f"wrote {dst}")
