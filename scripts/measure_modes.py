"""Measure what the activations of the CPU kernels cost: KL of each backend to the reference backend.

    python scripts/measure_modes.py MODEL TEXT... [--schemes int8,int4-g128,int4-g32]

MODEL is rounded to each scheme; then the same quantized model runs through each backend, 60 windows of
256 tokens a text. Prints a table in Markdown: KL(reference || backend) per token in units of 1e-6 nats,
and beside it, for the size of things, KL(source || quantized) of the reference in the same units.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import quantkit
from quantkit.model.load import load_model
from quantkit.quality import text_windows
from quantkit.tokenizer import load_tokenizer

WINDOW, WINDOWS = 256, 60


@torch.inference_mode()
def log_probabilities(folder: Path, windows: Tensor, backend: str | None) -> Tensor:
    """[W, T, V], in float32 activations."""
    model = load_model(folder, dtype=torch.float32, backend=backend)
    positions = torch.arange(windows.shape[1])
    return torch.cat([model(part, positions).float().log_softmax(-1) for part in windows.split(8)])


def divergence(reference: Tensor, other: Tensor) -> float:
    return float((reference.exp() * (reference - other)).sum(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--schemes", default="int8,int4-g128,int4-g32")
    options = parser.parse_args()
    print("| scheme | text | cpu-exact | cpu-fast | rounding itself |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(options.model)
        for scheme in options.schemes.split(","):
            quantized = Path(folder) / scheme
            quantkit.quantize(options.model, quantized, scheme, accept_quality_loss=True)
            for text in options.texts:
                windows = text_windows(tokenizer.encode(text.read_text()), tokenizer.bos_id, WINDOW)[:WINDOWS]
                expected = log_probabilities(quantized, windows, "reference")
                found = [divergence(expected, log_probabilities(quantized, windows, name)) * 1e6
                         for name in ("cpu-exact", "cpu-fast")]  # fmt: skip
                found.append(divergence(log_probabilities(options.model, windows, None), expected) * 1e6)
                print(f"| {scheme} | {text.stem} | " + " | ".join(f"{value:.3g}" for value in found) + " |", flush=True)


if __name__ == "__main__":
    main()
