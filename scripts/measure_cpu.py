"""Measure generation on this CPU, in turn with llama.cpp: a table in Markdown, and a picture.

    python scripts/measure_cpu.py --peer PYTHON --models FOLDER [--rounds 3] [--plot OUT.png]

Random weights in TinyLlama's shape. PYTHON has llama-cpp-python and gguf; its models are made in FOLDER and
kept. Each round runs every candidate once, one after the other, so that a machine whose load drifts is unfair
to none; figures are medians over the rounds, tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SHAPE = "tinyllama-1.1b"
OURS = [(scheme, mode) for scheme in ("int8", "int4-g32", "int4-g128") for mode in ("cpu-exact", "cpu-fast")]
PEERS = {"int8": "Q8_0", "int4-g32": "Q4_0", "int4-g128": "Q4_0"}
MEASURES = ("decode", "decode batch 8", "prefill 128", "prefill 512")
SHARE = "of the bandwidth"


def ours(scheme: str, backend: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "quantkit.cli", "bench", "--synthetic", SHAPE, "--scheme", scheme]
        command += ["--backend", backend, "--prompt-lengths", "128,512", "--batch", "1,8", "--runs", "3"]
        subprocess.run([*command, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        one = json.loads(out.read_text())[0]
    decode = {batch: rate["median"] for batch, rate in one["decode"].items()}
    prefill = {length: rate["median"] for length, rate in one["prefill"].items()}
    return {
        **dict(zip(MEASURES, (decode["1"], decode["8"], prefill["128"], prefill["512"]), strict=True)),
        SHARE: one["share_of_bandwidth"],
    }


def peers(python: str, models: Path) -> dict[str, dict[str, float]]:
    command = [python, str(Path(__file__).with_name("peer_llamacpp.py")), str(models), "--runs", "3"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("type"): line for line in lines}


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(MEASURES)), MEASURES, strict=True):
        colors = ["0.6" if label.startswith("llama") else "C0" for label in rows]
        axes.barh(list(rows), [row[name] for row in rows.values()], color=colors)
        axes.set_title(f"{name}, tok/s", fontsize=10)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        if name != MEASURES[0]:
            axes.set_yticklabels([])
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    runs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        found = {f"llama.cpp {kind}": row for kind, row in peers(options.peer, options.models).items()}
        for scheme, backend in OURS:
            found[f"{scheme}, {backend.removeprefix('cpu-')}"] = ours(scheme, backend)
        for label, row in found.items():
            for name, value in row.items():
                runs[label][name].append(value)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    rows = {label: {name: statistics.median(v) for name, v in row.items()} for label, row in runs.items()}
    print("| tok/s | " + " | ".join(MEASURES) + " | of the bandwidth |\n|---" + "|---" * (len(MEASURES) + 1) + "|")
    for label, row in rows.items():
        peer = rows.get(f"llama.cpp {PEERS.get(label.split(',')[0])}")
        cells = [f"{row[name]:.1f}" + (f" ({row[name] / peer[name]:.2f} x)" if peer else "") for name in MEASURES]
        print(f"| {label} | " + " | ".join(cells) + " | " + (f"{row[SHARE]:.0%}" if SHARE in row else "") + " |")
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
