"""Llama 1 to 3.x and CodeLlama (2302.13971, 2307.09288, 2407.21783)."""

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import ALL_BIASES, EXPERT_KEYS, GgufArchitecture
from quantkit.architectures.families.keys import ATTENTION_BIAS, MLP_BIAS

GGUF = GgufArchitecture(
    "llama", keys=EXPERT_KEYS[:2], interleaved_rotary=True, biases=ALL_BIASES, rope_freqs=True, long_rope=True,
    normalized=True, dense_too=True,
)  # fmt: skip
FAMILY = Family(
    "llama", "LlamaForCausalLM", (ATTENTION_BIAS, MLP_BIAS), options={"kv_heads_required": False}, gguf=GGUF
)  # fmt: skip
