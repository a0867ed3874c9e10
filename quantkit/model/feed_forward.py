"""Feed-forward networks: one for all tokens, or a mixture of experts.

N tokens, D hidden size, F inner size, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.base.memory import malloc_trim
from quantkit.kernels.backend import OAI_ALPHA, ExpertKernel, PreparedLinear, apply_gate
from quantkit.model.linear import QuantLinear


class MLP(nn.Module):
    """A gated feed-forward network (2002.05202)."""

    def __init__(self, config: ModelConfig, size: int, *, bias: bool) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=bias)
        self.gate_up_proj: nn.Module | None = (
            # Takes the place of the two where they are fused.
            None
        )
        self.down_proj = nn.Linear(size, config.hidden_size, bias=bias)

    def inner(self, x: Tensor) -> Tensor:
        """Gated inner states, [..., F], of normed hidden states [..., D]."""
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate = self.gate_proj(x)
            up = self.up_proj(x)
        own = self.config
        return apply_gate(gate, up, own.activation, own.activation_limit, own.activation_alpha)

    def output(self, inner: Tensor) -> Tensor:
        """Return what is added to the hidden states, [..., D]."""
        out: Tensor = self.down_proj(inner)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [..., D] to what is added to the hidden states."""
        return self.output(self.inner(x))


class Experts(nn.Module):
    """A mixture of experts (1701.06538): each token goes to the few that a router chooses for it,
    weighted by their shares, and to shared ones if there are any.

    Its `inner` gives the states as they are: the branch ends with the experts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = experts = config.experts
        self.gate = nn.Linear(config.hidden_size, experts.count, bias=experts.router_bias)
        self.experts = nn.ModuleList(
            MLP(config, experts.size, bias=experts.bias) for _ in range(experts.count)
        )
        self.sum: Callable[[Tensor], Tensor] | None = (
            None  # of what the processes give that share the experts
        )
        self.bank: ExpertBank | None = None  # a kernel for `routed`
        self.shared_experts = self.shared_expert_gate = None
        if experts.shared_size:
            self.shared_experts = MLP(config, experts.shared_size, bias=False)
        if experts.shared_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        """Return the normed hidden states [B, T, D] themselves."""
        return x

    def output(self, x: Tensor) -> Tensor:
        """Return what is added to the hidden states, [B, T, D], of normed hidden states [B, T,
        D].
        """
        weights, chosen = self.route(x)
        out = self.apply_chosen_experts(
            x.flatten(0, -2), weights.flatten(0, -2), chosen.flatten(0, -2)
        ).view(x.shape)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            gate = self.shared_expert_gate
            out = out + (shared if gate is None else shared * torch.sigmoid(_product(x, gate)))
        if self.sum is None:
            return out
        return self.sum(out)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares, float32 [..., K], and numbers [..., K] of the experts chosen for
        tokens [..., D]; of equal ones those of the lower numbers.
        """
        shares, numbers = self.logits(x).softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights, chosen = (
            found[..., : self.config.per_token].contiguous() for found in (shares, numbers)
        )
        if self.config.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def logits(self, x: Tensor) -> Tensor:
        """Return what the router gives for tokens [..., D], float32 [..., E]."""
        return _product(x, self.gate).float()

    def apply_chosen_experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum [N, D] of what the chosen experts [N, K] give for rows [N, D]."""
        if self.bank is not None:
            return self.bank(rows, weights, chosen)
        out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        # Where what is computed cannot depend on the choice.
        if rows.is_cuda or torch.compiler.is_compiling():
            shares = weights.new_zeros(len(rows), len(self.experts)).scatter_(1, chosen, weights)
            for number, expert in enumerate(self.experts):
                out += expert(rows).float() * shares[:, number : number + 1]
            return out.to(rows.dtype)
        for number in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == number).nonzero(as_tuple=True)
            given = self.experts[number](rows[tokens]).float()
            out.index_add_(0, tokens, given * weights[tokens, places].unsqueeze(-1))
        return out.to(rows.dtype)


def _product(x: Tensor, linear: nn.Module) -> Tensor:
    """Return what a linear of floats gives for states of any dtype, in theirs."""
    # Its weight is on disk.
    if not isinstance(linear, nn.Linear):
        given: Tensor = linear(x)
        return given
    if linear.bias is None:
        bias = None
    else:
        bias = linear.bias.to(x.dtype)
    return F.linear(x, linear.weight.to(x.dtype), bias)


@dataclass(frozen=True)
class ExpertBank:
    """The experts of a layer, their quantized weights side by side, for a kernel that reads those
    of the chosen ones in one call.
    """

    kernel: ExpertKernel
    gate_up: PreparedLinear
    down: PreparedLinear
    config: ModelConfig

    def __call__(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum [N, D] of what the chosen experts [N, K] give for rows [N, D]."""
        activation = self.config.activation
        limit = self.config.activation_limit
        return self.kernel.run(rows, weights, chosen, self.gate_up, self.down, activation, limit)


def stack_experts(module: nn.Module, config: ModelConfig) -> None:
    """Give each mixture of experts in a loaded module its bank, if its linears have one scheme and
    a backend with a kernel for experts.

    The experts' own linears then hold views of the bank, so that there is one copy of the weights.
    """
    for experts in module.modules():
        if isinstance(experts, Experts):
            experts.bank = _bank(experts, config)


def _bank(experts: Experts, config: ModelConfig) -> ExpertBank | None:
    mlps = [mlp for mlp in experts.experts if isinstance(mlp, MLP)]
    wide = _same_kind([mlp.gate_up_proj for mlp in mlps])
    narrow = _same_kind([mlp.down_proj for mlp in mlps])
    if (
        not wide
        or not narrow
        or wide[0].backend != narrow[0].backend
        or config.activation_alpha != OAI_ALPHA
    ):
        return None
    operations = wide[0].backend.operations()
    if operations is None or operations.experts is None:
        return None
    kernel = operations.experts
    return ExpertBank(kernel, _stack_linears(kernel, wide), _stack_linears(kernel, narrow), config)


def _same_kind(linears: Sequence[nn.Module | None]) -> list[QuantLinear]:
    """Return all of them; none where one is not quantized, or not as the others."""
    result = [linear for linear in linears if isinstance(linear, QuantLinear)]
    kinds = set()
    for linear in result:
        kinds.add((linear.backend, linear.scheme, linear.scale_dtype, linear.bias is None))
    if len(result) == len(linears) and len(kinds) == 1:
        return result
    return []


def _stack_linears(kernel: ExpertKernel, linears: list[QuantLinear]) -> PreparedLinear:
    prepared = {}
    for name in linears[0].backend_tensors:
        prepared[name] = kernel.stack([linear.backend_tensors[name] for linear in linears])
        for linear, own in zip(linears, prepared[name], strict=True):
            setattr(linear, name, own)
        malloc_trim()
    biases = [linear.bias.detach().float() for linear in linears if linear.bias is not None]
    return PreparedLinear(prepared, linears[0].scheme, torch.stack(biases) if biases else None)
