"""Linear attention, state spaces and short convolutions keep their floats: transformers' classes
say what they are.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import transformers
from error_parts import raises
from safetensors.torch import load_file
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import quantkit
from quantkit.architectures.families.opaque import infer_roles_by_name, is_within, recurrent_modules
from quantkit.errors import RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.via_transformers.linears import NotKnown, _recurrent, _require_sane, with_linears

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_MAMBA = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 8,
    "mamba_d_ssm": 128,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_HALF = {"layer_types": ["linear_attention", "full_attention"] * 2}

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": ("BailingHybridDeltaAttention", {**_EXPERTS, **_MLA, **_HALF}),
    "bamba": ("BambaMixer", {**_MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Mixer", _MAMBA),
    "falcon_mamba": ("FalconMambaMixer", {"state_size": 8}),
    "granitemoehybrid": (
        "GraniteMoeHybridMambaLayer",
        {
            **_EXPERTS,
            **_MAMBA,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 64,
        },
    ),
    "jamba": (
        "JambaMambaMixer",
        {**_MAMBA, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "kimi_linear": ("KimiLinearDeltaAttention", {**_EXPERTS, **_MLA, **_HALF}),
    "lfm2": ("Lfm2ShortConv", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": ("Lfm2MoeShortConv", {**_EXPERTS, "layer_types": ["conv", "full_attention"] * 2}),
    "mamba": ("MambaMixer", {"state_size": 8}),
    "mamba2": ("Mamba2Mixer", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1}),
    "minimax": ("MiniMaxLightningAttention", {**_EXPERTS, **_HALF}),
    "nemotron_h": (
        "NemotronHMamba2Mixer",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
        },
    ),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _DELTA),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", _DELTA),
    "qwen3_next": (
        "Qwen3NextGatedDeltaNet",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaRecurrentBlock",
        {"lru_width": 64, "block_types": ["recurrent", "attention"]},
    ),
    "rwkv": ("RwkvSelfAttention", {"attention_hidden_size": 64}),
    "xlstm": ("xLSTMLayer", {"num_heads": 4}),
    "zamba": (
        "ZambaMambaMixer",
        {
            **_MAMBA,
            "n_mamba_heads": 2,
            "attention_head_dim": 32,
            "layers_block_type": ["mamba", "hybrid"] * 2,
        },
    ),
    "zamba2": (
        "Zamba2MambaMixer",
        {
            **_MAMBA,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "hybrid"] * 2,
        },
    ),
}
"""By model_type: the class of the modules that carry a state, and sizes."""
_PLAIN = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
)
"""Linears of attention and feed-forward, where they are in no such module."""


def _made(kind: str, folder: Path) -> tuple[Any, Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(kind, **{**_TEXT, **CLASSES[kind][1]})
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, oracle.save(model, folder)


def _linears(model: nn.Module, class_name: str) -> tuple[set[str], set[str]]:
    """The linears within modules of a class, and all others, by their names."""
    modules = dict(model.named_modules())
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    blocks = [f"{name}." for name, module in modules.items() if type(module).__name__ == class_name]
    within = {name for name in linears if name.startswith(tuple(blocks))}
    return within, linears - within


@pytest.mark.parametrize("kind", CLASSES)
def test_no_linear_of_a_module_with_a_state_is_rounded_and_all_others_are(
    kind: str, tmp_path: Path
) -> None:
    model, folder = _made(kind, tmp_path / "src")
    within, others = _linears(model, CLASSES[kind][0])
    assert within
    source = open_checkpoint(folder, tensors_only=True)
    config, by, notes = with_linears(source.config, source.extra_config, folder)
    assert by == f"the modules of transformers' {type(model).__name__}", notes
    tensors = {one.alias or one.module: one for one in config.tensors or ()}
    assert {tensors[name].role for name in within} <= {"recurrent", "float"}
    assert {name for name in within if tensors[name].role == "float"} <= {
        n for n in within if n.endswith("dt_proj")
    }
    known = {name: tensors[name].role for name in others if name in tensors}
    assert {name for name, role in known.items() if role == "recurrent"} == set()
    assert {role for name, role in known.items() if name.rpartition(".")[2] in _PLAIN} <= {"linear"}

    by_names = infer_roles_by_name(source.extra_config, source.config.tensors or ())
    named = {name: by_names.get(one.name, ("",))[0] for name, one in tensors.items()}
    assert {named[name] for name in within} <= {"recurrent", "float"}
    assert {named[name] for name in known if name.rpartition(".")[2] in _PLAIN} <= {"linear"}


def test_state_is_seen_in_code_where_no_name_reports_it() -> None:
    """A convolution whose weights a linear makes: by its code alone, of all in transformers
    5.23.
    """
    config = transformers.AutoConfig.for_model("inkling2")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    found = _recurrent(dict(model.named_modules()))
    convolutions = [
        n for n, m in model.named_modules() if type(m).__name__ == "Inkling2DynamicShortConvolution"
    ]
    assert convolutions
    assert set(convolutions) <= found
    assert not any(name.endswith(("self_attn", "mlp", "layers")) for name in found)


@pytest.mark.parametrize("kind", ["doge", "gemma4_audio", "moonshine"])
def test_gates_of_attention_and_convolutions_over_sound_carry_no_state(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    with torch.device("meta"):
        modules = dict(transformers.AutoModel.from_config(config).named_modules())
    found = _recurrent(modules)
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    assert linears
    assert not any(is_within(name, found) for name in linears)


def _hybrid(folder: Path) -> Path:
    return _made("qwen3_5_text", folder)[1]


def test_a_hybrid_is_packed_but_for_its_linear_attention_and_that_is_said(tmp_path: Path) -> None:
    source = _hybrid(tmp_path / "src")
    made = quantkit.quantize(source, tmp_path / "dst", "int4-g32", method="rtn", tensors_only=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, made.path))
    own = [name for name in before if ".linear_attn." in name]
    assert len(own) > 10
    assert all(torch.equal(before[name], after[name]) for name in own)
    assert made.schemes == {
        "int4-g32": 4 * 3 + 2 * 4
    }  # feed-forward in all layers, attention in half of them
    (note,) = (note for note in made.notes if "linear attention" in note)
    readme = " ".join((made.path / "README.md").read_text().split()).replace("\\*", "*")
    for name in ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"):
        assert f"model.layers.*.linear_attn.{name}.weight" in note
        assert f"model.layers.*.linear_attn.{name}.weight" in readme
        assert (
            "carries a state"
            in made.manifest["modules"][f"model.layers.0.linear_attn.{name}"]["reason"]
        )
    assert "10 linears of linear attention" in note
    assert quantkit.verify(made.path, source).ok
    assert {one.rule.name for one in quantkit.diagnose(made.path).findings} == {"no-tokenizer"}


INT8, INT4 = quantkit.QuantScheme.parse("int8"), quantkit.QuantScheme.parse("int4-g32")


@pytest.mark.parametrize(
    ("pattern", "scheme", "found"),
    [
        ("*.linear_attn.*", INT8, "int8"),
        ("*.in_proj_a", INT8, "int8"),
        ("*.linear_attn.*", None, None),
        ("*.*.*", INT8, None),
        ("*.layers.0.*", INT8, None),  # its feed-forward too
        ("*.layers.0.*", INT4, None),
    ],
)
def test_a_recipe_has_to_name_linear_attention_alone(
    pattern: str, scheme: quantkit.QuantScheme | None, found: str | None, tmp_path: Path
) -> None:
    recipe = quantkit.Recipe(INT4, (quantkit.Override(pattern, scheme),))
    made = quantkit.quantize(
        _hybrid(tmp_path / "src"), tmp_path / "dst", recipe, method="rtn", tensors_only=True
    )
    assert made.manifest["modules"]["model.layers.0.linear_attn.in_proj_a"]["scheme"] == found
    named = pattern == "*.linear_attn.*" and scheme is not None
    assert any("linear attention" in note for note in made.notes) != named
    assert not quantkit.diagnose(made.path).is_broken
    assert {one.rule.name for one in quantkit.diagnose(made.path).findings} == {"no-tokenizer"}


def test_four_bits_are_refused_where_a_recipe_names_linear_attention(tmp_path: Path) -> None:
    recipe = quantkit.Recipe(INT8, (quantkit.Override("*.linear_attn.*", INT4),))
    with raises(RequestError, found="int4-g32 for '*.linear_attn.*'", expected='"int8" or "keep"'):
        quantkit.quantize(
            _hybrid(tmp_path / "src"), tmp_path / "dst", recipe, method="rtn", tensors_only=True
        )


def test_output_projections_may_have_four_bits_where_a_recipe_names_them(tmp_path: Path) -> None:
    """They get what was read from the state; published models have them so."""
    recipe = quantkit.Recipe(INT8, (quantkit.Override("*.linear_attn.out_proj", INT4),))
    made = quantkit.quantize(
        _hybrid(tmp_path / "src"), tmp_path / "dst", recipe, method="rtn", tensors_only=True
    )
    schemes = {
        name: one["scheme"]
        for name, one in made.manifest["modules"].items()
        if ".linear_attn." in name
    }
    assert {
        name.rpartition(".")[2] for name, scheme in schemes.items() if scheme == "int4-g32"
    } == {"out_proj"}
    assert any("linear attention" in note and "out_proj" not in note for note in made.notes)
    assert {one.rule.name for one in quantkit.diagnose(made.path).findings} == {"no-tokenizer"}


def test_a_model_of_state_spaces_alone_is_quantized_where_a_recipe_names_them(
    tmp_path: Path,
) -> None:
    _, source = _made("mamba2", tmp_path / "src")
    everything = quantkit.Recipe(INT8, (quantkit.Override("*.*.*", INT8),))
    for scheme in ("int8", everything):
        with raises(RequestError, '"pattern": "*.mixer.*"'):
            quantkit.quantize(source, tmp_path / "dst", scheme, keep="lm_head", tensors_only=True)
    recipe = quantkit.Recipe(INT8, (quantkit.Override("*.mixer.*", INT8),))
    assert quantkit.quantize(source, tmp_path / "dst", recipe, tensors_only=True).schemes == {
        "int8": 8
    }


def test_gemma_4_is_known_by_its_modules(tmp_path: Path) -> None:
    """Its table of embeddings for each layer has a number of rows that is no number of layers."""
    sizes = {
        "vocab_size_per_layer_input": 2000,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model("gemma4_text", **{**_TEXT, **sizes})
        model = transformers.AutoModelForCausalLM.from_config(config)
    source = open_checkpoint(oracle.save(model, tmp_path / "src"), tensors_only=True)
    _, by, notes = with_linears(source.config, source.extra_config, source.path)
    assert by == "the modules of transformers' Gemma4ForCausalLM", notes


@pytest.mark.parametrize(
    "kind",
    [
        "bloom",
        "convnext",
        "gemma4_text",
        "kosmos_2_text_model",
        "qwen2_vl_vision",
        "segformer",
        "t5",
        "whisper",
    ],
)
def test_absurd_numbers_of_layers_are_refused_whatever_a_config_calls_them(kind: str) -> None:
    known = CONFIG_MAPPING[kind]
    for key in {
        "num_hidden_layers",
        known.attribute_map.get("num_hidden_layers", "num_hidden_layers"),
    }:
        stated = json.loads(known().to_json_string(use_diff=False))
        _require_sane(stated)
        with pytest.raises(NotKnown, match=key):
            _require_sane({**stated, key: 10**6})


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"conv.conv.weight": (64, 3, 1)}, "layers.0.conv"),  # as MLX lays it out
        ({"conv.conv.weight": (64, 1, 3)}, "layers.0.conv"),
        ({"mixer.rglru.a_param": (64,)}, "layers.0.mixer"),
        ({"mixer.short_filter.weight": (192, 1, 3)}, "layers.0.mixer"),
        ({"seq_modeling_block.learnable_ttt_lr_weight": (2, 32)}, "layers.0.seq_modeling_block"),
        ({"retention.q_proj.weight": (64, 64)}, "layers.0.retention"),
        ({"att.x_r": (1, 1, 64)}, "layers.0.att"),
        ({"self_attn.q_proj.weight": (64, 64), "mlp.conv.weight": (64, 1, 9)}, None),
    ],
)
def test_modules_that_carry_a_state_are_known_by_names_and_shapes(
    tensors: dict[str, tuple[int, ...]], expected: str | None
) -> None:
    found = recurrent_modules({f"layers.0.{name}": shape for name, shape in tensors.items()})
    assert found == (set() if expected is None else {expected})
