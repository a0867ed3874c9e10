"""A model's config from the metadata of a GGUF file.

A file has numbers as float32: they are read as the shortest decimals that they are, 1e-05 and not 9.99999975e-06.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quantkit.architectures.config import (
    MAX_CONTEXT,
    MAX_EPS,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    MIN_EPS,
    ModelConfig,
)
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.families.gguf_architecture import WINDOWED_BASE, GgufArchitecture
from quantkit.architectures.gguf import sharing_families
from quantkit.architectures.gguf_rope import KEYS as ROPE_KEYS
from quantkit.architectures.gguf_rope import read_rope
from quantkit.architectures.rope import DEFAULT_THETA, FULL, MAX_THETA, MIN_THETA, SLIDING
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.json_values import Settings, shortest, shown

MODEL_TYPE, EOS_IDS = "quantkit.model_type", "quantkit.eos_token_ids"
"""Keys of our own: which of an architecture's families a model is of, and all tokens that end a text."""
_KEYS = frozenset({
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.sliding_window_pattern",
    "tensor_data_layout", *ROPE_KEYS,
})  # fmt: skip
EPS, WINDOW, PATTERN = (
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
)
_SOFTMAX = 1


def config_of(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Sequence[float]],
    path: object,
    *,
    tied: bool,
    dtype: str,
) -> ModelConfig:
    """The model that a file says it is.

    Args:
        shapes: of its tensors, by name, rows first.
        factors: the values of those that `rope_tensors` gives.
        tied: whether its head is the embedding.
        dtype: its float type.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an architecture or a setting that is not read.
    """
    architecture = _architecture(metadata, path)
    keys = _own_keys(metadata, architecture, path)
    layers = keys.whole("block_count", 1, MAX_LAYERS)
    heads = _one(keys, "attention.head_count", MAX_HEADS)
    hidden, context = keys.whole("embedding_length", 1, MAX_WIDTH), keys.whole("context_length", 1, MAX_CONTEXT)
    head_dim = keys.whole("attention.key_length", 1, MAX_HEADS) if keys.has("attention.key_length") else hidden // heads
    if keys.has("attention.value_length") and keys.whole("attention.value_length", 1, MAX_HEADS) != head_dim:
        raise UnsupportedError("keys and values of different sizes are not supported", path=str(path))
    if not keys.flag("attention.causal", True):
        raise UnsupportedError("bidirectional attention is not supported", path=str(path))
    window, windowed = _windows(keys, architecture, layers)
    factors = {name: tuple(map(shortest, values)) for name, values in factors.items()}
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CheckpointError("tensor 'token_embd.weight' is missing or no matrix", path=str(path))
    if keys.has("vocab_size") and keys.whole("vocab_size", 1, MAX_WIDTH) != embedding[0]:
        raise CheckpointError(
            f"{architecture.name}.vocab_size does not fit the embedding", path=str(path),
            found=keys.values["vocab_size"], expected=embedding[0],
        )  # fmt: skip
    raw: dict[str, Any] = {
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": _one(keys, "feed_forward_length", MAX_WIDTH),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _one(keys, "attention.head_count_kv", MAX_HEADS, heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number(EPS, MIN_EPS, MAX_EPS),
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": [SLIDING if one else FULL for one in windowed],
        **_token_ids(metadata, path),
        **read_rope(keys, architecture, factors, head_dim, context),
        **_biases(shapes),
        **_experts(keys, architecture),
        **_attention_scale(keys, architecture, head_dim, hidden // heads),
        **architecture.read(keys, head_dim),
    }
    raw["model_type"] = _family(metadata, architecture, raw)
    if WINDOWED_BASE in architecture.keys and window is not None:
        raw |= _ropes_by_layer(keys, architecture, raw)
    return config_from_hf(raw, path)


def _architecture(metadata: Mapping[str, Any], path: object) -> GgufArchitecture:
    general = Settings(metadata, path)
    kind = general.text("general.type") if general.has("general.type") else "model"
    if kind != "model":
        raise UnsupportedError("holds no model of its own", path=str(path), found=shown(kind))
    name = general.text("general.architecture")
    known = sharing_families()
    if name not in known:
        raise UnsupportedError(
            "architecture is not supported", path=str(path), found=shown(name), expected=", ".join(sorted(known))
        )
    architecture = known[name][0].gguf
    assert architecture is not None
    return architecture


def _own_keys(metadata: Mapping[str, Any], architecture: GgufArchitecture, path: object) -> Settings:
    """The architecture's keys, without its name; one that is not known would change the arithmetic.

    Raises:
        UnsupportedError: for such a key, unless it says nothing.
    """
    prefix = f"{architecture.name}."
    found = {key.removeprefix(prefix): shortest(value) for key, value in metadata.items() if key.startswith(prefix)}
    usual = {
        "expert_gating_func": _SOFTMAX,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": architecture.normalized,
    }
    known = {*_KEYS, *architecture.keys}
    unknown = [key for key, value in found.items() if key not in known and value and value != usual.get(key)]
    if unknown:
        raise UnsupportedError(
            f"says with '{prefix}{unknown[0]}' what quantkit does not read", path=str(path),
            found=shown(found[unknown[0]]),
        )  # fmt: skip
    return Settings(found, path, architecture.name)


def _one(keys: Settings, key: str, most: int, default: int | None = None) -> int:
    """A size that may be there for each layer, but must be the same in all."""
    if default is not None and not keys.has(key):
        return default
    value = keys.need(key)
    if not isinstance(value, list):
        return keys.whole(key, 1, most)
    if len(set(map(str, value))) != 1 or len(value) != keys.values["block_count"]:
        raise UnsupportedError(
            f"layers that differ in {keys.name}.{key} are not supported", path=keys.path, found=shown(value)
        )
    return Settings({key: value[0]}, keys.path, keys.name).whole(key, 1, most)


def _token_ids(metadata: Mapping[str, Any], path: object) -> dict[str, Any]:
    settings = Settings(metadata, path)
    starts = settings.ids("tokenizer.ggml.bos_token_id")
    ends = [settings.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = settings.ids(EOS_IDS) or tuple(dict.fromkeys(end for one in ends for end in one))
    return {"bos_token_id": starts[0] if starts else None, "eos_token_id": list(found) or None}


def _biases(names: Collection[str]) -> dict[str, Any]:
    attention = "blk.0.attn_q.bias" in names
    return {"attention_bias": attention, "qkv_bias": attention, "mlp_bias": "blk.0.ffn_gate.bias" in names}


def _windows(keys: Settings, architecture: GgufArchitecture, layers: int) -> tuple[int | None, list[bool]]:
    """The width of the windows, and which layers have one."""
    window = keys.whole(WINDOW, 0, MAX_CONTEXT) if keys.has(WINDOW) else architecture.default_window or 0
    stated = keys.values.get(PATTERN)
    if isinstance(stated, list):
        if len(stated) != layers or not all(one in (0, 1) for one in stated):
            raise CheckpointError(
                f"{keys.name}.{PATTERN} does not fit the layers", path=keys.path, found=shown(stated),
                expected=f"one of each of {layers}",
            )  # fmt: skip
        windowed = [bool(one) for one in stated]
    else:
        period = keys.whole(PATTERN, 0, MAX_LAYERS) if keys.has(PATTERN) else architecture.window_period
        windowed = by_period(period, layers)
    if window and any(windowed):
        return window, windowed
    if architecture.default_window is not None:
        raise UnsupportedError(
            f"llama.cpp loads no {architecture.name} model without windows", path=keys.path,
            found=f"{WINDOW} {shown(keys.values.get(WINDOW))}, {PATTERN} {shown(stated)}",
        )  # fmt: skip
    return None, [False] * layers


def by_period(period: int | None, layers: int) -> list[bool]:
    """Which layers have a window: all but the last of each period, all of them without a period."""
    return [not period or layer % period < period - 1 for layer in range(layers)]


def _experts(keys: Settings, architecture: GgufArchitecture) -> dict[str, Any]:
    """The keys of a mixture of experts, under the names of any family."""
    if architecture.normalized is None or (architecture.dense_too and not keys.values.get("expert_count")):
        return {}
    count = keys.whole("expert_count", 0, MAX_EXPERTS)
    used, width = keys.whole("expert_used_count", 1, MAX_EXPERTS), _one(keys, "feed_forward_length", MAX_WIDTH)
    size_key, shared_key = "expert_feed_forward_length", "expert_shared_feed_forward_length"
    size = keys.whole(size_key, 1, MAX_WIDTH) if keys.has(size_key) else max(width // used, 1)
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": keys.whole(shared_key, 1, MAX_WIDTH) if keys.has(shared_key) else width,
        "norm_topk_prob": architecture.normalized,
    }


def _attention_scale(
    keys: Settings, architecture: GgufArchitecture, head_dim: int, hidden_per_head: int
) -> dict[str, Any]:
    if architecture.wide_scale_layers is None:
        return {}
    wide = architecture.wide_scale_layers == keys.values["block_count"]
    return {"query_pre_attn_scalar": hidden_per_head if wide else head_dim}


def _family(metadata: Mapping[str, Any], architecture: GgufArchitecture, raw: Mapping[str, Any]) -> str:
    """The family of a file among those that share an architecture: the one that quantkit wrote into it, or the one
    whose features it has."""
    families = sharing_families()[architecture.name]
    marked = {family.gguf_mark: family.model_type for family in families if raw.get(family.gguf_mark or "") is not None}
    stated = metadata.get(MODEL_TYPE)
    if "num_experts" not in marked and any(stated == family.model_type for family in families):
        return str(stated)
    plain = next((family for family in families if family.gguf_mark is None), families[0])
    return marked.get("num_experts") or marked.get("sliding_window") or plain.model_type


def _ropes_by_layer(keys: Settings, architecture: GgufArchitecture, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions by kind of layer: those of layers with a window are not scaled."""
    base = raw["rope_theta"] if architecture.one_rotary_base else DEFAULT_THETA
    if keys.has(WINDOWED_BASE):
        base = keys.number(WINDOWED_BASE, MIN_THETA, MAX_THETA)
    if architecture.one_rotary_base and base != raw["rope_theta"]:
        raise UnsupportedError(
            f"llama.cpp does not compute another rotary base of layers with a window of {keys.name} models",
            path=keys.path, found=f"{WINDOWED_BASE} {base:g}", expected=f"{raw['rope_theta']:g}",
        )  # fmt: skip
    full = {"rope_theta": raw["rope_theta"], **(raw["rope_scaling"] or {"rope_type": "default"})}
    kinds = {FULL: full, SLIDING: {"rope_theta": base, "rope_type": "default"}}
    return {"rope_parameters": kinds, "rope_scaling": None, "rope_theta": None}
