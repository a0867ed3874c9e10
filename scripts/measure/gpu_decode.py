r"""Stages 1, 2 and 5 of `gpu_day.sh`: how fast whole models decode and read prompts on the GPU.

    python scripts/measure/gpu_decode.py [--out FILE.json] [--shapes llama-2-7b] \
        [--schemes bf16,int8,int8+modules] [--contexts 128,1024,4096] [--layers 4,12] \
        [--prefill 0] [--decoding eager,compiled,steps] [--profile 0]

A scheme may end in ``+head-SCHEME``, that of the head, and in ``+modules``: blocks run as modules,
where the kernels of `quantkit.kernels.triton_block` would take five launches for each.

To compile all layers of a 7B model takes minutes. So models have few layers, in two counts, and the
difference is that of the layers between: the figures of the whole model follow. Weights are random,
the cache holds zeros, which takes as long. Each way of decoding is measured
(`quantkit.runtime.captured.DECODE_SETTING`): a CUDA graph of our own of an eager step, one of a
compiled step, and steps as inductor records them, with the host between. Prints ms a token, the
bytes of weights a second, as a share of what a copy moves too, and with ``--prefill`` tokens of a
prompt, the seconds of reading it, the first token, compiling included, and memory. ``--profile 1``
lists which kernels a token takes with the more layers, how often and how long, and what the host
takes in addition.
"""

from __future__ import annotations

import os
import time
from collections import deque
from functools import partial
from typing import Any

import gpu_setup as gpu
import torch

from quantkit.evals.timing import measure_bandwidth, weight_bytes
from quantkit.kernels.triton_backend import BLOCKS_SETTING
from quantkit.model.load import load_model
from quantkit.runtime.captured import DECODE_SETTING
from quantkit.runtime.engine import Engine

STEPS = 1 if gpu.DRY else 64
BEHIND = 2  # steps by which the host reads tokens late


def decode_seconds(engine: Engine, kind: str, context: int) -> float:
    """A step of one token after a context, each drawn greedily from the logits of the last."""
    positions = range(context - STEPS, context)
    token = torch.zeros(1, dtype=torch.long, device=gpu.DEVICE)

    def steps() -> None:
        nonlocal token
        for position in positions:
            token = engine.step(token, [0], [position], [0]).argmax(-1)

    def run_captured() -> None:
        pending = deque(engine.decode([0], [position]) for position in positions[:BEHIND])
        for position in positions[BEHIND:]:
            pending.append(engine.decode([0], [position]))
            pending.popleft().read()

    return gpu.wall_seconds(steps if kind == "steps" else run_captured, 1 if gpu.DRY else 3) / STEPS


def read(engine: Engine, prompt: torch.Tensor) -> None:
    """Read a prompt, a chunk at a time."""
    for start in range(0, len(prompt), engine.chunk_rows):
        rows = range(start, min(start + engine.chunk_rows, len(prompt)))
        engine.step(prompt[rows.start : rows.stop], [0] * len(rows), rows, [len(rows) - 1])


def profile(engine: Engine, decoding: str, context: int, results: gpu.Results) -> None:
    """What a token is made of: the kernels by their time, most first."""
    cuda = gpu.DEVICE.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        seconds = decode_seconds(engine, decoding, context)
    times = {
        event.key: (
            event.self_device_time_total if cuda else event.self_cpu_time_total,
            event.count,
        )
        for event in profiler.key_averages()
    }
    steps = STEPS * (1 if gpu.DRY else 4)  # one round warms up
    longest = sorted(times.items(), key=lambda one: -one[1][0])[:12]
    results.add(
        decoding=decoding,
        us_a_token=1e6 * seconds,
        us_in_kernels=sum(us for us, _ in times.values()) / steps,
        kernels_a_token=sum(count for _, count in times.values()) / steps,
        most={
            name[:60]: [round(us / steps, 2), round(count / steps, 2)]
            for name, (us, count) in longest
        },
    )


