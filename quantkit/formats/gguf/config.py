"""A model's config from the metadata of a GGUF file, and the metadata to write.

A file has numbers as float32: they are read as the shortest decimals, 1e-05 instead of
9.99999975e-06. What llama.cpp would compute differently is refused, and so is what would be read
again as another model.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    WINDOWED_BASE,
    Family,
    GgufArchitecture,
    count_layers,
)
from quantkit.architectures.families.keys import only_window
from quantkit.architectures.rope import DEFAULT_THETA, FULL, MAX_THETA, MIN_THETA, SLIDING
from quantkit.base.json_values import Settings, format_value, shorten_float32
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.gguf.names import gguf_architecture, sharing_families
from quantkit.formats.gguf.rope import KEYS as ROPE_KEYS
from quantkit.formats.gguf.rope import compute_rope_factors, read_rope, write_rope

MODEL_TYPE = "quantkit.model_type"
EOS_IDS = "quantkit.eos_token_ids"
"""quantkit's keys: the family of a model among those of its architecture, and all EOS tokens."""
_KEYS = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.causal",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "tensor_data_layout",
        *ROPE_KEYS,
    }
)
_KV_HEADS = "attention.head_count_kv"
_WIDTH = "feed_forward_length"
_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_KEYS_ENDING = ".attn_k.weight"
_VALUES_ENDING = ".attn_v.weight"
_SOFTMAX = 1
_NORMALIZED = "expert_weights_norm"


def build_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Sequence[float]],
    path: object,
    *,
    tied: bool,
    dtype: str,
) -> ModelConfig:
    """Build the config of a file's model.

    Args:
        shapes: of its tensors, by name, rows first.
        factors: the values of its tensors among `compute_rope_factors`.
        tied: whether its head is the embedding.
        dtype: its float type.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an architecture or a setting that is not supported.
    """
    architecture = _architecture(metadata, path)
    keys = architecture.prepare(_read_architecture_keys(metadata, architecture, path))
    layers = count_layers(keys)
    heads = _read_uniform_size(keys, "attention.head_count", Limits.heads)
    hidden = keys.integer("embedding_length", 1, Limits.width)
    context = keys.integer("context_length", 1, Limits.context)
    if keys.has("attention.key_length"):
        head_dim = keys.integer("attention.key_length", 1, Limits.heads)
    else:
        head_dim = hidden // heads
    if keys.has("attention.value_length"):
        value_dim = keys.integer("attention.value_length", 1, Limits.heads)
        if value_dim != head_dim:
            raise UnsupportedError(
                "keys and values of different sizes are not supported", path=str(path)
            )
    if not keys.flag("attention.causal", True):
        raise UnsupportedError("bidirectional attention is not supported", path=str(path))
    window, windowed = _windows(keys, architecture, layers)
    layer_types = [SLIDING if has_window else FULL for has_window in windowed]
    kv_heads = _read_kv_heads(keys, architecture, heads, layers)
    for layer, count in enumerate(kv_heads):
        if count == 0:
            assert architecture.layer_without_kv is not None
            layer_types[layer] = architecture.layer_without_kv
    shortest_factors: dict[str, tuple[float, ...]] = {}
    for name, values in factors.items():
        shortest_factors[name] = tuple(map(shorten_float32, values))
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CheckpointError(
            "tensor 'token_embd.weight' is missing or not a matrix", path=str(path)
        )
    if keys.has("vocab_size") and keys.integer("vocab_size", 1, Limits.width) != embedding[0]:
        raise CheckpointError(
            f"{architecture.name}.vocab_size does not match the embedding",
            path=str(path),
            found=keys.values["vocab_size"],
            expected=embedding[0],
        )
    general = Settings(metadata, path)
    bos_ids = general.ids("tokenizer.ggml.bos_token_id")
    # llama.cpp ends a text at each of these: the end of a text, of a turn and of a message.
    llama_eos_ids: dict[int, None] = {}
    for name in ("eos", "eot", "eom"):
        llama_eos_ids |= dict.fromkeys(general.ids(f"tokenizer.ggml.{name}_token_id"))
    eos_ids = tuple(llama_eos_ids)
    listed_eos_ids = general.ids(EOS_IDS)
    # Otherwise a key was changed after quantkit wrote the file.
    if set(eos_ids) <= set(listed_eos_ids):
        eos_ids = listed_eos_ids
    # Some architectures have one tensor for queries, keys and values.
    has_qkv_bias = _has_any(shapes, (".attn_q.bias", ".attn_qkv.bias"))
    # A config.json, whose family checks it and fills in defaults.
    raw: dict[str, Any] = {
        "vocab_size": embedding[0],
        "vocab_size_per_layer_input": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": _read_feed_forward_size(keys, architecture, layers),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # Without any layer with attention, no number is used.
        "num_key_value_heads": max(kv_heads) or heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number(architecture.eps_key, *Limits.eps),
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": layer_types,
        "bos_token_id": bos_ids[0] if bos_ids else None,
        "eos_token_id": list(eos_ids) or None,
        "attention_bias": has_qkv_bias,
        "qkv_bias": has_qkv_bias,
        "attention_k_eq_v": _lacks_values(shapes),
        # The first for feed-forwards with a gate, which others have not.
        "mlp_bias": _has_any(shapes, (".ffn_gate.bias", ".ffn_up.bias")),
        **read_rope(keys, architecture, shortest_factors, head_dim, context),
        **_experts(keys, architecture),
        **architecture.read(keys, head_dim),
    }
    # llama.cpp recognizes Gemma's large model, which scales attention otherwise, by its layers.
    if architecture.wide_scale_layers is not None:
        raw["query_pre_attn_scalar"] = head_dim
        if architecture.wide_scale_layers == layers:
            raw["query_pre_attn_scalar"] = hidden // heads
    raw["model_type"] = _family(metadata, architecture, raw)
    by_kind = WINDOWED_BASE in architecture.keys and architecture.read_ropes is None
    if by_kind and window is not None:
        raw |= _ropes_by_layer(keys, architecture, raw)
    return config_from_hf(raw, path)


