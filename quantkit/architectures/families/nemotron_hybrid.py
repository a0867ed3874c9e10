"""Nemotron H (2504.03624) and Nemotron 3: each layer has one branch, Mamba-2, attention without
positions, a feed-forward with squared ReLU, or experts of such feed-forwards.

Its description is the code of transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quantkit.architectures.config import ExpertsConfig, Limits, Mamba2Config, ModelConfig
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    LAYER_NORM_EPS,
    RMS_EPS,
    Family,
    GgufArchitecture,
)
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.families.mamba import (
    GGUF_MAMBA,
    GGUF_REFUSED,
    LINEAR,
    OLDER_KINDS,
    has_one_mixer,
    read_gguf_mamba,
    require_groups,
    write_gguf_mamba,
)
from quantkit.architectures.names import GGUF_NAMES
from quantkit.architectures.rope import FULL
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError

_MLP = "mlp"
_EXPERTS = "moe"
# By the letters of `hybrid_override_pattern`.
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
_KINDS = "layers_block_type"
# Transformers' order of precedence: an alias is set last.
_KINDS_KEYS = ("layer_types", _KINDS)
_PATTERN = "hybrid_override_pattern"
_DEFAULT_KINDS = (LINEAR, _EXPERTS, FULL, _MLP)
# Older names, which have precedence, and the names that transformers writes.
_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}
# Keys of rotary positions, which no layer has.
_IGNORED = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
# Transformers' defaults, and the largest values, by the key in config.json.
_SIZES = {
    "mamba_num_heads": (128, Limits.heads),
    "mamba_head_dim": (64, Limits.width),
    "n_groups": (8, Limits.heads),
    "ssm_state_size": (128, Limits.heads),
    "conv_kernel": (4, Limits.convolution),
}
_EXPERT_SIZES = {
    "n_routed_experts": (8, Limits.experts),
    "num_experts_per_tok": (2, Limits.experts),
    "moe_intermediate_size": (7688, Limits.width),
    "moe_shared_expert_intermediate_size": (7688, Limits.width),
    "n_group": (1, Limits.experts),
    "topk_group": (1, Limits.experts),
}
_DEFAULTS = {"intermediate_size": 21504, "num_key_value_heads": 8}
_EPS = 1e-5
_STEP_MIN = 0.001
_MAX_STEP = 1e6
# In transformers' code.
_NORMALIZATION_EPS = 1e-20
_MAX_SCALING = 1e6


def _prepare(settings: Settings) -> Settings:
    """Rename keys to those of other families, and drop those that transformers ignores."""
    values = dict(settings.values)
    for older, name in _ALIASES.items():
        if older in values:
            values[name] = values.pop(older)
    for key in _IGNORED:
        values.pop(key, None)
    values["rms_norm_eps"] = values.get("layer_norm_epsilon", _EPS)
    for key, default in _DEFAULTS.items():
        values.setdefault(key, default)
    # transformers ties no head to the embedding, whatever a config states.
    values["tie_word_embeddings"] = False
    kinds = _read_kinds(Settings(values, settings.path))
    values[_KINDS] = kinds
    # transformers counts the layers of the list.
    values["num_hidden_layers"] = len(kinds)
    # No layer has this width then, and llama.cpp's files state that of experts.
    if _MLP not in kinds and _EXPERTS in kinds:
        sizes = _read_sizes(Settings(values, settings.path), _EXPERT_SIZES)
        values["intermediate_size"] = sizes["moe_intermediate_size"]
    return Settings(values, settings.path)


def _read_kinds(settings: Settings) -> list[str]:
    """Read the kind of each layer."""
    kinds = list(_DEFAULT_KINDS)
    stated = [key for key in _KINDS_KEYS if settings.has(key)]
    if stated:
        kinds = settings.strings(stated[0])
    elif settings.has(_PATTERN):
        kinds = []
        for letter in settings.string(_PATTERN):
            kinds.append(_LETTERS.get(letter, letter))
    current = [OLDER_KINDS.get(kind, kind) for kind in kinds]
    unknown = sorted(set(current) - set(_LETTERS.values()))
    if unknown or not 1 <= len(current) <= Limits.layers:
        raise CheckpointError(
            "the kinds of layers are unknown",
            path=settings.path,
            found=format_value(unknown or current),
            expected=", ".join(_LETTERS.values()),
        )
    return current


def _read_sizes(settings: Settings, sizes: dict[str, tuple[int, int]]) -> dict[str, int]:
    read = {}
    for key, (default, largest) in sizes.items():
        read[key] = default
        # transformers fails if one of them is null.
        if key in settings.values:
            read[key] = settings.integer(key, 1, largest)
    return read


def _read_layers(settings: Settings) -> dict[str, Any]:
    """Read the only branch of each layer, and Mamba-2."""
    kinds = settings.strings(_KINDS)
    mixers = []
    for kind in kinds:
        mixers.append({LINEAR: "mamba2", FULL: "attention"}.get(kind, "none"))
    sizes = _read_sizes(settings, _SIZES)
    activation = "mamba_hidden_act"
    if settings.has(activation) and settings.string(activation) not in ("silu", "swish"):
        raise UnsupportedError(
            "activation of Mamba is not supported",
            path=settings.path,
            found=settings.values[activation],
            expected="silu",
        )
    step_min = _STEP_MIN
    if "time_step_min" in settings.values:
        step_min = settings.number("time_step_min", 0, _MAX_STEP)
    mamba = Mamba2Config(
        heads=sizes["mamba_num_heads"],
        head_size=sizes["mamba_head_dim"],
        groups=sizes["n_groups"],
        state_size=sizes["ssm_state_size"],
        convolution=sizes["conv_kernel"],
        convolution_bias=settings.flag("use_conv_bias", True),
        bias=settings.flag("use_bias", False),
        # transformers has no upper limit, and takes no notice of `time_step_limit`.
        step_limits=(step_min, math.inf),
    )
    require_groups(mamba, settings)
    return {
        "mixers": mixers,
        "feed_forwards": [kind in (_MLP, _EXPERTS) for kind in kinds],
        "sparse": [kind == _EXPERTS for kind in kinds],
        "rotary": [False] * len(kinds),
        "mamba2": mamba,
        "mlp_bias": settings.flag("mlp_bias", False),
    }


def _read_experts(settings: Settings) -> dict[str, Any]:
    if _EXPERTS not in settings.strings(_KINDS):
        return {}
    sizes = _read_sizes(settings, _EXPERT_SIZES)
    # With all groups, the choice is that among all experts.
    if sizes["n_group"] != sizes["topk_group"]:
        raise UnsupportedError(
            "a choice of groups of experts is not supported",
            path=settings.path,
            found=f"topk_group {sizes['topk_group']} of n_group {sizes['n_group']}",
        )
    if settings.flag("mlp_bias", False):
        raise UnsupportedError(
            "mlp_bias is not supported with experts", path=settings.path, found=True
        )
    latent = 0
    if settings.has("moe_latent_size"):
        latent = settings.integer("moe_latent_size", 1, Limits.width)
    scaling = 1.0
    if "routed_scaling_factor" in settings.values:
        scaling = settings.number("routed_scaling_factor", 1e-6, _MAX_SCALING)
    experts = ExpertsConfig(
        count=sizes["n_routed_experts"],
        size=sizes["moe_intermediate_size"],
        per_token=sizes["num_experts_per_tok"],
        shared_size=sizes["moe_shared_expert_intermediate_size"],
        latent_size=latent,
        normalized=settings.flag("norm_topk_prob", True),
        score_correction=True,
        float32_router=True,
        scores="sigmoid",
        normalization_eps=_NORMALIZATION_EPS,
        scaling=scaling,
    )
    return {"experts": experts}


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    mamba = config.mamba2
    assert mamba is not None
    kinds = []
    for layer in config.layers:
        if layer.experts:
            kinds.append(_EXPERTS)
        else:
            kinds.append({"mamba2": LINEAR, "attention": FULL}.get(layer.mixer, _MLP))
    return {
        _KINDS: kinds,
        "layer_norm_epsilon": config.norm_eps,
        "mlp_hidden_act": "relu2",
        "mlp_bias": config.mlp_bias,
        "mamba_hidden_act": "silu",
        **_list_mamba_keys(mamba),
        "time_step_min": mamba.step_limits[0],
    }


def _list_mamba_keys(mamba: Mamba2Config) -> dict[str, Any]:
    return {
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_size,
        "n_groups": mamba.groups,
        "ssm_state_size": mamba.state_size,
        "conv_kernel": mamba.convolution,
        "use_conv_bias": mamba.convolution_bias,
        "use_bias": mamba.bias,
    }


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "moe_shared_expert_intermediate_size": experts.shared_size,
        "moe_latent_size": experts.latent_size or None,
        "norm_topk_prob": experts.normalized,
        "routed_scaling_factor": experts.scaling,
        "n_group": 1,
        "topk_group": 1,
    }


_GGUF_STEP_MIN = "ssm.time_step_min"
"""quantkit's key: the smallest step size, to which transformers clamps them, and llama.cpp none."""
_GGUF_SHARED_SIZE = "expert_shared_feed_forward_length"
_GGUF_SHARED_COUNT = "expert_shared_count"
_GGUF_NORMALIZED = "expert_weights_norm"
_GGUF_SCALING = "expert_weights_scale"
_GGUF_GROUPS = "expert_group_count"
_GGUF_USED_GROUPS = "expert_group_used_count"
_GGUF_LATENT = "moe_latent_size"


