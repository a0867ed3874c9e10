"""The commands that refine a quantized model, and that apply what refining changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.options import Command, section
from quantkit.cli.output import note
from quantkit.cli.processes import join_group, require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.report import report_written
from quantkit.jobs.refine.options import OUTPUT, RefineOptions


@options.accept_threads
@click.command(cls=Command)
@click.argument("quantized", type=options.PATH)
@click.argument("dst", type=options.PATH, required=False)
@click.option(
    "--against",
    type=options.PATH,
    required=True,
    metavar="SRC",
    help="The float model of QUANTIZED.",
)
@options.create_job_options(RefineOptions)
@section(OUTPUT, options.data)
def refine(quantized: Path, dst: Path | None, data: str | None, **params: Any) -> None:
    """Train a quantized model's scales against its float model.

    The model in QUANTIZED, from any tool, is written to DST in the same format and size, with the
    same codes. Text that is held back decides which step is kept; if no step is closer to SRC,
    nothing is written and the exit code is 8.
    """
    require_models(quantized, params["against"], makes=dst)

    from quantkit.jobs.refine.refine import refine as job

    # With --delta alone the job writes only the changes, to a file.
    if dst is not None:
        output = dst
    else:
        output = params["delta"]
    # Each machine may have the float model in another folder.
    common_options = {**params, "against": None}
    with join_group(common_options, params["device"]) as group:
        outputs = Outputs(data, reads=[params["calibration"]], makes=output)
        with ProgressDisplay(show=group.is_rank0) as progress:

            def begin(estimate: Any) -> None:
                """Print what the job takes, and show its progress by its steps."""
                note(estimate.line())
                progress.expect(estimate.steps)

            result = job(
                quantized, dst, **params, group=group, on_estimate=begin, progress=progress
            )
    if group.is_rank0:
        report_written(outputs, result)


@click.command("apply-delta", cls=Command)
@click.argument("model", type=options.PATH)
@click.argument("delta", type=options.PATH)
@click.argument("dst", type=options.PATH)
@section(
    OUTPUT,
    click.option("--resume", is_flag=True, help="Continue an interrupted run of the same command."),
)
@section(OUTPUT, options.data)
def apply_delta(model: Path, delta: Path, dst: Path, resume: bool, data: str | None) -> None:
    """Apply what `quantkit refine --delta` wrote.

    The quantized model in MODEL is written to DST with the changes in the file DELTA. It must be
    the model that the delta was made for.
    """
    require_models(model, makes=dst)

    from quantkit.jobs.refine.apply_delta import apply_delta as job

    outputs = Outputs(data, reads=[delta], makes=dst)
    with ProgressDisplay() as progress:
        result = job(model, delta, dst, resume=resume, progress=progress)
    report_written(outputs, result)
