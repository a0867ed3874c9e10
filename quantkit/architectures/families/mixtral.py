"""Mixtral (2401.04088): Mistral whose feed-forward is a mixture of experts, one tensor an expert on disk."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.experts import experts_of, read_experts
from quantkit.architectures.families.family import Family, layer_count, only_window, read_config, sliding_window
from quantkit.architectures.families.llama import GGUF
from quantkit.architectures.names import BLOCK
from quantkit.json_values import Settings

_MOE = BLOCK + "block_sparse_moe."


def _read(settings: Settings) -> ModelConfig:
    layer = LayerConfig(window=sliding_window(settings, None), experts=True)
    return read_config(
        settings, [layer] * layer_count(settings), default_theta=1e6, experts=read_experts(settings)
    )  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "sliding_window": only_window(config),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read,
    _write,
    names={
        "router": _MOE + "gate",
        "expert.gate": _MOE + "experts.{expert}.w1",
        "expert.up": _MOE + "experts.{expert}.w3",
        "expert.down": _MOE + "experts.{expert}.w2",
    },
    gguf=GGUF,
    gguf_mark="num_experts",
)
