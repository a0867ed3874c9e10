"""Make compressed-tensors folders with llm-compressor, one of each form, and say what the weights
mean to their owner.

    python scripts/peers/peer_compressed_tensors.py MODEL OUT [--kinds W4A16 W8A8]

Runs in a separate environment, with `llmcompressor` and without quantkit. MODEL is a Hugging Face
folder. OUT/KIND becomes a folder of each kind, OUT/KIND.floats.safetensors the weights that
compressed-tensors decompresses from it, by their names: what `compare_with_owner.py` holds
quantkit's reading against. Its log goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

with contextlib.redirect_stdout(sys.stderr):  # it logs to what is stdout at its import
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from peer_llmcompressor import quantize

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import find_versions

PACKAGES = ("llmcompressor", "compressed-tensors", "transformers")

G32 = {"num_bits": 4, "strategy": "group", "group_size": 32}
ROWS = {"num_bits": 8, "strategy": "channel"}
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "symmetric": False}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str | None]] = {
    "W4A16": ({**G32, "symmetric": True}, None, None),
    "W4A16_ASYM": ({**G32, "symmetric": False}, None, None),
    "W8A16": ({**ROWS, "symmetric": True}, None, None),
    "W8A16_ASYM": ({**ROWS, "symmetric": False}, None, None),
    "W8A16_TENSOR": ({"num_bits": 8, "strategy": "tensor", "symmetric": True}, None, None),
    "W8A8": ({**ROWS, "symmetric": True}, TOKENS, None),
    "W8A8_ASYM": ({**ROWS, "symmetric": False}, TOKENS, None),
    "W8A8_STATIC": ({**ROWS, "symmetric": True}, STATIC, None),
    "W4A8": ({**G32, "symmetric": True}, TOKENS, None),
    "W4A16_STATIC_ORDER": ({**G32, "symmetric": True}, None, "static"),
    "W4A16_WEIGHT_ORDER": ({**G32, "symmetric": True}, None, "weight"),
}
"""Weights, activations, and the order in which GPTQ goes through columns; others are rounded."""


def make(model: Path, kind: str, out: Path) -> None:
    """Quantize a model to a kind, and write the folder."""
    weights, activations, order = KINDS[kind]
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(type="int", **weights),
        input_activations=None
        if activations is None
        else QuantizationArgs(type="int", **activations),
    )
    groups = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    recipe = (
        QuantizationModifier(**groups) if order is None else GPTQModifier(**groups, actorder=order)
    )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, loaded.config.vocab_size, (8, 64), generator=generator)
    quantize(loaded, tokens, recipe)
    loaded.save_pretrained(out, save_compressed=True)


def floats(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that compressed-tensors itself decompresses."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    scheme = QuantizationScheme(**{key: value for key, value in group.items() if key != "format"})
    compressor = BaseCompressor.get_value_from_registry(group.get("format") or settings["format"])
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for scale in [name for name in stored if name.endswith(".weight_scale")]:
        module = scale.removesuffix("weight_scale")
        parts = {}
        for name, tensor in stored.items():
            if name.startswith(module):
                parts[name.removeprefix(module)] = tensor
        weights[f"{module}weight"] = compressor.decompress(parts, scheme)["weight"].contiguous()
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    options = parser.parse_args()
    for kind in options.kinds:
        folder = options.out / kind
        with contextlib.redirect_stdout(sys.stderr):
            make(options.model, kind, folder)
            means = floats(folder)
        save_file(means, options.out / f"{kind}.floats.safetensors")
        print(json.dumps({"kind": kind, "weights": len(means)}), flush=True)
    print(json.dumps(find_versions(PACKAGES)))


if __name__ == "__main__":
    main()
