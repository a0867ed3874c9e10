"""Granite 3 (IBM): Llama with four multipliers: of embeddings, residual branches, attention scores and logits."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family, read_config
from quantkit.architectures.families.gguf_architecture import ALL_BIASES, GgufArchitecture, optional_number
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_MULTIPLIER = (1e-6, 1e6)  # far beyond what is published


def _read(settings: Settings) -> ModelConfig:
    def multiplier(key: str) -> float:
        return settings.number(key, *_MULTIPLIER) if settings.has(key) else 1.0

    bias = settings.flag("attention_bias", False)
    return read_config(
        settings,
        kv_heads_required=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=settings.flag("mlp_bias", False),
        embedding_multiplier=multiplier("embedding_multiplier"),
        residual_multiplier=multiplier("residual_multiplier"),
        attention_scale=multiplier("attention_multiplier"),
        logit_multiplier=1 / multiplier("logits_scaling"),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": 1 / config.logit_multiplier,
    }


def _read_gguf(keys: Settings, head_dim: int) -> dict[str, Any]:
    if not keys.flag("rope.scaling.finetuned", True):  # llama.cpp: a model without rotary positions
        raise UnsupportedError(
            "a model without rotary positions is not supported", path=keys.path, found="'rope.scaling.finetuned' false"
        )
    keys.need("logit_scale")
    stated = {name: optional_number(keys, key) for key, name in _GGUF_KEYS.items()}
    return {**stated, "attention_multiplier": stated["attention_multiplier"] or head_dim**-0.5}


_GGUF_KEYS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
GGUF = GgufArchitecture(
    "granite", keys=tuple(_GGUF_KEYS), interleaved_rotary=True, biases=ALL_BIASES, rope_freqs=True, long_rope=True,
    read=_read_gguf,
)  # fmt: skip
FAMILY = Family("granite", "GraniteForCausalLM", _read, _write, gguf=GGUF)
