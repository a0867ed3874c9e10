"""Make tiny models of random weights, one for each architecture of transformers that predicts text,
for tests.

    python scripts/measure/tiny_architectures.py FOLDER [NAME ...]

Each model is a folder of FOLDER with the name of its architecture: a config, weights as safetensors
and a tokenizer.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantkit.data.files import DEMO_MODEL

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
)

DEVIATION = 0.12

COMMON: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 16,
    "max_position_embeddings": 320,
    "sliding_window": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "decoder_start_token_id": 2,
    # Weights are drawn with this deviation. After the last norm a hidden state has 64 values of
    # about 1, so that the logits have one of about 0.12 * sqrt(64) = 1. The usual 0.02 makes all
    # tokens nearly equally likely.
    "initializer_range": DEVIATION,
    "init_std": DEVIATION,
    # of mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_experts_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "dense_intermediate_size": 128,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_layer_types": ["dense", "sparse"],
    # of latent attention, and of attention to the tokens that an indexer chooses
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 16,
    # of state spaces and linear attention
    "state_size": 32,
    "time_step_rank": 32,
    "ssm_state_size": 32,
    "n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 32,
    "mamba_dt_rank": 32,
    "mamba_n_groups": 1,
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    # of encoders and decoders, only one of which is made
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
}

SLIDING: dict[str, object] = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR: dict[str, object] = {"layer_types": ["linear_attention", "full_attention"]}
PLAIN: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOWER: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ALL_HEADS: dict[str, object] = {"num_key_value_heads": 4}  # keys and values for each head

# Architectures that need no overrides, and those that need only one of the above.
WITHOUT_OVERRIDES = """
    arcee aria_text bart bert bert-generation biogpt bitnet blenderbot blenderbot-small bloom camembert codegen
    data2vec-text diffllama doge ernie ernie4_5 falcon falcon_h1 falcon_mamba flex_olmo flint gemma glm glm4
    glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj granite granitemoe granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe llama mamba
    mbart megatron-bert minimax_m2 mistral mixtral mpt mvp nanochat nemotron olmo olmo2 olmoe openai-gpt
    persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roformer
    rwkv seed_oss solar_open stablelm starcoder2 trocr whisper xlm-roberta xlm-roberta-xl
"""  # noqa: E501
WITH_SLIDING = """
    afmoe beam dots1 exaone4 exaone_moe gemma2 gemma3_text granite_swa granitemoe_swa kolibri1 laguna mellum
    mimo_v2_flash ministral olmo3 vaultgemma
"""  # noqa: E501
WITH_LINEAR = """
    granitemoehybrid minimax olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next
"""
WITH_ALL_HEADS = """
    axk1 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa youtu
