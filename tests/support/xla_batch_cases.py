"""Runs in a process of its own, over virtual devices: batches through XLA beside what torch does,
as JSON.

python -m xla_batch_cases FOLDER:DEVICES ...
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from xla_cases import error

from quantkit.formats.detect import open_checkpoint
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.generate_batch import completions, engine_for, generate_batch
from quantkit.runtime.request import Completion, Request
from quantkit.runtime.sampling import compute_probabilities
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.xla.engine import CachedBatch, XlaModel, load_on_devices
from quantkit.xla.programs import Sampling, sample

warnings.simplefilter("error")
LENGTHS = (1, 2, 5, 9, 17, 26, 33, 40)
COUNTS = (24, 24, 24, 24, 1, 10, 12, 11)  # of the first four, an end token comes before
ENDS = (2, 5, 8, 12)  # the token in these places of the first four
DRAWN = SamplingParams(temperature=0.9, seed=8)
OPTIONS = (
    ([0.0, 0.0, 0.0, 0.0], SamplingParams(1.0, top_p=0.5)),  # of four alike, the third goes beyond
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(2.0, top_p=0.7)),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(0.5, top_k=3)),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(1.0, min_p=0.4)),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(1.0, top_k=3, top_p=0.6, min_p=0.5)),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(1.0, top_k=2, logit_bias={1: 3.0, 2: -1.0})),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(1.0, repetition_penalty=2.0)),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(1.0, presence_penalty=0.5, frequency_penalty=0.75)),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams()),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(1e300, top_k=10**30, repetition_penalty=100.0)),
    ([0.3, 0.05, 0.5, 0.15], SamplingParams(1e-30, top_p=5e-324, logit_bias={1: 1e4, 2: -1e4})),
)


class Letters:
    """A tokenizer of one letter for each token."""

    token_bytes = None

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


def main(cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in cases:
        folder, _, devices = case.rpartition(":")
        checkpoint = open_checkpoint(folder)
        eager = load_model(checkpoint, dtype=torch.float32, backend="reference")
        model = load_on_devices(checkpoint, devices=int(devices), dtype=torch.float32)
        prompts = drawn_prompts(model)
        alone = [
            one.token_ids for one in generate_batch(eager, prompts, max_new_tokens=max(COUNTS))
        ]
        ends = tuple(tokens[place] for tokens, place in zip(alone, ENDS, strict=False))
        config = replace(model.config, eos_token_ids=ends)
        model, eager.config = replace(model, split=replace(model.split, config=config)), config
        texts = [cut(tokens, count, ends) for tokens, count in zip(alone, COUNTS, strict=True)]
        found[checkpoint.path.name] = next_to_torch(model, prompts, texts)
    found["rows"] = rows(model, prompts)
    found["seeds"] = seeds(model, prompts)
    found["stopped"] = stopped(model, prompts)
    found["own ends"] = own_ends(model, prompts)
    found["options"] = options(eager, model, prompts)
    found["logprobs"] = logprob_errors(eager, model, prompts)
    found["refused"] = error(
        lambda: generate_batch(model, prompts, max_new_tokens=1, logprobs=1, echo=True)
    )
    found["nan"] = broken(model, prompts)
    found["frequencies"] = [frequencies(*one) for one in OPTIONS]
    return found


def drawn_prompts(model: XlaModel) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]


def cut(tokens: list[int], count: int, ends: tuple[int, ...]) -> tuple[list[int], str]:
    """What of a text remains, and why it ends."""
    place = next((at for at, token in enumerate(tokens[:count]) if token in ends), None)
    return (tokens[:count], "length") if place is None else (tokens[:place], "stop")


@contextmanager
def counted_steps() -> Iterator[list[tuple[int, ...]]]:
    """Steps of each chunk that is run, and rows of its batch."""
    grow, counts = CachedBatch.grow, []

    def counted(batch: CachedBatch) -> Any:
        drawn = grow(batch)
        counts.append(drawn.tokens.shape)
        return drawn

    CachedBatch.grow = counted  # type: ignore[method-assign]
    yield counts
    CachedBatch.grow = grow  # type: ignore[method-assign]


def run(
    model: XlaModel, requests: list[Request], slots: int = 8, tokenizer: Any = None, stop: str = ""
) -> Any:
    runner = engine_for(model, requests, slots)
    found = list(completions(runner, requests, tokenizer, [[stop] if stop else []] * len(requests)))
    return sorted(found, key=lambda one: (one.prompt, one.sample))


def next_to_torch(
    model: XlaModel, prompts: list[list[int]], expected: list[tuple[list[int], str]]
) -> dict[str, Any]:
    requests = [Request(prompt, count) for prompt, count in zip(prompts, COUNTS, strict=True)]
    with counted_steps() as counts:
        found = run(model, requests)
    return {
        "found": [(one.token_ids, one.finish_reason) for one in found],
        "expected": expected,
        "steps": counts,
    }


def rows(model: XlaModel, prompts: list[list[int]]) -> Any:
    """Numbers, chunks and tokens of eight prompts and three more, the last twice, at most eight at
    once; and the chunks of three alone.
    """
    order = [*prompts, *prompts[:2]]
    requests = [*(Request(one, 3) for one in order), Request(prompts[2], 3, samples=2)]
    with counted_steps() as counts:
        found = run(model, requests)
    with counted_steps() as few:
        run(model, requests[:3])
    numbers = [(one.prompt, one.sample) for one in found]
    return numbers, counts, [one.token_ids for one in found], few


def own_ends(model: XlaModel, prompts: list[list[int]]) -> Any:
    """A text; the same where its fourth ends it, and its chunks."""
    prompt = prompts[-1]
    (whole,) = run(model, [Request(prompt, 11)])
    with counted_steps() as counts:
        (ended,) = run(model, [Request(prompt, 24, end_ids=(whole.token_ids[3],))])
    return whole.token_ids, (ended.token_ids, ended.finish_reason), len(counts)


def seeds(model: XlaModel, prompts: list[list[int]]) -> list[list[int]]:
    """A text's tokens: alone; among others that are drawn otherwise, in another row; with another
    seed; as the second of two samples, the first of which has the seed before.
    """
    others = [
        Request(one, 12, SamplingParams(0.5 + index, top_k=3))
        for index, one in enumerate(prompts[:3])
    ]
    (alone,) = run(model, [Request(prompts[7], 12, DRAWN)])
    among = run(model, [*others, Request(prompts[7], 12, DRAWN), *others])[3]
    (other,) = run(model, [Request(prompts[7], 12, replace(DRAWN, seed=9))])
    second = run(model, [Request(prompts[7], 12, replace(DRAWN, seed=7), samples=2)])[1]
    return [one.token_ids for one in (alone, among, other, second)]


def stopped(model: XlaModel, prompts: list[list[int]]) -> Any:
    """A text that has no end; with its third letter as stop string, what comes of it three times,
    two at once, and the chunks run.
    """
    (whole,) = run(model, [Request(prompts[7], 24)], tokenizer=Letters())
    with counted_steps() as counts:
        found = run(model, [Request(prompts[7], 24)] * 3, 2, Letters(), stop=whole.text[2])
    return (
        whole.text,
        [(one.text, one.stop, one.finish_reason, len(one.token_ids)) for one in found],
        counts,
    )


def options(eager: Decoder, model: XlaModel, prompts: list[list[int]]) -> list[list[list[int]]]:
    """The same greedy texts by both: as they are, with a bias, and with a penalty."""
    found = []
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
    for more in ({}, {"logit_bias": {3: 2.0, 5: -9.0}}, {"repetition_penalty": 1.5}, penalties):
        requested: dict[str, Any] = {"max_new_tokens": 8, **more}
        texts = [generate_batch(one, prompts[4:], **requested) for one in (eager, model)]
        found.append([[one.token_ids for one in given] for given in texts])
    return found


def logprob_errors(eager: Decoder, model: XlaModel, prompts: list[list[int]]) -> Any:
    """Tokens, the largest distance to torch's log-probabilities, and whether the likeliest are
    the same.
    """
    requested: dict[str, Any] = {"max_new_tokens": 8, "logprobs": 3}
    expected = generate_batch(eager, prompts[6:], **requested)
    found = generate_batch(model, prompts[6:], **requested)
    return [compared(*pair) for pair in zip(expected, found, strict=True)]


def compared(expected: Completion, found: Completion) -> tuple[int, float, bool]:
    assert expected.logprobs is not None
    assert found.logprobs is not None
    distances = np.abs(
        np.array(expected.logprobs.tokens, float) - np.array(found.logprobs.tokens, float)
    )
    same = [list(one) for one in expected.logprobs.top] == [list(one) for one in found.logprobs.top]
    return len(found.token_ids), float(distances.max()), same


def broken(model: XlaModel, prompts: list[list[int]]) -> str:
    """A token whose embedding is not finite, in one prompt of three."""
    name = "model.embed_tokens.weight"
    table = model.state[name]  # [N, V / N, D]
    state = {**model.state, name: table.at[divmod(prompts[5][0], table.shape[1])].set(np.nan)}
    spoiled = replace(model, state=state)
    return error(
        lambda: generate_batch(spoiled, [prompts[0], prompts[5], prompts[1]], max_new_tokens=3)
    )


def frequencies(weights: list[float], params: SamplingParams) -> tuple[list[float], list[float]]:
    """How often each of four tokens is drawn in 4000 rows, and the probabilities that torch has for
    them.

    With a penalty, the text holds the third, twice among the new tokens.
    """
    logits = np.log(np.array(weights, np.float32)) if any(weights) else np.zeros(4, np.float32)
    held, count = np.array([False, False, True, False]), 4000
    often = np.array([0, 0, 2, 0], np.int32)
    expected = compute_probabilities(
        torch.from_numpy(logits)[None],
        params,
        torch.from_numpy(held)[None],
        torch.from_numpy(often)[None],
    )[0]
    drawn = jax.jit(sample)(
        np.broadcast_to(logits, (count, 4)),
        Sampling.of([params] * count, range(count), 4),
        np.zeros(count, np.int32),
        np.broadcast_to(held, (count, 4)) if params.repetition_penalty != 1 else None,
        np.broadcast_to(often, (count, 4)) if params.needs_counts else None,
    )
    return (np.bincount(np.asarray(drawn), minlength=4) / count).tolist(), expected.tolist()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
