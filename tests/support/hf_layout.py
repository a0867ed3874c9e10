"""Quantized folders in the layout of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from families import let_run, make
from safetensors.torch import load_file, save_file

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import FAMILIES
from quantkit.architectures.families.family import Family
from quantkit.base.json_values import Settings
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec


def restacked(case: str, folder: Path, *, transposed: bool = False) -> Path:
    """A model with experts as transformers keeps them in memory."""
    oracle.save(make(case), folder, save_original_format=False)
    if transposed:
        file = folder / "model.safetensors"
        stored = {
            name: tensor.transpose(1, 2).contiguous() if tensor.ndim == 3 else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(stored, file, {"format": "pt"})
    return folder


SCHEMES = [QuantScheme(8, None), QuantScheme(4, 32), QuantScheme(4, 32, symmetric=False)]


def quantized_on_disk(folder: Path, scheme: QuantScheme) -> dict[str, QuantTensor]:
    """Replace the linears of a folder, as they are called there, by compressed-tensors; what
    they are now.
    """
    file, method = folder / "model.safetensors", CompressedTensors()
    found, stored = {}, load_file(file)
    for name, tensor in list(stored.items()):
        if (tensor.ndim == 2 and name.endswith("proj.weight")) or ".experts." in name:
            module, value = (
                name.removesuffix(".weight"),
                quantize_rtn(stored.pop(name), scheme, torch.float32),
            )
            found[module] = value
            expected = method.codec(scheme).list_stored_tensors(
                TensorSpec(name, value.shape, DType.FLOAT32, scheme)
            )
            tensors = method.codec(scheme).encode(value)
            stored.update({one.name: data for one, data in zip(expected, tensors, strict=True)})
    save_file(stored, file, {"format": "pt"})
    settings = method.write_settings(dict.fromkeys(found, scheme), ["lm_head", *found])
    oracle.edit_json(folder / "config.json", quantization_config=settings)
    return found


def same(one: object, other: object) -> bool:
    assert isinstance(one, QuantTensor)
    assert isinstance(other, QuantTensor)
    zeros = (one.zero is None) == (other.zero is None) and (
        one.zero is None or torch.equal(one.zero, other.zero)
    )
    return torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale) and zeros


def turn(monkeypatch: pytest.MonkeyPatch, *, interleaved: bool, partial: int | None) -> None:
    """Have Qwen3's folders read as if their rotary rows lay otherwise."""
    plain = FAMILIES["qwen3"].read

    def read(self: Family, settings: Settings) -> ModelConfig:
        known = {k: v for k, v in settings.values.items() if k != "partial_rotary_factor"}
        inner = {k: v for k, v in known["rope_parameters"].items() if k != "partial_rotary_factor"}
        config = plain(Settings({**known, "rope_parameters": inner}, settings.path))
        return replace(config, rope=replace(config.rope, rotary_dim=partial))

    let_run(monkeypatch, "qwen3", interleaved_rotary=interleaved)
    monkeypatch.setattr(Family, "read", read)
