"""Small models of several families for `peer_gguf.py`, each trained a little, with tokenizers of
their kinds.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TEMPLATES = {
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "qwen": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "gpt-4o": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "glm4": (
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "tekken": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}"
        "[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant'"
        " else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if"
        " add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}
TEMPLATES["qwen35"] = TEMPLATES["qwen"]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
# Two value heads for each key head, and sizes of heads that 32 divides, but not 256.
_DELTA = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_WINDOWS = {"sliding_window": 64, "query_pre_attn_scalar": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
# Sizes that 32 divides, but not 256, as the published ones.
_GPT_OSS = {
    "hidden_size": 288,
    "intermediate_size": 288,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 32}
_HYBRID = {
    **_MAMBA,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_intermediate_size": 512,
}
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "time_step_min": 1e-30,
}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 64,
    "sliding_window": 64,
    "num_kv_shared_layers": 0,
}
MXFP4 = "gptoss-mxfp4"
"""The name of the model whose experts are stored in MXFP4, as published ones are."""
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama", "llama3", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "qwen", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", "qwen", {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3_moe", "qwen", {**_EXPERTS, "tie_word_embeddings": False}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma", _WINDOWS),
    "gemma3": ("gemma3_text", "gemma", _WINDOWS),
    "mistral": ("mistral", "llama3", {"sliding_window": None}),
    "mixtral": (
        "mixtral",
        "llama3",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2moe": (
        "qwen2_moe",
        "qwen",
        {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 256},
    ),
    "olmoe": ("olmoe", "qwen", {**_EXPERTS, "norm_topk_prob": False, "num_key_value_heads": 8}),
    "olmo2": ("olmo2", "qwen", {}),
    "olmo3": ("olmo3", "qwen", {"sliding_window": 64}),
    "phi3": ("phi3", "qwen", {"sliding_window": None}),
    "granite": (
        "granite",
        "llama3",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
    "smollm3": ("smollm3", "llama3", {}),
    "gptoss": ("gpt_oss", "gpt-4o", {**_GPT_OSS, "rope_parameters": {**_YARN, "truncate": True}}),
    MXFP4: ("gpt_oss", "gpt-4o", {**_GPT_OSS, "rope_parameters": {**_YARN, "truncate": True}}),
    "lfm2": (
        "lfm2",
        "llama3",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "granitehybrid": ("granitemoehybrid", "llama3", {**_HYBRID, "num_local_experts": 0}),
    "granitehybrid-moe": (
        "granitemoehybrid",
        "llama3",
        {
            **_HYBRID,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 256,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
    "bamba": ("bamba", "llama3", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    # Without a smallest step size that llama.cpp would leave out.
    "nemotronh": ("nemotron_h", "llama3", {**_NEMOTRON_H, "mlp_bias": True}),
    "nemotronh-moe": (
        "nemotron_h",
        "llama3",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 256,
            "moe_latent_size": 128,
        },
    ),
    "gemma4": ("gemma4_text", "gemma", {**_GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4-small": (
        "gemma4_text",
        "gemma",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 928,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        "gemma",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 256,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "lfm2moe": (
        "lfm2_moe",
        "llama3",
        {
            **_EXPERTS,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen35": ("qwen3_5_text", "qwen35", {**_DELTA, "tie_word_embeddings": True}),
    "qwen35moe": (
        "qwen3_5_moe_text",
        "qwen35",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 256},
    ),
    "qwen3next": (
        "qwen3_next",
        "qwen",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 256},
    ),
    "glm": ("glm", "glm4", {}),
    "glm4": ("glm4", "glm4", {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", "llama3", {"logit_scale": 0.5, "sliding_window": 64}),
    "exaone4": (
        "exaone4",
        "llama3",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "rope_parameters": _LLAMA3},
    ),
    # llama.cpp knows the model with windows by its layers.
    "exaone4-windows": (
        "exaone4",
        "llama3",
        {
            "sliding_window": 64,
            "num_hidden_layers": 64,
            "hidden_size": 128,
            "intermediate_size": 128,
            "head_dim": 16,
        },
    ),
    "llama4": (
        "llama4_text",
        "llama3",
        {
            "intermediate_size_mlp": 512,
            "intermediate_size": 256,
            "num_hidden_layers": 5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
        },
    ),
    "hunyuan": (
        "hunyuan_v1_dense",
        "qwen",
        {
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "ministral3": (
        "ministral3",
        "tekken",
        {
            "rope_parameters": {
                **_YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            }
        },
    ),
}
"""By name: ``model_type``, kind of tokenizer, and settings."""


def make(out: Path, steps: int, names: Iterable[str]) -> None:
    import torch
    import transformers

    from quantkit.text.tokenizer import load_tokenizer

    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        kind, tokens, settings = MODELS[name]
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_tokenizer(folder, tokens)
        tokenizer = load_tokenizer(folder)
        ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
        }
        sizes = {
            **SIZES,
            **settings,
            **ids,
            "vocab_size": -(-tokenizer.vocab_size // 32) * 32,
            "pad_token_id": None,
        }
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        train(
            model, torch.tensor(tokenizer.encode(text(), bos=False)), tokenizer.bos_id, steps, name
        )
        # As published ones are: scales are then exact in float16.
        model.eval().bfloat16().save_pretrained(folder)
        if name == MXFP4:
            store_experts_in_mxfp4(folder)


def store_experts_in_mxfp4(folder: Path) -> None:
    """Round a model's experts, [E, I, O], to MXFP4 as gpt-oss's are published: blocks of rows
    [E, O, I / 32, 16] and exponents [E, O, I / 32].
    """
    import torch
    from safetensors.torch import load_file, save_file

    from quantkit.tensors.qtensor import quantize_rtn
    from quantkit.tensors.scheme import MXFP4 as SCHEME

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        rows = tensors.pop(name).transpose(1, 2).reshape(-1, inputs).float()
        rounded = quantize_rtn(rows, SCHEME, torch.float32)
        codes = rounded.codes.view(experts, outputs, inputs // 32, 16, 2)
        tensors[f"{name}_blocks"] = codes[..., 0] | codes[..., 1] << 4
        exponents = rounded.scale.log2().add(127).to(torch.uint8)
        tensors[f"{name}_scales"] = exponents.view(experts, outputs, -1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def text() -> str:
    from quantkit.data.files import gate_texts

    return "\n".join(gate_texts().values())


def train(model: Any, ids: Any, bos: int | None, steps: int, name: str) -> None:
    import torch

    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias"):
                value.normal_(0, 0.1)
        for key, value in model.named_buffers():
            # Of LFM2, which corrects the scores of experts.
            if key.endswith("expert_bias"):
                value.normal_(0, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - 64, (8,)).tolist()
        rows = torch.stack([ids[start : start + 64] for start in starts])
        if bos is not None:
            rows[:, 0] = bos
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"{name}: step {step + 1}, loss {loss.item():.3f}", flush=True)


def write_tokenizer(folder: Path, kind: str) -> None:
    if kind == "gemma":
        write_gemma(folder)
        settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    else:
        settings = write_byte_level(folder, kind)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **settings,
        "chat_template": TEMPLATES[kind],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_byte_level(folder: Path, kind: str) -> dict[str, Any]:
    """A tokenizer.json of another kind than Gemma's."""
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    from quantkit.text.pipeline import patterns_by_name

    found = patterns_by_name({"qwen": "qwen2"}.get(kind, kind))
    assert found is not None
    (words,), ignore_merges = found
    specials = {
        "llama3": [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ],
        "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "qwen35": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "gpt-4o": [
            "<|startoftext|>",
            "<|endoftext|>",
            "<|start|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
        "glm4": ["<|endoftext|>", "[gMASK]", "<sop>", "<|assistant|>", "<|user|>"],
        "tekken": ["<s>", "[INST]", "[/INST]", "</s>"],
    }[kind]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if kind in ("qwen", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    parts = [
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text().splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(specials)
    has_bos = kind in ("llama3", "tekken")
    if kind == "glm4":
        marks = [(token, tokenizer.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[gMASK] <sop> $A", pair="[gMASK] <sop> $A $B", special_tokens=marks
        )
    if has_bos:
        first = (specials[0], tokenizer.token_to_id(specials[0]))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first[0]} $A", pair=f"{first[0]} $A {first[0]} $B", special_tokens=[first]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    if has_bos:
        return {"bos_token": specials[0], "eos_token": specials[-1]}
    return {
        "bos_token": None,
        "eos_token": specials[-1],
        "pad_token": specials[0],
        "add_bos_token": False,
    }


def write_gemma(folder: Path) -> None:
    """A tokenizer.json of Gemma's kind."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
    from transformers import GemmaTokenizer

    turns = ["<start_of_turn>", "<end_of_turn>"]
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "text"
        corpus.write_text(text(), encoding="utf-8")
        SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(Path(scratch) / "made"),
            model_type="bpe",
            vocab_size=900,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            bos_piece="<bos>",
            eos_piece="<eos>",
            add_dummy_prefix=False,
            minloglevel=2,
            user_defined_symbols=turns,
            num_threads=1,
        )
        made = SentencePieceProcessor(model_file=str(Path(scratch) / "made.model"))
    pieces = {made.id_to_piece(number): number for number in range(made.get_piece_size())}
    merges = [
        (piece[:cut], piece[cut:])
        for piece, number in pieces.items()
        if not (made.is_byte(number) or made.is_control(number) or piece in turns)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = GemmaTokenizer(
        vocab=pieces, merges=merges, add_bos_token=True, additional_special_tokens=turns
    )
    tokenizer.save_pretrained(folder)
