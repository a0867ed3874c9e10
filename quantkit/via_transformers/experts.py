"""Run the stacked experts of transformers one after the other, each with the tokens that are sent
to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.passes.site import Brought, Visitor
from quantkit.tensors.activations import InputRounding

IMPLEMENTATION = "quantkit"
# The attribute of a module of experts with its visitor.
_VISITOR = "_quantkit_visitor"
# The attribute with the roundings of inputs, by parameter and expert.
_ROUNDINGS = "_quantkit_roundings"

RoundedRows = tuple[int, int, InputRounding | None]
"""The first row of a weight, the row after the last, and how the inputs of their product are
rounded; None for floats.
"""


@dataclass(frozen=True)
class Experts:
    """How a module stores stacked experts.

    Attributes:
        is_transposed: whether inputs come before outputs.
        is_concatenated: whether all outputs of the gate come before those of the other linear;
            otherwise they alternate.
        are_apart: whether transformers makes a module of each linear if any weights are quantized.
    """

    is_transposed: bool
    is_concatenated: bool
    has_bias: bool
    are_apart: bool = False


_OF_ALL_TOKENS = {"Llama4TextExperts": Experts(True, True, has_bias=False, are_apart=True)}
"""Classes outside of the registry whose experts get all tokens, multiplied by the weights of their
outputs, which are zero for most tokens.
"""


def use_experts(model: Any) -> None:
    """Make a model run its experts by `_forward` if they go through transformers' registry."""
    from transformers import PreTrainedConfig
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    model.config._experts_implementation = IMPLEMENTATION
    for module in model.modules():
        # Modules may have the config of a part, such as the text's.
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._experts_implementation = IMPLEMENTATION
        if type(module).__name__ in _OF_ALL_TOKENS:
            module.forward = MethodType(_forward_all, module)


def set_visitor(model: nn.Module, visitor: Visitor | None) -> None:
    """Set the visitor of all of the model's experts."""
    for module in model.modules():
        if experts_of(module) is not None:
            setattr(module, _VISITOR, visitor)


def experts_of(module: nn.Module) -> Experts | None:
    """Describe how a module of transformers stores stacked experts; None if it has none that can be
    run one by one.
    """
    # transformers' decorator for the registry sets these attributes.
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        experts: Any = module
        return Experts(experts.is_transposed, experts.is_concatenated, experts.has_bias)
    return _OF_ALL_TOKENS.get(type(module).__name__)


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the output [N, D] of experts for states [N, D], given the experts chosen for each and
    their weights, [N, K]; an index beyond the experts chooses none.
    """
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    if self.has_gate:
        up = "gate_up_proj"
        activation = self._apply_gate
    else:
        up = "up_proj"
        activation = self.act_fn
    # The tokens of each expert, and which of their K choices it is.
    places = [(top_k_index == expert).nonzero(as_tuple=True) for expert in range(self.num_experts)]
    if visitor is not None:
        visitor.visit_routing(self, [len(tokens) for tokens, _ in places])
    total = torch.zeros_like(hidden_states)
    for expert, (tokens, choices) in enumerate(places):
        shares = top_k_weights[tokens, choices]

        def states(selected: Tensor | None) -> Tensor:
            if selected is None:
                return hidden_states
            return hidden_states[selected]

        # The default binds this expert: the visitor may call the function in a later turn.
        def inner_states(selected: Tensor | None, expert: int = expert) -> Tensor:
            activated: Tensor = activation(_product(self, up, expert, states(selected)))
            return activated

        # Experts without tokens are visited too, so that all batches stop at the same places.
        if visitor is not None:
            visitor.visit_product(self, up, expert, Brought(states(tokens), tokens, shares, states))
        rows = inner_states(tokens)
        if visitor is not None:
            # Not a variable, which would keep these inputs in memory at the next stop.
            visitor.visit_product(
                self, "down_proj", expert, Brought(rows, tokens, shares, inner_states)
            )
        rows = _product(self, "down_proj", expert, rows)
        if self.has_post_expert_norm:
            rows = self.post_expert_norm(rows)
        total.index_add_(0, tokens, (rows * shares.unsqueeze(-1)).to(total.dtype))
    return total


def _forward_all(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute the outputs [E * N, D] of experts from the states of all tokens for each expert; only
    rows that are not zero are computed.
    """
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    states = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
    # A token that is not sent to an expert has states multiplied by 0, and so the output 0.
    places = [state.any(dim=-1).nonzero().squeeze(1) for state in states]
    if visitor is not None:
        visitor.visit_routing(self, [len(tokens) for tokens in places])
    total = torch.zeros_like(states)
    for expert, tokens in enumerate(places):
        rows = states[expert, tokens]
        for leaf in ("gate_up_proj", "down_proj"):
            if visitor is not None:
                visitor.visit_product(self, leaf, expert, Brought(rows, tokens))
            rows = _product(self, leaf, expert, rows)
            # The activation follows the first product.
            if leaf == "gate_up_proj":
                gate, up = rows.chunk(2, dim=-1)
                rows = up * self.act_fn(gate)
        total[expert, tokens] = rows
    return total.view(hidden_states.shape)


def round_expert_inputs(
    module: nn.Module, leaf: str, expert: int, rows: Sequence[RoundedRows]
) -> None:
    """Let a module of experts round the inputs of an expert's product with some rows of its weight
    in the parameter `leaf`.
    """
    roundings: dict[tuple[str, int], Sequence[RoundedRows]] = getattr(module, _ROUNDINGS, {})
    setattr(module, _ROUNDINGS, {**roundings, (leaf, expert): rows})


def _product(module: Any, leaf: str, expert: int, states: Tensor) -> Tensor:
    """Multiply states [N, I] by the weight of an expert in the parameter `leaf`, and add its bias,
    if it has one.
    """
    experts = experts_of(module)
    assert experts is not None
    weight = getattr(module, leaf)[expert]
    if experts.is_transposed:
        weight = weight.t()
    bias = None
    if experts.has_bias:
        bias = getattr(module, f"{leaf}_bias")[expert]
    rounded_rows = getattr(module, _ROUNDINGS, {}).get((leaf, expert))
    if rounded_rows is None:
        return nn.functional.linear(states, weight, bias)
    # The linears in a weight may have different schemes.
    products: list[Tensor] = []
    for start, stop, rounding in rounded_rows:
        inputs = states if rounding is None else rounding.round_inputs(states)
        products.append(nn.functional.linear(inputs, weight[start:stop]))
    product = torch.cat(products, dim=-1)
    if bias is not None:
        product += bias
    return product
