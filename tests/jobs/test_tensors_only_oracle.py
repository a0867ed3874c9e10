"""Architectures that quantkit does not run, rounded by their tensors: what transformers makes of
the result.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.architectures.topology import linear_columns
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import prepare
from quantkit.tensors.qtensor import QuantTensor

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": (
        "DeepseekV3",
        {
            **_TEXT,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 64,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "llava": (
        "Llava",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "image_token_index": 95,
            "vision_config": {
                **_VISION,
                "model_type": "clip_vision_model",
                "image_size": 32,
                "patch_size": 8,
            },
        },
    ),
    "bert": ("BertForMaskedLM", {**_TEXT, "num_hidden_layers": 1}),
    "mamba": (
        "Mamba",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
    "t5": (
        "T5",
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    "whisper": (
        "Whisper",
        {
            "vocab_size": 96,
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "max_source_positions": 20,
            "num_mel_bins": 16,
            "max_target_positions": 20,
        },
    ),
}
RECURRENT = {"mamba": (quantkit.Override("*.mixer.*", quantkit.QuantScheme.parse("int8")),)}
"""Which linears that carry a state are quantized, where all do."""
DEQUANTIZED = (
    "mamba",
    "t5",
)  # transformers gives weights at random to what is packed, and fails; it loads them so


def _made(kind: str, folder: Path) -> tuple[Any, Path]:
    """A random model of a class, saved."""
    name, settings = CLASSES[kind]
    class_name = next(
        name + end
        for end in ("ForCausalLM", "ForConditionalGeneration", "")
        if hasattr(transformers, name + end)
    )
    cls = getattr(transformers, class_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(cls.config_class(**settings)).eval()
    return model, oracle.save(model, folder)


def _loaded(model: Any, folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, info = type(model).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return found.eval()


@torch.inference_mode()
def _logits(model: Any) -> Tensor:
    ids = oracle.random_tokens(9)
    inputs = {"input_ids": ids}
    if hasattr(model, "get_encoder") and model.config.is_encoder_decoder:
        inputs = {"decoder_input_ids": ids, "input_ids": ids}
        if "Whisper" in type(model).__name__:
            frames = torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(1))
            inputs = {"decoder_input_ids": ids, "input_features": frames}
    found: Tensor = model(**inputs).logits
    return found


def _dequantized(folder: Path, to: Path) -> Path:
    """A quantized folder as floats."""
    checkpoint = open_checkpoint(folder)
    loaded = {name: checkpoint.load(name) for name in checkpoint.names()}
    to.mkdir()
    save_file(
        {n: v.dequantize() if isinstance(v, QuantTensor) else v for n, v in loaded.items()},
        to / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_loads_the_result_and_gives_our_logits(kind: str, tmp_path: Path) -> None:
    model, source = _made(kind, tmp_path / "src")
    recipe = quantkit.Recipe(quantkit.QuantScheme.parse("int4-g32"), RECURRENT.get(kind, ()))
    made = quantkit.quantize(source, tmp_path / "dst", recipe, method="rtn", tensors_only=True)
    assert made.manifest["linears_by"] == f"the modules of transformers' {type(model).__name__}"
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    loaded = _loaded(model, made.path, **(options if kind in DEQUANTIZED else {}))
    expected = _logits(_loaded(model, _dequantized(made.path, tmp_path / "floats")))
    assert (_logits(loaded) - expected).abs().max() < 1e-5
    assert (expected - _logits(model)).abs().max() > 1e-4  # it was rounded
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(made.path / "model.safetensors"),
    )
    quantized = {
        name.removesuffix(".weight_packed") for name in after if name.endswith(".weight_packed")
    }
    for name, tensor in before.items():
        if name.removesuffix(".weight") not in quantized:
            assert after[name].dtype == tensor.dtype
            assert torch.equal(
                after[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            ), name
    assert set(before) == {name for name in after if ".weight_" not in name} | {
        f"{one}.weight" for one in quantized
    }


QUANTIZED: Mapping[str, tuple[set[str], set[str]]] = {
    "deepseek": (
        {
            "self_attn.kv_b_proj",
            "mlp.experts.7.down_proj",
            "mlp.shared_experts.up_proj",
            "self_attn.q_a_proj",
        },
        {"mlp.gate", "lm_head", "embed_tokens"},
    ),
    "llava": (
        {"self_attn.q_proj", "mlp.down_proj"},
        {"linear_1", "patch_embedding", "lm_head", "fc1", "out_proj"},
    ),
    "bert": (
        {"attention.self.query", "intermediate.dense"},
        {"predictions.decoder", "word_embeddings"},
    ),
    "mamba": ({"mixer.in_proj", "mixer.out_proj"}, {"mixer.dt_proj", "mixer.conv1d"}),
    "t5": (
        {"SelfAttention.q", "DenseReluDense.wi"},
        {"DenseReluDense.wo", "shared", "relative_attention_bias"},
    ),
    "whisper": ({"self_attn.q_proj", "fc1"}, {"proj_out", "conv1", "embed_positions"}),
}
"""What is a linear, and what is none or keeps its floats, by the ends of names."""


def _plan(source: Path, dst: Path, scheme: str | quantkit.Recipe) -> FormatPlan:
    options = QuantizeOptions(source, dst, scheme, method="rtn", tensors_only=True)
    return prepare(options).formats.first


@pytest.mark.parametrize("kind", CLASSES)
def test_modules_say_what_is_a_linear(kind: str, tmp_path: Path) -> None:
    _, source = _made(kind, tmp_path / "src")
    recipe = quantkit.Recipe(quantkit.QuantScheme.parse("int8"), RECURRENT.get(kind, ()))
    plan = _plan(source, tmp_path / "dst", recipe)
    schemes = plan.scheme_map.schemes
    assert set(schemes) <= set(linear_columns(plan.source.config))
    for end in QUANTIZED[kind][0]:
        assert any(module.endswith(end) for module in schemes), end
    for end in QUANTIZED[kind][1]:
        assert not any(module.endswith(end) for module in schemes), end


def test_a_head_and_a_vision_part_are_quantized_where_a_recipe_names_them(tmp_path: Path) -> None:
    model, source = _made("llava", tmp_path / "src")
    int8 = quantkit.QuantScheme.parse("int8")
    recipe = quantkit.Recipe(
        int8, (quantkit.Override("*lm_head", int8), quantkit.Override("*vision_tower*", int8))
    )
    made = quantkit.quantize(source, tmp_path / "dst", recipe, method="rtn", tensors_only=True)
    found = made.manifest["modules"]
    assert found["language_model.lm_head"]["scheme"] == "int8"
    assert sum(one["scheme"] is not None for name, one in found.items() if "vision" in name) == 12
    floats = _loaded(model, _dequantized(made.path, tmp_path / "floats"))
    assert (_logits(_loaded(model, made.path)) - _logits(floats)).abs().max() < 1e-5


def test_a_model_that_transformers_cannot_build_is_reported_by_names(tmp_path: Path) -> None:
    _, source = _made("deepseek", tmp_path / "src")
    oracle.edit_json(source / "config.json", num_hidden_layers=10**9)
    made = quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True)
    assert made.manifest["linears_by"] == "names"
    assert any(
        "'num_hidden_layers' is 1000000000; linear layers are recognized by their names" in one
        for one in made.notes
    )


def test_linears_of_other_classes_are_linears(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    falcon = oracle.save(
        transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)), tmp_path / "falcon"
    )
    plan = _plan(falcon, tmp_path / "dst", "int8")
    assert {module.rpartition(".")[2] for module in plan.scheme_map.schemes} == {
        "query_key_value",
        "dense",
        "dense_h_to_4h",
        "dense_4h_to_h",
    }
    for tied in (True, False):  # a head that is the embedding, and one that is a linear
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=64, n_layer=1, n_head=4, tie_word_embeddings=tied
        )
        gpt2 = oracle.save(transformers.GPT2LMHeadModel(config), tmp_path / f"gpt2-{tied}")
        plan = _plan(gpt2, tmp_path / "dst", "int8")
        shapes = {
            module: plan.source.info(f"{module}.weight").shape for module in plan.scheme_map.schemes
        }
        assert shapes == {
            "transformer.h.0.attn.c_attn": (192, 64),
            "transformer.h.0.attn.c_proj": (64, 64),
            "transformer.h.0.mlp.c_fc": (256, 64),
            "transformer.h.0.mlp.c_proj": (64, 256),
        }


def test_a_router_with_a_longer_name_stays_float(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    made = quantkit.quantize(
        tiny_model("gemma3n_text"), tmp_path / "dst", "int8", tensors_only=True
    )
    assert not any(
        "modality_router" in name for name, one in made.manifest["modules"].items() if one["scheme"]
    )
    assert any(name.endswith("altup.prediction_coefs") for name in made.manifest["modules"])
