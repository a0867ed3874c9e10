"""``quantkit generate``."""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli import many_prompts, one_prompt, options
from quantkit.cli.generate_args import STDIN, GenerateArgs
from quantkit.cli.help import Command
from quantkit.cli.output import is_rank0_process, require_stdout
from quantkit.cli.processes import together
from quantkit.runtime.request import BATCH_SIZE, BEAM_SEARCH, MAX_NEW_TOKENS, MAX_SAMPLES, no_beam_search

_OF_FIRST = ("path", "draft", "prompt_file", "prompts", "output")  # may differ from process to process


class _WithPrompt(Command):
    """Says how to give a prompt that was taken for an option, and what is not supported."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name.lstrip("-").replace("-", "_") in BEAM_SEARCH:
                raise no_beam_search(error.option_name) from error
            if error.possibilities:
                raise
            told = error.format_message().rstrip(".")
            raise click.UsageError(f"{told}; for a prompt that begins with a dash: --prompt=TEXT", ctx) from error


@click.command(cls=_WithPrompt)
@click.argument("path", type=options.PATH)
@click.argument("text", metavar="[PROMPT]", required=False)
@click.option("--prompt", metavar="TEXT", help="Instead of PROMPT: for a text that begins with a dash.")
@click.option(
    "--prompt-file", metavar="FILE", shell_complete=options.complete_files,
    help="Instead of PROMPT: a file to read it from; - is stdin.",
)  # fmt: skip
@click.option("--truncate", is_flag=True, help="Cut too long a prompt at its beginning, instead of refusing it.")
@click.option(
    "--prompts", metavar="FILE", shell_complete=options.complete_files,
    help="Instead of PROMPT: JSON lines, each with prompt or messages; - is stdin. See docs/generation.md.",
)  # fmt: skip
@click.option(
    "--output", metavar="FILE", shell_complete=options.complete_files, help="The new file for the results; - is stdout."
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command.")
@click.option("--batch", type=int, help=f"Sequences that run together at most; {BATCH_SIZE} by default.")
@click.option(
    "--template", metavar="NAME", shell_complete=options.complete_files,
    help="Of messages: llama2, llama3, one of the folder's templates by name, or a file *.jinja.",
)  # fmt: skip
@click.option("--echo", is_flag=True, help="Let texts begin with their prompts.")
@click.option("--logprobs", type=int, metavar="K", help="Tell log-probabilities, and the K likeliest tokens.")
@options.sampling(MAX_NEW_TOKENS)
@click.option("-n", "--n", "n", type=int, default=1, help=f"Samples of each prompt, up to {MAX_SAMPLES}; 1 by default.")
@click.option(
    "--logit-bias", type=options.token_bias, metavar="ID=NUMBER", multiple=True,
    help="Add to the logits of a token; may be given several times.",
)  # fmt: skip
@options.dtype
@options.backend("xla", more=" xla runs the whole model on TPUs; see docs/parallel.md.")
@options.device
@click.option("--tp", type=int, help="With xla: devices that share the model; all by default.")
@click.option("--multi-host", is_flag=True, help="With xla: the devices of all hosts, this command run on each.")
@options.int8_cache
@options.compiled
@click.option("--warmup", is_flag=True, help="Compile all steps before the first one, and say how many they are.")
@click.option("--stats", is_flag=True, help="Say in the end how fast it was, and what share of the memory's speed.")
@click.option("--draft", type=options.PATH, help="A smaller model that proposes tokens.")
@click.option("--draft-tokens", type=int, help="Proposed at a time; 4 by default.")
@options.weights
def generate(**given: Any) -> None:
    """Continue a prompt, or many, with the model in PATH.

    PROMPT is the text, or - to read it from stdin. It is taken as the shell gives it: \\n stays a backslash and an n.
    Of a file or stdin the last new line is left out. Special tokens may be spelled out, such as <|eot_id|>.

    The text appears as it is generated; on a terminal a line on stderr says in the end how fast that was. With
    --prompts and --output a whole file is continued, several prompts at a time. Under torchrun all processes share
    the model.
    """
    sampling, others = options.split_sampling(given)
    asked = GenerateArgs(**others, sampling_options=sampling)
    job = None

    def check() -> None:
        nonlocal job
        asked.validate()
        first = is_rank0_process()
        if first and asked.output in (None, STDIN):
            require_stdout()
        if asked.prompts is not None:
            job = many_prompts.job_of(asked)
            if first:
                job.prepare()

    if asked.backend == "xla" and asked.prompts is None:
        asked.validate()
        if not asked.multi_host:  # of several hosts the first one has something to say
            require_stdout()
        one_prompt.say_on_devices(asked)
        return
    alike = {name: value for name, value in given.items() if name not in _OF_FIRST}
    with together(alike, asked.device, check=check) as group:
        if job is not None:
            many_prompts.run(job, group)
        else:
            one_prompt.say(asked, group)
