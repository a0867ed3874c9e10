"""Layers for multi-token prediction (MTP): carried bit for bit under their names, and in floats
for all readers.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp
import oracle
import pytest
import torch
from compressed_tensors.utils import is_match
from diagnoses import require_sound
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.errors import CheckpointError

assert oracle  # which lets transformers be quiet
Quantized = Callable[[str, str], quantkit.QuantizeResult]
ROUNDED: dict[str, Any] = {"method": "rtn", "source_check": False, "accept_quality_loss": True}
WAYS: dict[str, dict[str, Any]] = {
    "run": {"via": "transformers"},
    "tensors": {"tensors_only": True},
}
FUSED = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj", "fused_qkv_a_proj_with_mqa": "q_a_proj"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda kind: mtp.make(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def quantized(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    def made(kind: str, way: str) -> quantkit.QuantizeResult:
        target = tmp_path_factory.mktemp("made") / f"{kind}-{way}"
        return quantkit.quantize(source(kind), target, "int4-g32", **ROUNDED, **WAYS[way])

    return functools.cache(made)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _ignored(folder: Path) -> list[str]:
    found: list[str] = json.loads((folder / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    return found


def _is_ignored(module: str, ignored: list[str]) -> bool:
    """Whether compressed-tensors leaves a linear of this name in floats."""
    return is_match(module, torch.nn.Linear(1, 1), ignored)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", mtp.KINDS)
def test_its_tensors_are_carried_and_a_note_lists_them(
    kind: str, way: str, source: Callable[[str], Path], quantized: Quantized
) -> None:
    made = quantized(kind, way)
    before, after = _tensors(source(kind)), _tensors(made.path)
    of_layer = {name for name in before if mtp.is_of_layer(name)}
    assert len(of_layer) > 10
    assert {name for name in after if mtp.is_of_layer(name)} == of_layer
    assert all(after[name].dtype == before[name].dtype for name in of_layer)
    assert all(torch.equal(after[name], before[name]) for name in of_layer)
    (note,) = (note for note in made.notes if "not quantized" in note)
    assert re.search(
        rf"further layers for prediction: \S+ parameters in {len(of_layer)} tensors \(", note
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", mtp.KINDS)
def test_compressed_tensors_ignores_all_its_linears(
    kind: str, way: str, quantized: Quantized
) -> None:
    folder = quantized(kind, way).path
    tensors, ignored = _tensors(folder), _ignored(folder)
    own = [name for name in tensors if mtp.is_of_layer(name) and tensors[name].dim() == 2]
    linears = {name.removesuffix(".weight") for name in own}
    names = {name for name in ignored if not name.startswith("re:")}
    assert linears <= names
    for (
        fused,
        part,
    ) in FUSED.items():  # as vLLM and SGLang build them, which compare a fused name too
        linears |= {
            f"{one.rpartition('.')[0]}.{fused}" for one in linears if one.endswith(f".{part}")
        }
    assert all(_is_ignored(module, ignored) for module in linears)
    packed = {
        name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")
    }
    assert packed
    assert not any(_is_ignored(module, ignored) for module in packed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mtp.KINDS)
def test_doctor_finds_nothing(kind: str, quantized: Quantized) -> None:
    require_sound(quantized(kind, "run").path)


def test_experts_in_one_tensor_are_listed_for_each_expert(quantized: Quantized) -> None:
    folder = quantized("qwen3_5_moe", "run").path
    shape = _tensors(folder)["mtp.layers.0.mlp.experts.gate_up_proj"].shape
    linears = [(index, name) for index in range(shape[0]) for name in ("gate", "up", "down")]
    assert {f"mtp.layers.0.mlp.experts.{index}.{name}_proj" for index, name in linears} <= set(
        _ignored(folder)
    )
    assert _is_ignored("mtp.layers.0.mlp.experts", _ignored(folder))  # as SGLang names them


def test_patterns_are_those_of_runtimes(quantized: Quantized) -> None:
    patterns = {
        kind: [one for one in _ignored(quantized(kind, "run").path) if "re:" in one]
        for kind in mtp.KINDS
    }
    assert patterns["qwen3_next"] == ["re:^mtp.*"]  # which compressed-tensors writes
    for kind in ("deepseek_v3", "glm_ocr"):
        for module in ("model.layers.2.mlp.gate_up_proj", "model.decoder.self_attn.qkv_proj"):
            assert _is_ignored(module, patterns[kind])
        for module in (
            "model.layers.1.mlp.gate_up_proj",
            "model.layers.20.mlp.down_proj",
            "model.visual.layers.2.fc",
        ):
            assert not _is_ignored(module, patterns[kind])


@pytest.mark.slow
def test_experts_of_the_model_share_a_target_whatever_its_scheme(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers looks for the pattern of all experts."""
    int8, int4 = quantkit.QuantScheme.parse("int8"), quantkit.QuantScheme.parse("int4-g32")
    recipe = quantkit.Recipe(int4, (quantkit.Override("*.self_attn.*", int8),))
    made = quantkit.quantize(
        source("qwen3_next"), tmp_path / "made", recipe, **ROUNDED, **WAYS["run"]
    )
    settings = json.loads((made.path / "config.json").read_text())["quantization_config"]
    targets = [
        target for group in settings["config_groups"].values() for target in group["targets"]
    ]
    assert [target for target in targets if "experts" in target and "shared" not in target] == [
        r"re:.*\.experts\.\d+\..*"
    ]
    assert not any("does not load" in note for note in made.notes)
    assert not quantkit.diagnose(made.path).findings


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3", "glm4_moe"])
def test_transformers_loads_the_result_without_it(
    kind: str, quantized: Quantized, tmp_path: Path
) -> None:
    made = quantized(kind, "run")
    assert not any("does not load" in note for note in made.notes)
    floats = quantkit.convert(made.path, tmp_path / "floats", dequantize=True).path
    found = []
    for folder in (made.path, floats):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert all(map(mtp.is_of_layer, info["unexpected_keys"]))
        with torch.no_grad():
            found.append(model(torch.arange(3, 43).unsqueeze(0)).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", mtp.KINDS)
def test_it_is_carried_when_the_result_is_dequantized(
    kind: str, source: Callable[[str], Path], quantized: Quantized, tmp_path: Path
) -> None:
    floats = quantkit.convert(
        quantized(kind, "run").path, tmp_path / "floats", dequantize=True, tensors_only=True
    )
    before, after = _tensors(source(kind)), _tensors(floats.path)
    assert all(torch.equal(after[name], before[name]) for name in before if mtp.is_of_layer(name))
    assert quantkit.verify(quantized(kind, "run").path, source(kind)).ok


# where each is on disk, and what vLLM calls it: Qwen3-Next, GLM-4.5, MiMo, ERNIE 4.5, DeepSeek-V4
NAMED = {
    "mtp.layers.0": "mtp.layers.0",
    "model.layers.1": "model.layers.1",
    "model.mtp_layers.0": "model.layers.1",
    "model.mtp_block.0": "model.layers.1",
    "mtp.0": "model.layers.1",
}


@pytest.mark.parametrize("layer", NAMED)
def test_a_model_that_is_known_by_names_has_it_in_floats(layer: str, tmp_path: Path) -> None:
    folder, linears = tmp_path / "source", ("self_attn.q_proj", "mlp.down_proj")
    folder.mkdir()
    tensors = {
        f"{one}.{name}.weight": torch.randn(64, 64)
        for name in linears
        for one in ("model.layers.0", layer)
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "nonesuch", "num_hidden_layers": 1})
    )
    made = quantkit.quantize(folder, tmp_path / "made", "int4-g32", method="rtn", tensors_only=True)
    assert {name for name, one in made.manifest["modules"].items() if one["scheme"]} == {
        f"model.layers.0.{name}" for name in linears
    }
    ignored = _ignored(made.path)
    for name in (*linears, "self_attn.qkv_proj", "mlp.experts"):
        assert _is_ignored(f"{layer}.{name}", ignored)
        assert _is_ignored(f"{NAMED[layer]}.{name}", ignored)
        assert not _is_ignored(f"model.layers.0.{name}", ignored)
    assert {one.rule.name for one in quantkit.diagnose(made.path).findings} == {"no-tokenizer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.2.eh_proj.weight"])
def test_a_decoder_without_it_refuses_it_with_what_carries_it(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    mtp.add(tiny_model("qwen3_moe"), folder)
    save_file(
        {**_tensors(tiny_model("qwen3_moe")), name: torch.zeros(64, 128)},
        folder / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=rf"unexpected tensor '{name}'.*multi-token prediction layers"
    ):
        quantkit.quantize(folder, tmp_path / "own", "int4-g32", **ROUNDED)
    made = quantkit.quantize(folder, tmp_path / "made", "int4-g32", **ROUNDED, **WAYS["run"])
    assert name in _tensors(made.path)
