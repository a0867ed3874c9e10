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
from quantkit.model.norms import UnitNorm, hidden_norm


class MLP(nn.Module):
    """A feed-forward network, with a gate (2002.05202) or without."""

    def __init__(
        self, config: ModelConfig, size: int, *, bias: bool, outer_size: int | None = None
    ) -> None:
        """`outer_size` is that of inputs and outputs, by default the hidden size."""
        super().__init__()
        self.config = config
        outer_size = outer_size or config.hidden_size
        self.gate_proj: nn.Module | None = None
        if config.mlp_gate:
            self.gate_proj = nn.Linear(outer_size, size, bias=bias)
        self.up_proj = nn.Linear(outer_size, size, bias=bias)
        # Replaces gate and up if loading fuses them: one product of many rows is faster than two
        # of few rows.
        self.gate_up_proj: nn.Module | None = None
        self.down_proj = nn.Linear(size, outer_size, bias=bias)

    @property
    def first_linears(self) -> tuple[str, ...]:
        """Return the names of the linears that see its inputs."""
        if self.config.mlp_gate:
            return "gate_proj", "up_proj"
        return ("up_proj",)

    def inner(self, x: Tensor) -> Tensor:
        """Compute inner states [..., F] of normed hidden states [..., D]."""
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        elif self.gate_proj is not None:
            gate = self.gate_proj(x)
            up = self.up_proj(x)
        else:
            assert self.config.activation == "relu2"
            squared: Tensor = F.relu(self.up_proj(x)).square()
            return squared
        config = self.config
        return apply_gate(
            gate, up, config.activation, config.activation_limit, config.activation_alpha
        )

    def output(self, inner: Tensor) -> Tensor:
        """Project inner states to the branch's output, [..., D]."""
        out: Tensor = self.down_proj(inner)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Compute the branch's output of normed hidden states [..., D]."""
        return self.output(self.inner(x))


