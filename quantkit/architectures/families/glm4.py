"""GLM-4 of 2025 (0414): the older one with norms after attention and feed-forward as well."""

from __future__ import annotations

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.glm import FUSED, read_glm, write_glm
from quantkit.architectures.names import BLOCK
from quantkit.json_values import Settings


def _read(settings: Settings) -> ModelConfig:
    return read_glm(settings, norms="both")


FAMILY = Family(
    "glm4",
    "Glm4ForCausalLM",
    _read,
    write_glm,
    names={
        "attention.output_norm": BLOCK + "post_self_attn_layernorm",
        "mlp.output_norm": BLOCK + "post_mlp_layernorm",
    },
    fused=FUSED,
    interleaved_rotary=True,
)
