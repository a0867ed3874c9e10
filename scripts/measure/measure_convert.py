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
import subprocess
import sys
import time
from pathlib import Path

_REFUSED = 3  # quantkit's exit code for a source that makes no sense


def timed(command: list[str], code: int = 0) -> tuple[float, float]:
    """Seconds of wall time and peak memory in MB of one command that exits with a code, synced
    to disk.
    """
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != code:
        sys.exit(f"failed: {' '.join(command)}")
    os.sync()
    return time.monotonic() - started, usage.ru_maxrss * 1024 / 1e6


def fresh(path: Path) -> str:
    """The path, with nothing there and nothing left to write."""
    shutil.rmtree(path, ignore_errors=True)
    os.sync()
    time.sleep(1)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    out = options.source.with_name("measured-output")
    quantkit = [sys.executable, "-m", "quantkit.cli"]
    unchecked = "--no-source-check"
    ratios, peaks = [], {"convert": 0.0, "quantize": 0.0}
    print("| pair | cp -r, sync | convert | ratio |\n|---|---|---|---|")
    for pair in range(options.pairs):
        copied, _ = timed(["cp", "-r", str(options.source), fresh(out)])
        converted, peak = timed([*quantkit, "convert", str(options.source), fresh(out), unchecked])
        peaks["convert"] = max(peaks["convert"], peak)
        ratios.append(converted / copied)
        print(f"| {pair + 1} | {copied:.1f} s | {converted:.1f} s | {ratios[-1]:.2f} |", flush=True)
    seconds, peaks["quantize"] = timed(
        [
            *quantkit,
            "quantize",
            str(options.source),
            fresh(out),
            "--scheme",
            "int4-g128",
            "--method",
            "rtn",
            unchecked,
            "--accept-quality-loss",
        ]
    )
    checking, peaks["the check"] = timed(
        [*quantkit, "convert", str(options.source), fresh(out)], code=_REFUSED
    )
    fresh(out)
    print(
        f"\nmedian ratio {statistics.median(ratios):.2f}; quantize to int4-g128 in {seconds:.1f} s"
    )
    print(f"the check of the source takes {checking:.1f} s, start included")
    print(", ".join(f"peak memory of {name} {peak:.0f} MB" for name, peak in peaks.items()))


if __name__ == "__main__":
    main()
