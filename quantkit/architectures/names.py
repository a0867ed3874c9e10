"""Names of modules by the topology's roles: quantkit's own (canonical), Meta's, gpt-fast's, and
llama.cpp's.

Canonical names are those that most Hugging Face folders have, and the decoder's modules; a family
whose names on disk differ says so in its file. Canonical rows of queries and keys have Hugging
Face's rotary layout (rotate-half).
"""

from __future__ import annotations

import re

BLOCK = "model.layers.{layer}."
"""What the names of a layer's tensors begin with."""

# Each role, its canonical module, and Meta's and llama.cpp's, if they have one. Of tensors whose
# canonical name has no leaf, llama.cpp's name is complete.
_TABLE = """
    embedding                model.embed_tokens                 tok_embeddings   token_embd
    norm                     model.norm                         norm             output_norm
    head                     lm_head                            output           output
    attention.norm           input_layernorm                    attention_norm   attn_norm
    attention.output_norm    attention_output_layernorm         -                post_attention_norm
    attention.q              self_attn.q_proj                   attention.wq     attn_q
    attention.k              self_attn.k_proj                   attention.wk     attn_k
    attention.v              self_attn.v_proj                   attention.wv     attn_v
    attention.qkv            self_attn.qkv_proj                 -                attn_qkv
    attention.output         self_attn.o_proj                   attention.wo     attn_output
    attention.q_norm         self_attn.q_norm                   -                attn_q_norm
    attention.k_norm         self_attn.k_norm                   -                attn_k_norm
    attention.sinks          self_attn.sinks                    -                attn_sinks.weight
    attention.q_down         self_attn.q_a_proj                 -                -
    attention.q_down_norm    self_attn.q_a_layernorm            -                -
    attention.q_up           self_attn.q_b_proj                 -                -
    attention.kv_down        self_attn.kv_a_proj_with_mqa       -                -
    attention.kv_down_norm   self_attn.kv_a_layernorm           -                -
    attention.kv_up          self_attn.kv_b_proj                -                -
    attention.qkv_down       self_attn.qkv_a_proj               -                -
    short_conv.in            conv.in_proj                       -                shortconv.in_proj
    short_conv.filter        conv.conv                          -                shortconv.conv
    short_conv.out           conv.out_proj                      -                shortconv.out_proj
    gated_delta.qkv          linear_attn.in_proj_qkv            -                attn_qkv
    gated_delta.qkvz         linear_attn.in_proj_qkvz           -                -
    gated_delta.write_decay  linear_attn.in_proj_ba             -                ssm_ba
    gated_delta.gate         linear_attn.in_proj_z              -                attn_gate
    gated_delta.write        linear_attn.in_proj_b              -                ssm_beta
    gated_delta.decay        linear_attn.in_proj_a              -                ssm_alpha
    gated_delta.filter       linear_attn.conv1d                 -                ssm_conv1d
    gated_delta.decay_bias   linear_attn.dt_bias                -                ssm_dt.bias
    gated_delta.log_rate     linear_attn.A_log                  -                ssm_a
    gated_delta.norm         linear_attn.norm                   -                ssm_norm
    gated_delta.out          linear_attn.out_proj               -                ssm_out
    mamba2.in                mamba.in_proj                      -                ssm_in
    mamba2.filter            mamba.conv1d                       -                ssm_conv1d
    mamba2.step_bias         mamba.dt_bias                      -                ssm_dt.bias
    mamba2.log_rate          mamba.A_log                        -                ssm_a
    mamba2.skip              mamba.D                            -                ssm_d
    mamba2.norm              mamba.norm                         -                ssm_norm
    mamba2.out               mamba.out_proj                     -                ssm_out
    mlp.norm                 post_attention_layernorm           ffn_norm         ffn_norm
    mlp.output_norm          mlp_output_layernorm               -                post_ffw_norm
    mlp.gate                 mlp.gate_proj                      feed_forward.w1  ffn_gate
    mlp.up                   mlp.up_proj                        feed_forward.w3  ffn_up
    mlp.gate_up              mlp.gate_up_proj                   -                ffn_up
    mlp.down                 mlp.down_proj                      feed_forward.w2  ffn_down
    router                   mlp.gate                           -                ffn_gate_inp
    router.score_correction  mlp.score_correction               -                exp_probs_b.bias
    router.scale             mlp.router_scale                   -                ffn_gate_inp.scale
    router.expert_scales     mlp.expert_scales                  -                ffn_down_exps.scale
    expert.norm              mlp.experts_layernorm              -                pre_ffw_norm_2
    expert.output_norm       mlp.experts_output_layernorm       -                post_ffw_norm_2
    shared_expert.norm       mlp.shared_layernorm               -                ffn_norm
    shared_expert.output_norm mlp.shared_output_layernorm       -                post_ffw_norm_1
    layer_scale              layer_scale                     -            layer_output_scale.weight
    layer_input.gate         layer_input.gate                   -                inp_gate
    layer_input.projection   layer_input.projection             -                proj
    layer_input.norm         layer_input.norm                   -                post_norm
    layer_inputs.embedding   model.layer_inputs.embedding    -            per_layer_token_embd
    layer_inputs.projection  model.layer_inputs.projection   -            per_layer_model_proj
    layer_inputs.norm        model.layer_inputs.norm            -                per_layer_proj_norm
    shared_expert.router     mlp.shared_expert_gate             -                ffn_gate_inp_shexp
    expert.latent_in         mlp.latent_in_proj                 -                ffn_latent_down
    expert.latent_out        mlp.latent_out_proj                -                ffn_latent_up
    expert.gate              mlp.experts.{expert}.gate_proj     -                ffn_gate_exps
    expert.up                mlp.experts.{expert}.up_proj       -                ffn_up_exps
    expert.gate_up           mlp.experts.{expert}.gate_up_proj  -                -
    expert.down              mlp.experts.{expert}.down_proj     -                ffn_down_exps
    shared_expert.gate       mlp.shared_experts.gate_proj       -                ffn_gate_shexp
    shared_expert.up         mlp.shared_experts.up_proj         -                ffn_up_shexp
    shared_expert.gate_up    mlp.shared_experts.gate_up_proj    -                -
    shared_expert.down       mlp.shared_experts.down_proj       -                ffn_down_shexp
"""
# Roles outside the layers, whose names have no prefix of a block.
_OUTSIDE = ("embedding", "norm", "head")
_OUTSIDE_PREFIX = "layer_inputs."


