"""gpt-oss (2508.10925): attention sinks, alternating windows, a clamped SwiGLU, stacked experts with biases.

Its experts' matrices lie with the inputs first, gate and up in alternate columns; since the down projection of the
published models is square, no shape tells.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.experts import experts_of, read_experts
from quantkit.architectures.families.family import (
    Family,
    StackedExperts,
    layer_count,
    layer_types,
    only_window,
    read_config,
    sliding_window,
    with_default_rope,
    written_layer_types,
)
from quantkit.architectures.names import BLOCK
from quantkit.errors import CheckpointError
from quantkit.json_values import Settings

_EXPERTS = BLOCK + "mlp.experts."
# Of transformers, where the keys are absent.
_HEAD_DIM, _WINDOW, _ALPHA, _LIMIT = 64, 128, 1.702, 7.0
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_SWIGLU = (1e-3, 1e6)


def _read(settings: Settings) -> ModelConfig:
    settings = with_default_rope(settings, _YARN)
    count = layer_count(settings)
    types = layer_types(settings, count) or ["sliding_attention", "full_attention"] * count
    window = sliding_window(settings, _WINDOW)
    if window is None and "sliding_attention" in types[:count]:
        raise CheckpointError("some layers have windows, and sliding_window none", path=settings.path)
    bias = settings.flag("attention_bias", True)
    return read_config(
        settings,
        [LayerConfig(window=window if kind == "sliding_attention" else None, experts=True) for kind in types[:count]],
        head_dim=None if "head_dim" in settings.values else _HEAD_DIM, default_theta=150000.0,
        qkv_bias=bias, output_bias=bias, sinks=True, activation="swiglu_oai",
        activation_alpha=settings.number("swiglu_alpha", *_SWIGLU) if settings.has("swiglu_alpha") else _ALPHA,
        activation_limit=settings.number("swiglu_limit", *_SWIGLU) if settings.has("swiglu_limit") else _LIMIT,
        experts=read_experts(settings, bias=True, router_bias=True),
    )  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "attention_bias": config.output_bias,
        "sliding_window": only_window(config) or _WINDOW,
        "layer_types": written_layer_types(config),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "swiglu_alpha": config.activation_alpha,
        "swiglu_limit": config.activation_limit,
    }


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read,
    _write,
    names={"router": BLOCK + "mlp.router"},
    stacked=(
        StackedExperts(
            _EXPERTS + "gate_up_proj", ("expert.gate", "expert.up"), transposed=True, interleaved=True,
            bias=_EXPERTS + "gate_up_proj_bias",
        ),
        StackedExperts(
            _EXPERTS + "down_proj", ("expert.down",), transposed=True, bias=_EXPERTS + "down_proj_bias"
        ),
    ),
)  # fmt: skip
