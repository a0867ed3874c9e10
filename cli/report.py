"""Report what a job has returned: its lines, its notes and its JSON."""

from __future__ import annotations

from typing import Any

from quantkit.cli.files import Outputs
from quantkit.cli.hints import spell
from quantkit.cli.output import mention, note


def report_result(outputs: Outputs, result: Any) -> None:
    """Write a job's result as JSON if that was requested, and print its lines."""
    outputs.write(result.to_json(), show=lambda: outputs.say(result.lines()))


def report_written(outputs: Outputs, result: Any) -> None:
    """Report what a command has written, with the notes on it."""
    for line in result.notes:
        note(line)
    # Its lines go to stderr if JSON goes to stdout, so programs can read that.
    for line in result.lines():
        mention(spell(line), err=outputs.json_on_stdout)
    outputs.write(result.to_json())
