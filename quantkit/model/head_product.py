"""The product of hidden states with the output head, whose weights are float32 some rows at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.model.decoder import final_logits

HEAD_WEIGHTS = 1 << 24
"""Weights of the head that are float32 at a time."""


def compute_head_logits(states: Tensor, head: Tensor, config: ModelConfig) -> Tensor:
    """Compute the logits [N, V] of hidden states [N, D] float32 after the final norm, for a head
    [V, D] of any float type. Gradients go back to the states.
    """
    logits: Tensor = _HeadProduct.apply(states, head, config)  # type: ignore[no-untyped-call]
    return logits


class _HeadProduct(torch.autograd.Function):
    """`compute_head_logits`; autograd by itself would keep the whole head in float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, config: ModelConfig) -> Tensor:
        logits = final_logits(multiply_by_head(states, head), config)
        ctx.save_for_backward(logits, head)
        ctx.config = config
        return logits

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, head = ctx.saved_tensors
        return differentiate_logits(gradients, logits, head, ctx.config), None, None


def multiply_by_head(states: Tensor, head: Tensor) -> Tensor:
    """Compute the products [N, V] of hidden states [N, D] float32 with a head [V, D] of any float
    type.
    """
    products: list[Tensor] = []
    for rows in _split_head(head):
        products.append(states @ rows.to(states.device, torch.float32).t())
    return torch.cat(products, dim=-1)


def differentiate_logits(
    gradients: Tensor, logits: Tensor, head: Tensor, config: ModelConfig
) -> Tensor:
    """Compute gradients by hidden states [N, D] float32 from those by their logits [N, V], for a
    head [V, D] of any float type.
    """
    if config.logit_softcap is not None:
        gradients = gradients * (1 - (logits / config.logit_softcap).square())
    if config.logit_multiplier != 1:
        gradients = gradients * config.logit_multiplier
    by_states = gradients.new_zeros(len(gradients), head.shape[1])
    start = 0
    for rows in _split_head(head):
        stop = start + len(rows)
        by_states.addmm_(gradients[:, start:stop], rows.to(gradients.device, torch.float32))
        start = stop
    return by_states


def _split_head(head: Tensor) -> Sequence[Tensor]:
    """Split a head [V, D] into rows that are converted at a time."""
    return torch.split(head, max(1, HEAD_WEIGHTS // head.shape[1]))
