"""The commands that estimate what other commands take."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.convert import convert
from quantkit.cli.files import Outputs
from quantkit.cli.processes import require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.quantize import build_job_arguments, list_input_files, quantize
from quantkit.cli.refine import refine
from quantkit.cli.report import report_result
from quantkit.errors import RequestError


class _PlanGroup(click.Group):
    """Plans generation if no command is named: ``quantkit plan DIR --target v5e-16``."""

    context_class = options.Context

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        # A first word that is no command is a model. One with a dash may be --help.
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["generate", *args]
        return super().parse_args(context, args)


@click.group(cls=_PlanGroup)
def plan() -> None:
    """Estimate the memory, disk and time of a command.

    Makes the checks of the command and writes nothing. `quantkit plan DIR --target v5e-16` does the
    same for generation on a TPU slice, and `quantkit plan refine DIR --target v5e-64` for training
    scales.
    """


@options.accept_threads
@plan.command("generate", cls=options.Command)
@click.argument("model", shell_complete=options.complete_files)
@click.option(
    "--target", required=True, metavar="SLICE", help="Kind and number of chips: v5e-16, v6e-8, ..."
)
@click.option("--batch", type=int, default=1, show_default=True, help="Batch size.")
@click.option(
    "--context",
    type=int,
    help="Tokens of a sequence with its prompt. Default: the model's context.",
)
@click.option(
    "--scheme",
    type=options.Scheme(),
    help="Scheme of a model without weights, such as int4-g128. Default: unquantized.",
)
@options.dtype
@options.data
def _plan_generate(model: str, scheme: str | None, data: str | None, **params: Any) -> None:
    """Show what each chip of a TPU slice would hold and exchange.

    The compiler for the slice computes it; no TPU is needed. MODEL is a folder, a folder with only
    a config.json, or the name of a shape such as llama-2-70b. This takes minutes. A model that does
    not fit is an error.
    """
    from quantkit.evals.synthetic import open_shape_checkpoint
    from quantkit.jobs.plan import generate as job

    report_result(Outputs(data), job(open_shape_checkpoint(model, scheme), **params))


def _plan_convert(data: str | None, **params: Any) -> None:
    """Estimate what `quantkit convert` takes."""
    require_models(params["src"], makes=params["dst"])

    from quantkit.jobs.plan import convert as job

    report_result(Outputs(data, makes=params["dst"]), job(**params))


def _plan_quantize(data: str | None, **params: Any) -> None:
    """Estimate what `quantkit quantize` takes."""
    # `build_job_arguments` removes some of the options that name files from `params`.
    outputs = Outputs(data, reads=list_input_files(params), makes=params["dst"])
    arguments = build_job_arguments(params)
    require_models(arguments["src"], makes=arguments["dst"])

    from quantkit.jobs.plan import quantize as job

    report_result(outputs, job(**arguments))


def _plan_refine(
    data: str | None,
    quantized: Path,
    dst: Path | None,
    target: str | None,
    scheme: str | None,
    **params: Any,
) -> None:
    """Estimate what `quantkit refine` takes, on this machine or on a TPU slice."""
    if target is not None:
        _plan_training(data, quantized, target, scheme, {**params, "dst": dst})
        return
    if params["against"] is None:
        raise RequestError(
            "--against or --target is required",
            hint="--against SRC for this machine, or --target SLICE for a TPU slice",
        )
    if scheme is not None:
        raise RequestError("--scheme requires --target")
    require_models(quantized, params["against"], makes=dst)

    from quantkit.jobs.plan import refine as job

    if dst is not None:
        output = dst
    else:
        output = params["delta"]
    outputs = Outputs(data, reads=[params["calibration"]], makes=output)
    report_result(outputs, job(quantized, dst, **params))


def _plan_training(
    data: str | None, model: Path, target: str, scheme: str | None, params: dict[str, Any]
) -> None:
    """Estimate a step of training on a TPU slice. Raises `RequestError` for options of `refine`
    that a slice does not use.
    """
    used_params = {name: params.pop(name) for name in ("mesh", "batch", "length", "train_norms")}
    # The callback gets the values of all options of `refine`. An option has None or False if it is
    # not on the command line, except for this flag.
    defaults = {"source_check": True}
    for name, value in params.items():
        if value not in (None, defaults.get(name, False)):
            raise RequestError(f"--{name.replace('_', '-')} cannot be combined with --target")

    from quantkit.evals.synthetic import open_shape_checkpoint
    from quantkit.formats.checkpoint import schemes
    from quantkit.jobs.plan import training as job

    outputs = Outputs(data)
    checkpoint = open_shape_checkpoint(model, scheme)
    if not schemes(checkpoint):
        raise RequestError("the model is not quantized", hint="give --scheme")
    with ProgressDisplay() as progress:
        estimate = job(checkpoint, target, **used_params, progress=progress)
    report_result(outputs, estimate)


_ABOUT = "Estimate `quantkit {}` with the same arguments.\n\nNothing is written."
_ABOUT_SLICES = """

With --target, show what a step holds, computes and exchanges on each chip of a TPU slice, by mesh.
The compiler for the slice computes it; no TPU is needed. QUANTIZED may be a folder with only a
config.json, or the name of a shape such as llama-2-70b; the float model is not read. Each mesh
takes minutes; --mesh chooses one."""


def _refine_params() -> list[click.Parameter]:
    """Copy the parameters of `refine`, with its float model optional, and add those of a slice."""
    # `refine` keeps its own parameters, of which --against is required.
    params = [copy(param) for param in refine.params if param.name != "threads"]
    for param in params:
        param.required = param.required and param.name != "against"
    target = click.Option(
        ["--target"],
        metavar="SLICE",
        help="Kind and number of chips: v5e-64, 2xv5e-64, v4-128, ...",
    )
    scheme = click.Option(
        ["--scheme"],
        type=options.Scheme(),
        help="With --target: scheme of a model without weights.",
    )
    return [*params, target, scheme]


def _create_plan(
    name: str, params: list[click.Parameter], callback: Callable[..., None], more: str = ""
) -> options.Command:
    """Create the plan of a command; `more` is added to its help."""
    about = _ABOUT.format(name) + more
    return options.Command(name, params=params, callback=callback, help=about)


# Each plan takes the parameters of its command, so the same arguments work with both. Those of
# `convert` and `quantize` include --threads.
plan.add_command(_create_plan("convert", convert.params, _plan_convert))
plan.add_command(_create_plan("quantize", quantize.params, _plan_quantize))
plan.add_command(
    options.accept_threads(_create_plan("refine", _refine_params(), _plan_refine, _ABOUT_SLICES))
)
