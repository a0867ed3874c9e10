"""Options that several commands share, spelled and told alike, and old spellings that still work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quantkit.cli.help import Command
from quantkit.cli.output import note

Function = Callable[..., Any]
PATH = click.Path(path_type=Path)

src = click.argument("src", type=PATH)
dst = click.argument("dst", type=PATH)
weights = click.option(
    "--weights", type=click.Choice(["meta", "safetensors", "bin"]), metavar="KIND",
    help="Which weights to read where a folder holds several: meta, safetensors or bin.",
)  # fmt: skip
device = click.option("--device", metavar="DEVICE", help="Where to compute: cpu or cuda; a GPU if there is one.")
dtype = click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Float type; the model's own by default."
)
compiled = click.option(
    "--compile/--eager", "compiled", default=None, help="Through torch.compile or not; by default on GPUs only."
)
data = click.option("--json", "data", metavar="PATH", help="Write everything found as JSON; - is stdout.")
report = click.option("--report", type=PATH, help="Write the report, in Markdown.")
table = click.option(
    "--table", type=click.Choice(["terminal", "markdown", "latex", "csv"]), default="terminal", show_default=True,
    help="How tables are printed.",
)  # fmt: skip

_RESUME = click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command.")
_NONFINITE = click.option("--allow-nonfinite", is_flag=True, help="Write NaN, Inf and overflowing floats as they are.")
_SOURCE_CHECK = click.option(
    "--source-check/--no-source-check", default=True,
    help="Whether to see first that SRC predicts a text at all; by default, where it has a tokenizer.",
)  # fmt: skip


def writing(command: Function) -> Function:
    """The arguments and options that all commands which write a checkpoint have."""
    for option in (data, _SOURCE_CHECK, _NONFINITE, _RESUME, weights, dst, src):
        command = option(command)
    return command


def backend(more: str = "") -> Callable[[Function], Function]:
    """The option for kernels.

    Args:
        more: for its help.
    """
    about = "Kernels of quantized layers: cpu-exact, cpu-fast, triton or reference; see docs/kernels.md."
    return click.option("--backend", help=about + more)


def plot(what: str) -> Callable[[Function], Function]:
    """The option for a picture of something."""
    return click.option("--plot", type=PATH, help=f"Draw {what}: a .png, .pdf or .svg file.")


class BareJson(Command):
    """Takes ``--json`` without a path for ``--json -``, as it was spelled once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = args.index("--json") if "--json" in args else None
        if place is None:
            return super().parse_args(ctx, args)
        follows = args[place + 1 : place + 2]
        if follows and (follows == ["-"] or not follows[0].startswith("-")):
            try:
                return super().parse_args(ctx, list(args))
            except click.MissingParameter:  # its path was taken for that of --json
                ctx.params.clear()
        note("--json takes a path now, and - for stdout; without one it goes with the next release")
        return super().parse_args(ctx, [*args[:place], "--json=-", *args[place + 1 :]])
