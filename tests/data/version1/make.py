"""How the folder ``model`` beside this file was made, by quantkit as it was before format version 2
of its manifest.

Run once, with the environment of commit b4c1b2e: ``python make.py OUT``. It trains a model of two
layers on the packaged excerpt, quantizes it with the recipe below, and records how it continues a
prompt. Another machine makes other weights: what counts is that this very folder goes on being
read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import quantkit
from quantkit.data.files import EXCERPT

PROMPT = "The people of the"
RECIPE = {
    "default": "int4-g32",
    "overrides": [
        {"pattern": "*.0.mlp.down_proj", "scheme": "int4-g64"},
        {"pattern": "*.1.self_attn.k_proj", "scheme": "keep"},
    ],
}


def train(folder: Path) -> None:
    """A Hugging Face folder with a tokenizer of 384 pieces and 0.12 million weights."""
    torch.manual_seed(0)
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(EXCERPT),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=384,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    encode = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).encode
    ids = torch.tensor(encode(EXCERPT.read_text()))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=384,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(1200):
        starts = torch.randint(len(ids) - 64, (16,)).tolist()
        batch = torch.stack([ids[start : start + 64] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
    model.to(torch.bfloat16).save_pretrained(folder)


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, recipe = Path(scratch) / "source", Path(scratch) / "recipe.json"
        train(source)
        recipe.write_text(json.dumps(RECIPE))
        command = [
            str(Path(sys.executable).with_name("quantkit")),
            "quantize",
            str(source),
            str(out / "model"),
        ]
        options = [
            "--plan",
            str(recipe),
            "--method",
            "gptq",
            "--calibration",
            str(EXCERPT),
            "--samples",
            "64",
        ]
        subprocess.run([*command, *options, "--length", "64"], check=True)
    model, tokenizer = quantkit.load(out / "model")
    tokens = list(quantkit.generate(model, tokenizer.encode(PROMPT), max_new_tokens=24))
    (out / "expected.json").write_text(json.dumps({"prompt": PROMPT, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
