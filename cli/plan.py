"""``quantkit plan``: what commands would take: those that write, and generation on a TPU slice."""

from __future__ import annotations

import json
from typing import Any

import click

from quantkit.cli.commands import convert as convert_command
from quantkit.cli.dtypes import float_type
from quantkit.cli.quantize import job_arguments
from quantkit.cli.quantize import quantize as quantize_command

_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")


class _Group(click.Group):
    """Without the name of a command it is generation that is meant: ``quantkit plan DIR --target v5e-16``."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["generate", *args]
        return super().parse_args(context, args)


@click.group(cls=_Group)
def plan() -> None:
    """Check a conversion or quantization, and say what memory, disk and time it will take.

    `quantkit plan DIR --target v5e-16` does the same for generation on a TPU slice.
    """


@plan.command()
@click.argument("model")
@click.option("--target", required=True, metavar="SLICE", help="Kind and number of chips: v5e-16, v6e-8, ...")
@click.option("--batch", type=int, default=1, show_default=True, help="Texts at once.")
@click.option("--context", type=int, help="Tokens of a text, prompt included; all that the model can by default.")
@click.option("--scheme", help="Of a model without weights, such as int4-g128; floats by default.")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Of activations; the model's own by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def generate(
    model: str, target: str, batch: int, context: int | None, scheme: str | None, dtype: str | None, as_json: bool
) -> None:
    """What each chip of a TPU slice would hold and exchange, from the slice's own compiler; no TPU is needed.

    MODEL is a folder, one with nothing but a config.json, or the name of a shape such as llama-2-70b. It takes
    minutes. A model that does not fit is an error.
    """
    from quantkit.evals.synthetic import shaped
    from quantkit.xla.require import require_compiler

    checkpoint = shaped(model, scheme)
    require_compiler()
    from quantkit.xla.estimate import estimate_slice

    _print(estimate_slice(checkpoint, target, batch=batch, context=context, dtype=float_type(dtype)), as_json)


def _convert(as_json: bool, **options: Any) -> None:
    from quantkit.jobs.estimate import estimate_convert

    _print(estimate_convert(**options), as_json)


def _quantize(as_json: bool, **options: Any) -> None:
    from quantkit.jobs.estimate import estimate_quantize

    _print(estimate_quantize(**job_arguments(options)), as_json)


def _print(forecast: Any, as_json: bool) -> None:
    click.echo(json.dumps(forecast.to_json(), indent=2) if as_json else "\n".join(forecast.lines()))


for command, planned in ((convert_command, _convert), (quantize_command, _quantize)):
    about = f"What `quantkit {command.name}` with the same arguments would take; nothing is written."
    plan.add_command(click.Command(command.name, params=[*command.params, _JSON], callback=planned, help=about))
