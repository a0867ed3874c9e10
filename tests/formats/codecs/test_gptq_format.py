"""GPTQ's and AWQ's layouts: exact both ways, and what their files say for themselves goes before
their settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import oracle
import pytest
import torch
from case_names import case
from error_parts import raises
from gptq_words import AWQ, gptq_settings, gptq_tensors, pack_words, stated_settings
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.safetensors_io import open_file
from quantkit.formats.checkpoint import list_uncarried_weights, schemes
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.registry import METHODS
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PARTS = [
    None,
    TensorSlice(0, ((0, 8),)),
    TensorSlice(0, ((9, 21), (3, 4))),
    TensorSlice(1, ((0, 64),)),
    TensorSlice(1, ((40, 88),)),
    TensorSlice(1, ((64, 96),)),
]


def _random(
    rows: int, columns: int, scheme: QuantScheme, dtype: torch.dtype = torch.float16
) -> QuantTensor:
    """Any codes, scales of both signs that float16 has, any zero points."""
    groups = scheme.groups(columns)
    zero = (
        None
        if scheme.symmetric
        else torch.randint(0, scheme.levels, (rows, groups), dtype=torch.uint8)
    )
    scale = (
        torch.randn(rows, groups)
        .to(torch.float16)
        .to(torch.bfloat16 if dtype == torch.bfloat16 else dtype)
    )
    return QuantTensor(
        torch.randint(0, scheme.levels, (rows, columns), dtype=torch.uint8), scale, zero, scheme
    )


def _awq(value: QuantTensor) -> dict[str, Tensor]:
    """A module's tensors in AWQ, field by field."""
    zero = torch.full(value.scale.shape, 8) if value.zero is None else value.zero

    def packed(codes: Tensor) -> Tensor:
        ordered = torch.empty_like(codes)
        for field, output in enumerate(AWQ_ORDER):
            ordered[:, field::8] = codes[:, output::8]
        return pack_words(ordered, 4)

    return {
        "qweight": packed(value.codes.t()),
        "qzeros": packed(zero.t()),
        "scales": value.scale.half().t(),
    }


def _raw(tensors: Mapping[str, Tensor], folder: Path) -> RawModule:
    path = folder / "model.safetensors"
    save_file({f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}, path)
    file = open_file(path)
    return RawModule("m", dict.fromkeys(file.tensors, file), path)


def _equal(one: QuantTensor, other: QuantTensor) -> bool:
    same = (
        one.scheme == other.scheme
        and torch.equal(one.codes, other.codes)
        and torch.equal(one.scale, other.scale)
    )
    if one.zero is None or other.zero is None:
        return same and one.zero is other.zero
    return same and torch.equal(one.zero, other.zero)


_SCHEMES = [
    QuantScheme(bits, size, symmetric)
    for bits in (4, 8)
    for size in (8, 32, 64, 128, None)
    for symmetric in (True, False)
]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_codes_lie_as_documented_and_come_back(method: str, tmp_path: Path) -> None:
    for scheme in _SCHEMES:
        with case(scheme):
            _require_documented_codes(method, scheme, tmp_path)


