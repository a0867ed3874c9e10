"""OLMoE (2409.02060): many small experts, norms over all queries and all keys of a token, clipped projections."""

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from quantkit.architectures.families.keys import ATTENTION_BIAS, experts, number

GGUF = GgufArchitecture(
    "olmoe", keys=EXPERT_KEYS[:2], normalized=False, tied=False, full_width=True,
    refused={"fewer KV heads than heads": lambda config: config.num_kv_heads != config.num_heads},
)  # fmt: skip
FAMILY = Family(
    "olmoe", "OlmoeForCausalLM",
    (ATTENTION_BIAS, number("clip_qkv", "clip_qkv", 1e-6, 1e6, None, null=None), experts(norm_key="norm_topk_prob")),
    options={"kv_heads_required": False, "qk_norm": "width"}, gguf=GGUF,
)  # fmt: skip
