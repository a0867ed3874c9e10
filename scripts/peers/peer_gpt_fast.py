"""Convert and quantize a model with gpt-fast's own scripts, and give what its own model makes of
some tokens.

    python scripts/peers/peer_gpt_fast.py GPT_FAST MODEL OUT

GPT_FAST is a checkout of pytorch-labs/gpt-fast; it needs torch, safetensors, sentencepiece and
tiktoken, and runs on a CPU without quantkit. MODEL is a Hugging Face folder of a Llama in one
safetensors file. OUT becomes a folder as gpt-fast leaves it, without MODEL's own weights;
OUT.logits.safetensors has `tokens` [T] and, for `model` and `model_int8`, the logits [T, V] of
gpt-fast's model in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def logits(weights: Path, name: str, tokens: torch.Tensor) -> torch.Tensor:
    """Of gpt-fast's model, with what a file holds, in float32 [T, V]."""
    import model
    import quantize

    with torch.device("meta"):
        made = model.Transformer.from_name(name)
    if "int8" in weights.name:
        made = quantize.WeightOnlyInt8QuantHandler(made).convert_for_runtime()
    made.load_state_dict(torch.load(weights, weights_only=True), assign=True)
    made = made.to(torch.float32).eval()
    made.setup_caches(max_batch_size=1, max_seq_length=len(tokens))
    with torch.inference_mode():
        return made(tokens[None], torch.arange(len(tokens)))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpt_fast", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    sys.path[:0] = [str(options.gpt_fast), str(options.gpt_fast / "scripts")]
    import model
    import quantize
    from convert_hf_checkpoint import convert_hf_checkpoint

    shutil.copytree(options.model, options.out)
    raw: dict[str, Any] = json.loads((options.out / "config.json").read_text())
    model.transformer_configs[options.out.name] = {
        "block_size": 512,
        "vocab_size": raw["vocab_size"],
        "n_layer": raw["num_hidden_layers"],
        "n_head": raw["num_attention_heads"],
        "n_local_heads": raw["num_key_value_heads"],
        "dim": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "norm_eps": raw["rms_norm_eps"],
        "rope_base": raw["rope_theta"],
    }
    source = options.out / "model.safetensors"
    with safe_open(source, "pt") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), source.name)}
    (options.out / "model.safetensors.index.json").write_text(json.dumps(index))
    convert_hf_checkpoint(checkpoint_dir=options.out, model_name=options.out.name)
    quantize.quantize(options.out / "model.pth", mode="int8", label="_")
    for file in options.out.glob("*.safetensors*"):
        file.unlink()
    tokens = torch.randint(3, raw["vocab_size"], (200,), generator=torch.Generator().manual_seed(0))
    found = {"tokens": tokens}
    for name in ("model", "model_int8"):
        found[name] = logits(options.out / f"{name}.pth", options.out.name, tokens).contiguous()
    save_file(found, options.out.with_name(f"{options.out.name}.logits.safetensors"))


if __name__ == "__main__":
    main()
