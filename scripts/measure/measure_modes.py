"""Measure what the activations of the CPU kernels, and an int8 cache, cost: KL to the reference
backend.

    python scripts/measure/measure_modes.py MODEL TEXT... [--schemes int8,int4-g128,int4-g32]

MODEL is rounded to each scheme; then the same quantized model runs through each backend, 60 windows
of 256 tokens per text, and the reference once more over an int8 cache. Prints a table in Markdown:
KL(reference || other) per token in units of 1e-6 nats, and next to it, for comparison, KL(source ||
quantized) of the reference in the same units.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import quantkit
from quantkit.model.cache import KVCache
from quantkit.model.load import load_model
from quantkit.quality.measures import text_windows
from quantkit.text.tokenizer import load_tokenizer, prompt_start

WINDOW, WINDOWS = 256, 60


@torch.inference_mode()
def log_probabilities(
    folder: Path, windows: Tensor, backend: str | None, *, int8_cache: bool = False
) -> Tensor:
    """[W, T, V], in float32 activations."""
    model = load_model(folder, device="cpu", dtype=torch.float32, backend=backend)
    positions = torch.arange(windows.shape[1])
    parts = []
    for part in windows.split(8):
        cache = KVCache(model.config, *part.shape, torch.int8, "cpu") if int8_cache else None
        parts.append(model(part, positions, cache).float().log_softmax(-1))
    return torch.cat(parts)


def divergence(reference: Tensor, other: Tensor) -> float:
    return float((reference.exp() * (reference - other)).sum(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--schemes", default="int8,int4-g128,int4-g32")
    options = parser.parse_args()
    print(
        "| scheme | text | cpu-exact | cpu-fast | int8 cache | rounding itself"
        " |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(options.model)
        for scheme in options.schemes.split(","):
            quantized = Path(folder) / scheme
            quantkit.quantize(
                options.model, quantized, scheme, method="rtn", accept_quality_loss=True
            )
            for text in options.texts:
                windows = text_windows(
                    tokenizer.encode(text.read_text()), prompt_start(tokenizer), WINDOW
                )[:WINDOWS]
                expected = log_probabilities(quantized, windows, "reference")
                found = [
                    divergence(expected, log_probabilities(quantized, windows, name)) * 1e6
                    for name in ("cpu-exact", "cpu-fast")
                ]
                rounded = log_probabilities(quantized, windows, "reference", int8_cache=True)
                found.append(divergence(expected, rounded) * 1e6)
                found.append(
                    divergence(log_probabilities(options.model, windows, None), expected) * 1e6
                )
                print(
                    f"| {scheme} | {text.stem} | "
                    + " | ".join(f"{value:.3g}" for value in found)
                    + " |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
