"""From logits to the next token, in torch; `quantkit.runtime.sampling_params` declares the options.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import QuantkitError, RequestError
from quantkit.model.device import host_copy
from quantkit.runtime.constraint import Constraint, ConstraintFactory
from quantkit.runtime.sampling_params import SamplingParams

# Below this, float32 leaves nothing but the likeliest tokens.
_MIN_TEMPERATURE = 1e-6


class Sampler:
    """Draws the tokens of one sequence.

    Attributes:
        params: the options; if processes share the model, with rank 0's seed.
        error: why no token is allowed, once that is so. The tokens from number `failed_at` on,
            counted from 0, are then placeholders, which must not be used.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        device: torch.device,
        group: ProcessGroup = SINGLE,
        *,
        constraint: ConstraintFactory | None = None,
    ) -> None:
        self.error: QuantkitError | None = None
        self.failed_at: int | None = None
        self._begin = constraint
        self._drawn = 0
        self._constraint: Constraint | None = None
        self.params = same_seed(params, group)
        self._generator = generator_of(self.params, device) if params.temperature > 0 else None
        self._seen_mask: Tensor | None = None
        self._counts: Tensor | None = None
        if params.needs_counts:
            self._counts = torch.zeros(1, vocab_size, device=device)
        if params.needs_seen_tokens:
            self._seen_mask = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
            self._seen_mask[0, list(prompt)] = True

    def draw(self, logits: Tensor) -> Tensor:
        """Return the next token [1] from logits [1, V].

        Of logits that are not finite it is any token that is allowed.
        """
        if self._begin is None:
            return self._draw(logits if self.params.likeliest_only else logits.nan_to_num())
        try:
            if self.error is None:
                self._constraint = self._constraint or self._begin()
                allowed = self._constraint.compute_token_mask().to(logits.device)
                token = self._draw(logits.nan_to_num().masked_fill(~allowed, -torch.inf))
                self._constraint.accept(int(token))
                self._drawn += 1
                return token
        except QuantkitError as error:  # of one sequence among many that share a step
            self.error = error
            self.failed_at = self._drawn
            self._constraint = None
        return torch.zeros(1, dtype=torch.long, device=logits.device)

    def _draw(self, logits: Tensor) -> Tensor:
        if self.params.likeliest_only:
            return logits.argmax(-1)
        token = sample(logits, self.params, self._generator, self._seen_mask, self._counts)[0]
        if self._seen_mask is not None:
            self._seen_mask[0, token] = True
        if self._counts is not None:
            self._counts[0, token] += 1
        return token

    def guesses(self) -> Callable[[Tensor], int]:
        """Draws tokens from another model's logits [1, V], with the random numbers that `draw` will
        use; nothing is remembered of them.
        """
        params = self.params
        generator = self._generator
        if generator is not None:
            generator = generator.clone_state()

        def guess(logits: Tensor) -> int:
            return int(
                sample(logits.nan_to_num(), params, generator, self._seen_mask, self._counts)
            )

        return guess


def generator_of(params: SamplingParams, device: torch.device) -> torch.Generator:
    """Return a random generator for one request."""
    generator = torch.Generator(device=device)
    if params.seed is None:
        generator.seed()
        return generator
    return generator.manual_seed(params.seed)


def same_seed(params: SamplingParams, group: ProcessGroup) -> SamplingParams:
    """Return the options with one seed for all processes that share the model."""
    if group.size == 1 or params.seed is not None or params.temperature == 0:
        return params
    return replace(
        params,
        seed=group.broadcast_from_rank0(generator_of(params, torch.device("cpu")).initial_seed()),
    )


def sample(
    logits: Tensor,
    params: SamplingParams,
    generator: torch.Generator | None,
    seen_mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Draw one token per row: logits [B, V] to token ids [B, 1]; `seen` and `counts` are as for
    `adjust_logits`.
    """
    if params.temperature == 0:
        return adjust_logits(logits, params, seen_mask, counts).argmax(-1, keepdim=True)
    return torch.multinomial(
        compute_probabilities(logits, params, seen_mask, counts), 1, generator=generator
    )


def adjust_logits(
    logits: Tensor,
    params: SamplingParams,
    seen_mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Logits [B, V] after the options that change logits, such as a bias; the same tensor if none
    is set.

    Args:
        seen: which tokens each sequence already contains, bool [B, V]; for a repetition penalty.
        counts: how often each token is among the new ones of its sequence, [B, V]; for the other
            penalties.

    Raises:
        RequestError: if an option names a token outside the vocabulary, or needs what is not given.
    """
    params.require_vocabulary(logits.shape[-1])
    past = {"seen": seen_mask, "counts": counts}
    for option in params.active:
        if option.adjust is not None:
            if option.past is not None and past[option.past] is None:
                raise RequestError(f"{option.name} is not supported here", hint="leave it out")
            # In float32: float16 may not hold the result.
            logits = option.adjust(
                torch, logits.float(), getattr(params, option.name), past.get(option.past or "")
            )
    return logits


def compute_probabilities(
    logits: Tensor,
    params: SamplingParams,
    seen_mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the probabilities to draw with, float32 [B, V], from logits [B, V]; one-hot at
    temperature 0. `seen` and `counts` are as for `adjust_logits`.
    """
    logits = adjust_logits(logits, params, seen_mask, counts)
    if params.temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    wide = logits.float()
    # At most 0, so that no quotient is inf - inf.
    below = wide - wide.amax(-1, keepdim=True)
    result = torch.softmax(below / max(params.temperature, _MIN_TEMPERATURE), dim=-1)
    for option in params.active:
        if option.drops is None:
            continue
        value = getattr(params, option.name)
        if option.keep is not None:
            kept: Tensor = option.keep(result, value)
        else:
            ranked, order = result.sort(dim=-1, descending=True)
            dropped = option.drops(
                torch, ranked, torch.arange(ranked.shape[-1], device=ranked.device), value
            )
            kept = torch.zeros_like(result).scatter(-1, order, ranked.masked_fill(dropped, 0))
        if kept is not result:
            result = kept / kept.sum(-1, keepdim=True)
    return result


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at T positions: of one token each [T], and of the K
    likeliest [T, K] with their ids [T, K].
    """

    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def on_host(self) -> TokenLogprobs:
        """See `host_copy`."""
        return TokenLogprobs(*map(host_copy, self))

    def to_lists(self) -> tuple[list[float | None], list[dict[int, float]]]:
        """Return the values of the tokens, and for each position those of the likeliest by their
        ids.
        """
        top = zip(self.top_ids.tolist(), self.top.tolist(), strict=True)
        return self.chosen.tolist(), [dict(zip(ids, values, strict=True)) for ids, values in top]


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TokenLogprobs:
    """Log-probabilities of tokens [T], and of the `count` likeliest at each position, from
    logits [T, V].
    """
    found = torch.log_softmax(logits.float(), dim=-1)
    values, ids = found.topk(min(count, found.shape[-1]), dim=-1)
    return TokenLogprobs(found.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), values, ids)
