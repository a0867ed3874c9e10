"""Ministral 3 (Mistral AI): Mistral with YaRN, and queries scaled by their positions, as in Llama 4.

The published models also have a vision tower, and the name ``mistral3``.
"""

from quantkit.architectures.families.family import Family, with_default_rope
from quantkit.architectures.families.keys import one_window

_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Of transformers, if a config has no rotary settings."""

FAMILY = Family(
    "ministral3", "Ministral3ForCausalLM", (one_window(None),), options={"head_dim": 128, "query_scaling": True},
    prepare=lambda settings: with_default_rope(settings, _ROPE),
)  # fmt: skip
