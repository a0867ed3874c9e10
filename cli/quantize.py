"""``quantkit quantize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.commands import finish
from quantkit.cli.files import Outputs
from quantkit.cli.help import Command, section
from quantkit.cli.output import note
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.jobs.quantize_options import OUTPUT, SCHEMES, QuantizeOptions
from quantkit.tensors.scheme import SPELLINGS, QuantScheme

if TYPE_CHECKING:
    from quantkit.tensors.recipe import Recipe


@click.command(cls=Command)
@options.src
@options.dst
@options.of_job(QuantizeOptions)
@section(
    SCHEMES,
    click.option("--recipe", type=options.PATH, metavar="FILE", help="JSON with a default scheme and overrides."),
    click.option("--plan", type=options.PATH, hidden=True, help="The old name of --recipe."),
)
@section(OUTPUT, options.data)
def quantize(data: str | None, **given: Any) -> None:
    """Quantize a model's linear layers to int8 or int4.

    The model in SRC is written to the new folder DST, or to a file DST.gguf. The result is compared with SRC before
    DST appears. If it differs too much, DST is not written and the exit code is 8. Under torchrun all processes share
    the calibration, and rank 0 does the rounding.
    """
    reads = given["calibration"], given["recipe"], given["plan"], given["certify_text"]
    arguments = job_arguments(given)
    require_models(arguments["src"], makes=arguments["dst"])

    from quantkit.distributed.shard import require_same_checkpoint
    from quantkit.formats.detect import open_checkpoint
    from quantkit.jobs.quantize import quantize as job

    shared = arguments["method"] != "rtn" and (arguments["method"] == "gptq" or _has_int4(arguments["scheme"]))
    device = None if shared and arguments["device"] != "cpu" else "cpu"
    with together({**arguments, "src": None}, device) as group:
        outputs = Outputs(data, reads=reads, makes=arguments["dst"])
        if shared and group.size > 1:
            require_same_checkpoint(open_checkpoint(arguments["src"], arguments["weights"]), group)
        if shared or group.is_rank0:
            with ProgressDisplay(show=group.is_rank0) as progress:
                made = job(
                    **arguments, group=group, on_estimate=lambda estimate: note(estimate.line()), progress=progress
                )
    if group.is_rank0:
        finish(made, outputs)


def _has_int4(scheme: QuantScheme | Recipe | None) -> bool:
    """Whether some layer may get int4, which GPTQ solves unless another method is requested; schemes that are chosen
    for a size may be int4."""
    if scheme is None:
        return True
    named = [scheme] if isinstance(scheme, QuantScheme) else [scheme.default, *(one.scheme for one in scheme.overrides)]
    return any(one is not None and one.bits == 4 for one in named)


def job_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `quantkit.quantize` for the options of the command.

    Raises:
        RequestError: unless there is one of a scheme, a recipe and a size, or if a head goes with a recipe.
    """
    from quantkit.tensors.recipe import Recipe

    path, old = given.pop("recipe"), given.pop("plan")
    if old is not None:
        note("--plan is called --recipe now; the old name goes with the next release")
        if path is not None:
            raise RequestError("--plan is the old name of --recipe; give one of them")
        path = old
    sources = {
        "--scheme": given["scheme"], "--recipe": path, "--target-bits": given["target_bits"],
        "--max-size": given["max_size"],
    }  # fmt: skip
    chosen = [name for name, value in sources.items() if value is not None]
    if not chosen:
        raise RequestError(f"give a scheme: --scheme {SPELLINGS}; or --target-bits, --max-size or --recipe FILE")
    if len(chosen) > 1:
        sized = given["target_bits"] is not None or given["max_size"] is not None
        hint = "a size chooses the schemes" if sized else "a recipe's default is its scheme"
        raise RequestError(f"{' and '.join(chosen)} exclude each other", hint=hint)
    if path is None:
        return {**given, "scheme": None if given["scheme"] is None else QuantScheme.parse(given["scheme"])}
    if given["head"] is not None:
        raise RequestError("--head does not go with --recipe", hint="a recipe names lm_head among its overrides")
    return {**given, "scheme": Recipe.from_json(path)}
