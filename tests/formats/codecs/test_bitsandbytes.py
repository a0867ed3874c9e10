"""Folders of bitsandbytes, NF4, FP4 and LLM.int8(), read as the floats that they stand for."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.checkpoint import list_uncarried_weights
from quantkit.formats.codecs.bitsandbytes import _VALUES
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.tensor_slice import TensorSlice

BLOCK, NESTED_BLOCK = 64, 8
KINDS = ("nf4", "nf4-double", "fp4", "nf4-stored-as-bfloat16", "int8")
STORED_AS = {"nf4": "NF4", "fp4": "FP4", "int8": "LLM.int8()"}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT_BITS = {
    "load_in_8bit": True,
    "llm_int8_threshold": 6.0,
}  # as old files say it, which name no method


def _bytes(state: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def _stored(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of random codes, by what their names end with, and the floats that they mean."""
    generator = torch.Generator().manual_seed(weight.numel())
    rows, columns = weight.shape
    if kind == "int8":
        codes = torch.randint(-128, 128, weight.shape, generator=generator, dtype=torch.int8)
        scale = torch.rand(rows, generator=generator)
        means = codes.float() * scale[:, None] * 7.874015718698502e-3
        return {
            "weight": codes,
            "SCB": scale,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }, means
    name = kind.partition("-")[0]
    codes = torch.randint(0, 16, (weight.numel(),), generator=generator, dtype=torch.uint8)
    pairs = codes.view(-1, 2)
    packed = (pairs[:, 0] << 4 | pairs[:, 1]).unsqueeze(1)
    blocks = math.ceil(weight.numel() / BLOCK)
    values = torch.tensor(_VALUES[name.upper()])
    state = {"quant_type": name, "blocksize": BLOCK, "dtype": "float32", "shape": [rows, columns]}
    tensors = {"weight": packed, "weight.quant_map": values}
    absmax = torch.rand(blocks, generator=generator)
    tensors["weight.absmax"] = absmax
    if kind == "nf4-double":
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.3}
        small = torch.randint(0, 256, (blocks,), generator=generator, dtype=torch.uint8)
        factors, table = torch.rand(math.ceil(blocks / NESTED_BLOCK)), torch.rand(256) - 0.5
        tensors |= {
            "weight.absmax": small,
            "weight.nested_absmax": factors,
            "weight.nested_quant_map": table,
        }
        absmax = table[small.int()] * factors.repeat_interleave(NESTED_BLOCK)[:blocks] + 0.3
    if kind == "nf4-stored-as-bfloat16":
        tensors["weight"] = packed.flatten().view(torch.bfloat16).unsqueeze(1)
    tensors[f"weight.quant_state.bitsandbytes__{name}"] = _bytes(state)
    means = values[codes.int()] * absmax.repeat_interleave(BLOCK)[: len(codes)]
    return tensors, means.view(rows, columns)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with rows that blocks do not divide."""
    made = oracle.make("llama", num_hidden_layers=1, intermediate_size=84)
    return oracle.save(made, tmp_path_factory.mktemp("model"))


def _folder(kind: str, model: Path, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The model with codes in it, and what its linears mean."""
    shutil.copytree(model, folder)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "_proj" in name]:
        stored, expected[name] = _stored(tensors.pop(name), kind)
        tensors |= {name.removesuffix("weight") + end: tensor for end, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    oracle.edit_json(
        folder / "config.json", quantization_config=EIGHT_BITS if kind == "int8" else FOUR_BITS
    )
    return folder, expected


@pytest.mark.parametrize("tensors_only", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_read_as_floats(
    kind: str, tensors_only: bool, model: Path, tmp_path: Path
) -> None:
    folder, expected = _folder(kind, model, tmp_path / "src")
    source = open_checkpoint(folder, tensors_only=tensors_only)
    stored_as = STORED_AS[kind.partition("-")[0]]
    assert list_uncarried_weights(source) == dict.fromkeys(expected, stored_as)
    assert f"7 weights in {stored_as} " in source.notes[0]
    for name, weight in expected.items():
        assert torch.equal(source.load(name), weight)  # type: ignore[arg-type]
        part = TensorSlice(0, ((1, 9), (11, 12)))
        assert torch.equal(source.load(name, part), part.of(weight))  # type: ignore[arg-type]
        assert torch.equal(source.load(name, TensorSlice(1, ((3, 40),))), weight[:, 3:40])  # type: ignore[arg-type]
    assert quantkit.inspect(folder).bits_per_weight < 32


def test_floats_are_rounded_once(model: Path, tmp_path: Path) -> None:
    folder, expected = _folder("nf4-double", model, tmp_path / "src")
    oracle.edit_json(folder / "config.json", dtype="bfloat16")
    source = open_checkpoint(folder)
    assert all(
        torch.equal(source.load(name), weight.bfloat16()) for name, weight in expected.items()
    )  # type: ignore[arg-type]


Edit = Callable[[dict[str, Tensor]], object]
UP = "model.layers.0.mlp.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"


def _says(**changes: Any) -> Edit:
    """Other values in the state of one weight."""

    def edit(tensors: dict[str, Tensor]) -> None:
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = _bytes({key: value for key, value in state.items() if value is not None})

    return edit


def _is(name: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


BROKEN: dict[str, tuple[str, Edit]] = {
    "no JSON": ("nf4", _is(STATE, torch.full((8,), 7, dtype=torch.uint8))),
    "no text": ("nf4", _is(STATE, torch.full((8,), 255, dtype=torch.uint8))),
    "no bytes": ("nf4", _is(STATE, torch.ones(4))),
    "no object": ("nf4", _is(STATE, torch.tensor(list(b"[1]"), dtype=torch.uint8))),
    "a long state": ("nf4", _is(STATE, torch.full((1 << 17,), 32, dtype=torch.uint8))),
    "another type": ("nf4", _says(quant_type="fp4")),
    "no shape": ("nf4", _says(shape=None)),
    "a shape of text": ("nf4", _says(shape="84x64")),
    "a shape below zero": ("nf4", _says(shape=[-84, -64])),
    "another shape": ("nf4", _says(shape=[84, 65])),
    "a huge shape": ("nf4", _says(shape=[2**62, 2**62])),
    "a vector": ("nf4", _says(shape=[84 * 64])),
    "turned": ("nf4", lambda t: t.update({UP: t[UP].t().contiguous()})),
    "no block": ("nf4", _says(blocksize=0)),
    "another block": ("nf4", _says(blocksize=128)),
    "an odd block": ("nf4", _says(blocksize=63)),
    "other values": ("nf4", lambda t: t.update({f"{UP}.quant_map": t[f"{UP}.quant_map"] * 1.001})),
    "no values": ("nf4", lambda t: t.pop(f"{UP}.quant_map")),
    "few factors": ("nf4", lambda t: t.update({f"{UP}.absmax": t[f"{UP}.absmax"][1:].clone()})),
    "no factors": ("nf4", lambda t: t.pop(f"{UP}.absmax")),
    "nested without a state": (
        "nf4",
        lambda t: t.update({f"{UP}.absmax": t[f"{UP}.absmax"].byte()}),
    ),
    "nested of another type": ("nf4-double", _says(nested_dtype="float16")),
    "an infinite offset": ("nf4-double", _says(nested_offset=math.inf)),
    "another nested block": ("nf4-double", _says(nested_blocksize=32)),
    "no nested factors": ("nf4-double", lambda t: t.pop(f"{UP}.nested_absmax")),
    "a short nested map": ("nf4-double", _is(f"{UP}.nested_quant_map", torch.ones(255))),
    "two states": ("nf4", lambda t: t.update({STATE.replace("nf4", "fp4"): t[STATE].clone()})),
    "no state": ("nf4", lambda t: t.pop(STATE)),
    "a state of nothing": ("nf4", lambda t: t.pop(UP)),
    "int8 without scales": ("int8", lambda t: t.pop(UP.replace("weight", "SCB"))),
    "few scales": ("int8", _is(UP.replace("weight", "SCB"), torch.ones(3))),
    "int8 in tiles": (
        "int8",
        _is(UP.replace("weight", "weight_format"), torch.tensor(2, dtype=torch.uint8)),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_go_together_is_refused(what: str, model: Path, tmp_path: Path) -> None:
    kind, edit = BROKEN[what]
    folder, _ = _folder(kind, model, tmp_path / "src")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for tensors_only in (False, True):
        with pytest.raises((CheckpointError, UnsupportedError)) as refused:
            open_checkpoint(folder, tensors_only=tensors_only)
        assert "mlp.up_proj" in str(refused.value)
        assert isinstance(refused.value, QuantkitError)
