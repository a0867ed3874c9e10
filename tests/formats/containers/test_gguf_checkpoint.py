"""GGUF files read: canonical tensors as the folder has that the file was made of, codes and
floats as gguf has them.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import oracle
import pytest
import torch
from error_parts import raises
from gguf import GGMLQuantizationType as Ggml
from gguf_config_cases import CASES
from torch import Tensor
from vocabularies import train

import quantkit
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import linear_columns
from quantkit.errors import CheckpointError, QuantkitError, RequestError, UnsupportedError
from quantkit.files.gguf_types import GgmlType, name_part
from quantkit.formats.checkpoint import list_uncarried_weights, schemes
from quantkit.formats.codecs import ggml
from quantkit.formats.codecs.ggml import EXACT, NOT_READ
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.gguf.checkpoint import GgufCheckpoint
from quantkit.formats.gguf.config import build_metadata
from quantkit.formats.registry import GGUF, HF
from quantkit.quality.transcoded import require_exact
from quantkit.quality.verify import Verdict
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice

_ENDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
_ROWS = 320
_TOKENS = [
    "<unk>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *(f"word{number}" for number in range(_ROWS - 257)),
]
_TOKENIZER = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": _TOKENS,
    "tokenizer.ggml.scores": [float(-number) for number in range(_ROWS)],
    "tokenizer.ggml.token_type": [2, *[6] * 256, *[1] * (_ROWS - 257)],
}
_FAMILIES = (
    "llama-biases",
    "granite-multipliers",
    "qwen2-tied",
    "smollm3-no-theta",
    "phi3-partial",
    "gemma3",
    "olmo3",
    "mixtral",
    "qwen2-moe",
    "olmoe",
    "glm",
    "glm4",
    "ministral3-yarn",
    "gpt-oss",
    "cohere2",
    "exaone4",
    "hunyuan-dense",
    "llama4-steps",
    "lfm2",
    "lfm2-moe",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next",
    "granite-hybrid",
    "granite-hybrid-moe",
    "bamba",
    "bamba-biases",
    "nemotron-h",
    "nemotron-h-moe",
    "gemma4",
    "gemma4-small",
    "gemma4-experts",
)


@functools.cache
def _source(changes: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model's folder, opened, and its tensors as llama.cpp's converter makes them.

    Args:
        changes: the kind, and settings, as JSON.
    """
    kind, settings = json.loads(changes)
    model = oracle.make(kind, **{"bos_token_id": 1, "eos_token_id": 2, **settings})
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return HF.open(oracle.save(model, folder), "safetensors"), gguf_files.tensors_of(model)


def _made(
    folder: Path, kind: str, types: Mapping[str, Ggml] | None = None, **changes: Any
) -> tuple[Any, Path]:
    """A Hugging Face folder of a tiny model, opened, and a GGUF file of the same."""
    source, tensors = _source(json.dumps([kind, changes]))
    folder.mkdir(exist_ok=True)
    return source, gguf_files.write(
        folder / "model.gguf", build_metadata(source.config) | _ENDS, tensors, types
    )


def _opened(path: Path) -> GgufCheckpoint:
    return GGUF.open(path, "gguf")


def _floats(value: Tensor | QuantTensor) -> Tensor:
    return value.dequantize().float() if isinstance(value, QuantTensor) else value.float()


