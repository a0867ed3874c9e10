"""Folders in compressed-tensors as quantkit lays them out, made without its jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import oracle
import torch
from safetensors.torch import load_file, save_file

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
