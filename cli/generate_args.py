"""What is asked of ``quantkit generate``, and whether that makes sense; without torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.processes import require_models
from quantkit.errors import RequestError
from quantkit.formats.detect import is_model_folder
from quantkit.jobs.prompts_file import checked
from quantkit.runtime.request import BATCH_SIZE
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.tensors.dtypes import FloatName

if TYPE_CHECKING:
    from quantkit.formats.detect import WeightKind

STDIN = "-"
_HOW = (
    'put it after the folder: quantkit generate DIR "Once upon a time"; or name a file: --prompt-file FILE, - for'
    " stdin; or one of many prompts: --prompts FILE.jsonl"
)


@dataclass(frozen=True)
class GenerateArgs:
    """What the user asked for; None, False and empty where nothing was said."""

    path: Path
    text: str | None
    prompt: str | None
    prompt_file: str | None
    prompts: str | None
    output: str | None
    resume: bool
    batch: int | None
    template: str | None
    echo: bool
    logprobs: int | None
    truncate: bool
    max_new_tokens: int
    stop: tuple[str, ...]
    n: int
    logit_bias: tuple[tuple[int, float], ...]
    dtype: FloatName | None
    backend: Any  # a name, as click has seen
    device: str | None
    tp: int | None
    multi_host: bool
    int8_cache: bool
    compiled: bool | None
    warmup: bool
    stats: bool
    draft: Path | None
    draft_tokens: int | None
    weights: WeightKind | None
    sampling_options: SamplingOptions

    @property
    def batch_size(self) -> int:
        """Sequences that run together at most."""
        return BATCH_SIZE if self.batch is None else self.batch

    @property
    def slots(self) -> int:
        """Samples of one prompt that run together."""
        return min(self.n, BATCH_SIZE)

    def sampling(self) -> SamplingOptions:
        """How tokens are drawn, as far as it was requested."""
        bias: SamplingOptions = {"logit_bias": dict(self.logit_bias)} if self.logit_bias else {}
        return {**self.sampling_options, **bias}

    def options(self) -> dict[str, Any]:
        """How prompts are continued, as `prompts_file.OPTIONS` calls it."""
        return {
            "max_new_tokens": self.max_new_tokens, "stop": list(self.stop), "n": self.n, "logprobs": self.logprobs,
            "echo": self.echo, **self.sampling(),
        }  # fmt: skip

    def validate(self) -> None:
        """
        Raises:
            RequestError: unless one prompt is given, or a file of them, if options do not go together, or if numbers
                are out of range.
            CheckpointError: if there is no model.
        """
        sources = {
            "PROMPT": self.text, "--prompt": self.prompt, "--prompt-file": self.prompt_file, "--prompts": self.prompts,
        }  # fmt: skip
        given = [name for name, value in sources.items() if value is not None]
        if not given:
            raise RequestError("there is no prompt", hint=_HOW)
        if len(given) > 1:
            raise RequestError("the prompt is given twice", found=" and ".join(given), expected="one of them")
        if "" in (self.text, self.prompt):
            raise RequestError("the prompt is empty")
        self._require_companions()
        checked(self.options())
        if self.batch is not None and self.batch < 1:
            raise RequestError("--batch must be at least 1", found=self.batch)
        if self.text is not None and not self.path.exists() and is_model_folder(Path(self.text)):
            raise RequestError(
                "the model comes first, then the prompt", hint=f"quantkit generate {shlex.quote(self.text)} PROMPT"
            )
        require_models(self.path, self.draft)

    def _require_companions(self) -> None:
        """
        Raises:
            RequestError: if options do not go together.
        """
        xla, drafts, many = self.backend == "xla", self.draft is not None, self.prompts is not None
        of_files = self.output is not None or self.resume or self.batch is not None or self.template is not None
        steps = self.int8_cache or self.compiled is not None or self.warmup
        biased = [token for token, _ in self.logit_bias]
        if twice := [token for token in biased if biased.count(token) > 1]:
            raise RequestError("--logit-bias names a token twice", found=twice[0])
        for wrong, problem in (
            (xla and (steps or drafts or self.draft_tokens is not None or self.device is not None),
             "--device, --int8-cache, --compile, --eager, --warmup and --draft do not go with --backend xla"),
            (many and self.multi_host, "--multi-host goes with one prompt, not with --prompts"),
            (not xla and (self.tp is not None or self.multi_host), "--tp and --multi-host go with --backend xla"),
            (not drafts and self.draft_tokens is not None, "--draft-tokens goes with --draft"),
            (drafts and (self.int8_cache or self.compiled or self.warmup or self.n > 1),
             "--draft goes with none of --int8-cache, --compile, --warmup and --n"),
            (many and (drafts or self.stats), "--draft and --stats go with one prompt, not with --prompts"),
            (not many and (of_files or self.echo or self.logprobs is not None),
             "--output, --resume, --batch, --template, --echo and --logprobs go with --prompts"),
        ):  # fmt: skip
            if wrong:
                raise RequestError(problem)
        if many and self.output is None:
            raise RequestError("there is no place for what is generated", hint="--output FILE.jsonl, or - for stdout")
        if self.resume and self.output == STDIN:
            raise RequestError("--resume goes with a file, not with --output -")
