"""``quantkit quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.commands import done, writing
from quantkit.cli.processes import together
from quantkit.cli.progress import bar
from quantkit.errors import RequestError
from quantkit.jobs.defaults import ACTIVATION_MEMORY, MOST_LENGTH, SAMPLES, SEED


@click.command()
@writing
@click.option("--scheme", help="int8, int4-g32, int4-g64 or int4-g128; -asym for zero points.")
@click.option("--head", metavar="SCHEME", help="Of the output head too, which keeps its floats by default.")
@click.option("--plan", type=click.Path(path_type=Path), help="JSON with a default scheme and overrides.")
@click.option(
    "--method", type=click.Choice(["rtn", "gptq"]), default="rtn", show_default=True, help="Rounding or GPTQ."
)
@click.option("--calibration", help="Text for GPTQ: a file, or a hub dataset owner/name:config:split.")
@click.option("--samples", type=int, help=f"Calibration samples; {SAMPLES} by default.")
@click.option("--length", type=int, help=f"Tokens in each; the model's context by default, {MOST_LENGTH} at most.")
@click.option("--seed", type=int, help=f"Of the samples' places in the text; {SEED} by default.")
@click.option("--thorough", is_flag=True, help="Slower GPTQ, closer to the source.")
@click.option(
    "--activation-memory",
    type=float,
    metavar="GB",
    help=f"Calibration activations held in memory, {ACTIVATION_MEMORY / 1e9:g} by default; more go to DST's disk.",
)
@click.option("--device", help="Where GPTQ computes: cpu or cuda; a GPU if there is one.")
@click.option("--accept-quality-loss", is_flag=True, help="Keep a result that is too far from its source.")
@click.option("--keep", multiple=True, metavar="PATTERN", help="Layers to keep as floats, a glob; repeatable.")
@click.option("--strict", is_flag=True, help="Fail if a layer's shape does not fit the scheme.")
def quantize(**options: Any) -> None:
    """Quantize the linear layers of the model in SRC into the new folder DST.

    The result is held against SRC before it gets its name; one that is too far from it
    exits with 8. Under torchrun the calibration is shared by all processes; rounding is the first one's work.
    """
    from quantkit.distributed.shard import require_same_checkpoint
    from quantkit.formats.detect import open_checkpoint
    from quantkit.jobs.quantize import quantize as job

    arguments = job_arguments(options)
    shared = arguments["method"] == "gptq"
    device = None if shared and arguments["device"] != "cpu" else "cpu"
    with together({**arguments, "src": None}, device) as group, bar("quantize", show=group.first) as progress:
        if shared and group.size > 1:
            require_same_checkpoint(open_checkpoint(arguments["src"], arguments["weights"]), group)
        notes = job(**arguments, group=group, progress=progress) if shared or group.first else []
    if group.first:
        done(arguments["dst"], notes)


def job_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """What the command's options are called in `quantkit.quantize`.

    Raises:
        RequestError: unless either a scheme or a plan is given, or if a head goes with a plan.
    """
    from quantkit.tensors.scheme import Override, QuantScheme, Recipe

    scheme, path, head = options.pop("scheme"), options.pop("plan"), options.pop("head")
    if (scheme is None) == (path is None):
        raise RequestError("give one of --scheme and --plan")
    if head is not None:
        if scheme is None:
            raise RequestError("--head goes with --scheme", hint="a plan names lm_head among its overrides")
        scheme = Recipe(QuantScheme.parse(scheme), (Override("lm_head", QuantScheme.parse(head)),))
    if options["activation_memory"] is not None:
        options["activation_memory"] *= 1e9
    return {**options, "scheme": scheme if path is None else Recipe.from_json(path)}
