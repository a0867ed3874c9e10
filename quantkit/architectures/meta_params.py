"""Meta's ``params.json``: read into a `ModelConfig`, and written from one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quantkit.architectures.config import LayerConfig, Limits, ModelConfig
from quantkit.architectures.rope import MAX_THETA, MIN_THETA, SCALE, RopeConfig
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError

_KNOWN = {
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "hidden_dim",
    "vocab_size",
    "multiple_of",
    "ffn_dim_multiplier",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
    "rope_scaling_factor",
    "max_seq_len",
    "max_batch_size",
    "model_parallel_size",
}
# Llama 3.1 scales by 8; Llama 3.2's text models (1B and 3B) by 32. Their params.json
# states neither, but the widths differ: 3.1 starts at 4096.
_LLAMA_31_MIN_WIDTH = 4096
_SCALED_ROPE_ORIGINAL_CONTEXT = 8192

_BIASES = "attention or MLP biases"
_NOT_IN_META = {
    "qkv_bias": _BIASES,
    "output_bias": _BIASES,
    "mlp_bias": _BIASES,
    "qk_norm": "q/k norms",
    "window": "sliding-window attention",
    "rotary": "layers without rotary positions",
    "norms": "norms in other places than before attention and feed-forward",
    "sinks": "attention sinks",
}
"""Descriptions of features whose names are not clear."""


def config_from_meta(
    params: Mapping[str, Any],
    path: object,
    *,
    vocab_size: int,
    intermediate_size: int,
    tied_embeddings: bool,
    dtype: str,
) -> ModelConfig:
    """Read Meta's params.json; vocabulary and feed-forward width come from the tensors.

    ``vocab_size`` in the file may be -1 (Llama 2), and the feed-forward width is only given by a
    formula, so both come from the shapes.

    Raises:
        CheckpointError: if a key is missing or contradicts the tensors.
        UnsupportedError: for unknown keys.
    """
    settings = Settings(params, path)
    path_text = settings.path
    if "hidden_size" in params or "model_type" in params:
        raise CheckpointError(
            "contains Hugging Face keys",
            path=path_text,
            found="'hidden_size'",
            expected="Meta's 'dim'",
            hint="a config.json renamed to params.json? rename it back",
        )
    for key in ("quantization_args", "lora_args"):
        if params.get(key):
            raise UnsupportedError(f"the checkpoint is quantized already ({key})", path=path_text)
    if "moe" in params or "vision_chunk_size" in params:
        raise UnsupportedError(
            "mixture-of-experts and vision models are not supported", path=path_text
        )
    # Unknown keys are refused, because each may change what the model computes.
    unknown = sorted(set(params) - _KNOWN - {"quantization_args", "lora_args"})
    if unknown:
        raise UnsupportedError("unknown keys", path=path_text, found=format_value(unknown))
    if settings.has("vocab_size"):
        listed_vocab_size = settings.integer("vocab_size", -1, Limits.width)
    else:
        listed_vocab_size = -1
    if listed_vocab_size not in (-1, vocab_size):
        raise CheckpointError(
            "vocab_size disagrees with the embedding",
            path=path_text,
            found=listed_vocab_size,
            expected=vocab_size,
        )
    heads = settings.integer("n_heads", 1, Limits.heads)
    dim = settings.integer("dim", 1, Limits.width)
    layers = settings.integer("n_layers", 1, Limits.layers)
    norm_eps = settings.number("norm_eps", *Limits.eps)
    rope = _rope(settings, dim)
    context = _family_context(rope, norm_eps)
    if settings.has("max_seq_len"):
        context = settings.integer("max_seq_len", 1, Limits.context)
    # Llama 2's smaller models do not state the number of KV heads: they have as many as heads.
    if settings.has("n_kv_heads"):
        kv_heads = settings.integer("n_kv_heads", 1, Limits.heads)
    else:
        kv_heads = heads
    if settings.has("head_dim"):
        head_dim = settings.integer("head_dim", 1, Limits.heads)
    else:
        head_dim = dim // heads
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=intermediate_size,
        layers=(LayerConfig(),) * layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=norm_eps,
        rope=rope,
        max_context=context,
        tied_embeddings=tied_embeddings,
        dtype=dtype,
        bos_token_id=None,
        eos_token_ids=(),
    ).validate(path)


def config_to_meta(config: ModelConfig) -> dict[str, Any]:
    """Write Meta's params.json for a model; raises `UnsupportedError` if the model has features, a
    head size or a rope scaling that Meta's format cannot state.
    """
    rope = config.rope
    # Several features have the same description, which a dict keeps once.
    lost: dict[str, None] = {}
    for feature in sorted(config.features):
        lost[_NOT_IN_META.get(feature, feature.replace("_", " "))] = None
    if config.head_dim * config.num_heads != config.hidden_size:
        lost["a head size other than dim / n_heads"] = None
    if rope.rotary_dim is not None:
        lost["partial rotary positions"] = None
    if rope.query_scaling_beta is not None:
        lost["queries scaled by position"] = None
    if not _has_meta_scaling(rope):
        lost[f"{rope.type} rope scaling"] = None
    if lost:
        raise UnsupportedError(
            f"Meta's format does not support {', '.join(lost)}", hint="convert to 'hf' instead"
        )
    multiple_of, multiplier = _ffn_formula(config.hidden_size, config.intermediate_size)
    params: dict[str, Any] = {
        "dim": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": multiple_of,
        "norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
    }
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    if rope.type == "llama3":
        params["use_scaled_rope"] = True
        params["rope_scaling_factor"] = rope.factor
    if _family_context(rope, config.norm_eps) != config.max_context:
        # Only if needed: Meta's own code passes it separately.
        params["max_seq_len"] = config.max_context
    return params


def find_assumed_rope_factor(params: Mapping[str, Any], config: ModelConfig) -> float | None:
    """Find the Llama 3 rope factor that had to be assumed; None if the file states it."""
    if config.rope.type != "llama3" or params.get("rope_scaling_factor") is not None:
        return None
    return config.rope.factor


def _has_meta_scaling(rope: RopeConfig) -> bool:
    """Return whether Meta's code scales rotary positions in the same way."""
    if rope.type == "llama3":
        blend = (rope.low_freq_factor, rope.high_freq_factor, rope.original_context)
        # Constants of Meta's code, which params.json does not state.
        return blend == (1.0, 4.0, _SCALED_ROPE_ORIGINAL_CONTEXT)
    return rope.type == "default"