def _list_gguf_sizes(gguf: Settings, key: str, high: int) -> list[int]:
    """List a size for each layer; a single number is that of all."""
    if isinstance(gguf.need(key), list):
        return gguf.integers(key, 0, high)
    return [gguf.integer(key, 0, high)] * gguf.integer("block_count", 1, Limits.layers)


def _read_gguf_kinds(gguf: Settings, feed_forward: str) -> list[str]:
    """Read the kind of each layer as llama.cpp does: one without KV heads and feed-forward has
    Mamba-2, and one with both has no attention.
    """
    kinds = []
    kv_heads = _list_gguf_sizes(gguf, "attention.head_count_kv", Limits.heads)
    widths = _list_gguf_sizes(gguf, "feed_forward_length", Limits.width)
    for count, width in zip(kv_heads, widths, strict=True):
        if width:
            kinds.append(feed_forward)
        else:
            kinds.append(FULL if count else LINEAR)
    return kinds


def _read_gguf(gguf: Settings, head_dim: int, feed_forward: str = _MLP) -> dict[str, Any]:
    mamba = read_gguf_mamba(gguf)
    # llama.cpp takes the other key for these norms only if the first is absent.
    eps_key = RMS_EPS if gguf.has(RMS_EPS) else LAYER_NORM_EPS
    # The published models have transformers' default, and no key of llama.cpp says so.
    step_min = _STEP_MIN
    if gguf.has(_GGUF_STEP_MIN):
        step_min = gguf.number(_GGUF_STEP_MIN, 0, _MAX_STEP)
    return {
        "layer_types": _read_gguf_kinds(gguf, feed_forward),
        "layer_norm_epsilon": gguf.number(eps_key, *Limits.eps),
        **_list_mamba_keys(mamba),
        "time_step_min": step_min,
    }


