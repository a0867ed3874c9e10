"""Measure how far quantized models are from their source, on texts the calibration has not seen.

    python scripts/measure_accuracy.py MODEL CALIBRATION TEXT... [--seeds 3] [--schemes int4-g128,...]

Prints a table in Markdown: KL(source || quantized) per token in units of 1e-4, over 60 windows of
256 tokens of each text, for rounding and for GPTQ with 128 samples of 256 tokens. The model is held
in float32, scales included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from torch import Tensor

import quantkit
from quantkit.formats.detect import open_checkpoint
from quantkit.model.blockwise import Batch
from quantkit.quality import divergence, text_windows
from quantkit.tokenizer import load_tokenizer

WINDOW, WINDOWS, SAMPLES = 256, 60, 128


def windows(model: Path, text: Path) -> Tensor:
    """The first windows of a text."""
    tokenizer = load_tokenizer(model)
    return text_windows(tokenizer.encode(text.read_text()), tokenizer.bos_id, WINDOW)[:WINDOWS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schemes", default="int4-g128,int4-g64,int4-g32")
    options = parser.parse_args()
    print("| scheme | method | seed | s |", " | ".join(f"KL {text.stem}" for text in options.texts), "|")
    print("|---" * (4 + len(options.texts)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        quantkit.convert(options.model, source, dtype="fp32")
        batches = [Batch.from_start(windows(source, text)) for text in options.texts]
        for scheme in options.schemes.split(","):
            runs: list[tuple[str, int]] = [("rtn", 0), *(("gptq", seed) for seed in range(options.seeds))]
            for method, seed in runs:
                dst = Path(folder) / f"{scheme}-{method}-{seed}"
                started = time.monotonic()
                if method == "gptq":
                    quantkit.quantize(
                        source, dst, scheme, method="gptq", calibration=options.calibration,
                        samples=SAMPLES, length=WINDOW, seed=seed,
                    )  # fmt: skip
                else:
                    quantkit.quantize(source, dst, scheme)
                seconds = time.monotonic() - started
                found = divergence(open_checkpoint(source), open_checkpoint(dst), batches)
                values = " | ".join(f"{one.kl * 1e4:.2f}" for one in found)
                print(f"| {scheme} | {method} | {seed} | {seconds:.1f} | {values} |", flush=True)


if __name__ == "__main__":
    main()
