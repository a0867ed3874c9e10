r"""Measure what a choice of schemes for a size gains over one scheme for all layers, and how well
it is estimated.

    python scripts/measure/measure_fit.py MODEL CALIBRATION TEXT... [--bits 4.5,...] \
        [--schemes int4-g64,...] [--seeds 3] [--estimates]

Prints a table in Markdown: bits a weight of the linears, KL(source || quantized) per token in units
of 1e-4 over 60 windows of 256 tokens of every text, the KL that was estimated, and the bytes of the
files of weights, predicted and on disk; GPTQ with 128 samples of 256 tokens. The source's own float
type is kept, and scales are stored in it. With `--estimates` it holds what each unit of linears is
estimated to lose in each scheme against what it loses on the texts when nothing else is quantized,
as rank correlation and ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import quantkit
from quantkit.bit_allocation.allocation import CANDIDATES
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch
from quantkit.quality.measures import compare_batches, text_windows
from quantkit.tensors.recipe import Override, Recipe
from quantkit.text.tokenizer import load_tokenizer, prompt_start

WINDOW, WINDOWS, SAMPLES = 256, 60, 128


class Measurement:
    """One model, its texts, and a folder for what is made of it."""

    def __init__(self, model: Path, calibration: Path, texts: Sequence[Path], folder: Path) -> None:
        self.source, self.calibration, self.folder = folder / "source", calibration, folder
        quantkit.convert(model, self.source, to="hf")
        tokenizer = load_tokenizer(self.source)
        ids = [tokenizer.encode(text.read_text()) for text in texts]
        self.batches = [
            Batch.from_start(text_windows(own, prompt_start(tokenizer), WINDOW)[:WINDOWS])
            for own in ids
        ]
        self._count = 0

    def quantized(
        self, scheme: str | Recipe | None, seed: int, **options: float
    ) -> quantkit.QuantizeResult:
        self._count += 1
        return quantkit.quantize(
            self.source,
            self.folder / str(self._count),
            scheme,
            method="gptq",
            calibration=self.calibration,
            samples=SAMPLES,
            length=WINDOW,
            seed=seed,
            accept_quality_loss=True,
            **options,
        )

    def kl(self, made: quantkit.QuantizeResult) -> list[float]:
        found = compare_batches(
            open_checkpoint(self.source), open_checkpoint(made.path), self.batches
        )
        return [1e4 * one.divergence.kl for one in found]


def estimates(measured: Measurement) -> None:
    """Hold the estimates of each unit against what it costs alone."""
    allocation = measured.quantized(None, 0, target_bits=4.5).allocation
    assert allocation is not None
    found = []
    for scheme in map(str, CANDIDATES[:3:2]):
        for unit in allocation.units:
            others = (
                Override("*", None),
                *(Override(one, CANDIDATES[0].parse(scheme)) for one in unit.modules),
            )
            kl = measured.kl(measured.quantized(Recipe(CANDIDATES[0], others), 0))
            found.append([1e4 * unit.estimated_kl[scheme], *kl])
            print(
                f"layer {unit.layer} {unit.linears} {scheme}:",
                *(f"{one:.3f}" for one in found[-1]),
                flush=True,
            )
    table = torch.tensor(found, dtype=torch.float64).t()
    ranks = table.argsort(1).argsort(1).double()
    for number in range(1, len(table)):
        rank, ratio = torch.corrcoef(ranks[[0, number]])[0, 1], table[0].sum() / table[number].sum()
        print(f"text {number}: rank correlation {rank:.3f}, estimated / measured {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bits", default="4.5")
    parser.add_argument("--schemes", default="int4-g64,int4-g32")
    parser.add_argument("--estimates", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = Measurement(options.model, options.calibration, options.texts, Path(folder))
        if options.estimates:
            estimates(measured)
            return
        texts = [f"KL {text.stem}" for text in options.texts]
        head = ["schemes", "seed", "bits", "s", *texts, "estimated", "predicted", "on disk"]
        print("|", " | ".join(head), "|\n" + "|---" * len(head) + "|")
        sizes = [float(bits) for bits in options.bits.split(",") if bits]
        for seed in range(options.seeds):
            for scheme in [*options.schemes.split(","), *sizes]:
                began = time.monotonic()
                if isinstance(scheme, float):
                    made = measured.quantized(None, seed, target_bits=scheme)
                else:
                    made = measured.quantized(scheme, seed)
                seconds, chosen = time.monotonic() - began, made.allocation
                predicted = ("", "", "")
                if chosen is not None:
                    predicted = (
                        f"{chosen.bits:.4g}",
                        f"{1e4 * chosen.kl:.2f}",
                        str(chosen.weight_bytes),
                    )
                kl = " | ".join(f"{one:.2f}" for one in measured.kl(made))
                size = sum(file.stat().st_size for file in made.path.glob("*.safetensors"))
                row = (scheme, seed, predicted[0], f"{seconds:.1f}", kl, *predicted[1:], size)
                print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