def build_metadata(config: ModelConfig) -> dict[str, Any]:
    """Write the keys of a model's config; those of its tokenizer are written elsewhere.

    Raises:
        UnsupportedError: if GGUF cannot state all of the config, or llama.cpp would compute it
            differently.
    """
    architecture = gguf_architecture(config)
    _require_supported(config, architecture)
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        _WIDTH: _list_feed_forward_sizes(config, architecture),
        "attention.head_count": config.num_heads,
        _KV_HEADS: _list_kv_heads(config, architecture),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        architecture.eps_key: float(config.norm_eps),
        **_write_windows(config, architecture),
    }
    experts = config.experts
    if experts is not None:
        keys |= {"expert_count": experts.count, "expert_used_count": experts.per_token}
    optional_values = {
        "expert_feed_forward_length": None if experts is None else experts.size,
        "expert_shared_feed_forward_length": None if experts is None else experts.shared_size,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "attention.scale": config.attention_scale,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logit_multiplier,
    }
    if architecture.multiplies_logits:
        optional_values["logit_scale"] = config.logit_multiplier
    for key, value in optional_values.items():
        if key in architecture.keys and value is not None:
            # GGUF's values have types: lengths are integers, the others floats.
            keys[key] = value if key.endswith("length") else float(value)
    keys |= architecture.write(config)
    keys |= write_rope(config, architecture)
    metadata: dict[str, Any] = {
        "general.architecture": architecture.name,
        MODEL_TYPE: config.architecture,
    }
    for key, value in keys.items():
        metadata[f"{architecture.name}.{key}"] = value
    if config.eos_token_ids:
        metadata[EOS_IDS] = list(config.eos_token_ids)
    _require_read_back(config, metadata)
    return metadata


