"""Round keys and values as a quantized cache stores them, see `formats.kv_scales`, and measure the
maxima from which the scales of such a cache follow.

B batch, T positions, K KV heads, Dh head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.tensors.float8 import round_to_e4m3


class Fp8Rounding(nn.Module):
    """Rounds keys and values [B, K, T, Dh] to float8_e4m3fn times a scale of each, computed in
    float32.

    In float32 this is compressed-tensors' `fake_quantize`; 16-bit values are divided in float32
    too, as in vLLM's kernels.
    """

    k_scale: Tensor
    v_scale: Tensor

    def __init__(self, scales: tuple[float, float], device: torch.device | str) -> None:
        super().__init__()
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            self.register_buffer(
                name, torch.tensor([scale], dtype=torch.float32, device=device), persistent=False
            )

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Round both; each keeps its dtype."""
        return _round_rows(keys, self.k_scale), _round_rows(values, self.v_scale)


class CacheMaxima(nn.Module):
    """Passes keys and values through unchanged, and records the largest absolute value of each:
    `largest`, [2], float32, NaN after any NaN.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.largest = torch.zeros(2, device=device)

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Update the maxima and return both unchanged."""
        maxima = torch.stack((keys.abs().amax().float(), values.abs().amax().float()))
        # `torch.maximum` propagates NaN, so that it is not lost in later batches.
        self.largest = torch.maximum(self.largest, maxima)
        return keys, values


def _round_rows(rows: Tensor, scale: Tensor) -> Tensor:
    return (round_to_e4m3(rows.float() / scale) * scale).to(rows.dtype)
