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
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import quantkit
from quantkit.model.cache import KVCache
from quantkit.model.load import load_model

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.tables import print_header, print_row
from shared.texts import average_kl, cut_windows


@torch.inference_mode()
def compute_log_probs(
    folder: Path, windows: Tensor, backend: str | None, *, int8_cache: bool = False
) -> Tensor:
    """Return logarithms of probabilities [W, T, V], in float32 activations."""
    model = load_model(folder, device="cpu", dtype=torch.float32, backend=backend)
    positions = torch.arange(windows.shape[1])
    parts = []
    for part in windows.split(8):
        cache = KVCache(model.config, *part.shape, torch.int8, "cpu") if int8_cache else None
        parts.append(model(part, positions, cache).float().log_softmax(-1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--schemes", default="int8,int4-g128,int4-g32")
    options = parser.parse_args()
    print_header("scheme", "text", "cpu-exact", "cpu-fast", "int8 cache", "rounding itself")
    with tempfile.TemporaryDirectory() as folder:
        for scheme in options.schemes.split(","):
            quantized = Path(folder) / scheme
            quantkit.quantize(
                options.model,
                quantized,
                scheme,
                embedding="keep",
                method="rtn",
                accept_quality_loss=True,
            )
            for text in options.texts:
                windows = cut_windows(options.model, text)
                reference = compute_log_probs(quantized, windows, "reference")
                kls = []
                for backend in ("cpu-exact", "cpu-fast"):
                    log_probs = compute_log_probs(quantized, windows, backend)
                    kls.append(average_kl(reference, log_probs))
                cached = compute_log_probs(quantized, windows, "reference", int8_cache=True)
                kls.append(average_kl(reference, cached))
                source = compute_log_probs(options.model, windows, None)
                kls.append(average_kl(source, reference))
                print_row(scheme, text.stem, *(f"{1e6 * kl:.3g}" for kl in kls))


if __name__ == "__main__":
    main()
