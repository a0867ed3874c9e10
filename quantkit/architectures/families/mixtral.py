"""Mixtral (2401.04088): Mistral whose feed-forward is a mixture of experts, each with its own tensors on disk."""

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.keys import experts, one_window
from quantkit.architectures.families.llama import GGUF
from quantkit.architectures.names import BLOCK

_MOE = BLOCK + "block_sparse_moe."

FAMILY = Family(
    "mixtral", "MixtralForCausalLM", (one_window(None), experts("num_local_experts")),
    options={"default_theta": 1e6},
    names={
        "router": _MOE + "gate",
        "expert.gate": _MOE + "experts.{expert}.w1",
        "expert.up": _MOE + "experts.{expert}.w3",
        "expert.down": _MOE + "experts.{expert}.w2",
    },
    gguf=GGUF, gguf_mark="num_experts",
)  # fmt: skip