def _read_gguf_experts(gguf: Settings, head_dim: int) -> dict[str, Any]:
    if gguf.has(_GGUF_GROUPS) and gguf.integer(_GGUF_GROUPS, 0, Limits.experts) > 1:
        raise UnsupportedError(
            "a choice of groups of experts is not supported",
            path=gguf.path,
            found=f"{gguf.name}.{_GGUF_GROUPS} {gguf.values[_GGUF_GROUPS]}",
        )
    latent = None
    if gguf.values.get(_GGUF_LATENT):
        latent = gguf.integer(_GGUF_LATENT, 1, Limits.width)
    scaling = 1.0
    # llama.cpp takes 0 for none.
    if gguf.values.get(_GGUF_SCALING):
        scaling = gguf.number(_GGUF_SCALING, 1e-6, _MAX_SCALING)
    return {
        **_read_gguf(gguf, head_dim, _EXPERTS),
        "n_routed_experts": gguf.integer(EXPERT_KEYS[0], 1, Limits.experts),
        "num_experts_per_tok": gguf.integer(EXPERT_KEYS[1], 1, Limits.experts),
        "moe_intermediate_size": gguf.integer(EXPERT_KEYS[2], 1, Limits.width),
        "moe_shared_expert_intermediate_size": gguf.integer(_GGUF_SHARED_SIZE, 1, Limits.width),
        "moe_latent_size": latent,
        "norm_topk_prob": gguf.flag(_GGUF_NORMALIZED, False),
        "routed_scaling_factor": scaling,
    }


