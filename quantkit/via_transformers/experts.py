"""Run the stacked experts of transformers one after the other, each with the tokens that are sent
to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.passes.routing import list_expert_rows
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

_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_NOT_GATED = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_ALONE = {"weight": ("",)}
_DBRX = {"w1": ("w1",), "v1": ("v1",), "w2": ("w2",)}
LINEARS_OF_PARAMETER: Mapping[str, tuple[str, ...]] = {**_GATED, **_NOT_GATED, **_ALONE, **_DBRX}
"""The linears of one expert in each parameter of stacked experts, by its name in any class."""


@dataclass(frozen=True)
class Experts:
    """How a module stores stacked experts.

    Attributes:
        linears: the linears of one expert in each parameter, by its name. An empty name is that of
            a module with one linear.
        count: the number of experts.
        transposed: the parameters whose inputs come before outputs.
        is_concatenated: whether all outputs of the gate come before those of the other linear;
            otherwise they alternate.
        is_flat: whether the weights of the experts follow each other in a matrix.
        are_apart: whether transformers makes a module of each linear if any weights are quantized.
    """

    linears: Mapping[str, tuple[str, ...]]
    count: int
    transposed: frozenset[str] = frozenset()
    is_concatenated: bool = True
    has_bias: bool = False
    is_flat: bool = False
    are_apart: bool = False

    def split(self, parameter: Tensor) -> Tensor:
        """View a parameter as [E, ...]."""
        if self.is_flat:
            return parameter.reshape(self.count, -1, parameter.shape[1])
        return parameter


def use_experts(model: Any) -> None:
    """Make a model run its experts one after the other, if `experts_of` knows how."""
    from transformers import PreTrainedConfig
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    model.config._experts_implementation = IMPLEMENTATION
    for module in model.modules():
        # Modules may have the config of a part, such as the text's.
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._experts_implementation = IMPLEMENTATION
        forward = _FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)


def set_visitor(model: nn.Module, visitor: Visitor | None) -> None:
    """Set the visitor of all of the model's experts."""
    for module in model.modules():
        if experts_of(module) is not None:
            setattr(module, _VISITOR, visitor)


def experts_of(module: Any) -> Experts | None:
    """Describe how a module of transformers stores stacked experts; None if it has none that can be
    run one by one.
    """
    # transformers' decorator for the registry sets these attributes.
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        linears = _GATED if module.has_gate else _NOT_GATED
        return Experts(
            linears=linears,
            count=module.num_experts,
            transposed=frozenset(linears if module.is_transposed else ()),
            is_concatenated=module.is_concatenated,
            has_bias=module.has_bias,
        )
    describe = _OUTSIDE.get(type(module).__name__)
    return None if describe is None else describe(module)


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the output [N, D] of experts for states [N, D], given the experts chosen for each and
    their weights, [N, K]; an index beyond the experts chooses none.
    """
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    experts = experts_of(self)
    assert experts is not None
    up = next(iter(experts.linears))
    if experts.linears is _NOT_GATED:
        activation = self.act_fn
    elif hasattr(self, "_apply_gate"):
        activation = self._apply_gate
    else:
        # LongCat's have no method for it.
        activation = partial(_apply_gate, self.act_fn)
    # The tokens of each expert, and which of their K choices it is.
    places = list_expert_rows(top_k_index, experts.count)
    if visitor is not None:
        visitor.visit_routing(self, [len(tokens) for tokens, _ in places])

    def activate(expert: int, inputs: Tensor) -> Tensor:
        activated: Tensor = activation(_product(self, up, expert, inputs))
        return activated

    total = torch.zeros_like(hidden_states)
    for expert, (tokens, choices) in enumerate(places):
        shares = top_k_weights[tokens, choices]
        rows = _compute_expert(
            self, expert, tokens, shares, partial(_select, hidden_states), partial(activate, expert)
        )
        if getattr(self, "has_post_expert_norm", False):
            rows = self.post_expert_norm(rows)
        total.index_add_(0, tokens, (rows * shares.unsqueeze(-1)).to(total.dtype))
    return total


def _select(states: Tensor, tokens: Tensor | None) -> Tensor:
    """Select the states of tokens, given by their numbers; None selects all."""
    if tokens is None:
        return states
    return states[tokens]


def _compute_expert(
    module: Any,
    expert: int,
    tokens: Tensor,
    shares: Tensor | None,
    states: Callable[[Tensor | None], Tensor],
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute the outputs [N, O] of an expert for tokens, and show the inputs of its products.

    Args:
        module: has all experts.
        tokens: the numbers [N] of the tokens that are sent to the expert.
        shares: the weights [N] of its outputs; None if they are in its inputs.
        states: computes the expert's inputs [N, I] for tokens, given by their numbers; None means
            all tokens.
        activate: computes the inputs of the last product from those of the others.
    """
    visitor: Visitor | None = getattr(module, _VISITOR, None)
    experts = experts_of(module)
    assert experts is not None
    *first_leaves, last_leaf = experts.linears

    def inner_states(selected: Tensor | None) -> Tensor:
        return activate(states(selected))

    # Experts without tokens are visited too, so that all batches stop at the same places.
    if visitor is not None:
        # Weights with the same inputs object are solved together.
        brought = Brought(states(tokens), tokens, shares, states)
        for leaf in first_leaves:
            visitor.visit_product(module, leaf, expert, brought)
        # It would keep these inputs in memory at the next stop.
        del brought
    rows = inner_states(tokens)
    if visitor is not None:
        brought = Brought(rows, tokens, shares, inner_states)
        visitor.visit_product(module, last_leaf, expert, brought)
    return _product(module, last_leaf, expert, rows)


