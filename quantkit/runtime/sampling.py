"""From logits to the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError

_LEAST_TEMPERATURE = 1e-6  # below this, float32 leaves nothing but the likeliest tokens


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: logits are biased and penalized, divided by the temperature, and cut by `top_k`,
    `top_p` and `min_p`, in this order.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_p: draw from the likeliest tokens, up to the one with which their probabilities together exceed this
            (nucleus sampling, 1904.09751).
        seed: of the draw; None is unpredictable. torch's global generator is not used.
        top_k: draw from so many of the likeliest tokens; 0 is all.
        min_p: draw from tokens with at least this share of the likeliest one's probability (2407.01082).
        repetition_penalty: logits of tokens that the text holds already are divided by it where positive, and
            multiplied where negative (1909.05858); 1 does nothing.
        logit_bias: what is added to the logits of tokens, by their ids.

    Raises:
        RequestError: for a value out of its range, or a seed that does not fit 64 bits.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for wrong, problem, found in (
            (not self.temperature >= 0, "temperature must not be negative", self.temperature),
            (self.temperature == math.inf, "temperature must be finite", self.temperature),
            (not 0 < self.top_p <= 1, "top_p must lie in (0, 1]", self.top_p),
            (self.top_k < 0, "top_k must not be negative", self.top_k),
            (not 0 <= self.min_p <= 1, "min_p must lie in [0, 1]", self.min_p),
            (not 0 < self.repetition_penalty < math.inf, "repetition_penalty must be positive",
             self.repetition_penalty),
            (not all(map(math.isfinite, self.logit_bias.values())), "logit_bias must be finite", self.logit_bias),
        ):  # fmt: skip
            if wrong:
                raise RequestError(problem, found=found)
        if self.seed is not None:
            require_seed(self.seed)

    def generator(self, device: torch.device) -> torch.Generator:
        """A random generator of its own."""
        generator = torch.Generator(device=device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def require_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not take.

    Raises:
        RequestError: if it does not fit 64 bits.
    """
    if not -(2**63) <= seed < 2**64:
        raise RequestError("seed does not fit 64 bits", found=seed)


def agreed(params: SamplingParams, group: ProcessGroup) -> SamplingParams:
    """The same with one seed for all processes that share the model, if there are several and they draw."""
    if group.size == 1 or params.seed is not None or params.temperature == 0:
        return params
    return replace(params, seed=group.agree(params.generator(torch.device("cpu")).initial_seed()))


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator, held: Tensor | None = None) -> Tensor:
    """Draw one token per row: logits [B, V] to token ids [B, 1].

    Args:
        held: which tokens each text holds already, bool [B, V]; needed for a repetition penalty.
    """
    if params.temperature == 0:
        return adjusted(logits, params, held).argmax(-1, keepdim=True)
    return torch.multinomial(probabilities(logits, params, held), 1, generator=generator)


def adjusted(logits: Tensor, params: SamplingParams, held: Tensor | None = None) -> Tensor:
    """Logits [B, V] with bias and repetition penalty; the same tensor where there is neither.

    Raises:
        RequestError: if the bias names a token outside the vocabulary.
    """
    if params.logit_bias:
        ids = list(params.logit_bias)
        if not all(0 <= one < logits.shape[-1] for one in ids):
            raise RequestError(
                "logit_bias names tokens outside the vocabulary", found=ids, expected=f"0 to {logits.shape[-1] - 1}"
            )
        bias = torch.tensor(list(params.logit_bias.values()), device=logits.device)
        logits = logits.float().index_add(-1, torch.tensor(ids, device=logits.device), bias.expand(len(logits), -1))
    if params.repetition_penalty != 1:
        assert held is not None
        penalty = params.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(held, penalized, logits)
    return logits


def probabilities(logits: Tensor, params: SamplingParams, held: Tensor | None = None) -> Tensor:
    """What tokens are drawn by, float32 [B, V], of logits [B, V]; all on the likeliest at temperature 0.

    Args:
        held: see `sample`.
    """
    logits = adjusted(logits, params, held)
    if params.temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    wide = logits.float()
    below = wide - wide.amax(-1, keepdim=True)  # at most 0, so that no quotient is inf - inf
    found = torch.softmax(below / max(params.temperature, _LEAST_TEMPERATURE), dim=-1)
    if 0 < params.top_k < found.shape[-1]:
        ranked, order = found.topk(params.top_k, dim=-1)
        found = torch.zeros_like(found).scatter(-1, order, ranked)
        found = found / found.sum(-1, keepdim=True)
    if params.top_p < 1:
        ranked, order = found.sort(dim=-1, descending=True)
        outside = ranked.cumsum(-1) - ranked > params.top_p
        found = torch.zeros_like(found).scatter(-1, order, ranked.masked_fill(outside, 0))
        found = found / found.sum(-1, keepdim=True)
    if params.min_p > 0:
        found = found.masked_fill(found < params.min_p * found.amax(-1, keepdim=True), 0)
        found = found / found.sum(-1, keepdim=True)
    return found
