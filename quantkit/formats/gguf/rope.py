"""Rotary positions in GGUF files: keys, and tensors of factors that divide the frequency of each
pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families.family import WINDOWED_BASE, GgufArchitecture
from quantkit.architectures.rope import DEFAULT_THETA, MAX_THETA, MIN_THETA, SCALE, RopeConfig
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
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
)
# Low and high frequency factor and original context of all that is published.
_LLAMA3 = (
    1.0,
    4.0,
    8192,
)
_BETAS = (32.0, 1.0)  # of YaRN in llama.cpp, for all but a few architectures
# Factors, and the frequencies behind them, are rounded to float32.
_CLOSE = 1e-5


def write_rope(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    """Return the keys of a model's rotary positions, without the architecture's name; raises
    `UnsupportedError` for what llama.cpp does not compute.
    """
    rope = config.rope
    result: dict[str, Any] = {
        "rope.dimension_count": rope.rotary_dim or config.head_dim,
        "rope.freq_base": float(rope.theta),
    }
    if rope.rotary_dim is not None and not architecture.partial_rotary:
        raise _make_unsupported_error(architecture, "partial rotary embedding", rope.rotary_dim)
    if rope.query_scaling_beta is not None:
        raise _make_unsupported_error(
            architecture, "queries scaled by position", rope.query_scaling_beta
        )
    if any(window is not None for window in config.windows) and WINDOWED_BASE in architecture.keys:
        windowed = config.window_rope or rope
        if windowed.type != "default":
            raise _make_unsupported_error(
                architecture, "rope scaling of layers with a window", windowed.type
            )
        if architecture.one_rotary_base and windowed.theta != rope.theta:
            raise _make_unsupported_error(
                architecture, "another rotary base of layers with a window", windowed.theta
            )
        result[WINDOWED_BASE] = float(windowed.theta)
    if rope.type == "default":
        return result
    if rope.original_context is not None:
        result["rope.scaling.original_context_length"] = rope.original_context
    if rope.type == "linear":
        return {**result, "rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    if rope.type == "yarn":
        _require_plain_yarn(rope, architecture)
        return {**result, "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope.factor)}
    if rope.type == "llama3" and architecture.rope_freqs:
        return result
    if rope.type == "longrope" and architecture.long_rope:
        if rope.attention_factor is not None:
            scale = rope.attention_factor
        else:
            scale = _long_scale(rope)
        return {**result, "rope.scaling.type": "longrope", "rope.scaling.attn_factor": float(scale)}
    raise _make_unsupported_error(architecture, f"{rope.type} rope scaling", rope.type)


def rope_tensors(config: ModelConfig) -> dict[str, tuple[float, ...]]:
    """Return the tensors, float32, of factors that divide the frequency of each pair. Raises
    `UnsupportedError`, see `gguf_architecture`.
    """
    architecture = gguf_architecture(config)
    rope = config.rope
    if (
        rope.type == "longrope"
        and architecture.long_rope
        and rope.long_factor
        and rope.short_factor
    ):
        return {ROPE_LONG: rope.long_factor, ROPE_SHORT: rope.short_factor}
    if (
        rope.type == "llama3"
        and rope.low_freq_factor
        and rope.high_freq_factor
        and rope.original_context
    ):
        blend = rope.low_freq_factor, rope.high_freq_factor, rope.original_context
        return {
            ROPE_FREQS: _llama3_factors(
                rope.theta, rope.rotary_dim or config.head_dim, rope.factor, *blend
            )
        }
    return {}


def read_rope(
    keys: Settings,
    architecture: GgufArchitecture,
    factors: Mapping[str, Sequence[float]],
    head_dim: int,
    context: int,
) -> dict[str, Any]:
    """Return the keys of a config.json for the rotary positions of a file, and of its tensors among
    `rope_tensors`.

    Raises:
        CheckpointError: for values of the wrong type, or that contradict each other.
        UnsupportedError: for what quantkit or the architecture does not compute.
    """
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
            f"{architecture.name}.{count_key} does not fit the heads",
            path=keys.path,
            found=rotated,
            expected=head_dim,
        )
    for name, values in factors.items():
        if len(values) != rotated // 2 or not all(
            SCALE[0] <= value <= SCALE[1] for value in values
        ):
            raise CheckpointError(
                f"tensor '{name}' does not fit the heads",
                path=keys.path,
                found=format_value(list(values)),
                expected=f"{rotated // 2} factors from {SCALE[0]:g} to {SCALE[1]:g}",
            )
    original_key = "rope.scaling.original_context_length"
    if keys.has(original_key):
        original = keys.integer(original_key, 1, Limits.context)
    else:
        original = None
    scaling = _scaling(keys, original or context)
    if ROPE_FREQS in factors and any(value != 1 for value in factors[ROPE_FREQS]):
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
    result: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if rotated != head_dim:
        result["partial_rotary_factor"] = rotated / head_dim
    if scaling is not None and scaling["rope_type"] == "longrope":
        result["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return result


def _require_plain_yarn(rope: RopeConfig, architecture: GgufArchitecture) -> None:
    stated = {
        "attention_factor": rope.attention_factor,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "truncate": None if rope.truncate else False,
        "beta_fast": None if rope.beta_fast == _BETAS[0] else rope.beta_fast,
        "beta_slow": None if rope.beta_slow == _BETAS[1] else rope.beta_slow,
    }
    for name, value in stated.items():
        if value is not None:
            raise _make_unsupported_error(architecture, f"{name} of yarn rope scaling", value)


def _scaling(keys: Settings, original: int) -> dict[str, Any] | None:
    """Return the scaling that the keys state; LongRoPE is stated by tensors."""
    if keys.has("rope.scaling.factor"):
        factor_key = "rope.scaling.factor"
    else:
        factor_key = "rope.scale_linear"
    if keys.has(factor_key):
        factor = keys.number(factor_key, 0, SCALE[1])
    else:
        factor = 0.0
    if keys.has("rope.scaling.type"):
        kind = keys.string("rope.scaling.type")
    else:
        kind = "linear"
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
    betas = {}
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            betas[name] = keys.number(f"rope.scaling.yarn_{name}", *SCALE)
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        **betas,
    }


def _long_rope(
    keys: Settings, factors: Mapping[str, Sequence[float]], original: int, context: int
) -> dict[str, Any]:
    if ROPE_LONG not in factors or ROPE_SHORT not in factors:
        raise CheckpointError(f"has only one of {ROPE_LONG} and {ROPE_SHORT}", path=keys.path)
    result: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": list(factors[ROPE_SHORT]),
        "long_factor": list(factors[ROPE_LONG]),
        "original_max_position_embeddings": original,
    }
    key = "rope.scaling.attn_factor"
    if keys.has(key):
        stated = keys.number(key, *SCALE)
    else:
        stated = 1.0
    usual = _long_scale(
        RopeConfig(type="longrope", factor=context / original, original_context=original)
    )
    if math.isclose(stated, usual, rel_tol=_CLOSE):
        return result
    return {**result, "attention_factor": stated}


def _long_scale(rope: RopeConfig) -> float:
    """LongRoPE's default attention factor."""
    if rope.factor <= 1 or rope.original_context is None or rope.original_context < 2:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))


