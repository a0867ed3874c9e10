"""Granite 3 (IBM): Llama with four multipliers: of embeddings, residual branches, attention scores and logits."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import ALL_BIASES, GgufArchitecture, optional_number
from quantkit.architectures.families.keys import ATTENTION_BIAS, MLP_BIAS, number
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_BOUNDS = (1e-6, 1e6)  # far beyond what is published


def _read_gguf(keys: Settings, head_dim: int) -> dict[str, Any]:
    if not keys.flag("rope.scaling.finetuned", True):  # in llama.cpp a model without rotary positions
        raise UnsupportedError(
            "a model without rotary positions is not supported", path=keys.path, found="'rope.scaling.finetuned' false"
        )
    keys.need("logit_scale")
    stated = {name: optional_number(keys, key) for key, name in _GGUF_KEYS.items()}
    return {**stated, "attention_multiplier": stated["attention_multiplier"] or head_dim**-0.5}


_GGUF_KEYS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
GGUF = GgufArchitecture(
    "granite", keys=tuple(_GGUF_KEYS), interleaved_rotary=True, biases=ALL_BIASES, rope_freqs=True, long_rope=True,
    read=_read_gguf,
)  # fmt: skip
FAMILY = Family(
    "granite", "GraniteForCausalLM",
    (
        ATTENTION_BIAS, MLP_BIAS,
        number("embedding_multiplier", "embedding_multiplier", *_BOUNDS, 1.0, null=1.0),
        number("residual_multiplier", "residual_multiplier", *_BOUNDS, 1.0, null=1.0),
        number("attention_multiplier", "attention_scale", *_BOUNDS, 1.0, null=1.0),
        number("logits_scaling", "logit_multiplier", *_BOUNDS, 1.0, null=1.0, inverse=True),
    ),
    options={"kv_heads_required": False}, gguf=GGUF,
)  # fmt: skip
