r"""Measure how the divergence and the time of GPTQ depend on the amount of calibration.

    python scripts/measure/measure_effort.py MODEL TEXT... [--scheme int4-g64] \
        [--efforts quick,default,thorough] [--lengths 128,256,512,1024,2048] [--seeds 2] \
        [--windows 24] [--window 512]

Runs `quantkit quantize MODEL` with each effort, and with samples of each length, on the packaged
text, and prints a table in Markdown: calibration tokens, tokens for each input of the widest
linear, seconds of the processors for the whole command, and KL(source || quantized) per token in
units of 1e-4 over the first windows of every file TEXT. MODEL is a folder of floats.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from quantkit.calibration.effort import inner_width
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.output.destination import MANIFEST

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import QUANTKIT, run_and_measure
from shared.tables import print_header, print_row
from shared.texts import cut_batches, format_kls, format_titles, measure_kls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--scheme", default="int4-g64")
    parser.add_argument("--efforts", default="quick,default,thorough")
    parser.add_argument("--lengths", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--window", type=int, default=512)
    options = parser.parse_args()
    width = inner_width(open_checkpoint(options.model).config)
    batches = cut_batches(options.model, options.texts, options.window, options.windows)
    efforts = [name for name in options.efforts.split(",") if name]
    lengths = [length for length in options.lengths.split(",") if length]
    runs = {name: ["--effort", name] for name in efforts}
    runs |= {f"--length {length}": ["--length", length] for length in lengths}
    columns = ["calibration", "seed", "tokens", "tokens/input", "processor s", "s"]
    print_header(*columns, *format_titles(options.texts))
    for name, amount in runs.items():
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                dst = Path(folder) / "model"
                arguments = ["--scheme", options.scheme, "--embedding", "keep"]
                arguments += ["--seed", seed, *amount]
                cost = run_and_measure([*QUANTKIT, "quantize", options.model, dst, *arguments])
                calibration = json.loads((dst / MANIFEST).read_text())["calibration"]
                kls = measure_kls(options.model, dst, batches)
            tokens = calibration["samples"] * calibration["length"]
            print_row(
                name,
                seed,
                tokens,
                f"{tokens / width:.0f}",
                f"{cost.processor:.0f}",
                f"{cost.seconds:.0f}",
                *format_kls(kls),
            )


if __name__ == "__main__":
    main()