class Experts(nn.Module):
    """A mixture of experts (1701.06538): each token goes to the few that a router chooses for it,
    weighted by their shares, and to shared ones if there are any.

    Its `inner` returns the states unchanged, because the whole branch is in `output`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = experts = config.experts
        self.gate = nn.Linear(config.hidden_size, experts.count, bias=experts.router_bias)
        outer_size = experts.latent_size or config.hidden_size
        self.experts = nn.ModuleList(
            MLP(config, experts.size, bias=experts.bias, outer_size=outer_size)
            for _ in range(experts.count)
        )
        self.latent_in_proj = self.latent_out_proj = None
        if experts.latent_size:
            self.latent_in_proj = nn.Linear(config.hidden_size, outer_size, bias=False)
            self.latent_out_proj = nn.Linear(outer_size, config.hidden_size, bias=False)
        self.score_correction: nn.Parameter | None = None
        if experts.score_correction:
            self.score_correction = nn.Parameter(torch.empty(experts.count))
        # Adds the outputs of the processes that share the experts.
        self.all_reduce: Callable[[Tensor], Tensor] | None = None
        # A kernel that replaces the loop over experts.
        self.bank: ExpertBank | None = None
        self.expert_scales: nn.Parameter | None = None
        if experts.expert_scales:
            self.expert_scales = nn.Parameter(torch.empty(experts.count))
        self.router_norm: UnitNorm | None = None
        self.router_scale: nn.Parameter | None = None
        self.experts_layernorm = self.experts_output_layernorm = None
        self.shared_layernorm = self.shared_output_layernorm = None
        if experts.separate_norms:
            self.router_norm = UnitNorm(config.norm_eps)
            self.router_scale = nn.Parameter(torch.empty(config.hidden_size))
            self.experts_layernorm = hidden_norm(config)
            self.experts_output_layernorm = hidden_norm(config)
            if experts.shared_size:
                self.shared_layernorm = hidden_norm(config)
                self.shared_output_layernorm = hidden_norm(config)
        self.shared_experts = self.shared_expert_gate = None
        if experts.shared_size:
            self.shared_experts = MLP(config, config.compute_shared_size(layer), bias=False)
        if experts.shared_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        """Return the normed hidden states [B, T, D] themselves, or those before any norm if the
        experts have norms of their own.
        """
        return x

    def output(self, x: Tensor) -> Tensor:
        """Compute the branch's output [B, T, D] of what `inner` returned, [B, T, D]."""
        weights, chosen = self.route(x)
        states = self.compute_expert_inputs(x)
        out = self.apply_chosen_experts(
            states.flatten(0, -2), weights.flatten(0, -2), chosen.flatten(0, -2)
        ).view(states.shape)
        if self.latent_out_proj is not None:
            # Of each process's part: the sum over processes comes after it.
            out = _product(out, self.latent_out_proj)
        # Norms of the outputs need those of all processes.
        if self.experts_output_layernorm is not None:
            out = self.experts_output_layernorm(self._add_up(out))
        if self.shared_experts is not None:
            shared = self.shared_experts(
                x if self.shared_layernorm is None else self.shared_layernorm(x)
            )
            if self.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(_product(x, self.shared_expert_gate))
            if self.shared_output_layernorm is not None:
                shared = self.shared_output_layernorm(self._add_up(shared))
            out = out + shared
        if self.experts_output_layernorm is not None:
            return out
        # Shared experts are split like routed ones, so one all-reduce adds both.
        return self._add_up(out)

    def compute_expert_inputs(self, x: Tensor) -> Tensor:
        """Compute the states [..., L] that chosen experts see of what `inner` returned,
        [..., D].
        """
        states = x if self.experts_layernorm is None else self.experts_layernorm(x)
        if self.latent_in_proj is not None:
            states = _product(states, self.latent_in_proj)
        return states

    def _add_up(self, out: Tensor) -> Tensor:
        """Add the outputs of the processes that share the experts."""
        if self.all_reduce is None:
            return out
        return self.all_reduce(out)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens [..., D]: their shares, float32 [..., K], and numbers
        [..., K]. Of equal shares, those of lower numbers come first.
        """
        shares = self.compute_scores(self.logits(x))
        # A stable sort: `topk` does not define which of equal shares it returns.
        numbers = self.correct_scores(shares).argsort(dim=-1, descending=True, stable=True)
        chosen = numbers[..., : self.config.per_token].contiguous()
        weights = shares.gather(-1, chosen)
        if self.config.normalized:
            total = weights.sum(-1, keepdim=True)
            if self.config.normalization_eps:
                total = total + self.config.normalization_eps
            weights = weights / total
        if self.config.scaling != 1:
            weights = weights * self.config.scaling
        if self.expert_scales is not None:
            weights = weights * self.expert_scales.float()[chosen]
        return weights, chosen

    def compute_scores(self, logits: Tensor) -> Tensor:
        """Compute the scores [..., E] of experts from the router's logits [..., E]."""
        if self.config.scores == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(-1)

    def correct_scores(self, scores: Tensor) -> Tensor:
        """Add the correction to scores [..., E]: the experts with the highest sums are chosen, and
        their weights do not include it.
        """
        if self.score_correction is None:
            return scores
        return scores + self.score_correction.float()

    def logits(self, x: Tensor) -> Tensor:
        """Compute the router's logits of tokens [..., D], float32 [..., E]."""
        if self.config.float32_router:
            x = x.float()
        if self.router_norm is not None and self.router_scale is not None:
            # In this order, as Gemma 4's code rounds.
            x = self.router_norm(x) * self.router_scale.to(x.dtype) * x.shape[-1] ** -0.5
        return _product(x, self.gate).float()

    def apply_chosen_experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum the outputs of the chosen experts [N, K] for rows [N, D], weighted: [N, D]."""
        if self.config.weighted_inputs:
            # A row for each expert, which it sums with a weight of 1.
            count = chosen.shape[-1]
            inputs = rows.repeat_interleave(count, dim=0) * weights.to(rows.dtype).view(-1, 1)
            ones = torch.ones_like(weights).view(-1, 1)
            outputs = self._sum_chosen_experts(inputs, ones, chosen.view(-1, 1))
            return outputs.view(-1, count, rows.shape[-1]).sum(1)
        return self._sum_chosen_experts(rows, weights, chosen)

    def _sum_chosen_experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if self.bank is not None and not self._needs_gradients(rows):
            return self.bank(rows, weights, chosen)
        out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        # A recorded or compiled step cannot depend on the choice, so all experts run, and those
        # that are not chosen have the weight 0.
        if rows.is_cuda or torch.compiler.is_compiling():
            shares = weights.new_zeros(len(rows), len(self.experts)).scatter_(1, chosen, weights)
            for number, expert in enumerate(self.experts):
                out += expert(rows).float() * shares[:, number : number + 1]
            return out.to(rows.dtype)
        for number in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == number).nonzero(as_tuple=True)
            outputs = self.experts[number](rows[tokens]).float()
            out.index_add_(0, tokens, outputs * weights[tokens, places].unsqueeze(-1))
        return out.to(rows.dtype)

    def _needs_gradients(self, rows: Tensor) -> bool:
        """Return whether torch has to record the experts: kernels compute no gradients."""
        if not torch.is_grad_enabled():
            return False
        trained = any(parameter.requires_grad for parameter in self.experts.parameters())
        return trained or rows.requires_grad


def _product(x: Tensor, linear: nn.Module) -> Tensor:
    """Apply a linear of floats to states of any dtype, in that dtype."""
    # An offloaded linear, whose weight is on disk.
    if not isinstance(linear, nn.Linear):
        product: Tensor = linear(x)
        return product
    if linear.bias is None:
        bias = None
    else:
        bias = linear.bias.to(x.dtype)
    return F.linear(x, linear.weight.to(x.dtype), bias)


@dataclass(frozen=True)
class ExpertBank:
    """The experts of a layer with their weights stacked, quantized or floats, for a kernel that
    reads those of the chosen experts in one call.
    """

    kernel: ExpertKernel
    gate_up: PreparedLinear
    down: PreparedLinear
    config: ModelConfig

    def __call__(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum the outputs of the chosen experts [N, K] for rows [N, D], weighted: [N, D]."""
        activation = self.config.activation
        limit = self.config.activation_limit
        return self.kernel.run(rows, weights, chosen, self.gate_up, self.down, activation, limit)


