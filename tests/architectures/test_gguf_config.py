"""What GGUF says of a model: metadata and tensors from configs and back, and what llama.cpp
would not compute.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from case_names import case
from config_cases import config_keys
from error_parts import raises
from gguf_config_cases import (
    BAMBA,
    CASES,
    DELTA,
    EXPERTS,
    GEMMA4,
    GEMMA4_SMALL,
    GPT_OSS,
    GRANITE_HYBRID,
    LLAMA4,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    YARN,
)

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.architectures.rope import RopeConfig
from quantkit.architectures.topology import parameters
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.gguf.config import (
    build_config,
    build_metadata,
    describe_llama_cpp_differences,
    shorten_float32,
)
from quantkit.formats.gguf.names import ROPE_FREQS, get_norm_offset, gguf_tensors, keeps_float32
from quantkit.formats.gguf.rope import compute_rope_factors

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3-other": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 6.0,
        "original_max_position_embeddings": 2000,
    },
}


def _config(kind: str, **changes: Any) -> ModelConfig:
    return config_from_hf(config_keys(kind, **changes), "config.json")


def _stored(value: Any) -> Any:
    return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value


def _read(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A config as it is read from what is written of it, with other metadata."""
    metadata: dict[str, Any] = {
        key: _stored(value) for key, value in build_metadata(config).items()
    }
    metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"] = 1, 2
    shapes = {tensor.name: tensor.shape for tensor in gguf_tensors(config)}
    factors = {
        name: tuple(map(_stored, values)) for name, values in compute_rope_factors(config).items()
    }
    stated = {key.replace("__", "."): value for key, value in changes.items()}
    return build_config(
        metadata | stated,
        shapes,
        factors,
        "a.gguf",
        tied=config.tied_embeddings,
        dtype=config.dtype,
    )


def test_a_model_is_read_as_it_is_written() -> None:
    for name, (kind, changes) in CASES.items():
        with case(name):
            _require_read_as_written(_config(kind, **changes))


def _require_read_as_written(config: ModelConfig) -> None:
    assert _read(config).differences(config) == []
    tensors = gguf_tensors(config)
    # Each once: a linear of Qwen3-Next is two tensors.
    parts = {part for tensor in tensors for part in tensor.parts if tensor.name != "output.weight"}
    expected = [parameter.name for parameter in parameters(config) if parameter.role != "head"]
    assert sorted(parts) == sorted(expected)
    assert config_from_hf(config_to_hf(_read(config)), "config.json").differences(config) == []


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["llama", "granite"])
def test_rope_scaling_goes_there_and_back(kind: str, rope: str) -> None:
    scaling = ROPES[rope]
    config = _config(kind, rope_parameters={"rope_theta": 5e5, **scaling}, head_dim=64)
    assert _read(config).differences(config) == []
    assert (ROPE_FREQS in compute_rope_factors(config)) == rope.startswith("llama3")


@pytest.mark.parametrize("stated", [None, 16])
def test_llama3_settings_are_found_by_their_factors(stated: int | None) -> None:
    rope = {**ROPES["llama3-other"], "rope_theta": 5e5}
    config = _config("llama", rope_parameters=rope, head_dim=64)
    changes: dict[str, Any] = {}
    if not stated:
        changes = {"llama__rope__scaling__original_context_length": None}
    rope_read = _read(config, **changes).rope
    assert rope_read.type == "llama3"
    factors = compute_rope_factors(replace(config, rope=rope_read))[ROPE_FREQS]
    assert factors == pytest.approx(compute_rope_factors(config)[ROPE_FREQS], rel=1e-5)


def test_factors_of_no_known_scaling_are_taken_one_by_one() -> None:
    config = _config("llama", rope_parameters={"rope_theta": 5e5, **ROPES["llama3"]}, head_dim=8)
    metadata = build_metadata(config)
    shapes = {tensor.name: tensor.shape for tensor in gguf_tensors(config)}
    found = build_config(
        metadata, shapes, {ROPE_FREQS: (1.0, 3.0, 2.0, 5.0)}, "a.gguf", tied=False, dtype="float32"
    )
    assert found.rope.type == "longrope"
    assert found.rope.short_factor == found.rope.long_factor == (1.0, 3.0, 2.0, 5.0)
    assert found.rope.attention_factor == 1
    assert found.rope_switch is None
    ones = build_config(
        metadata, shapes, {ROPE_FREQS: (1.0,) * 4}, "a.gguf", tied=False, dtype="float32"
    )
    assert ones.rope.type == "default"