@pytest.mark.parametrize("case", _FAMILIES)
def test_a_file_of_the_converter_is_the_model_that_it_was_made_of(
    case: str, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    source, path = _made(tmp_path, kind, **changes)
    found = _opened(path)
    assert found.names() == source.names()
    assert found.config.differences(source.config) == []
    # Norms are stored with 1 added, decay rates in place of their logarithms.
    rounded = 2.5e-7 if source.config.norm_offset or source.config.mamba2 else 0
    for name in source.names():
        assert found.info(name).shape == source.info(name).shape
        torch.testing.assert_close(found.load(name), source.load(name), rtol=0, atol=rounded)


def test_rates_of_decay_are_negative(tmp_path: Path) -> None:
    kind, changes = CASES["bamba"]
    source, tensors = _source(json.dumps([kind, changes]))
    rates = {"blk.0.ssm_a": -tensors["blk.0.ssm_a"]}
    path = gguf_files.write(
        tmp_path / "a.gguf", build_metadata(source.config) | _ENDS, tensors | rates
    )
    with raises(CheckpointError, "blk.0.ssm_a"):
        _opened(path).load("model.layers.0.mamba.A_log")


def test_keys_and_values_of_layers_that_share_them_are_not_read(tmp_path: Path) -> None:
    kind, changes = CASES["gemma4-small"]
    source, tensors = _source(json.dumps([kind, changes]))
    unread = {f"blk.4.attn_{part}.weight": np.zeros((2, 2), np.float32) for part in "kv"}
    metadata = build_metadata(source.config) | _ENDS
    opened = _opened(gguf_files.write(tmp_path / "a.gguf", metadata, tensors | unread))
    assert opened.names() == source.names()
    other = {"blk.3.attn_x.weight": np.zeros((2, 2), np.float32)}
    with raises(CheckpointError, "attn_x"):
        _opened(gguf_files.write(tmp_path / "b.gguf", metadata, tensors | other))


@pytest.mark.parametrize("kind", [Ggml.F32, Ggml.Q8_0])
@pytest.mark.parametrize("case", ["llama-biases", "qwen2-tied", "gemma3", "lfm2", "qwen3-5"])
def test_queries_keys_and_values_may_be_one_tensor(case: str, kind: Ggml, tmp_path: Path) -> None:
    """llama.cpp loads such files of every architecture, whatever the converter writes by
    default.
    """
    family, changes = CASES[case]
    source, tensors = _source(json.dumps([family, changes]))
    metadata = build_metadata(source.config) | _ENDS
    apart = {**tensors}
    merged = {**tensors}
    for layer in range(source.config.num_layers):
        for leaf in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{leaf}" for part in "qkv"]
            if names[0] in merged:
                merged[f"blk.{layer}.attn_qkv.{leaf}"] = np.concatenate(
                    [merged.pop(name) for name in names]
                )
    types = {
        name: kind for name in (*apart, *merged) if "attn_" in name and name.endswith("weight")
    }
    types = {name: one for name, one in types.items() if "norm" not in name}
    expected = _opened(gguf_files.write(tmp_path / "apart.gguf", metadata, apart, types))
    found = _opened(gguf_files.write(tmp_path / "merged.gguf", metadata, merged, types))
    assert found.names() == expected.names()
    assert found.config.differences(expected.config) == []
    assert schemes(found) == schemes(expected)
    for name in expected.names():
        assert torch.equal(_floats(found.load(name)), _floats(expected.load(name)))


def test_end_tokens_of_keys_that_were_changed_later_count(tmp_path: Path) -> None:
    source, tensors = _source(json.dumps(["llama", {}]))
    keys = {"quantkit.eos_token_ids": [2, 9], "tokenizer.ggml.eos_token_id": 2}
    written = gguf_files.write(
        tmp_path / "written.gguf", build_metadata(source.config) | _ENDS | keys, tensors
    )
    assert _opened(written).config.eos_token_ids == (2, 9)
    keys["tokenizer.ggml.eos_token_id"] = 5
    changed = gguf_files.write(
        tmp_path / "changed.gguf", build_metadata(source.config) | _ENDS | keys, tensors
    )
    assert _opened(changed).config.eos_token_ids == (5,)


@pytest.mark.parametrize("kind", [Ggml.Q4_0, Ggml.Q8_0])
@pytest.mark.parametrize("case", ["llama", "phi3", "qwen3-moe"])
def test_codes_are_those_of_the_file(case: str, kind: Ggml, tmp_path: Path) -> None:
    family, changes = CASES[case]
    changes = (
        {**changes, "moe_intermediate_size": 64} if "moe_intermediate_size" in changes else changes
    )
    source, path = _made(tmp_path, family, {"": kind}, **changes)
    found = _opened(path)
    quantized = {name for name in found.names() if found.info(name).scheme is not None}
    assert {name.removesuffix(".weight") for name in quantized} == {
        EMBEDDING,
        *linear_columns(source.config),
    }
    assert list_uncarried_weights(found) == {}
    for name in source.names():
        value, before = found.load(name), _floats(source.load(name))
        assert isinstance(value, QuantTensor) == (name in quantized)
        step = before.abs().max() / (7 if kind is Ggml.Q4_0 else 127)
        assert (_floats(value) - before).abs().max() <= step * (name in quantized)


@pytest.mark.parametrize(
    "kind", [kind for kind in GgmlType if kind not in NOT_READ and kind not in ggml.FLOATS]
)
def test_a_type_means_what_gguf_says(
    kind: GgmlType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ggml, "CHUNK_ELEMENTS", 1 << 12)  # several for a tensor
    source, tensors = _source(json.dumps(["qwen2", _WIDE]))
    blocks = np.random.default_rng(0).integers(0, 256, (256, kind.row_bytes(256)), np.uint8)
    path = tmp_path / "model.gguf"
    written = {"blk.0.ffn_up.weight": (blocks, Ggml[kind])}
    gguf_files.write(path, build_metadata(source.config) | _ENDS, tensors, blocks=written)
    found, name = _opened(path), "model.layers.0.mlp.up_proj.weight"
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks, Ggml[kind]))
    value = found.load(name)
    if isinstance(value, QuantTensor):
        torch.testing.assert_close(
            value.dequantize().float(), expected, rtol=0, atol=0, equal_nan=True
        )
    else:
        assert found.info(name).stored_as == (None if kind in ggml.SMALL_FLOATS else kind)
        assert torch.equal(value.nan_to_num(7), expected.nan_to_num(7))
        part = TensorSlice(0, ((3, 40), (200, 256)))
        assert torch.equal(found.load(name, part).nan_to_num(7), part.of(expected).nan_to_num(7))  # type: ignore[union-attr]
        columns = found.load(name, TensorSlice(1, ((30, 111),)))
        assert torch.equal(columns.nan_to_num(7), expected[:, 30:111].nan_to_num(7))  # type: ignore[union-attr]
        narrow = open_checkpoint(path, floats_as=DType.BFLOAT16)
        assert narrow.info(name).dtype == "bfloat16"
        assert torch.equal(narrow.load(name).nan_to_num(7), expected.bfloat16().nan_to_num(7))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [Ggml.F32, Ggml.Q4_0, Ggml.Q4_1])
