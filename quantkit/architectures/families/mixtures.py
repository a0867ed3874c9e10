"""Mixtures of experts whose attention differs from Llama's: gpt-oss and DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ExpertsConfig, LatentAttentionConfig, Limits
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    YARN_TRUNCATE,
    Family,
    GgufArchitecture,
    StackedExperts,
    with_default_rope,
)
from quantkit.architectures.families.keys import (
    Keys,
    experts,
    flag,
    layer_count,
    number,
    only_window,
    windows_by_kind,
)
from quantkit.architectures.names import BLOCK
from quantkit.base.json_values import Settings

# gpt-oss (2508.10925): attention sinks, alternating windows, a clamped SwiGLU, stacked experts with
# biases. Its experts' matrices have the inputs first, gate and up in alternate columns; since the
# down projection of the published models is square, its shape does not show that. Defaults are
# those of transformers.
_EXPERTS = BLOCK + "mlp.experts."
_HEAD_DIM = 64
_WINDOW = 128
_ALPHA = 1.702
_LIMIT = 7.0
# The scaling of the published models, used if the key is absent.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    # Experts have the width of the feed-forward in config.json, a key of their own in a file.
    return {"intermediate_size": gguf.integer(EXPERT_KEYS[2], 1, Limits.width)}


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        Keys(lambda settings: {"head_dim": None if "head_dim" in settings.values else _HEAD_DIM}),
        flag("attention_bias", "qkv_bias", "output_bias", default=True),
        windows_by_kind(2, default=_WINDOW),
        experts("num_local_experts", bias=True, router_bias=True),
        number("swiglu_alpha", "activation_alpha", 1e-3, 1e6, _ALPHA, null=_ALPHA),
        number("swiglu_limit", "activation_limit", 1e-3, 1e6, _LIMIT, null=_LIMIT),
    ),
    options={"default_theta": 150000.0, "sinks": True, "activation": "swiglu_oai"},
    prepare=lambda settings: with_default_rope(settings, _YARN),
    names={"router": BLOCK + "mlp.router"},
    stacked=(
        StackedExperts(
            _EXPERTS + "gate_up_proj",
            ("expert.gate", "expert.up"),
            transposed=True,
            interleaved=True,
            bias=_EXPERTS + "gate_up_proj_bias",
        ),
        StackedExperts(
            _EXPERTS + "down_proj",
            ("expert.down",),
            transposed=True,
            bias=_EXPERTS + "down_proj_bias",
        ),
    ),
    gguf=GgufArchitecture(
        "gpt-oss",
        keys=(*EXPERT_KEYS, YARN_TRUNCATE),
        names={"mlp.norm": "blk.{layer}.post_attention_norm"},
        window_period=2,
        # The published width, without which llama.cpp does not load a file.
        default_window=_WINDOW,
        biases=("qkv", "output"),
        normalized=True,
        tied=False,
        read=_read_gguf,
        refused={
            "attention without biases": lambda config: not config.output_bias,
            "the absence of sliding-window layers": lambda config: only_window(config) is None,
            f"a limit of SwiGLU other than {_LIMIT:g}": (
                lambda config: config.activation_limit != _LIMIT
            ),
            f"a factor of SwiGLU's gate other than {_ALPHA:g}": (
                lambda config: config.activation_alpha != _ALPHA
            ),
        },
    ),
)


# DeepSeek-V3 (2412.19437): latent attention; after some dense layers, experts, some of which get
# every token.
def _read(settings: Settings) -> dict[str, Any]:
    query_rank = None
    if settings.has("q_lora_rank"):
        query_rank = settings.integer("q_lora_rank", 1, Limits.width)
    latent = LatentAttentionConfig(
        query_rank=query_rank,
        kv_rank=settings.integer("kv_lora_rank", 1, Limits.width),
        rope_dim=settings.integer("qk_rope_head_dim", 2, Limits.heads),
        plain_dim=settings.integer("qk_nope_head_dim", 1, Limits.heads),
        value_dim=settings.integer("v_head_dim", 1, Limits.heads),
    )
    size = settings.integer("moe_intermediate_size", 1, Limits.width)
    experts_config = ExpertsConfig(
        count=settings.integer("n_routed_experts", 1, Limits.experts),
        size=size,
        per_token=settings.integer("num_experts_per_tok", 1, Limits.experts),
        shared_size=size * settings.integer("n_shared_experts", 0, Limits.experts),
        score_correction=True,
    )
    dense = settings.integer("first_k_dense_replace", 0, Limits.layers)
    sparse = [layer >= dense for layer in range(layer_count(settings))]
    return {
        "sparse": sparse,
        # Only these dimensions of a head are rotated.
        "head_dim": latent.rope_dim,
        "experts": experts_config,
        "latent_attention": latent,
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (flag("attention_bias", "output_bias"), Keys(_read)),
    names={"router.score_correction": BLOCK + "mlp.gate.e_score_correction_bias"},
    runs=False,
)