def test_which_tensors_are_changed_is_reported() -> None:
    config = _config("gemma2", head_dim=16, query_pre_attn_scalar=16, pad_token_id=0)
    offsets = {tensor.name: get_norm_offset(config, tensor) for tensor in gguf_tensors(config)}
    assert {name for name, offset in offsets.items() if offset} == {
        name for name in offsets if "norm" in name
    }
    floats = {
        tensor.name
        for tensor in gguf_tensors(_config("qwen2_moe", **CASES["qwen2-moe"][1]))
        if keeps_float32(tensor) and ".0." in tensor.name
    }
    assert floats == {
        f"blk.0.{name}"
        for name in (
            "attn_norm.weight",
            "ffn_norm.weight",
            "attn_q.bias",
            "attn_k.bias",
            "attn_v.bias",
            "ffn_gate_inp.weight",
            "ffn_gate_inp_shexp.weight",
        )
    }


def test_experts_and_fused_projections_are_one_tensor() -> None:
    mixtral = {
        tensor.name: tensor for tensor in gguf_tensors(_config("mixtral", num_local_experts=4))
    }
    assert mixtral["blk.1.ffn_gate_exps.weight"].shape == (4, 96, 64)
    assert (
        mixtral["blk.1.ffn_down_exps.weight"].places[2].name
        == "model.layers.1.mlp.experts.2.down_proj.weight"
    )
    assert mixtral["blk.0.attn_q.weight"].places[0].head_order == (0, 2, 4, 6, 1, 3, 5, 7)
    phi = {tensor.name: tensor for tensor in gguf_tensors(_config("phi3"))}
    assert [place.first for place in phi["blk.0.attn_qkv.weight"].places] == [0, 64, 80]
    assert phi["blk.0.ffn_up.weight"].parts[0].endswith("gate_proj.weight")
    tied = gguf_tensors(_config("olmo2", tie_word_embeddings=True))
    assert tied[-1].name == "output.weight"
    assert tied[-1].parts == tied[0].parts