def _forward_all(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute the outputs [E * N, D] of experts from the states of all tokens for each expert,
    multiplied by the expert's share of the token; only rows that are not zero are computed.
    """
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    states = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
    # A token that is not sent to an expert has states multiplied by 0, and so the output 0.
    numbers, sent_tokens = states.any(dim=-1).nonzero(as_tuple=True)
    places = torch.split(sent_tokens, numbers.bincount(minlength=len(states)).tolist())
    if visitor is not None:
        visitor.visit_routing(self, [len(tokens) for tokens in places])

    def activate(expert: int, inputs: Tensor) -> Tensor:
        gate, up = _product(self, "gate_up_proj", expert, inputs).chunk(2, dim=-1)
        activated: Tensor = up * self.act_fn(gate)
        return activated

    total = torch.zeros_like(states)
    for expert, tokens in enumerate(places):
        total[expert, tokens] = _compute_expert(
            self,
            expert,
            tokens,
            None,
            partial(_select_scaled, states, expert),
            partial(activate, expert),
        )
    return total.view(hidden_states.shape)


def _select_scaled(states: Tensor, expert: int, tokens: Tensor | None) -> Tensor:
    """Select an expert's inputs [N, D] for tokens, given by their numbers, from the states [E, T,
    D] for all experts. Tokens that are not sent to it have the inputs of the expert that has the
    smallest share of them, because its own are zero.
    """
    if tokens is None:
        own = states[expert]
    else:
        own = states[expert, tokens]
    is_sent = own.any(dim=-1, keepdim=True)
    if is_sent.all():
        return own
    if tokens is not None:
        states = states[:, tokens]
    # The expert's own share would be smaller still.
    sizes = states.norm(dim=-1)
    smallest = sizes.masked_fill(sizes == 0, torch.inf).argmin(dim=0)
    others = states[smallest, torch.arange(len(smallest), device=states.device)]
    return torch.where(is_sent, own, others)


def _forward_with_identities(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the output as `_forward`. Indices beyond the experts choose the states themselves."""
    shares = top_k_weights * (top_k_index >= self.num_routed_experts)
    identities: Tensor = hidden_states * shares.sum(dim=-1, keepdim=True)
    return _forward(self, hidden_states, top_k_index, top_k_weights) + identities


class _Sizes(list[int]):
    """The number of rows of each expert, with the tokens of all rows and their shares."""

    tokens: Tensor
    shares: Tensor


def _route(self: Any, hidden_states: Tensor) -> tuple[Any, ...]:
    """Choose experts as JetMoe's router does, and let its experts know the tokens."""
    order, tokens, shares, counts, logits = type(self).forward(self, hidden_states)
    sizes = _Sizes(counts)
    sizes.tokens = tokens
    sizes.shares = shares
    return order, tokens, shares, sizes, logits


