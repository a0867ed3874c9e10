"""``quantkit convert``."""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.options import Command, section
from quantkit.cli.processes import join_group, require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.report import report_written
from quantkit.jobs.convert.options import ConvertOptions

_CONVERT = {
    "to": options.target("hf for floats, SRC's own format for quantized models"),
    "mp": click.option(
        "--mp", type=int, default=1, show_default=True, help="Number of Meta model-parallel shards."
    ),
}


@options.accept_threads
@click.command(cls=Command)
@options.src
@options.dst
@options.create_job_options(ConvertOptions, _CONVERT)
@section("Output", options.data)
def convert(data: str | None, **params: Any) -> None:
    """Write a model in another format, sharding or float type.

    The model in SRC is written to the new folder DST, or to a file DST.gguf. Without --requantize
    and --dequantize, the codes of a quantized model stay exactly the same, or the conversion fails.
    The result is read back and compared with SRC. Under torchrun, rank 0 does the work.
    """
    require_models(params["src"], makes=params["dst"])

    from quantkit.jobs.convert.convert import convert as job

    with join_group(device="cpu") as group:
        outputs = Outputs(data, makes=params["dst"])
        if not group.is_rank0:
            return
        with ProgressDisplay() as progress:
            result = job(
                **params,
                on_estimate=lambda estimate: progress.expect(estimate.steps),
                progress=progress,
            )
    report_written(outputs, result)
