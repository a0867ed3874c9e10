"""``quantkit generate --prompts``: the prompts of a file into a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from quantkit.arguments import as_path
from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.generate_args import STDIN, GenerateArgs
from quantkit.cli.output import say
from quantkit.cli.progress import ProgressDisplay
from quantkit.formats.output.lines import encoded
from quantkit.jobs.generate_file import FileJob, Runtime

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup


def job_of(asked: GenerateArgs) -> FileJob:
    """What is to be done.

    Raises:
        RequestError: if it makes no sense.
    """
    assert asked.prompts is not None and asked.output is not None
    output = _show if asked.output == STDIN else as_path("output", asked.output)
    runtime = Runtime(
        device=asked.device, dtype=asked.dtype, backend=asked.backend, devices=asked.tp, weights=asked.weights,
        int8_cache=asked.int8_cache, compiled=asked.compiled, warm_up=asked.warmup,
    )  # fmt: skip
    return FileJob(
        asked.path, asked.prompts, output, asked.options(), runtime,
        template=asked.template, truncate=asked.truncate, batch_size=asked.batch_size, resume=asked.resume,
    )  # fmt: skip


def run(job: FileJob, group: ProcessGroup) -> None:
    """Do it, with a bar and tokens a second on stderr."""
    pace = _Pace()
    with ProgressDisplay(show=group.is_rank0, beside=pace.told) as progress:
        made = job.run(tp=group, progress=progress, counted=pace.add)
    if group.is_rank0:
        say(made.lines(), err=made.output is None)


def _show(line: Mapping[str, Any]) -> None:
    raise_if_interrupted()
    click.echo(encoded(line), nl=False)


class _Pace:
    """Tokens a second over all sequences, from the first step on."""

    def __init__(self) -> None:
        self._tokens, self._begun = 0, 0.0

    def add(self, tokens: int) -> None:
        self._begun = self._begun or time.monotonic()
        self._tokens += tokens

    def told(self) -> str | None:
        """The same for people, once there is something to tell."""
        spent = time.monotonic() - self._begun
        return f"{self._tokens / spent:.0f} tokens/s" if self._begun and spent > 1 else None
