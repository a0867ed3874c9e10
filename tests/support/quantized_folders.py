"""Folders in compressed-tensors as quantkit lays them out, made without its jobs; and experts in
MXFP4 as gpt-oss is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import oracle
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.architectures.topology import linear_columns
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import QuantScheme


def quantized(
    floats: Path, folder: Path, scheme: QuantScheme, scales: torch.dtype = torch.bfloat16
) -> Path:
    """Round all linears but the head of a float folder; every third scale is negative.

    Args:
        scales: the float type that scales are rounded to and stored in.
    """
    method, source = CompressedTensors(), open_checkpoint(floats)
    modules = [module for module in linear_columns(source.config) if module != "lm_head"]
    oracle.copy(floats, folder)
    tensors = load_file(folder / "model.safetensors")
    for module in modules:
        spec, weight = source.info(f"{module}.weight"), tensors.pop(f"{module}.weight")
        value = quantize_rtn(weight, scheme, scales)
        value.scale.view(-1)[::3] *= -1
        stored = method.codec(scheme).list_stored_tensors(
            replace(spec, scheme=scheme, dtype=DType.of(scales))
        )
        encoded = method.codec(scheme).encode(value)
        tensors |= {one.name: tensor for one, tensor in zip(stored, encoded, strict=True)}
    settings = method.write_settings(dict.fromkeys(modules, scheme), [*modules, "lm_head"])
    oracle.edit_json(folder / "config.json", quantization_config=settings)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_mxfp4_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the experts among a folder's tensors, [E, I, O], by random codes of MXFP4: blocks
    [E, O, I / 32, 16] and exponents [E, O, I / 32].
    """
    drawn = torch.Generator().manual_seed(1)
    replaced: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.dim() != 3:
            replaced[name] = value
            continue
        experts, inputs, outputs = value.shape
        shape = experts, outputs, inputs // 32
        replaced[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=drawn
        )
        replaced[f"{name}_scales"] = torch.randint(
            118, 124, shape, dtype=torch.uint8, generator=drawn
        )
    return replaced
