"""``quantkit generate --prompts``: continue the prompts of a file into another file."""

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
from quantkit.jobs.generate_file import FileJob

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup


def job_of(args: GenerateArgs) -> FileJob:
    """The job for the requested options.

    Raises:
        RequestError: for invalid options.
    """
    assert args.prompts is not None and args.output is not None
    return FileJob(
        args.path, as_path("prompts", args.prompts), _print if args.output == STDIN else as_path("output", args.output),
        args.continuation(), template=args.template, truncate=args.truncate, batch_size=args.batch_size,
        resume=args.resume, device=args.device, dtype=args.dtype, backend=args.backend, devices=args.tp,
        weights=args.weights, int8_cache=args.int8_cache, compiled=args.compiled, warm_up=args.warmup,
    )  # fmt: skip


def run(job: FileJob, group: ProcessGroup) -> None:
    """Run the job, with a bar and tokens per second on stderr."""
    tokens, began = 0, 0.0

    def count(new: int) -> None:
        nonlocal tokens, began
        began = began or time.monotonic()  # the first step is not timed
        tokens += new

    def rate() -> str | None:
        seconds = time.monotonic() - began
        return f"{tokens / seconds:.0f} tokens/s" if began and seconds > 1 else None

    with ProgressDisplay(show=group.is_rank0, details=rate) as progress:
        made = job.run(tp=group, progress=progress, counted=count)
    if group.is_rank0:
        say(made.lines(), err=made.output is None)


def _print(line: Mapping[str, Any]) -> None:
    raise_if_interrupted()
    click.echo(encoded(line), nl=False)
