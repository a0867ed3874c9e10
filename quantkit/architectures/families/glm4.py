"""GLM-4 of 2025 (0414): the older one with norms after attention and feed-forward as well."""

from dataclasses import replace

from quantkit.architectures.families import glm
from quantkit.architectures.names import BLOCK

FAMILY = replace(
    glm.FAMILY, model_type="glm4", class_name="Glm4ForCausalLM", options={**glm.FAMILY.options, "norms": "both"},
    names={
        "attention.output_norm": BLOCK + "post_self_attn_layernorm",
        "mlp.output_norm": BLOCK + "post_mlp_layernorm",
    },
)  # fmt: skip
