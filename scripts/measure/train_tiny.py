"""Train a tiny language model to measure quantization on: mostly of architectures that quantkit has
no decoder for.

    python scripts/measure/train_tiny.py NAME TEXT OUT [--steps 1500] [--seed 0]

NAME is `hybrid` (Qwen3.5: gated delta nets between attention layers), `experts` (GLM-4.5: shared
and routed experts) or `wide` (Qwen3, whose widths 256 divides, as GGUF's K-quants need). The
tokenizer is that of the packaged model. The same steps and seed give the same model on the same
machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from tiny_architectures import TOKENIZER_FILES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantkit.data.files import DEMO_MODEL
from quantkit.text.tokenizer import load_tokenizer

_LENGTH, _BATCH, _WARM = 256, 8, 100
_RATE = 3e-3
_COMMON: dict[str, object] = {
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "hybrid": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 512,
            "layer_types": [
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "wide": (
        "qwen3",
        {
            "hidden_size": 256,
            "num_attention_heads": 8,
            "num_hidden_layers": 8,
            "intermediate_size": 512,
        },
    ),
    "experts": (
        "glm4_moe",
        {
            "num_hidden_layers": 3,
            "intermediate_size": 512,
            "moe_intermediate_size": 192,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
}


def train(model: PreTrainedModel, tokens: Tensor, steps: int, seed: int) -> None:
    """Train on random windows of tokens [N] by AdamW, with a rate that rises and falls."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, steps, pct_start=_WARM / steps)
    started, total = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - _LENGTH, (_BATCH,), generator=generator).tolist()
        batch = torch.stack([tokens[start : start + _LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 100 == 0:
            print(
                f"step {step}: loss {total / 100:.3f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            total = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kind, settings = MODELS[options.name]
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_COMMON | settings))
    print(json.dumps({"parameters": sum(one.numel() for one in model.parameters())}))
    tokens = torch.tensor(load_tokenizer(DEMO_MODEL).encode(options.text.read_text()))
    train(model.train(), tokens, options.steps, options.seed)
    model.save_pretrained(options.out)
    for name in TOKENIZER_FILES:
        if (DEMO_MODEL / name).exists():
            shutil.copy(DEMO_MODEL / name, options.out)


if __name__ == "__main__":
    main()