def _require_documented_codes(method: str, scheme: QuantScheme, folder: Path) -> None:
    codec = METHODS[method].codec(scheme)
    if isinstance(codec, Reason):
        assert (method, scheme.bits) == ("awq", 8)
        return
    for rows in (8, 40):
        for columns in (128, 384):
            value = _random(
                rows,
                columns,
                scheme,
                (torch.float16, torch.float32, torch.bfloat16)[columns // 192],
            )
            stored = codec.encode(value)
            assert isinstance(stored, list)
            spec = TensorSpec("m.weight", (rows, columns), DType.FLOAT16, scheme)
            names = [tensor.name.removeprefix("m.") for tensor in codec.list_stored_tensors(spec)]
            expected = (
                gptq_tensors(value, version=1 if scheme.symmetric else 2)
                if method == "gptq"
                else _awq(value)
            )
            assert set(names) == set(expected)
            for name, tensor in zip(names, stored, strict=True):
                assert torch.equal(tensor, expected[name]), name
            raw = _raw(expected, folder)
            whole = QuantTensor(value.codes, value.scale.half(), value.zero, scheme)
            for part in PARTS if rows == 40 else PARTS[:1]:
                decoded = codec.decode(raw, spec, part)
                assert isinstance(decoded, QuantTensor)
                assert _equal(decoded, whole if part is None else part.of_weight(whole)), part  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("rows", [1, 12, 31, 33])
def test_odd_numbers_of_outputs_and_scales_beyond_float16_are_refused(
    method: str, rows: int
) -> None:
    scheme = QuantScheme(4, 32)
    codec = METHODS[method].codec(scheme)
    assert not isinstance(codec, Reason)
    odd = codec.encode(_random(rows, 64, scheme))
    assert isinstance(odd, Reason)
    for scale in (1e-9, 70000.0, 1.0001):
        value = _random(8, 64, scheme, torch.float32)
        value.scale[3, 1] = scale
        reason = codec.encode(value)
        assert isinstance(reason, Reason)
        assert reason.expected == "float16 scales"


def _coded(
    source: Path,
    folder: Path,
    settings: dict[str, Any],
    scheme: QuantScheme,
    *,
    act_order: bool = False,
    version: int = 1,
    dtype: torch.dtype = torch.float16,
) -> tuple[Path, Path]:
    """A folder's linears in GPTQ or AWQ, and another with the floats that they mean."""
    tensors, floats = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name or "gate.weight" in name:
            tensors[name] = floats[name] = tensor
            continue
        value = quantize_rtn(tensor, scheme, dtype)
        module, weight = name.removesuffix("weight"), value.dequantize()
        if settings["quant_method"] == "awq":
            own = _awq(value)
        else:
            order = torch.randperm(tensor.shape[1]) if act_order else None
            own = gptq_tensors(value, order, version)
            weight = weight if order is None else weight[:, order]
        tensors |= {module + suffix: part.contiguous() for suffix, part in own.items()}
        floats[name] = weight
    for path, stored in ((folder, tensors), (folder.with_name(f"{folder.name}-floats"), floats)):
        oracle.copy(source, path)
        save_file(
            {name: tensor.contiguous() for name, tensor in stored.items()},
            path / "model.safetensors",
        )
    oracle.edit_json(folder / "config.json", quantization_config=settings)
    return folder, folder.with_name(f"{folder.name}-floats")


@pytest.mark.parametrize("how", ["gptq", "act-order", "awq"])
@pytest.mark.parametrize("family", ["llama", "phi3", "glm4", "mixtral"])
def test_every_tensor_of_a_family_is_what_its_codes_mean(
    family: str, how: str, tmp_path: Path
) -> None:
    """Rows that are fused, permuted or of experts on disk, whole and in parts."""
    source = oracle.save(families.make(family), tmp_path / "source")
    settings, scheme = (AWQ if how == "awq" else gptq_settings()), QuantScheme(4, 32, how != "awq")
    folder, floats = _coded(source, tmp_path / how, settings, scheme, act_order=how == "act-order")
    coded, plain = families.opened(folder), families.opened(floats)
    assert set(schemes(coded)) | {
        name.removesuffix(".weight") for name in list_uncarried_weights(coded)
    }
    assert bool(list_uncarried_weights(coded)) == (how == "act-order")
    assert set(list_uncarried_weights(coded).values()) <= {"GPTQ with act-order"}
    for name in plain.names():
        spec = plain.info(name)
        parts: list[TensorSlice | None] = [None, TensorSlice(0, ((1, spec.shape[0] - 2),))]
        parts += (
            [TensorSlice(1, ((32, 64),)), TensorSlice(1, ((8, 40),))] if len(spec.shape) > 1 else []
        )
        for part in parts:
            value, other = coded.load(name, part), plain.load(name, part)
            assert isinstance(other, Tensor)
            assert torch.equal(value if isinstance(value, Tensor) else value.dequantize(), other), (
                name,
                part,
            )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return oracle.save(oracle.make("llama"), tmp_path / "source")


def test_old_folders_have_their_settings_next_to_and_biases_of_zeros(
    llama: Path, tmp_path: Path
) -> None:
    folder, _ = _coded(llama, tmp_path / "old", gptq_settings(), QuantScheme(4, 32))
    oracle.edit_json(folder / "config.json", quantization_config=None)
    (folder / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 32, "desc_act": True})
    )
    tensors = load_file(folder / "model.safetensors")
    bias = "model.layers.0.mlp.up_proj.bias"
    save_file({**tensors, bias: torch.zeros(96, dtype=torch.float16)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert [note for note in checkpoint.notes if "1 biases" in note]
    assert set(schemes(checkpoint).values()) == {QuantScheme(4, 32)}
    save_file({**tensors, bias: torch.ones(96, dtype=torch.float16)}, folder / "model.safetensors")
    with raises(CheckpointError, f"'{bias}'", path=folder):
        open_checkpoint(folder)

    folder, _ = _coded(llama, tmp_path / "native", AWQ, QuantScheme(4, 32, False))
    oracle.edit_json(folder / "config.json", quantization_config=None)
    native = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(native))
    assert set(schemes(open_checkpoint(folder)).values()) == {QuantScheme(4, 32, False)}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("stated", ["gptq", "gptq_v2"])
def test_the_zero_points_report_their_version(
    stated: str, version: int, symmetric: bool, llama: Path, tmp_path: Path
) -> None:
    settings = gptq_settings(checkpoint_format=stated, sym=True)
    scheme = QuantScheme(4, 32, symmetric)
    folder, floats = _coded(llama, tmp_path / "coded", settings, scheme, version=version)
    coded, plain = open_checkpoint(folder), open_checkpoint(floats)
    assert set(schemes(coded).values()) == {scheme}
    lies = {"gptq": 1, "gptq_v2": 2}[stated] != version
    assert [note for note in coded.notes if f"version {version}" in note] == coded.notes
    assert len(coded.notes) == lies
    for name in schemes(coded):
        value = coded.load(f"{name}.weight")
        assert isinstance(value, QuantTensor)
        assert torch.equal(value.dequantize(), plain.load(f"{name}.weight")), name  # type: ignore[arg-type]


def test_modules_of_two_versions_are_refused(llama: Path, tmp_path: Path) -> None:
    first, _ = _coded(llama, tmp_path / "one", gptq_settings(), QuantScheme(4, 32))
    second, _ = _coded(llama, tmp_path / "two", gptq_settings(), QuantScheme(4, 32), version=2)
    name = "model.layers.2.mlp.down_proj.qzeros"
    mixed = {
        **load_file(first / "model.safetensors"),
        name: load_file(second / "model.safetensors")[name],
    }
    save_file(mixed, first / "model.safetensors")
    with raises(CheckpointError, "'model.layers.0.self_attn.q_proj'", found="version 1"):
        open_checkpoint(first)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_zero_are_exact_under_version_1_or_refused(
    bits: int, tmp_path: Path
) -> None:
    """GPTQModel's subtraction borrows from the next field; AutoGPTQ's fills what lies above."""
    scheme = QuantScheme(bits, 32, False)
    value = _random(32, 64, scheme)
    assert value.zero is not None
    value.zero[4, 1] = value.zero[0, 0] = 0
    value.zero[5, 1] = value.zero[1, 0] = 3
    settings = METHODS["gptq"].read_settings(
        stated_settings(gptq_settings(bits)), ["m"], ["m.qweight"]
    )
    tensors = gptq_tensors(value)
    raw, expected = _raw(tensors, tmp_path), TensorSpec("m.weight", value.shape, DType.FLOAT32)
    spec = settings["m"].spec(raw, expected)
    decoded = settings["m"].decode(raw, spec)
    assert isinstance(decoded, QuantTensor)
    assert _equal(decoded, value)
    fields = (value.zero.t().long() - 1).tolist()
    packed = torch.zeros(2, 32 * bits // 32, dtype=torch.int64)
    for group, row in enumerate(fields):
        for output, field in enumerate(row):
            packed[group, output * bits // 32] |= (field << output * bits % 32) & 0xFFFFFFFF
    tensors["qzeros"] = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    with raises(UnsupportedError, "'m'", path=tmp_path / "model.safetensors"):
        settings["m"].spec(_raw(tensors, tmp_path), expected)


def test_groups_that_do_not_divide_the_row_are_smaller_ones_that_repeat(tmp_path: Path) -> None:
    """[8, 96] in groups of 64 has two scales a row, of which the second is for 32 inputs; of 40,
    three.
    """
    for size, scheme in (
        (64, QuantScheme(4, 32)),
        (40, QuantScheme(4, 8)),
        (96, QuantScheme(4, 96)),
    ):
        codec = METHODS["gptq"].read_settings(
            stated_settings(gptq_settings(4, size)), ["m"], ["m.qweight"]
        )["m"]
        place = torch.arange(96) // size
        codes, scale = torch.randint(0, 16, (8, 96)), torch.randn(8, int(place.max()) + 1).half()
        tensors = {
            "qweight": pack_words(codes, 4).t(),
            "qzeros": torch.full((scale.shape[1], 1), 0x77777777, dtype=torch.int32),
            "scales": scale.t(),
            "g_idx": place.to(torch.int32),
        }
        raw, expected = _raw(tensors, tmp_path), TensorSpec("m.weight", (8, 96), DType.FLOAT32)
        spec = codec.spec(raw, expected)
        assert spec.scheme == scheme
        weight = (codes - 8) * scale.float()[:, place]
        for part in (None, TensorSlice(0, ((2, 5),)), TensorSlice(1, ((40, 96),))):
            found = codec.decode(raw, spec, part)
            assert isinstance(found, QuantTensor)
            assert torch.equal(found.dequantize(), weight if part is None else part.of(weight))


def test_groups_too_small_for_a_scheme_are_read_as_floats(tmp_path: Path) -> None:
    codec = METHODS["gptq"].read_settings(
        stated_settings(gptq_settings(8, 12)), ["m"], ["m.qweight"]
    )["m"]
    place = torch.arange(48) // 12
    codes, scale, zero = (
        torch.randint(0, 256, (6, 48)),
        torch.randn(6, 4).half(),
        torch.randint(1, 256, (6, 4)),
    )
    tensors = {
        "qweight": pack_words(codes, 8).t(),
        "qzeros": pack_words(zero.t() - 1, 8),
        "scales": scale.t(),
    }
    raw, expected = _raw(tensors, tmp_path), TensorSpec("m.weight", (6, 48), DType.BFLOAT16)
    spec = codec.spec(raw, expected)
    assert (spec.scheme, spec.dtype, spec.stored_as) == (
        None,
        DType.BFLOAT16,
        "GPTQ in groups of 12",
    )
    weight = ((codes - zero[:, place]) * scale.float()[:, place]).bfloat16()
    for part in (
        None,
        TensorSlice(
            0,
            ((1, 3), (4, 6)),
        ),
        TensorSlice(1, ((10, 31),)),
    ):
        found = codec.decode(raw, spec, part)
        assert isinstance(found, Tensor)
        assert torch.equal(found, weight if part is None else part.of(weight))


_Q, _UP = "model.layers.1.self_attn.q_proj.", "model.layers.1.mlp.up_proj."
_BROKEN: dict[str, tuple[dict[str, Any], Any, str]] = {
    "3 bits": ({"bits": 3}, None, "found 3"),
    "marlin": ({"checkpoint_format": "marlin"}, None, "'marlin'"),
    "int16 words": ({"pack_dtype": "int16"}, None, "'int16'"),
    "a group size of text": (
        {"group_size": "128"},
        None,
        "'quantization_config.group_size'",
    ),
    "another group size": (
        {"group_size": 64},
        None,
        "_proj.qzeros'",
    ),
    "other bits": ({"bits": 8}, None, "_proj.qweight'"),
    "a bad pattern": (
        {"dynamic": {"-:(": {}}},
        None,
        "quantization_config.dynamic",
    ),
    "no scales": ({}, {_Q + "scales": None}, _Q[:-1]),
    "a shape": (
        {},
        {_Q + "qweight": torch.zeros(8, 63, dtype=torch.int32)},
        f"'{_Q}qweight'",
    ),
    "a wrong type": (
        {},
        {_Q + "qweight": torch.zeros(8, 64)},
        f"'{_Q}qweight'",
    ),
    "whole scales": (
        {},
        {_Q + "scales": torch.ones(2, 64, dtype=torch.int32)},
        f"'{_Q}scales'",
    ),
    "a long index": (
        {},
        {_Q + "g_idx": torch.zeros(65, dtype=torch.int32)},
        f"'{_Q}g_idx'",
    ),
    "a group beyond": (
        {},
        {_Q + "g_idx": torch.full((64,), 2, dtype=torch.int32)},
        "found 2, expected 0",
    ),
    "a group below": (
        {},
        {_Q + "g_idx": torch.full((64,), -1, dtype=torch.int32)},
        "found -1",
    ),
    "floats besides": (
        {},
        {_UP + "weight": torch.zeros(96, 64)},
        _UP[:-1],
    ),
}


@pytest.mark.parametrize("damage", _BROKEN)
def test_what_contradicts_itself_is_refused(damage: str, llama: Path, tmp_path: Path) -> None:
    changes, tensors, name = _BROKEN[damage]
    folder, _ = _coded(llama, tmp_path / "coded", gptq_settings(), QuantScheme(4, 32))
    oracle.edit_json(folder / "config.json", quantization_config={**gptq_settings(), **changes})
    stored = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    kept = {key: tensor for key, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    with raises((CheckpointError, UnsupportedError), name):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "changes", [{"version": "gemv"}, {"bits": 8}, {"format": "llm-awq"}], ids=str
)
def test_other_kinds_of_awq_are_refused(
    changes: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    folder, _ = _coded(llama, tmp_path / "coded", {**AWQ}, QuantScheme(4, 32, False))
    oracle.edit_json(folder / "config.json", quantization_config={**AWQ, **changes})
    with raises(UnsupportedError, path=folder / "config.json"):
        open_checkpoint(folder)


def test_modules_may_have_bits_and_groups_of_their_own(llama: Path, tmp_path: Path) -> None:
    settings = gptq_settings(
        dynamic={"-:.*lm_head": {}, r"+:.*\.1\.mlp\..*": {"bits": 8, "group_size": -1}}
    )
    folder, _ = _coded(llama, tmp_path / "coded", settings, QuantScheme(4, 32))
    other, _ = _coded(llama, tmp_path / "other", settings, QuantScheme(8, None))
    theirs = {n: t for n, t in load_file(other / "model.safetensors").items() if ".1.mlp." in n}
    save_file({**load_file(folder / "model.safetensors"), **theirs}, folder / "model.safetensors")
    found = schemes(open_checkpoint(folder))
    own = {module for module, scheme in found.items() if scheme == QuantScheme(8, None)}
    assert own == {f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")}
    assert set(found.values()) == {QuantScheme(8, None), QuantScheme(4, 32)}
    written = METHODS["gptq"].write_settings(found, [*found, "lm_head"])
    assert len(written["dynamic"]) == 3
    read = METHODS["gptq"].read_settings(
        stated_settings(written), found, [f"{name}.qweight" for name in found]
    )
    assert {module: codec.scheme for module, codec in read.items()} == found


def test_awq_refuses_several_group_sizes_and_names_the_format_that_has_them() -> None:
    mixed = {"model.layers.0.down": QuantScheme(4, 32), "model.layers.0.up": QuantScheme(4, 64)}
    with raises(UnsupportedError, "32", found="32 and 64", options=["to"]):
        METHODS["awq"].write_settings(mixed, mixed)
    assert METHODS["gptq"].write_settings(mixed, mixed)["dynamic"]
    smallest = dict.fromkeys(mixed, QuantScheme(4, 32))
    assert METHODS["awq"].write_settings(smallest, mixed)["group_size"] == 32


def test_settings_may_name_as_many_modules_as_a_model_has() -> None:
    experts = [
        f"model.layers.{layer}.mlp.experts.{expert}.down_proj"
        for layer in range(36)
        for expert in range(128)
    ]
    kept = {f"model.layers.{layer}.self_attn.o_proj": QuantScheme(4, 32) for layer in range(36)}
    written = METHODS["gptq"].write_settings(kept, [*kept, *experts])
    assert len(written["dynamic"]) == len(experts) == 4608
    stored = [f"{module}.qweight" for module in kept]
    read = METHODS["gptq"].read_settings(stated_settings(written), [*kept, *experts], stored)
    assert {module: codec.scheme for module, codec in read.items()} == kept
    patterns = {f"-:.*{module}": {} for module in experts}
    with raises(CheckpointError, "quantization_config.dynamic", found=len(patterns)):
        METHODS["gptq"].read_settings(
            stated_settings({**written, "dynamic": patterns}), kept, stored
        )


@pytest.mark.parametrize(
    "scheme", [QuantScheme(4, 32), QuantScheme(4, 8, False), QuantScheme(8, None)], ids=str
)
def test_theirs_goes_to_ours_and_back_to_the_same_bytes(
    scheme: QuantScheme, llama: Path, tmp_path: Path
) -> None:
    settings = gptq_settings(scheme.bits, scheme.group_size or -1, sym=scheme.symmetric)
    theirs, _ = _coded(
        llama, tmp_path / "theirs", settings, scheme, version=1 if scheme.symmetric else 2
    )
    there = tmp_path / "theirs"
    for number, to in enumerate(["compressed-tensors", "gptq", "awq", "gptq"]):
        if (to, scheme.bits) != ("awq", 8):
            quantkit.convert(there, there := tmp_path / f"{number}-{to}", to=to)
        assert schemes(open_checkpoint(there)) == schemes(open_checkpoint(theirs))
    first, last = (load_file(folder / "model.safetensors") for folder in (theirs, there))
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, last[name]), name
        assert tensor.dtype == last[name].dtype
    neighbors = json.loads((there / "quantize_config.json").read_text())
    assert neighbors == json.loads((there / "config.json").read_text())["quantization_config"]


INT4, INT8 = QuantScheme(4, 32), QuantScheme(8, None)


@pytest.mark.parametrize(
    ("method", "schemes_of", "readers"),
    [
        ("gptq", [INT4, INT4, None], "gptqmodel, transformers with gptqmodel, vLLM"),
        ("gptq", [INT8, INT8, None], "gptqmodel, transformers with gptqmodel, vLLM on GPUs"),
        (
            "gptq",
            [QuantScheme(4, 32, False)] * 2 + [None],
            "gptqmodel, transformers with gptqmodel",
        ),
        ("gptq", [INT4, None, None], "gptqmodel, vLLM"),
        ("gptq", [INT4, INT4, INT4], "gptqmodel, vLLM"),
        ("gptq", [INT4, INT8, None], "gptqmodel, vLLM on GPUs"),
        ("gptq", [QuantScheme(4, 8)] * 3, "readers that support this group size of GPTQ"),
        ("awq", [INT4, None, None], "gptqmodel, transformers with gptqmodel, vLLM"),
        ("awq", [INT4, INT4, INT4], "gptqmodel, vLLM"),
    ],
)
def test_who_loads_a_folder_is_as_was_tried(
    method: str, schemes_of: list[QuantScheme | None], readers: str
) -> None:
    assert (
        METHODS[method].readers(dict(zip(("a", "b", "lm_head"), schemes_of, strict=True)))
        == readers
    )


def test_the_quantized_modules_are_listed_where_others_stay_floats(
    demo_model: Path, tmp_path: Path
) -> None:
    # transformers would replace all linears by packed ones, also those that have no codes.
    for name, kept in (("all", []), ("some", ["*.k_proj"])):
        options: dict[str, Any] = {"method": "rtn", "to": "gptq", "keep": kept}
        quantkit.quantize(demo_model, tmp_path / name, "int8", **options, source_check=False)
    settings = {
        name: json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("all", "some")
    }
    assert "modules_in_block_to_quantize" not in settings["all"]
    (listed,) = settings["some"]["modules_in_block_to_quantize"]
    assert "layers.0.self_attn.q_proj" in listed
    assert not any("k_proj" in module for module in listed)
    assert quantkit.load(tmp_path / "some")
