"""Runs in a process of its own, over virtual devices: what XLA computes beside what torch does, as
JSON.

python -m xla_cases FOLDER:DEVICES ...
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch

from quantkit.errors import QuantkitError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.attention import PLAIN, make_causal_attention
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.generate import generate as generate_eager
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.xla.engine import CachedBatch, XlaModel, load_on_devices, round_up_to_bucket
from quantkit.xla.estimate import collectives
from quantkit.xla.model import attention, multiply_quantized, update_cache
from quantkit.xla.programs import CHUNK, Rows, Sampling, sample

warnings.simplefilter("error")
PROMPT = [5, 17, 40, 3, 77, 12, 9]
PADDED = CAPACITY = 32  # as `generate` has them for few tokens: compiled once


def main(cases: list[str]) -> dict[str, Any]:
    found = {}
    for case in cases:
        folder, _, devices = case.rpartition(":")
        checkpoint = open_checkpoint(folder)
        eager = load_model(checkpoint, dtype=torch.float32, backend="reference")
        model = load_on_devices(checkpoint, devices=int(devices), dtype=torch.float32)
        found[checkpoint.path.name] = compared(eager, model)
    found["sampling"] = sampled(model)
    found["nan"] = broken(model)
    found["drawn"] = frequencies()
    found["end"] = ended(model)
    found["clamped"] = beyond()
    found["products"] = product_errors()
    found["attention"] = attention_error()
    found["buckets"] = [round_up_to_bucket(length) for length in (1, 32, 33, 500, 513, 1024, 1025)]
    return found


def compared(eager: Decoder, model: XlaModel) -> dict[str, Any]:
    expected, tokens = stepwise(eager)
    texts = [text(model, filler) for filler in (0, 90)]
    starts = [np.asarray(one.logits) for one in texts]
    cache = texts[0]._cache[0][0]
    drawn = [one.grow().tokens[:, 0].tolist() for one in texts]
    ends = [np.asarray(one.logits) for one in texts]
    first, numbers = texts[0], np.zeros(1, np.int32)
    program = model.chunk(None).lower(
        model.state, first._cache, first.logits, Rows(numbers, numbers), first._ends, None
    )  # compiled before
    return {
        "prompt": float(np.abs(starts[0] - expected[0].numpy()).max()),
        "chunk": float(np.abs(ends[0] - expected[-1].numpy()).max()),
        "spread": float(expected[0].std()),
        "tokens": [drawn[0], tokens],
        "padding": [bool((a == b).all()) for a, b in (starts, ends)],
        "collectives": collectives(program.compile().as_text()),
        "dtypes": {name: str(array.dtype) for name, array in model.state.items()},
        "bytes": held(model),
        "donated": cache.is_deleted(),
        "full": error(lambda: text(model, 0, CAPACITY - len(PROMPT) + 1)),
        "generated": [
            list(model.generate(PROMPT, max_new_tokens=count))
            == list(generate_eager(eager, PROMPT, max_new_tokens=count))
            for count in (1, 10, 23)
        ],
    }


def text(model: XlaModel, filler: int, count: int = 2 * CHUNK) -> CachedBatch:
    tokens = np.full((1, PADDED), filler)
    tokens[0, : len(PROMPT)] = PROMPT
    return CachedBatch(model, tokens, np.array([len(PROMPT)]), np.array([count]), CAPACITY)


@torch.inference_mode()
def stepwise(model: Decoder) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of the prompt and of each of a chunk's likeliest tokens, and these tokens."""
    cache = KVCache(model.config, 1, CAPACITY, torch.float32, "cpu")
    positions = torch.arange(len(PROMPT))
    logits = [
        model.head(model.hidden(torch.tensor([PROMPT]), positions, cache, is_prefill=True)[:, -1])
    ]
    tokens: list[int] = []
    for index in range(CHUNK):
        tokens.append(int(logits[-1].argmax()))
        positions = torch.tensor([len(PROMPT) + index])
        logits.append(
            model.head(model.hidden(torch.tensor([tokens[-1:]]), positions, cache)[:, -1])
        )
    return logits, tokens


def held(model: XlaModel) -> list[int]:
    """Bytes of weights on each device, int4 as half a byte."""
    half = {name for name, array in model.state.items() if array.dtype == jax.numpy.int4}
    return [
        sum(
            int(np.prod(shard.data.shape))
            * (1 if name in half else 2 * shard.data.dtype.itemsize)
            // 2
            for name, array in model.state.items()
            for shard in array.addressable_shards
            if shard.device == device
        )
        for device in model.mesh.devices.flat
    ]


