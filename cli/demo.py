"""``quantkit demo``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.options import Command
from quantkit.cli.output import table_width
from quantkit.cli.progress import ProgressDisplay


@options.accept_threads
@click.command(cls=Command)
@click.option("--output", type=options.PATH, help="Keep the models in this new folder.")
@click.option("--quick", is_flag=True, help="Try one scheme only.")
@options.data
def demo(output: Path | None, quick: bool, data: str | None, threads: int | None) -> None:
    """Try everything on a small model that ships with quantkit.

    Converts and quantizes it, verifies and measures the results, and generates text with them. By
    default one thread computes, instead of one for each core: more are slower with so small a
    model.
    """
    from quantkit.kernels.library import compile_ahead

    # An installation from source has no compiled kernels. Compilation runs in a thread while the
    # demo imports torch and converts, so it takes less time.
    compile_ahead()
    from quantkit.evals.demo import run_demo

    outputs = Outputs(data, makes=output)
    with ProgressDisplay() as progress:
        report = run_demo(output, quick=quick, threads=threads or 1, progress=progress)
    lines = [*report.lines(table_width()), "", *_next_steps(output, report.rows[-1].name)]
    outputs.write(report.to_json(), show=lambda: outputs.say(lines))


def _next_steps(output: Path | None, quantized: str) -> list[str]:
    """List commands to try after the demo, with the paths of its models."""
    if output is None:
        folder = Path("demo")
    else:
        folder = output
    floats = shlex.quote(str(folder / "bf16"))
    last = shlex.quote(str(folder / quantized))
    commands = []
    # Without --output the demo keeps no models. This command creates those that the others name.
    if output is None:
        commands.append("quantkit demo --output demo  # keeps these models")
    commands += [
        f'quantkit generate {last} "The people"',
        f"quantkit chat {last} --template llama2  # a base model: it continues your text",
        f"quantkit eval {last} --against {floats} --window 256",
        f"quantkit bench {floats} {last}",
        "quantkit quantize YOUR_MODEL NEW_FOLDER --scheme int4-g128",
    ]
    lines = ["To try next:"]
    for command in commands:
        lines.append(f"  {command}")
    return lines
