"""Phi-3, 3.5 and 4 (2404.14219): Llama with fused projections on disk: one tensor for q, k, v, one for gate and up."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import Keys, one_window
from quantkit.architectures.names import CANONICAL
from quantkit.json_values import Settings

_CONTEXT = "original_max_position_embeddings"
_DEFAULTS = {_CONTEXT: 4096}  # of transformers, whatever the scaling itself states
_OLD_NAME = "yarn"  # of LongRoPE in this family's first configs; another was "su"
_FUSED = ("attention.qkv", "mlp.gate_up")


def _with_new_names(settings: Settings) -> Settings:
    values = _DEFAULTS | {key: value for key, value in settings.values.items() if value is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(scaling := values.get(key), dict):
            values[key] = {
                name: "longrope" if name in ("type", "rope_type") and value == _OLD_NAME else value
                for name, value in scaling.items()
            }
    return Settings(values, settings.path)


def _write(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.type != "longrope" or not (rope.short_factor and rope.long_factor and rope.original_context):
        return {}
    # Older readers accept only these three keys.
    scaling: dict[str, Any] = {"type": rope.type, "short_factor": [*rope.short_factor]}
    scaling["long_factor"] = [*rope.long_factor]
    if rope.factor != config.max_context / rope.original_context:
        scaling["factor"] = rope.factor
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    return {_CONTEXT: rope.original_context, "rope_scaling": scaling}


FAMILY = Family(
    "phi3", "Phi3ForCausalLM", (one_window(None), Keys(write=_write)),
    options={"kv_heads_required": False, "partial_rotary": 1.0, "rope_types": ("default", "longrope")},
    prepare=_with_new_names, fused={role: CANONICAL[role] for role in _FUSED},
    gguf=GgufArchitecture("phi3", fused=_FUSED, long_rope=True, partial_rotary=True, full_width=True),
)  # fmt: skip