def _forward_sorted(self: Any, inputs: Tensor, expert_size: _Sizes) -> Tensor:
    """Compute the product [N, O] of inputs [N, I], sorted by expert, with their expert's weight."""
    visitor: Visitor | None = getattr(self, _VISITOR, None)
    if visitor is not None:
        visitor.visit_routing(self, list(expert_size))
    tokens = torch.split(expert_size.tokens, expert_size)
    shares = torch.split(expert_size.shares, expert_size)
    products: list[Tensor] = []
    for expert, rows in enumerate(torch.split(inputs, expert_size)):
        if visitor is not None:
            brought = Brought(rows, tokens[expert], shares[expert])
            visitor.visit_product(self, "weight", expert, brought)
        products.append(_product(self, "weight", expert, rows))
    return torch.cat(products)


def _forward_flat(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the output [B, T, D] of DBRX's experts for states [B, T, D] or [B * T, D], given the
    experts chosen for each and their weights, [B * T, K].
    """
    mlp = self.mlp
    visitor: Visitor | None = getattr(mlp, _VISITOR, None)
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    experts = experts_of(mlp)
    assert experts is not None
    places = list_expert_rows(top_k_index, experts.count)
    if visitor is not None:
        visitor.visit_routing(mlp, [len(tokens) for tokens, _ in places])

    def activate(expert: int, inputs: Tensor) -> Tensor:
        gate = _product(mlp, "w1", expert, inputs)
        activated: Tensor = mlp.activation_fn(gate) * _product(mlp, "v1", expert, inputs)
        return activated

    total = torch.zeros_like(states)
    for expert, (tokens, choices) in enumerate(places):
        shares = top_k_weights[tokens, choices]
        rows = _compute_expert(
            mlp, expert, tokens, shares, partial(_select, states), partial(activate, expert)
        )
        total.index_add_(0, tokens, rows * shares.unsqueeze(-1))
    return total.view(hidden_states.shape[0], -1, hidden_states.shape[-1])


def _apply_gate(act_fn: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return act_fn(gate) * up


def round_expert_inputs(
    module: nn.Module, leaf: str, expert: int, rows: Sequence[RoundedRows]
) -> None:
    """Let a module of experts round the inputs of an expert's product with some rows of its weight
    in the parameter `leaf`.
    """
    roundings: dict[tuple[str, int], Sequence[RoundedRows]] = getattr(module, _ROUNDINGS, {})
    setattr(module, _ROUNDINGS, {**roundings, (leaf, expert): rows})


def _product(module: Any, leaf: str, expert: int, states: Tensor) -> Tensor:
    """Compute an expert's product, as `_compute_product`, and show its output to the visitor."""
    output = _compute_product(module, leaf, expert, states)
    visitor: Visitor | None = getattr(module, _VISITOR, None)
    if visitor is None:
        return output
    return visitor.visit_output(module, leaf, expert, output)


def _compute_product(module: Any, leaf: str, expert: int, states: Tensor) -> Tensor:
    """Multiply states [N, I] by the weight of an expert in the parameter `leaf`, and add its bias,
    if it has one.
    """
    experts = experts_of(module)
    assert experts is not None
    weight = experts.split(getattr(module, leaf))[expert]
    if leaf in experts.transposed:
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


_OUTSIDE: dict[str, Callable[[Any], Experts]] = {
    "Llama4TextExperts": lambda module: Experts(
        linears=_GATED,
        count=module.num_experts,
        transposed=frozenset(_GATED),
        are_apart=True,
    ),
    "LongcatFlashExperts": lambda module: Experts(_GATED, module.num_routed_experts),
    "Step3p7Experts": lambda module: Experts(_GATED, module.num_experts),
    "JetMoeParallelExperts": lambda module: Experts(_ALONE, module.num_experts),
    "DbrxExpertGLU": lambda module: Experts(
        linears=_DBRX,
        count=module.moe_num_experts,
        transposed=frozenset({"w2"}),
        is_flat=True,
    ),
}
"""How classes outside of transformers' registry store experts."""

_FORWARDS: dict[str, Callable[..., Any]] = {
    # They get all tokens, multiplied by their shares, which are zero for most tokens.
    "Llama4TextExperts": _forward_all,
    "LongcatFlashExperts": _forward_with_identities,
    "Step3p7Experts": _forward,
    "JetMoeTopKGating": _route,
    "JetMoeParallelExperts": _forward_sorted,
    "DbrxExperts": _forward_flat,
}
"""What runs modules of such classes in place of their own `forward`."""
