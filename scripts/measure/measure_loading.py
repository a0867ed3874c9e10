"""Measure the peak memory of loading models and generating a few tokens, against what `inspect`
states.

    python scripts/measure/measure_loading.py SMALL MODEL...

SMALL is a model of a few megabytes. The peak of its process, without its weights, is what the
program and its libraries take, and is subtracted from the others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quantkit
from shared.processes import QUANTKIT, run_and_measure
from shared.tables import print_header, print_row


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    arguments = parser.parse_args()
    program_bytes = measure_peak(arguments.small) - quantkit.inspect(arguments.small).run_bytes
    print_header("model", "file", "stated weights", "peak besides the program", "peak / file")
    for model in arguments.models:
        inspected = quantkit.inspect(model)
        peak = measure_peak(model) - program_bytes
        print_row(
            model.name,
            format_megabytes(inspected.weight_bytes),
            format_megabytes(inspected.run_bytes),
            format_megabytes(peak),
            f"{peak / inspected.weight_bytes:.2f}",
        )


def measure_peak(model: Path) -> int:
    """Measure the peak of the resident memory of a process that continues a word."""
    command = [*QUANTKIT, "generate", model, "Hi", "--max-new-tokens", "4", "--threads", "1"]
    return run_and_measure(command).memory


def format_megabytes(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
