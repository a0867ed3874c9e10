"""The arguments of the command that generates text."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.option_fields import OTHER, option
from quantkit.cli import options
from quantkit.cli.options import RUN
from quantkit.cli.processes import require_models
from quantkit.errors import RequestError
from quantkit.formats.detect import is_model_folder
from quantkit.jobs.inference.standard_input import STDIN
from quantkit.prompts.options import parse_request_options
from quantkit.runtime.request import (
    BATCH_SIZE,
    MAX_NEW_TOKENS,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.tensors.dtypes import FloatName

if TYPE_CHECKING:
    from quantkit.formats.detect import WeightKind


_USAGE = (
    'put it after the folder: quantkit generate DIR "Once upon a time"; or use a file:'
    " --prompt-file FILE, - for stdin; or a file of many prompts: --prompts FILE.jsonl"
)


_PROMPT = "Prompt"


_MANY = "A file of prompts"


_SAMPLING = "Sampling"


@dataclass(frozen=True)
class GenerateArgs:
    """The requested options, with their defaults."""

    path: Path
    text: str | None
    prompt: str | None = option(
        _PROMPT, "Prompt text, instead of PROMPT, if it begins with a dash.", metavar="TEXT"
    )
    prompt_file: str | None = option(
        _PROMPT,
        "File to read the prompt from, instead of PROMPT; - is stdin.",
        "file",
        metavar="FILE",
    )
    truncate: bool = option(
        _PROMPT,
        "Cut off the beginning of a prompt that is too long, instead of failing.",
        bool,
        default=False,
    )
    prompts: str | None = option(
        _MANY,
        "JSON Lines file of prompts or messages, instead of PROMPT; - is stdin. See"
        " docs/generation.md.",
        "file",
        metavar="FILE",
    )
    output: str | None = option(
        _MANY, "Write the results to this new file; - is stdout.", "file", metavar="FILE"
    )
    resume: bool = option(_MANY, default=False)
    batch: int | None = option(
        _MANY, f"Batch size: maximum number of concurrent sequences. Default: {BATCH_SIZE}.", int
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
        "On a terminal, print control characters unescaped. Default: escaped, such as \\x1b.",
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
        """Collect how prompts are continued, by the names of `quantkit.prompts.options.OPTIONS`."""
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
            raise RequestError("no prompt is given", hint=_USAGE)
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
                    " and --draft-tokens cannot be combined with --backend xla"
                ),
            ),
            (
                transformers and not_in_transformers,
                (
                    "--prompts, --n, --draft, --draft-tokens, --device, --dtype, --allow-slow,"
                    " --int8-cache, --compile, --eager and --warmup cannot be combined with"
                    " --backend transformers"
                ),
            ),
            (
                not transformers and self.trust_remote_code,
                "--trust-remote-code requires --backend transformers",
            ),
            (many and self.multi_host, "--multi-host cannot be combined with --prompts"),
            (
                not xla and (self.tp is not None or self.multi_host),
                "--tp and --multi-host require --backend xla",
            ),
            (
                many and (self.draft is not None or self.stats),
                "--draft and --stats cannot be combined with --prompts",
            ),
            (
                not many and has_file_options,
                "--output, --resume, --batch, --template, --echo and --logprobs require --prompts",
            ),
            (
                many and self.output is None,
                "--prompts requires --output FILE.jsonl, or --output - for stdout",
            ),
            (
                self.resume and self.output == STDIN,
                "--resume cannot be combined with --output -",
            ),
        ):
            if is_wrong:
                raise RequestError(problem)
