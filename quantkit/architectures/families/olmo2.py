"""OLMo 2 (2501.00656): norms after attention and feed-forward, and on queries and keys over all heads."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family, read_config
from quantkit.architectures.families.gguf_architecture import WINDOWED_BASE, GgufArchitecture
from quantkit.architectures.names import BLOCK
from quantkit.json_values import Settings

NORMS = {
    "attention.output_norm": BLOCK + "post_attention_layernorm",
    "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
}


def _read(settings: Settings) -> ModelConfig:
    return read_config(settings, **olmo_features(settings))


def olmo_features(settings: Settings) -> dict[str, Any]:
    """What the configs of OLMo 2 and 3 say alike, for `read_config`."""
    bias = settings.flag("attention_bias", False)
    return {"kv_heads_required": False, "norms": "after", "qk_norm": "width", "qkv_bias": bias, "output_bias": bias}


def write_olmo(config: ModelConfig) -> dict[str, Any]:
    """The keys that `olmo_features` reads."""
    return {"attention_bias": config.output_bias}


GGUF = GgufArchitecture(
    "olmo2", keys=(WINDOWED_BASE,), window_period=4, tied=False, full_width=True, one_rotary_base=True
)  # fmt: skip
FAMILY = Family("olmo2", "Olmo2ForCausalLM", _read, write_olmo, names=NORMS, gguf=GGUF)
