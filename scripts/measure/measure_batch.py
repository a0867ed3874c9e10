r"""Measure sequences decoded together on this CPU, in turn with llama.cpp and vLLM: tables in
Markdown.

    python scripts/measure/measure_batch.py --models FOLDER [--peer PYTHON] \
        [--vllm PYTHON [--vllm-eager]] [--rounds 5] [--head SCHEME] [--schemes int8 int4-g128] \
        [--sequences 1 2 4 8 16] [--prompt 16] [--new 16]

Random weights in TinyLlama's shape, made in FOLDER and kept; the head is of bfloat16 unless
`--head` names a scheme. PYTHON has llama-cpp-python and gguf, or vLLM, which reads the same int4
folder as ours and compiles it first unless `--eager` is given. All candidates are loaded, each in a
separate process, and continue the same prompts greedily. In each round each of ours is measured
right after its peers; a figure is new tokens a second of all sequences, after their prompts, the
median over the rounds, and in parentheses the medians of the ratios to the peers, in their order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.candidates import LLAMA_TYPES, Candidate
from shared.models import make_tinyllama
from shared.processes import PEERS
from shared.ratios import median_ratio
from shared.tables import format_header, format_row

MODES = ("exact", "fast")
TOGETHER = 8  # tokens of a step that is compared with a step of one
ROWS = "rows"  # the measurement of tokens that are of one sequence, as drafts are verified


def serve(folder: str, mode: str) -> None:
    """Answer as a candidate, for one of ours."""
    import torch

    from quantkit.evals.timing import weight_bytes
    from quantkit.formats.detect import open_checkpoint
    from quantkit.model.decoder import Decoder
    from quantkit.model.load import load_model
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.request import create_request
    from quantkit.runtime.scheduler import Scheduler

    def decode_together(model: Decoder, prompts: list[list[int]], new: int) -> float:
        length = max(len(prompt) for prompt in prompts) + new
        scheduler = Scheduler(Engine(model, length, slots=len(prompts)))
        running = [
            scheduler.add(create_request(model.config, prompt, new, {}))[0] for prompt in prompts
        ]
        while not all(request.tokens for request in running):
            scheduler.step()
        first_tokens = sum(len(request.tokens) for request in running)
        started = time.perf_counter()
        while scheduler.busy:
            scheduler.step()
        seconds = time.perf_counter() - started
        return (sum(len(request.tokens) for request in running) - first_tokens) / seconds

    def decode_rows(model: Decoder, prompt: list[int], steps: int) -> float:
        engine = Engine(model, len(prompt) + TOGETHER)
        engine.step(torch.tensor(prompt), [0] * len(prompt), range(len(prompt)), [len(prompt) - 1])
        positions = range(len(prompt), len(prompt) + TOGETHER)
        started = time.perf_counter()
        for _ in range(steps):
            logits = engine.step(
                torch.tensor(prompt[:TOGETHER]), [0] * TOGETHER, positions, range(TOGETHER)
            )
            logits.argmax(-1).tolist()
        return TOGETHER * steps / (time.perf_counter() - started)

    model = load_model(open_checkpoint(folder), device="cpu", backend=f"cpu-{mode}")
    print(weight_bytes(model), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if ROWS in request:
            print(decode_rows(model, request["prompts"][0], request[ROWS]), flush=True)
        else:
            print(decode_together(model, request["prompts"], request["new"]), flush=True)


def make_request(sequences: int, prompt: int, new: int, **fields: int) -> str:
    """Return a request to a candidate: prompts of random tokens, the same for all."""
    prompts = []
    for number in range(sequences):
        tokens = [(67 * place + 1009 * number) % 31000 + 900 for place in range(1, prompt)]
        prompts.append([1, *tokens])
    return json.dumps({"prompts": prompts, "new": new, **fields})


def start_peers(options: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Candidate]:
    """Start the peers that are measured next to a scheme, and return them by name."""
    length = options.prompt + options.new
    sequences = max(options.sequences)
    peers = {}
    if options.peer:
        kind = LLAMA_TYPES[scheme]
        command = [options.peer, PEERS / "peer_llamacpp.py", options.models, "--serve", kind]
        command += ["--context", sequences * length, "--sequences", sequences]
        peers[f"llama.cpp {kind}"] = Candidate(command)
    if options.vllm and scheme != "int8":
        command = [options.vllm, PEERS / "peer_vllm.py", folder, "--length", length]
        if options.vllm_eager:
            command.append("--eager")
        peers["vLLM"] = Candidate([*command, "--sequences", sequences])
    return peers


def measure(
    options: argparse.Namespace, scheme: str
) -> tuple[list[str], dict[str, dict[str, list[float]]]]:
    """Return the names of the peers, and what each candidate did in each round, by the number of
    sequences.
    """
    folder = make_tinyllama(options.models, scheme, options.head)
    candidates = start_peers(options, scheme, folder)
    peers = list(candidates)
    for mode in MODES:
        candidates[f"{scheme}, {mode}"] = Candidate(
            [sys.executable, __file__, "--serve", folder, mode]
        )
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    # The first round warms up.
    for number in range(options.rounds + 1):
        for count in options.sequences:
            request = make_request(count, options.prompt, options.new)
            for label, candidate in candidates.items():
                rate = candidate.measure(request)
                if number:
                    rates[label][str(count)].append(rate)
        request = make_request(1, options.prompt, options.new, **{ROWS: options.new})
        for label, candidate in candidates.items():
            if label not in peers:
                rate = candidate.measure(request)
                if number:
                    rates[label][ROWS].append(rate)
        print(f"{scheme}: round {number} of {options.rounds}", file=sys.stderr, flush=True)
    for candidate in candidates.values():
        candidate.end()
    return peers, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--vllm")
    parser.add_argument("--vllm-eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="*", default=["int8", "int4-g128"], choices=LLAMA_TYPES)
    parser.add_argument("--head")
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=16)
    options: Any = parser.parse_args()
    if options.serve:
        return serve(*options.serve)
    if options.models is None:
        parser.error("--models is needed")
    counts = [str(count) for count in options.sequences]
    steps = []
    lines = [format_header("tok/s together", *counts)]
    for scheme in options.schemes:
        peers, rates = measure(options, scheme)
        for label, by_count in rates.items():
            compared = [] if label in peers else peers
            cells = []
            for count in counts:
                cell = f"{statistics.median(by_count[count]):.1f}"
                if compared:
                    ratios = [median_ratio(by_count[count], rates[peer][count]) for peer in peers]
                    cell += f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)} x)"
                cells.append(cell)
            lines.append(format_row(label, *cells))
            if label not in peers and {"1", str(TOGETHER)} <= set(counts):
                costs = []
                for kind in (str(TOGETHER), ROWS):
                    costs.append(TOGETHER * median_ratio(by_count["1"], by_count[kind]))
                steps.append(format_row(label, *(f"{cost:.2f}" for cost in costs)))
    print("\n".join(lines))
    if steps:
        title = f"a step of {TOGETHER} tokens over a step of one"
        print()
        print(format_header(title, f"of {TOGETHER} sequences", "of one"))
        print("\n".join(steps))
    return None


if __name__ == "__main__":
    main()
