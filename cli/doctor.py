"""``quantkit doctor``: what is wrong with anybody's folder."""

from __future__ import annotations

import sys

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.help import BROKEN, Command, exit_codes
from quantkit.cli.output import columns
from quantkit.cli.progress import ProgressDisplay
from quantkit.doctor.findings import RUNTIMES, Runtime


@click.command(cls=Command, epilog=exit_codes(0, BROKEN))
@click.argument("path", type=click.Path())
@click.option("--for", "runtime", type=click.Choice(RUNTIMES), help="Also check what this runtime requires.")
@click.option("--tp", type=int, default=1, show_default=True, help="Degree of tensor parallelism to check for.")
@click.option("--deep", is_flag=True, help="Also read the weights, and run a small model on a sample text.")
@click.option("--against", type=click.Path(), metavar="SRC", help="Compare each layer with its float source.")
@options.data
def doctor(
    path: str, runtime: Runtime | None, tp: int, deep: bool, against: str | None, data: str | None
) -> None:  # fmt: skip
    """Check what is wrong with a model, whoever made it.

    PATH is a folder, or a file of weights. Without --deep and --against only headers are read.
    """
    from quantkit.doctor.diagnose import diagnose

    outputs = Outputs(data)
    with ProgressDisplay() as progress:
        found = diagnose(path, runtime=runtime, tp=tp, deep=deep, against=against, progress=progress)
    outputs.write(found.to_json(), show=lambda: outputs.say(found.lines(columns())))
    if found.broken:
        sys.exit(BROKEN)