_MINISTRAL_ROPE = {
    **YARN,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_LFM2_MOE = {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
_NEXT = {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64}
_GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 16, "pad_token_id": 0}
_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "wide-glm": ("glm", {"head_dim": 16, "pad_token_id": 0}, "width"),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "dynamic",
    ),
    "yarn": (
        "llama",
        {"rope_parameters": {**ROPES["yarn"], "attention_factor": 1.5}},
        "attention_factor",
    ),
    "llama3": ("qwen2", {"rope_parameters": ROPES["llama3"]}, "llama3"),
    "bias": ("qwen3", {"head_dim": 16, "attention_bias": True}, "qkv"),
    "scale": ("gemma2", {"head_dim": 16, "pad_token_id": 0}, "attention_scale"),
    "head": (
        "gemma",
        {"head_dim": 16, "pad_token_id": 0, "tie_word_embeddings": False},
        "head",
    ),
    "shares": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 16, "norm_topk_prob": False},
        "routing",
    ),
    "dense": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
        "experts",
    ),
    "positions": ("smollm3", {"no_rope_layers": [1, 0, 1]}, "rotary"),
    "wide": ("olmo2", {"head_dim": 32}, "width"),
    "grouped": ("olmoe", {"num_key_value_heads": 2}, "KV heads"),
    "clipped": ("olmoe", {"num_key_value_heads": 8, "clip_qkv": 8.0}, "clipped"),
    "cap": ("gemma2", {**_GEMMA2, "attn_logit_softcapping": None}, "soft caps"),
    "final-cap": (
        "gemma2",
        {**_GEMMA2, "final_logit_softcapping": None},
        "soft caps",
    ),
    "no-window": (
        "gemma2",
        {**_GEMMA2, "layer_types": ["full_attention"] * 3},
        "sliding-window",
    ),
    "llama4-chunk": ("llama4_text", {**LLAMA4, "attention_chunk_size": 64}, "chunks"),
    "llama4-layers": ("llama4_text", {**LLAMA4, "no_rope_layer_interval": 2}, "chunks"),
    "llama4-scale": ("llama4_text", {**LLAMA4, "floor_scale": 64}, "scales of queries"),
    "llama4-norm": ("llama4_text", {**LLAMA4, "use_qk_norm": False}, "norms of queries"),
    "llama4-many": ("llama4_text", {**LLAMA4, "num_local_experts": 128}, "norms of queries"),
    "llama4-experts": ("llama4_text", {**LLAMA4, "moe_layers": [0, 3]}, "irregular"),
    "exaone4-windows": ("exaone4", {"sliding_window": 5}, "64 layers"),
    "exaone4-wide": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 16},
        "width",
    ),
    "exaone4-full": (
        "exaone4",
        {
            "sliding_window": None,
            "num_hidden_layers": 64,
            "layer_types": ["full_attention"] * 64,
        },
        "sliding-window",
    ),
    "exaone4-unrotated": (
        "exaone4",
        {"sliding_window": 5, "layer_types": ["full_attention"] * 3},
        "rotary",
    ),
    "cohere2-full": (
        "cohere2",
        {"pad_token_id": 0, "layer_types": ["full_attention"] * 3},
        "sliding-window",
    ),
    "cohere2-bias": ("cohere2", {"pad_token_id": 0, "attention_bias": True}, "qkv"),
    "cohere2-head": ("cohere2", {"pad_token_id": 0, "tie_word_embeddings": False}, "head"),
    "lfm2-bias": ("lfm2", {"layer_types": ["conv"] * 3, "conv_bias": True}, "convolutions"),
    "lfm2-short": ("lfm2", {"layer_types": ["conv"] * 3, "conv_L_cache": 1}, "one token"),
    "lfm2-wide": ("lfm2", {"layer_types": ["conv"] * 3, "head_dim": 32}, "width"),
    "lfm2-moe-scores": ("lfm2_moe", {**_LFM2_MOE, "use_expert_bias": False}, "correction"),
    "lfm2-moe-scaled": ("lfm2_moe", {**_LFM2_MOE, "routed_scaling_factor": 2.0}, "scaled"),
    "lfm2-moe-shares": ("lfm2_moe", {**_LFM2_MOE, "norm_topk_prob": False}, "routing"),
    "delta-sizes": ("qwen3_5_text", {**DELTA, "linear_value_head_dim": 16}, "size"),
    "delta-epsilon": ("qwen3_5_text", {**DELTA, "rms_norm_eps": 1e-5}, "epsilon"),
    "delta-short": ("qwen3_5_text", {**DELTA, "linear_conv_kernel_dim": 1}, "one token"),
    "delta-bias": ("qwen3_5_text", {**DELTA, "attention_bias": True}, "qkv"),
    "next-dense": ("qwen3_next", {**_NEXT, "mlp_only_layers": [1]}, "experts"),
    "next-shares": ("qwen3_next", {**_NEXT, "norm_topk_prob": False}, "routing"),
    "granite-hybrid-expand": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "mamba_expand": 1},
        "width of Mamba",
    ),
    "granite-hybrid-steps": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "time_step_limit": [0.0, 0.5]},
        "step sizes",
    ),
    "granite-hybrid-attention": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "layer_types": ["full_attention"] * 3},
        "in all layers",
    ),
    "bamba-convolution": ("bamba", {**BAMBA, "mamba_conv_bias": False}, "without biases"),
    "bamba-linears": ("bamba", {**BAMBA, "mamba_proj_bias": True}, "Mamba's linears"),
    "bamba-states": ("bamba", {**BAMBA, "attn_layer_indices": []}, "in all layers"),
    "nemotron-h-linears": ("nemotron_h", {**NEMOTRON_H, "use_bias": True}, "Mamba's linears"),
    "nemotron-h-mixed": (
        "nemotron_h",
        {
            **NEMOTRON_H_MOE,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        },
        "without experts",
    ),
    "gemma4-windows": (
        "gemma4_text",
        {**GEMMA4, "layer_types": ["full_attention"] * 4},
        "sliding-window",
    ),
    "gemma4-sharing": (
        "gemma4_text",
        {**GEMMA4_SMALL, "num_kv_shared_layers": 3},
        "shared keys and values",
    ),
    "gemma4-rows": (
        "gemma4_text",
        {**GEMMA4_SMALL, "vocab_size_per_layer_input": 128},
        "more tokens",
    ),
    "gemma4-bias": ("gemma4_text", {**GEMMA4, "attention_bias": True}, "qkv"),
    "hunyuan-bias": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "pad_token_id": 0, "attention_bias": True},
        "qkv",
    ),
    "gpt-oss-limit": ("gpt_oss", {**GPT_OSS, "swiglu_limit": 6.0}, "limit of SwiGLU"),
    "gpt-oss-alpha": ("gpt_oss", {**GPT_OSS, "swiglu_alpha": 1.5}, "factor of SwiGLU"),
    "gpt-oss-bias": ("gpt_oss", {**GPT_OSS, "attention_bias": False}, "without biases"),
    "gpt-oss-windows": (
        "gpt_oss",
        {**GPT_OSS, "layer_types": ["full_attention"] * 3},
        "sliding-window",
    ),
    "gpt-oss-betas": (
        "gpt_oss",
        {**GPT_OSS, "rope_parameters": {**YARN, "beta_fast": 16.0}},
        "beta_fast",
    ),
    "ministral3-mscale": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": {**_MINISTRAL_ROPE, "mscale": 0.7}},
        "mscale",
    ),
    "ministral3-factor": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": {**_MINISTRAL_ROPE, "attention_factor": 1.5}},
        "attention_factor",
    ),
    "ministral3-queries": ("ministral3", {"head_dim": 16, "rope_parameters": YARN}, "query_scal"),
    "yarn-bounds": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": {**_MINISTRAL_ROPE, "truncate": False}},
        "truncate",
    ),
    "llama-betas": ("llama", {"rope_parameters": {**YARN, "beta_slow": 2.0}}, "beta_slow"),
    "smollm3-bias": ("smollm3", {"attention_bias": True}, "qkv"),
    "smollm3-mlp": ("smollm3", {"mlp_bias": True}, "mlp"),
}


