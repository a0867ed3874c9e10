"""gpt-fast's files, held against shards written here from its own conventions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from error_parts import raises
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 8
LINEARS = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
UP = "layers.1.feed_forward.w3"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in bfloat16, as Hugging Face keeps it."""
    made = oracle.make("llama", num_hidden_layers=2, num_key_value_heads=KV_HEADS).bfloat16()
    return oracle.save(made, tmp_path_factory.mktemp("model"))


def _pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order 0, h/2, 1, h/2 + 1, ..., as gpt-fast's converter permutes
    them.
    """
    return rows.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(rows.shape)


def _floats(model: Path) -> Tensors:
    state = load_file(model / "model.safetensors")
    tensors = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(2):
        q, k, v = (state[f"model.layers.{layer}.self_attn.{one}_proj.weight"] for one in "qkv")
        tensors[f"layers.{layer}.attention.wqkv.weight"] = torch.cat(
            [_pairs(q, HEADS), _pairs(k, KV_HEADS), v]
        )
        for theirs, name in LINEARS.items():
            tensors[f"layers.{layer}.{theirs}.weight"] = state[
                f"model.layers.{layer}.{name}.weight"
            ]
    return tensors


def _int8(tensors: Tensors) -> Tensors:
    """Linears as random codes, -128 among them, and the scales beside them."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, weight in tensors.items():
        found[name] = weight
        if "norm" not in name and "tok" not in name:
            codes = torch.randint(-128, 128, weight.shape, generator=generator, dtype=torch.int8)
            codes[:, 0] = -128
            scales = torch.rand(len(weight), generator=generator) / 100
            found |= {name: codes, name.replace("weight", "scales"): scales.bfloat16()}
    return found


def _folder(model: Path, folder: Path, tensors: Tensors, name: str = "model_int8.pth") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(model / "config.json", folder / "config.json")
    torch.save(tensors, folder / name)
    return folder


def test_floats_are_those_of_the_download(model: Path, tmp_path: Path) -> None:
    source = open_checkpoint(_folder(model, tmp_path / "src", _floats(model), "model.pth"))
    before = open_checkpoint(model)
    assert source.names() == before.names()
    for name in before.names():
        assert torch.equal(source.load(name), before.load(name))  # type: ignore[arg-type]
    part, query = TensorSlice(0, ((3, 18), (40, 41))), "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(source.load(query, part), before.load(query, part))  # type: ignore[arg-type]
    assert quantkit.verify(source.path, model).is_same


def test_int8_codes_are_those_of_the_file(model: Path, tmp_path: Path) -> None:
    tensors = _int8(_floats(model))
    source = open_checkpoint(_folder(model, tmp_path / "src", tensors))
    codes, scales = (tensors[f"layers.1.attention.wqkv.{end}"] for end in ("weight", "scales"))
    half = HEAD_DIM // 2
    order = [
        head * HEAD_DIM + 2 * (row % half) + row // half
        for head in range(KV_HEADS)
        for row in range(HEAD_DIM)
    ]
    first = HEADS * HEAD_DIM
    rows = [first + row for row in order]
    key = source.load("model.layers.1.self_attn.k_proj.weight")
    assert isinstance(key, QuantTensor)
    assert torch.equal(key.codes.int() - 128, codes[rows].int())
    assert torch.equal(key.scale, scales[rows].unsqueeze(1))
    assert torch.equal(key.dequantize(), codes[rows].float() * scales[rows].float().unsqueeze(1))
    value = source.load("model.layers.1.self_attn.v_proj.weight", TensorSlice(1, ((8, 24),)))
    assert isinstance(value, QuantTensor)
    last = codes[first + KV_HEADS * HEAD_DIM :, 8:24]
    assert torch.equal(value.codes.int() - 128, last.int())
    part = TensorSlice(0, ((3, 9),))
    assert torch.equal(
        source.load("model.layers.1.self_attn.k_proj.weight", part).codes, key.codes[3:9]
    )  # type: ignore[union-attr]
    head = source.info("lm_head.weight")
    assert (str(head.scheme), head.dtype, source.info("model.embed_tokens.weight").scheme) == (
        "int8",
        "bfloat16",
        None,
    )
    assert quantkit.inspect(source.path).readers == ["quantkit", "gpt-fast"]


def test_a_head_in_int8_is_no_longer_the_embedding(model: Path, tmp_path: Path) -> None:
    tensors = _floats(model)
    tensors["output.weight"] = tensors["tok_embeddings.weight"]
    for name, tied in (("model.pth", True), ("model_int8.pth", False)):
        folder = _folder(model, tmp_path / name, _int8(tensors) if not tied else tensors, name)
        oracle.edit_json(folder / "config.json", tie_word_embeddings=True)
        source = open_checkpoint(folder)
        assert source.config.tied_embeddings == tied
        assert (
            any(
                "the head is int8 and no longer equals the embedding" in note
                for note in source.notes
            )
            != tied
        )


def test_the_download_goes_before_what_was_made_of_it(model: Path, tmp_path: Path) -> None:
    folder = _folder(model, tmp_path / "src", _floats(model), "model.pth")
    _folder(model, folder, _int8(_floats(model)))
    (note,) = open_checkpoint(folder).notes
    assert note.startswith(f"{folder}: model_int8.pth ")
    shutil.copy(model / "model.safetensors", folder)
    both = open_checkpoint(folder)
    assert both.format == "hf"
    assert any("model.pth" in note for note in both.notes)
    assert open_checkpoint(folder, "gpt-fast").format == "gpt-fast"
    assert open_checkpoint(folder, "gpt-fast-int8").info("lm_head.weight").scheme is not None


BROKEN: dict[str, Callable[[Tensors], object]] = {
    "no scales": lambda t: t.pop(f"{UP}.scales"),
    "few scales": lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][1:].clone()}),
    "scales of integers": lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"].int()}),
    "scales of floats": lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].float()}),
    "unsigned codes": lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].view(torch.uint8)}),
    "another shape": lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][:, 1:].clone()}),
    "no weight": lambda t: t.pop(f"{UP}.weight"),
    "another tensor": lambda t: t.update({"layers.1.attention.wq.weight": torch.ones(2, 2)}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_go_together_is_refused(what: str, model: Path, tmp_path: Path) -> None:
    tensors = _int8(_floats(model))
    BROKEN[what](tensors)
    with raises((CheckpointError, UnsupportedError), "layers.1."):
        open_checkpoint(_folder(model, tmp_path / "src", tensors))


def test_what_is_not_read_or_written_is_named(model: Path, tmp_path: Path) -> None:
    int4 = _folder(model, tmp_path / "int4", {"a": torch.ones(1)}, "model_int4.g32.pth")
    with raises(UnsupportedError, path=int4, found="model_int4.g32.pth"):
        open_checkpoint(int4)
    floats = _folder(model, tmp_path / "src", _floats(model), "model.pth")
    with raises(RequestError, "gpt-fast"):
        quantkit.convert(floats, tmp_path / "out", to="gpt-fast")
    with raises(RequestError, "gpt-fast", path=floats):
        open_checkpoint(floats, tensors_only=True)
    oracle.edit_json(floats / "config.json", attention_bias=True)
    with raises(UnsupportedError, path=floats, found="model.layers.0.self_attn.q_proj.bias"):
        open_checkpoint(floats)
    (floats / "config.json").unlink()
    with raises(CheckpointError, path=floats / "config.json"):
        open_checkpoint(floats)
