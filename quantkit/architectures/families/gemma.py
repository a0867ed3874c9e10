"""Gemma 1 (2403.08295): Llama whose norms add 1 to their weights, with GELU and larger embeddings."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gemma2 import ACTIVATION, HEAD_DIM, causal_features
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import ATTENTION_BIAS, Keys
from quantkit.json_values import Settings


def _read(settings: Settings) -> dict[str, Any]:
    own = settings.has("hidden_activation")
    return {
        "activation_key": "hidden_activation" if own else "hidden_act",
        "activations": (ACTIVATION,) if own else (ACTIVATION, "gelu"),  # the published files' name for it
        **causal_features(settings),
    }


GGUF = GgufArchitecture("gemma", tied=True, read=lambda keys, head_dim: {"hidden_activation": ACTIVATION})
FAMILY = Family(
    "gemma", "GemmaForCausalLM", (Keys(_read, lambda config: {"hidden_activation": ACTIVATION}), ATTENTION_BIAS),
    options={"head_dim": HEAD_DIM}, gguf=GGUF,
)  # fmt: skip
