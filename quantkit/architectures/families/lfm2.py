"""LFM2, dense and with experts (2511.23404): short convolutions between layers with attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantkit.architectures.config import ExpertsConfig, Limits, ModelConfig, ShortConvConfig
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    RMS_EPS,
    Family,
    GgufArchitecture,
)
from quantkit.architectures.families.keys import Keys, layer_count
from quantkit.architectures.names import BLOCK
from quantkit.architectures.rope import FULL
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError

# The name of a layer with a convolution in config.json.
_CONVOLUTION = "conv"
# Defaults of transformers, if a key is absent.
_EPS = 1e-5
_SIZE = 3
_MULTIPLE = 256
_DENSE_LAYERS = 2
# In transformers' code.
_NORMALIZATION_EPS = 1e-6
_MAX_SCALING = 1e6
_MAX_MULTIPLIER = 64.0


def _prepare(settings: Settings) -> Settings:
    """Rename keys to those of other families, and drop those that transformers ignores."""
    values = dict(settings.values)
    values["rms_norm_eps"] = values.get("norm_eps", _EPS)
    # The feed-forward is always gated by SiLU.
    values.pop("hidden_act", None)
    # A second name, which has precedence.
    if "tie_embedding" in values:
        values["tie_word_embeddings"] = values["tie_embedding"]
    return Settings(values, settings.path)


def _prepare_dense(settings: Settings) -> Settings:
    """Do the same, and compute the width of the feed-forward as transformers does."""
    prepared = _prepare(settings)
    key = "intermediate_size"
    # A second name, which has precedence.
    if "block_ff_dim" in prepared.values:
        key = "block_ff_dim"
    size = prepared.integer(key, 1, Limits.width)
    if prepared.flag("block_auto_adjust_ff_dim", True):
        # Two thirds, because a gated feed-forward has three matrices in place of two.
        size = int(2 * size / 3)
        if prepared.has("block_ffn_dim_multiplier"):
            size = int(prepared.number("block_ffn_dim_multiplier", 1e-3, _MAX_MULTIPLIER) * size)
        multiple = _MULTIPLE
        if prepared.has("block_multiple_of"):
            multiple = prepared.integer("block_multiple_of", 1, Limits.width)
        size = multiple * ((size + multiple - 1) // multiple)
    return Settings({**prepared.values, "intermediate_size": size}, settings.path)


def _write_width(config: ModelConfig) -> dict[str, Any]:
    """Write the adjusted width under both names: the second one may be in the source's file."""
    return {"block_auto_adjust_ff_dim": False, "block_ff_dim": config.intermediate_size}


def _read_mixers(settings: Settings, types: list[str]) -> dict[str, Any]:
    """Read the mixer of each layer, and the convolution."""
    count = layer_count(settings)
    if len(types) != count or set(types) - {FULL, _CONVOLUTION}:
        raise CheckpointError(
            "layer_types does not match the layers",
            path=settings.path,
            found=format_value(types),
            expected=f"{FULL} or {_CONVOLUTION} for each of {count}",
        )
    size = _SIZE
    if settings.has("conv_L_cache"):
        size = settings.integer("conv_L_cache", 1, Limits.convolution)
    mixers = []
    for kind in types:
        mixers.append("short_conv" if kind == _CONVOLUTION else "attention")
    convolution = ShortConvConfig(size, settings.flag("conv_bias", False))
    return {"mixers": mixers, "short_conv": convolution}


def _read_dense_mixers(settings: Settings) -> dict[str, Any]:
    """Read the mixers from a list of kinds, or from the numbers of the layers with attention."""
    if settings.has("layer_types"):
        return _read_mixers(settings, settings.strings("layer_types"))
    types = [FULL] * layer_count(settings)
    if settings.has("full_attn_idxs"):
        numbers = settings.values["full_attn_idxs"]
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            settings.wrong_type("full_attn_idxs", "a list of layers")
        types = []
        for layer in range(layer_count(settings)):
            types.append(FULL if layer in numbers else _CONVOLUTION)
    return _read_mixers(settings, types)


def _write_mixers(config: ModelConfig) -> dict[str, Any]:
    assert config.short_conv is not None
    types = []
    for layer in config.layers:
        types.append(FULL if layer.mixer == "attention" else _CONVOLUTION)
    return {
        "layer_types": types,
        "conv_L_cache": config.short_conv.size,
        "conv_bias": config.short_conv.bias,
        "norm_eps": config.norm_eps,
        "tie_embedding": config.tied_embeddings,
    }


def _read_experts(settings: Settings) -> dict[str, Any]:
    dense = _DENSE_LAYERS
    if settings.has("num_dense_layers"):
        dense = settings.integer("num_dense_layers", 0, Limits.layers)
    scaling = 1.0
    if settings.has("routed_scaling_factor"):
        scaling = settings.number("routed_scaling_factor", 1e-6, _MAX_SCALING)
    experts = ExpertsConfig(
        count=settings.integer("num_experts", 1, Limits.experts),
        size=settings.integer("moe_intermediate_size", 1, Limits.width),
        per_token=settings.integer("num_experts_per_tok", 1, Limits.experts),
        normalized=settings.flag("norm_topk_prob", True),
        score_correction=settings.flag("use_expert_bias", True),
        scores="sigmoid",
        normalization_eps=_NORMALIZATION_EPS,
        scaling=scaling,
    )
    sparse = [layer >= dense for layer in range(layer_count(settings))]
    return {"experts": experts, "sparse": sparse}


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    return {
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
        "moe_intermediate_size": config.experts.size,
        "norm_topk_prob": config.experts.normalized,
        "use_expert_bias": config.experts.score_correction,
        "routed_scaling_factor": config.experts.scaling,
        "num_dense_layers": sum(not layer.experts for layer in config.layers),
    }


