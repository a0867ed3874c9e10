"""Stacked experts of transformers, one after the other, each with the tokens that are sent to
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

IMPLEMENTATION = "quantkit"
_VISITOR = "_quantkit_visitor"


@dataclass
class Brought:
    """What a batch brings to a product; its tensors lose their memory when the batch is moved to a
    file.

    Attributes:
        inputs: [..., I].
        tokens: to an expert's product, the numbers [N] of the tokens whose rows these are; None if
            it gets all.
        shares: the weights [N] of the expert's output for these tokens.
        at: the inputs [N, I] that tokens would bring to an expert's product, by their numbers; None
            for all. None where an expert's inputs are known for its own tokens only, and where
            there are no experts.
    """

    inputs: Tensor
    tokens: Tensor | None = None
    shares: Tensor | None = None
    at: Callable[[Tensor | None], Tensor] | None = None


@dataclass(frozen=True)
class Experts:
    """How a module holds stacked experts.

    Attributes:
        is_transposed: whether inputs come before outputs.
        is_concatenated: whether the outputs of gates come before those of the others; or they
            alternate.
        are_apart: whether transformers makes a module of each linear where any weights are
            quantized.
    """

    is_transposed: bool
    is_concatenated: bool
    has_bias: bool
    are_apart: bool = False


_OF_ALL_TOKENS = {"Llama4TextExperts": Experts(True, True, has_bias=False, are_apart=True)}
"""Classes outside of the registry whose experts get all tokens, times the weights of their outputs,
which are zero for most.
"""


class Visitor(Protocol):
    """Sees what experts get."""

    def visit_routing(self, experts: nn.Module, counts: list[int]) -> None:
        """Called first, with the number of tokens that are sent to each expert."""
        ...

    def visit_product(self, experts: nn.Module, leaf: str, expert: int, brought: Brought) -> None:
        """Called before each product with the weight of an expert in the parameter `leaf`."""
        ...


def use_experts(model: Any) -> None:
    """Let a model run its experts by `_forward`, where they go through transformers' registry."""
    from transformers import PreTrainedConfig
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    model.config._experts_implementation = IMPLEMENTATION
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._experts_implementation = IMPLEMENTATION
        if type(module).__name__ in _OF_ALL_TOKENS:
            module.forward = MethodType(_forward_all, module)


def set_visitor(model: nn.Module, visitor: Visitor | None) -> None:
    """Set who sees what the model's experts get."""
    for module in model.modules():
        if experts_of(module) is not None:
            setattr(module, _VISITOR, visitor)


def experts_of(module: nn.Module) -> Experts | None:
    """Return how a module of transformers holds stacked experts; None if it holds none that can be
    run one by one.
    """
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        made: Any = module
        return Experts(made.is_transposed, made.is_concatenated, made.has_bias)
    return _OF_ALL_TOKENS.get(type(module).__name__)


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the output [N, D] of experts for states [N, D], and the experts chosen for each, and
    their weights, [N, K]; an index beyond the experts is none.
    """
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    if self.has_gate:
        up = "gate_up_proj"
    else:
        up = "up_proj"
    if self.has_gate:
        inner = self._apply_gate
    else:
        inner = self.act_fn
    places = [(top_k_index == expert).nonzero(as_tuple=True) for expert in range(self.num_experts)]
    if visitor is not None:
        visitor.visit_routing(self, [len(tokens) for tokens, _ in places])
    total = torch.zeros_like(hidden_states)
    for expert, (tokens, chosen) in enumerate(places):
        shares = top_k_weights[tokens, chosen]

        def states(some: Tensor | None) -> Tensor:
            if some is None:
                return hidden_states
            return hidden_states[some]

        def inner_states(some: Tensor | None, expert: int = expert) -> Tensor:
            result: Tensor = inner(_product(self, up, expert, states(some)))
            return result

        if visitor is not None:
            visitor.visit_product(self, up, expert, Brought(states(tokens), tokens, shares, states))
        rows = inner_states(tokens)
        if visitor is not None:
            visitor.visit_product(
                self, "down_proj", expert, Brought(rows, tokens, shares, inner_states)
            )
        rows = _product(self, "down_proj", expert, rows)
        if self.has_post_expert_norm:
            rows = self.post_expert_norm(rows)
        total.index_add_(0, tokens, (rows * shares.unsqueeze(-1)).to(total.dtype))
    return total


def _forward_all(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the outputs [E * N, D] of experts, each for all tokens [N, D], of those that are
    not zero.
    """
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    states = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
    places = [state.any(dim=-1).nonzero().squeeze(1) for state in states]
    if visitor is not None:
        visitor.visit_routing(self, [len(tokens) for tokens in places])
    total = torch.zeros_like(states)
    for expert, tokens in enumerate(places):
        rows = states[expert, tokens]
        for leaf in ("gate_up_proj", "down_proj"):
            if visitor is not None:
                visitor.visit_product(self, leaf, expert, Brought(rows, tokens))
            rows = rows @ getattr(self, leaf)[expert]
            if leaf == "gate_up_proj":
                gate, up = rows.chunk(2, dim=-1)
                rows = up * self.act_fn(gate)
        total[expert, tokens] = rows
    return total.view(hidden_states.shape)


def _product(experts: Any, leaf: str, expert: int, states: Tensor) -> Tensor:
    weight = getattr(experts, leaf)[expert]
    if experts.has_bias:
        bias = getattr(experts, f"{leaf}_bias")[expert]
    else:
        bias = None
    return nn.functional.linear(states, weight.t() if experts.is_transposed else weight, bias)
