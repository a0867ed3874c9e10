"""Experts that one tensor holds on disk: as a tensor for each of their linears, and back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny_image_text
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

import quantkit
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch
from quantkit.via_transformers.forward import final_hidden, final_logits, run_by_transformers
from quantkit.via_transformers.stacks import unstack

Tiny = Callable[[str], Path]
KINDS = {
    "zaya": "as transformers has them",
    "aria_text": "inputs first, other names",
    "granitemoe": "no module of experts",
    "inkling2_text": "gates and others in turn",
    "llama4_text": "inputs first, for all tokens",
    "dbrx": "a matrix of all experts, outputs first or inputs first",
    "jetmoe": "a module for each linear of all experts",
}
LINEARS = tuple(f".{linear}_proj.weight" for linear in ("gate", "up", "down"))
TOKENS = torch.arange(3, 43).unsqueeze(0)


def _unstacked(folder: Path) -> Checkpoint:
    source = open_checkpoint(folder, tensors_only=True)
    unstack(source)
    return source


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value for name, value in tensors.items() if value.dim() == 3 and "conv" not in name
    }


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"dbrx", "jetmoe"}))
def test_the_linears_of_experts_are_those_of_transformers(kind: str, tiny_model: Tiny) -> None:
    source, model = _unstacked(tiny_model(kind)), oracle.load(tiny_model(kind))
    parameters = dict(model.named_parameters())
    aliases = {tensor.module: tensor.alias for tensor in source.config.tensors or ()}
    linears = [name for name in source.names() if name.endswith(LINEARS) and ".experts." in name]
    assert len(linears) >= 12
    for name in linears:
        module = aliases[name.removesuffix(".weight")] or name.removesuffix(".weight")
        experts, number, linear = module.rsplit(".", 2)
        leaf = "down_proj" if linear == "down_proj" else "gate_up_proj"
        weight = parameters[f"{experts}.{leaf}"][int(number)]
        weight = weight.t() if kind in ("aria_text", "llama4_text") else weight
        part = weight if leaf == linear else weight.chunk(2)[linear == "up_proj"]
        assert torch.equal(source.load(name), part), name


def _rounded(source: Path, target: Path, **options: Any) -> quantkit.QuantizeResult:
    options |= {"method": "rtn", "source_check": False, "accept_quality_loss": True}
    return quantkit.quantize(source, target, "int4-g32", **options)


def _logits(checkpoint: Checkpoint) -> Tensor:
    (states,) = final_hidden(checkpoint, [Batch.from_start(TOKENS)])
    return final_logits(checkpoint, [states[0]])[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_experts_are_apart_and_floats_are_stacked(
    kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    folder = tiny_model(kind)
    made = _rounded(folder, tmp_path / "dst")
    packed, before = (
        load_file(made.path / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    assert not _stacked(packed)
    numbered = re.compile(r".*\.\d+\.(\w+\.)?weight_packed")
    assert sum(numbered.fullmatch(name) is not None for name in packed) >= 12
    assert before.keys() - packed.keys() >= _stacked(before).keys()
    assert quantkit.verify(made.path, folder).verdict.name == "WITHIN_BOUND"
    floats = quantkit.convert(
        made.path, tmp_path / "floats", dequantize=True, tensors_only=True
    ).path
    after = load_file(floats / "model.safetensors")
    assert {name: value.shape for name, value in after.items()} == {
        name: value.shape for name, value in before.items()
    }
    with torch.no_grad():
        expected = oracle.load(floats)(TOKENS).logits[0]
    found = _logits(run_by_transformers(open_checkpoint(made.path, tensors_only=True)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_transformers_loads_packed_experts_of_llama_4(tiny_model: Tiny, tmp_path: Path) -> None:
    made = _rounded(tiny_model("llama4_text"), tmp_path / "dst")
    assert not any("does not load" in note for note in made.notes)
    with torch.no_grad():
        found = oracle.load(made.path)(TOKENS).logits[0]
    run = run_by_transformers(open_checkpoint(made.path, tensors_only=True))
    torch.testing.assert_close(_logits(run), found, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pattern"), [("dbrx", "*.experts.*"), ("jetmoe", "*_linear.*")])
def test_floats_of_experts_are_copied(
    kind: str, pattern: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    folder = tiny_model(kind)
    made = _rounded(folder, tmp_path / "dst", keep=pattern)
    before, after = (load_file(one / "model.safetensors") for one in (folder, made.path))
    experts = [name for name in before if ".experts.mlp." in name or "_linear." in name]
    assert len(experts) >= 6
    assert all(torch.equal(after[name], before[name]) for name in experts)
    copied = quantkit.convert(folder, tmp_path / "copied", tensors_only=True).path
    after = load_file(copied / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.slow
def test_experts_that_keep_their_floats_stay_one_tensor(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = tiny_model("granitemoe")
    made = _rounded(folder, tmp_path / "dst", keep="*.experts.*")
    before, after = (load_file(one / "model.safetensors") for one in (folder, made.path))
    assert len(_stacked(before)) == 4
    assert all(torch.equal(after[name], value) for name, value in _stacked(before).items())
    assert not quantkit.verify(made.path).edited  # or it is an error
    settings = json.loads((made.path / "config.json").read_text())["quantization_config"]
    module = "model.layers.1.block_sparse_moe.experts.3"
    assert {f"{module}.gate_proj", f"{module}.up_proj", f"{module}.down_proj"} <= set(
        settings["ignore"]
    )


@pytest.mark.slow
def test_experts_of_llama_4_are_apart_in_a_quantized_folder(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    """transformers makes a module of each linear where there is a quantization."""
    # quantkit's own decoder runs it too, and keeps a tensor of all experts where it can.
    options = {"keep": "*.experts.*", "via": "transformers"}
    made = _rounded(tiny_model("llama4_text"), tmp_path / "dst", **options)
    assert not _stacked(load_file(made.path / "model.safetensors"))
    assert not any("does not load" in note for note in made.notes)
    floats = quantkit.convert(
        made.path, tmp_path / "floats", dequantize=True, tensors_only=True
    ).path
    with torch.no_grad():
        packed, expected = (oracle.load(one)(TOKENS).logits for one in (made.path, floats))
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("size", [64, 96])
def test_a_converter_that_looks_at_shapes_sees_that_of_all_experts(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        tiny_image_text.OVERRIDES, "qwen3_vl_moe", {"text_config": {"moe_intermediate_size": size}}
    )
    tiny_image_text.make("qwen3_vl_moe", tmp_path)
    source = _unstacked(tmp_path)
    parameters = dict(
        AutoModelForImageTextToText.from_pretrained(
            tmp_path, dtype=torch.float32
        ).named_parameters()
    )
    linears = [tensor for tensor in source.config.tensors or () if tensor.stack is not None]
    assert len(linears) == 2 * 4 * 3
    for tensor in linears:
        experts, number, linear = tensor.module.rsplit(".", 2)
        weight = parameters[
            f"{experts}.{'down_proj' if linear == 'down_proj' else 'gate_up_proj'}"
        ][int(number)]
        part = weight if linear == "down_proj" else weight.chunk(2)[linear == "up_proj"]
        assert torch.equal(source.load(tensor.name), part), tensor.name


def test_buffers_with_three_axes_are_no_experts(tiny_model: Tiny) -> None:
    source = _unstacked(tiny_model("minimax"))
    assert "model.layers.0.self_attn.slope_rate" in source.names()
    assert len(source.info("model.layers.0.self_attn.slope_rate").shape) == 3


def test_a_tensor_with_the_name_of_an_expert_does_not_stand_in_for_it(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model("zaya"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    other = "model.layers.0.mlp.experts.1.gate_proj.weight"  # which transformers ignores
    tensors[other] = torch.zeros(64, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = _unstacked(folder)
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(source.load(stacked), tensors[stacked])
    assert torch.equal(source.load(other), tensors[other])