def sampled(model: XlaModel) -> list[list[int]]:
    settings = [(0.9, 1.0, 7), (0.9, 1.0, 7), (0.9, 1.0, 8), (0.9, 1e-6, 9), (0.0, 1.0, None)]
    return [
        list(
            model.generate(
                PROMPT, max_new_tokens=12, temperature=temperature, top_p=top_p, seed=seed
            )
        )
        for temperature, top_p, seed in settings
    ]


def ended(model: XlaModel) -> list[list[int]]:
    """All of 25 tokens, those with the fifteenth as end token, and the end token."""
    tokens = list(model.generate(PROMPT, max_new_tokens=25))
    config = replace(model.config, eos_token_ids=(tokens[14],))
    ending = replace(model, split=replace(model.split, config=config))
    return [tokens, list(ending.generate(PROMPT, max_new_tokens=25)), [tokens[14]]]


def broken(model: XlaModel) -> str:
    state = dict(model.state)
    state["model.norm.weight"] = state["model.norm.weight"] * np.nan
    spoiled = XlaModel(
        split=model.split, mesh=model.mesh, decoder=model.decoder, state=state, dtype=model.dtype
    )
    return error(lambda: list(spoiled.generate(PROMPT, max_new_tokens=3)))


def beyond() -> list[float]:
    """A cache of four positions after two were put at its last and the one that is not there."""
    cache, new = np.full((1, 1, 4, 1), 4.0), np.full((1, 1, 2, 1), 2.0)
    return (
        np.asarray(update_cache(jax.numpy.asarray(cache), jax.numpy.asarray(new), np.arange(3, 5)))
        .ravel()
        .tolist()
    )


def product_errors() -> list[float]:
    """Of few and many rows, per row and in groups, with zero points and without."""
    draw, errors = np.random.default_rng(0), []
    for rows in (3, 64, 65):
        for groups in (1, 4):
            for zero in (None, draw.integers(-8, 8, (groups, 24)).astype(np.int8)):
                x = draw.standard_normal((rows, 64)).astype(np.float32)
                codes = draw.integers(-8, 8, (groups, 24, 64 // groups)).astype(np.int8)
                scale = draw.uniform(0.5, 1, (groups, 24)).astype(np.float32)
                weight = (codes - (0.0 if zero is None else zero[..., None])) * scale[..., None]
                expected = x @ weight.transpose(1, 0, 2).reshape(24, 64).T
                nibbles = jax.numpy.asarray(codes).astype(jax.numpy.int4)
                errors.append(
                    float(np.abs(multiply_quantized(x, nibbles, scale, zero) - expected).max())
                )
    return errors


def attention_error() -> float:
    """Of more queries than are mixed at once, with a window and without."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 1024, 8), (1, 2, 1024, 8), (1, 2, 1024, 8)]
    operands = [torch.randn(shape, generator=draw) for shape in shapes]
    positions, worst = torch.arange(1024), 0.0
    for window in (None, 100):
        expected = make_causal_attention(positions, [window])(0, *operands, PLAIN)
        distance = np.arange(1024)[:, None] - np.arange(1024)
        mask = None if window is None else (distance >= 0) & (distance < window)
        mixed = attention(*(jax.numpy.asarray(one.numpy()) for one in operands), mask)
        worst = max(
            worst,
            float(
                np.abs(mixed.transpose(0, 2, 1, 3).reshape(expected.shape) - expected.numpy()).max()
            ),
        )
    return worst


def frequencies() -> list[float]:
    """How often each of four tokens of probability 0.5, 0.3, 0.15, 0.05 is drawn from the first
    0.7 of them.
    """
    logits = 2.0 * np.log(np.array([0.3, 0.05, 0.5, 0.15], np.float32))
    rows = 4000
    sampling = Sampling.of([SamplingParams(2.0, 0.7)] * rows, range(rows), 4)
    tokens = jax.jit(sample)(
        np.broadcast_to(logits, (rows, 4)), sampling, np.zeros(rows, np.int32), None
    )
    return (np.bincount(np.asarray(tokens), minlength=4) / rows).tolist()


def error(call: Any) -> str:
    try:
        call()
    except QuantkitError as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
