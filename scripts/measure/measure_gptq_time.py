r"""Time `quantkit quantize --method gptq` against llm-compressor's default GPTQ, as whole processes
in turn.

    python scripts/measure/measure_gptq_time.py CALIBRATION --peer PYTHON [--model MODEL] \
        [--shapes 2048x2,4096x1] [--scheme int4-g128] [--samples 128] [--length 256] \
        [--pairs 5] [--avx2]

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
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from synthetic_checkpoint import write

import quantkit

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import PEERS, QUANTKIT, run_and_measure
from shared.tables import print_header, print_row
from shared.texts import save_samples

SCHEMES = ("int4-g128", "int4-g64", "int4-g32")
"""Those that the peer's script knows."""
HIDDEN = {1024: 2816, 2048: 5632, 4096: 11008}
"""Feed-forward sizes by hidden size."""
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "QUANTKIT_CPU": "avx2",
}


def measure(model: Path, folder: Path, options: argparse.Namespace, *, checked: bool) -> None:
    """Print the table of a model.

    Args:
        folder: to work in.
        checked: whether the model predicts text.
    """
    source = folder / "source"
    dst = folder / "dst"
    quantkit.convert(model, source, to="hf", dtype="fp32", source_check=checked)
    amount = {"samples": options.samples, "length": options.length}
    tokens = save_samples(
        folder / "tokens.safetensors", source, options.calibration, seed=0, **amount
    )
    environment = AVX2 if options.avx2 else {}
    ours: list[object] = [*QUANTKIT, "quantize", source, dst, "--scheme", options.scheme]
    ours += ["--embedding", "keep", "--method", "gptq", "--calibration", options.calibration]
    ours += ["--samples", options.samples, "--length", options.length]
    if not checked:
        ours.append("--no-source-check")
    theirs: list[object] = [options.peer, PEERS / "peer_llmcompressor.py", source, tokens, dst]
    theirs += ["--scheme", options.scheme, "--recipe", "default"]
    ratios = []
    print_header("pair", "", "quantkit", "llm-compressor", "ratio")
    for pair in range(1, options.pairs + 1):
        costs = []
        for command in (ours, theirs):
            costs.append(run_and_measure(command, environment))
            shutil.rmtree(dst)
        seconds = [cost.seconds for cost in costs]
        processor = [cost.processor for cost in costs]
        memory = [cost.memory for cost in costs]
        ratios.append([first / second for first, second in (seconds, processor, memory)])
        texts = [f"{ratio:.2f}" for ratio in ratios[-1]]
        print_row(pair, "clock", *(f"{value:.1f} s" for value in seconds), texts[0])
        print_row("", "processors", *(f"{value:.1f} s" for value in processor), texts[1])
        print_row("", "memory", *(f"{value / 1e9:.2f} GB" for value in memory), texts[2])
    clock, processors, peak = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(
        f"\nMedian ratios: clock {clock:.2f}, processors {processors:.2f}, memory {peak:.2f}\n",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--peer", metavar="PYTHON", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shapes", default="2048x2,4096x1")
    parser.add_argument("--scheme", choices=SCHEMES, default=SCHEMES[0])
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
