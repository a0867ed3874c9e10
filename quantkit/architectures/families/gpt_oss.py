"""gpt-oss (2508.10925): attention sinks, alternating windows, a clamped SwiGLU, stacked experts with biases.

Its experts' matrices have the inputs first, gate and up in alternate columns; since the down projection of the
published models is square, its shape does not show that.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.families.family import Family, StackedExperts, with_default_rope
from quantkit.architectures.families.keys import Keys, experts, flag, number, windows_by_kind
from quantkit.architectures.names import BLOCK
from quantkit.json_values import Settings

_EXPERTS = BLOCK + "mlp.experts."
# Of transformers, if the keys are absent.
_HEAD_DIM, _WINDOW, _ALPHA, _LIMIT = 64, 128, 1.702, 7.0
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read(settings: Settings) -> dict[str, Any]:
    return {"head_dim": None if "head_dim" in settings.values else _HEAD_DIM}


FAMILY = Family(
    "gpt_oss", "GptOssForCausalLM",
    (
        Keys(_read), flag("attention_bias", "qkv_bias", "output_bias", default=True),
        windows_by_kind(2, default=_WINDOW), experts("num_local_experts", bias=True, router_bias=True),
        number("swiglu_alpha", "activation_alpha", 1e-3, 1e6, _ALPHA, null=_ALPHA),
        number("swiglu_limit", "activation_limit", 1e-3, 1e6, _LIMIT, null=_LIMIT),
    ),
    options={"default_theta": 150000.0, "sinks": True, "activation": "swiglu_oai"},
    prepare=lambda settings: with_default_rope(settings, _YARN),
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
