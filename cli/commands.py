"""The commands: parse, call one job, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from quantkit.cli.output import mention, say
from quantkit.cli.processes import together
from quantkit.cli.progress import bar

weights_option = click.option(
    "--weights",
    type=click.Choice(["meta", "safetensors", "bin"]),
    help="Which set of weights to read where a folder holds several.",
)
_RESUME = click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command.")
_NONFINITE = click.option("--allow-nonfinite", is_flag=True, help="Write NaN, Inf and overflowing floats as they are.")
_SOURCE_CHECK = click.option(
    "--source-check/--no-source-check", default=True, show_default=True,
    help="See first that SRC predicts a text at all, where it has a tokenizer.",
)  # fmt: skip
_SRC = click.argument("src", type=click.Path(path_type=Path))
_DST = click.argument("dst", type=click.Path(path_type=Path))


def writing(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that all commands which write a checkpoint have."""
    for option in (_SOURCE_CHECK, _NONFINITE, _RESUME, weights_option, _DST, _SRC):
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
@weights_option
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
    src: Path, dst: Path, weights: str | None, resume: bool, allow_nonfinite: bool, source_check: bool, to: str,
    mp: int, dtype: str | None,
) -> None:  # fmt: skip
    """Write the model in SRC to the new folder DST, in another format, sharding or float type.

    Under torchrun it is the first process's work.
    """
    from quantkit.jobs.convert import convert as job

    with together(device="cpu") as group, bar("convert", show=group.first) as progress:
        if not group.first:
            return
        notes = job(
            src, dst, to=to, mp=mp, dtype=dtype, weights=weights, resume=resume, allow_nonfinite=allow_nonfinite,
            source_check=source_check, progress=progress,
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
    from quantkit.quality.manifest_check import verify_files
    from quantkit.quality.verify import verify as job

    if b is None:
        with bar("verify", unit="step") as progress:
            lines = verify_files(a, progress=progress)
        say(lines)
        return
    with bar("verify", unit="step") as progress:
        report = job(a, b, progress=progress)
    say(report.lines())
    sys.exit(report.verdict.value)


def done(dst: Path, notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(f"quantkit: note: {note}", err=True)
    mention(f"wrote {dst}")