def describe_llama_cpp_differences(config: ModelConfig) -> list[str]:
    """List what llama.cpp does differently, for the user."""
    differences: list[str] = []
    window = only_window(config)
    if window is not None and gguf_architecture(config).window_period is None:
        differences.append(
            f"llama.cpp ignores the model's windows of {window} tokens, so its results differ for"
            " longer texts"
        )
    if config.mamba2 is not None and config.mamba2.step_limits[0] > 0:
        differences.append(
            f"llama.cpp does not clamp step sizes to at least {config.mamba2.step_limits[0]:g}, as"
            " transformers does, so its logits differ slightly"
        )
    # The published gpt-oss models have this setting, which llama.cpp's converter leaves out.
    if config.rope.type == "yarn" and not config.rope.truncate:
        differences.append(
            "llama.cpp rounds the bounds of YaRN's ramp to whole dimensions, which the model does"
            " not ('truncate' false), so its logits differ slightly"
        )
    return differences


def _has_any(names: Collection[str], endings: tuple[str, ...]) -> bool:
    """Return whether a tensor of any layer has one of the endings: not all layers have all linears
    of a model.
    """
    return any(name.endswith(endings) for name in names)


def _lacks_values(names: Collection[str]) -> bool:
    """Return whether a layer has a projection of keys and none of values."""
    for name in names:
        if name.endswith(_KEYS_ENDING):
            values_name = name.removesuffix(_KEYS_ENDING) + _VALUES_ENDING
            if values_name not in names:
                return True
    return False


def _architecture(metadata: Mapping[str, Any], path: object) -> GgufArchitecture:
    general = Settings(metadata, path)
    # Other types are adapters, for instance.
    kind = "model"
    if general.has("general.type"):
        kind = general.string("general.type")
    if kind != "model":
        raise UnsupportedError("is not a complete model", path=str(path), found=format_value(kind))
    name = general.string("general.architecture")
    families_by_architecture = sharing_families()
    if name not in families_by_architecture:
        raise UnsupportedError(
            "architecture is not supported",
            path=str(path),
            found=format_value(name),
            expected=", ".join(sorted(families_by_architecture)),
        )
    return _plain_family(families_by_architecture[name]).gguf_architectures[name]


def _read_architecture_keys(
    metadata: Mapping[str, Any], architecture: GgufArchitecture, path: object
) -> Settings:
    """Read the architecture's keys, without its name. An unknown key is refused unless it has no
    effect: it could change the arithmetic.
    """
    prefix = f"{architecture.name}."
    values = {}
    for key, value in metadata.items():
        if key.startswith(prefix):
            values[key.removeprefix(prefix)] = shorten_float32(value)
    # What llama.cpp computes without these keys.
    default_values = {
        "expert_gating_func": _SOFTMAX,
        "expert_weights_scale": 1.0,
        _NORMALIZED: architecture.normalized,
    }
    supported_keys = {*_KEYS, *architecture.keys, architecture.eps_key}
    for key, value in values.items():
        if key not in supported_keys and value and value != default_values.get(key):
            raise UnsupportedError(
                f"has the key '{prefix}{key}', which is not supported",
                path=str(path),
                found=format_value(value),
            )
    return Settings(values, path, architecture.name)


def _read_uniform_size(keys: Settings, key: str, high: int, default: int | None = None) -> int:
    """Read a size that may be listed for each layer, but must be the same for all."""
    if default is not None and not keys.has(key):
        return default
    value = keys.need(key)
    if not isinstance(value, list):
        return keys.integer(key, 1, high)
    if len(set(map(str, value))) != 1 or len(value) != keys.values["block_count"]:
        raise UnsupportedError(
            f"layers that differ in {keys.name}.{key} are not supported",
            path=keys.path,
            found=format_value(value),
        )
    return Settings({key: value[0]}, keys.path, keys.name).integer(key, 1, high)


