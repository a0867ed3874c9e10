"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.runtime.sampling_params import SamplingParams

_MIN_TEMPERATURE = 1e-6  # below this, float32 leaves nothing but the likeliest tokens


def generator_of(params: SamplingParams, device: torch.device) -> torch.Generator:
    """A random generator of a request's own."""
    generator = torch.Generator(device=device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def agreed(params: SamplingParams, group: ProcessGroup) -> SamplingParams:
    """The same with one seed for all processes that share the model, if there are several and they draw."""
    if group.size == 1 or params.seed is not None or params.temperature == 0:
        return params
    return replace(params, seed=group.broadcast_from_rank0(generator_of(params, torch.device("cpu")).initial_seed()))


def sample(
    logits: Tensor, params: SamplingParams, generator: torch.Generator | None, held: Tensor | None = None
) -> Tensor:
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
        logits, penalty = logits.float(), params.repetition_penalty  # float16 may not hold the product
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
    found = torch.softmax(below / max(params.temperature, _MIN_TEMPERATURE), dim=-1)
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


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities in some places: of a token in each [T], and of the K likeliest [T, K], with
    their ids [T, K]."""

    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def listed(self) -> tuple[list[float | None], list[dict[int, float]]]:
        """Of the tokens, and of the likeliest by their ids."""
        top = zip(self.top_ids.tolist(), self.top.tolist(), strict=True)
        return self.chosen.tolist(), [dict(zip(ids, values, strict=True)) for ids, values in top]


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TokenLogprobs:
    """What logits [T, V] say of tokens [T], and of the `count` likeliest in each place."""
    found = torch.log_softmax(logits.float(), dim=-1)
    values, ids = found.topk(min(count, found.shape[-1]), dim=-1)
    return TokenLogprobs(found.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), values, ids)
