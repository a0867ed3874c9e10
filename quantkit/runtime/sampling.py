"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.arguments import as_whole
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.runtime.request import checked_sampling

_LEAST_TEMPERATURE = 1e-6  # below this, float32 leaves nothing but the likeliest tokens


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_p: draw from the smallest set of tokens with at least this probability
            together (nucleus sampling, 1904.09751).
        seed: of the draw; None is unpredictable. torch's global generator is not used.

    Raises:
        RequestError: for a negative temperature, a top_p outside (0, 1], or a seed that
            does not fit 64 bits; for values of other types.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature, top_p = checked_sampling(self.temperature, self.top_p)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)
        if self.seed is not None:
            object.__setattr__(self, "seed", require_seed(self.seed))

    def generator(self, device: torch.device) -> torch.Generator:
        """A random generator of its own."""
        generator = torch.Generator(device=device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def require_seed(seed: int) -> int:
    """A seed that torch's generators take.

    Raises:
        RequestError: if it is no whole number, or does not fit 64 bits.
    """
    found = as_whole("seed", seed)
    if not -(2**63) <= found < 2**64:
        raise RequestError("seed does not fit 64 bits", found=found)
    return found


def agreed(params: SamplingParams, group: ProcessGroup) -> SamplingParams:
    """The same with one seed for all processes that share the model, if there are several and they draw."""
    if group.size == 1 or params.seed is not None or params.temperature == 0:
        return params
    return replace(params, seed=group.agree(params.generator(torch.device("cpu")).initial_seed()))


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    """Draw one token per row: logits [B, V] to token ids [B, 1]."""
    if params.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(probabilities(logits, params), 1, generator=generator)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """What tokens are drawn by, float32 [B, V], of logits [B, V]; all on the likeliest at temperature 0."""
    if params.temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    wide = logits.float()
    below = wide - wide.amax(-1, keepdim=True)  # at most 0, so that no quotient is inf - inf
    found = torch.softmax(below / max(params.temperature, _LEAST_TEMPERATURE), dim=-1)
    if params.top_p < 1:
        ranked, order = found.sort(dim=-1, descending=True)
        outside = ranked.cumsum(-1) - ranked >= params.top_p
        found = torch.zeros_like(found).scatter(-1, order, ranked.masked_fill(outside, 0))
        found = found / found.sum(-1, keepdim=True)
    return found