def _write_gguf(config: ModelConfig) -> dict[str, Any]:
    assert config.mamba2 is not None
    values = {
        **write_gguf_mamba(config),
        _GGUF_STEP_MIN: float(config.mamba2.step_limits[0]),
    }
    experts = config.experts
    if experts is not None:
        values |= {
            _GGUF_SHARED_COUNT: 1,
            _GGUF_NORMALIZED: experts.normalized,
            _GGUF_SCALING: float(experts.scaling),
        }
        if experts.latent_size:
            values[_GGUF_LATENT] = experts.latent_size
    return values


def _mixes_feed_forwards(config: ModelConfig) -> bool:
    kinds = {layer.experts for layer in config.layers if layer.feed_forward}
    return len(kinds) > 1


_GGUF = GgufArchitecture(
    "nemotron_h",
    keys=(*GGUF_MAMBA, RMS_EPS, _GGUF_STEP_MIN),
    # The only norm of a layer, before its only branch.
    names={"mlp.norm": GGUF_NAMES["attention.norm"]},
    # Without rotary positions, the order of rows has no effect; llama.cpp's converter changes it.
    interleaved_rotary=True,
    # No layer has any.
    read_ropes=lambda gguf, factors: {},
    biases=("mlp",),
    uneven=True,
    single_branches=True,
    layer_without_kv=LINEAR,
    # llama.cpp requires this one, whatever it takes for its norms.
    eps_key=LAYER_NORM_EPS,
    read=_read_gguf,
    write=_write_gguf,
    refused={
        **GGUF_REFUSED,
        "attention or Mamba in all layers with a mixer": has_one_mixer,
    },
)
_GGUF_SPARSE = replace(
    _GGUF,
    name="nemotron_h_moe",
    keys=(
        *_GGUF.keys,
        *EXPERT_KEYS,
        _GGUF_SHARED_SIZE,
        _GGUF_SHARED_COUNT,
        _GGUF_NORMALIZED,
        _GGUF_SCALING,
        _GGUF_GROUPS,
        _GGUF_USED_GROUPS,
        _GGUF_LATENT,
    ),
    biases=(),
    read=_read_gguf_experts,
    refused={**_GGUF.refused, "feed-forwards without experts": _mixes_feed_forwards},
)

_BLOCK = "backbone.layers.{layer}."
_MIXER = _BLOCK + "mixer."
_EXPERT = _MIXER + "experts.{expert}."
_SHARED = _MIXER + "shared_experts."

NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    (Keys(_read_layers, _write_layers), Keys(_read_experts, _write_experts)),
    options={
        "activations": ("relu2",),
        "activation_key": "mlp_hidden_act",
        "activation": "relu2",
        "mlp_gate": False,
        "wide_norms": True,
        # Of transformers, if the key is absent.
        "head_dim": 128,
    },
    prepare=_prepare,
    renamed=("backbone.", "model."),
    prediction="mtp.",
    in_mlx=False,
    names={
        "embedding": "backbone.embeddings",
        "norm": "backbone.norm_f",
        # The only norm of a layer, before its only branch.
        "attention.norm": _BLOCK + "norm",
        "mlp.norm": _BLOCK + "norm",
        "attention.q": _MIXER + "q_proj",
        "attention.k": _MIXER + "k_proj",
        "attention.v": _MIXER + "v_proj",
        "attention.output": _MIXER + "o_proj",
        "mamba2.in": _MIXER + "in_proj",
        "mamba2.filter": _MIXER + "conv1d",
        "mamba2.step_bias": _MIXER + "dt_bias",
        "mamba2.log_rate": _MIXER + "A_log",
        "mamba2.skip": _MIXER + "D",
        "mamba2.norm": _MIXER + "norm",
        "mamba2.out": _MIXER + "out_proj",
        "mlp.up": _MIXER + "up_proj",
        "mlp.down": _MIXER + "down_proj",
        "router": _MIXER + "gate",
        "router.score_correction": _MIXER + "gate.e_score_correction_bias",
        "expert.latent_in": _MIXER + "fc1_latent_proj",
        "expert.latent_out": _MIXER + "fc2_latent_proj",
        "expert.gate": _EXPERT + "gate_proj",
        "expert.up": _EXPERT + "up_proj",
        "expert.down": _EXPERT + "down_proj",
        "shared_expert.up": _SHARED + "up_proj",
        "shared_expert.down": _SHARED + "down_proj",
    },
    gguf=_GGUF,
    gguf_sparse=_GGUF_SPARSE,
)
