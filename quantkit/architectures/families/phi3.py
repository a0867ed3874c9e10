"""Phi-3, 3.5 and 4 (2404.14219): Llama with fused projections on disk: one tensor for q, k, v, one for gate and up."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.family import Family, layer_count, only_window, read_config, sliding_window
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.names import CANONICAL
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_CONTEXT = "original_max_position_embeddings"
_DEFAULTS = {_CONTEXT: 4096}  # of transformers, whatever the scaling itself says
_OLD_NAME = "yarn"  # of LongRoPE, in this family's first configs; another was "su"
_ROPES = ("default", "longrope")
_FUSED = ("attention.qkv", "mlp.gate_up")


def _read(settings: Settings) -> ModelConfig:
    values = _DEFAULTS | {key: value for key, value in settings.values.items() if value is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(scaling := values.get(key), dict):
            values[key] = {
                name: "longrope" if name in ("type", "rope_type") and value == _OLD_NAME else value
                for name, value in scaling.items()
            }
    settings = Settings(values, settings.path)
    layer = LayerConfig(window=sliding_window(settings, None))
    config = read_config(
        settings, [layer] * layer_count(settings), kv_heads_required=False, partial_rotary=1.0
    )  # fmt: skip
    if config.rope.type not in _ROPES:
        raise UnsupportedError(
            "rope type is not one of this family's", path=settings.path, found=config.rope.type,
            expected=" or ".join(_ROPES),
        )  # fmt: skip
    return config


def _write(config: ModelConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {"sliding_window": only_window(config)}
    rope = config.rope
    if rope.type == "longrope" and rope.short_factor and rope.long_factor and rope.original_context:
        # Older readers take these three keys and no more.
        scaling: dict[str, Any] = {"type": rope.type, "short_factor": [*rope.short_factor]}
        scaling["long_factor"] = [*rope.long_factor]
        if rope.factor != config.max_context / rope.original_context:
            scaling["factor"] = rope.factor
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        keys |= {_CONTEXT: rope.original_context, "rope_scaling": scaling}
    return keys


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read,
    _write,
    fused={role: CANONICAL[role] for role in _FUSED},
    gguf=GgufArchitecture("phi3", fused=_FUSED, long_rope=True, partial_rotary=True, full_width=True),
)