def stack_experts(
    module: nn.Module, config: ModelConfig, for_floats: ExpertKernel | None = None
) -> None:
    """Stack the experts of each mixture of experts in a loaded module into a bank, if all linears
    have the same scheme and their backend has a kernel for experts.

    The weights of the experts' linears become views of the bank, so that there is only one copy of
    them.

    Args:
        for_floats: the kernel for experts without quantized weights.
    """
    for experts in module.modules():
        if isinstance(experts, Experts):
            experts.bank = _make_bank(experts, config, for_floats)


def _make_bank(
    experts: Experts, config: ModelConfig, for_floats: ExpertKernel | None
) -> ExpertBank | None:
    mlps = [mlp for mlp in experts.experts if isinstance(mlp, MLP)]
    if config.mlp_gate:
        wide = _list_if_same_kind([mlp.gate_up_proj for mlp in mlps])
    else:
        wide = _list_if_same_kind([mlp.up_proj for mlp in mlps])
    narrow = _list_if_same_kind([mlp.down_proj for mlp in mlps])
    if not wide or not narrow:
        return None
    # The kernels have this factor as a constant.
    if config.activation_alpha != OAI_ALPHA:
        return None
    kernel = for_floats
    quantized = [linear for linear in (wide[0], narrow[0]) if isinstance(linear, QuantLinear)]
    if quantized:
        if quantized[0].backend != quantized[-1].backend:
            return None
        offered = quantized[0].backend.offer_kernels()
        kernel = None if offered is None else offered.experts
    if kernel is None or (len(quantized) < 2 and not kernel.takes_floats):
        return None
    if not (config.mlp_gate or kernel.takes_ungated):
        return None
    return ExpertBank(kernel, _stack_linears(kernel, wide), _stack_linears(kernel, narrow), config)


def _list_if_same_kind(linears: Sequence[nn.Module | None]) -> list[QuantLinear | nn.Linear]:
    """Return all linears if they are quantized in the same way, or all of floats, otherwise
    none.
    """
    listed: list[QuantLinear | nn.Linear] = []
    kinds: set[tuple[object, ...]] = set()
    for linear in linears:
        # Kernels for experts take one weight of each.
        if isinstance(linear, QuantLinear) and not linear.joined:
            kinds.add((linear.backend, linear.scheme, linear.scale_dtype, linear.bias is None))
        # Not its subclasses, which compute something else.
        elif type(linear) is nn.Linear:
            kinds.add((linear.weight.dtype, linear.bias is None))
        else:
            return []
        listed.append(linear)
    if len(kinds) == 1:
        return listed
    return []


def _stack_linears(
    kernel: ExpertKernel, linears: Sequence[QuantLinear | nn.Linear]
) -> PreparedLinear:
    prepared: dict[str, Tensor] = {}
    first = linears[0]
    if isinstance(first, QuantLinear):
        scheme = first.scheme
        names = list(first.backend_tensors)
    else:
        scheme = None
        names = ["weight"]
    for name in names:
        prepared[name] = kernel.stack([getattr(linear, name).detach() for linear in linears])
        for linear, view in zip(linears, prepared[name], strict=True):
            if isinstance(linear, QuantLinear):
                setattr(linear, name, view)
            else:
                linear.weight = nn.Parameter(view, requires_grad=False)
        # Both copies of a tensor exist for a moment; return the old one to the system before the
        # next tensor is stacked.
        malloc_trim()
    biases: list[Tensor] = []
    for linear in linears:
        if linear.bias is not None:
            biases.append(linear.bias.detach().float())
    if not biases:
        return PreparedLinear(prepared, scheme, None)
    return PreparedLinear(prepared, scheme, torch.stack(biases))
