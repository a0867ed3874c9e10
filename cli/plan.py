"""``quantkit plan``: the memory, disk and time that commands would take, and generation on a TPU slice."""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.commands import convert as convert_command
from quantkit.cli.files import Outputs
from quantkit.cli.processes import require_models
from quantkit.cli.quantize import job_arguments
from quantkit.cli.quantize import quantize as quantize_command
from quantkit.tensors.dtypes import FloatName


class _Group(click.Group):
    """Without the name of a command, plans generation: ``quantkit plan DIR --target v5e-16``."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["generate", *args]
        return super().parse_args(context, args)


@click.group(cls=_Group)
def plan() -> None:
    """Estimate the memory, disk and time of a command.

    Makes the checks of the command and writes nothing. `quantkit plan DIR --target v5e-16` does the same for
    generation on a TPU slice.
    """


@plan.command(cls=options.BareJson)
@click.argument("model", shell_complete=options.complete_files)
@click.option("--target", required=True, metavar="SLICE", help="Kind and number of chips: v5e-16, v6e-8, ...")
@click.option("--batch", type=int, default=1, show_default=True, help="Number of sequences.")
@click.option("--context", type=int, help="Tokens of a sequence with its prompt. Default: the model's context.")
@click.option(
    "--scheme", type=options.Scheme(), help="Scheme of a model without weights, such as int4-g128. Default: floats."
)
@options.dtype
@options.data
def generate(
    model: str, target: str, batch: int, context: int | None, scheme: str | None, dtype: FloatName | None,
    data: str | None,
) -> None:  # fmt: skip
    """Show what each chip of a TPU slice would hold and exchange.

    The compiler for the slice computes it; no TPU is needed. MODEL is a folder, a folder with only a config.json, or
    the name of a shape such as llama-2-70b. This takes minutes. A model that does not fit is an error.
    """
    from quantkit.evals.synthetic import shaped
    from quantkit.jobs.plan import generate as job

    outputs = Outputs(data)
    _show(job(shaped(model, scheme), target, batch=batch, context=context, dtype=dtype), outputs)


def _convert(data: str | None, **given: Any) -> None:
    require_models(given["src"], makes=given["dst"])

    from quantkit.jobs.plan import convert as job

    outputs = Outputs(data, makes=given["dst"])
    _show(job(**given), outputs)


def _quantize(data: str | None, **given: Any) -> None:
    reads = given["calibration"], given["recipe"], given["plan"], given["certify_text"]
    outputs = Outputs(data, reads=reads, makes=given["dst"])
    arguments = job_arguments(given)
    require_models(arguments["src"], makes=arguments["dst"])

    from quantkit.jobs.plan import quantize as job

    _show(job(**arguments), outputs)


def _show(estimate: Any, outputs: Outputs) -> None:
    outputs.write(estimate.to_json(), show=lambda: outputs.say(estimate.lines()))


for command, planned in ((convert_command, _convert), (quantize_command, _quantize)):
    about = f"Estimate `quantkit {command.name}` with the same arguments.\n\nNothing is written."
    plan.add_command(options.BareJson(command.name, params=command.params, callback=planned, help=about))
