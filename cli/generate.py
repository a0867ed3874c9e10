"""``quantkit generate``: its options, and whether they go together; without torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.base.option_fields import OTHER, option
from quantkit.cli import options, prompts
from quantkit.cli.options import RUN, Command
from quantkit.cli.output import is_rank0_process, require_stdout
from quantkit.cli.processes import require_models, together
from quantkit.errors import RequestError
from quantkit.formats.detect import is_model_folder
from quantkit.jobs.inference.prompts_file import STDIN, parse_request_options
from quantkit.runtime.request import (
    BATCH_SIZE,
    BEAM_SEARCH,
    MAX_NEW_TOKENS,
    MAX_SAMPLES,
    no_beam_search,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.tensors.dtypes import FloatName

if TYPE_CHECKING:
    from quantkit.formats.detect import WeightKind

_USAGE = (
    'put it after the folder: quantkit generate DIR "Once upon a time"; or name a file:'
    " --prompt-file FILE, - for stdin; or one of many prompts: --prompts FILE.jsonl"
)
_PROMPT = "Prompt"
_MANY = "A file of prompts"
_SAMPLING = "Sampling"
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
        help=f"Samples of each prompt, up to {MAX_SAMPLES}. Default: 1.",
    ),
    "logit_bias": click.option(
        "--logit-bias",
        type=options.token_bias,
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


@dataclass(frozen=True)
class GenerateArgs:
    """The requested options; None, False and empty if not given."""

    path: Path
    text: str | None
    prompt: str | None = option(
        _PROMPT, "Instead of PROMPT: for a text that begins with a dash.", metavar="TEXT"
    )
    prompt_file: str | None = option(
        _PROMPT, "Instead of PROMPT: a file to read it from; - is stdin.", "file", metavar="FILE"
    )
    truncate: bool = option(
        _PROMPT,
        "Cut off the beginning of a prompt that is too long, instead of failing.",
        bool,
        default=False,
    )
    prompts: str | None = option(
        _MANY,
        "Instead of PROMPT: JSON lines, each with prompt or messages; - is stdin. See"
        " docs/generation.md.",
        "file",
        metavar="FILE",
    )
    output: str | None = option(
        _MANY, "The new file for the results; - is stdout.", "file", metavar="FILE"
    )
    resume: bool = option(_MANY, default=False)
    batch: int | None = option(
        _MANY, f"Maximum number of sequences that run together. Default: {BATCH_SIZE}.", int
    )
    template: str | None = option(_MANY)
    echo: bool = option(_MANY, "Begin each text with its prompt.", bool, default=False)
    logprobs: int | None = option(
        _MANY,
        "Write log-probabilities, and the K most likely tokens of each position.",
        int,
        metavar="K",
    )
    max_new_tokens: int = option(_SAMPLING, default=MAX_NEW_TOKENS)
    sampling_options: SamplingOptions | None = option(_SAMPLING)
    stop: tuple[str, ...] = option(_SAMPLING, default=())
    n: int = option(_SAMPLING, default=1)
    logit_bias: tuple[tuple[int, float], ...] = option(_SAMPLING, default=())
    draft: Path | None = option(options.SPECULATION)
    draft_tokens: int | None = option(options.SPECULATION)
    dtype: FloatName | None = option(RUN)
    # click has checked the name, which may be a runtime such as xla in addition to the kernels.
    backend: Any = option(RUN)
    allow_slow: bool = option(RUN, default=False)
    trust_remote_code: bool = option(RUN, default=False)
    device: str | None = option(RUN)
    tp: int | None = option(
        RUN, "With xla: number of devices that share the model. Default: all.", int
    )
    multi_host: bool = option(
        RUN,
        "With xla: use the devices of all hosts; run this command on each host.",
        bool,
        default=False,
    )
    int8_cache: bool = option(RUN, default=False)
    compiled: bool | None = option(RUN)
    warmup: bool = option(
        RUN,
        "Compile steps of all sizes before the first request, and print how many there are.",
        bool,
        default=False,
    )
    stats: bool = option(
        RUN,
        "At the end, print the speed and the share of the memory bandwidth used.",
        bool,
        default=False,
    )
    raw: bool = option(
        OTHER,
        "On a terminal, print control characters as they are instead of spelled, such as \\x1b.",
        bool,
        default=False,
    )
    weights: WeightKind | None = option(OTHER)

    @property
    def batch_size(self) -> int:
        """Return the maximum number of sequences that run together."""
        if self.batch is None:
            return BATCH_SIZE
        return self.batch

    @property
    def slots(self) -> int:
        """Return how many samples of one prompt run together."""
        return min(self.n, BATCH_SIZE)

    def sampling(self) -> SamplingOptions:
        """Collect the requested sampling options, with the biases of tokens among them."""
        if self.logit_bias:
            bias: SamplingOptions = {"logit_bias": dict(self.logit_bias)}
        else:
            bias = {}
        return {**(self.sampling_options or {}), **bias}

    def continuation(self) -> dict[str, Any]:
        """Collect how prompts are continued, by the names of `prompts_file.OPTIONS`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "n": self.n,
            "logprobs": self.logprobs,
            "echo": self.echo,
            "draft_tokens": self.draft_tokens,
            **self.sampling(),
        }

    def validate(self) -> None:
        """Raise a `RequestError` unless there is one prompt, or one file of them, and for options
        that do not go together, numbers out of range, or a model that does not exist.
        """
        sources = {
            "PROMPT": self.text,
            "--prompt": self.prompt,
            "--prompt-file": self.prompt_file,
            "--prompts": self.prompts,
        }
        used_sources = [name for name, value in sources.items() if value is not None]
        if not used_sources:
            raise RequestError("there is no prompt", hint=_USAGE)
        if len(used_sources) > 1:
            raise RequestError(
                "the prompt is given twice",
                found=" and ".join(used_sources),
                expected="one of them",
            )
        if "" in (self.text, self.prompt):
            raise RequestError("the prompt is empty")
        self._require_compatible()
        parse_request_options(self.continuation())
        if self.batch is not None and self.batch < 1:
            raise RequestError("--batch must be at least 1", found=self.batch)
        # In `quantkit generate PROMPT DIR` the arguments are in the order of other tools.
        if self.text is not None and not self.path.exists() and is_model_folder(Path(self.text)):
            raise RequestError(
                "the model comes first, then the prompt",
                hint=f"quantkit generate {shlex.quote(self.text)} PROMPT",
            )
        require_models(self.path, self.draft)

    def _require_compatible(self) -> None:
        """Raise a `RequestError` if options do not go together."""
        biased_tokens = [token for token, _ in self.logit_bias]
        for token in biased_tokens:
            if biased_tokens.count(token) > 1:
                raise RequestError("--logit-bias names a token twice", found=token)
        xla = self.backend == "xla"
        transformers = self.backend == "transformers"
        many = self.prompts is not None
        has_draft_options = self.draft is not None or self.draft_tokens is not None
        # quantkit's own engine alone has these.
        has_engine_options = (
            self.int8_cache or self.compiled is not None or self.warmup or self.allow_slow
        )
        has_file_options = (
            self.output is not None
            or self.resume
            or self.batch is not None
            or self.template is not None
            or self.echo
            or self.logprobs is not None
        )
        not_in_xla = has_engine_options or has_draft_options or self.device is not None
        not_in_transformers = (
            many
            or has_engine_options
            or has_draft_options
            or self.n > 1
            or self.device is not None
            or self.dtype is not None
        )
        # Of several problems, the first in this order is reported.
        for is_wrong, problem in (
            (
                xla and not_in_xla,
                (
                    "--device, --allow-slow, --int8-cache, --compile, --eager, --warmup, --draft"
                    " and --draft-tokens do not go with --backend xla"
                ),
            ),
            (
                transformers and not_in_transformers,
                (
                    "--prompts, --n, --draft, --draft-tokens, --device, --dtype, --allow-slow,"
                    " --int8-cache, --compile, --eager and --warmup do not go with --backend"
                    " transformers"
                ),
            ),
            (
                not transformers and self.trust_remote_code,
                "--trust-remote-code goes with --backend transformers",
            ),
            (many and self.multi_host, "--multi-host goes with one prompt, not with --prompts"),
            (
                not xla and (self.tp is not None or self.multi_host),
                "--tp and --multi-host go with --backend xla",
            ),
            (
                many and (self.draft is not None or self.stats),
                "--draft and --stats go with one prompt, not with --prompts",
            ),
            (
                not many and has_file_options,
                "--output, --resume, --batch, --template, --echo and --logprobs go with --prompts",
            ),
            (
                many and self.output is None,
                "--prompts needs --output FILE.jsonl, or --output - for stdout",
            ),
            (
                self.resume and self.output == STDIN,
                "--resume goes with a file, not with --output -",
            ),
        ):
            if is_wrong:
                raise RequestError(problem)


