r"""Time the solver of `quantkit quantize --to gguf` by scheme, with this machine's kernels and by
torch alone.

    python scripts/measure/measure_solver.py MODEL [--schemes q4_k_m,iq4_xs] [--samples 16] \
        [--length 128] [--kernels cpp,torch]

Each job runs whole, with its calibration and gate. Prints a table in Markdown: seconds of processor
time that the calls of `solve` take, of which the search for scales is a part, and those of the job.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import quantkit
from quantkit.calibration import group_solver
from quantkit.jobs.quantize import work
from quantkit.model.column_kernels import select_column_kernels
from quantkit.solver import gptq
from quantkit.solver.columns import TORCH


class Stopwatch:
    """The processor time of a function's calls.

    Attributes:
        seconds: of all calls so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its calls timed."""

        def run(*positional: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return function(*positional, **named)
            finally:
                self.seconds += time.process_time() - started

        return run


def measure(model: Path, scheme: str, kernels: str, options: argparse.Namespace) -> None:
    """Quantize once and print a row of the table."""
    solver = Stopwatch()
    search = Stopwatch()
    originals = group_solver.solve, gptq.search_blocks, work.select_column_kernels
    group_solver.solve = solver.watch(group_solver.solve)
    gptq.search_blocks = search.watch(gptq.search_blocks)
    if kernels == "torch":
        work.select_column_kernels = lambda _: TORCH
    else:
        # Their compilation and their test are not part of the solver's time.
        select_column_kernels(torch.device("cpu"))
    started = time.process_time()
    try:
        with tempfile.TemporaryDirectory() as folder:
            quantkit.quantize(
                model,
                Path(folder) / "model.gguf",
                scheme,
                to="gguf",
                samples=options.samples,
                length=options.length,
                accept_quality_loss=True,
            )
    finally:
        group_solver.solve, gptq.search_blocks, work.select_column_kernels = originals
    job_seconds = time.process_time() - started
    print(
        f"| {scheme} | {kernels} | {solver.seconds:.1f} | {search.seconds:.1f}"
        f" | {job_seconds:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--schemes", default="q4_k_m,iq4_xs")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--kernels", default="cpp,torch")
    options = parser.parse_args()
    print("| scheme | kernels | solver, s | search of scales, s | job, s |")
    print("|---|---|---|---|---|")
    for scheme in options.schemes.split(","):
        for kernels in options.kernels.split(","):
            measure(options.model, scheme, kernels, options)


if __name__ == "__main__":
    main()
