"""From logits to the next token, in torch; `quantkit.runtime.sampling_params` declares the options.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import QuantkitError, RequestError
from quantkit.model.device import host_copy
from quantkit.runtime.greedy import find_likeliest
from quantkit.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quantkit.runtime.constraint import Constraint, ConstraintFactory

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
        self._create_constraint = constraint
        self._drawn = 0
        self._constraint: Constraint | None = None
        self.params = share_seed(params, group)
        # Greedy decoding draws no random numbers.
        self._generator = create_generator(self.params, device) if params.temperature > 0 else None
        self._seen_mask: Tensor | None = None
        self._counts: Tensor | None = None
        if params.needs_counts:
            self._counts = torch.zeros(1, vocab_size, device=device)
        if params.needs_seen_tokens:
            self._seen_mask = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
            self._seen_mask[0, list(prompt)] = True

    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token [1] from logits [1, V].

        If the logits are not finite, it is any token that is allowed; the caller raises the error
        when the host reads the token.
        """
        if self._create_constraint is None:
            # Probabilities with NaN would make `multinomial` fail, on a GPU for the whole process.
            return self._draw(logits if self.params.likeliest_only else logits.nan_to_num())
        try:
            if self.error is None:
                # Created with the first token, so that waiting requests have none.
                self._constraint = self._constraint or self._create_constraint()
                allowed = self._constraint.compute_token_mask().to(logits.device)
                token = self._draw(logits.nan_to_num().masked_fill(~allowed, -torch.inf))
                self._constraint.accept(int(token))
                self._drawn += 1
                return token
        # Other sequences share the step, so the error of this one must not end it.
        except QuantkitError as error:
            self.error = error
            self.failed_at = self._drawn
            self._constraint = None
        return torch.zeros(1, dtype=torch.long, device=logits.device)

    def _draw(self, logits: Tensor) -> Tensor:
        """Draw a token and record it for the penalties."""
        if self.params.likeliest_only:
            return find_likeliest(logits)
        token = sample(logits, self.params, self._generator, self._seen_mask, self._counts)[0]
        if self._seen_mask is not None:
            self._seen_mask[0, token] = True
        if self._counts is not None:
            self._counts[0, token] += 1
        return token

    def create_draft_sampler(self) -> Callable[[Tensor], int]:
        """Return a function that draws from a draft model's logits [1, V].

        It uses the random numbers that `draw` will use, and records nothing for the penalties.
        """
        params = self.params
        generator = self._generator
        # A copy: the numbers drawn for guesses are drawn again for the tokens.
        if generator is not None:
            generator = generator.clone_state()

        def guess(logits: Tensor) -> int:
            logits = logits.nan_to_num()
            return int(sample(logits, params, generator, self._seen_mask, self._counts))

        return guess


def create_generator(params: SamplingParams, device: torch.device) -> torch.Generator:
    """Create a random generator for one request."""
    generator = torch.Generator(device=device)
    if params.seed is None:
        generator.seed()
        return generator
    return generator.manual_seed(params.seed)


def share_seed(params: SamplingParams, group: ProcessGroup) -> SamplingParams:
    """Give all processes that share the model the same seed: rank 0's."""
    # Other tokens in one process would give each a different sequence in its cache.
    if group.size == 1 or params.seed is not None or params.temperature == 0:
        return params
    seed = create_generator(params, torch.device("cpu")).initial_seed()
    return replace(params, seed=group.broadcast_from_rank0(seed))


def sample(
    logits: Tensor,
    params: SamplingParams,
    generator: torch.Generator | None,
    seen_mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Draw one token per row: logits [B, V] to token ids [B, 1].

    `seen_mask` and `counts` are as for `adjust_logits`.
    """
    if params.temperature == 0:
        return find_likeliest(adjust_logits(logits, params, seen_mask, counts)).unsqueeze(-1)
    probabilities = compute_probabilities(logits, params, seen_mask, counts)
    return torch.multinomial(probabilities, 1, generator=generator)


def adjust_logits(
    logits: Tensor,
    params: SamplingParams,
    seen_mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Apply the options that change logits [B, V], such as a bias; without any, return them.

    Args:
        seen_mask: which tokens each sequence already contains, bool [B, V]; for a repetition
            penalty.
        counts: how often each token is among the new ones of its sequence, [B, V]; for the other
            penalties.

    Raises:
        RequestError: if an option names a token outside the vocabulary, or needs an argument that
            is None.
    """
    params.require_vocabulary(logits.shape[-1])
    past = {"seen": seen_mask, "counts": counts}
    for option in params.active:
        if option.adjust is not None:
            if option.past is not None and past[option.past] is None:
                raise RequestError(f"{option.name} is not supported here", hint="leave it out")
            # In float32: the result may exceed the range of float16.
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
    """Compute the probabilities to draw with, float32 [B, V], from logits [B, V].

    They are one-hot at temperature 0. `seen_mask` and `counts` are as for `adjust_logits`.
    """
    logits = adjust_logits(logits, params, seen_mask, counts)
    if params.temperature == 0:
        return F.one_hot(find_likeliest(logits), logits.shape[-1]).float()
    logits32 = logits.float()
    # At most 0: quotients by a small temperature are then -inf at worst, and never inf - inf.
    shifted = logits32 - logits32.amax(-1, keepdim=True)
    probabilities = torch.softmax(shifted / max(params.temperature, _MIN_TEMPERATURE), dim=-1)
    for option in params.active:
        if option.drops is None:
            continue
        value = getattr(params, option.name)
        # Sorting a vocabulary is slow, so some options have a function that does without.
        if option.keep is not None:
            filtered: Tensor = option.keep(probabilities, value)
        else:
            ranked, order = probabilities.sort(dim=-1, descending=True)
            ranks = torch.arange(ranked.shape[-1], device=ranked.device)
            dropped = option.drops(torch, ranked, ranks, value)
            remaining = ranked.masked_fill(dropped, 0)
            filtered = torch.zeros_like(probabilities).scatter(-1, order, remaining)
        # Each option applies to the probabilities that the previous ones leave, with sum 1.
        if filtered is not probabilities:
            probabilities = filtered / filtered.sum(-1, keepdim=True)
    return probabilities


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at T positions: of one token each [T], and of the K
    likeliest [T, K] with their ids [T, K].
    """

    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def on_host(self) -> TokenLogprobs:
        """Copy all tensors with `host_copy`."""
        return TokenLogprobs(*map(host_copy, self))

    def to_lists(self) -> tuple[list[float | None], list[dict[int, float]]]:
        """List the values of the tokens, and for each position those of the likeliest by ids."""
        top: list[dict[int, float]] = []
        for ids, values in zip(self.top_ids.tolist(), self.top.tolist(), strict=True):
            top.append(dict(zip(ids, values, strict=True)))
        return self.chosen.tolist(), top


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TokenLogprobs:
    """Compute log-probabilities of tokens [T] and of the `count` likeliest at each position.

    `logits` are [T, V].
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return TokenLogprobs(chosen, values, ids)
