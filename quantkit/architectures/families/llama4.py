"""Llama 4, text (Meta): attention within chunks of positions, layers without rotary positions whose
queries are scaled by position, and experts in all layers or some.

Its description is the code of transformers.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ExpertsConfig, Limits, ModelConfig, QueryScaleConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    Family,
    GgufArchitecture,
    StackedExperts,
)
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.names import BLOCK
from quantkit.architectures.rope import FULL
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError

# The name of a layer with chunks in config.json.
_CHUNKED = "chunked_attention"
# Transformers' defaults, if a key is absent.
_HEAD_DIM = 128
_DENSE_SIZE = 16384
_CHUNK = 8192
_INTERVAL = 4
_EXPERTS_COUNT = 16
_FLOOR = 8192
_STRENGTH = 0.1
# Far beyond what is published.
_MAX_STRENGTH = 1e3


def _prepare(settings: Settings) -> Settings:
    """Rename the width of the feed-forward of layers without experts to that of other families,
    and keep that of experts.
    """
    values = dict(settings.values)
    # Experts have the width that is the feed-forward's in other families.
    values["moe_intermediate_size"] = values.get("intermediate_size")
    values["intermediate_size"] = values.get("intermediate_size_mlp", _DENSE_SIZE)
    return Settings(values, settings.path)


def _read_integer(settings: Settings, key: str, low: int, high: int, default: int) -> int:
    if key in settings.values:
        return settings.integer(key, low, high)
    return default


def _read_layers(settings: Settings) -> dict[str, Any]:
    """Read which layers have rotary positions, chunks, and experts."""
    count = keys.layer_count(settings)
    interval = _read_integer(settings, "no_rope_layer_interval", 1, Limits.layers, _INTERVAL)
    # In spite of its name, 1 is a layer with rotary positions.
    rotated: list[int] = []
    if settings.has("no_rope_layers"):
        rotated = settings.integers("no_rope_layers", 0, 1)
    # Transformers replaces an empty list too.
    if not rotated:
        rotated = [int((layer + 1) % interval != 0) for layer in range(count)]
    # Transformers reads a longer list by the number of a layer, but lists a type for each of its
    # entries if the config lists none.
    if len(rotated) < count or (len(rotated) > count and not settings.has("layer_types")):
        raise CheckpointError(
            "no_rope_layers does not match the layers",
            path=settings.path,
            found=format_value(rotated),
            expected=f"0 or 1 for each of {count}",
        )
    rotary = [is_rotated == 1 for is_rotated in rotated[:count]]
    types = [_CHUNKED if is_rotated else FULL for is_rotated in rotary]
    if settings.has("layer_types"):
        types = settings.strings("layer_types")
    if len(types) != count or set(types) - {FULL, _CHUNKED}:
        raise CheckpointError(
            "layer_types does not match the layers",
            path=settings.path,
            found=format_value(types),
            expected=f"{FULL} or {_CHUNKED} for each of {count}",
        )
    # Transformers needs it even if no layer has chunks.
    chunk = _read_integer(settings, "attention_chunk_size", 1, Limits.context, _CHUNK)
    step = _read_integer(settings, "interleave_moe_layer_step", 1, Limits.layers, 1)
    sparse_layers = list(range(step - 1, count, step))
    if settings.has("moe_layers"):
        sparse_layers = settings.integers("moe_layers", 0, Limits.layers)
    return {
        "rotary": rotary,
        "chunks": [chunk if kind == _CHUNKED else None for kind in types],
        "sparse": [layer in sparse_layers for layer in range(count)],
    }


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    types = []
    chunk = _CHUNK
    for layer in config.layers:
        types.append(FULL if layer.chunk is None else _CHUNKED)
        chunk = layer.chunk or chunk
    return {
        "no_rope_layers": [int(layer.rotary) for layer in config.layers],
        "layer_types": types,
        "attention_chunk_size": chunk,
        "moe_layers": [number for number, layer in enumerate(config.layers) if layer.experts],
    }


def _read_features(settings: Settings) -> dict[str, Any]:
    scale: QueryScaleConfig | None = None
    if settings.flag("attn_temperature_tuning", True):
        strength = _STRENGTH
        if "attn_scale" in settings.values:
            strength = settings.number("attn_scale", 0, _MAX_STRENGTH)
        floor = _read_integer(settings, "floor_scale", 1, Limits.context, _FLOOR)
        scale = QueryScaleConfig(strength, floor)
    norm = "bare" if settings.flag("use_qk_norm", True) else None
    return {"query_scale": scale, "qk_norm": norm}


def _write_features(config: ModelConfig) -> dict[str, Any]:
    scale = config.query_scale or QueryScaleConfig(_STRENGTH, _FLOOR)
    return {
        "attn_temperature_tuning": config.query_scale is not None,
        "attn_scale": scale.strength,
        "floor_scale": scale.floor,
        "use_qk_norm": config.qk_norm is not None,
    }


def _read_experts(settings: Settings) -> dict[str, Any]:
    size = settings.integer("moe_intermediate_size", 1, Limits.width)
    experts = ExpertsConfig(
        count=_read_integer(settings, "num_local_experts", 1, Limits.experts, _EXPERTS_COUNT),
        size=size,
        per_token=_read_integer(settings, "num_experts_per_tok", 1, Limits.experts, 1),
        shared_size=size,
        normalized=False,
        scores="sigmoid",
        weighted_inputs=True,
    )
    return {"experts": experts}


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    return {
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
        "intermediate_size": config.experts.size,
        "intermediate_size_mlp": config.intermediate_size,
    }


# What llama.cpp computes whatever a file states, but for the norms of queries and keys, which it
# leaves out in models with so many experts.
_GGUF_QUERY_SCALE = QueryScaleConfig(_STRENGTH, _FLOOR)
_GGUF_EXPERTS_WITHOUT_NORM = 128
_GGUF_STEP = "interleave_moe_layer_step"


def _find_step(config: ModelConfig) -> int | None:
    """Find the interval of layers with experts; None if they have none."""
    sparse = [layer.experts for layer in config.layers]
    for step in range(1, config.num_layers + 1):
        if sparse == [(layer + 1) % step == 0 for layer in range(config.num_layers)]:
            return step
    return None


def _has_gguf_layers(config: ModelConfig) -> bool:
    """Return whether all but every fourth layer have chunks of 8192 and rotary positions."""
    for number, layer in enumerate(config.layers):
        is_chunked = (number + 1) % _INTERVAL != 0
        if layer.rotary != is_chunked or layer.chunk != (_CHUNK if is_chunked else None):
            return False
    return True


def _has_gguf_norms(config: ModelConfig) -> bool:
    assert config.experts is not None
    return (config.qk_norm is None) == (config.experts.count == _GGUF_EXPERTS_WITHOUT_NORM)


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    count = gguf.integer("expert_count", 1, Limits.experts)
    return {
        "intermediate_size": gguf.integer(EXPERT_KEYS[2], 1, Limits.width),
        "intermediate_size_mlp": gguf.integer("feed_forward_length", 1, Limits.width),
        "num_local_experts": count,
        "interleave_moe_layer_step": gguf.integer(_GGUF_STEP, 1, Limits.layers),
        "use_qk_norm": count != _GGUF_EXPERTS_WITHOUT_NORM,
        # As if every layer had all positions; those of Llama 4 follow from its defaults.
        "layer_types": None,
    }


_LLAMA4_GGUF = GgufArchitecture(
    "llama4",
    keys=(*EXPERT_KEYS, _GGUF_STEP),
    interleaved_rotary=True,
    rope_freqs=True,
    normalized=False,
    dense_layers=True,
    uneven=True,
    read=_read_gguf,
    write=lambda config: {_GGUF_STEP: _find_step(config)},
    refused={
        f"chunks other than {_CHUNK} in all but every fourth layer": lambda config: (
            not _has_gguf_layers(config)
        ),
        "other scales of queries": lambda config: config.query_scale != _GGUF_QUERY_SCALE,
        f"norms of queries with {_GGUF_EXPERTS_WITHOUT_NORM} experts, or none otherwise,": (
            lambda config: not _has_gguf_norms(config)
        ),
        "experts at irregular intervals": lambda config: _find_step(config) is None,
    },
)


_FEED_FORWARD = BLOCK + "feed_forward."
_EXPERTS = _FEED_FORWARD + "experts."
LLAMA4 = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    (
        keys.ATTENTION_BIAS,
        Keys(_read_layers, _write_layers),
        Keys(_read_features, _write_features),
        Keys(_read_experts, _write_experts),
    ),
    options={"default_theta": 5e5, "head_dim": _HEAD_DIM, "qk_norm_after_rotary": True},
    prepare=_prepare,
    names={
        "mlp.gate": _FEED_FORWARD + "gate_proj",
        "mlp.up": _FEED_FORWARD + "up_proj",
        "mlp.down": _FEED_FORWARD + "down_proj",
        "router": _FEED_FORWARD + "router",
        "shared_expert.gate": _FEED_FORWARD + "shared_expert.gate_proj",
        "shared_expert.up": _FEED_FORWARD + "shared_expert.up_proj",
        "shared_expert.down": _FEED_FORWARD + "shared_expert.down_proj",
        "expert.gate": _EXPERTS + "{expert}.gate_proj",
        "expert.up": _EXPERTS + "{expert}.up_proj",
        "expert.down": _EXPERTS + "{expert}.down_proj",
    },
    in_mlx=False,
    stacked=(
        StackedExperts(_EXPERTS + "gate_up_proj", ("expert.gate", "expert.up"), transposed=True),
        StackedExperts(_EXPERTS + "down_proj", ("expert.down",), transposed=True),
    ),
    loads_split_experts=True,
    interleaved_rotary=True,
    gguf=_LLAMA4_GGUF,
)
