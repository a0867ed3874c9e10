"""Rotary positions in GGUF files: keys, and tensors of factors that divide the frequency of each
pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families.family import (
    QUERY_SCALE,
    WINDOWED_BASE,
    YARN_BETAS,
    YARN_LOG_MULTIPLIER,
    YARN_TRUNCATE,
    GgufArchitecture,
)
from quantkit.architectures.rope import (
    DEFAULT_THETA,
    MAX_BETA,
    MAX_THETA,
    MIN_THETA,
    SCALE,
    RopeConfig,
)
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.gguf.names import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, gguf_architecture

KEYS = (
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    *YARN_BETAS,
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
)
# Low and high frequency factor and original context of all that is published.
_LLAMA3 = (1.0, 4.0, 8192)
# In place of a width of zero between both factors.
_NO_WIDTH = 1e-30
# Of YaRN in llama.cpp, for all but a few architectures.
_BETAS = (32.0, 1.0)
# Factors, and the frequencies behind them, are rounded to float32.
_CLOSE = 1e-5


def write_rope(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    """Write the keys of a model's rotary positions, without the architecture's name.

    Raises:
        UnsupportedError: for what llama.cpp does not compute.
    """
    rope = config.rope
    if architecture.read_ropes is not None:
        return {}
    keys: dict[str, Any] = {
        "rope.dimension_count": rope.rotary_dim or config.head_dim,
        "rope.freq_base": float(rope.theta),
    }
    if rope.rotary_dim is not None and not architecture.partial_rotary:
        raise _make_unsupported_error(architecture, "partial rotary embedding", rope.rotary_dim)
    if rope.query_scaling_beta is not None:
        if QUERY_SCALE not in architecture.keys:
            raise _make_unsupported_error(
                architecture, "queries scaled by position", rope.query_scaling_beta
            )
        keys[QUERY_SCALE] = float(rope.query_scaling_beta)
    has_windows = any(window is not None for window in config.windows)
    if has_windows and WINDOWED_BASE in architecture.keys:
        # llama.cpp scales only the positions of layers without a window.
        windowed = config.window_rope or rope
        if windowed.type != "default":
            raise _make_unsupported_error(
                architecture, "rope scaling of sliding-window layers", windowed.type
            )
        if architecture.one_rotary_base and windowed.theta != rope.theta:
            raise _make_unsupported_error(
                architecture, "a separate rotary base for sliding-window layers", windowed.theta
            )
        keys[WINDOWED_BASE] = float(windowed.theta)
    # The scale of queries depends on this length too, whatever the type of the scaling.
    if rope.original_context is not None:
        keys["rope.scaling.original_context_length"] = rope.original_context
    if rope.type == "default":
        return keys
    if rope.type == "linear":
        return {**keys, "rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    if rope.type == "yarn":
        return {**keys, **_write_yarn(rope, architecture)}
    # llama.cpp has no type for Llama 3's scaling: a tensor has its factors.
    if rope.type == "llama3" and architecture.rope_freqs:
        return keys
    if rope.type == "longrope" and architecture.long_rope:
        if rope.attention_factor is not None:
            scale = rope.attention_factor
        else:
            scale = _long_scale(rope)
        return {**keys, "rope.scaling.type": "longrope", "rope.scaling.attn_factor": float(scale)}
    raise _make_unsupported_error(architecture, f"{rope.type} rope scaling", rope.type)


def compute_rope_factors(config: ModelConfig) -> dict[str, tuple[float, ...]]:
    """Compute the tensors, float32, of factors that divide the frequency of each pair.

    Raises:
        UnsupportedError: see `gguf_architecture`.
    """
    architecture = gguf_architecture(config)
    if architecture.list_rope_factors is not None:
        return {ROPE_FREQS: architecture.list_rope_factors(config)}
    rope = config.rope
    long_factor = rope.long_factor
    short_factor = rope.short_factor
    if rope.type == "longrope" and architecture.long_rope and long_factor and short_factor:
        return {ROPE_LONG: long_factor, ROPE_SHORT: short_factor}
    if rope.type == "llama3":
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        if low and high and rope.original_context:
            dim = rope.rotary_dim or config.head_dim
            factors = _llama3_factors(
                rope.theta, dim, rope.factor, low, high, rope.original_context
            )
            return {ROPE_FREQS: factors}
    return {}


def read_rope(
    keys: Settings,
    architecture: GgufArchitecture,
    factors: Mapping[str, Sequence[float]],
    head_dim: int,
    context: int,
) -> dict[str, Any]:
    """Translate the rotary positions of a file, and its tensors among `compute_rope_factors`, to
    keys of a config.json.

    Raises:
        CheckpointError: for values of the wrong type, or that contradict each other.
        UnsupportedError: for what quantkit or the architecture does not compute.
    """
    if architecture.read_ropes is not None:
        return architecture.read_ropes(keys, factors.get(ROPE_FREQS, ()))
    if keys.has("rope.freq_base"):
        theta = keys.number("rope.freq_base", MIN_THETA, MAX_THETA)
    else:
        theta = DEFAULT_THETA
    count_key = "rope.dimension_count"
    if keys.has(count_key):
        rotated = keys.integer(count_key, 2, Limits.heads)
    else:
        rotated = head_dim
    if rotated > head_dim or (rotated != head_dim and not architecture.partial_rotary):
        raise CheckpointError(
            f"{architecture.name}.{count_key} does not match the head size",
            path=keys.path,
            found=rotated,
            expected=head_dim,
        )
    for name, values in factors.items():
        in_range = all(SCALE[0] <= value <= SCALE[1] for value in values)
        if len(values) != rotated // 2 or not in_range:
            raise CheckpointError(
                f"tensor '{name}' does not match the head size",
                path=keys.path,
                found=format_value(list(values)),
                expected=f"{rotated // 2} factors from {SCALE[0]:g} to {SCALE[1]:g}",
            )
    original_key = "rope.scaling.original_context_length"
    original = None
    if keys.has(original_key):
        original = keys.integer(original_key, 1, Limits.context)
    scaling = _scaling(keys, architecture, original or context)
    # Factors of one change nothing.
    if any(factor != 1 for factor in factors.get(ROPE_FREQS, ())):
        _require(architecture.rope_freqs and scaling is None, architecture, ROPE_FREQS, keys)
        scaling = _of_factors(factors[ROPE_FREQS], theta, rotated, original, context)
    if ROPE_LONG in factors or ROPE_SHORT in factors:
        _require(architecture.long_rope and scaling is None, architecture, ROPE_LONG, keys)
        scaling = _long_rope(keys, factors, original or context, context)
    elif keys.has("rope.scaling.attn_factor"):
        _require(
            keys.number("rope.scaling.attn_factor", *SCALE) == 1,
            architecture,
            "rope.scaling.attn_factor",
            keys,
        )
    # Stated, because some families scale positions if a config.json does not say how.
    scaling = scaling or {"rope_type": "default"}
    if QUERY_SCALE in architecture.keys:
        # transformers requires both keys of such models; a scale of 0 changes nothing.
        scaling["llama_4_scaling_beta"] = 0.0
        scaling["original_max_position_embeddings"] = original or context
        if keys.has(QUERY_SCALE):
            scaling["llama_4_scaling_beta"] = keys.number(QUERY_SCALE, 0, MAX_BETA)
    config_keys: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if architecture.partial_rotary:
        # Also if all of a head is rotated, which is not the default of every family; some read it
        # at one place, some at the other.
        config_keys["partial_rotary_factor"] = rotated / head_dim
        scaling["partial_rotary_factor"] = rotated / head_dim
    if scaling["rope_type"] == "longrope":
        # Phi-3's config.json has it outside the scaling.
        original_context = scaling["original_max_position_embeddings"]
        config_keys["original_max_position_embeddings"] = original_context
    return config_keys


def _write_yarn(rope: RopeConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    """Write the keys of YaRN; raises `UnsupportedError` for settings with which llama.cpp computes
    something else.
    """
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope.factor),
    }
    refused: dict[str, object] = {"attention_factor": rope.attention_factor}
    betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    for key, default, (name, beta) in zip(YARN_BETAS, _BETAS, betas.items(), strict=True):
        # llama.cpp's converter writes them for all architectures, but few of its loaders read them.
        if beta is not None and beta != default and key not in architecture.keys:
            refused[name] = beta
        elif beta is not None:
            keys[key] = float(beta)
    if YARN_LOG_MULTIPLIER in architecture.keys and rope.mscale == 1 and rope.mscale_all_dim:
        keys[YARN_LOG_MULTIPLIER] = float(rope.mscale_all_dim)
    else:
        refused |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if YARN_TRUNCATE in architecture.keys:
        keys[YARN_TRUNCATE] = rope.truncate
    elif not rope.truncate:
        refused["truncate"] = rope.truncate
    for name, value in refused.items():
        if value is not None:
            raise _make_unsupported_error(architecture, f"{name} of yarn rope scaling", value)
    return keys


def _scaling(
    keys: Settings, architecture: GgufArchitecture, original: int
) -> dict[str, Any] | None:
    """Read the scaling that the keys state; LongRoPE is stated by tensors."""
    # llama.cpp reads the older key if the first is absent.
    if keys.has("rope.scaling.factor"):
        factor_key = "rope.scaling.factor"
    else:
        factor_key = "rope.scale_linear"
    factor = 0.0
    if keys.has(factor_key):
        factor = keys.number(factor_key, 0, SCALE[1])
    kind = "linear"
    if keys.has("rope.scaling.type"):
        kind = keys.string("rope.scaling.type")
    # Values other than these change what YaRN computes.
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if keys.has(key) and keys.number(key, -1, SCALE[1]) not in (1, -1):
            raise UnsupportedError(
                f"{keys.name}.{key} is not supported", path=keys.path, found=keys.values[key]
            )
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedError(
            "rope type is not supported", path=keys.path, found=format_value(kind)
        )
    if kind in ("none", "longrope") or factor in (0, 1):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for name, key in zip(("beta_fast", "beta_slow"), YARN_BETAS, strict=True):
        if keys.has(key):
            scaling[name] = keys.number(key, *SCALE)
    # llama.cpp divides the scale of attention by that of this multiplier, unless it is 0.
    if keys.has(YARN_LOG_MULTIPLIER):
        multiplier = keys.number(YARN_LOG_MULTIPLIER, 0, SCALE[1])
        if multiplier:
            scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if YARN_TRUNCATE in architecture.keys:
        # The published models of these architectures do not round, and no key of llama.cpp says so.
        scaling["truncate"] = keys.flag(YARN_TRUNCATE, False)
    return scaling


def _long_rope(
    keys: Settings, factors: Mapping[str, Sequence[float]], original: int, context: int
) -> dict[str, Any]:
    if ROPE_LONG not in factors or ROPE_SHORT not in factors:
        raise CheckpointError(f"has only one of {ROPE_LONG} and {ROPE_SHORT}", path=keys.path)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": list(factors[ROPE_SHORT]),
        "long_factor": list(factors[ROPE_LONG]),
        "original_max_position_embeddings": original,
    }
    key = "rope.scaling.attn_factor"
    attention_factor = 1.0
    if keys.has(key):
        attention_factor = keys.number(key, *SCALE)
    # A config.json without the key means the default, so the result equals the original config.
    default_rope = RopeConfig(type="longrope", factor=context / original, original_context=original)
    if math.isclose(attention_factor, _long_scale(default_rope), rel_tol=_CLOSE):
        return scaling
    return {**scaling, "attention_factor": attention_factor}


def _long_scale(rope: RopeConfig) -> float:
    """Compute LongRoPE's default attention factor."""
    if rope.factor <= 1 or rope.original_context is None or rope.original_context < 2:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))


