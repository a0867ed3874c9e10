"""GLM-4, Ministral 3, gpt-oss and others as GGUF and back: the same model, the same greedy tokens;
the experts of gpt-oss in MXFP4 byte for byte.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import oracle
import pytest
import torch
from error_parts import raises
from gguf_config_cases import (
    BAMBA,
    DELTA,
    EXPERTS,
    GEMMA4_EXPERTS,
    GEMMA4_SMALL,
    GPT_OSS,
    GRANITE_HYBRID_MOE,
    LFM2_MOE,
    LLAMA4,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    YARN,
)
from quantized_folders import with_mxfp4_experts
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import NotRepresentableError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.model.linear import QuantLinear
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import MXFP4, Q4_K, QuantScheme
from quantkit.text.tokenizer import load_tokenizer

# Rows that 32 divides, but not 256, as in the published gpt-oss.
_OSS = {**GPT_OSS, "head_dim": 16, "hidden_size": 96, "intermediate_size": 96}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 16, "tie_word_embeddings": True}),
    "ministral3": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    ),
    "gpt-oss": ("gpt_oss", _OSS),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "pad_token_id": 0, "sliding_window": 11}),
    "exaone4": (
        "exaone4",
        {
            "head_dim": 8,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True},
    ),
    "lfm2-moe": ("lfm2_moe", LFM2_MOE),
    "qwen3-5": ("qwen3_5_text", DELTA),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-next": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "granite-hybrid-moe": ("granitemoehybrid", GRANITE_HYBRID_MOE),
    "bamba": ("bamba", {**BAMBA, "tie_word_embeddings": True}),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "nemotron-h-moe": ("nemotron_h", {**NEMOTRON_H_MOE, "moe_latent_size": None}),
    "gemma4-small": ("gemma4_text", GEMMA4_SMALL),
    "gemma4-experts": ("gemma4_text", {**GEMMA4_EXPERTS, "head_dim": 16, "global_head_dim": 32}),
    "llama4": (
        "llama4_text",
        {**LLAMA4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2},
    ),
    "hunyuan-dense": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 500.0,
            },
        },
    ),
}
INT8 = QuantScheme.parse("int8-g32")
_IN_BFLOAT16 = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
)
PROMPT = "Once upon a time"
NEW = 24
UNCHECKED: Any = {"accept_quality_loss": True, "source_check": False}  # of random weights


def _make(folder: Path, kind: str, **changes: Any) -> Path:
    """A random model of transformers with the demo's tokenizer."""
    vocabulary = load_tokenizer(DEMO_MODEL).vocab_size
    if changes.get("hidden_size_per_layer_input"):
        changes["vocab_size_per_layer_input"] = vocabulary
    model = oracle.make(kind, vocab_size=vocabulary, **changes)
    # As published: GGUF's sums of norms and 1, and its decay rates, are then exact.
    if kind in _IN_BFLOAT16:
        model = model.bfloat16()
    oracle.save(model, folder)
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", folder / "tokenizer.model")
    return folder


def _generate(path: Path) -> list[int]:
    """The greedy continuation of the prompt, which meets no end token."""
    model, tokenizer = quantkit.load(path, dtype="fp32", backend="reference", device="cpu")
    found = list(quantkit.generate(model, tokenizer.encode(PROMPT), max_new_tokens=NEW))
    assert len(found) == NEW
    return found


