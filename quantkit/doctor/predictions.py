"""Rules about what a model predicts: it is run on packaged texts, as its config says and with other
settings.

Other settings are those that a wrong config has in place of the right ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.rope import MAX_THETA, MIN_THETA
from quantkit.architectures.topology import parameters
from quantkit.base.progress import Progress, in_phase
from quantkit.data.files import excerpt
from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import Folder
from quantkit.errors import CheckpointError, NonFiniteError, QuantkitError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView, parameter_count, schemes
from quantkit.formats.containers.meta_tensors import to_interleaved, to_rotate_half
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.quality.bounds import BOUNDS, build_gate_windows, scheme_bound
from quantkit.quality.figures import mean_estimate
from quantkit.quality.measures import token_losses
from quantkit.quality.source_check import SourceCheck, check_source
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.text.tokenizer import Tokenizer
from quantkit.via_transformers.forward import open_to_run

MAX_PARAMETERS = 2 * 10**9
"""The size of a model that is run: minutes on two cores."""

_SPEECH = "speech"
# Multiples of the config's; closer bases predict nearly the same.
_BASES = (0.01, 100.0)
# Of the speech: a tokenizer that makes fewer does not fit English text.
_MIN_TOKENS = 32
# Standard errors by which another reading must predict better.
_SURE = 3.0
# Nats a token; sound models gain at most 0.00 from another reading.
_MIN_GAIN = 0.05


@dataclass
class Predictions:
    """What a model predicts on the packaged texts: findings, and a line that says what was
    measured, or why not.
    """

    findings: list[Finding]
    measured: str | None = None
    left_out: str | None = None


def check(folder: Folder, recorded: Mapping[str, Any], progress: Progress) -> Predictions:
    """Run a model, one block in memory at a time; `recorded` is its manifest, empty if it has
    none.
    """
    result = Predictions([])
    try:
        model = open_to_run(folder.path)
        tokenizer, _ = load_checked_tokenizer(model)
        count = parameter_count(model)
        if tokenizer is None:
            result.left_out = "what it predicts: it has no tokenizer"
        elif count > MAX_PARAMETERS:
            reason = (
                f"it has {count / 1e9:.1f}e9 parameters, and is run up to"
                f" {MAX_PARAMETERS / 1e9:.0f}e9"
            )
            result.left_out = f"what it predicts: {reason}"
        else:
            texts: dict[str, Tensor] = {}
            for name, (_, windows) in build_gate_windows(model).items():
                # One window of each text keeps a run within minutes.
                texts[name] = windows[:1]
            # The speech is the text of `excerpt`, whose other tokens give the frequencies.
            speech = texts.pop(_SPEECH, torch.empty(1, 0))
            if _is_english(speech):
                run = _Run(
                    model, [speech, *texts.values()], _frequency_loss(tokenizer, speech), progress
                )
                result.findings = list(run.iter_findings(folder.path.name, recorded))
                result.measured = run.measured
            else:
                result.left_out = "what it predicts: the tokenizer makes no tokens of English"
    except QuantkitError as error:
        result.left_out = f"what it predicts: {error}"
    return result


def _is_english(tokens: Tensor) -> bool:
    """Return whether there are enough tokens, and not mostly the same one, as for unknown words."""
    # An empty tensor has no maximum.
    if tokens.numel() < _MIN_TOKENS:
        return False
    most_frequent = int(tokens.flatten().bincount().max())
    return 2 * most_frequent <= tokens.numel()


class _Run:
    """A model on windows [1, T], one per text; `frequency_loss` is that of the first window, as
    predicted from the frequencies of tokens, in nats a token.
    """

    def __init__(
        self, model: Checkpoint, windows: list[Tensor], frequency_loss: float, progress: Progress
    ) -> None:
        self._model = model
        self._windows = windows
        self._frequency_loss = frequency_loss
        self._progress = in_phase(progress, "predictions")
        self.measured: str | None = None

    def iter_findings(self, location: str, recorded: Mapping[str, Any]) -> Iterator[Finding]:
        checked: SourceCheck | str | None = None
        try:
            losses = self._losses(self._windows)
            checked = check_source(self._model, progress=self._progress)
        except NonFiniteError as error:
            yield finding("no-prediction", location, str(error))
            return
        except CheckpointError as error:
            if error.found is not None:
                measured = f" ({error.found})"
            else:
                measured = ""
            yield finding("no-prediction", location, f"{error.problem}{measured}")
        if isinstance(checked, SourceCheck):
            self.measured = (
                f"perplexity {checked.perplexity:.4g} on {checked.tokens} tokens of English"
            )
            yield from self._compare_to_source(location, checked, recorded)
            loss = losses[0].mean().item()
            # A model that predicts worse than the frequencies of tokens does not use the context.
            bound = self._frequency_loss
            if loss >= bound:
                figures = (
                    f"perplexity {math.exp(loss):.4g}; {math.exp(bound):.4g} from the frequencies"
                    " of tokens alone"
                )
                yield finding("poor-prediction", location, figures)
        if self._model.config.runnable:
            yield from self._try_other_readings(location, losses)

    def _losses(self, windows: list[Tensor], model: Checkpoint | None = None) -> list[Tensor]:
        """Compute minus log probabilities [W * (T - 1)] of each token of windows [W, T] after the
        first.
        """
        text_losses = token_losses(model or self._model, windows, progress=self._progress)
        return [losses.flatten() for losses in text_losses]

    def _compare_to_source(
        self, location: str, checked: SourceCheck, recorded: Mapping[str, Any]
    ) -> Iterator[Finding]:
        """Compare the perplexity with that of the source, within what quantization explains."""
        source = recorded.get("source_check")
        # Without a check, the manifest has the reason in its place.
        if not isinstance(source, dict):
            return
        before = source.get("perplexity")
        same_text = (source.get("text"), source.get("tokens")) == (checked.text, checked.tokens)
        if not (same_text and isinstance(before, float)):
            return
        model_schemes = schemes(self._model).values()
        if model_schemes:
            bound = scheme_bound(model_schemes)
        else:
            bound = BOUNDS["bfloat16"]
        # The bounds are for several windows, and one window varies more: twice the margin.
        limit = before * (1 + 2 * (bound.perplexity_ratio - 1))
        if checked.perplexity > limit:
            figures = (
                f"perplexity {checked.perplexity:.4g}; its source's was {before:.4g}, and up to"
                f" {limit:.4g} is usual"
            )
            yield finding("worse-than-source", location, figures)

    def _try_other_readings(self, location: str, losses: list[Tensor]) -> Iterator[Finding]:
        """Run the model with other settings, on one window first, and yield those that predict best
        if they are better than the config's.
        """
        before = torch.cat(losses)
        best: tuple[float, str] = (_MIN_GAIN, "")
        for reading in _iter_readings(self._model):
            try:
                (first,) = self._losses(self._windows[:1], reading)
                # Most readings predict worse, and the other windows take most of the time.
                if first.mean() > min(losses[0].mean().item(), self._frequency_loss):
                    continue
                after = torch.cat([first, *self._losses(self._windows[1:], reading)])
            except NonFiniteError:
                continue
            gain = mean_estimate(before - after)
            if gain.error is not None and gain.value > max(best[0], _SURE * gain.error):
                perplexity_after = math.exp(after.mean().item())
                perplexity_before = math.exp(before.mean().item())
                best = (
                    gain.value,
                    f"perplexity {perplexity_after:.4g} with {reading.description};"
                    f" {perplexity_before:.4g} as it is",
                )
        if best[1]:
            yield finding("other-reading", location, best[1])


def _frequency_loss(tokenizer: Tokenizer, windows: Tensor) -> float:
    """Compute the loss of windows [W, T], in nats a token, as predicted from the frequencies of
    tokens in the rest of the text.

    Tokens that are not in it share what Witten and Bell's estimate (IEEE Trans. Inf. Theory 37,
    1991) leaves for them.
    """
    # The windows begin the text: frequencies come from tokens that the model does not predict.
    frequencies = Counter(tokenizer.encode(excerpt())[windows.numel() :])
    count = frequencies.total()
    distinct = len(frequencies)
    unseen = distinct / tokenizer.vocab_size
    targets = windows[:, 1:].flatten().tolist()
    log_probabilities: list[float] = []
    for target in targets:
        probability = (frequencies[target] + unseen) / (count + distinct)
        log_probabilities.append(math.log(probability))
    return -sum(log_probabilities) / len(targets)


class _Reading(CheckpointView):
    """A checkpoint, read with other settings than its config has, which `description` names.

    `reorder` brings rows [heads * head_dim, ...] of queries and keys into another order; its second
    argument is the size of a head.
    """

    def __init__(
        self,
        description: str,
        source: Checkpoint,
        config: ModelConfig | None = None,
        reorder: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        super().__init__(source, config)
        self.description = description
        self._reorder = reorder
        self._rotary: set[str] = set()
        if reorder:
            for parameter in parameters(self.config):
                if parameter.rotary:
                    self._rotary.add(parameter.name)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        if self._reorder is None or name not in self._rotary:
            return self._source.load(name, part)
        # Rows of a part may come from anywhere in the tensor, so a part is cut after reordering.
        value = self._source.load(name)
        if isinstance(value, QuantTensor):
            rows = value.dequantize()
        else:
            rows = value
        rows = self._reorder(rows, self.config.head_dim)
        if part is None:
            return rows
        return part.of(rows)


def _iter_readings(source: Checkpoint) -> Iterator[_Reading]:
    """Yield settings that could be meant: another rope base, heads half or twice as large, rows of
    queries and keys in Meta's order instead of Hugging Face's, or the reverse.
    """
    config = source.config
    for factor in _BASES:
        theta = config.rope.theta * factor
        if MIN_THETA < theta < MAX_THETA:
            yield _Reading(
                f"a rope base of {theta:g}",
                source,
                replace(config, rope=replace(config.rope, theta=theta)),
            )
    # Meta's order is defined for heads that rotate in all their dimensions.
    rotates_whole_heads = config.rope.rotary_dim is None and config.latent_attention is None
    if rotates_whole_heads:
        yield _Reading("q and k rows taken from pairs to halves", source, reorder=to_rotate_half)
        yield _Reading("q and k rows taken from halves to pairs", source, reorder=to_interleaved)
    # Tensors or factors of the size of a head, or of the number of heads, confirm the config.
    has_head_tensors = (
        config.qk_norm == "head" or config.sinks or config.rope.short_factor is not None
    )
    heads = config.num_heads
    kv = config.num_kv_heads
    size = config.head_dim
    if has_head_tensors or not rotates_whole_heads:
        return
    # The shapes of q, k and v fit each of these as well: only the products are stored.
    changes: list[tuple[int, int, int]] = []
    if size % 2 == 0:
        changes.append((2 * heads, 2 * kv, size // 2))
    if heads % 2 == kv % 2 == 0:
        changes.append((heads // 2, kv // 2, 2 * size))
    for heads, kv, size in changes:
        changed_config = replace(config, num_heads=heads, num_kv_heads=kv, head_dim=size)
        # Rotary positions may not fit the size.
        with suppress(CheckpointError):
            valid_config = changed_config.validate(source.path)
            yield _Reading(f"{heads} heads of {size}", source, valid_config)
