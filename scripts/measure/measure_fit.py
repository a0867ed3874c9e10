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
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import quantkit
from quantkit.bit_allocation.size_target import CANDIDATES
from quantkit.tensors.recipe import Override, Recipe

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.tables import print_header, print_row
from shared.texts import (
    SAMPLES,
    WINDOW,
    add_text_arguments,
    cut_batches,
    format_kls,
    format_titles,
    measure_kls,
)


class Measurement:
    """One model, its texts, and a folder for what is made of it."""

    def __init__(self, model: Path, calibration: Path, texts: Sequence[Path], folder: Path) -> None:
        self.source = folder / "source"
        self.calibration = calibration
        self.folder = folder
        quantkit.convert(model, self.source, to="hf")
        self.batches = cut_batches(self.source, texts)
        self._count = 0

    def quantize(
        self, scheme: str | Recipe | None, seed: int, **options: float
    ) -> quantkit.QuantizeResult:
        """Quantize the model by GPTQ into a new folder."""
        self._count += 1
        return quantkit.quantize(
            self.source,
            self.folder / str(self._count),
            scheme,
            embedding="keep",
            method="gptq",
            calibration=self.calibration,
            samples=SAMPLES,
            length=WINDOW,
            seed=seed,
            accept_quality_loss=True,
            **options,
        )

    def measure_kls(self, result: quantkit.QuantizeResult) -> list[float]:
        """Return the KL of a result on each text, in units of 1e-4 nats."""
        return measure_kls(self.source, result.path, self.batches)


def compare_estimates(measurement: Measurement) -> None:
    """Hold the estimates of each unit against what it costs alone."""
    allocation = measurement.quantize(None, 0, target_bits=4.5).allocation
    assert allocation is not None
    rows = []
    for scheme in map(str, CANDIDATES[:3:2]):
        for unit in allocation.units:
            quantized = [Override(module, CANDIDATES[0].parse(scheme)) for module in unit.modules]
            recipe = Recipe(CANDIDATES[0], (Override("*", None), *quantized))
            kls = measurement.measure_kls(measurement.quantize(recipe, 0))
            rows.append([1e4 * unit.losses[scheme], *kls])
            figures = [f"{kl:.3f}" for kl in rows[-1]]
            print(f"layer {unit.layer} {unit.linears} {scheme}:", *figures, flush=True)
    # Row 0 has the estimates, each of the others what was measured on a text.
    table = torch.tensor(rows, dtype=torch.float64).t()
    ranks = table.argsort(1).argsort(1).double()
    for number in range(1, len(table)):
        rank = torch.corrcoef(ranks[[0, number]])[0, 1]
        ratio = table[0].sum() / table[number].sum()
        print(f"text {number}: rank correlation {rank:.3f}, estimated / measured {ratio:.2f}")


def measure_scheme(measurement: Measurement, scheme: str | float, seed: int) -> None:
    """Quantize to a scheme, or to a number of bits a weight, and print a row."""
    started = time.monotonic()
    if isinstance(scheme, float):
        result = measurement.quantize(None, seed, target_bits=scheme)
    else:
        result = measurement.quantize(scheme, seed)
    seconds = time.monotonic() - started
    bits = estimated_kl = predicted_bytes = ""
    if result.allocation is not None:
        bits = f"{result.allocation.bits:.4g}"
        estimated_kl = f"{1e4 * result.allocation.loss:.2f}"
        predicted_bytes = str(result.allocation.weight_bytes)
    kls = format_kls(measurement.measure_kls(result))
    size = sum(file.stat().st_size for file in result.path.glob("*.safetensors"))
    print_row(scheme, seed, bits, f"{seconds:.1f}", *kls, estimated_kl, predicted_bytes, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_text_arguments(parser)
    parser.add_argument("--bits", default="4.5")
    parser.add_argument("--schemes", default="int4-g64,int4-g32")
    parser.add_argument("--estimates", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measurement = Measurement(options.model, options.calibration, options.texts, Path(folder))
        if options.estimates:
            compare_estimates(measurement)
            return
        titles = format_titles(options.texts)
        print_header("schemes", "seed", "bits", "s", *titles, "estimated", "predicted", "on disk")
        sizes = [float(bits) for bits in options.bits.split(",") if bits]
        for seed in range(options.seeds):
            for scheme in [*options.schemes.split(","), *sizes]:
                measure_scheme(measurement, scheme, seed)


if __name__ == "__main__":
    main()
