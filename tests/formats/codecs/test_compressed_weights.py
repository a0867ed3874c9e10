"""Forms of compressed-tensors besides those that quantkit writes by itself: signed bytes, one scale
for a weight, plain zero points, groups that are told column by column.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, NotRepresentableError
from quantkit.formats.checkpoint import list_uncarried_weights
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.qtensor import QuantTensor, pack_int32
from quantkit.tensors.tensor_slice import TensorSlice

GROUP = 32
ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
W4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
W8 = {"num_bits": 8, "strategy": "channel"}
INT, PACK = "int-quantized", "pack-quantized"
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "bytes": (INT, W8),
    "bytes with zero points": (INT, {**W8, "symmetric": False}),
    "bytes in groups": (
        INT,
        {"num_bits": 8, "strategy": "group", "group_size": GROUP, "symmetric": False},
    ),
    "int4 in bytes": (INT, W4),
    "bytes of one scale": (INT, {"num_bits": 8, "strategy": "tensor"}),
    "no format of activations": ("naive-quantized", W8),
    "one scale": (PACK, {"num_bits": 8, "strategy": "tensor"}),
    "plain zero points": (PACK, {**W4, "symmetric": False}),
    "zero points of zero": (PACK, W4),
    "groups in order": (PACK, {**W4, "actorder": "group"}),
    "groups that were never told": (PACK, {**W4, "actorder": "group"}),
    "bytes in groups in no order": (
        INT,
        {**W4, "num_bits": 8, "actorder": "group", "symmetric": False},
    ),
    "groups in no order": (PACK, {**W4, "actorder": "group"}),
    "groups in no order, asymmetric": (PACK, {**W4, "actorder": "group", "symmetric": False}),
}
UP = "model.layers.0.mlp.up_proj"


def _stored(rows: int, columns: int, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of random codes by what their names end with, and the floats that they mean."""
    form, weights = FORMS[kind]
    generator = torch.Generator().manual_seed(rows * columns)
    half = 2 ** (weights["num_bits"] - 1)
    size = weights.get("group_size", columns)
    groups = columns // size
    codes = torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, groups, generator=generator) - 0.5
    zero = torch.randint(-half, half, (rows, groups), generator=generator, dtype=torch.int8)
    if weights["strategy"] == "tensor":
        scale = scale[:1, :1]
    index = torch.arange(columns) // size
    if "no order" in kind:
        index = index[torch.randperm(columns, generator=generator)]
    symmetric = weights.get("symmetric", True)
    means = codes.float() - (0 if symmetric else zero.float()[:, index])
    means = means * scale.expand(rows, groups)[:, index]
    tensors = {"weight_scale": scale.reshape(1) if weights["strategy"] == "tensor" else scale}
    if form == PACK:
        bits = weights["num_bits"]
        tensors["weight_packed"] = pack_int32((codes.int() + half).to(torch.uint8), bits)
        tensors["weight_shape"] = torch.tensor([rows, columns])
        if kind == "groups in no order, asymmetric":
            zero = pack_int32((zero.int() + half).to(torch.uint8).t(), bits).t().contiguous()
    else:
        tensors["weight"] = codes
    if not symmetric or kind == "zero points of zero":
        tensors["weight_zero_point"] = torch.zeros_like(zero) if symmetric else zero
    if weights.get("actorder"):
        reported = torch.full_like(index, -1) if kind == "groups that were never told" else index
        tensors["weight_g_idx"] = reported.to(torch.int32)
    return tensors, means


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save(oracle.make("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


def _folder(kind: str, model: Path, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The model with codes in it, and what its linears mean."""
    shutil.copytree(model, folder)
    form, weights = FORMS[kind]
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "_proj" in name]:
        stored, expected[name] = _stored(*tensors.pop(name).shape, kind)
        tensors |= {name.removesuffix("weight") + end: tensor for end, tensor in stored.items()}
        if kind == "bytes with zero points":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    if form == INT:
        group["input_activations"] = ACTIVATIONS
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": group}}
    oracle.edit_json(
        folder / "config.json", quantization_config={**settings, "ignore": ["lm_head"]}
    )
    return folder, expected


@pytest.mark.parametrize("tensors_only", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_every_form_is_read_with_its_values(
    kind: str, tensors_only: bool, model: Path, tmp_path: Path
) -> None:
    folder, expected = _folder(kind, model, tmp_path / "src")
    source = open_checkpoint(folder, tensors_only=tensors_only)
    floats = (
        dict.fromkeys(expected, "compressed-tensors with act-order") if "no order" in kind else {}
    )
    assert list_uncarried_weights(source) == floats
    rows, columns = TensorSlice(0, ((1, 9), (11, 12))), TensorSlice(1, ((16, 56),))
    for name, weight in expected.items():
        for part in (None, rows, columns):
            value = source.load(name, part)
            assert isinstance(value, QuantTensor) == (not floats)
            found = value.dequantize() if isinstance(value, QuantTensor) else value
            assert torch.equal(found, weight if part is None else part.of(weight))
    reported = any("also quantizes activations" in note for note in source.notes)
    assert reported == (FORMS[kind][0] == INT)
    assert any("7 scales of activations" in note for note in source.notes) == (
        kind == "bytes with zero points"
    )


@pytest.mark.parametrize(
    "kind", ["bytes", "bytes with zero points", "bytes in groups", "bytes of one scale"]
)
def test_signed_bytes_mean_what_their_owner_makes_of_them(kind: str) -> None:
    stored, expected = _stored(16, 64, kind)
    scheme = QuantizationScheme(targets=["Linear"], weights={"symmetric": True, **FORMS[kind][1]})
    assert torch.equal(IntQuantizationCompressor.decompress(stored, scheme)["weight"], expected)


def test_int8_goes_to_int_quantized_and_back(model: Path, tmp_path: Path) -> None:
    packed = quantkit.quantize(model, tmp_path / "int8", "int8", accept_quality_loss=True).path
    signed = quantkit.convert(packed, tmp_path / "signed", to="int-quantized")
    assert (
        "readers of int-quantized round activations to int8 too; figures here are of the weights"
        " alone" in signed.notes
    )
    assert signed.exact is not None
    assert (signed.exact.tensors, signed.exact.equal) == (7, 7)
    settings = json.loads((signed.path / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", "int-quantized")
    assert settings["config_groups"]["group_0"]["input_activations"] == ACTIVATIONS
    codes = load_file(signed.path / "model.safetensors")[f"{UP}.weight"]
    value = open_checkpoint(packed).load(f"{UP}.weight")
    assert isinstance(value, QuantTensor)
    assert torch.equal(codes.int() + 128, value.codes.int())
    kept = quantkit.convert(signed.path, tmp_path / "kept").path
    back = quantkit.convert(kept, tmp_path / "back", to="compressed-tensors").path
    for one, other in ((signed.path, kept), (packed, back)):
        assert (one / "model.safetensors").read_bytes() == (
            other / "model.safetensors"
        ).read_bytes()
    transformed = oracle.logits(oracle.load(signed.path), oracle.random_tokens(5))
    assert torch.isfinite(transformed).all()


def test_int_quantized_holds_int8_per_row_alone(model: Path, tmp_path: Path) -> None:
    int4 = quantkit.quantize(
        model, tmp_path / "int4", "int4-g32", method="rtn", accept_quality_loss=True
    ).path
    with raises(NotRepresentableError, "int-quantized", found="int4-g32", expected="int8"):
        quantkit.convert(int4, tmp_path / "out", to="int-quantized")
    groups, _ = _folder("bytes in groups", model, tmp_path / "groups")
    with raises(NotRepresentableError, "int-quantized", found="int8-g32-asym"):
        quantkit.convert(groups, tmp_path / "out", to="int-quantized")


Edit = Callable[[dict[str, Tensor]], object]


def _is(end: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({f"{UP}.{end}": tensor})


BROKEN: dict[str, tuple[str, Edit]] = {
    "no codes": ("bytes", lambda t: t.pop(f"{UP}.weight")),
    "no scales": ("bytes", lambda t: t.pop(f"{UP}.weight_scale")),
    "unsigned codes": (
        "bytes",
        lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].view(torch.uint8)}),
    ),
    "few codes": ("bytes", _is("weight", torch.zeros(96, 63, dtype=torch.int8))),
    "one scale for rows": ("bytes", _is("weight_scale", torch.ones(1))),
    "scales of integers": ("bytes", _is("weight_scale", torch.ones(96, 1, dtype=torch.int32))),
    "scales of rows for one": ("bytes of one scale", _is("weight_scale", torch.ones(96, 1))),
    "no zero points": ("bytes with zero points", lambda t: t.pop(f"{UP}.weight_zero_point")),
    "zero points of a symmetric weight": (
        "zero points of zero",
        _is("weight_zero_point", torch.ones(96, 2).char()),
    ),
    "few plain zero points": (
        "plain zero points",
        _is("weight_zero_point", torch.zeros(96, 1).char()),
    ),
    "no groups": ("groups in order", lambda t: t.pop(f"{UP}.weight_g_idx")),
    "groups of other columns": ("groups in order", _is("weight_g_idx", torch.zeros(63).int())),
    "groups beyond the last": (
        "groups in no order",
        _is("weight_g_idx", torch.full((64,), 2).int()),
    ),
    "groups below the first": (
        "groups in no order",
        _is("weight_g_idx", torch.full((64,), -2).int()),
    ),
    "floats beside codes": ("groups in order", _is("weight", torch.zeros(96, 64))),
    "groups of floats": ("groups in no order", _is("weight_g_idx", torch.zeros(64))),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_go_together_is_refused(what: str, model: Path, tmp_path: Path) -> None:
    kind, edit = BROKEN[what]
    folder, _ = _folder(kind, model, tmp_path / "src")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with raises(CheckpointError, "mlp.up_proj", path=folder):
        open_checkpoint(folder)


def test_codes_beyond_their_scheme_are_refused_when_read(model: Path, tmp_path: Path) -> None:
    folder, _ = _folder("int4 in bytes", model, tmp_path / "src")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.weight"][3, 4] = 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with raises(CheckpointError, f"'{UP}'", found="-8 to 8", expected="-8 to 7"):
        open_checkpoint(folder).load(f"{UP}.weight")
