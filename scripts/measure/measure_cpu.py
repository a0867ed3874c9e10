r"""Measure generation on this CPU, in turn with llama.cpp: tables in Markdown, and a picture.

    python scripts/measure/measure_cpu.py --peer PYTHON --models FOLDER [--shape qwen3-moe-2.7b] \
        [--schemes int4-g128 int4-g32] [--modes exact fast] [--rounds 7] [--measures decode] \
        [--head SCHEME] [--plot OUT.png]

Random weights in TinyLlama's shape, or another that `peer_llamacpp.py` knows. PYTHON has
llama-cpp-python and gguf; its models are made in FOLDER and kept. All candidates are loaded, each
in a separate process (12 GB together). In each round each of ours is measured right after the
llama.cpp type next to it, for a second or so, with the bandwidth of a plain sum before and after:
what a shared machine gives changes within seconds. Figures are medians over the rounds, tokens a
second.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

SCHEMES, MODES = ("int8", "int4-g32", "int4-g128"), ("exact", "fast")
PEERS = {"int8": "Q8_0", "int4-g32": "Q4_0", "int4-g128": "Q4_0"}
MEASURES = ("decode", "decode batch 8", "prefill 128", "prefill 512")
QUIET = (
    0.85  # of the most that a plain sum reads from memory: at least this when nothing else used it
)


class Candidate:
    """A process that has loaded a model and measures on request."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.weight_bytes = int(self._answer())

    def __call__(self, measure: str) -> float:
        assert self._process.stdin is not None
        print(measure, file=self._process.stdin, flush=True)
        return float(self._answer())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a candidate ended with exit code {self._process.wait()}")
        return answer


def serve(shape: str, scheme: str, head: str | None, mode: str) -> None:
    """Be such a process, for one of ours."""
    import torch

    from quantkit.evals.synthetic import synthetic
    from quantkit.evals.timing import Decoding, measure_seconds, prefill_once, weight_bytes
    from quantkit.model.load import load_model

    model = load_model(synthetic(shape, scheme, head), device="cpu", backend=f"cpu-{mode}")
    measures: dict[str, Callable[[], float]] = {
        "decode": lambda: 48 / Decoding(model, 1, 48, None).run(),
        "decode batch 8": lambda: 64 / Decoding(model, 8, 8, None).run(),
        "prefill 128": lambda: 128 / measure_seconds(partial(prefill_once, model, 128, None)),
        "prefill 512": lambda: 512 / measure_seconds(partial(prefill_once, model, 512, None)),
    }
    with torch.inference_mode():
        print(weight_bytes(model), flush=True)
        for line in sys.stdin:
            print(measures[line.strip()](), flush=True)


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    measures = list(next(iter(rows.values())))
    for axes, name in zip(
        figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True
    ):
        colors = ["0.6" if label.startswith("llama") else "C0" for label in rows]
        axes.barh(list(rows), [row[name] for row in rows.values()], color=colors)
        axes.set_title(f"{name}, tok/s", fontsize=10)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        if name != measures[0]:
            axes.set_yticklabels([])
    figure.savefig(path)


@dataclass(frozen=True)
class Pair:
    """One measurement of ours, of llama.cpp just before, and of the bandwidth around them."""

    ours: float
    theirs: float
    bandwidth: float