def _read_width(keys: Settings) -> int:
    """Read the width of the dense feed-forward. Models whose layers all have experts may state only
    the width of these, of which their own keys for the dense one are copies.
    """
    if not keys.has("feed_forward_length") and keys.has(EXPERT_KEYS[2]):
        return _read_uniform_size(keys, EXPERT_KEYS[2], Limits.width)
    return _read_uniform_size(keys, "feed_forward_length", Limits.width)


def _read_kv_heads(
    keys: Settings, architecture: GgufArchitecture, heads: int, layers: int
) -> list[int]:
    """Read the number of KV heads of each layer: 0 in layers with another mixer than attention, and
    the same in all others.
    """
    if architecture.layer_without_kv is None or not isinstance(keys.values.get(_KV_HEADS), list):
        return [_read_uniform_size(keys, _KV_HEADS, Limits.heads, heads)] * layers
    return _read_sizes_or_zero(keys, _KV_HEADS, Limits.heads, layers)


def _read_sizes_or_zero(keys: Settings, key: str, high: int, layers: int) -> list[int]:
    """Read a size of each layer: 0 in some, and the same in all others."""
    sizes = keys.integers(key, 0, high)
    if len(sizes) != layers or len(set(sizes) - {0}) > 1:
        raise CheckpointError(
            f"{keys.name}.{key} does not match the layers",
            path=keys.path,
            found=format_value(sizes),
            expected=f"0 or one number for each of {layers}",
        )
    return sizes


def _read_feed_forward_size(keys: Settings, architecture: GgufArchitecture, layers: int) -> int:
    """Read the width of feed-forwards; of experts in layers that have such in their place."""
    if not architecture.single_branches or not isinstance(keys.values.get(_WIDTH), list):
        return _read_width(keys)
    # Without any feed-forward, no width is used.
    return max(_read_sizes_or_zero(keys, _WIDTH, Limits.width, layers)) or 1


def _list_feed_forward_sizes(
    config: ModelConfig, architecture: GgufArchitecture
) -> int | list[int]:
    """List the width of the feed-forward of each layer as `_read_feed_forward_size` reads them; one
    number where all layers have one.
    """
    if not architecture.single_branches:
        return config.intermediate_size
    sizes: list[int] = []
    for layer in config.layers:
        sizes.append(config.intermediate_size if layer.feed_forward else 0)
    return sizes


def _list_kv_heads(config: ModelConfig, architecture: GgufArchitecture) -> int | list[int]:
    """List the KV heads of each layer as `_read_kv_heads` reads them; one number where all layers
    have attention.
    """
    if architecture.layer_without_kv is None:
        return config.num_kv_heads
    counts: list[int] = []
    for layer in config.layers:
        counts.append(config.num_kv_heads if layer.mixer == "attention" else 0)
    return counts


def _windows(
    keys: Settings, architecture: GgufArchitecture, layers: int
) -> tuple[int | None, list[bool]]:
    """Read the width of the windows, and which layers have one."""
    if keys.has(_WINDOW):
        window = keys.integer(_WINDOW, 0, Limits.context)
    else:
        window = architecture.default_window or 0
    # Either a flag for each layer, or a period.
    pattern = keys.values.get(_PATTERN)
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(flag in (0, 1) for flag in pattern):
            raise CheckpointError(
                f"{keys.name}.{_PATTERN} does not match the layers",
                path=keys.path,
                found=format_value(pattern),
                expected=f"0 or 1 for each of {layers}",
            )
        windowed = [bool(flag) for flag in pattern]
    else:
        period = architecture.window_period
        if keys.has(_PATTERN):
            period = keys.integer(_PATTERN, 0, Limits.layers)
        windowed = _by_period(period, layers)
    if window and any(windowed):
        return window, windowed
    if architecture.default_window is not None:
        raise UnsupportedError(
            f"llama.cpp does not load {architecture.name} models without sliding windows",
            path=keys.path,
            found=(
                f"{_WINDOW} {format_value(keys.values.get(_WINDOW))},"
                f" {_PATTERN} {format_value(pattern)}"
            ),
        )
    return None, [False] * layers