class _WithPrompt(Command):
    """Explains how to give a prompt that was parsed as an option, and what is not supported."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # Users know these options from other tools. The error says that quantkit has no beam
            # search, instead of suggesting another spelling.
            if error.option_name.lstrip("-").replace("-", "_") in BEAM_SEARCH:
                raise no_beam_search(error.option_name) from error
            # A misspelled option, for which click suggests the right spelling.
            if error.possibilities:
                raise
            problem = error.format_message().rstrip(".")
            raise click.UsageError(
                f"{problem}; for a prompt that begins with a dash: --prompt=TEXT", ctx
            ) from error


@click.command(cls=_WithPrompt)
@click.argument("path", type=options.PATH)
@click.argument("text", metavar="[PROMPT]", required=False)
@options.of_job(GenerateArgs, _OWN_OPTIONS)
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
            job = prompts.file_job(args)
            if is_rank0:
                job.prepare()

    if args.backend == "xla" and args.prompts is None:
        args.validate()
        # With several hosts only the first one prints, and the runtime tells later which that is.
        if not args.multi_host:
            require_stdout()
        prompts.show_on_devices(args)
        return
    common_options = {name: value for name, value in params.items() if name not in _RANK0_OPTIONS}
    with together(common_options, args.device, check=check) as group:
        if job is not None:
            prompts.run_file(job, group)
        else:
            prompts.show(args, group)
