"""Folders of MLX: codes and offsets, read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from case_names import case
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.files import tensor_file
from quantkit.files.safetensors_io import open_file
from quantkit.formats.checkpoint import list_uncarried_weights, schemes
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.codecs.mlx import Affine, Mlx
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCHEMES = [QuantScheme(bits, size) for bits in (4, 8) for size in (32, 64, 96, 128, 256)]
SCHEMES += [
    QuantScheme(8, None),
    QuantScheme(4, None),
    QuantScheme(4, 32, False),
    QuantScheme(8, 64, False),
]
UP = "model.layers.0.mlp.up_proj"
AFFINE = {"group_size": 32, "bits": 4, "mode": "affine"}


def _value(
    scheme: QuantScheme, dtype: torch.dtype, rows: int = 7, columns: int = 768
) -> QuantTensor:
    """Random codes and scales of both signs; with zero points the scales have few bits."""
    generator = torch.Generator().manual_seed(scheme.bits * rows + columns)
    codes = torch.randint(0, scheme.levels, (rows, columns), generator=generator, dtype=torch.uint8)
    shape = (rows, scheme.groups(columns))
    scale = torch.randn(shape, generator=generator).to(dtype)
    if scheme.symmetric:
        return QuantTensor(codes, scale, None, scheme)
    zero = torch.randint(0, scheme.levels, shape, generator=generator, dtype=torch.uint8)
    steps = torch.randint(-3, 3, shape, generator=generator).float().exp2() * torch.sign(
        scale.float()
    )
    return QuantTensor(codes, steps.to(dtype), zero, scheme)


def _raw(tensors: dict[str, Tensor], folder: Path) -> RawModule:
    """A module of a file with these tensors, by what their names end with."""
    folder.mkdir(exist_ok=True)
    save_file(
        {f"up.{leaf}": tensor for leaf, tensor in tensors.items()}, folder / "model.safetensors"
    )
    file = open_file(folder / "model.safetensors")
    return RawModule("up", dict.fromkeys(file.tensors, file), folder)


def _equal(first: Tensor | QuantTensor, second: Tensor | QuantTensor) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    same = (
        torch.equal(first.codes, second.codes)
        and torch.equal(first.scale, second.scale)
        and first.scheme == second.scheme
    )
    return same and (first.zero is second.zero or torch.equal(first.zero, second.zero))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    for scheme in SCHEMES:
        with case(scheme):
            _require_read_back(scheme, dtype, tmp_path / str(scheme))


def _require_read_back(scheme: QuantScheme, dtype: torch.dtype, folder: Path) -> None:
    value, codec = _value(scheme, dtype), Mlx().codec(scheme)
    assert isinstance(codec, Affine)
    written = codec.encode(value)
    spec = TensorSpec("up.weight", value.shape, DType.of(dtype), scheme)
    assert isinstance(written, list)
    stored = codec.list_stored_tensors(spec)
    named = {}
    for entry, tensor in zip(stored, written, strict=True):
        assert (DType.of(tensor.dtype), tuple(tensor.shape)) == (entry.dtype, entry.shape)
        named[entry.name.removeprefix("up.")] = tensor
    raw = _raw(named, folder)
    # As the encoder reads it back.
    assert _equal(codec.decode(raw, spec), value)
    spec_read = Affine().spec(raw, TensorSpec("up.weight", value.shape, DType.FLOAT32))
    again = Affine().decode(raw, spec_read)
    assert isinstance(again, QuantTensor)
    assert torch.equal(again.dequantize(), value.dequantize())
    if scheme.group_size in (32, 64, 128) or scheme == QuantScheme(8, None):
        assert _equal(again, value)
    for part in (
        TensorSlice(0, ((1, 3), (5, 6))),
        TensorSlice(1, ((256, 576),)),
        TensorSlice(1, ((8, 40),)),
    ):
        piece = Affine().decode(raw, spec_read, part)
        assert isinstance(piece, QuantTensor)
        assert torch.equal(piece.dequantize(), part.of(value.dequantize()))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_float_offsets_are_read_as_floats(bits: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(bits)
    rows, columns, size = 5, 128, 32
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    words = torch.empty(rows, columns * bits // 32, dtype=torch.int64)
    for row in range(rows):
        stream = sum(int(code) << (place * bits) for place, code in enumerate(codes[row]))
        words[row] = torch.tensor(
            [stream >> (32 * word) & 0xFFFFFFFF for word in range(words.shape[1])]
        )
    scale, offset = (
        torch.randn(rows, columns // size, generator=generator).bfloat16() for _ in range(2)
    )
    raw = _raw({"weight": words.to(torch.uint32), "scales": scale, "biases": offset}, tmp_path)
    wide = [parameter.float().repeat_interleave(size, 1) for parameter in (scale, offset)]
    expected = codes * wide[0] + wide[1]
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        spec = Affine().spec(raw, TensorSpec("up.weight", (rows, columns), dtype))
        assert spec.scheme is None
        assert spec.stored_as is not None
        assert spec.stored_as.startswith("MLX with")
        assert spec.dtype == dtype
        assert _equal(Affine().decode(raw, spec), expected.to(dtype.torch))
        for part in (TensorSlice(0, ((1, 2), (4, 5))), TensorSlice(1, ((37, 90),))):
            assert _equal(Affine().decode(raw, spec, part), part.of(expected).to(dtype.torch))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda one: one.scale.fill_(10_000), "offset of a group (found -8 steps of 10000"),
        (lambda one: one.scale.fill_(math.nan), "offset of a group"),
        (
            lambda one: one.zero.fill_(7) + one.scale.fill_(1.0009765625),
            "offset of a group (found -7 steps of 1.00098",
        ),
        (
            lambda one: one.zero.fill_(7) + one.scale.fill_(0),
            "offset of a group (found -7 steps of 0,",
        ),
    ],
    ids=["too large", "no number", "between two floats", "no step"],
)
def test_what_an_offset_cannot_say_is_refused(
    change: Callable[[QuantTensor], object], problem: str
) -> None:
    value = _value(QuantScheme(4, 32, "zero" not in change.__code__.co_names), torch.float16)
    change(value)
    reason = Affine(value.scheme).encode(value)
    assert isinstance(reason, Reason)
    assert problem in str(reason.error("up.weight", "mlx"))


def test_groups_that_mlx_has_not_are_refused() -> None:
    assert isinstance(Mlx().codec(QuantScheme(4, 48)), Reason)
    spec = TensorSpec("up.weight", (8, 80), DType.FLOAT16, QuantScheme(8, None))
    with raises(UnsupportedError, "'up.weight'", found="int8 of 80 columns"):
        Affine().list_stored_tensors(spec)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = oracle.make("llama", num_hidden_layers=1, intermediate_size=96).bfloat16()
    return oracle.save(made, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three schemes, and rows that MLX's largest groups do not divide."""
    folder = tmp_path_factory.mktemp("quantized") / "mixed"
    overrides = (
        Override("*.v_proj", QuantScheme(8, None)),
        Override("*.down_proj", QuantScheme(8, None)),
        Override("*.o_proj", None),
    )
    recipe = Recipe(QuantScheme(4, 32), overrides)
    quantkit.quantize(
        model, folder, recipe, source_check=False, accept_quality_loss=True, method="rtn"
    )
    return folder