def _experts(keys: Settings, architecture: GgufArchitecture) -> dict[str, Any]:
    """Read the keys of a mixture of experts, under the names of any family."""
    if architecture.normalized is None:
        return {}
    # Architectures such as Llama are those of models with experts and of models without.
    if architecture.dense_too and not keys.values.get("expert_count"):
        return {}
    count = keys.integer("expert_count", 0, Limits.experts)
    per_token = keys.integer("expert_used_count", 1, Limits.experts)
    width = _read_feed_forward_size(keys, architecture, keys.values["block_count"])
    size_key = "expert_feed_forward_length"
    shared_key = "expert_shared_feed_forward_length"
    if keys.has(size_key):
        size = keys.integer(size_key, 1, Limits.width)
    else:
        size = max(width // per_token, 1)
    if keys.has(shared_key):
        shared_size = keys.integer(shared_key, 1, Limits.width)
    else:
        shared_size = width
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": shared_size,
        "norm_topk_prob": architecture.normalized,
    }


def _family(
    metadata: Mapping[str, Any], architecture: GgufArchitecture, raw: Mapping[str, Any]
) -> str:
    """Determine the family of a file among those of its architecture: from quantkit's key, or from
    the features.
    """
    families = sharing_families()[architecture.name]
    families_by_feature: dict[str, str] = {}
    for family in families:
        if family.gguf_mark is not None and raw.get(family.gguf_mark) is not None:
            families_by_feature[family.gguf_mark] = family.model_type
    model_type = metadata.get(MODEL_TYPE)
    # A file with experts is of the family with experts, whatever its key says.
    if "num_experts" in families_by_feature:
        return families_by_feature["num_experts"]
    for family in families:
        if model_type == family.model_type:
            return family.model_type
    return next(iter(families_by_feature.values()), _plain_family(families).model_type)


def _plain_family(families: Sequence[Family]) -> Family:
    """Choose the family whose files have no mark; its architecture reads those of all."""
    for family in families:
        if family.gguf_mark is None:
            return family
    return families[0]


def _ropes_by_layer(
    keys: Settings, architecture: GgufArchitecture, raw: Mapping[str, Any]
) -> dict[str, Any]:
    """Read rotary positions by kind of layer: those of layers with a window are not scaled."""
    if architecture.one_rotary_base:
        base = raw["rope_theta"]
    else:
        base = DEFAULT_THETA
    if keys.has(WINDOWED_BASE):
        base = keys.number(WINDOWED_BASE, MIN_THETA, MAX_THETA)
    if architecture.one_rotary_base and base != raw["rope_theta"]:
        raise UnsupportedError(
            "llama.cpp does not support a separate rotary base for sliding-window layers in"
            f" {keys.name} models",
            path=keys.path,
            found=f"{WINDOWED_BASE} {base:g}",
            expected=f"{raw['rope_theta']:g}",
        )
    full = {"rope_theta": raw["rope_theta"], **raw["rope_scaling"]}
    kinds = {FULL: full, SLIDING: {"rope_theta": base, "rope_type": "default"}}
    return {"rope_parameters": kinds, "rope_scaling": None, "rope_theta": None}


def _by_period(period: int | None, layers: int) -> list[bool]:
    """Determine which layers have a window: all but the last of each period, all of them without a
    period.
    """
    # As llama.cpp's `set_swa_pattern` does.
    return [not period or layer % period < period - 1 for layer in range(layers)]


