r"""Measure model files on this CPU, in turn with llama.cpp: a table in Markdown.

    python scripts/measure/measure_files.py --peer PYTHON OURS[=THEIRS] ... [--modes exact fast] \
        [--rounds 5] [--measures decode "decode batch 8" "prefill 512" "decode after 8192" memory]

OURS is whatever quantkit runs, THEIRS the GGUF file that llama.cpp runs next to it, by default the
same. PYTHON has llama-cpp-python and gguf. For each pair both are loaded, each in a process, and
measured in turn, so that what else runs on the machine slows both. Figures are medians over the
rounds, tokens a second, with the median of the ratios in parentheses; memory is what the process
holds after all of them and did not hold before it loaded the model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.candidates import Candidate
from shared.processes import PEERS
from shared.ratios import median_ratio
from shared.tables import print_header, print_row

MEASURES = ("decode", "decode batch 8", "prefill 512", "memory")
LONG = "decode after 8192"
LONG_PROMPT, LONG_NEW = 8192, 16
"""Of the long measure: tokens of the prompt, which is not timed, and new ones."""


def serve(path: str, mode: str, threads: int) -> None:
    """Answer as a candidate, for one of ours."""
    import torch

    from quantkit.base.memory import resident_bytes
    from quantkit.evals.timing import Decoding, measure_seconds, prefill_once, weight_bytes
    from quantkit.formats.detect import open_checkpoint
    from quantkit.model.load import load_model

    torch.set_num_threads(threads)
    resident_before = resident_bytes()
    model = load_model(open_checkpoint(path), device="cpu", backend=f"cpu-{mode}")
    measures: dict[str, Callable[[], float]] = {
        "decode": lambda: 48 / Decoding(model, 1, 48, None).run(),
        "decode batch 8": lambda: 64 / Decoding(model, 8, 8, None).run(),
        "prefill 512": lambda: 512 / measure_seconds(partial(prefill_once, model, 512, None)),
        LONG: lambda: LONG_NEW / Decoding(model, 1, LONG_NEW, None, prompt=LONG_PROMPT).run(),
        "memory": lambda: resident_bytes() - resident_before,
    }
    with torch.inference_mode():
        print(weight_bytes(model), flush=True)
        for line in sys.stdin:
            print(measures[line.strip()](), flush=True)


def measure_pair(
    ours: Candidate, theirs: Candidate, measures: list[str], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return what both did in each round, by the measure."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name in measures:
        # The first call warms up.
        ours.measure(name)
        theirs.measure(name)
        own: list[float] = []
        peer: list[float] = []
        for _ in range(rounds):
            peer.append(theirs.measure(name))
            own.append(ours.measure(name))
        found[name] = (own, peer)
    return found


def format_cell(name: str, own: list[float], peer: list[float], file_bytes: int) -> str:
    """Return the medians of both, and in parentheses the ratio."""
    if name == "memory":
        return (
            f"{own[-1] / 1e6:.0f} : {peer[-1] / 1e6:.0f} MB ({own[-1] / file_bytes:.2f} x the file)"
        )
    ratio = median_ratio(own, peer)
    return f"{statistics.median(own):.1f} : {statistics.median(peer):.1f} ({ratio:.2f} x)"


def count_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="OURS[=THEIRS]")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--peer")
    parser.add_argument("--modes", nargs="+", default=["exact"], choices=["exact", "fast"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measures", nargs="+", default=MEASURES, choices=(*MEASURES, LONG))
    options: Any = parser.parse_args()
    if options.serve:
        return serve(*options.serve, options.threads)
    if options.peer is None or not options.pairs:
        parser.error("--peer and a pair are needed")
    print_header("ours : llama.cpp, tok/s", *options.measures)
    peer_command = [options.peer, PEERS / "peer_llamacpp.py"]
    threads = ["--threads", options.threads]
    if LONG in options.measures:
        threads += ["--context", LONG_PROMPT + 512, "--sequences", 1]
    for pair in options.pairs:
        own_path, _, peer_path = pair.partition("=")
        peer_path = peer_path or own_path
        for mode in options.modes:
            theirs = Candidate([*peer_command, peer_path, "--serve", "file", *threads])
            ours = Candidate([sys.executable, __file__, "--serve", own_path, mode, *threads])
            found = measure_pair(ours, theirs, options.measures, options.rounds)
            size = count_bytes(Path(own_path))
            cells = [format_cell(name, *rates, size) for name, rates in found.items()]
            names = dict.fromkeys([Path(own_path).name, Path(peer_path).name])
            print_row(f"{' : '.join(names)}, {mode}", *cells)
            ours.end()
            theirs.end()
    return None


if __name__ == "__main__":
    main()