def test_what_llama_cpp_would_compute_otherwise_is_refused() -> None:
    for setting, (kind, changes, name) in _REFUSED.items():
        with case(setting), raises(UnsupportedError, name):
            build_metadata(_config(kind, **changes))


def test_a_window_that_llama_cpp_does_not_know_is_reported() -> None:
    (note,) = describe_llama_cpp_differences(_config("mistral", sliding_window=7))
    assert " 7 " in note
    assert describe_llama_cpp_differences(_config("olmo3")) == []


def test_bounds_of_yarn_that_llama_cpp_rounds_are_reported() -> None:
    kind, changes = CASES["gpt-oss"]
    (note,) = describe_llama_cpp_differences(_config(kind, **changes))
    assert "truncate" in note
    for name in ("gpt-oss-rounded", "gpt-oss-default", "ministral3-yarn"):
        kind, changes = CASES[name]
        assert describe_llama_cpp_differences(_config(kind, **changes)) == [], name


def test_published_files_do_not_state_what_is_the_same_in_all_models_of_a_family() -> None:
    """Keys that llama.cpp's converter does not write, or writes with values that mean nothing."""
    oss = _config("gpt_oss", **CASES["gpt-oss"][1])
    absent = {"rope.scaling.yarn_truncate": None, "rope.dimension_count": None, "vocab_size": None}
    usual = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
    read = _read(oss, **{f"gpt-oss__{key}": value for key, value in {**absent, **usual}.items()})
    assert not read.rope.truncate
    assert replace(read.rope, beta_fast=None, beta_slow=None) == oss.rope
    # Mistral Small 3.1: without YaRN and without a scale of queries.
    small = _read(
        _config("ministral3", **CASES["ministral3-window"][1]),
        mistral3__attention__temperature_scale=None,
        mistral3__rope__scaling__yarn_log_multiplier=0.0,
    )
    assert (small.rope.type, small.rope.query_scaling_beta) == ("default", 0.0)


def test_any_order_of_layers_with_a_window_is_written() -> None:
    order = ["full_attention", "sliding_attention", "sliding_attention"]
    for kind, changes in (
        ("gpt_oss", GPT_OSS),
        ("gemma2", _GEMMA2),
        ("gemma3_text", _GEMMA2),
        ("olmo3", {}),
    ):
        config = _config(kind, **changes, layer_types=order)
        (flags,) = [
            value
            for key, value in build_metadata(config).items()
            if key.endswith("sliding_window_pattern")
        ]
        assert flags == [False, True, True], kind
        assert _read(config).windows == config.windows