def _column(number: int, block: str) -> dict[str, str]:
    """Read the modules by role from one column of the table."""
    modules: dict[str, str] = {}
    for line in _TABLE.strip().splitlines():
        row = line.split()
        role = row[0]
        module = row[number]
        if module == "-":
            continue
        if role in _OUTSIDE or role.startswith(_OUTSIDE_PREFIX):
            modules[role] = module
        else:
            modules[role] = block + module
    return modules


CANONICAL = _column(1, BLOCK)
"""Modules by role, those that fused linears get among them."""
META_NAMES = _column(2, "layers.{layer}.")
GGUF_NAMES = _column(3, "blk.{layer}.")
"""llama.cpp's names."""
GPT_FAST = META_NAMES | dict.fromkeys(
    ("attention.q", "attention.k", "attention.v"), "layers.{layer}.attention.wqkv"
)
"""Meta's, except for queries, keys and values, which are one linear in this order of rows."""

EMBEDDING = CANONICAL["embedding"]
_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "tok_embeddings",
    "embed_in",
    "word_embeddings",
    # Of Mamba and of Nemotron H.
    "embeddings",
)

_EXPERT = re.compile(r"(.*\bexperts)\.\d+\..+")
# Older releases of transformers, and Meta's early checkpoints, contain these tables.
_DERIVED_BUFFERS = re.compile(
    r"(.*\.)?(rope\.freqs|freqs_cis|rotary_emb\.(inv_freq|cos_cached|sin_cached)|attention\.inner_attention\.rope\.freqs)"
)


def expert_bank(module: str) -> str | None:
    """Find the module of all experts of a layer from a linear of one of them; None for other
    modules.
    """
    match = _EXPERT.fullmatch(module)
    if match is None:
        return None
    return match[1]


def is_embedding(module: str) -> bool:
    """Return whether a module, by its name in any family, is the embedding of tokens."""
    return module.rpartition(".")[2] in _EMBEDDINGS


def is_derived_buffer(name: str) -> bool:
    """Return whether a stored tensor is a rotary table that the config already determines."""
    return _DERIVED_BUFFERS.fullmatch(name) is not None
