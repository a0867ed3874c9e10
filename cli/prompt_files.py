"""What ``quantkit generate --prompts`` does: continue a file of prompts into another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.base.arguments import as_path
from quantkit.cli.output import print_generated_json, say
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.signals import raise_if_interrupted
from quantkit.formats.output.lines import encode_line
from quantkit.jobs.inference.generate_file import FileJob
from quantkit.jobs.inference.standard_input import STDIN

if TYPE_CHECKING:
    from pathlib import Path

    from quantkit.cli.generate_args import GenerateArgs
    from quantkit.distributed.group import ProcessGroup


def create_file_job(args: GenerateArgs) -> FileJob:
    """Create the job for a file of prompts. Raises `RequestError` for invalid options."""
    # `GenerateArgs.validate` has required both.
    assert args.prompts is not None and args.output is not None
    prompts_path = as_path("prompts", args.prompts)
    output: Path | Callable[[Mapping[str, Any]], None]
    if args.output == STDIN:
        output = partial(_print_line, raw=args.raw)
    else:
        output = as_path("output", args.output)
    return FileJob(
        args.path,
        prompts_path,
        output,
        args.continuation(),
        template=args.template,
        truncate=args.truncate,
        batch_size=args.batch_size,
        resume=args.resume,
        device=args.device,
        dtype=args.dtype,
        backend=args.backend,
        allow_slow=args.allow_slow,
        devices=args.tp,
        weights=args.weights,
        int8_cache=args.int8_cache,
        compiled=args.compiled,
        warm_up=args.warmup,
    )


def run_file(job: FileJob, group: ProcessGroup) -> None:
    """Run the job, with a bar and tokens per second on stderr."""
    from quantkit.runtime.generate import Pace

    pace = Pace(at_once=0)

    def rate() -> str | None:
        """Format the speed so far, for the progress."""
        if pace.rate is None:
            return None
        return f"{pace.rate:.0f} tokens/s"

    with ProgressDisplay(show=group.is_rank0, details=rate) as progress:
        result = job.run(tp=group, progress=progress, counted=pace.add)
    if group.is_rank0:
        # Without a file the results themselves are on stdout.
        say(result.lines(), err=result.output is None)


def _print_line(line: Mapping[str, Any], *, raw: bool) -> None:
    """Print a result as a JSON line."""
    raise_if_interrupted()
    print_generated_json(encode_line(line), raw=raw)
