r"""Quantize a model with llm-compressor's GPTQ, as a peer to measure quantkit's own against.

    python scripts/peers/peer_llmcompressor.py MODEL TOKENS OUT [--scheme int4-g128] \
        [--recipe imatrix_mse] [--ignore re:.*linear_attn.*]

Runs in a separate environment, with `llmcompressor` and without quantkit. MODEL is a Hugging Face
folder in float32, such as `quantkit convert --dtype fp32` writes; TOKENS a safetensors file whose
`tokens` [N, T], int64, are the calibration samples, BOS included. OUT becomes a compressed-tensors
folder: int4 symmetric in groups, decoder linears only, float32 scales.

Prints one line of JSON, in which `seconds` are those of llm-compressor's `oneshot` alone: neither
imports nor loading nor saving count. Its log goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

with contextlib.redirect_stdout(sys.stderr):  # it logs to what is stdout at its import
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import find_versions

GROUP_SIZES = {"int4-g128": 128, "int4-g64": 64, "int4-g32": 32}
OBSERVERS = {"default": None, "imatrix_mse": "imatrix_mse"}
PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")


def modifier(group_size: int, recipe: str, ignore: list[str]) -> GPTQModifier:
    """GPTQ as its authors set it, activation order over static groups; a recipe sets the scales'
    observer.
    """
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size
    )
    return GPTQModifier(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=["lm_head", *ignore],
        actorder="static",
        weight_observer=OBSERVERS[recipe],
    )


def quantize(model: PreTrainedModel, tokens: torch.Tensor, recipe: Any) -> float:
    """Quantize a model in place, and return the seconds that took.

    Args:
        model: the model.
        tokens: the calibration samples [N, T], one to a batch as is llm-compressor's default.
        recipe: llm-compressor's modifier.
    """
    samples = DataLoader([{"input_ids": sample} for sample in tokens])
    # It insists on a tokenizer, and has no use for one where the samples are tokens already.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"": 0}, unk_token=""))
    )
    started = time.perf_counter()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=samples,
        recipe=recipe,
        num_calibration_samples=len(tokens),
    )
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", choices=GROUP_SIZES, default="int4-g128")
    parser.add_argument("--recipe", choices=OBSERVERS, default="imatrix_mse")
    parser.add_argument(
        "--ignore", nargs="*", default=[], help="modules, or re:PATTERN, that keep their floats"
    )
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    recipe = modifier(GROUP_SIZES[options.scheme], options.recipe, options.ignore)
    seconds = quantize(model, load_file(options.tokens)["tokens"], recipe)
    model.save_pretrained(options.out, save_compressed=True)
    for file in options.model.glob("tokenizer*"):
        shutil.copy(file, options.out)
    answer = {
        "recipe": options.recipe,
        "scheme": options.scheme,
        "seconds": round(seconds, 2),
        "versions": find_versions(PACKAGES),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
