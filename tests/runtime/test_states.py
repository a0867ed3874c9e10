"""Layers that keep states instead of keys and values, in an engine's slots: held against
transformers, which runs each sequence alone and without a cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from random_logits import CONFIGS, require_same_logits
from rows import alone, together

import quantkit
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
CHUNK = 16


@pytest.mark.sampled(8)
@pytest.mark.parametrize("number", range(CONFIGS))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_give_the_logits_of_transformers(
    family: str, number: int, tmp_path: Path
) -> None:
    require_same_logits(family, number, tmp_path)


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
