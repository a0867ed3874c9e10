"""The plain commands: parse, call one job, print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.help import Command, exit_codes, section
from quantkit.cli.output import columns, mention, note
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.jobs.convert_options import ConvertOptions

if TYPE_CHECKING:
    from quantkit.formats.detect import WeightKind
    from quantkit.jobs.result import ConvertResult, QuantizeResult


@click.command(cls=Command)
@click.option("--output", type=options.PATH, help="Keep the models in this new folder.")
@click.option("--quick", is_flag=True, help="Try one scheme only.")
@options.data
def demo(output: Path | None, quick: bool, data: str | None) -> None:
    """Try everything on a small model that ships with quantkit.

    Converts and quantizes it, verifies and measures the results, and generates text with them.
    """
    from quantkit.evals.demo import run_demo

    outputs = Outputs(data, makes=output)
    with ProgressDisplay() as progress:
        report = run_demo(output, quick=quick, progress=progress)
    lines = [*report.lines(columns()), "", *_next_steps(output, report.rows[-1].name)]
    outputs.write(report.to_json(), show=lambda: outputs.say(lines))


def _next_steps(output: Path | None, quantized: str) -> list[str]:
    """Commands to try after the demo."""
    folder = Path("demo") if output is None else output
    floats, last = shlex.quote(str(folder / "bf16")), shlex.quote(str(folder / quantized))
    lines = [
        *(["quantkit demo --output demo  # keeps these models"] if output is None else []),
        f'quantkit generate {last} "The people"',
        f"quantkit chat {last} --template llama2  # a base model: it continues your text",
        f"quantkit eval {last} --against {floats} --window 256",
        f"quantkit bench {floats} {last}",
        "quantkit quantize YOUR_MODEL NEW_FOLDER --scheme int4-g128",
    ]
    return ["To try next:", *(f"  {line}" for line in lines)]


@click.command(cls=options.BareJson)
@click.argument("path", type=options.PATH)
@options.weights
@options.tensors_only
@options.data
def inspect(path: Path, weights: WeightKind | None, tensors_only: bool, data: str | None) -> None:
    """Describe the model in PATH, from headers alone."""
    from quantkit.jobs.inspect import inspect as job

    outputs = Outputs(data)
    found = job(path, weights=weights, tensors_only=tensors_only)
    outputs.write(found.to_json(), show=lambda: outputs.say(found.lines()))


_CONVERT = {
    "to": options.target("hf for floats, SRC's own format for quantized models"),
    "mp": click.option("--mp", type=int, default=1, show_default=True, help="Number of Meta model-parallel shards."),
}


@click.command(cls=Command)
@options.src
@options.dst
@options.of_job(ConvertOptions, _CONVERT)
@section("Output", options.data)
def convert(data: str | None, **given: Any) -> None:
    """Write a model in another format, sharding or float type.

    The model in SRC is written to the new folder DST, or to a file DST.gguf. Codes of a quantized model stay exactly
    the same, or the conversion fails. The result is read back and compared with SRC. Under torchrun, rank 0 does the
    work.
    """
    require_models(given["src"], makes=given["dst"])

    from quantkit.jobs.convert import convert as job

    with together(device="cpu") as group:
        outputs = Outputs(data, makes=given["dst"])
        if not group.is_rank0:
            return
        with ProgressDisplay() as progress:
            made = job(**given, progress=progress)
    finish(made, outputs)


@click.command(cls=Command, epilog=exit_codes(0, 8, 10, 11))
@click.argument("a", type=options.PATH)
@click.argument("b", type=options.PATH, required=False)
@click.option("--allow-bound", is_flag=True, help="Exit with 0, not 10, if the two are within the bound.")
@options.data
def verify(a: Path, b: Path | None, allow_bound: bool, data: str | None) -> None:
    """Check if two models are the same, or how far apart.

    With A alone, its files are checked against the sha256 in its manifest, and a quantized model against the
    perplexities there.
    """
    if allow_bound and b is None:
        raise RequestError("--allow-bound goes with two models")
    require_models(a, b)
    outputs = Outputs(data)

    from quantkit.quality.verify import VerifyReport
    from quantkit.quality.verify import verify as job

    with ProgressDisplay() as progress:
        report = job(a, progress=progress) if b is None else job(a, b, progress=progress)
    outputs.write(report.to_json(), show=lambda: outputs.say(report.lines()))
    if isinstance(report, VerifyReport) and not (allow_bound and report.ok):
        sys.exit(report.verdict.value)


def finish(made: ConvertResult | QuantizeResult, outputs: Outputs) -> None:
    """Print what a command has written, and the notes on it."""
    for line in made.notes:
        note(line)
    for line in made.lines():
        mention(line, err=outputs.stdout_is_used)
    outputs.write(made.to_json())
