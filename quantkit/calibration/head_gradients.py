"""Gradients by hidden states of the log probability of tokens that the model draws."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.errors import UnsupportedError
from quantkit.tensors.finite import all_finite

TURN = 3
"""The passes through the head that take as long as its gradients: products in both directions, and
the draw of a token from each distribution.
"""
HEAD_TOKENS = 64
"""Tokens that go through the head at a time."""

ComputeLogits = Callable[[Tensor], Tensor]
"""Computes the logits [N, V] of hidden states [N, D]."""


def differentiate_head(
    states: Tensor,
    compute_logits: ComputeLogits,
    first_sample: int,
    advance: Callable[[int], None],
) -> Tensor:
    """Compute the gradients by hidden states [B, T, D] of minus the log probability of a token
    drawn at each of them.

    Args:
        first_sample: the seed of the first sample, so that tokens do not depend on the number of
            processes.
        advance: called with the number of tokens that have passed the head since its last call.

    Raises:
        UnsupportedError: if logits are not finite.
    """
    result = torch.empty_like(states)
    for index, sample_states in enumerate(states):
        generator = torch.Generator().manual_seed(first_sample + index)
        for start in range(0, len(sample_states), HEAD_TOKENS):
            # A leaf, so that the gradients stop here.
            rows = sample_states[start : start + HEAD_TOKENS].detach().requires_grad_()
            with torch.enable_grad():
                logits = compute_logits(rows)
            if not all_finite(logits.detach()):
                raise UnsupportedError("the model's logits contain NaN or Inf")
            logits.backward(_draw_logit_gradients(logits.detach(), generator))  # type: ignore[no-untyped-call]
            assert rows.grad is not None
            result[index, start : start + HEAD_TOKENS] = rows.grad
            advance(len(rows))
    return result


def _draw_logit_gradients(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token from each row of logits [N, V], and compute the gradients by them of minus its
    log probability.
    """
    gradients = logits.softmax(-1)
    # On the CPU, whose generator it is; so all devices draw the same.
    drawn = torch.multinomial(gradients.cpu(), 1, generator=generator).to(gradients.device)
    return gradients.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=gradients.dtype))
