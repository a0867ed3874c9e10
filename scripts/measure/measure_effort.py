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
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from quantkit.calibration.effort import inner_width
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.output.destination import MANIFEST
from quantkit.model.layerwise import Batch
from quantkit.quality.measures import compare_batches, text_windows
from quantkit.text.tokenizer import load_tokenizer, prompt_start


def quantized(model: Path, dst: Path, options: Sequence[str]) -> tuple[float, float]:
    """Quantize a model; the seconds that the processors worked, and those of the clock."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "quantkit.cli", "quantize", model, dst, *options]
    subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        time.monotonic() - began,
    )


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
    source, tokenizer = open_checkpoint(options.model), load_tokenizer(options.model)
    batches = [
        Batch.from_start(
            text_windows(
                tokenizer.encode(text.read_text()), prompt_start(tokenizer), options.window
            )[: options.windows]
        )
        for text in options.texts
    ]
    runs = [(name, ["--effort", name]) for name in options.efforts.split(",") if name]
    runs += [
        (f"--length {length}", ["--length", length])
        for length in options.lengths.split(",")
        if length
    ]
    columns = ["calibration", "seed", "tokens", "tokens/input", "processor s", "s"]
    print(
        f"| {' | '.join(columns)} |", " | ".join(f"KL {text.stem}" for text in options.texts), "|"
    )
    print("|---" * (len(columns) + len(options.texts)) + "|")
    for name, given in runs:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                dst = Path(folder) / "model"
                worked, took = quantized(
                    options.model, dst, ["--scheme", options.scheme, "--seed", str(seed), *given]
                )
                calibration = json.loads((dst / MANIFEST).read_text())["calibration"]
                tokens = calibration["samples"] * calibration["length"]
                found = compare_batches(source, open_checkpoint(dst), batches)
            values = " | ".join(f"{one.divergence.kl * 1e4:.2f}" for one in found)
            each = tokens / inner_width(source.config)
            print(
                f"| {name} | {seed} | {tokens} | {each:.0f} | {worked:.0f} | {took:.0f} |"
                f" {values} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