_FEED_FORWARD = BLOCK + "feed_forward."
_NAMES = {
    "norm": "model.embedding_norm",
    "attention.norm": BLOCK + "operator_norm",
    "attention.output": BLOCK + "self_attn.out_proj",
    "attention.q_norm": BLOCK + "self_attn.q_layernorm",
    "attention.k_norm": BLOCK + "self_attn.k_layernorm",
    "mlp.norm": BLOCK + "ffn_norm",
    "mlp.gate": _FEED_FORWARD + "w1",
    "mlp.up": _FEED_FORWARD + "w3",
    "mlp.down": _FEED_FORWARD + "w2",
}
_GGUF_SIZE = "shortconv.l_cache"
_GGUF_DENSE_LAYERS = "leading_dense_block_count"
_GGUF_SCORES = "expert_gating_func"
_GGUF_SIGMOID = 2


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    return {
        "norm_eps": gguf.number(RMS_EPS, *Limits.eps),
        "conv_L_cache": gguf.integer(_GGUF_SIZE, 1, Limits.convolution),
        # The width in the file is the adjusted one.
        "block_auto_adjust_ff_dim": False,
    }


def _read_gguf_moe(gguf: Settings, head_dim: int) -> dict[str, Any]:
    if gguf.need(_GGUF_SCORES) != _GGUF_SIGMOID:
        raise UnsupportedError(
            f"scores of experts other than sigmoid are not supported in {gguf.name} models",
            path=gguf.path,
            found=f"{_GGUF_SCORES} {format_value(gguf.values[_GGUF_SCORES])}",
            expected=_GGUF_SIGMOID,
        )
    dense = 0
    if gguf.has(_GGUF_DENSE_LAYERS):
        dense = gguf.integer(_GGUF_DENSE_LAYERS, 0, Limits.layers)
    return {**_read_gguf(gguf, head_dim), "num_dense_layers": dense}


def _write_gguf(config: ModelConfig) -> dict[str, Any]:
    assert config.short_conv is not None
    return {_GGUF_SIZE: config.short_conv.size}


def _write_gguf_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_gguf(config),
        _GGUF_DENSE_LAYERS: sum(not layer.experts for layer in config.layers),
        _GGUF_SCORES: _GGUF_SIGMOID,
    }


def _has_biases(config: ModelConfig) -> bool:
    return config.short_conv is not None and config.short_conv.bias


def _convolves_one_token(config: ModelConfig) -> bool:
    return config.short_conv is not None and config.short_conv.size == 1


_LFM2_GGUF = GgufArchitecture(
    "lfm2",
    keys=(_GGUF_SIZE,),
    names={"norm": "token_embd_norm"},
    uneven=True,
    layer_without_kv=_CONVOLUTION,
    full_width=True,
    read=_read_gguf,
    write=_write_gguf,
    refused={
        "biases of convolutions": _has_biases,
        # llama.cpp ends the process.
        "convolutions of one token": _convolves_one_token,
    },
)
_LFM2_MOE_GGUF = replace(
    _LFM2_GGUF,
    name="lfm2moe",
    keys=(*_LFM2_GGUF.keys, *EXPERT_KEYS, _GGUF_DENSE_LAYERS, _GGUF_SCORES),
    normalized=True,
    dense_layers=True,
    read=_read_gguf_moe,
    write=_write_gguf_moe,
    refused={
        **_LFM2_GGUF.refused,
        "experts without a correction of scores": lambda config: (
            config.experts is not None and not config.experts.score_correction
        ),
        "scaled weights of experts": lambda config: (
            config.experts is not None and config.experts.scaling != 1
        ),
    },
)
_OPTIONS = {"qk_norm": "head", "tied_by_default": True, "default_theta": 1e6}

LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    (
        Keys(_read_dense_mixers, _write_mixers),
        Keys(write=_write_width),
    ),
    options=_OPTIONS,
    prepare=_prepare_dense,
    names=_NAMES,
    gguf=_LFM2_GGUF,
)

LFM2_MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    (
        Keys(
            lambda settings: _read_mixers(settings, settings.strings("layer_types")),
            _write_mixers,
        ),
        Keys(_read_experts, _write_experts),
    ),
    options=_OPTIONS,
    prepare=_prepare,
    names={
        **_NAMES,
        "router": _FEED_FORWARD + "gate",
        "router.score_correction": _FEED_FORWARD + "expert_bias",
        "expert.gate": _FEED_FORWARD + "experts.{expert}.w1",
        "expert.up": _FEED_FORWARD + "experts.{expert}.w3",
        "expert.down": _FEED_FORWARD + "experts.{expert}.w2",
    },
    gguf=_LFM2_MOE_GGUF,
)
