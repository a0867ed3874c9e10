"""Tables of names over the topology's roles: quantkit's own (canonical), Meta's, and gpt-fast's.

Canonical names are those that most Hugging Face folders have, and the decoder's modules; a family whose names on disk
differ says so in its file. Canonical rows of queries and keys lie in Hugging Face's rotary layout (rotate-half).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

BLOCK = "model.layers.{layer}."
"""What the names of a layer's tensors begin with."""

CANONICAL = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention.norm": BLOCK + "input_layernorm",
    "attention.output_norm": BLOCK + "attention_output_layernorm",
    "attention.q": BLOCK + "self_attn.q_proj",
    "attention.k": BLOCK + "self_attn.k_proj",
    "attention.v": BLOCK + "self_attn.v_proj",
    "attention.qkv": BLOCK + "self_attn.qkv_proj",
    "attention.output": BLOCK + "self_attn.o_proj",
    "attention.q_norm": BLOCK + "self_attn.q_norm",
    "attention.k_norm": BLOCK + "self_attn.k_norm",
    "attention.sinks": BLOCK + "self_attn.sinks",
    "attention.q_down": BLOCK + "self_attn.q_a_proj",
    "attention.q_down_norm": BLOCK + "self_attn.q_a_layernorm",
    "attention.q_up": BLOCK + "self_attn.q_b_proj",
    "attention.kv_down": BLOCK + "self_attn.kv_a_proj_with_mqa",
    "attention.kv_down_norm": BLOCK + "self_attn.kv_a_layernorm",
    "attention.kv_up": BLOCK + "self_attn.kv_b_proj",
    "attention.qkv_down": BLOCK + "self_attn.qkv_a_proj",
    "mlp.norm": BLOCK + "post_attention_layernorm",
    "mlp.output_norm": BLOCK + "mlp_output_layernorm",
    "mlp.gate": BLOCK + "mlp.gate_proj",
    "mlp.up": BLOCK + "mlp.up_proj",
    "mlp.gate_up": BLOCK + "mlp.gate_up_proj",
    "mlp.down": BLOCK + "mlp.down_proj",
    "router": BLOCK + "mlp.gate",
    "router.score_correction": BLOCK + "mlp.gate.e_score_correction_bias",
    "shared_expert.router": BLOCK + "mlp.shared_expert_gate",
    "expert.gate": BLOCK + "mlp.experts.{expert}.gate_proj",
    "expert.up": BLOCK + "mlp.experts.{expert}.up_proj",
    "expert.gate_up": BLOCK + "mlp.experts.{expert}.gate_up_proj",
    "expert.down": BLOCK + "mlp.experts.{expert}.down_proj",
    "shared_expert.gate": BLOCK + "mlp.shared_experts.gate_proj",
    "shared_expert.up": BLOCK + "mlp.shared_experts.up_proj",
    "shared_expert.gate_up": BLOCK + "mlp.shared_experts.gate_up_proj",
    "shared_expert.down": BLOCK + "mlp.shared_experts.down_proj",
}
"""Modules by role, those that fused linears get among them."""

META = {
    "embedding": "tok_embeddings",
    "norm": "norm",
    "head": "output",
    "attention.norm": "layers.{layer}.attention_norm",
    "attention.q": "layers.{layer}.attention.wq",
    "attention.k": "layers.{layer}.attention.wk",
    "attention.v": "layers.{layer}.attention.wv",
    "attention.output": "layers.{layer}.attention.wo",
    "mlp.norm": "layers.{layer}.ffn_norm",
    "mlp.gate": "layers.{layer}.feed_forward.w1",
    "mlp.up": "layers.{layer}.feed_forward.w3",
    "mlp.down": "layers.{layer}.feed_forward.w2",
}

GPT_FAST = META | dict.fromkeys(("attention.q", "attention.k", "attention.v"), "layers.{layer}.attention.wqkv")
"""Meta's, but for queries, keys and values, whose rows lie one below the other in one linear."""

EMBEDDING = CANONICAL["embedding"]
_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "embed_in", "word_embeddings")

_DERIVED_BUFFERS = re.compile(
    r"(.*\.)?(rope\.freqs|freqs_cis|rotary_emb\.(inv_freq|cos_cached|sin_cached)|attention\.inner_attention\.rope\.freqs)"
)


def meta_weight(role: str, layer: int | None = None) -> str | None:
    """Meta's name for the weight of a role, or None where its format has no such tensor."""
    module = META.get(role)
    return None if module is None else module.format(layer=layer) + ".weight"


def is_embedding(module: str) -> bool:
    """Whether a module, by its name in any family, is the embedding of tokens."""
    return module.rpartition(".")[2] in _EMBEDDINGS


def is_derived_buffer(name: str) -> bool:
    """Whether a stored tensor is a rotary table that the config already determines."""
    return _DERIVED_BUFFERS.fullmatch(name) is not None


def split_derived(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate names into (weights, derived buffers)."""
    weights: list[str] = []
    buffers: list[str] = []
    for name in names:
        (buffers if is_derived_buffer(name) else weights).append(name)
    return weights, buffers
