r"""Time `quantkit quantize --method gptq` against llm-compressor's default GPTQ, as whole processes
in turn.

    python scripts/measure/measure_gptq_time.py CALIBRATION --peer PYTHON [--model MODEL] \
        [--shapes 2048x2,4096x1] [--samples 128] [--length 256] [--pairs 5] [--avx2]

Both start from the same float32 folder and the same samples, by default 128 of 256 tokens, and end
with a folder on disk; ours reads and tokenizes the text and passes the gate besides. PYTHON is an
interpreter that has llm-compressor. Without MODEL, models of random weights are made in the shapes
given, each the hidden size and the number of layers: such a model cannot predict text, so their
predictions are not checked. `--avx2` keeps both to AVX2.

Prints for each model a table in Markdown: seconds of the clock, those of all processors together,
which other processes change less, and the peak of memory, each with its ratio; and the median of
the ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from synthetic_checkpoint import write

import quantkit
from quantkit.calibration.data import load_calibration
from quantkit.text.tokenizer import load_tokenizer

SCHEME = "int4-g128"
HIDDEN = {1024: 2816, 2048: 5632, 4096: 11008}
"""Feed-forward sizes by hidden size."""
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "QUANTKIT_CPU": "avx2",
}
PEER = Path(__file__).resolve().parents[1] / "peers" / "peer_llmcompressor.py"


@dataclass(frozen=True)
class Cost:
    """What a process took.

    Attributes:
        seconds: of the clock.
        processor: seconds of all processors.
        memory: bytes, at the peak.
    """

    seconds: float
    processor: float
    memory: int


def cost(command: list[object], environment: dict[str, str]) -> Cost:
    """Run a command to its end.

    Raises:
        SystemExit: if it fails, with its last words.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env={**os.environ, **environment}
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit("".join(output.readlines()[-5:]))
    return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def measure(model: Path, folder: Path, options: argparse.Namespace, *, checked: bool) -> None:
    """Print the table of a model.

    Args:
        folder: to work in.
        checked: whether the model predicts text.
    """
    source, tokens = folder / "source", folder / "tokens.safetensors"
    quantkit.convert(model, source, to="hf", dtype="fp32", source_check=checked)
    drawn = load_calibration(
        options.calibration,
        load_tokenizer(source),
        samples=options.samples,
        length=options.length,
        seed=0,
    )
    save_file({"tokens": drawn.tokens}, tokens)
    environment = AVX2 if options.avx2 else {}
    ratios = []
    print("| pair | | quantkit | llm-compressor | ratio |\n|---|---|---|---|---|")
    for pair in range(1, options.pairs + 1):
        dst = folder / "dst"
        ours = cost(
            [
                sys.executable,
                "-m",
                "quantkit.cli",
                "quantize",
                source,
                dst,
                "--scheme",
                SCHEME,
                "--method",
                "gptq",
                "--calibration",
                options.calibration,
                "--samples",
                options.samples,
                "--length",
                options.length,
                *([] if checked else ["--no-source-check"]),
            ],
            environment,
        )
        shutil.rmtree(dst)
        theirs = cost(
            [options.peer, PEER, source, tokens, dst, "--scheme", SCHEME, "--recipe", "default"],
            environment,
        )
        shutil.rmtree(dst)
        found = [
            ours.seconds / theirs.seconds,
            ours.processor / theirs.processor,
            ours.memory / theirs.memory,
        ]
        ratios.append(found)
        print(
            f"| {pair} | clock | {ours.seconds:.1f} s | {theirs.seconds:.1f} s | {found[0]:.2f} |"
        )
        print(
            f"| | processors | {ours.processor:.1f} s | {theirs.processor:.1f} s | {found[1]:.2f} |"
        )
        print(
            f"| | memory | {ours.memory / 1e9:.2f} GB | {theirs.memory / 1e9:.2f} GB |"
            f" {found[2]:.2f} |",
            flush=True,
        )
    clock, processor, memory = (statistics.median(some) for some in zip(*ratios, strict=True))
    print(
        f"\nMedian ratios: clock {clock:.2f}, processors {processor:.2f}, memory {memory:.2f}\n",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--peer", metavar="PYTHON", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shapes", default="2048x2,4096x1")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--avx2", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.model is not None:
            measure(options.model, Path(scratch), options, checked=True)
            return
        for shape in options.shapes.split(","):
            dim, layers = map(int, shape.split("x"))
            print(
                f"Hidden size {dim}, {layers} layers, {options.samples} samples of {options.length}"
                " tokens:\n"
            )
            folder = Path(scratch) / shape
            write(folder / "meta", dim=dim, hidden=HIDDEN[dim], layers=layers, shards=1)
            measure(folder / "meta", folder, options, checked=False)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