def _write_windows(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    widths: set[int] = set()
    for window in config.windows:
        if window is not None:
            widths.add(window)
    if len(widths) > 1:
        raise UnsupportedError(
            "GGUF does not support sliding windows of different sizes",
            found=format_value(sorted(widths)),
        )
    windowed = [window is not None for window in config.windows]
    layers = config.num_layers
    if not widths:
        return {}
    keys: dict[str, Any] = {_WINDOW: widths.pop()}
    if windowed == _by_period(architecture.window_period, layers):
        return keys
    if architecture.window_period is not None:
        # Older releases of llama.cpp read no flags. A period of one has no windows; one more than
        # the layers has a window in all of them.
        for period in range(2, layers + 2):
            if windowed == _by_period(period, layers):
                return {**keys, _PATTERN: period}
    # llama.cpp ignores windows in the other architectures; there only quantkit reads the flags.
    return {**keys, _PATTERN: windowed}


def _require_supported(config: ModelConfig, architecture: GgufArchitecture) -> None:
    """Refuse features that llama.cpp does not compute."""
    biases = {"qkv": config.qkv_bias, "output": config.output_bias, "mlp": config.mlp_bias}
    refused = []
    for name, has_bias in biases.items():
        if has_bias and name not in architecture.biases:
            refused.append(f"biases of {name}")
    all_sparse = all(layer.experts for layer in config.layers if layer.feed_forward)
    if config.experts is not None and not (all_sparse or architecture.dense_layers):
        refused.append("layers without experts")
    if architecture.tied is True and not config.tied_embeddings:
        refused.append("a separate head")
    if architecture.full_width and config.num_heads * config.head_dim != config.hidden_size:
        refused.append("heads whose total width is not the hidden size")
    # Others state it.
    is_fixed = _NORMALIZED not in architecture.keys
    experts = config.experts
    if is_fixed and experts is not None and experts.normalized != architecture.normalized:
        refused.append(
            f"routing weights that {'do not ' if architecture.normalized else ''}add up to 1"
        )
    if config.clip_qkv is not None:
        refused.append("clipped queries, keys and values")
    for description, is_used in architecture.refused.items():
        if is_used(config):
            refused.append(description)
    if refused:
        raise UnsupportedError(
            f"llama.cpp does not support {refused[0]} in {architecture.name} models"
        )


def _require_read_back(config: ModelConfig, metadata: Mapping[str, Any]) -> None:
    """Refuse a model that would be read back as another one."""
    stored_metadata: dict[str, Any] = {}
    for key, value in metadata.items():
        stored_metadata[key] = _as_stored(value)
    # The tokenizer's keys are not among them.
    stored_metadata["tokenizer.ggml.bos_token_id"] = config.bos_token_id
    # Of these tensors only the presence or the rows are read.
    shapes: dict[str, tuple[int, ...]] = {}
    if config.qkv_bias:
        shapes["blk.0.attn_q.bias"] = (1,)
    if config.values_are_keys:
        shapes[f"blk.0{_KEYS_ENDING}"] = (1,)
    if config.mlp_bias:
        shapes["blk.0.ffn_gate.bias"] = (1,)
    shapes["token_embd.weight"] = (config.vocab_size, config.hidden_size)
    factors = {}
    for name, values in compute_rope_factors(config).items():
        factors[name] = tuple(map(_as_stored, values))
    config_read_back = build_config(
        stored_metadata,
        shapes,
        factors,
        "GGUF",
        tied=config.tied_embeddings,
        dtype=config.dtype,
    )
    # Numbers are rounded to float32 on both sides, so that only real differences count.
    if _round_floats(config_read_back) != _round_floats(config):
        differences = config_read_back.differences(config) or ["its layers"]
        raise UnsupportedError(
            "GGUF cannot represent all of the model's config", found=differences[0]
        )


def _as_stored(value: Any) -> Any:
    """Round a value as it is read back: floats are float32."""
    if isinstance(value, float):
        return struct.unpack("<f", struct.pack("<f", value))[0]
    return value


def _round_floats(part: Any) -> Any:
    """Round a config to six digits of its numbers, to compare it in float32."""
    if isinstance(part, float):
        return f"{part:.6g}"
    if isinstance(part, tuple):
        return tuple(map(_round_floats, part))
    if not dataclasses.is_dataclass(part):
        return part
    # The tokenizer's keys state these.
    skipped = {"bos_token_id", "eos_token_ids"}
    values = []
    for field in dataclasses.fields(part):
        if field.name not in skipped:
            values.append(_round_floats(getattr(part, field.name)))
    return tuple(values)
