"""Mixtures of experts by the formula, in float64, and random ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from schemes import any_scheme
from torch import Tensor

from quantkit.kernels.backend import Backend, ExpertKernel, PreparedLinear
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn


@dataclass
class Mixture:
    """The weights of all experts; biases are [E, O] or None."""

    gate_up: list[QuantTensor]
    down: list[QuantTensor]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    limit: float | None

    @classmethod
    def random(
        cls,
        text: str,
        count: int,
        hidden: int,
        size: int,
        *,
        activation: str = "silu",
        limit: float | None = None,
        bias: bool = False,
        scale_dtype: torch.dtype = torch.float32,
    ) -> Mixture:
        """Experts of a scheme."""
        wide, narrow = (
            [
                quantize_rtn(torch.randn(shape) / 8, any_scheme(text), scale_dtype)
                for _ in range(count)
            ]
            for shape in ((2 * size, hidden), (hidden, size))
        )
        biases = (
            (torch.randn(count, 2 * size), torch.randn(count, hidden)) if bias else (None, None)
        )
        return cls(wide, narrow, *biases, activation, limit)

    def choices(self, tokens: int, per_token: int) -> tuple[Tensor, Tensor]:
        """Random shares and experts [N, K] of tokens."""
        shares = torch.randn(tokens, len(self.down)).softmax(-1)
        weights, chosen = shares.topk(per_token)
        return weights.contiguous(), chosen

    def stacked(
        self, backend: Backend, kernel: ExpertKernel, device: torch.device
    ) -> tuple[PreparedLinear, PreparedLinear]:
        """What a backend prepares of them."""
        linears = []
        for weights, bias in ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias)):
            each = [backend.prepare(weight.to(device)) for weight in weights]
            prepared = {name: kernel.stack([one[name] for one in each]) for name in each[0]}
            bias = None if bias is None else bias.to(device)
            linears.append(PreparedLinear(prepared, weights[0].scheme, bias))
        return linears[0], linears[1]


def gated(gate: Tensor, up: Tensor, activation: str, limit: float | None) -> Tensor:
    """The product of an activated gate and `up`."""
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    maximum = float("inf") if limit is None else limit
    gate, up = gate.clamp(max=maximum), up.clamp(-maximum, maximum)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def summed(mixture: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The weighted sums [N, D], float64, token by token and expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    wide = [weight.dequantize().double() for weight in mixture.gate_up]
    narrow = [weight.dequantize().double() for weight in mixture.down]
    for row, (shares, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for share, expert in zip(shares, experts, strict=True):
            inner = wide[expert] @ x[row].double()
            if mixture.gate_up_bias is not None:
                inner += mixture.gate_up_bias[expert].double()
            given = narrow[expert] @ gated(*inner.chunk(2), mixture.activation, mixture.limit)
            if mixture.down_bias is not None:
                given += mixture.down_bias[expert].double()
            out[row] += share.double() * given
    return out
