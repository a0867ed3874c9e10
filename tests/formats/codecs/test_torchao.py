"""Folders of torchao: plain int8 and int4 tensors in safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.checkpoint import list_uncarried_weights, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

UP = "model.layers.0.mlp.up_proj"
INT8 = {"_type": "torch.dtype", "_data": "int8"}
INT4 = {"_type": "torch.dtype", "_data": "int4"}
PARTS = (None, TensorSlice(0, ((2, 5), (8, 9))), TensorSlice(1, ((8, 48),)))
Made = tuple[dict[str, Tensor], dict[str, Any], Tensor]


def _int8(
    codes: Tensor, block: list[int], *, zero: bool = False, kind: str = "Int8Tensor", bits: int = 8
) -> Made:
    """Tensors, what the header says, and the weights: one step below zero for each column of a
    random matrix.
    """
    rows, columns = codes.shape
    generator = torch.Generator().manual_seed(1)
    shape = (rows // block[0], columns // block[1])
    scale = torch.randn(shape, generator=generator)
    points = (
        torch.randint(-5, 5, shape, generator=generator, dtype=torch.int8)
        if zero
        else torch.zeros(shape).char()
    )
    wide, low = (
        one.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1) for one in (scale, points)
    )
    reported: dict[str, Any] = {"block_size": block}
    if kind != "Int8Tensor":
        reported["target_dtype"] = INT4 if bits == 4 else INT8
    tensors = {"qdata": codes, "scale": scale, "zero_point": points}
    return tensors, {"_type": kind, "_data": reported}, (codes.int() - low.int()).float() * wide


def _int4(codes: Tensor, steps: float) -> Made:
    """Signed codes, two a byte, and offsets of so many steps."""
    rows, columns = codes.shape
    scale = torch.randn(columns // 32, rows, generator=torch.Generator().manual_seed(1)).bfloat16()
    offset = (scale * steps).bfloat16()
    packed = (codes[:, 0::2] & 0xF) | (codes[:, 1::2] << 4)
    wide, low = (one.float().t().repeat_interleave(32, 1) for one in (scale, offset))
    reported = {"_type": "Int4Tensor", "_data": {"block_size": [1, 32], "shape": [rows, columns]}}
    return {"qdata": packed, "scale": scale, "zero_point": offset}, reported, codes * wide + low


def _codes(bits: int, rows: int = 96, columns: int = 64) -> Tensor:
    half = 1 << (bits - 1)
    return torch.randint(
        -half, half, (rows, columns), generator=torch.Generator().manual_seed(2), dtype=torch.int8
    )


INTX = "IntxUnpackedToInt8Tensor"
KINDS: dict[str, tuple[Made, QuantScheme | str]] = {
    "int8 per row": (_int8(_codes(8), [1, 64]), QuantScheme(8, None)),
    "int8 per tensor": (_int8(_codes(8), [96, 64]), QuantScheme(8, None)),
    "int8 in groups": (_int8(_codes(8), [1, 32]), QuantScheme(8, 32)),
    "int8 with zero points": (_int8(_codes(8), [1, 64], zero=True), QuantScheme(8, None, False)),
    "int4 in bytes": (_int8(_codes(4), [1, 32], kind=INTX, bits=4), QuantScheme(4, 32)),
    "int4 in bytes, with zero points": (
        _int8(_codes(4), [1, 32], zero=True, kind=INTX, bits=4),
        QuantScheme(4, 32, False),
    ),
    "int4": (_int4(_codes(4), 0), QuantScheme(4, 32)),
    "int4 with whole offsets": (_int4(_codes(4), -2), QuantScheme(4, 32, False)),
    "int4 with float offsets": (_int4(_codes(4), 0.5), "torchao's Int4Tensor"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save(oracle.make("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


def _folder(made: Made, model: Path, folder: Path, module: str = UP) -> Path:
    """The model with such a weight in it."""
    oracle.copy(model, folder)
    tensors, reported, _ = made
    stored = load_file(folder / "model.safetensors")
    del stored[f"{module}.weight"]
    reported = {**reported, "_tensor_data_names": sorted(tensors)}
    plain = {name: json.dumps({"_type": "Tensor"}) for name in stored}
    stored |= {f"{module}._weight_{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}
    metadata = plain | {
        f"{module}.weight": json.dumps(reported),
        "tensor_names": json.dumps([*plain, f"{module}.weight"]),
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt", **metadata})
    settings = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
    }
    oracle.edit_json(folder / "config.json", quantization_config=settings)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_they_stand_for(kind: str, model: Path, tmp_path: Path) -> None:
    made, expected = KINDS[kind]
    source = open_checkpoint(_folder(made, model, tmp_path / "src"))
    if isinstance(expected, QuantScheme):
        assert schemes(source) == {UP: expected}
        assert not list_uncarried_weights(source)
    else:
        assert list_uncarried_weights(source) == {f"{UP}.weight": expected}
    for part in PARTS:
        found = source.load(f"{UP}.weight", part)
        assert isinstance(found, QuantTensor) == isinstance(expected, QuantScheme)
        floats = found.dequantize() if isinstance(found, QuantTensor) else found
        assert torch.equal(floats, made[2] if part is None else part.of(made[2])), part


def test_codes_are_carried_to_what_is_written(model: Path, tmp_path: Path) -> None:
    folder = _folder(KINDS["int8 per row"][0], model, tmp_path / "src")
    result = quantkit.convert(folder, tmp_path / "out", source_check=False)
    assert result.exact is not None
    assert result.exact.tensors == 1
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["format"]
        == "pack-quantized"
    )


def test_an_embedding_is_read_with_its_codes(model: Path, tmp_path: Path) -> None:
    made = _int8(_codes(8), [1, 64])
    source = open_checkpoint(_folder(made, model, tmp_path / "src", "model.embed_tokens"))
    assert list_uncarried_weights(source) == {}
    found = source.load("model.embed_tokens.weight")
    assert isinstance(found, QuantTensor)
    assert torch.equal(found.dequantize().to(made[2].dtype), made[2])


def _with(made: Made, reported: dict[str, Any] | None = None, **tensors: Tensor | None) -> Made:
    """Other tensors, and other words of the header."""
    kept = {leaf: one for leaf, one in {**made[0], **tensors}.items() if one is not None}
    return kept, {**made[1], **(reported or {})}, made[2]


PER_ROW, PLAIN_INT4, IN_BYTES = (
    KINDS[kind][0] for kind in ("int8 per row", "int4", "int4 in bytes")
)
DAMAGES: dict[str, tuple[Callable[[], Made], str]] = {
    "tile-packed": (
        lambda: _with(PER_ROW, {"_type": "Int4TilePackedTo4dTensor"}),
        "'Int4TilePackedTo4dTensor'",
    ),
    "small floats": (
        lambda: _with(PER_ROW, {"_type": "Float8Tensor"}),
        "'Float8Tensor'",
    ),
    "no class": (lambda: _with(PER_ROW, {"_type": 3}), "_type'"),
    "no blocks": (lambda: _with(PER_ROW, {"_data": {}}), "'block_size'"),
    "blocks of three": (
        lambda: _with(PER_ROW, {"_data": {"block_size": [1, 1, 64]}}),
        UP,
    ),
    "blocks between": (
        lambda: _with(PER_ROW, {"_data": {"block_size": [1, 24]}}),
        UP,
    ),
    "small blocks": (
        lambda: _with(PER_ROW, {"_data": {"block_size": [1, 4]}}),
        UP,
    ),
    "blocks of halves": (
        lambda: _with(PER_ROW, {"_data": {"block_size": [1.5, 64]}}),
        UP,
    ),
    "blocks of rows": (
        lambda: _with(PER_ROW, {"_data": {"block_size": [2, 64]}}),
        UP,
    ),
    "no scale": (lambda: _with(PER_ROW, scale=None), UP),
    "scales as integers": (
        lambda: _with(PER_ROW, scale=torch.ones(96, 1).int()),
        UP,
    ),
    "other zero points": (
        lambda: _with(PER_ROW, zero_point=torch.zeros(96, 2).char()),
        UP,
    ),
    "zero points of floats": (
        lambda: _with(PER_ROW, zero_point=torch.zeros(96, 1)),
        UP,
    ),
    "codes as floats": (lambda: _with(PER_ROW, qdata=torch.zeros(96, 64)), UP),
    "too few codes": (
        lambda: _with(PLAIN_INT4, qdata=torch.zeros(96, 31).char()),
        UP,
    ),
    "int4 without offsets": (lambda: _with(PLAIN_INT4, zero_point=None), UP),
    "zero points between codes": (
        lambda: _with(IN_BYTES, zero_point=torch.full((96, 2), 0.5)),
        UP,
    ),
    "zero points beyond codes": (
        lambda: _with(IN_BYTES, zero_point=torch.full((96, 2), 8).char()),
        UP,
    ),
    "no numbers": (
        lambda: _with(IN_BYTES, zero_point=torch.full((96, 2), float("nan"))),
        UP,
    ),
    "of activations": (
        lambda: _with(PER_ROW, act_pre_scale=torch.ones(64)),
        UP,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, model: Path, tmp_path: Path) -> None:
    make, name = DAMAGES[damage]
    folder = _folder(make(), model, tmp_path / "src")
    with raises((CheckpointError, UnsupportedError), name):
        open_checkpoint(folder)


def test_codes_beyond_their_bits_are_an_error(model: Path, tmp_path: Path) -> None:
    source = open_checkpoint(_folder(_with(IN_BYTES, qdata=_codes(8)), model, tmp_path / "src"))
    with raises(CheckpointError, "_weight_qdata'", "int4"):
        source.load(f"{UP}.weight")


def test_a_header_that_does_not_report_is_an_error(model: Path, tmp_path: Path) -> None:
    folder = _folder(PER_ROW, model, tmp_path / "src")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    with raises(CheckpointError, f"'{UP}._weight_qdata'", path=folder):
        open_checkpoint(folder)
