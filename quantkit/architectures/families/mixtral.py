"""Mixtral (2401.04088): Mistral whose feed-forward is a mixture of experts, one tensor an expert on disk."""

from __future__ import annotations

from quantkit.architectures.config import MAX_EXPERTS, MAX_WIDTH, ExpertsConfig, LayerConfig, ModelConfig
from quantkit.architectures.families.family import Family, layer_count, read_config, sliding_window
from quantkit.architectures.names import BLOCK
from quantkit.json_values import Settings

_MOE = BLOCK + "block_sparse_moe."


def _read(settings: Settings) -> ModelConfig:
    experts = ExpertsConfig(
        count=settings.whole("num_local_experts", 1, MAX_EXPERTS),
        size=settings.whole("intermediate_size", 1, MAX_WIDTH),
        per_token=settings.whole("num_experts_per_tok", 1, MAX_EXPERTS),
    )
    layer = LayerConfig(window=sliding_window(settings, None), experts=True)
    return read_config(settings, [layer] * layer_count(settings), default_theta=1e6, experts=experts)


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read,
    names={
        "router": _MOE + "gate",
        "expert.gate": _MOE + "experts.{expert}.w1",
        "expert.up": _MOE + "experts.{expert}.w3",
        "expert.down": _MOE + "experts.{expert}.w2",
    },
)
