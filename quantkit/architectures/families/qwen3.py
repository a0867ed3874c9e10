"""Qwen3, dense (2505.09388): norms of each head's queries and keys, an independent head size."""

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import ATTENTION_BIAS
from quantkit.architectures.families.qwen2 import WINDOWS

FAMILY = Family(
    "qwen3", "Qwen3ForCausalLM", (ATTENTION_BIAS, WINDOWS), {"head_dim_required": True, "qk_norm": "head"},
    gguf=GgufArchitecture("qwen3"),
)  # fmt: skip
