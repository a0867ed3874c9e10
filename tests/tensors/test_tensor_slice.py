"""A part of a tensor, read alone, is what one would cut from the whole."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from error_parts import raises
from schemes import any_scheme
from torch import Tensor

import quantkit
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors import qtensor
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

SCHEMES = ["int8", "int4-g32", "int4-g32-asym"]
# Whole heads of 8; the second in the middle of a shard, the last in two pieces and in another
# order.
ROWS = [((0, 16),), ((24, 40),), ((8, 16), (8, 16)), ((40, 64), (0, 8))]
COLUMNS = [((0, 32),), ((32, 64),), ((16, 48),), ((8, 16),)]


def _dense(value: Tensor | QuantTensor) -> Tensor:
    return value if isinstance(value, Tensor) else value.dequantize()


def _require_parts(checkpoint: Checkpoint, modules: list[str]) -> None:
    for module in modules:
        whole = _dense(checkpoint.load(f"{module}.weight"))
        for axis, cases in enumerate((ROWS, COLUMNS)):
            for ranges in cases:
                part = TensorSlice(axis, ranges)
                found = _dense(checkpoint.load(f"{module}.weight", part))
                assert torch.equal(found, part.of(whole)), (module, axis, ranges)
                assert found.shape[axis] == part.size


MODULES = [
    f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
]


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_of_a_hugging_face_folder(scheme: str | None, tmp_path: Path) -> None:
    folder = oracle.save(oracle.make("llama", num_key_value_heads=8), tmp_path / "model")
    if scheme is not None:
        quantkit.quantize(
            folder, tmp_path / "quantized", scheme, method="rtn", accept_quality_loss=True
        )
        folder = tmp_path / "quantized"
    _require_parts(open_checkpoint(folder), [*MODULES, "model.layers.1.self_attn.k_proj"])


@pytest.mark.parametrize("mp", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_of_meta_shards(mp: int, kv_heads: int, tmp_path: Path) -> None:
    folder = oracle.save(oracle.make("llama", num_key_value_heads=kv_heads), tmp_path / "model")
    quantkit.convert(folder, tmp_path / "meta", to="meta", mp=mp)
    checkpoint = open_checkpoint(tmp_path / "meta")
    modules = [*MODULES, "model.embed_tokens", "lm_head"]
    _require_parts(
        checkpoint, [*modules, "model.layers.1.self_attn.k_proj"] if kv_heads == 8 else modules
    )
    shared = checkpoint.load("model.layers.0.self_attn.k_proj.weight")
    part = TensorSlice(0, ((8, 16),))
    assert torch.equal(
        _dense(checkpoint.load("model.layers.0.self_attn.k_proj.weight", part)),
        _dense(shared)[8:16],
    )


def test_only_the_part_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = oracle.save(oracle.make("llama"), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "int4", "int4-g32", method="rtn", accept_quality_loss=True)
    decoded = []
    unpack = qtensor.unpack_int32

    def watched(words: Tensor, bits: int, count: int) -> Tensor:
        decoded.append(words.numel() * 32 // bits)
        return unpack(words, bits, count)

    monkeypatch.setattr(qtensor, "unpack_int32", watched)
    checkpoint = open_checkpoint(tmp_path / "int4")
    for part, elements in (
        (TensorSlice(0, ((8, 16),)), 8 * 96),
        (TensorSlice(1, ((32, 64),)), 64 * 32),
    ):
        checkpoint.load("model.layers.0.mlp.down_proj.weight", part)
        assert decoded.pop() == elements


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cut_group_keeps_its_scale(scheme: str) -> None:
    weight = quantize_rtn(torch.randn(5, 96), any_scheme(scheme), torch.float32)
    for start, stop in ((16, 80), (0, 8), (24, 96)):
        cut = weight.columns(start, stop)
        assert torch.equal(cut.dequantize(), weight.dequantize()[:, start:stop])
    assert weight.columns(32, 96).scheme == weight.scheme


def test_a_part_too_small_for_a_group_is_refused() -> None:
    with raises(RequestError, "int4-g32", found="4 columns", expected="a multiple of 8"):
        QuantScheme.parse("int4-g32").cut(4, 12)
