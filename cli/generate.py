"""``quantkit generate``."""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli import many_prompts, one_prompt, options
from quantkit.cli.generate_args import OWN_OPTIONS, STDIN, GenerateArgs
from quantkit.cli.help import Command
from quantkit.cli.output import is_rank0_process, require_stdout
from quantkit.cli.processes import together
from quantkit.runtime.request import BEAM_SEARCH, no_beam_search

_RANK0_OPTIONS = ("path", "draft", "prompt_file", "prompts", "output")  # may differ from process to process


class _WithPrompt(Command):
    """Explains how to give a prompt that was parsed as an option, and what is not supported."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name.lstrip("-").replace("-", "_") in BEAM_SEARCH:
                raise no_beam_search(error.option_name) from error
            if error.possibilities:
                raise
            problem = error.format_message().rstrip(".")
            raise click.UsageError(f"{problem}; for a prompt that begins with a dash: --prompt=TEXT", ctx) from error


@click.command(cls=_WithPrompt)
@click.argument("path", type=options.PATH)
@click.argument("text", metavar="[PROMPT]", required=False)
@options.of_job(GenerateArgs, OWN_OPTIONS)
def generate(**given: Any) -> None:
    """Continue a prompt, or many, with the model in PATH.

    PROMPT is the text, or - to read it from stdin. It is used as the shell passes it: \\n stays a backslash and an n.
    The last newline of a file or of stdin is dropped. Special tokens may be spelled out, such as <|eot_id|>.

    The text appears as it is generated; on a terminal, a line on stderr shows the speed at the end. With --prompts and
    --output all prompts of a file are continued, several at a time. Under torchrun all processes share the model.
    """
    sampling, others = options.split_sampling(given)
    args = GenerateArgs(**others, sampling_options=sampling)
    job = None

    def check() -> None:
        nonlocal job
        args.validate()
        rank0 = is_rank0_process()
        if rank0 and args.output in (None, STDIN):
            require_stdout()
        if args.prompts is not None:
            job = many_prompts.job_of(args)
            if rank0:
                job.prepare()

    if args.backend == "xla" and args.prompts is None:
        args.validate()
        if not args.multi_host:  # with several hosts, only the first prints
            require_stdout()
        one_prompt.show_on_devices(args)
        return
    shared = {name: value for name, value in given.items() if name not in _RANK0_OPTIONS}
    with together(shared, args.device, check=check) as group:
        if job is not None:
            many_prompts.run(job, group)
        else:
            one_prompt.show(args, group)