"""

ARCHITECTURES: dict[str, dict[str, object]] = {
    **{name: {} for name in WITHOUT_OVERRIDES.split()},
    **dict.fromkeys(WITH_SLIDING.split(), SLIDING),
    **dict.fromkeys(WITH_LINEAR.split(), LINEAR),
    **dict.fromkeys(WITH_ALL_HEADS.split(), ALL_HEADS),
    "apertus": {"rope_parameters": PLAIN},
    "axk2": {**ALL_HEADS, "gated_norm_rank": 32},
    "bailing_hybrid": {**ALL_HEADS, **LINEAR},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **SLIDING},
    "cohere2_moe": {"logit_scale": 1.0, **SLIDING},
    "cohere_compass_text": {
        "logit_scale": 1.0,
        "rope_parameters": {"sliding_attention": PLAIN, "full_attention": PLAIN},
        **SLIDING,
    },
    "ctrl": {"dff": 128},
    "cwm": {**SLIDING, "rope_parameters": PLAIN},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "o_groups": 2,
        "o_lora_rank": 32,
        "mlp_layer_types": ["hash_moe", "moe"],
        "num_key_value_heads": 1,
    },
    "electra": {"embedding_size": 64},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 32,
        "num_kv_shared_layers": 0,
        **SLIDING,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 32,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "top_k_experts": 2,
        **SLIDING,
    },
    "gemma4_unified_text": {"global_head_dim": 32, **SLIDING},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 128},
    "gpt_oss": {**SLIDING, "rope_parameters": YARN},
    "inkling2_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "layer_types": ["hybrid_sliding", "hybrid"],
    },
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "logits_mup_width_multiplier": 1.0,
        "layer_types": ["hybrid_sliding", "hybrid"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**ALL_HEADS, **LINEAR},
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
    "longcat_flash": {**ALL_HEADS, "expert_ffn_hidden_size": 64, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "marian": {"scale_embedding": True},
    "minicpm3": {**ALL_HEADS, "dim_model_base": 64},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "modernbert-decoder": {**SLIDING, "cls_token_id": 1, "sep_token_id": 2},
    "moshi": {"ffn_dim": 256},
    "moss_transcribe_diarize": {
        "audio_config": {**TOWER, "num_mel_bins": 16, "max_source_positions": 64},
        "text_config": {
            "model_type": "qwen3",
            "vocab_size": 2048,  # that of the demo model's tokenizer
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "initializer_range": DEVIATION,
        },
        "tie_word_embeddings": False,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "moe_shared_expert_intermediate_size": 64,
    },
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "pegasus": {"scale_embedding": True},
    "phi4_multimodal": {
        "vision_config": {**TOWER, "image_size": 32, "crop_size": 32, "patch_size": 8},
        "audio_config": {**TOWER, "num_blocks": 1, "nemo_conv_channels": 16, "input_size": 16},
        "rope_parameters": PLAIN,
    },
    "qwen4_exp_text": {
        **LINEAR,
        "hc_lowrank": 32,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "attention"],
        "w_init_variance_scale": 0.16,
    },
    "reformer": {"axial_pos_embds": False},
    "rembert": {"input_embedding_size": 64, "output_embedding_size": 64},
    "roc_bert": {
        "pronunciation_embed_dim": 32,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 32,
        "shape_vocab_size": 64,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "xglm": {"ffn_dim": 128},
    "xlm": {"causal": True, "embed_init_std": DEVIATION},
    "xlnet": {"attn_type": "uni", "n_head": 2, "d_inner": 128},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"router_hidden_size": 64, "num_experts_per_tok": 1},
}

NOT_MADE: dict[str, str] = {
    "blt": "reads bytes, and needs four configs whose sizes depend on each other",
    "cpmant": "the logits of a token depend on those after it",
    "gemma4_assistant": "drafts tokens from the cache of another model",
    "gemma4_unified_assistant": "drafts tokens from the cache of another model",
    "musicgen": "generates sound, and transformers' own table has another config than its class",
    "musicgen_melody": (
        "generates sound, and transformers' own table has another config than its class"
    ),
}


def vocabulary(tokenizer: Path) -> int:
    """How many tokens a tokenizer has."""
    if (tokenizer / "tokenizer.json").exists():
        return int(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size())
    return int(SentencePieceProcessor(str(tokenizer / "tokenizer.model")).vocab_size())


def configuration(model_type: str, tokens: int) -> PreTrainedConfig:
    """The config: the values of `COMMON` that its class has fields for, under its names, and the
    overrides.
    """
    config_class = CONFIG_MAPPING[model_type]
    values = fitting(
        config_class, {**COMMON, "vocab_size": tokens, "vocab_size_per_layer_input": tokens}
    )
    values.update(ARCHITECTURES[model_type])
    # It changes lists and dictionaries in place.
    return config_class(**copy.deepcopy(values), dtype="float32")


def fitting(config_class: Any, common: Mapping[str, object]) -> dict[str, Any]:
    """The values that a config's class has fields for, under its names."""
    fields = inspect.signature(config_class.__init__).parameters
    names = getattr(config_class, "attribute_map", {})
    named = (
        (key if key in fields else names.get(key, key), value) for key, value in common.items()
    )
    return {name: value for name, value in named if name in fields}


def build(model_type: str, tokens: int, *, seed: int) -> PreTrainedModel:
    """The model, with random values in place of biases, gates and other parameters that begin as
    zeros.
    """
    torch.manual_seed(seed)
    config = configuration(model_type, tokens)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    fill(model)
    return model


def fill(model: PreTrainedModel) -> None:
    """Give parameters that begin as zeros random values, and the embedding and the head the
    common deviation.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=DEVIATION)
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
        for layer in ends:
            # Of a class that has its own way to begin.
            if layer is not None and layer.weight.std() < DEVIATION / 2:
                layer.weight.normal_(std=DEVIATION)


def make(model_type: str, folder: Path, tokenizer: Path = DEMO_MODEL, *, seed: int = 0) -> None:
    """Write a model of float32 weights, and a copy of a tokenizer.

    Arguments:
        model_type: one of `ARCHITECTURES`.
        folder: where to.
        tokenizer: a folder with a tokenizer.
        seed: of the weights.
    """
    build(model_type, vocabulary(tokenizer), seed=seed).save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy the files of a tokenizer from one folder to another."""
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder)


def main(description: str, known: Collection[str], make: Callable[..., None]) -> None:
    """The command of a script that makes models, by the names of their architectures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; default: all")
    parser.add_argument(
        "--tokenizer", type=Path, default=DEMO_MODEL, help="a folder with a tokenizer"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"not among the architectures: {', '.join(unknown)}")
    for name in args.names or known:
        make(name, args.folder / name, args.tokenizer, seed=args.seed)
        size = sum(path.stat().st_size for path in (args.folder / name).iterdir())
        print(f"{name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(__doc__.splitlines()[0], ARCHITECTURES, make)
