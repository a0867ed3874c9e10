"""Measure convert and quantize against a plain copy, in pairs, with peak memory.

    python scripts/measure/synthetic_checkpoint.py /tmp/synthetic
    python scripts/measure/measure_convert.py /tmp/synthetic [--pairs 5]

Writes next to the source and removes what it wrote. Prints a table in Markdown. The weights are
random, so the check of the source is left out, and timed apart: it ends the command as it should.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import QUANTKIT, run_and_measure
from shared.tables import print_header, print_row

_REFUSED = 3  # quantkit's exit code for a source that makes no sense


def run_and_sync(command: Sequence[object], *, code: int = 0) -> tuple[float, float]:
    """Run a command that exits with a code, and return the seconds of the clock until all is on
    disk, and the peak of memory in MB.
    """
    cost = run_and_measure(command, code=code)
    started = time.monotonic()
    os.sync()
    return cost.seconds + time.monotonic() - started, cost.memory / 1e6


def clear(path: Path) -> Path:
    """Return the path, with nothing there and nothing left to write."""
    shutil.rmtree(path, ignore_errors=True)
    os.sync()
    time.sleep(1)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    source = options.source
    out = source.with_name("measured-output")
    ratios = []
    peaks = {"convert": 0.0, "quantize": 0.0}
    print_header("pair", "cp -r, sync", "convert", "ratio")
    for pair in range(options.pairs):
        copy_seconds, _ = run_and_sync(["cp", "-r", source, clear(out)])
        seconds, peak = run_and_sync(
            [*QUANTKIT, "convert", source, clear(out), "--no-source-check"]
        )
        peaks["convert"] = max(peaks["convert"], peak)
        ratios.append(seconds / copy_seconds)
        print_row(pair + 1, f"{copy_seconds:.1f} s", f"{seconds:.1f} s", f"{ratios[-1]:.2f}")
    quantize = [*QUANTKIT, "quantize", source, clear(out), "--scheme", "int4-g128"]
    quantize += ["--method", "rtn", "--no-source-check", "--accept-quality-loss"]
    seconds, peaks["quantize"] = run_and_sync(quantize)
    convert = [*QUANTKIT, "convert", source, clear(out)]
    check_seconds, peaks["the check"] = run_and_sync(convert, code=_REFUSED)
    clear(out)
    print(
        f"\nmedian ratio {statistics.median(ratios):.2f}; quantize to int4-g128 in {seconds:.1f} s"
    )
    print(f"the check of the source takes {check_seconds:.1f} s, start included")
    print(", ".join(f"peak memory of {name} {peak:.0f} MB" for name, peak in peaks.items()))


if __name__ == "__main__":
    main()
