"""Measure generation on this CPU, in turn with llama.cpp: a table in Markdown, and a picture.

    python scripts/measure_cpu.py --peer PYTHON --models FOLDER [--rounds 7] [--head SCHEME] [--plot OUT.png]

Random weights in TinyLlama's shape. PYTHON has llama-cpp-python and gguf; its models are made in FOLDER and
kept. All candidates are loaded, each in a process of its own (12 GB together), and then asked in turn for one
measurement of a second or so, round after round: what a shared machine gives changes within seconds, and so the
ratios are medians of those within a round. Figures are medians over the rounds, tokens a second.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SHAPE = "tinyllama-1.1b"
OURS = [(scheme, mode) for scheme in ("int8", "int4-g32", "int4-g128") for mode in ("exact", "fast")]
PEERS = {"int8": "Q8_0", "int4-g32": "Q4_0", "int4-g128": "Q4_0"}
MEASURES = ("decode", "decode batch 8", "prefill 128", "prefill 512")
SHARE = "of the bandwidth"


class Candidate:
    """A process that has loaded a model and measures what it is asked for."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.weight_bytes = int(self._answer())

    def __call__(self, measure: str) -> float:
        assert self._process.stdin is not None
        print(measure, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a candidate ended with exit code {self._process.wait()}")
        return answer


def serve(scheme: str, head: str | None, mode: str) -> None:
    """Be such a process, for one of ours."""
    import torch

    from quantkit.evals.synthetic import synthetic
    from quantkit.evals.timing import Decoding, prefill_once, seconds, weight_bytes
    from quantkit.model.load import load_model

    model = load_model(synthetic(SHAPE, scheme, head), backend=f"cpu-{mode}")
    measures: dict[str, Callable[[], float]] = {
        "decode": lambda: 48 / Decoding(model, 1, 48, None).run(),
        "decode batch 8": lambda: 64 / Decoding(model, 8, 8, None).run(),
        "prefill 128": lambda: 128 / seconds(partial(prefill_once, model, 128, None)),
        "prefill 512": lambda: 512 / seconds(partial(prefill_once, model, 512, None)),
    }
    with torch.inference_mode():
        print(weight_bytes(model), flush=True)
        for line in sys.stdin:
            print(measures[line.strip()](), flush=True)


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


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """What each candidate did in each round, by its label and the measure."""
    import torch

    from quantkit.evals.timing import bandwidth

    script = str(Path(__file__).with_name("peer_llamacpp.py"))
    candidates = {
        f"llama.cpp {kind}": Candidate(options.peer, script, str(options.models), "--serve", kind)
        for kind in dict.fromkeys(PEERS.values())
    }
    for scheme, mode in OURS:
        head = "int8" if scheme == "int8" else options.head or scheme
        candidates[f"{scheme}, {mode}"] = Candidate(sys.executable, __file__, "--serve", scheme, head, mode)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in MEASURES:
        for number in range(options.rounds + 1):
            for label, candidate in candidates.items():
                read = bandwidth(torch.device("cpu")) if name == MEASURES[0] else None
                rate = candidate(name)
                if number == 0:  # to warm up
                    continue
                found[label][name].append(rate)
                if read is not None:
                    found[label][SHARE].append(rate * candidate.weight_bytes / read)
        print(f"{name}: {options.rounds} rounds", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    lines = ["| tok/s | " + " | ".join((*MEASURES, SHARE)) + " |", "|---" + "|---" * (len(MEASURES) + 1) + "|"]
    for label, row in found.items():
        peer = found.get(f"llama.cpp {PEERS.get(label.split(',')[0])}")
        cells = []
        for name in MEASURES:
            cell = f"{statistics.median(row[name]):.1f}"
            if peer is not None:
                ratio = statistics.median(ours / theirs for ours, theirs in zip(row[name], peer[name], strict=True))
                cell += f" ({ratio:.2f} x)"
            cells.append(cell)
        lines.append(f"| {label} | " + " | ".join((*cells, f"{statistics.median(row[SHARE]):.0%}")) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--peer")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--head", help="the scheme of the head of int4 models; their own by default")
    parser.add_argument("--plot", type=Path)
    options: Any = parser.parse_args()
    if options.serve:
        return serve(*options.serve)
    if options.peer is None or options.models is None:
        parser.error("--peer and --models are needed")
    found = measure(options)
    print("\n".join(table(found)))
    if options.plot:
        draw({label: {n: statistics.median(v) for n, v in row.items()} for label, row in found.items()}, options.plot)
    return None


if __name__ == "__main__":
    main()