@pytest.mark.parametrize("case", ["phi3", "mixtral", "qwen3-5", "qwen3-next"])
def test_a_part_is_what_it_is_of_the_whole(case: str, kind: Ggml, tmp_path: Path) -> None:
    family, changes = CASES[case]
    _, path = _made(tmp_path, family, {"": kind}, **changes, intermediate_size=128)
    found = _opened(path)
    for name in found.names():
        rows, *columns = found.info(name).shape
        parts = (
            [TensorSlice(0, ((rows // 4, rows // 2), (rows // 2 + 1, rows)))] if rows > 4 else []
        )
        if columns and columns[0] >= 64:
            parts.append(TensorSlice(1, ((32, 64),)))
        whole = found.load(name)
        for part in parts:
            assert torch.equal(_floats(found.load(name, part)), _floats(part.of_weight(whole)))


@pytest.mark.parametrize("kind", [Ggml.Q8_0, Ggml.Q4_0])
@pytest.mark.parametrize("case", ["qwen3-5", "qwen3-next"])
def test_codes_of_delta_rules_are_put_in_the_order_of_folders(
    case: str, kind: Ggml, tmp_path: Path
) -> None:
    family, changes = CASES[case]
    source, path = _made(tmp_path, family, {"": kind}, **changes)
    found = _opened(path)
    names = [
        name
        for name in source.names()
        if ".linear_attn." in name and name.removesuffix(".weight") in linear_columns(source.config)
    ]
    assert len(names) == 2 * (3 if case == "qwen3-5" else 2)
    for name in names:
        value, before = found.load(name), source.load(name)
        assert isinstance(value, QuantTensor)
        step = before.abs().max() / (7 if kind is Ggml.Q4_0 else 127)
        assert (_floats(value) - before).abs().max() <= step
        rows = found.info(name).shape[0]
        assert found.count_stored_bytes(name) == rows * GgmlType[kind.name].row_bytes(
            value.shape[1]
        )


def _require_floats(found: GgufCheckpoint, source: Any, name: str) -> None:
    """Require that a weight is read as floats, although it is stored in codes of 8 bits."""
    value, before = found.load(name), source.load(name)
    assert found.info(name).scheme is None
    assert isinstance(value, Tensor)
    assert (value.float() - before).abs().max() <= before.abs().max() / 64


def test_blocks_that_several_value_heads_share_are_read_as_floats(tmp_path: Path) -> None:
    family, changes = CASES["qwen3-5"]
    small_heads = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    source, path = _made(tmp_path, family, {"": Ggml.Q8_0}, **{**changes, **small_heads})
    found = _opened(path)
    prefix = "model.layers.0.linear_attn."
    _require_floats(found, source, prefix + "out_proj.weight")
    # Rows are complete, whatever their size.
    assert found.info(prefix + "in_proj_qkv.weight").scheme is not None


@pytest.mark.parametrize("gates", [Ggml.Q4_0, Ggml.F16])
def test_a_linear_in_two_types_is_read_as_floats(gates: Ggml, tmp_path: Path) -> None:
    family, changes = CASES["qwen3-next"]
    types = {"": Ggml.Q8_0, "blk.0.attn_gate.weight": gates}
    source, path = _made(tmp_path, family, types, **changes)
    found = _opened(path)
    name = "model.layers.{}.linear_attn.in_proj_qkvz.weight"
    assert found.info(name.format(0)).scheme is None
    assert found.info(name.format(2)).scheme is not None
    value, before = found.load(name.format(0)), source.load(name.format(0))
    step = before.abs().max() / 7
    assert (value - before).abs().max() <= step
    assert value.dtype == found.info(name.format(0)).dtype.torch


@pytest.mark.parametrize("kind", [Ggml.F32, Ggml.Q8_0])
def test_older_files_have_the_joined_linear_of_delta_rules(kind: Ggml, tmp_path: Path) -> None:
    family, changes = CASES["qwen3-next"]
    source, tensors = _source(json.dumps([family, changes]))
    tensors = dict(tensors)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    for part in ("attn_qkv", "attn_gate"):
        del tensors[f"blk.0.{part}.weight"]
    tensors["blk.0.ssm_in.weight"] = source.load(name).numpy()
    metadata = build_metadata(source.config) | _ENDS
    types = {"blk.0.ssm_in.weight": kind}
    found = _opened(gguf_files.write(tmp_path / "model.gguf", metadata, tensors, types))
    assert found.names() == source.names()
    before = source.load(name)
    assert (found.info(name).scheme is None) == (kind is Ggml.F32)
    difference = (_floats(found.load(name)) - before).abs().max()
    assert difference <= before.abs().max() / 127 * (kind is Ggml.Q8_0)


def test_layers_for_prediction_are_left_out_with_a_note(tmp_path: Path) -> None:
    family, changes = CASES["qwen3-5"]
    source, tensors = _source(json.dumps([family, changes]))
    layers = source.config.num_layers
    predicting = {
        name.replace("blk.1.", f"blk.{layers}."): values
        for name, values in tensors.items()
        if name.startswith("blk.1.")
    }
    metadata = build_metadata(source.config) | _ENDS
    metadata["qwen35.attention.recurrent_layers"] += [False]
    metadata |= {"qwen35.block_count": layers + 1, "qwen35.nextn_predict_layers": 1}
    path = gguf_files.write(tmp_path / "model.gguf", metadata, {**tensors, **predicting})
    found = _opened(path)
    assert found.names() == source.names()
    assert found.config.differences(source.config) == []
    (note,) = found.notes
    assert f" {len(predicting)} " in note


def test_columns_may_cut_groups_as_those_of_any_weight(tmp_path: Path) -> None:
    _, path = _made(tmp_path, "llama", {"": Ggml.Q4_0})
    name, part = "model.layers.0.mlp.up_proj.weight", TensorSlice(1, ((16, 48),))
    found, whole = _opened(path).load(name, part), _opened(path).load(name)
    assert isinstance(found, QuantTensor)
    assert isinstance(whole, QuantTensor)
    assert found.scheme == whole.columns(16, 48).scheme
    assert torch.equal(found.dequantize(), whole.columns(16, 48).dequantize())
    with pytest.raises(RequestError):
        _opened(path).load(name, TensorSlice(1, ((1, 33),)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Ggml.F16, "float16"),
        (Ggml.BF16, "bfloat16"),
        (Ggml.F32, "float32"),
        (Ggml.Q4_0, "bfloat16"),
    ],
)
def test_the_float_type_is_that_of_the_matrices(kind: Ggml, expected: str, tmp_path: Path) -> None:
    _, path = _made(tmp_path, "llama", {"": kind})
    found = _opened(path)
    assert found.config.dtype == expected
    assert found.info("model.norm.weight").dtype == "float32"
    mixed = _opened(
        _made(tmp_path / "mixed", "llama", {"": Ggml.Q8_0, "token_embd.weight": kind})[1]
    )
    assert mixed.config.dtype == expected


def test_an_embedding_in_integers_is_read_exactly(tmp_path: Path) -> None:
    types = {"": Ggml.Q4_0, "token_embd.weight": Ggml.Q5_0, "output.weight": Ggml.Q5_0}
    _, path = _made(tmp_path, "llama", types)
    checkpoint = _opened(path)
    names = ("token_embd.weight", "output.weight")
    for note, name in zip(checkpoint.notes, names, strict=True):
        assert f" {name} is Q5_0, read as float32" in note
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, stored in {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
    }.items():
        assert checkpoint.info(name).dtype == "float32"
        expected = torch.from_numpy(
            gguf.dequantize(reader[stored].data, reader[stored].tensor_type)
        )
        assert torch.equal(_floats(checkpoint.load(name)), expected)
    assert list_uncarried_weights(checkpoint) == {}
    _, path = _made(tmp_path / "other", "llama", {"": Ggml.Q4_0, "token_embd.weight": Ggml.Q4_1})
    assert list_uncarried_weights(_opened(path)) == {"model.embed_tokens.weight": "Q4_1"}


def test_numbers_of_the_exact_types_are_float32s() -> None:
    random = np.random.default_rng(1)
    for kind in EXACT - {GgmlType.Q4_0, GgmlType.Q8_0}:
        rows = random.integers(0, 256, (64, kind.row_bytes(256)), np.uint8)
        with np.errstate(all="ignore"):
            found = gguf.dequantize(rows, Ggml[kind]).astype(np.float64)
        finite = found[np.isfinite(found)]
        scaled = finite / 2.0 ** np.floor(
            np.log2(np.abs(finite), where=finite != 0, out=np.zeros_like(finite))
        )
        assert (scaled * 2**23 % 1 == 0).all(), (
            kind
        )  # no bit beyond a float32's, which rounding would have used up
        assert (scaled * 2**23 % 2 == 0).mean() > 0.5, kind


def test_a_head_that_is_the_embedding_is_tied(tmp_path: Path) -> None:
    source, path = _made(tmp_path, "olmo2", tie_word_embeddings=True)
    tensors = dict(_source(json.dumps(["olmo2", {"tie_word_embeddings": True}]))[1])
    tensors["output.weight"] = tensors["token_embd.weight"]
    found = _opened(gguf_files.write(path, build_metadata(source.config) | _ENDS, tensors))
    assert found.config.tied_embeddings
    assert found.names() == source.names()
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    assert not _opened(
        gguf_files.write(path, build_metadata(source.config) | _ENDS, tensors)
    ).config.tied_embeddings


def _split(path: Path, count: int) -> list[Path]:
    """The same model in parts, as llama.cpp splits it: metadata in the first one only."""
    reader = gguf.GGUFReader(path)
    paths = [path.with_name(name_part("part", index, count)) for index in range(count)]
    size = -(-len(reader.tensors) // count)
    for index, part in enumerate(paths):
        writer = gguf.GGUFWriter(part, "llama")
        for field in reader.fields.values() if index == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[index * size : (index + 1) * size]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    return paths


def test_all_parts_of_a_split_model_are_read(tmp_path: Path) -> None:
    source, path = _made(tmp_path, "llama")
    parts = _split(path, 3)
    for opened in (parts[0], parts[2], tmp_path):
        checkpoint = open_checkpoint(opened)
        assert checkpoint.path == parts[0]
        assert [file.path for file in checkpoint.files()] == parts
        assert all(
            torch.equal(_floats(checkpoint.load(name)), _floats(source.load(name)))
            for name in source.names()
        )
    content = parts[1].read_bytes()
    parts[1].unlink()
    with raises(CheckpointError, path=parts[1], found="2 of 3 parts"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with raises(CheckpointError, "2 of 3", path=parts[1]):
        open_checkpoint(parts[0])
    parts[1].write_bytes(content)
    parts[2].rename(tmp_path / "last.gguf")
    last = tmp_path / "last.gguf"
    with raises(CheckpointError, path=last, expected="last-00003-of-00003.gguf"):
        open_checkpoint(tmp_path / "last.gguf")


def test_a_folder_of_one_model_is_that_model(tmp_path: Path) -> None:
    source, path = _made(tmp_path, "llama")
    folder = tmp_path / "only"
    folder.mkdir()
    path.rename(folder / "a.gguf")
    (folder / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert open_checkpoint(folder).path == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"GGUF")
    with raises(CheckpointError, path=folder, found="a.gguf, b.gguf"):
        open_checkpoint(folder)
    (folder / "a.gguf").rename(folder / "a.bin")
    assert open_checkpoint(folder / "a.bin").format == "gguf"  # by how it begins
    shutil.copytree(source.path, tmp_path / "hf")
    (tmp_path / "hf" / "a.gguf").write_bytes(b"GGUF")
    assert open_checkpoint(tmp_path / "hf").format == "hf"


def test_what_a_file_should_not_be_is_named(tmp_path: Path) -> None:
    source, path = _made(tmp_path, "llama")
    tensors, metadata = _source(json.dumps(["llama", {}]))[1], build_metadata(source.config) | _ENDS

    def written(change: Mapping[str, Any], drop: str = "", **options: Any) -> Path:
        kept = {name: values for name, values in {**tensors, **change}.items() if name != drop}
        return gguf_files.write(path, metadata, kept, **options)

    with raises(CheckpointError, "'blk.1.attn_k.weight'", found="29 of 30 tensors"):
        _opened(written({}, "blk.1.attn_k.weight"))
    with raises(CheckpointError, "'blk.9.attn_k.weight'"):
        _opened(written({"blk.9.attn_k.weight": tensors["blk.1.attn_k.weight"]}))
    with raises(CheckpointError, "'blk.1.attn_k.weight'", found=[8, 64], expected=[16, 64]):
        _opened(written({"blk.1.attn_k.weight": tensors["blk.1.attn_k.weight"][:8]}))
    with raises(CheckpointError, "'rope_freqs.weight'", found=[1.0, 1.0, 1.0]):
        _opened(written({"rope_freqs.weight": np.ones(3, np.float32)}))
    with raises(UnsupportedError, "'output_norm.weight'", found="Q8_0"):
        _opened(written({}, blocks={"output_norm.weight": (np.zeros(68, np.uint8), Ggml.Q8_0)}))
    metadata["general.quantization_version"] = 1
    with raises(UnsupportedError, found="general.quantization_version 1", expected=2):
        _opened(written({}, types={"": Ggml.Q4_0}))
    with raises(RequestError, path=tmp_path / "model.gguf"):
        open_checkpoint(written({}), tensors_only=True)


@pytest.mark.parametrize("stated", [7, None])
def test_a_config_says_whether_there_is_a_padding_token(stated: int | None, tmp_path: Path) -> None:
    source, tensors = _source(json.dumps(["phi3", {"vocab_size": _ROWS}]))
    ids = {} if stated is None else {"tokenizer.ggml.padding_token_id": stated}
    path = gguf_files.write(
        tmp_path / "a.gguf", build_metadata(source.config) | _ENDS | _TOKENIZER | ids, tensors
    )
    quantkit.convert(path, tmp_path / "model", to="hf", source_check=False)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["pad_token_id"] == stated
    if stated is None:
        assert oracle.load(tmp_path / "model").config.pad_token_id is None


@pytest.mark.parametrize("weight", [0.0, 1e-7])
def test_norms_that_adding_one_rounds_are_counted(weight: float, tmp_path: Path) -> None:
    model = oracle.make(
        "gemma", vocab_size=_ROWS, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(2**-9)
        model.model.norm.weight.fill_(weight)
    (folder := tmp_path / "model").mkdir()
    source = HF.open(oracle.save(model, folder), "safetensors")
    tensors = gguf_files.tensors_of(model)
    path = gguf_files.write(tmp_path / "a.gguf", build_metadata(source.config) | _ENDS, tensors)
    found = require_exact(source, _opened(path))
    assert found.norms == (1 if weight else 0)
    assert ("1 norms rounded" in found.line()) == bool(weight)
    rounded = {
        difference.name
        for difference in quantkit.verify(folder, path).differing
        if difference.within
    }
    assert rounded == ({"model.norm.weight"} if weight else set())
    assert not any(
        one.rule.name == "changed" for one in quantkit.diagnose(path, against=folder).findings
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cast", ["fp32", "bf16", "fp16"])
def test_norms_of_all_sizes_survive_casts_there_and_back(
    dtype: Any, cast: Any, tmp_path: Path
) -> None:
    """`verify` knows what a cast and adding one have rounded."""
    model = oracle.make(
        "gemma", vocab_size=400, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(
                    torch.randn_like(parameter) * torch.logspace(-9, 1, parameter.numel())
                )
    oracle.save(model, tmp_path / "made")
    shutil.copy(train(tmp_path / "text") / "tokenizer.model", tmp_path / "made")
    source = quantkit.convert(
        tmp_path / "made", tmp_path / "source", dtype=dtype, source_check=False
    ).path
    file = quantkit.convert(
        source, tmp_path / "a.gguf", to="gguf", dtype=cast, source_check=False
    ).path
    back = quantkit.convert(file, tmp_path / "back", source_check=False).path
    for result in (file, back):
        differing = quantkit.verify(source, result).differing
        assert any("norm" in difference.name for difference in differing)
        assert all(difference.within for difference in differing)
        assert not any(
            one.rule.name == "changed" for one in quantkit.diagnose(result, against=source).findings
        )


def test_a_norm_that_differs_by_more_than_adding_one_rounds_is_an_error(tmp_path: Path) -> None:
    model = oracle.make(
        "gemma", vocab_size=_ROWS, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    (folder := tmp_path / "model").mkdir()
    source = HF.open(oracle.save(model, folder), "safetensors")
    tensors = gguf_files.tensors_of(model)
    tensors["output_norm.weight"][3] += 2**-20
    path = gguf_files.write(tmp_path / "a.gguf", build_metadata(source.config) | _ENDS, tensors)
    with raises(QuantkitError, "'model.norm.weight'", path=path):
        require_exact(source, _opened(path))
    report = quantkit.verify(folder, path)
    differing = [difference.name for difference in report.differing if not difference.within]
    assert differing == ["model.norm.weight"]
    assert report.verdict is Verdict.DIFFERENT


def test_windows_that_llama_cpp_does_not_know_are_reported(tmp_path: Path) -> None:
    source, tensors = _source(json.dumps(["mistral", {"vocab_size": _ROWS, "sliding_window": 7}]))
    metadata = build_metadata(source.config) | _ENDS | _TOKENIZER
    assert _opened(gguf_files.write(tmp_path / "a.gguf", metadata, tensors)).notes == []
    del metadata["quantkit.model_type"]
    (note,) = _opened(gguf_files.write(tmp_path / "b.gguf", metadata, tensors)).notes
    assert " 7 " in note


def test_what_is_read_as_floats_is_reported(tmp_path: Path) -> None:
    """The container reads Q4_1 as floats, and the kernels run it as it is stored."""
    types = {"": Ggml.Q4_1, "blk.0.ffn_up.weight": Ggml.Q8_0}
    source, tensors = _source(json.dumps(["llama", {"vocab_size": _ROWS}]))
    path = gguf_files.write(
        tmp_path / "a.gguf", build_metadata(source.config) | _ENDS | _TOKENIZER, tensors, types
    )
    found = open_checkpoint(path)
    assert schemes(found).keys() == {"model.layers.0.mlp.up_proj"}
    assert set(list_uncarried_weights(found).values()) == {"Q4_1"}
    assert found.layout == "gguf (Q4_1)"
    assert quantkit.inspect(path).tensors == {"q4_1": 22, "float32": 7, "int8-g32": 1}


def test_a_file_of_floats_with_a_quantized_embedding_becomes_floats_where_that_is_requested(
    tmp_path: Path,
) -> None:
    source, tensors = _source(json.dumps(["llama", {"vocab_size": _ROWS, "num_hidden_layers": 1}]))
    metadata, types = (
        build_metadata(source.config) | _ENDS | _TOKENIZER,
        {"token_embd.weight": Ggml.Q8_0},
    )
    path = gguf_files.write(tmp_path / "model.gguf", metadata, tensors, types)
    means = _opened(path).load(f"{EMBEDDING}.weight")
    assert isinstance(means, QuantTensor)
    quantkit.convert(path, tmp_path / "mlx", to="mlx", source_check=False)
    for quantized in (path, tmp_path / "mlx"):
        with raises(UnsupportedError, path=quantized, options=["dequantize"]):
            quantkit.convert(quantized, tmp_path / "refused", to="hf", source_check=False)
        dequantized = tmp_path / f"from-{quantized.stem}"
        quantkit.convert(quantized, dequantized, to="hf", dequantize=True, source_check=False)
        floats = open_checkpoint(dequantized).load(f"{EMBEDDING}.weight")
        assert isinstance(floats, Tensor)
        assert torch.equal(floats, means.dequantize())
