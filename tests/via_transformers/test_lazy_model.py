"""Models of transformers whose parts get weights when they are needed: those that
`from_pretrained` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import transformers
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.via_transformers.lazy_model import LazyModel

Tiny = Callable[[str], Path]
KINDS = {
    "llama": "dense",
    "mixtral": "merged experts",
    "deepseek_v3": "buffers",
    "hrm_text": "split tensors",
    "gpt_neox": "renamed tensors",
    "inkling2_text": "reordered rows",
    "olmo_hybrid": "merged convolutions",
}


def _lazy(folder: Path) -> LazyModel:
    return LazyModel(open_checkpoint(folder, tensors_only=True))


def _require_loaded(folder: Path) -> Any:
    """All parts together are what transformers loads, with the buffers that are on no disk."""
    lazy, expected = _lazy(folder), oracle.load(folder)
    assert all(parameter.is_meta for parameter in lazy.model.parameters())
    assert not any(buffer.is_meta for buffer in lazy.model.buffers())
    for part in lazy.parts:
        lazy.load(part)
    found, wanted = (
        {**one.state_dict(), **dict(one.named_buffers())} for one in (lazy.model, expected)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    return lazy.model


@pytest.mark.parametrize("kind", KINDS)
def test_all_parts_together_are_what_transformers_loads(kind: str, tiny_model: Tiny) -> None:
    _require_loaded(tiny_model(kind))


def test_tied_tensors_are_one_whichever_part_is_loaded(tmp_path: Path) -> None:
    folder = oracle.save(oracle.make("llama", tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = _require_loaded(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    lazy = _lazy(folder)
    lazy.load("lm_head")
    assert torch.equal(lazy.model.lm_head.weight, model.lm_head.weight)
    lazy.load("model.embed_tokens")
    lazy.unload("model.embed_tokens")
    assert torch.equal(lazy.model.model.embed_tokens.weight, model.lm_head.weight)
    lazy.unload("lm_head")
    assert all(parameter.is_meta for parameter in lazy.model.parameters())


def test_buffers_on_disk_come_with_their_part_and_half_floats_as_floats(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    model, bias = (
        oracle.load(tiny_model("deepseek_v3")),
        "model.layers.1.mlp.gate.e_score_correction_bias",
    )
    model.get_buffer(bias).normal_()
    folder = oracle.save(model.to(torch.bfloat16), tmp_path / "half")
    assert _require_loaded(folder).get_buffer(bias).any()


def test_a_part_that_is_unloaded_has_no_weights_and_others_keep_theirs(tiny_model: Tiny) -> None:
    lazy = _lazy(tiny_model("mixtral"))
    first, second = (part for part in lazy.parts if lazy.is_listed(part))
    for part in (first, second):
        lazy.load(part)
    lazy.unload(first)
    there = {name for name, parameter in lazy.model.named_parameters() if not parameter.is_meta}
    assert there == {
        name for name, _ in lazy.model.named_parameters() if name.startswith(f"{second}.")
    }


_EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
_MERGED = "'model.layers.1.mlp.experts.gate_up_proj'"
_ROUTER = "model.layers.1.block_sparse_moe.gate.weight"
_VERSION = transformers.__version__
DAMAGES: dict[str, tuple[dict[str, Any], type[QuantkitError], list[str], dict[str, str]]] = {
    "missing": ({"model.norm.weight": None}, CheckpointError, ["'model.norm.weight'"], {}),
    "missing expert": ({_EXPERT: None}, CheckpointError, [_MERGED], {}),
    "other shape": (
        {"model.norm.weight": torch.ones(63)},
        CheckpointError,
        ["'model.norm.weight'"],
        {"found": "shape [63]", "expected": "shape [64]"},
    ),
    "renamed tensor of another shape": (
        {_ROUTER: torch.ones(4, 63)},
        CheckpointError,
        [_ROUTER],
        {"found": "shape [4, 63]", "expected": "shape [4, 64]"},
    ),
    "expert of another shape": (
        {_EXPERT: torch.ones(128, 63)},
        CheckpointError,
        [_EXPERT],
        {"found": "shape [128, 63]", "expected": "shape [128, 64]"},
    ),
    "other experts": (
        {_EXPERT.replace("2", n): torch.ones(128, 63) for n in "0123"},
        CheckpointError,
        [_MERGED],
        {},
    ),
    "unknown": ({"model_type": "no_one"}, UnsupportedError, ["'no_one'", _VERSION], {}),
    "other values": ({"hidden_act": "no_such"}, UnsupportedError, ["KeyError", "no_such"], {}),
}
"""Changes of tensors or of the config, the type of the error, the names and the parts in it."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_such_model_is_refused_before_weights_are_read(
    damage: str, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, error_type, names, parts = DAMAGES[damage]
    folder = oracle.copy(tiny_model("mixtral"), tmp_path / "copy")
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    if tensors.keys() & changes.keys():
        kept = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        oracle.edit_json(folder / "config.json", **changes)
    source, read = open_checkpoint(folder, tensors_only=True), list[str]()
    monkeypatch.setattr(source, "load", read.append)
    with raises(error_type, *names, **parts):
        LazyModel(source)
    assert not read
