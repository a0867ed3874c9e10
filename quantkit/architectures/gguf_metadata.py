"""A model's config as the metadata of a GGUF file has it: what is written.

What llama.cpp would not compute as the model says is refused, and so is what would be read again as another model.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import only_window
from quantkit.architectures.gguf import gguf_architecture
from quantkit.architectures.gguf_config import (
    EOS_IDS,
    EPS,
    MODEL_TYPE,
    PATTERN,
    WINDOW,
    by_period,
    config_of,
)
from quantkit.architectures.gguf_rope import rope_tensors, written_rope
from quantkit.errors import UnsupportedError
from quantkit.json_values import shown


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """The keys that say what a model is; those of its tokenizer are another's.

    Raises:
        UnsupportedError: if GGUF can't say all of it, or llama.cpp would not compute it so.
    """
    architecture = gguf_architecture(config)
    _require_computed(config, architecture)
    own: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        EPS: float(config.norm_eps),
        **_written_windows(config, architecture),
        **_written_experts(config, architecture),
        **_written_features(config, architecture),
        **written_rope(config, architecture),
    }
    found: dict[str, Any] = {"general.architecture": architecture.name, MODEL_TYPE: config.architecture}
    found |= {f"{architecture.name}.{key}": value for key, value in own.items()}
    if config.eos_token_ids:
        found[EOS_IDS] = list(config.eos_token_ids)
    _require_read_back(config, found)
    return found


def notes_of(config: ModelConfig) -> list[str]:
    """What a user should know of a model in llama.cpp though it is no error."""
    window = only_window(config)
    if window is None or gguf_architecture(config).window_period is not None:
        return []
    return [
        f"llama.cpp lets all layers see everything; the model has windows of {window} tokens, so what it makes of texts"
        " longer than that differs"
    ]


def _written_windows(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    widths = {window for window in config.windows if window is not None}
    if len(widths) > 1:
        raise UnsupportedError("GGUF cannot say windows of several widths", found=shown(sorted(widths)))
    windowed, layers = [window is not None for window in config.windows], config.num_layers
    if not widths:
        return {}
    found: dict[str, Any] = {WINDOW: widths.pop()}
    if windowed == by_period(architecture.window_period, layers):
        return found
    if architecture.window_period is None:
        return {**found, PATTERN: windowed}
    period = next((one for one in range(2, layers + 2) if windowed == by_period(one, layers)), None)
    if period is None:
        raise UnsupportedError("llama.cpp knows no such order of layers with windows", found=shown(windowed))
    return {**found, PATTERN: period}


def _written_experts(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    found = {"expert_count": experts.count, "expert_used_count": experts.per_token}
    sizes = {"expert_feed_forward_length": experts.size, "expert_shared_feed_forward_length": experts.shared_size}
    return found | {key: size for key, size in sizes.items() if key in architecture.keys}


def _written_features(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    stated = {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "attention.scale": config.attention_scale,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logit_multiplier,
    }
    return {key: float(value) for key, value in stated.items() if key in architecture.keys and value is not None}


def _require_computed(config: ModelConfig, architecture: GgufArchitecture) -> None:
    """
    Raises:
        UnsupportedError: for what llama.cpp does not compute, though a file might say it.
    """
    biases = {"qkv": config.qkv_bias, "output": config.output_bias, "mlp": config.mlp_bias}
    refused = [f"biases of {name}" for name, there in biases.items() if there and name not in architecture.biases]
    if config.experts is not None and not all(layer.experts for layer in config.layers):
        refused.append("layers without experts")
    if architecture.tied is True and not config.tied_embeddings:
        refused.append("a head of its own")
    if architecture.full_width and config.num_heads * config.head_dim != config.hidden_size:
        refused.append("heads that are not as wide as the model together")
    if config.experts is not None and config.experts.normalized != architecture.normalized:
        refused.append(f"shares of experts that {'do not ' if architecture.normalized else ''}add up to 1")
    if config.clip_qkv is not None:
        refused.append("clipped queries, keys and values")
    refused += [description for description, is_used in architecture.refused.items() if is_used(config)]
    if refused:
        raise UnsupportedError(f"llama.cpp does not compute {refused[0]} of {architecture.name} models")


def _require_read_back(config: ModelConfig, metadata: Mapping[str, Any]) -> None:
    """
    Raises:
        UnsupportedError: if what was written is read as another model.
    """
    stored = {key: _as_stored(value) for key, value in metadata.items()}
    names = {"attn_q": config.qkv_bias, "ffn_gate": config.mlp_bias}
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}.bias": (1,) for name, there in names.items() if there}
    shapes["token_embd.weight"] = (config.vocab_size, config.hidden_size)
    factors = {name: tuple(map(_as_stored, values)) for name, values in rope_tensors(config).items()}
    ids = {"tokenizer.ggml.bos_token_id": config.bos_token_id}
    found = config_of(
        {**stored, **ids}, shapes, factors, "GGUF", tied=config.tied_embeddings, dtype=config.dtype
    )  # fmt: skip
    if _rounded(found) != _rounded(config):
        differences = found.differences(config) or ["its layers"]
        raise UnsupportedError("GGUF cannot say all of the model", found=differences[0])


def _as_stored(value: Any) -> Any:
    """A value as it is read again: floats are float32."""
    return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value


def _rounded(part: Any) -> Any:
    """A config to be held against another up to float32: six digits of its numbers."""
    if isinstance(part, float):
        return f"{part:.6g}"
    if isinstance(part, tuple):
        return tuple(map(_rounded, part))
    if not dataclasses.is_dataclass(part):
        return part
    skipped = {"bos_token_id", "eos_token_ids"}
    return tuple(_rounded(getattr(part, one.name)) for one in dataclasses.fields(part) if one.name not in skipped)
