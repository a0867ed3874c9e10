"""Time `quantkit quantize --method gptq` against llm-compressor's default GPTQ, as whole processes in turn.

    python scripts/measure_gptq_time.py MODEL CALIBRATION --peer PYTHON [--pairs 5]

Both start from the same float32 folder and the same 128 samples of 256 tokens and end with a folder on
disk; ours reads and tokenizes the text and passes the gate besides. PYTHON is an interpreter that has
llm-compressor. Prints a table in Markdown and the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import save_file

import quantkit
from quantkit.calibration.data import load_calibration
from quantkit.text.tokenizer import load_tokenizer

SAMPLES, LENGTH, SCHEME = 128, 256, "int4-g128"
PEER = Path(__file__).with_name("peer_llmcompressor.py")


def seconds(command: list[object]) -> float:
    started = time.monotonic()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--peer", metavar="PYTHON", required=True)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    ratios = []
    print("| pair | quantkit | llm-compressor | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, tokens = folder / "source", folder / "tokens.safetensors"
        quantkit.convert(options.model, source, dtype="fp32")
        drawn = load_calibration(options.calibration, load_tokenizer(source), samples=SAMPLES, length=LENGTH, seed=0)
        save_file({"tokens": drawn.tokens}, tokens)
        for pair in range(options.pairs):
            ours = seconds([
                sys.executable, "-m", "quantkit.cli", "quantize", source, folder / f"ours-{pair}", "--scheme", SCHEME,
                "--method", "gptq", "--calibration", options.calibration, "--samples", SAMPLES, "--length", LENGTH,
            ])  # fmt: skip
            theirs = seconds([options.peer, PEER, source, tokens, folder / f"theirs-{pair}", "--scheme", SCHEME,
                              "--recipe", "default"])  # fmt: skip
            ratios.append(ours / theirs)
            print(f"| {pair + 1} | {ours:.1f} s | {theirs:.1f} s | {ratios[-1]:.2f} |", flush=True)
    print(f"\nMedian ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
