"""A random config of a family, by transformers and by quantkit's decoder: in one pass, and over
the cache.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import torch
from compare_configs import build_model
from torch import Tensor

import quantkit
from fuzzing.configs import draw_runnable
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine

CONFIGS = 300
"""Of each family."""
SEED = 60


def find_tolerance(theirs: Any, texts: Tensor, expected: Tensor) -> float:
    """Return 1e-4 of the largest logit, or 4 times what weights that are off by a float32 rounding
    change. 2 of 600 configs of Qwen3.5 need the latter: random weights make what a head reads so
    small that the norm after it stretches its rounding.
    """
    changed = copy.deepcopy(theirs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter *= 1 + 1e-7 * torch.randn(parameter.shape, generator=generator).sign()
    change = float((oracle.logits(changed, texts) - expected).abs().max())
    return max(1e-4 * max(1.0, float(expected.abs().max())), 4 * change)


def step_at_random(engine: Engine, texts: Tensor, chance: random.Random) -> list[Tensor]:
    """Append all texts [N, T] to an engine with fewer slots, each in parts of random lengths, and
    each beginning when a slot becomes free: the logits of each, [T, V].
    """
    waiting = list(range(len(texts)))
    chance.shuffle(waiting)
    free = list(range(engine.slots))
    positions: dict[int, int] = {}
    slots: dict[int, int] = {}
    logits: dict[int, list[Tensor]] = {number: [] for number in waiting}
    length = texts.shape[1]
    while waiting or positions:
        while waiting and free and chance.random() < 0.8:
            number = waiting.pop()
            positions[number] = 0
            slots[number] = free.pop()
        members = [number for number in positions if chance.random() < 0.7]
        rows: list[tuple[int, int]] = []
        for number in members:
            count = min(chance.choice((1, 1, 2, 5)), length - positions[number])
            rows += [(number, positions[number] + place) for place in range(count)]
            positions[number] += count
        if not rows:
            continue
        tokens = torch.stack([texts[number, position] for number, position in rows])
        found = engine.step(
            tokens,
            [slots[number] for number, _ in rows],
            [position for _, position in rows],
            range(len(rows)),
        )
        for (number, _), row in zip(rows, found, strict=True):
            logits[number].append(row)
        for number in members:
            if positions[number] == length:
                del positions[number]
                free.append(slots[number])
    return [torch.stack(logits[number]) for number in range(len(texts))]


def require_same_logits(family: str, number: int, folder: Path) -> None:
    """Compare logits and greedy tokens: in one pass, and over the cache in chunks at random places,
    in ragged batches which sequences join and leave.
    """
    raw = draw_runnable(SEED, number, family)
    theirs = build_model(raw, folder)
    # transformers has no cache for a model without any attention.
    theirs.config.use_cache = False
    model = load_model(folder, dtype=torch.float32, device="cpu")
    texts = oracle.random_tokens(11, batch=4)
    expected = oracle.logits(theirs, texts)
    tolerance = find_tolerance(theirs, texts, expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(texts), expected, rtol=0, atol=tolerance)
    engine = Engine(model, 12, slots=2)
    for text, found in enumerate(step_at_random(engine, texts, random.Random(number))):
        torch.testing.assert_close(found, expected[text], rtol=0, atol=tolerance)
    model.config = replace(model.config, eos_token_ids=())
    tokens = list(quantkit.generate(model, texts[0, :7].tolist(), max_new_tokens=4))
    assert tokens == oracle.greedy(theirs, texts[:1, :7], 4)
