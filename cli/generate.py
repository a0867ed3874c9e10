"""``quantkit generate``: its options, and whether they go together; without torch."""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli import options, prompts
from quantkit.cli.generate_args import GenerateArgs
from quantkit.cli.options import Command
from quantkit.cli.output import is_rank0_process, require_stdout
from quantkit.cli.processes import join_group
from quantkit.jobs.inference.standard_input import STDIN
from quantkit.runtime.request import (
    BEAM_SEARCH,
    MAX_NEW_TOKENS,
    MAX_SAMPLES,
    create_beam_search_error,
)

# Each process may have its models in another folder, and rank 0 alone reads prompts and writes
# results. All other options must be the same in all processes.
_RANK0_OPTIONS = (
    "path",
    "draft",
    "prompt_file",
    "prompts",
    "output",
)

_OWN_OPTIONS = {
    "template": click.option(
        "--template",
        metavar="NAME",
        shell_complete=options.complete_files,
        help=(
            "Chat template for messages: llama2, llama3, one of the folder's by name, or a file"
            " *.jinja."
        ),
    ),
    "max_new_tokens": options.max_new_tokens(MAX_NEW_TOKENS),
    "n": click.option(
        "-n",
        "--n",
        "n",
        type=int,
        default=1,
        help=f"Number of samples per prompt, up to {MAX_SAMPLES}. Default: 1.",
    ),
    "logit_bias": click.option(
        "--logit-bias",
        type=options.parse_token_bias,
        metavar="ID=NUMBER",
        multiple=True,
        help="Add to the logits of a token; repeatable.",
    ),
    "backend": options.backend(
        "xla",
        "transformers",
        extra_help=(
            " xla runs the whole model on TPUs; see docs/parallel.md. transformers runs whatever it"
            " knows, slowly."
        ),
    ),
}
"""Options that differ from those that other commands have under the same name, or that need more
than a help line.
"""


class _WithPrompt(Command):
    """Explains how to give a prompt that was parsed as an option, and what is not supported."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # Users know these options from other tools. The error says that quantkit has no beam
            # search, instead of suggesting another spelling.
            if error.option_name.lstrip("-").replace("-", "_") in BEAM_SEARCH:
                raise create_beam_search_error(error.option_name) from error
            # A misspelled option, for which click suggests the right spelling.
            if error.possibilities:
                raise
            problem = error.format_message().rstrip(".")
            raise click.UsageError(
                f"{problem}; for a prompt that begins with a dash: --prompt=TEXT", ctx
            ) from error


@options.accept_threads
@click.command(cls=_WithPrompt)
@click.argument("path", type=options.PATH)
@click.argument("text", metavar="[PROMPT]", required=False)
@options.create_job_options(GenerateArgs, _OWN_OPTIONS)
def generate(**params: Any) -> None:
    """Continue a prompt, or many, with the model in PATH.

    PROMPT is the text, or - to read it from stdin. It is used as the shell passes it: \\n stays a
    backslash and an n. The last newline of a file or of stdin is dropped. Special tokens may be
    spelled out, such as <|eot_id|>.

    The text appears as it is generated. On a terminal, control characters in it are spelled, and a
    line on stderr shows the speed at the end. With --prompts and --output all prompts of a file are
    continued, several at a time. Under torchrun all processes share the model.
    """
    sampling, other_params = options.split_sampling(params)
    args = GenerateArgs(**other_params, sampling_options=sampling)
    job = None

    def check() -> None:
        """Raise a `RequestError` for options that are wrong, and prepare a job for files."""
        nonlocal job
        args.validate()
        is_rank0 = is_rank0_process()
        if is_rank0 and args.output in (None, STDIN):
            require_stdout()
        if args.prompts is not None:
            # Files of prompts need the formats of batch files, which one prompt does not.
            from quantkit.cli.prompt_files import create_file_job

            job = create_file_job(args)
            if is_rank0:
                job.prepare()

    if args.backend == "xla" and args.prompts is None:
        args.validate()
        # With several hosts only the first one prints, and the runtime tells later which that is.
        if not args.multi_host:
            require_stdout()
        prompts.show_by_xla(args)
        return
    common_options = {name: value for name, value in params.items() if name not in _RANK0_OPTIONS}
    with join_group(common_options, args.device, check=check) as group:
        if job is not None:
            from quantkit.cli.prompt_files import run_file

            run_file(job, group)
        else:
            prompts.show_continuation(args, group)
