"""Banks of experts: the quantized weights of all experts of a layer side by side, for kernels that take only those of
the chosen ones, all in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.kernels.backend import ExpertKernel
from quantkit.kernels.block import StackedLinear
from quantkit.kernels.reference import OAI_ALPHA
from quantkit.memory import malloc_trim
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.linear import QuantLinear


@dataclass(frozen=True)
class ExpertBank:
    """The experts of a layer.

    Attributes:
        gate_up, down: the linears of every expert.
    """

    kernel: ExpertKernel
    gate_up: StackedLinear
    down: StackedLinear
    config: ModelConfig

    def __call__(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum [N, D] of what the chosen experts [N, K] give for rows [N, D]."""
        activation, limit = self.config.activation, self.config.activation_limit
        return self.kernel.run(rows, weights, chosen, self.gate_up, self.down, activation, limit)


def stack_experts(module: nn.Module, config: ModelConfig) -> None:
    """Give each mixture of experts in a loaded module its bank, if its linears have one scheme and a backend with a
    kernel for experts.

    The experts' own linears then hold views of the bank, so that there is one copy of the weights.
    """
    for experts in module.modules():
        if isinstance(experts, Experts):
            experts.bank = _bank(experts, config)


def _bank(experts: Experts, config: ModelConfig) -> ExpertBank | None:
    mlps = [mlp for mlp in experts.experts if isinstance(mlp, MLP)]
    wide, narrow = _same_kind([mlp.gate_up_proj for mlp in mlps]), _same_kind([mlp.down_proj for mlp in mlps])
    if not wide or not narrow or wide[0].backend != narrow[0].backend or config.activation_alpha != OAI_ALPHA:
        return None
    operations = wide[0].backend.operations()
    if operations is None or operations.experts is None:
        return None
    kernel = operations.experts
    return ExpertBank(kernel, _stacked(kernel, wide), _stacked(kernel, narrow), config)


def _same_kind(linears: Sequence[nn.Module | None]) -> list[QuantLinear]:
    """All of them; none where one is not quantized, or not as the others."""
    found = [linear for linear in linears if isinstance(linear, QuantLinear)]
    kinds = {(linear.backend, linear.scheme, linear.scale_dtype, linear.bias is None) for linear in found}
    return found if len(found) == len(linears) and len(kinds) == 1 else []


def _stacked(kernel: ExpertKernel, linears: list[QuantLinear]) -> StackedLinear:
    prepared = {}
    for name in linears[0].prepared:
        prepared[name] = kernel.stack([linear.prepared[name] for linear in linears])
        for linear, own in zip(linears, prepared[name], strict=True):
            setattr(linear, name, own)
        malloc_trim()
    biases = [linear.bias.detach().float() for linear in linears if linear.bias is not None]
    first = linears[0]
    return StackedLinear(prepared, first.scheme, first.out_features, torch.stack(biases) if biases else None)
