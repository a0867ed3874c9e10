"""Words of GPTQ and AWQ files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.base.json_values import Settings
from quantkit.tensors.qtensor import QuantTensor


def pack_words(fields: Tensor, bits: int) -> Tensor:
    """Fields [N, W] packed along the last axis, least significant first, by arithmetic."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(fields.long(), (0, -fields.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.view(len(fields), -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq_tensors(
    value: QuantTensor, order: Tensor | None = None, version: int = 1
) -> dict[str, Tensor]:
    """A module's tensors in GPTQ as GPTQModel makes them: version 1 subtracts from whole words.

    Args:
        order: of the inputs; input i lies in the place order[i] of the groups.
    """
    bits, columns = value.scheme.bits, value.shape[1]
    size = value.scheme.group_size or columns
    place = torch.arange(columns) if order is None else order
    zero = (
        torch.full(value.scale.shape, value.scheme.levels // 2)
        if value.zero is None
        else value.zero
    )
    ones = (2**32 - 1) // (2**bits - 1)
    qzeros = pack_words(zero.t(), bits)
    return {
        "qweight": pack_words(value.codes[:, place], bits).t().contiguous(),
        "qzeros": qzeros - ones if version == 1 else qzeros,
        "scales": value.scale.half().t().contiguous(),
        "g_idx": (place // size).to(torch.int32),
    }


def gptq_settings(bits: int = 4, size: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": False,
        "sym": True,
        **more,
    }


def stated_settings(values: dict[str, Any]) -> Settings:
    return Settings(values, Path("config.json"), "quantization_config")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
