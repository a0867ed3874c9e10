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

from measure_cpu import Candidate, row

MODES = ("exact", "fast")
PEERS = {"int8": "Q8_0", "int4-g32": "Q4_0", "int4-g128": "Q4_0"}
TOGETHER = 8  # tokens of a step that is compared with a step of one
ROWS = "rows"  # the measurement of tokens that are of one sequence, as drafts are verified


def make(models: Path, scheme: str, head: str | None) -> Path:
    """A quantized folder, as `quantkit quantize` writes it."""
    from safetensors.torch import save_file

    import quantkit
    from quantkit.evals.synthetic import synthetic
    from quantkit.formats.container import Output
    from quantkit.formats.registry import HF

    made, source = models / (scheme if head is None else f"{scheme}-head-{head}"), models / "floats"
    if not source.exists():
        checkpoint = synthetic("tinyllama-1.1b", None)
        names = checkpoint.names()
        planned = Output(
            checkpoint, checkpoint.config, [checkpoint.info(name) for name in names], 1 << 40
        )
        source.mkdir(parents=True)
        for name, content in HF.side_files(planned).items():
            assert isinstance(content, bytes)
            (source / name).write_bytes(content)
        save_file({name: checkpoint.load(name) for name in names}, source / "model.safetensors")  # type: ignore[misc]
    if not made.exists():
        parse = quantkit.QuantScheme.parse
        overrides = () if head is None else (quantkit.Override("lm_head", parse(head)),)
        recipe = quantkit.Recipe(parse(scheme), overrides)
        quantkit.quantize(
            source, made, recipe, method="rtn", accept_quality_loss=True, source_check=False
        )
    return made


def serve(folder: str, mode: str) -> None:
    """Be such a process, for one of ours."""
    import torch

    from quantkit.evals.timing import weight_bytes
    from quantkit.formats.detect import open_checkpoint
    from quantkit.model.decoder import Decoder
    from quantkit.model.load import load_model
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.request import create_request
    from quantkit.runtime.scheduler import Scheduler

    def together(model: Decoder, prompts: list[list[int]], new: int) -> float:
        length = max(len(prompt) for prompt in prompts) + new
        scheduler = Scheduler(Engine(model, length, slots=len(prompts)))
        running = [
            scheduler.add(create_request(model.config, prompt, new, {}))[0] for prompt in prompts
        ]
        while not all(one.tokens for one in running):
            scheduler.step()
        there, started = sum(len(one.tokens) for one in running), time.perf_counter()
        while scheduler.busy:
            scheduler.step()
        return (sum(len(one.tokens) for one in running) - there) / (time.perf_counter() - started)

    def of_one(model: Decoder, prompt: list[int], steps: int) -> float:
        engine = Engine(model, len(prompt) + TOGETHER)
        engine.step(torch.tensor(prompt), [0] * len(prompt), range(len(prompt)), [len(prompt) - 1])
        positions, started = range(len(prompt), len(prompt) + TOGETHER), time.perf_counter()
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
            print(of_one(model, request["prompts"][0], request[ROWS]), flush=True)
        else:
            print(together(model, request["prompts"], request["new"]), flush=True)


def request(sequences: int, prompt: int, new: int) -> str:
    """A request to a candidate: prompts of random tokens, the same for all."""
    prompts = [
        [1, *((67 * place + 1009 * number) % 31000 + 900 for place in range(1, prompt))]
        for number in range(sequences)
    ]
    return json.dumps({"prompts": prompts, "new": new})


def measure(
    options: argparse.Namespace, scheme: str
) -> tuple[list[str], dict[str, dict[str, list[float]]]]:
    """The peers by name; and what each candidate did in each round, by the number of sequences."""
    folder, length = make(options.models, scheme, options.head), options.prompt + options.new
    peers = Path(__file__).resolve().parents[1] / "peers"
    context = str(max(options.sequences) * length)
    candidates: dict[str, Candidate] = {}
    if options.peer:
        kind = PEERS[scheme]
        command = (
            str(peers / "peer_llamacpp.py"),
            str(options.models),
            "--serve",
            kind,
            "--context",
            context,
        )
        candidates[f"llama.cpp {kind}"] = Candidate(
            options.peer, *command, "--sequences", str(max(options.sequences))
        )
    if options.vllm and scheme != "int8":
        command = (
            str(peers / "peer_vllm.py"),
            str(folder),
            "--length",
            str(length),
            *["--eager"] * options.vllm_eager,
        )
        candidates["vLLM"] = Candidate(
            options.vllm, *command, "--sequences", str(max(options.sequences))
        )
    peers = list(candidates)
    for mode in MODES:
        candidates[f"{scheme}, {mode}"] = Candidate(
            sys.executable, __file__, "--serve", str(folder), mode
        )
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds + 1):  # the first warms up
        for count in options.sequences:
            for label, candidate in candidates.items():
                rate = candidate(request(count, options.prompt, options.new))
                if number:
                    found[label][str(count)].append(rate)
        for label in candidates:
            if label not in peers:
                line = json.loads(request(1, options.prompt, options.new)) | {ROWS: options.new}
                rate = candidates[label](json.dumps(line))
                if number:
                    found[label][ROWS].append(rate)
        print(f"{scheme}: round {number} of {options.rounds}", file=sys.stderr, flush=True)
    for candidate in candidates.values():
        candidate.end()
    return peers, found


def ratio(over: list[float], under: list[float]) -> float:
    """The median of the ratios of what was measured in turn."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--vllm")
    parser.add_argument("--vllm-eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="*", default=["int8", "int4-g128"], choices=PEERS)
    parser.add_argument("--head")
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=16)
    options: Any = parser.parse_args()
    if options.serve:
        return serve(*options.serve)
    if options.models is None:
        parser.error("--models is needed")
    counts, steps = [str(count) for count in options.sequences], []
    lines = [row("tok/s together", counts), "|---" * (len(counts) + 1) + "|"]
    for scheme in options.schemes:
        peers, found = measure(options, scheme)
        for label, by in found.items():
            cells = []
            for count in counts:
                ratios = (
                    []
                    if label in peers
                    else [f"{ratio(by[count], found[peer][count]):.2f}" for peer in peers]
                )
                cells.append(
                    f"{statistics.median(by[count]):.1f}"
                    + (f" ({', '.join(ratios)} x)" if ratios else "")
                )
            lines.append(row(label, cells))
            if label not in peers and {"1", str(TOGETHER)} <= set(counts):
                costs = [TOGETHER * ratio(by["1"], by[kind]) for kind in (str(TOGETHER), ROWS)]
                steps.append(row(label, [f"{cost:.2f}" for cost in costs]))
    print("\n".join(lines))
    if steps:
        title = f"a step of {TOGETHER} tokens over a step of one"
        print(
            "\n".join(
                ["", row(title, [f"of {TOGETHER} sequences", "of one"]), "|---" * 3 + "|", *steps]
            )
        )
    return None


if __name__ == "__main__":
    main()
