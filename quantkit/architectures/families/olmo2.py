"""OLMo 2 (2501.00656): norms after attention and feed-forward, and of queries and keys over all heads."""

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import WINDOWED_BASE, GgufArchitecture
from quantkit.architectures.families.keys import ATTENTION_BIAS
from quantkit.architectures.names import BLOCK

GGUF = GgufArchitecture(
    "olmo2", keys=(WINDOWED_BASE,), window_period=4, tied=False, full_width=True, one_rotary_base=True
)  # fmt: skip
FAMILY = Family(
    "olmo2", "Olmo2ForCausalLM", (ATTENTION_BIAS,),
    options={"kv_heads_required": False, "norms": "after", "qk_norm": "width"},
    names={
        "attention.output_norm": BLOCK + "post_attention_layernorm",
        "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
    },
    gguf=GGUF,
)  # fmt: skip
