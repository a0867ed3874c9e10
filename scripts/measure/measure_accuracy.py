r"""Measure how far quantized models are from their source, on texts the calibration has not seen.

    python scripts/measure/measure_accuracy.py MODEL CALIBRATION TEXT... [--seeds 3] \
        [--schemes int4-g128,...] [--samples 128] [--peer PYTHON] \
        [--autoround PYTHON [--iterations 200,1000]] [--refine] [--methods METHOD...]

Prints a table in Markdown: KL(source || quantized) per token in units of 1e-4, over 60 windows of
256 tokens of every text, for rounding and for GPTQ with samples of 256 tokens; with `--refine` also
for what `quantkit refine` makes of both of GPTQ's results, with scales and norms trained, and with
codes too. The model is held in float32, scales included. PYTHON is an interpreter that has
llm-compressor; its GPTQ is then run on the same tokens in between. Seconds are of the whole of
`quantize`, with the share of the solver (streams and GPTQ) in parentheses; of llm-compressor's
`oneshot`, without loading and saving. The other PYTHON has auto-round, which is run on the tokens
of seed 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import quantkit
from quantkit.calibration.gptq_quantizer import GptqQuantizer
from quantkit.tensors.scheme import QuantScheme

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import run_peer
from shared.tables import print_header, print_row
from shared.texts import (
    SAMPLES,
    WINDOW,
    add_text_arguments,
    cut_batches,
    format_kls,
    format_titles,
    measure_kls,
    save_samples,
)

Method = Callable[[str, int], tuple[Path, str]]
"""Quantizes to a scheme with a seed; gives the folder and what to print of its time."""


class Runs:
    """The ways to quantize one model, each a `Method`."""

    def __init__(self, source: Path, calibration: Path, folder: Path, samples: int) -> None:
        self.source = source
        self.calibration = calibration
        self.folder = folder
        self.samples = samples

    def round(self, scheme: str, seed: int) -> tuple[Path, str]:
        """Round to nearest."""
        started = time.monotonic()
        dst = self._dst("rtn", scheme, seed)
        quantkit.quantize(
            self.source, dst, scheme, embedding="keep", method="rtn", accept_quality_loss=True
        )
        return dst, f"{time.monotonic() - started:.1f}"

    def run_gptq(self, scheme: str, seed: int, *, thorough: bool = False) -> tuple[Path, str]:
        """Run GPTQ; the time has that of the solver in parentheses."""
        solver_seconds = 0.0
        solve = GptqQuantizer.solve

        def solve_and_time(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal solver_seconds
            before = time.monotonic()
            result = solve(*arguments, **options)
            solver_seconds += time.monotonic() - before
            return result

        GptqQuantizer.solve = solve_and_time  # type: ignore[method-assign]
        started = time.monotonic()
        dst = self._dst(f"gptq{thorough}", scheme, seed)
        try:
            quantkit.quantize(
                self.source,
                dst,
                scheme,
                embedding="keep",
                method="gptq",
                calibration=self.calibration,
                samples=self.samples,
                length=WINDOW,
                seed=seed,
                thorough=thorough,
            )
        finally:
            GptqQuantizer.solve = solve  # type: ignore[method-assign]
        return dst, f"{time.monotonic() - started:.1f} ({solver_seconds:.1f})"

    def refine(self, start: str, scheme: str, seed: int, *, codes: bool) -> tuple[Path, str]:
        """Refine a result of GPTQ that is there, of `start`, which is gptq or thorough."""
        dst = self._dst(f"{start}-refined{codes}", scheme, seed)
        result = quantkit.refine(
            self._dst("gptq" + str(start == "thorough"), scheme, seed),
            dst,
            against=self.source,
            calibration=self.calibration,
            samples=self.samples,
            length=WINDOW,
            seed=seed,
            train_norms=True,
            train_codes=codes,
        )
        return dst, f"+ {result.seconds:.1f}"

    def run_llmcompressor(
        self, python: str, recipe: str, scheme: str, seed: int
    ) -> tuple[Path, str]:
        """Run llm-compressor's GPTQ by a recipe, on the samples that quantkit draws."""
        dst = self._dst(recipe, scheme, seed)
        arguments = [self.source, self._save_samples(seed), dst, "--scheme", scheme]
        answer = run_peer(python, "peer_llmcompressor.py", *arguments, "--recipe", recipe)
        return dst, _read_seconds(answer)

    def run_autoround(
        self, python: str, iterations: int, scheme: str, seed: int
    ) -> tuple[Path, str]:
        """Run AutoRound on the same samples."""
        dst = self._dst(f"autoround{iterations}", scheme, seed)
        group_size = QuantScheme.parse(scheme).group_size
        arguments = ["tune", self.source, dst, self._save_samples(seed)]
        options = ["--iterations", iterations, "--group-size", group_size]
        return dst, _read_seconds(run_peer(python, "peer_autoround.py", *arguments, *options))

    def _save_samples(self, seed: int) -> Path:
        path = self.folder / f"tokens-{seed}.safetensors"
        if path.exists():
            return path
        return save_samples(path, self.source, self.calibration, seed=seed, samples=self.samples)

    def _dst(self, name: str, scheme: str, seed: int) -> Path:
        return self.folder / f"{scheme}-{name}-{seed}"


def _read_seconds(answer: str) -> str:
    """Return the seconds in the last line of a peer's answer."""
    return f"{json.loads(answer.splitlines()[-1])['seconds']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_text_arguments(parser)
    parser.add_argument("--schemes", default="int4-g128,int4-g64,int4-g32")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--refine", action="store_true")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--autoround", metavar="PYTHON")
    parser.add_argument("--iterations", default="200,1000")
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="names in the table; default: all"
    )
    options = parser.parse_args()
    print_header("scheme", "method", "seed", "s", *format_titles(options.texts))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        quantkit.convert(options.model, source, dtype="fp32")
        batches = cut_batches(source, options.texts)
        runs = Runs(source, options.calibration, Path(folder), options.samples)
        for scheme in options.schemes.split(","):
            for seed in range(options.seeds):
                for name, run in select_methods(runs, seed, options).items():
                    dst, seconds = run(scheme, seed)
                    kls = measure_kls(source, dst, batches)
                    print_row(scheme, name, seed, seconds, *format_kls(kls))


def select_methods(runs: Runs, seed: int, options: argparse.Namespace) -> dict[str, Method]:
    """Return the methods to run with a seed, by their names in the table, in order."""
    methods: dict[str, Method] = {}
    if seed == 0:
        methods["rtn"] = runs.round
    if seed == 0 and options.autoround is not None:
        for count in map(int, options.iterations.split(",")):
            methods[f"AutoRound, {count} iterations"] = partial(
                runs.run_autoround, options.autoround, count
            )
    methods["gptq"] = runs.run_gptq
    methods["gptq, thorough"] = partial(runs.run_gptq, thorough=True)
    for start in ("gptq", "thorough") if options.refine else ():
        methods[f"{start}, refined"] = partial(runs.refine, start, codes=False)
        methods[f"{start}, refined with codes"] = partial(runs.refine, start, codes=True)
    for recipe in ("imatrix_mse", "default") if options.peer is not None else ():
        methods[f"llm-compressor, {recipe}"] = partial(runs.run_llmcompressor, options.peer, recipe)
    if options.methods is None:
        return methods
    return {name: run for name, run in methods.items() if name in options.methods}


if __name__ == "__main__":
    main()
