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
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.candidates import LLAMA_TYPES, Candidate
from shared.processes import PEERS
from shared.ratios import median_ratio
from shared.tables import format_header, format_row

SCHEMES, MODES = ("int8", "int4-g32", "int4-g128"), ("exact", "fast")
MEASURES = ("decode", "decode batch 8", "prefill 128", "prefill 512")

# Of the most that a plain sum reads from memory: at least this when nothing else used it.
QUIET = 0.85

Measurements = dict[str, dict[str, list["Pair"]]]
"""What each of ours did in each round, by its label and the measure."""


def serve(shape: str, scheme: str, head: str | None, mode: str) -> None:
    """Answer as a candidate, for one of ours."""
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
    """Draw the picture: a panel for each measure, a bar for each row."""
    from quantkit.evals.drawing import new_figure, picture_bytes, style_axes

    figure = new_figure(10, 3.6)
    measures = list(next(iter(rows.values())))
    for axes, name in zip(
        figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True
    ):
        colors = ["0.6" if label.startswith("llama") else "C0" for label in rows]
        axes.barh(list(rows), [row[name] for row in rows.values()], color=colors)
        axes.set_title(f"{name}, tok/s", fontsize=10)
        axes.invert_yaxis()
        style_axes(axes, "x")
        if name != measures[0]:
            axes.set_yticklabels([])
    path.write_bytes(picture_bytes(figure, path.suffix.removeprefix(".")))


@dataclass(frozen=True)
class Pair:
    """One measurement of ours, of llama.cpp just before, and of the bandwidth around them."""

    ours: float
    theirs: float
    bandwidth: float


def measure(options: argparse.Namespace) -> tuple[dict[str, Candidate], Measurements]:
    """Return the candidates by label, and what each of ours did in each round."""
    import torch

    from quantkit.evals.timing import measure_bandwidth

    read_bandwidth = partial(measure_bandwidth, torch.device("cpu"))
    candidates = {}
    for scheme in options.schemes:
        kind = LLAMA_TYPES[scheme]
        command = [options.peer, PEERS / "peer_llamacpp.py", options.models, "--serve", kind]
        if kind not in candidates:
            candidates[kind] = Candidate([*command, "--shape", options.shape])
    schemes = {}
    for scheme in options.schemes:
        head = "int8" if scheme == "int8" else options.head or scheme
        for mode in options.modes:
            label = f"{scheme}, {mode}"
            schemes[label] = scheme
            candidates[label] = Candidate(
                [sys.executable, __file__, "--serve", options.shape, scheme, head, mode]
            )
    measurements: Measurements = defaultdict(lambda: defaultdict(list))
    for name in options.measures:
        # To warm up.
        for candidate in candidates.values():
            candidate.measure(name)
        for _ in range(options.rounds):
            before = read_bandwidth()
            for label, scheme in schemes.items():
                theirs = candidates[LLAMA_TYPES[scheme]].measure(name)
                ours = candidates[label].measure(name)
                after = read_bandwidth()
                measurements[label][name].append(Pair(ours, theirs, min(before, after)))
                before = after
        print(f"{name}: {options.rounds} rounds", file=sys.stderr, flush=True)
    return candidates, measurements


def format_rates(pairs: list[Pair]) -> str:
    """Return the median, and in parentheses that of the ratios."""
    ours = [pair.ours for pair in pairs]
    theirs = [pair.theirs for pair in pairs]
    return f"{statistics.median(ours):.1f} ({median_ratio(ours, theirs):.2f} x)"


def format_tables(candidates: dict[str, Candidate], measurements: Measurements) -> list[str]:
    """Return the lines of all tables."""
    measures = list(next(iter(measurements.values())))
    lines = [format_header("tok/s", *measures)]
    for kind, rates in summarize_peers(measurements).items():
        cells = [f"{rates[name]:.1f}" for name in measures]
        lines.append(format_row(f"llama.cpp {kind}", *cells))
    for label, by_measure in measurements.items():
        lines.append(format_row(label, *(format_rates(by_measure[name]) for name in measures)))
    decoding = {}
    for label, by_measure in measurements.items():
        if "decode" in by_measure:
            decoding[label] = by_measure["decode"]
    peak = max((pair.bandwidth for pairs in decoding.values() for pair in pairs), default=0)
    for title, is_quiet in (("at its best", True), ("shared", False)):
        titles = ("GB/s", "tok/s", "of the bandwidth", "rounds")
        lines += ["", format_header(f"decode, memory {title}", *titles)]
        for label, pairs in decoding.items():
            rounds = [pair for pair in pairs if (pair.bandwidth >= QUIET * peak) == is_quiet]
            if rounds:
                cells = describe_decoding(rounds, candidates[label].weight_bytes)
                lines.append(format_row(label, *cells))
    return lines


def describe_decoding(pairs: list[Pair], weight_bytes: int) -> list[str]:
    """Return the cells of decoding next to the bandwidth of memory."""
    bandwidth = statistics.median(pair.bandwidth for pair in pairs)
    share = statistics.median(pair.ours * weight_bytes / pair.bandwidth for pair in pairs)
    return [f"{bandwidth / 1e9:.1f}", format_rates(pairs), f"{share:.0%}", str(len(pairs))]


def summarize_peers(measurements: Measurements) -> dict[str, dict[str, float]]:
    """Return medians of what llama.cpp did, by its type and the measure."""
    rates: dict[str, dict[str, list[float]]] = {}
    for label, by_measure in measurements.items():
        of_type = rates.setdefault(LLAMA_TYPES[label.split(",")[0]], defaultdict(list))
        for name, pairs in by_measure.items():
            of_type[name] += [pair.theirs for pair in pairs]
    medians: dict[str, dict[str, float]] = {}
    for kind, by_name in rates.items():
        medians[kind] = {name: statistics.median(values) for name, values in by_name.items()}
    return medians


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
    # An error only after the measurements would lose them.
    if options.plot and options.plot.suffix not in (".png", ".pdf", ".svg"):
        parser.error("--plot takes a .png, .pdf or .svg file")
    if options.serve:
        return serve(*options.serve)
    if options.peer is None or options.models is None:
        parser.error("--peer and --models are needed")
    candidates, measurements = measure(options)
    print("\n".join(format_tables(candidates, measurements)))
    if options.plot:
        rows = {f"llama.cpp {kind}": row for kind, row in summarize_peers(measurements).items()}
        for label, by_measure in measurements.items():
            medians = {}
            for name, pairs in by_measure.items():
                medians[name] = statistics.median(pair.ours for pair in pairs)
            rows[label] = medians
        draw(rows, options.plot)
    return None


if __name__ == "__main__":
    main()
