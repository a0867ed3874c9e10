"""The commands that describe and check models: ``inspect``, ``doctor`` and ``verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.hints import spell_option
from quantkit.cli.options import BROKEN, Command, exit_codes
from quantkit.cli.output import table_width
from quantkit.cli.processes import require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.report import report_result
from quantkit.doctor.findings import RUNTIMES
from quantkit.errors import RequestError

if TYPE_CHECKING:
    from quantkit.formats.detect import WeightKind


@options.accept_threads
@click.command(cls=options.Command)
@click.argument("path", type=options.PATH)
@options.weights
@options.tensors_only
@options.data
def inspect(path: Path, weights: WeightKind | None, tensors_only: bool, data: str | None) -> None:
    """Describe the model in PATH, from headers alone."""
    from quantkit.jobs.inspect import inspect as job

    report_result(Outputs(data), job(path, weights=weights, tensors_only=tensors_only))


@options.accept_threads
@click.command(cls=Command, epilog=exit_codes(0, BROKEN))
@click.argument("path", type=click.Path())
@click.option(
    "--for", "runtime", type=click.Choice(RUNTIMES), help="Also check what this runtime requires."
)
@click.option(
    "--tp",
    type=int,
    default=1,
    show_default=True,
    help="Degree of tensor parallelism to check for.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Also read the weights, and run the model on a sample text if it is small.",
)
@click.option(
    "--against", type=click.Path(), metavar="SRC", help="Compare each linear with its float source."
)
@options.data
def doctor(data: str | None, **params: Any) -> None:
    """Check what is wrong with a model, whoever made it.

    PATH is a folder, or a file of weights. Without --deep and --against only headers are read.
    """
    from quantkit.doctor.diagnose import diagnose

    outputs = Outputs(data)
    with ProgressDisplay() as progress:
        diagnosis = diagnose(**params, progress=progress)

    def show() -> None:
        outputs.say(diagnosis.lines(table_width(), spell_option))

    outputs.write(diagnosis.to_json(), show=show)
    if diagnosis.is_broken:
        sys.exit(BROKEN)


@options.accept_threads
@click.command(cls=Command, epilog=exit_codes(0, 3, 8, 10, 11))
@click.argument("a", type=options.PATH)
@click.argument("b", type=options.PATH, required=False)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 10, not 0, if the two are within the bound but not equal.",
)
@options.trust_remote_code
@options.data
def verify(
    a: Path, b: Path | None, strict: bool, trust_remote_code: bool, data: str | None
) -> None:
    """Check if two models are the same, or how far apart.

    With A alone, its files are compared with the sha256 in its manifest, and the perplexities of a
    quantized model, measured again, with those in the manifest.
    """
    if strict and b is None:
        raise RequestError("--strict requires two models")
    require_models(a, b)
    outputs = Outputs(data)

    from quantkit.quality.verify import VerifyReport
    from quantkit.quality.verify import verify as job

    with ProgressDisplay() as progress:
        settings: Any = {"trust_remote_code": trust_remote_code, "progress": progress}
        if b is None:
            report = job(a, **settings)
        else:
            report = job(a, b, **settings)
    report_result(outputs, report)
    if isinstance(report, VerifyReport) and (strict or not report.ok):
        sys.exit(report.verdict.value)
