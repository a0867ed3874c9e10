"""``quantkit plan``: the writing commands with the same arguments, told instead of done."""

from __future__ import annotations

import json
from typing import Any

import click

from quantkit.cli.commands import convert as convert_command
from quantkit.cli.quantize import job_arguments
from quantkit.cli.quantize import quantize as quantize_command

_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")


@click.group()
def plan() -> None:
    """Check a conversion or quantization, and say what memory, disk and time it will take."""


def _convert(as_json: bool, **options: Any) -> None:
    from quantkit.jobs.plan import plan_convert

    _print(plan_convert(**options), as_json)


def _quantize(as_json: bool, **options: Any) -> None:
    from quantkit.jobs.plan import plan_quantize

    _print(plan_quantize(**job_arguments(options)), as_json)


def _print(forecast: Any, as_json: bool) -> None:
    click.echo(json.dumps(forecast.to_json(), indent=2) if as_json else "\n".join(forecast.lines()))


for command, planned in ((convert_command, _convert), (quantize_command, _quantize)):
    about = f"What `quantkit {command.name}` with the same arguments would take; nothing is written."
    plan.add_command(click.Command(command.name, params=[*command.params, _JSON], callback=planned, help=about))