def test_the_published_files_of_a_family_are_read_without_our_own_keys() -> None:
    for name, kind in {
        "mistral-no-window": "llama",
        "mistral-window": "mistral",
        "mixtral": "mixtral",
    }.items():
        config = _config(CASES[name][0], **CASES[name][1])
        assert _read(config, quantkit__model_type="x").architecture == kind, name
    assert (
        _read(_config("llama"), llama__expert_count=1, llama__expert_used_count=1).architecture
        == "mixtral"
    )
    short = _read(
        _config("llama"), llama__attention__key_length=None, llama__attention__value_length=None
    )
    assert short.head_dim == 8


def test_published_files_of_hybrids_are_read_without_our_own_keys() -> None:
    absent = {"quantkit__model_type": None}
    for name, (kind, changes) in CASES.items():
        if kind in ("granitemoehybrid", "bamba", "nemotron_h", "gemma4_text"):
            config = _config(kind, **{**changes, "position_embedding_type": "nope"})
            assert _read(config, **absent).differences(config) == [], name
    # transformers' smallest step size, which llama.cpp has no key for.
    nemotron = _config("nemotron_h", **{**NEMOTRON_H, "time_step_min": 0.5})
    read = _read(nemotron, nemotron_h__ssm__time_step_min=None)
    assert read.mamba2 is not None
    assert read.mamba2.step_limits == (0.001, math.inf)
    (note,) = describe_llama_cpp_differences(read)
    assert "0.001" in note
    # llama.cpp caps logits where a file does not say whether.
    gemma = _config("gemma4_text", **GEMMA4)
    assert gemma.logit_softcap is None
    assert _read(gemma, gemma4__final_logit_softcapping=None).logit_softcap == 30


def test_what_files_of_hybrids_say_otherwise_is_refused() -> None:
    moe = _config("nemotron_h", **NEMOTRON_H_MOE)
    with raises(UnsupportedError, "groups"):
        _read(moe, nemotron_h_moe__expert_group_count=2)
    with raises(UnsupportedError, "nextn_predict_layers"):
        _read(moe, nemotron_h_moe__nextn_predict_layers=1)
    with raises(CheckpointError, "feed_forward_length"):
        _read(moe, nemotron_h_moe__feed_forward_length=[0, 32, 0, 16])
    hybrid = _config("granitemoehybrid", **GRANITE_HYBRID)
    with raises(CheckpointError, "Mamba"):
        _read(hybrid, granitehybrid__ssm__time_step_rank=3)
    with raises(CheckpointError, "ssm.state_size"):
        _read(hybrid, granitehybrid__ssm__state_size=None)
    gemma = _config("gemma4_text", **GEMMA4_SMALL)
    with raises(UnsupportedError, "factors"):
        metadata = build_metadata(gemma)
        shapes = {tensor.name: tensor.shape for tensor in gguf_tensors(gemma)}
        factors = {ROPE_FREQS: (1.0,) * 7 + (2.0,)}
        build_config(metadata, shapes, factors, "a.gguf", tied=True, dtype="float32")
    with raises(UnsupportedError, "feed_forward_length"):
        _read(gemma, gemma4__feed_forward_length=[96, 96, 96, 96, 192, 96])
    with raises(UnsupportedError, "head_count_kv"):
        _read(gemma, gemma4__attention__head_count_kv=[2, 2, 4, 2, 2, 2])
    with raises(CheckpointError, "sliding_window_pattern"):
        _read(gemma, gemma4__attention__sliding_window_pattern=6)