@pytest.mark.parametrize("case", FAMILIES)
def test_a_file_is_the_model_of_its_folder(case: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[case]
    folder = _make(tmp_path / "folder", kind, **changes)
    file = quantkit.convert(folder, tmp_path / "a.gguf", source_check=False).path
    assert verify(folder, file).verdict is Verdict.SAME
    assert not quantkit.diagnose(file, runtime="llama.cpp").findings
    back = quantkit.convert(file, tmp_path / "back", source_check=False).path
    assert verify(folder, back).verdict is Verdict.SAME
    prompt = load_tokenizer(folder).encode(PROMPT)
    expected = oracle.greedy(oracle.load(folder), torch.tensor([prompt]), NEW)
    assert _generate(file) == expected
    assert oracle.greedy(oracle.load(back), torch.tensor([prompt]), NEW) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_a_mix_is_quantized_and_runs_as_its_floats(case: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[case]
    folder = _make(tmp_path / "folder", kind, **changes)
    file = quantkit.quantize(folder, tmp_path / "a.gguf", "q4_k_m", method="rtn", **UNCHECKED).path
    # Random delta rules follow rounding too far to pass the gate.
    if kind not in _IN_BFLOAT16:
        assert verify(file).is_same
    # In float32, as a rounded weight may lead to another token.
    back = quantkit.convert(
        file, tmp_path / "back", dequantize=True, dtype="fp32", source_check=False
    ).path
    assert verify(file, back).ok
    assert _generate(file) == _generate(back)


@pytest.mark.parametrize("case", ["qwen3-5", "qwen3-next"])
def test_codes_of_delta_rules_are_carried(case: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[case]
    folder = _make(tmp_path / "folder", kind, **changes)
    recipe = Recipe(INT8, (Override("*.linear_attn.*", INT8),))
    made = quantkit.quantize(folder, tmp_path / "int8", recipe, method="rtn", **UNCHECKED).path
    file = quantkit.convert(made, tmp_path / "a.gguf", source_check=False).path
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    for name in ("attn_qkv", "attn_gate", "ssm_out"):
        assert stored[f"blk.0.{name}.weight"] == "Q8_0"
    for name in ("ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "ssm_norm.weight"):
        assert stored[f"blk.0.{name}"] == "F32"
    back = quantkit.convert(file, tmp_path / "back", source_check=False).path
    assert verify(made, back).verdict is Verdict.SAME
    assert _generate(made) == _generate(file) == _generate(back)


def test_blocks_that_several_value_heads_would_share_are_refused(tmp_path: Path) -> None:
    kind, changes = FAMILIES["qwen3-5"]
    folder = _make(tmp_path / "folder", kind, **{**changes, "linear_num_value_heads": 8})
    recipe = Recipe(INT8, (Override("*.linear_attn.out_proj", Q4_K),))
    with raises(NotRepresentableError, "out_proj", "ssm_out"):
        quantkit.quantize(folder, tmp_path / "a.gguf", recipe, method="rtn", **UNCHECKED)


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are in MXFP4."""
    folder = _make(tmp_path_factory.mktemp("oss") / "folder", "gpt_oss", **_OSS)
    tensors = with_mxfp4_experts(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    oracle.edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return folder


def test_experts_in_mxfp4_become_blocks_of_gguf(oss: Path, tmp_path: Path) -> None:
    result = quantkit.convert(oss, tmp_path / "a.gguf", source_check=False)
    experts = 3 * 4 * 3  # of 3 layers, each with 3 linears
    assert (result.rounded, result.exact and result.exact.tensors) == (0, experts)
    assert not any("MXFP4" in note for note in result.notes)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(result.path).tensors}
    tensors = load_file(oss / "model.safetensors")
    for layer in range(3):
        whole = f"model.layers.{layer}.mlp.experts."
        means = {}
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (tensors[f"{whole}{name}_{part}"] for part in ("blocks", "scales"))
            means[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        gate_up = means["gate_up_proj"].transpose(1, 2)
        expected = {
            "ffn_gate_exps": gate_up[:, 0::2],
            "ffn_up_exps": gate_up[:, 1::2],
            "ffn_down_exps": means["down_proj"].transpose(1, 2),
        }
        for name, weight in expected.items():
            tensor = stored[f"blk.{layer}.{name}.weight"]
            assert tensor.tensor_type is gguf.GGMLQuantizationType.MXFP4
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(theirs, weight.numpy()), tensor.name
            assert stored[f"blk.{layer}.{name}.bias"].tensor_type is gguf.GGMLQuantizationType.F32
    assert not set(map(str, result.manifest["schemes"].values())) - {"mxfp4"}


def test_experts_in_mxfp4_come_back_as_what_they_mean(oss: Path, tmp_path: Path) -> None:
    file = quantkit.convert(oss, tmp_path / "a.gguf", source_check=False).path
    assert verify(oss, file).verdict is Verdict.SAME
    again = quantkit.convert(file, tmp_path / "b.gguf", source_check=False).path
    first, second = (
        {
            tensor.name: (tensor.tensor_type, tensor.data.tobytes())
            for tensor in gguf.GGUFReader(path).tensors
        }
        for path in (file, again)
    )
    assert first == second
    for name, options in {"floats": {}, "dequantized": {"dequantize": True}}.items():
        folder = quantkit.convert(file, tmp_path / name, source_check=False, **options).path
        assert verify(oss, folder).verdict is Verdict.SAME
        assert not schemes(open_checkpoint(folder))
    assert _generate(file) == _generate(oss) == _generate(tmp_path / "floats")


@pytest.mark.cpu_kernels
def test_experts_in_mxfp4_run_as_they_are_stored(oss: Path, tmp_path: Path) -> None:
    file = quantkit.convert(oss, tmp_path / "a.gguf", source_check=False).path
    tokens = torch.arange(40)
    floats, _ = quantkit.load(oss, dtype="fp32", backend="reference", device="cpu")
    with torch.inference_mode():
        expected = floats(tokens)
    for path in (oss, file):
        model, _ = quantkit.load(path, dtype="fp32", backend="cpu-exact", device="cpu")
        for block in model.model.layers:
            linears = [one for one in block.mlp.modules() if isinstance(one, QuantLinear)]
            assert len(linears) == 2 * 4  # of 4 experts, whose gate and up are one
            assert {linear.scheme for linear in linears} == {MXFP4}
        with torch.inference_mode():
            assert (model(tokens) - expected).abs().max() < 1e-3 * expected.abs().max()
        assert _generate(path) == _generate(oss)


def test_codes_of_an_expert_are_those_of_its_rows(oss: Path) -> None:
    coded, floats = with_codes(open_checkpoint(oss)), open_checkpoint(oss)
    assert set(schemes(coded).values()) == {MXFP4}
    for name in floats.names():
        value, expected = coded.load(name), floats.load(name)
        assert isinstance(expected, torch.Tensor)
        if ".experts." in name and name.endswith(".weight"):
            assert isinstance(value, QuantTensor)
            value = value.dequantize()
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, expected), name
