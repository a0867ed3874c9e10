"""DeepSeek-V3 (2412.19437): latent attention; after some dense layers, experts, some of which get every token."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertsConfig,
    LatentAttentionConfig,
)
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.keys import Keys, flag, layer_count
from quantkit.json_values import Settings


def _read(settings: Settings) -> dict[str, Any]:
    latent = LatentAttentionConfig(
        query_rank=settings.integer("q_lora_rank", 1, MAX_WIDTH) if settings.has("q_lora_rank") else None,
        kv_rank=settings.integer("kv_lora_rank", 1, MAX_WIDTH),
        rope_dim=settings.integer("qk_rope_head_dim", 2, MAX_HEADS),
        plain_dim=settings.integer("qk_nope_head_dim", 1, MAX_HEADS),
        value_dim=settings.integer("v_head_dim", 1, MAX_HEADS),
    )
    size = settings.integer("moe_intermediate_size", 1, MAX_WIDTH)
    experts = ExpertsConfig(
        count=settings.integer("n_routed_experts", 1, MAX_EXPERTS),
        size=size,
        per_token=settings.integer("num_experts_per_tok", 1, MAX_EXPERTS),
        shared_size=size * settings.integer("n_shared_experts", 0, MAX_EXPERTS),
        score_correction=True,
    )
    dense = settings.integer("first_k_dense_replace", 0, MAX_LAYERS)
    sparse = [layer >= dense for layer in range(layer_count(settings))]
    return {"sparse": sparse, "head_dim": latent.rope_dim, "experts": experts, "latent_attention": latent}


FAMILY = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", (flag("attention_bias", "output_bias"), Keys(_read)), runs=False
)  # fmt: skip