def measure(
    shape: str,
    text: str,
    layers: int,
    contexts: list[int],
    prefill: int,
    kinds: list[str],
    results: gpu.Results,
    profiled: bool,
) -> dict[str, float]:
    """Seconds and bytes of a model with a number of layers, by name."""
    scheme, *others = text.split("+")
    head = next(
        (other.removeprefix("head-") for other in others if other.startswith("head-")), None
    )
    os.environ[BLOCKS_SETTING] = "0" if "modules" in others else "1"
    gpu.reset_memory()
    model = load_model(
        gpu.checkpoint(shape, None if scheme == "bf16" else scheme, head, layers),
        device=gpu.DEVICE,
        dtype=torch.bfloat16,
        backend=None if scheme == "bf16" else "triton",
    )
    found = {
        "bytes": float(weight_bytes(model)),
        "blocks in five launches": float(model.ops.blocks is not None),
    }
    for kind in kinds:

        def measure_kind(kind: str = kind) -> None:
            os.environ[DECODE_SETTING] = kind
            engine = Engine(model, max(*contexts, prefill), compiled=False if gpu.DRY else None)
            if prefill and kind == kinds[0]:
                prompt = torch.zeros(prefill, dtype=torch.long, device=gpu.DEVICE)
                started = time.perf_counter()
                read(engine, prompt)
                gpu.synchronize()
                found["first token, compiling included"] = time.perf_counter() - started
                found[f"prefill {prefill}"] = gpu.wall_seconds(
                    partial(read, engine, prompt), 1 if gpu.DRY else 5
                )
            engine.decode([0], [0])
            if kind != "steps" and engine._captured is None:
                raise RuntimeError("no step can be captured")
            for context in contexts:
                found[f"decode at {context}, {kind}"] = decode_seconds(engine, kind, context)
            if profiled:
                profile(engine, kind, contexts[0], results)

        results.attempt(f"{shape} {text}, {layers} layers, {kind}", measure_kind)
        torch._dynamo.reset()
    found["peak bytes"] = gpu.peak_memory()
    return found


def in_both(
    results: gpu.Results,
    found: list[dict[str, float]],
    shape: str,
    scheme: str,
    counts: list[int],
    profiled: bool,
    *what: Any,
) -> None:
    """What `measure` finds with each number of layers."""
    for layers in counts:
        found.append(
            measure(shape, scheme, layers, *what, results, profiled and layers == counts[-1])
        )
        results.add(shape=shape, scheme=scheme, layers=layers, **found[-1])


def main() -> None:
    given = gpu.options(
        __doc__.splitlines()[0],
        shapes="llama-2-7b",
        schemes="bf16,int4-g128+modules,int4-g128,int8+modules,int8",
        contexts="128,1024,4096",
        layers="1,2" if gpu.DRY else "4,12",
        prefill=0,
        decoding="eager,compiled,steps",
        profile=0,
    )
    contexts = [16] if gpu.DRY else [int(context) for context in given.contexts.split(",")]
    counts, prefill = (
        [int(count) for count in given.layers.split(",")],
        min(given.prefill, 16 if gpu.DRY else 4096),
    )
    # Compiling takes long, and in a dry run nothing of it can be seen.
    kinds = [
        *dict.fromkeys(
            "eager" if gpu.DRY and kind == "compiled" else kind
            for kind in given.decoding.split(",")
        )
    ]
    results = gpu.Results(given.out)
    copied = 1e9 if gpu.DRY else measure_bandwidth(gpu.DEVICE)
    results.add(copy_bytes_a_second=copied)
    shapes, schemes = given.shapes.split(","), given.schemes.split(",")
    if gpu.DRY:
        shapes, schemes = shapes[:1], [schemes[0], schemes[-1]]
    for shape in shapes:
        whole, base = gpu.synthetic(shape, None).config.num_layers, {}
        for scheme in schemes:
            if gpu.spent(given.seconds):
                results.add(left_out=f"{shape} {scheme}: time is up")
                continue
            found: list[dict[str, float]] = []
            call = partial(
                in_both,
                results,
                found,
                shape,
                scheme,
                counts,
                bool(given.profile),
                contexts,
                prefill,
                kinds,
            )
            if not results.attempt(f"{shape} {scheme}", call):
                continue
            few, more = found
            each = {
                name: (more[name] - few[name]) / (counts[1] - counts[0])
                for name in few
                if name in more
            }
            model = {name: few[name] + (whole - counts[0]) * each[name] for name in each}
            for name in (name for name in model if name.startswith(("decode", "prefill"))):
                base.setdefault(name, model[name])
                row = {
                    "ms": 1e3 * model[name],
                    "of the first scheme's speed": base[name] / model[name],
                }
                if name.startswith("decode"):
                    row["of copy"] = model["bytes"] / model[name] / copied
                results.add(whole=shape, scheme=scheme, what=name, **row)
    gpu.end(results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