def _of_factors(
    factors: Sequence[float], theta: float, dim: int, original: int | None, context: int
) -> dict[str, Any]:
    """Llama 3's scaling with these factors, up to float32; otherwise LongRoPE's, which lists
    each factor.
    """
    slowest = max(factors)
    low, high, usual = _LLAMA3
    tried = [
        (low, high, original or usual),
        (low, high, usual),
        *_fit_llama3_settings(factors, theta, dim, original),
    ]
    for low, high, length in tried:
        computed = _llama3_factors(theta, dim, slowest, low, high, length)
        if all(math.isclose(*pair, rel_tol=_CLOSE) for pair in zip(factors, computed, strict=True)):
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
    found = []
    for pair in range(dim // 2):
        # Rotations within the trained context.
        turns = original * theta ** (-2 * pair / dim) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - blend) / factor + blend))
    return tuple(found)


def _fit_llama3_settings(
    factors: Sequence[float], theta: float, dim: int, original: int | None
) -> list[tuple[float, float, int]]:
    """Return the settings that follow from the blend of two factors, if two are blended."""
    slowest = max(factors)
    blends = []
    for pair, factor in enumerate(factors):
        if 1 < factor < slowest:
            blends.append(
                (theta ** (-2 * pair / dim), (1 / factor - 1 / slowest) / (1 - 1 / slowest))
            )
    if len(blends) < 2:
        return []
    (x1, y1), (x2, y2) = blends[0], blends[-1]
    rise = (y1 - y2) / (x1 - x2)
    # of the high frequency factor to the low one
    if y1 != rise * x1:
        ratio = 1 - 1 / (y1 - rise * x1)
    else:
        ratio = 0.0
    if ratio <= 1:
        return []
    length = original or _LLAMA3[2]
    low = length / (2 * math.pi * rise * (ratio - 1))
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
        f"llama.cpp does not compute {feature} of {architecture.name} models", found=value
    )