# What is changed, the type of the error, and what it names.
_SENSELESS: list[tuple[Mapping[str, Any], type[QuantkitError], str]] = [
    ({"general.architecture": "mamba"}, UnsupportedError, "mamba"),
    ({"general.architecture": 3}, CheckpointError, "general.architecture"),
    ({"general.type": "adapter"}, UnsupportedError, "adapter"),
    ({"llama.block_count": None}, CheckpointError, "'block_count'"),
    ({"llama.block_count": 2**31}, CheckpointError, "block_count"),
    ({"llama.block_count": 3.0}, CheckpointError, "block_count"),
    ({"llama.attention.head_count": [8, 8, 4]}, UnsupportedError, "head_count"),
    ({"llama.attention.head_count": []}, UnsupportedError, "head_count"),
    ({"llama.attention.head_count_kv": [2]}, UnsupportedError, "head_count_kv"),
    ({"llama.vocab_size": 5}, CheckpointError, "vocab_size"),
    ({"llama.attention.head_count_kv": 3}, CheckpointError, "KV heads"),
    ({"llama.attention.value_length": 4}, UnsupportedError, "sizes"),
    ({"llama.attention.causal": False}, UnsupportedError, "bidirectional"),
    (
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        CheckpointError,
        "layer_norm_rms_epsilon",
    ),
    ({"llama.rope.dimension_count": 6}, CheckpointError, "head size"),
    ({"llama.rope.freq_base": -1.0}, CheckpointError, "freq_base"),
    ({"llama.rope.scaling.type": "su"}, UnsupportedError, "su"),
    ({"llama.rope.scaling.attn_factor": 1.5}, UnsupportedError, "attn_factor"),
    ({"llama.rope.scaling.yarn_ext_factor": 0.5}, UnsupportedError, "yarn_ext_factor"),
    (
        {"llama.logit_scale": 8.0},
        UnsupportedError,
        "'llama.logit_scale'",
    ),
    (
        {"llama.attention.sliding_window": 7, "llama.attention.sliding_window_pattern": [1]},
        CheckpointError,
        "window",
    ),
    ({"llama.expert_count": 4}, CheckpointError, "expert_used_count"),
    ({"tokenizer.ggml.bos_token_id": 96}, CheckpointError, "found 96"),
    ({"tokenizer.ggml.eos_token_id": "a"}, CheckpointError, "eos_token_id"),
]


def test_metadata_that_makes_no_sense_is_refused() -> None:
    sound = build_metadata(_config("llama"))
    shapes = {tensor.name: tensor.shape for tensor in gguf_tensors(_config("llama"))}
    for changes, error, name in _SENSELESS:
        with case(changes), raises(error, name, path=Path("a.gguf")):
            build_config({**sound, **changes}, shapes, {}, "a.gguf", tied=False, dtype="float32")


def test_what_says_nothing_is_no_setting() -> None:
    config = _config("llama")
    changes = {"llama.expert_count": 0, "llama.logit_scale": 0.0, "llama.rope.scaling.type": "none"}
    assert (
        _read(config, **{key.replace(".", "__"): value for key, value in changes.items()}) == config
    )
    moe = _config("qwen3_moe", **CASES["qwen3-moe"][1])
    usual = {"qwen3moe__expert_gating_func": 1, "qwen3moe__expert_weights_norm": True}
    assert _read(moe, **usual) == moe
    with raises(UnsupportedError, "expert_gating_func"):
        _read(moe, qwen3moe__expert_gating_func=2)


_OF_DELTA: dict[str, tuple[dict[str, Any], str]] = {
    "sizes": ({"ssm__inner_size": 96}, "inner_size"),
    "layers": ({"attention__recurrent_layers": [True, False]}, "recurrent_layers"),
    "flags": ({"attention__recurrent_layers": [2, 0, 1]}, "recurrent_layers"),
    "lists": ({"attention__recurrent_layers": [[], 0, 1]}, "recurrent_layers"),
    "heads": ({"ssm__time_step_rank": 0}, "time_step_rank"),
    "no-size": ({"ssm__state_size": None}, "state_size"),
    "predicted": ({"nextn_predict_layers": 3}, "nextn_predict_layers"),
    "no-sections": ({"rope__dimension_sections": None}, "dimension_sections"),
    # The second pair would turn with the fourth number, which is 0.
    "sections": ({"rope__dimension_sections": [2, 0, 0, 0]}, "dimension_sections"),
    "scores": ({"expert_gating_func": 2}, "expert_gating_func"),
}


def test_files_with_other_delta_rules_are_refused() -> None:
    config = _config(*CASES["qwen3-5-moe"][:1], **CASES["qwen3-5-moe"][1])
    for name, (changes, found) in _OF_DELTA.items():
        changed = {f"qwen35moe__{key}": value for key, value in changes.items()}
        with case(name), raises(QuantkitError, found):
            _read(config, **changed)


