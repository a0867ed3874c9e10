"""Stacked experts of transformers, one after the other, each with the tokens that are sent to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

IMPLEMENTATION = "quantkit"
_VISITOR = "_quantkit_visitor"


@dataclass
class Brought:
    """What a batch brings to a product; its tensors lose their memory when the batch is moved to a file.

    Attributes:
        inputs: [..., I].
        tokens: to an expert's product, the numbers [N] of the tokens whose rows these are; None if it gets all.
        shares: the weights [N] of the expert's output for these tokens.
        at: the inputs [N, I] that tokens would bring to an expert's product, by their numbers; None for all.
    """

    inputs: Tensor
    tokens: Tensor | None = None
    shares: Tensor | None = None
    at: Callable[[Tensor | None], Tensor] | None = None


class Visitor(Protocol):
    """Sees what experts get."""

    def routed(self, experts: nn.Module, counts: list[int]) -> None:
        """Called first, with the number of tokens that are sent to each expert."""
        ...

    def product(self, experts: nn.Module, leaf: str, expert: int, brought: Brought) -> None:
        """Called before each product with the weight of an expert in the parameter `leaf`."""
        ...


def use_experts(model: Any) -> None:
    """Let a model run its experts by `_forward`, where they go through transformers' registry."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    model.config._experts_implementation = IMPLEMENTATION
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = IMPLEMENTATION


def set_visitor(model: nn.Module, visitor: Visitor | None) -> None:
    """Set who sees what the model's experts get."""
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            setattr(module, _VISITOR, visitor)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The output [N, D] of experts for states [N, D], and the experts chosen for each, and their weights, [N, K]; an
    index beyond the experts is none."""
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    inner = self._apply_gate if self.has_gate else self.act_fn
    places = [(top_k_index == expert).nonzero(as_tuple=True) for expert in range(self.num_experts)]
    if visitor is not None:
        visitor.routed(self, [len(tokens) for tokens, _ in places])
    total = torch.zeros_like(hidden_states)
    for expert, (tokens, chosen) in enumerate(places):
        shares = top_k_weights[tokens, chosen]

        def states(some: Tensor | None) -> Tensor:
            return hidden_states if some is None else hidden_states[some]

        def inner_states(some: Tensor | None, expert: int = expert) -> Tensor:
            found: Tensor = inner(_product(self, up, expert, states(some)))
            return found

        if visitor is not None:
            visitor.product(self, up, expert, Brought(states(tokens), tokens, shares, states))
        rows = inner_states(tokens)
        if visitor is not None:
            visitor.product(self, "down_proj", expert, Brought(rows, tokens, shares, inner_states))
        rows = _product(self, "down_proj", expert, rows)
        if self.has_post_expert_norm:
            rows = self.post_expert_norm(rows)
        total.index_add_(0, tokens, (rows * shares.unsqueeze(-1)).to(total.dtype))
    return total


def _product(experts: Any, leaf: str, expert: int, states: Tensor) -> Tensor:
    weight = getattr(experts, leaf)[expert]
    bias = getattr(experts, f"{leaf}_bias")[expert] if experts.has_bias else None
    return nn.functional.linear(states, weight.t() if experts.is_transposed else weight, bias)
