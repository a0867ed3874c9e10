"""Stages 2 and 4 of `gpu_day.sh`: how fast whole models decode and read prompts on the card.

    python scripts/gpu_decode.py [--out FILE.json] [--shapes llama-2-7b] [--schemes bf16,int8,int4-g128]
        [--contexts 128,1024,4096] [--layers 4,12] [--prefill 0] [--decoding eager,compiled,steps] [--profile 0]

To compile all layers of a 7B model takes minutes. So models have few layers, in two counts, and the difference is that
of the layers between: the figures of the whole model follow. Weights are random, the cache holds zeros, which takes as
long. Each way of decoding is measured (`quantkit.runtime.captured.DECODE_SETTING`): a CUDA graph of our own of an eager
step, one of a compiled step, and steps as inductor records them, with the host between. Prints ms a token, the bytes of
weights a second, as a share of what a copy moves too, and with ``--prefill`` tokens of a prompt, the seconds of reading
it, the first token, compiling included, and memory; with ``--profile``, so many of the kernels that take most of a
token's time, of each way, with the fewer layers.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_card as card
import torch

from quantkit.evals.timing import bandwidth, weight_bytes
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.captured import DECODE_SETTING
from quantkit.runtime.engine import Engine

STEPS = 2 if card.DRY else 64
BEHIND = 2  # steps that the host reads tokens after they were asked for


def decode(engine: Engine, kind: str, context: int) -> None:
    """Take steps of one token up to a context, each of the likeliest one after the last."""
    positions = range(context - STEPS, context)
    if kind == "steps":
        token = torch.zeros(1, dtype=torch.long, device=card.DEVICE)
        for position in positions:
            token = engine.step(token, [0], [position], [0]).argmax(-1)
        return
    late = deque(engine.decode([0], [position]) for position in positions[:BEHIND])
    for position in positions[BEHIND:]:
        late.append(engine.decode([0], [position]))
        late.popleft().read()


def profile(results: card.Results, call: Callable[[], None], most: int, **what: Any) -> None:
    """The kernels that take most of the time of decoding a token, and how many there are."""
    with torch.profiler.profile() as profiled:
        call()
        card.synchronize()
    of_card = card.DEVICE.type == "cuda"
    rows = [row for row in profiled.key_averages() if not of_card or row.device_type == torch.autograd.DeviceType.CUDA]
    times = {row.key: row.self_device_time_total if of_card else row.self_cpu_time_total for row in rows}
    results.add(kernels=sum(row.count for row in rows) / STEPS, us=sum(times.values()) / STEPS, **what)
    for row in sorted(rows, key=lambda row: -times[row.key])[:most]:
        results.add(kernel=row.key[:90], us=times[row.key] / STEPS, launches=row.count / STEPS, **what)


def read(engine: Engine, prompt: torch.Tensor) -> None:
    """Take up a prompt, a chunk at a time."""
    for start in range(0, len(prompt), engine.chunk):
        rows = range(start, min(start + engine.chunk, len(prompt)))
        engine.step(prompt[rows.start : rows.stop], [0] * len(rows), rows, [len(rows) - 1])


def measure(results: card.Results, shape: str, scheme: str, layers: int, given: Any) -> dict[str, float]:
    """Seconds and bytes of a model with so many layers, by name."""
    quantized, _, head = scheme.partition("+head-")
    card.reset_memory()
    model = load_model(
        card.checkpoint(shape, None if quantized == "bf16" else quantized, head or None, layers),
        device=card.DEVICE, dtype=torch.bfloat16, backend=None if quantized == "bf16" else "triton",
    )  # fmt: skip
    found = {"bytes": float(weight_bytes(model))}
    for number, kind in enumerate(given.decoding):
        os.environ[DECODE_SETTING] = kind
        call = partial(measure_kind, results, found, model, given, kind, number == 0, shape, scheme, layers)
        results.attempt(f"{shape} {scheme}, {layers} layers, {kind}", call)
        torch._dynamo.reset()
    found["peak bytes"] = card.peak_memory()
    return found


def measure_kind(
    results: card.Results, found: dict[str, float], model: Decoder, given: Any, kind: str, reads: bool, shape: str,
    scheme: str, layers: int,
) -> None:  # fmt: skip
    """Add what one way of decoding takes, and with the first one what reading a prompt does."""
    engine = Engine(model, max(*given.contexts, given.prefill), compiled=False if card.DRY else None)
    if reads and given.prefill:
        prompt = torch.zeros(given.prefill, dtype=torch.long, device=card.DEVICE)
        started = time.perf_counter()
        read(engine, prompt)
        card.synchronize()
        found["first token, compiling included"] = time.perf_counter() - started
        found[f"prefill {given.prefill}"] = card.wall_seconds(partial(read, engine, prompt), 1 if card.DRY else 5)
    if kind != "steps" and engine.decode([0], [0]) is None:
        raise RuntimeError("no step can be recorded")
    for context in given.contexts:
        seconds = card.wall_seconds(partial(decode, engine, kind, context), 1 if card.DRY else 3)
        found[f"decode at {context}, {kind}"] = seconds / STEPS
    if given.profile and layers == given.layers[0]:
        what = {"shape": shape, "scheme": scheme, "layers": layers, "decoding": kind}
        call = partial(decode, engine, kind, given.contexts[0])
        results.attempt("profile", partial(profile, results, call, given.profile, **what))


def in_both(results: card.Results, found: list[dict[str, float]], shape: str, scheme: str, given: Any) -> None:
    """What `measure` finds with each number of layers."""
    for layers in given.layers:
        found.append(measure(results, shape, scheme, layers, given))
        results.add(shape=shape, scheme=scheme, layers=layers, **found[-1])


def main() -> None:
    given = card.options(
        __doc__.splitlines()[0], shapes="llama-2-7b", schemes="bf16,int8,int4-g128", contexts="128,1024,4096",
        layers="1,2" if card.DRY else "4,12", prefill=0, decoding="eager,compiled,steps", profile=0,
    )  # fmt: skip
    given.contexts = [16] if card.DRY else [int(context) for context in given.contexts.split(",")]
    given.layers, given.prefill = (
        [int(count) for count in given.layers.split(",")],
        min(given.prefill, 16 if card.DRY else 4096),
    )
    given.decoding = [kind for kind in given.decoding.split(",") if not (card.DRY and kind == "compiled")]
    results = card.Results(given.out)
    copied = 1e9 if card.DRY else bandwidth(card.DEVICE)
    results.add(copy_bytes_a_second=copied)
    shapes, schemes = given.shapes.split(","), given.schemes.split(",")
    if card.DRY:
        shapes, schemes = shapes[:1], [schemes[0], schemes[-1]]
    for shape in shapes:
        whole, base = card.synthetic(shape, None).config.num_layers, {}
        for scheme in schemes:
            if card.spent(given.seconds):
                results.add(left_out=f"{shape} {scheme}: time is up")
                continue
            found: list[dict[str, float]] = []
            call = partial(in_both, results, found, shape, scheme, given)
            if not results.attempt(f"{shape} {scheme}", call):
                continue
            few, more = found
            least, most = given.layers
            each = {name: (more[name] - few[name]) / (most - least) for name in few.keys() & more.keys()}
            model = {name: few[name] + (whole - least) * each[name] for name in few if name in each}
            for name in (name for name in model if name.startswith(("decode", "prefill"))):
                base.setdefault(name, model[name])
                row = {"ms": 1e3 * model[name], "of the first scheme's speed": base[name] / model[name]}
                if name.startswith("decode"):
                    row["of copy"] = model["bytes"] / model[name] / copied
                results.add(whole=shape, scheme=scheme, what=name, **row)
    card.end(results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