def _of_factors(
    factors: Sequence[float], theta: float, dim: int, original: int | None, context: int
) -> dict[str, Any]:
    """Find Llama 3's scaling with these factors, up to float32; otherwise LongRoPE's, which lists
    each factor.
    """
    # Llama 3 divides the lowest frequencies by its whole factor.
    slowest = max(factors)
    low, high, usual_length = _LLAMA3
    candidates = [
        (low, high, original or usual_length),
        (low, high, usual_length),
        # Llama 4's.
        (low, low, original or usual_length),
        (low, low, usual_length),
        *_fit_llama3_settings(factors, theta, dim, original),
    ]
    for low, high, length in candidates:
        computed = _llama3_factors(theta, dim, slowest, low, high, length)
        pairs = zip(factors, computed, strict=True)
        if all(math.isclose(*pair, rel_tol=_CLOSE) for pair in pairs):
            return {
                "rope_type": "llama3",
                "factor": slowest,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    return {
        "rope_type": "longrope",
        "short_factor": list(factors),
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _llama3_factors(
    theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> tuple[float, ...]:
    factors = []
    # Without a width there is nothing to blend: each frequency is divided or kept.
    width = (high - low) or _NO_WIDTH
    for pair in range(dim // 2):
        # Rotations within the trained context.
        turns = original * theta ** (-2 * pair / dim) / (2 * math.pi)
        # 0 divides the frequency by the whole factor, 1 keeps it.
        blend = min(max((turns - low) / width, 0.0), 1.0)
        factors.append(1 / ((1 - blend) / factor + blend))
    return tuple(factors)


def _fit_llama3_settings(
    factors: Sequence[float], theta: float, dim: int, original: int | None
) -> list[tuple[float, float, int]]:
    """Solve for the settings that follow from the blend of two factors, if two are blended."""
    slowest = max(factors)
    blends = []
    for pair, factor in enumerate(factors):
        if 1 < factor < slowest:
            frequency = theta ** (-2 * pair / dim)
            # Solves 1 / factor = (1 - blend) / slowest + blend.
            blend = (1 / factor - 1 / slowest) / (1 - 1 / slowest)
            blends.append((frequency, blend))
    if len(blends) < 2:
        return []
    # The blend is linear in the frequency:
    # length / (2 pi) * frequency = low + blend * (high - low).
    # The pairs that are farthest apart have the smallest error of rounding.
    frequency1, blend1 = blends[0]
    frequency2, blend2 = blends[-1]
    slope = (blend1 - blend2) / (frequency1 - frequency2)
    # Equals -low / (high - low).
    intercept = blend1 - slope * frequency1
    # Of the high frequency factor to the low one.
    if intercept != 0:
        ratio = 1 - 1 / intercept
    else:
        ratio = 0.0
    if ratio <= 1:
        return []
    length = original or _LLAMA3[2]
    # The slope is length / (2 pi (high - low)).
    low = length / (2 * math.pi * slope * (ratio - 1))
    if low > 0:
        return [(round(low, 6), round(low * ratio, 6), length)]
    return []


def _require(holds: bool, architecture: GgufArchitecture, setting: str, keys: Settings) -> None:
    if not holds:
        raise UnsupportedError(
            f"has a rotary setting that {architecture.name} models do not support",
            path=keys.path,
            found=f"'{setting}'",
        )


def _make_unsupported_error(
    architecture: GgufArchitecture, feature: str, value: object
) -> UnsupportedError:
    return UnsupportedError(
        f"llama.cpp does not support {feature} in {architecture.name} models", found=value
    )