def test_layers_with_delta_rules_are_listed_or_all_but_one_of_an_interval() -> None:
    types = ["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"] * 2
    config = _config("qwen3_5_text", **{**DELTA, "layer_types": types, "num_hidden_layers": 5})
    mixers = [layer.mixer for layer in config.layers]
    assert mixers.count("attention") == 1
    listed = _read(config, qwen35__full_attention_interval=None)
    counted = _read(config, qwen35__attention__recurrent_layers=None)
    for read in (listed, counted):
        assert [layer.mixer for layer in read.layers] == mixers
    usual = _read(
        config,
        qwen35__attention__recurrent_layers=None,
        qwen35__full_attention_interval=None,
    )
    assert [layer.mixer for layer in usual.layers].index("attention") == 3
    irregular = _config(
        "qwen3_5_text",
        **{**DELTA, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    )
    assert "qwen35.full_attention_interval" not in build_metadata(irregular)
    assert _read(irregular).layers == irregular.layers


def test_layers_for_prediction_do_not_count() -> None:
    config = _config(*CASES["qwen3-next"][:1], **CASES["qwen3-next"][1])
    recurrent = [layer.mixer == "gated_delta" for layer in config.layers]
    found = _read(
        config,
        qwen3next__block_count=config.num_layers + 2,
        qwen3next__nextn_predict_layers=2,
        qwen3next__attention__recurrent_layers=[*recurrent, False, False],
    )
    assert found == config


def test_widths_of_experts_may_be_the_only_ones() -> None:
    config = _config(*CASES["qwen3-5-moe"][:1], **CASES["qwen3-5-moe"][1])
    assert _read(config, qwen35moe__feed_forward_length=None) == config


def test_scores_of_lfm2_are_sigmoids() -> None:
    config = _config(*CASES["lfm2-moe"][:1], **CASES["lfm2-moe"][1])
    for scores in (1, None):
        with raises(QuantkitError, "expert_gating_func"):
            _read(config, lfm2moe__expert_gating_func=scores)


def test_granite_may_not_be_reported_to_have_no_positions() -> None:
    with raises(UnsupportedError, "rope.scaling.finetuned"):
        _read(_config("granite"), granite__rope__scaling__finetuned=False)


def test_gemma2_has_the_caps_of_llama_cpp_where_a_file_has_none() -> None:
    config = _config("gemma2", **_GEMMA2, attn_logit_softcapping=20.0)
    caps = {"gemma2__attn_logit_softcapping": None, "gemma2__final_logit_softcapping": None}
    without_caps = _read(config, **caps)
    assert (without_caps.attention_softcap, without_caps.logit_softcap) == (50.0, 30.0)
    with raises(CheckpointError, "attn_logit_softcapping"):
        _read(config, gemma2__attn_logit_softcapping=0.0)
    with raises(UnsupportedError, "gemma2"):
        _read(config, gemma2__attention__sliding_window_pattern=1)


def test_what_llama_cpp_does_not_look_at_is_refused() -> None:
    with raises(UnsupportedError, "olmoe.attention.clamp_kqv"):
        _read(_config(*CASES["olmoe"][:1], **CASES["olmoe"][1]), olmoe__attention__clamp_kqv=8.0)
    with raises(UnsupportedError, "freq_base_swa 7"):
        _read(_config("olmo3"), olmo2__rope__freq_base_swa=7.0)
    with raises(CheckpointError, "logit_scale"):
        _read(_config("granite"), granite__logit_scale=None)


@pytest.mark.parametrize("factors", [(1.0,), (1.0, 2.0, 3.0, float("nan")), (0.0,) * 4])
def test_factors_fit_the_heads(factors: tuple[float, ...]) -> None:
    shapes = {tensor.name: tensor.shape for tensor in gguf_tensors(_config("llama"))}
    with raises(CheckpointError, "head size", path=Path("a.gguf")):
        build_config(
            build_metadata(_config("llama")),
            shapes,
            {ROPE_FREQS: factors},
            "a.gguf",
            tied=True,
            dtype="float32",
        )


def test_numbers_are_the_decimals_that_they_were() -> None:
    for value in (1e-5, 1e-6, 0.22, 500000.0, 10000.0, 0.0078125):
        assert json.dumps(shorten_float32(_stored(value))) == json.dumps(value)
    assert _stored(shorten_float32(_stored(1 / 3))) == _stored(1 / 3)
    assert shorten_float32(0.1 + 1e-12) == 0.1 + 1e-12
    for largest in (3.4028234663852886e38, -3.4028234663852886e38):
        assert shorten_float32(largest) == float(f"{largest:.8g}")
    assert shorten_float32([_stored(0.1), 3, "a", True]) == [0.1, 3, "a", True]
    assert shorten_float32(1e300) == 1e300


def test_a_rope_without_factors_needs_no_tensor() -> None:
    assert compute_rope_factors(replace(_config("llama"), rope=RopeConfig())) == {}
