"""Quantize a model with bitsandbytes through transformers, and say what its weights mean to
bitsandbytes itself.

    python scripts/peers/peer_bitsandbytes.py MODEL OUT [--kind nf4-double]

Runs in a separate environment, with `bitsandbytes`, `transformers` and `accelerate`, on a CPU and
without quantkit. MODEL is a Hugging Face folder. OUT becomes a folder as transformers saves it,
OUT.floats.safetensors the weights that bitsandbytes dequantizes from it, by their names: what
`compare_with_owner.py` holds quantkit's reading against.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import bitsandbytes
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import find_versions

KINDS = ("nf4", "nf4-double", "fp4", "fp4-double", "int8")
PACKAGES = ("bitsandbytes", "transformers", "torch")


def settings(kind: str) -> BitsAndBytesConfig:
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    name, _, double = kind.partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=name,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def floats(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of quantized linears, in the type that bitsandbytes gives them."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = module.weight
            found[f"{name}.weight"] = bitsandbytes.functional.dequantize_4bit(
                weight.data, weight.quant_state
            )
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            weight = module.weight
            scale = module.state.SCB if weight.SCB is None else weight.SCB
            found[f"{name}.weight"] = bitsandbytes.functional.int8_vectorwise_dequant(
                weight.data, scale
            )
    return {name: weight.contiguous() for name, weight in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="nf4-double")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists")
    made = AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=settings(options.kind), dtype="auto", device_map="cpu"
    )
    made.save_pretrained(options.out)
    for file in options.model.glob("tokenizer*"):
        shutil.copy(file, options.out)
    loaded = AutoModelForCausalLM.from_pretrained(options.out, device_map="cpu")
    means = floats(loaded)
    save_file(means, options.out.with_name(options.out.name + ".floats.safetensors"))
    versions = find_versions(PACKAGES)
    print(json.dumps({"kind": options.kind, "weights": len(means), "versions": versions}))


if __name__ == "__main__":
    main()
