"""The commands that quantize models, and measure what that needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.base.late import LateModule
from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.options import Command, section
from quantkit.cli.output import note
from quantkit.cli.processes import join_group, require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.report import report_result, report_written
from quantkit.errors import RequestError
from quantkit.jobs.quantize.options import (
    OUTPUT,
    SCHEMES,
    QuantizeOptions,
    is_solved_by_default,
)
from quantkit.tensors.mix import find_mix
from quantkit.tensors.scheme import KEEP, SPELLINGS, QuantScheme

if TYPE_CHECKING:
    from quantkit.distributed import shard
    from quantkit.jobs.output.estimate import Estimate
    from quantkit.tensors.recipe import Recipe
else:
    shard = LateModule("quantkit.distributed.shard")


@options.accept_threads
@click.command(cls=Command)
@options.src
@click.argument("dst", type=options.PATH)
@options.create_job_options(
    QuantizeOptions, only=("calibration", "text_column", "samples", "length", "seed")
)
@options.data
def imatrix(src: str, dst: Path, data: str | None, **params: Any) -> None:
    """Measure the importance of inputs for llama.cpp.

    DST is a new file for its quantizer, or for `quantkit quantize --imatrix`: GGUF if its name ends
    in .gguf, the older form if it ends in .dat.
    """
    outputs = Outputs(data)

    from quantkit.jobs.quantize.imatrix import imatrix as job

    # Options that are not on the command line get the job's own defaults.
    requested = {name: value for name, value in params.items() if value is not None}
    with ProgressDisplay() as progress:
        result = job(src, dst, **requested, progress=progress)
    report_result(outputs, result)


@options.accept_threads
@click.command(cls=Command)
@options.src
@options.dst
@options.create_job_options(QuantizeOptions)
@section(
    SCHEMES,
    click.option(
        "--recipe",
        type=options.PATH,
        metavar="FILE",
        help="JSON with a default scheme and overrides.",
    ),
)
@section(OUTPUT, options.data)
def quantize(data: str | None, **params: Any) -> None:
    """Quantize a model's linear layers to int8 or int4.

    The model in SRC is written to the new folder DST, or to a file DST.gguf. The result is compared
    with SRC before DST appears. If it differs too much, DST is not written and the exit code is 8.
    Under torchrun all processes share the calibration, and rank 0 does the rounding.
    """
    # `build_job_arguments` removes `recipe` from `params`.
    reads = list_input_files(params)
    arguments = build_job_arguments(params)
    require_models(arguments["src"], makes=arguments["dst"])

    from quantkit.jobs.quantize.quantize import quantize as job
    from quantkit.via_transformers.forward import open_to_run

    # GPTQ alone needs a calibration, whose samples the processes divide among them. Without it
    # rank 0 does all the work, on the CPU.
    shared = may_need_gptq(arguments)
    if shared and arguments["device"] != "cpu":
        device = None
    else:
        device = "cpu"
    with join_group({**arguments, "src": None}, device) as group:
        outputs = Outputs(data, reads=reads, makes=arguments["dst"])
        if shared and group.size > 1:
            source = open_to_run(
                arguments["src"],
                arguments["weights"],
                arguments["via"],
                trust_remote_code=arguments["trust_remote_code"],
            )
            shard.require_same_checkpoint(source, group)
        if shared or group.is_rank0:
            with ProgressDisplay(show=group.is_rank0) as progress:

                def begin(estimate: Estimate) -> None:
                    note(estimate.line())
                    progress.expect(estimate.steps)

                result = job(
                    **arguments, group=group, on_estimate=begin, on_note=note, progress=progress
                )
    if group.is_rank0:
        report_written(outputs, result)


def list_input_files(params: dict[str, Any]) -> list[Any]:
    """List the files that `quantkit quantize` reads in addition to the model; None for options
    that are not given.
    """
    return [params[name] for name in ("calibration", "recipe", "certify_text")]


def may_need_gptq(arguments: Mapping[str, Any]) -> bool:
    """Check whether the arguments of `quantkit.quantize` may need GPTQ.

    The job knows the scheme of each layer only once the model is open. It rounds if all processes
    take part without need, but must not solve without them.

    Raises:
        RequestError: if `head` or `embedding` is not a scheme.
    """
    if arguments["method"] is not None:
        return bool(arguments["method"] == "gptq")
    scheme: str | QuantScheme | Recipe | None = arguments["scheme"]
    # The job chooses the schemes for a size, and of a mix, itself. Both may be solved.
    if scheme is None or isinstance(scheme, str):
        return True
    if isinstance(scheme, QuantScheme):
        schemes = [scheme]
    else:
        schemes = [scheme.default]
        for override in scheme.overrides:
            # None keeps a layer's floats.
            if override.scheme is not None:
                schemes.append(override.scheme)
    for name in ("head", "embedding"):
        if arguments[name] not in (None, KEEP):
            schemes.append(QuantScheme.parse(arguments[name]))
    return any(is_solved_by_default(candidate) for candidate in schemes)


def build_job_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """Convert the options of the command to arguments of `quantkit.quantize`; `recipe` is removed
    from them.

    Raises:
        RequestError: unless exactly one of --scheme, --recipe, --target-bits and --max-size is
            given, or if a head goes with a recipe.
    """
    from quantkit.tensors.recipe import Recipe

    path = params.pop("recipe")
    sources = {
        "--scheme": params["scheme"],
        "--recipe": path,
        "--target-bits": params["target_bits"],
        "--max-size": params["max_size"],
    }
    chosen = [name for name, value in sources.items() if value is not None]
    if not chosen:
        raise RequestError(
            f"no scheme is given: use --scheme {SPELLINGS}, --target-bits, --max-size or"
            " --recipe FILE"
        )
    if len(chosen) > 1:
        has_size = params["target_bits"] is not None or params["max_size"] is not None
        if has_size:
            hint = "a size chooses the schemes"
        else:
            hint = "a recipe has its own default scheme"
        raise RequestError(f"{' and '.join(chosen)} are mutually exclusive", hint=hint)
    if path is None:
        scheme = params["scheme"]
        # The job takes the name of a mix, which is not the name of one scheme.
        if scheme is not None and not find_mix(scheme):
            scheme = QuantScheme.parse(scheme)
        return {**params, "scheme": scheme}
    if params["head"] is not None:
        raise RequestError(
            "--head cannot be combined with --recipe",
            hint="add an override for lm_head to the recipe",
        )
    return {**params, "scheme": Recipe.from_json(path)}
