"""Layers that keep states instead of keys and values, in an engine's slots: held against
transformers, which runs each sequence alone and without a cache.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from compare_configs import build_model
from error_parts import raises
from rows import alone, together
from torch import Tensor

import quantkit
from fuzzing.configs import draw_runnable
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation
from quantkit.runtime.request import Request
from quantkit.runtime.scheduler import Scheduler

FAMILIES = (
    "lfm2",
    "lfm2_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "qwen3_next",
)
# Of each family.
CONFIGS, SEED = 300, 60
CHUNK = 16


def _find_tolerance(theirs: Any, texts: Tensor, expected: Tensor) -> float:
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


def _step_at_random(engine: Engine, texts: Tensor, chance: random.Random) -> list[Tensor]:
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize("number", range(CONFIGS))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_give_the_logits_of_transformers(
    family: str, number: int, tmp_path: Path
) -> None:
    """In one pass, and over the cache in chunks at random places, in ragged batches which
    sequences join and leave; and greedy tokens.
    """
    raw = draw_runnable(SEED, number, family)
    theirs = build_model(raw, tmp_path)
    # transformers has no cache for a model without any attention.
    theirs.config.use_cache = False
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    texts = oracle.random_tokens(11, batch=4)
    expected = oracle.logits(theirs, texts)
    tolerance = _find_tolerance(theirs, texts, expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(texts), expected, rtol=0, atol=tolerance)
    engine = Engine(model, 12, slots=2)
    for text, found in enumerate(_step_at_random(engine, texts, random.Random(number))):
        torch.testing.assert_close(found, expected[text], rtol=0, atol=tolerance)
    model.config = replace(model.config, eos_token_ids=())
    tokens = list(quantkit.generate(model, texts[0, :7].tolist(), max_new_tokens=4))
    assert tokens == oracle.greedy(theirs, texts[:1, :7], 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    sizes: dict[str, Any] = {"max_position_embeddings": 600, "num_hidden_layers": 3}
    kinds = ["conv", "full_attention", "conv"]
    made = oracle.make("lfm2", **sizes, layer_types=kinds, block_multiple_of=32)
    loaded = load_model(oracle.save(made, tmp_path_factory.mktemp("states") / "lfm2"), device="cpu")
    loaded.config = replace(loaded.config, eos_token_ids=())
    return loaded


def _run(scheduler: Scheduler, request: Request) -> list[Generation]:
    found = scheduler.add(request)
    while any(one.finish_reason is None for one in found):
        scheduler.step()
    return found


def _scheduler(model: Decoder, slots: int, *, any_prefix: bool = False) -> Scheduler:
    engine = Engine(model, 300, slots=slots)
    engine.chunk_rows = CHUNK
    return Scheduler(engine, any_prefix=any_prefix)


def _alone(model: Decoder, prompt: list[int], count: int) -> list[int]:
    return alone(model, Request(prompt, count))[0].token_ids


def test_a_shared_beginning_is_read_once_up_to_a_state_that_was_kept(model: Decoder) -> None:
    scheduler = _scheduler(model, slots=2)
    system = oracle.random_tokens(5 * CHUNK + 3)[0].tolist()
    for question in range(3):
        prompt = [*system, *[10 + question] * 9]
        (found,) = _run(scheduler, Request(prompt, 6))
        assert found.tokens == _alone(model, prompt, 6)
    # Both later prompts continue after the five chunks that they share with the first.
    assert scheduler.num_reused_tokens == 2 * 5 * CHUNK


def test_a_shorter_beginning_continues_after_at_least_half_of_it(model: Decoder) -> None:
    text = oracle.random_tokens(12 * CHUNK)[0].tolist()
    for chunks in range(1, 12):
        scheduler = _scheduler(model, slots=2)
        _run(scheduler, Request(text, 1))
        prompt = [*text[: chunks * CHUNK], 5, 6, 7]
        (found,) = _run(scheduler, Request(prompt, 3))
        assert found.tokens == _alone(model, prompt, 3)
        assert scheduler.num_reused_tokens * 2 >= chunks * CHUNK


def test_the_same_slot_goes_back_to_a_state_that_was_kept(model: Decoder) -> None:
    scheduler = _scheduler(model, slots=1)
    text = oracle.random_tokens(3 * CHUNK)[0].tolist()
    for ending in ([4, 5], [6, 7, 8], [9]):
        (found,) = _run(scheduler, Request([*text, *ending], 5))
        assert found.tokens == _alone(model, [*text, *ending], 5)
    assert scheduler.num_reused_tokens == 2 * 3 * CHUNK


def test_a_conversation_goes_on_from_the_answer_before(model: Decoder) -> None:
    scheduler = _scheduler(model, slots=1, any_prefix=True)
    text = oracle.random_tokens(40)[0].tolist()
    for turn in range(3):
        before = scheduler.num_reused_tokens
        (found,) = _run(scheduler, Request(text, 20))
        assert scheduler.num_reused_tokens - before == (0 if turn == 0 else len(text) - 6)
        assert found.tokens == _alone(model, text, 20)
        text = [*text, *found.tokens, 7, 8, 9, 10, 11]


def test_samples_of_a_prompt_read_it_once(model: Decoder) -> None:
    scheduler = _scheduler(model, slots=2)
    prompt = oracle.random_tokens(2 * CHUNK + 5)[0].tolist()
    found = _run(scheduler, Request(prompt, 8, samples=3))
    assert [one.tokens for one in found] == [_alone(model, prompt, 8)] * 3
    assert scheduler.num_reused_tokens == 2 * len(prompt)


def test_requests_that_run_together_have_the_tokens_that_they_have_alone(model: Decoder) -> None:
    texts = oracle.random_tokens(90, batch=7).tolist()
    requests = [Request(text[: 20 + 9 * at], 5 + at) for at, text in enumerate(texts)]
    engine = Engine(model, 120, slots=3)
    engine.chunk_rows = CHUNK
    for found in together(engine, requests):
        request = requests[found.prompt]
        assert found.token_ids == _alone(model, list(request.prompt), request.max_new_tokens)


def test_states_stay_float32_in_an_int8_cache(model: Decoder) -> None:
    engine = Engine(model, 40, cache_dtype="int8")
    dtypes = [{tensor.dtype for tensor in layer.tensors()} for layer in engine._cache.layers]
    assert dtypes == [{torch.float32}, {torch.int8, torch.float32}, {torch.float32}]
    found = list(quantkit.generate(engine, [3, 4, 5], max_new_tokens=9))
    assert len(found) == 9


def test_a_step_that_would_go_back_is_refused(model: Decoder) -> None:
    engine = Engine(model, 20)
    tokens = oracle.random_tokens(4)[0]
    engine.step(tokens, [0] * 4, range(4), [])
    for position in (2, 5):
        with raises(RequestError, f"position {position}", "4 tokens"):
            engine.step(tokens[:1], [0], [position], [0])
    with raises(RequestError, "2 tokens"):
        engine.copy_prefix(0, 0, 2)
    engine.step(tokens, [0] * 4, range(4), [])


def test_what_would_need_to_go_back_is_refused_by_name(model: Decoder) -> None:
    for options in ({"draft_tokens": 3}, {"draft": model}, {"compiled": True}):
        with raises(RequestError, "lfm2"):
            Engine(model, 20, **options)  # type: ignore[arg-type]
    engine = Engine(model, 20)
    assert engine.draft_tokens == 0
    with raises(RequestError, "lfm2"):
        Scheduler(engine).add(Request([3, 4, 5], 3, draft_tokens=2))
