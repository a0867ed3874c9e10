"""gpt-oss (2508.10925): attention sinks, alternating windows, stacked experts with biases.

Its experts' matrices lie with the inputs first, gate and up in alternate columns; since the down projection of the
published models is square, no shape tells.
"""

from __future__ import annotations

from quantkit.architectures.config import MAX_EXPERTS, MAX_WIDTH, ExpertsConfig, LayerConfig, ModelConfig
from quantkit.architectures.families.family import (
    Family,
    StackedExperts,
    layer_count,
    layer_types,
    read_config,
    sliding_window,
)
from quantkit.architectures.names import BLOCK
from quantkit.json_values import Settings

_EXPERTS = BLOCK + "mlp.experts."


def _read(settings: Settings) -> ModelConfig:
    count = layer_count(settings)
    types = layer_types(settings, count) or ["sliding_attention", "full_attention"] * count
    window = sliding_window(settings, 128)
    bias = settings.flag("attention_bias", True)
    experts = ExpertsConfig(
        count=settings.whole("num_local_experts", 1, MAX_EXPERTS),
        size=settings.whole("intermediate_size", 1, MAX_WIDTH),
        per_token=settings.whole("num_experts_per_tok", 1, MAX_EXPERTS),
        bias=True,
        router_bias=True,
    )
    layers = [
        LayerConfig(window=window if kind == "sliding_attention" else None, experts=True) for kind in types[:count]
    ]
    return read_config(
        settings, layers, default_theta=150000.0, qkv_bias=bias, output_bias=bias, sinks=True, experts=experts
    )


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read,
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
    runs=False,
)  # fmt: skip