def measure(
    options: argparse.Namespace,
) -> tuple[dict[str, Candidate], dict[str, dict[str, list[Pair]]]]:
    """The candidates by label; and what each of ours did in each round, by the measure."""
    import torch

    from quantkit.evals.timing import measure_bandwidth

    read = partial(measure_bandwidth, torch.device("cpu"))
    script = str(Path(__file__).resolve().parents[1] / "peers" / "peer_llamacpp.py")
    candidates = {
        kind: Candidate(
            options.peer, script, str(options.models), "--serve", kind, "--shape", options.shape
        )
        for kind in dict.fromkeys(PEERS[scheme] for scheme in options.schemes)
    }
    labels = {
        f"{scheme}, {mode}": (scheme, mode) for scheme in options.schemes for mode in options.modes
    }
    for label, (scheme, mode) in labels.items():
        head = "int8" if scheme == "int8" else options.head or scheme
        candidates[label] = Candidate(
            sys.executable, __file__, "--serve", options.shape, scheme, head, mode
        )
    found: dict[str, dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for name in options.measures:
        for candidate in candidates.values():  # to warm up
            candidate(name)
        for _ in range(options.rounds):
            before = read()
            for label, (scheme, _) in labels.items():
                theirs, ours = candidates[PEERS[scheme]](name), candidates[label](name)
                after = read()
                found[label][name].append(Pair(ours, theirs, min(before, after)))
                before = after
        print(f"{name}: {options.rounds} rounds", file=sys.stderr, flush=True)
    return candidates, found


def row(label: str, cells: list[str]) -> str:
    return f"| {label} | " + " | ".join(cells) + " |"


def rates(pairs: list[Pair]) -> str:
    """The median, and in parentheses that of the ratios."""
    ours = statistics.median(pair.ours for pair in pairs)
    return f"{ours:.1f} ({statistics.median(pair.ours / pair.theirs for pair in pairs):.2f} x)"


def tables(candidates: dict[str, Candidate], found: dict[str, dict[str, list[Pair]]]) -> list[str]:
    measures = list(next(iter(found.values())))
    lines = [row("tok/s", measures), "|---" * (len(measures) + 1) + "|"]
    for kind, rows in peers(found).items():
        lines.append(row(f"llama.cpp {kind}", [f"{rows[name]:.1f}" for name in measures]))
    lines += [row(label, [rates(by[name]) for name in measures]) for label, by in found.items()]
    decodes = {label: by["decode"] for label, by in found.items() if "decode" in by}
    peak = max((pair.bandwidth for pairs in decodes.values() for pair in pairs), default=0)
    for title, wanted in (("at its best", True), ("shared", False)):
        lines += [
            "",
            row(f"decode, memory {title}", ["GB/s", "tok/s", "of the bandwidth", "rounds"]),
            "|---" * 5 + "|",
        ]
        for label, pairs in decodes.items():
            some = [pair for pair in pairs if (pair.bandwidth >= QUIET * peak) == wanted]
            if some:
                width = statistics.median(pair.bandwidth for pair in some)
                shares = [
                    pair.ours * candidates[label].weight_bytes / pair.bandwidth for pair in some
                ]
                cells = [
                    f"{width / 1e9:.1f}",
                    rates(some),
                    f"{statistics.median(shares):.0%}",
                    str(len(some)),
                ]
                lines.append(row(label, cells))
    return lines


def peers(found: dict[str, dict[str, list[Pair]]]) -> dict[str, dict[str, float]]:
    """Medians of what llama.cpp did, by its type and the measure."""
    rows: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(PEERS[label.split(",")[0]] for label in found):
        peers = [by for label, by in found.items() if PEERS[label.split(",")[0]] == kind]
        rows[kind] = {
            name: statistics.median(pair.theirs for by in peers for pair in by[name])
            for name in peers[0]
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--peer")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measures", nargs="*", default=MEASURES, choices=MEASURES)
    parser.add_argument(
        "--head", help="the scheme of the head of int4 models; their own by default"
    )
    parser.add_argument("--plot", type=Path)
    options: Any = parser.parse_args()
    if options.serve:
        return serve(*options.serve)
    if options.peer is None or options.models is None:
        parser.error("--peer and --models are needed")
    candidates, found = measure(options)
    print("\n".join(tables(candidates, found)))
    if options.plot:
        rows = {f"llama.cpp {kind}": figures for kind, figures in peers(found).items()}
        for label, by in found.items():
            rows[label] = {
                name: statistics.median(pair.ours for pair in pairs) for name, pairs in by.items()
            }
        draw(rows, options.plot)
    return None


if __name__ == "__main__":
    main()