@pytest.fixture
def mlx(quantized: Path, tmp_path: Path) -> Path:
    quantkit.convert(quantized, tmp_path / "mlx", to="mlx", source_check=False)
    return tmp_path / "mlx"


def test_a_folder_comes_back_byte_by_byte(quantized: Path, mlx: Path, tmp_path: Path) -> None:
    raw = json.loads((mlx / "config.json").read_text())
    by_row = {"group_size": 64, "bits": 8, "mode": "affine"}
    own = {
        "model.layers.0.self_attn.v_proj": by_row,
        "model.layers.0.mlp.down_proj": {**by_row, "group_size": 32},
    }
    assert raw["quantization"] == raw["quantization_config"] == AFFINE | own
    assert verify(quantized, mlx).verdict is Verdict.SAME
    assert quantkit.inspect(mlx).readers == ["quantkit", "mlx-lm"]
    quantkit.convert(mlx, tmp_path / "back", to="compressed-tensors", source_check=False)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (quantized / name).read_bytes(), name


def test_no_more_is_read_than_is_requested(mlx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = open_checkpoint(mlx), []
    read_tensor = tensor_file.TensorFile.read

    def watched(self: tensor_file.TensorFile, name: str, part: TensorSlice | None = None) -> Tensor:
        tensor = read_tensor(self, name, part)
        read.append((name.rpartition(".")[2], tensor.numel()))
        return tensor

    monkeypatch.setattr(tensor_file.TensorFile, "read", watched)
    source.load(f"{UP}.weight", TensorSlice(0, ((8, 16),)))
    source.load(f"{UP}.weight", TensorSlice(1, ((32, 64),)))
    assert read == [("weight", 8 * 8), ("scales", 8 * 2), ("weight", 96 * 4), ("scales", 96)]


def _offset(module: str, tensors: dict[str, Tensor], bits: int = 4, *, exact: bool = False) -> None:
    """Put codes with scales and offsets in the place of a weight."""
    shape = tensors[f"{module}.weight"].shape
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(
        -(2**31), 2**31, (*shape[:-1], shape[-1] * bits // 32), generator=generator
    )
    scale = torch.rand(*shape[:-1], shape[-1] // 32, generator=generator).bfloat16() / 16
    tensors[f"{module}.weight"] = words.to(torch.int32).view(torch.uint32)
    tensors[f"{module}.scales"] = scale
    tensors[f"{module}.biases"] = scale * -(1 << (bits - 1)) if exact else -scale * 7.25


def _edited(
    model: Path, folder: Path, edit: Callable[[dict[str, Tensor]], object], **settings: Any
) -> Path:
    oracle.copy(model, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    changes = {
        "quantization": {**AFFINE, **settings},
        "quantization_config": {**AFFINE, **settings},
    }
    oracle.edit_json(folder / "config.json", **changes)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_read_with_its_codes_whatever_they_are(
    tied: bool, model: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        if tied:
            del tensors["lm_head.weight"]
        for module in ("model.embed_tokens", *([] if tied else ["lm_head"])):
            _offset(module, tensors, 8, exact=True)

    folder = _edited(model, tmp_path / "mlx", edit)  # mlx-lm takes bits from the tensors
    oracle.edit_json(folder / "config.json", tie_word_embeddings=tied)
    source = open_checkpoint(folder)
    assert schemes(source) == dict.fromkeys(
        ["model.embed_tokens", *([] if tied else ["lm_head"])], QuantScheme(8, 32)
    )
    assert (list_uncarried_weights(source), source.notes) == ({}, [])
    tensors = load_file(folder / "model.safetensors")
    codes = tensors["model.embed_tokens.weight"].view(torch.uint8)
    scale = tensors["model.embed_tokens.scales"].float().repeat_interleave(32, 1)
    expected = (codes.float() - 128) * scale
    found, part = source.load("model.embed_tokens.weight"), TensorSlice(0, ((3, 9),))
    some = source.load("model.embed_tokens.weight", part)
    assert isinstance(found, QuantTensor)
    assert isinstance(some, QuantTensor)
    assert torch.equal(found.dequantize(), expected)
    assert torch.equal(some.dequantize(), part.of(expected))
    quantkit.convert(folder, tmp_path / "out", to="mlx", source_check=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.equal(one, written[name]) for name, one in tensors.items() if "embed_tokens" in name
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_in_one_tensor_are_read(kind: str, tmp_path: Path) -> None:
    many = (
        {"num_local_experts": 3}
        if kind == "mixtral"
        else {"num_experts": 3, "moe_intermediate_size": 64}
    )
    experts = oracle.make(kind, num_hidden_layers=1, num_experts_per_tok=2, **many)
    model = oracle.save(experts.bfloat16(), tmp_path / "model")
    before = {name: open_checkpoint(model).load(name) for name in open_checkpoint(model).names()}
    layer = "model.layers.0." + ("block_sparse_moe" if kind == "mixtral" else "mlp")

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for role in ("gate", "up", "down"):
            parts = [
                before[f"model.layers.0.mlp.experts.{expert}.{role}_proj.weight"]
                for expert in range(3)
            ]
            tensors[f"{layer}.switch_mlp.{role}_proj.weight"] = torch.stack(parts)  # type: ignore[arg-type]
        _offset(f"{layer}.switch_mlp.up_proj", tensors, exact=True)
        _offset(f"{layer}.switch_mlp.down_proj", tensors)
        _offset(f"{layer}.gate", tensors, 8, exact=True)

    folder = _edited(model, tmp_path / "mlx", edit)
    source, tensors = open_checkpoint(folder), load_file(folder / "model.safetensors")
    assert schemes(source) == {
        f"model.layers.0.mlp.experts.{index}.up_proj": QuantScheme(4, 32) for index in range(3)
    }
    downs = [f"model.layers.0.mlp.experts.{index}.down_proj.weight" for index in range(3)]
    gate = {"model.layers.0.mlp.gate.weight": "int8-g32"}
    assert list_uncarried_weights(source) == gate | dict.fromkeys(downs, "MLX with float offsets")
    for role, middle in (("up", 8), ("down", 7.25)):
        module, name = (
            f"{layer}.switch_mlp.{role}_proj",
            f"model.layers.0.mlp.experts.1.{role}_proj.weight",
        )
        data = tensors[f"{module}.weight"][1].view(torch.uint8)
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).float()
        scale, offset = (
            tensors[f"{module}.{leaf}"][1].float().repeat_interleave(32, 1)
            for leaf in ("scales", "biases")
        )
        expected = codes * scale + offset
        for part in (None, TensorSlice(0, ((5, 8),)), TensorSlice(1, ((32, 64),))):
            value_read = source.load(name, part)
            if isinstance(value_read, QuantTensor):
                value_read = value_read.dequantize().bfloat16()
            assert torch.equal(
                value_read, expected.bfloat16() if part is None else part.of(expected).bfloat16()
            ), middle
    untouched = "model.layers.0.mlp.experts.2.gate_proj.weight"
    assert _equal(source.load(untouched), before[untouched])


def test_offsets_in_floats_are_copied_to_another_folder(model: Path, tmp_path: Path) -> None:
    """As codes with minima, which only MLX has."""

    def edit(tensors: dict[str, Tensor]) -> None:
        _offset("model.embed_tokens", tensors)
        _offset(UP, tensors)
        _offset("model.layers.0.mlp.gate_proj", tensors, exact=True)
        _offset("model.layers.0.mlp.down_proj", tensors, 8)

    folder = _edited(model, tmp_path / "mlx", edit)
    floats = open_checkpoint(folder)
    coded = with_codes(floats)
    assert schemes(floats) == {"model.layers.0.mlp.gate_proj": QuantScheme(4, 32)}
    wide, narrow = (QuantScheme(bits, 32, False, Scales.BLOCKS) for bits in (8, 4))
    assert schemes(coded) == {
        "model.embed_tokens": narrow,
        UP: narrow,
        "model.layers.0.mlp.gate_proj": QuantScheme(4, 32),
        "model.layers.0.mlp.down_proj": wide,
    }
    assert not coded.notes
    assert (str(wide), str(narrow), str(replace(narrow, group_size=64))) == (
        "q8_1",
        "q4_1",
        "q4_1-g64",
    )
    for name in (f"{UP}.weight", "model.layers.0.mlp.down_proj.weight"):
        for part in (None, TensorSlice(0, ((5, 8),)), TensorSlice(1, ((32, 64),))):
            decoded, value = coded.load(name, part), floats.load(name, part)
            assert isinstance(decoded, QuantTensor)
            assert torch.equal(decoded.floats(torch.bfloat16), value)  # type: ignore[arg-type]
    result = quantkit.convert(folder, tmp_path / "copy", source_check=False)
    assert not any("read as" in note for note in result.notes)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "copy"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    with raises(UnsupportedError, "'model.embed_tokens.weight'", "compressed-tensors"):
        quantkit.convert(folder, tmp_path / "ct", to="compressed-tensors", source_check=False)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_are_written_as_one_module(kind: str, tmp_path: Path) -> None:
    many = (
        {"num_local_experts": 3}
        if kind == "mixtral"
        else {"num_experts": 3, "moe_intermediate_size": 64}
    )
    made = oracle.make(kind, num_hidden_layers=1, num_experts_per_tok=2, **many).bfloat16()
    model = oracle.save(made, tmp_path / "model")
    recipe = Recipe(QuantScheme(4, 32), (Override("*.down_proj", QuantScheme(8, None)),))
    quantkit.quantize(
        model, tmp_path / "int4", recipe, source_check=False, accept_quality_loss=True, method="rtn"
    )
    quantkit.convert(tmp_path / "int4", tmp_path / "mlx", to="mlx", source_check=False)
    bank = "model.layers.0." + ("block_sparse_moe" if kind == "mixtral" else "mlp") + ".switch_mlp"
    size = 96 if kind == "mixtral" else 64
    stored = load_file(tmp_path / "mlx" / "model.safetensors")
    assert stored[f"{bank}.up_proj.weight"].shape == (3, size, 64 // 8)
    assert stored[f"{bank}.up_proj.biases"].shape == (3, size, 64 // 32)
    own = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    by_row = {"group_size": 32 if kind == "mixtral" else 64, "bits": 8, "mode": "affine"}
    assert own == AFFINE | {f"{bank}.down_proj": by_row}
    assert verify(tmp_path / "int4", tmp_path / "mlx").verdict is Verdict.SAME
    quantkit.convert(
        tmp_path / "mlx", tmp_path / "back", to="compressed-tensors", source_check=False
    )
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "int4" / name).read_bytes(), (
            name
        )
    direct = quantkit.quantize(
        model,
        tmp_path / "direct",
        recipe,
        to="mlx",
        source_check=False,
        accept_quality_loss=True,
        method="rtn",
    )
    assert (direct.path / "model.safetensors").read_bytes() == (
        tmp_path / "mlx" / "model.safetensors"
    ).read_bytes()


Edit = Callable[[dict[str, Tensor]], object]


def _set(name: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({f"{UP}.{name}": tensor})


DAMAGES: dict[str, tuple[Edit, dict[str, Any], str]] = {
    "a mode": (
        lambda _: None,
        {"mode": "mxfp4"},
        "'mxfp4', expected affine",
    ),
    "a module's mode": (
        lambda _: None,
        {UP: {"mode": "nvfp4"}},
        "'nvfp4'",
    ),
    "no bits": (lambda _: None, {"bits": None}, "'bits'"),
    "bits as a text": (lambda _: None, {"bits": "4"}, "'quantization_config.bits'"),
    "a module's settings": (lambda _: None, {UP: 4}, f"'quantization_config.{UP}'"),
    "other bits by name": (
        lambda _: None,
        {UP: {"bits": 8}},
        "8 bits",
    ),
    "other groups by name": (lambda _: None, {UP: {"group_size": 64}}, UP),
    "quantized and not": (
        lambda _: None,
        {UP: False},
        f"{UP}.scales",
    ),
    "not and quantized": (
        lambda _: None,
        {"lm_head": dict(AFFINE)},
        "'lm_head'",
    ),
    "no biases": (lambda tensors: tensors.pop(f"{UP}.biases"), {}, f"'{UP}.biases'"),
    "no codes": (lambda tensors: tensors.pop(f"{UP}.weight"), {}, f"'{UP}.weight'"),
    "signed codes": (
        _set("weight", torch.zeros(96, 8, dtype=torch.int32)),
        {},
        UP,
    ),
    "codes of floats": (
        _set("weight", torch.zeros(96, 8)),
        {},
        UP,
    ),
    "bytes as scales": (
        _set("scales", torch.zeros(96, 2, dtype=torch.uint8)),
        {},
        UP,
    ),
    "other biases": (_set("biases", torch.zeros(96, 2)), {}, UP),
    "too many biases": (_set("biases", torch.zeros(96, 4).bfloat16()), {}, UP),
    "no groups": (_set("scales", torch.zeros(96, 0).bfloat16()), {}, UP),
    "a number as scales": (_set("scales", torch.zeros(()).bfloat16()), {}, UP),
    "too few rows": (
        _set("weight", torch.zeros(95, 8, dtype=torch.uint32)),
        {},
        UP,
    ),
    "7 bits": (_set("weight", torch.zeros(96, 14, dtype=torch.uint32)), {}, UP),
    "another tensor": (_set("offsets", torch.zeros(96)), {}, f"'{UP}.offsets'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, model: Path, tmp_path: Path) -> None:
    edit, settings, name = DAMAGES[damage]

    def both(tensors: dict[str, Tensor]) -> None:
        _offset(UP, tensors)
        edit(tensors)

    folder = _edited(model, tmp_path / "mlx", both, **settings)
    error: type[QuantkitError] = CheckpointError
    if "mode" in damage:
        error = UnsupportedError
    with raises(error, name):
        open_checkpoint(folder)


def test_tensors_alone_are_read_too(mlx: Path) -> None:
    known = open_checkpoint(mlx)
    by_tensors = open_checkpoint(mlx, tensors_only=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = known.load(name)
    weight = by_tensors.load(name)
    assert isinstance(expected, QuantTensor)
    assert isinstance(weight, QuantTensor)
    assert torch.equal(weight.dequantize(), expected.dequantize())