def _rope(settings: Settings, dim: int) -> RopeConfig:
    if settings.has("rope_theta"):
        theta = settings.number("rope_theta", MIN_THETA, MAX_THETA)
    else:
        theta = 10000.0
    if not settings.flag("use_scaled_rope", False):
        return RopeConfig(theta=theta)
    key = "rope_scaling_factor"
    if settings.has(key):
        factor = settings.number(key, *SCALE)
    elif dim >= _LLAMA_31_MIN_WIDTH:
        factor = 8.0
    else:
        factor = 32.0
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=_SCALED_ROPE_ORIGINAL_CONTEXT,
    )


def _family_context(rope: RopeConfig, norm_eps: float) -> int:
    """Infer the training context in tokens from the family, because params.json rarely states
    it.
    """
    # Llama 3.1 and 3.2.
    if rope.type == "llama3":
        return 131072
    # Llama 3.
    if rope.theta == 500000.0:
        return 8192
    # Code Llama.
    if rope.theta == 1000000.0:
        return 16384
    # Llama 1; Llama 2 has 1e-5.
    if norm_eps == 1e-6:
        return 2048
    return 4096


def _ffn_hidden(dim: int, multiple_of: int, multiplier: float | None) -> int:
    # Meta's code: with three matrices instead of two, 2/3 of 4 * dim keeps the parameter count.
    hidden = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * math.ceil(hidden / multiple_of)


def _ffn_formula(dim: int, hidden: int) -> tuple[int, float | None]:
    """Find ``multiple_of`` and ``ffn_dim_multiplier`` with which Meta's formula gives `hidden`."""
    powers = [1 << exponent for exponent in range(12, -1, -1)]
    # Meta's usual value comes first, and no multiplier is simpler than one.
    for multiple_of in (256, *powers):
        if _ffn_hidden(dim, multiple_of, None) == hidden:
            return multiple_of, None
    for multiple_of in (256, *powers):
        for tenths in range(1, 100):
            if _ffn_hidden(dim, multiple_of, tenths / 10) == hidden:
                return multiple_of, tenths / 10
    # A multiplier half a unit above the target survives the truncation to int.
    return 1, (hidden + 0.5) / int(2 * (4 * dim) / 3)
