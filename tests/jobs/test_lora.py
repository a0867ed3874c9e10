"""`lora` of `convert` and `quantize`: adapters that PEFT makes, against PEFT's own merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lora
import oracle
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quantkit

UNCHECKED: Any = {"source_check": False}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank and alpha": {"r": 3, "lora_alpha": 7},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "v_proj": 6},
        "alpha_pattern": {r"layers\.[02]\.self_attn\.q_proj": 11, "down_proj": 3},
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "dora": {"use_dora": True, "target_modules": [*ATTENTION, "up_proj"]},
    "dora and rslora": {"use_dora": True, "use_rslora": True, "alpha_pattern": {"q_proj": 9}},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "dora of the embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "layers_to_transform": {"layers_to_transform": [1]},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]},
    "all-linear": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "expression": {"target_modules": r".*\.[01]\.self_attn\.(q|o)_proj"},
    "bin": {"safetensors": False},
}  # fmt: skip


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model: some of its linears have biases."""
    return oracle.save(oracle.make("qwen2"), tmp_path_factory.mktemp("base") / "base")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], ulps: float = 4) -> None:
    """Compare all tensors, in units of the last place of the largest value of a row."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        spacing = torch.finfo(value.dtype).eps * value.abs().amax(-1, keepdim=True).float()
        assert ((found[name].float() - value.float()).abs() <= ulps * spacing).all(), name


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_equals_that_of_peft(kind: str, base: Path, tmp_path: Path) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter", **ADAPTERS[kind])
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    expected = lora.merged(base, adapter)
    require_close(tensors(made.path), expected)
    before = tensors(base)
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
