"""GLM-4 of 2024 (2406.12793): biases of queries, keys and values; half of each head is rotated, in adjacent pairs."""

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.keys import Keys, flag
from quantkit.architectures.names import CANONICAL

# Written also if all of a head is rotated.
_PARTIAL = Keys(
    write=lambda config: {"partial_rotary_factor": (config.rope.rotary_dim or config.head_dim) / config.head_dim}
)
FAMILY = Family(
    "glm", "GlmForCausalLM", (flag("attention_bias", "qkv_bias", default=True), _PARTIAL),
    options={"head_dim": 128, "partial_rotary": 0.5},  # of transformers, if the keys are absent
    fused={"mlp.gate_up": CANONICAL["mlp.gate_up"]}, interleaved_rotary=True,
)  # fmt: skip
