"""``quantkit plan``: what commands would take: those that write, and generation on a TPU slice."""

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
    """Without the name of a command it is generation that is meant: ``quantkit plan DIR --target v5e-16``."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["generate", *args]
        return super().parse_args(context, args)


@click.group(cls=_Group)
def plan() -> None:
    """Say what memory, disk and time a command would take.

    The checks of the command are made; nothing is written. `quantkit plan DIR --target v5e-16` does the same for
    generation on a TPU slice.
    """


@plan.command(cls=options.BareJson)
@click.argument("model", shell_complete=options.complete_files)
@click.option("--target", required=True, metavar="SLICE", help="Kind and number of chips: v5e-16, v6e-8, ...")
@click.option("--batch", type=int, default=1, show_default=True, help="Texts at once.")
@click.option("--context", type=int, help="Tokens of a text, prompt included; all that the model can by default.")
@click.option(
    "--scheme", type=options.Scheme(), help="Of a model without weights, such as int4-g128; floats by default."
)
@options.dtype
@options.data
def generate(
    model: str, target: str, batch: int, context: int | None, scheme: str | None, dtype: FloatName | None,
    data: str | None,
) -> None:  # fmt: skip
    """Say what each chip of a TPU slice would hold and exchange.

    The slice's own compiler says it; no TPU is needed. MODEL is a folder, one with nothing but a config.json, or the
    name of a shape such as llama-2-70b. It takes minutes. A model that does not fit is an error.
    """
    from quantkit.evals.synthetic import shaped
    from quantkit.jobs.plan import generate as job

    outputs = Outputs(data)
    _tell(job(shaped(model, scheme), target, batch=batch, context=context, dtype=dtype), outputs)


def _convert(data: str | None, **given: Any) -> None:
    require_models(given["src"], makes=given["dst"])

    from quantkit.jobs.plan import convert as job

    outputs = Outputs(data, makes=given["dst"])
    _tell(job(**given), outputs)


def _quantize(data: str | None, **given: Any) -> None:
    reads = given["calibration"], given["recipe"], given["plan"], given["certify_text"]
    outputs = Outputs(data, reads=reads, makes=given["dst"])
    arguments = job_arguments(given)
    require_models(arguments["src"], makes=arguments["dst"])

    from quantkit.jobs.plan import quantize as job

    _tell(job(**arguments), outputs)


def _tell(estimate: Any, outputs: Outputs) -> None:
    outputs.write(estimate.to_json(), tell=lambda: outputs.say(estimate.lines()))


for command, planned in ((convert_command, _convert), (quantize_command, _quantize)):
    about = f"Say what `quantkit {command.name}` with the same arguments would take.\n\nNothing is written."
    plan.add_command(options.BareJson(command.name, params=command.params, callback=planned, help=about))
