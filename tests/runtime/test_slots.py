"""What slots hold, and prompts that begin with it: the same bits as without."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from rows import alone, together
from torch import Tensor

import quantkit
from quantkit.errors import RequestError
from quantkit.model.cache import zeros
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation
from quantkit.runtime.request import Request
from quantkit.runtime.scheduler import Scheduler
from quantkit.runtime.slots import (
    SlotContents,
    SlotTable,
    bitwise_reusable_prefix,
    count_common_prefix,
)

pytestmark = pytest.mark.cpu_kernels

CHUNK = 64
BORDERS = (1, 2, 15, 16, 17, 47, 48, 49, 63, 64, 65, 80, 81, 127, 128, 129, 145)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("slots")
    sizes = {"max_position_embeddings": 600, "num_hidden_layers": 2}
    oracle.save(oracle.make("llama", **sizes), base / "llama")
    oracle.save(oracle.make("mistral", **sizes, sliding_window=40), base / "windows")
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    oracle.save(
        oracle.make("llama", **{**sizes, "max_position_embeddings": 100}, rope_parameters=scaling),
        base / "dynamic",
    )
    for name in ("llama", "windows", "dynamic"):
        quantkit.quantize(base / name, base / f"{name}-int8", "int8", accept_quality_loss=True)
    return base


def _model(folder: Path, backend: str | None = None) -> Decoder:
    model = load_model(folder, dtype=torch.float32, backend=backend)
    model.config = replace(model.config, eos_token_ids=())
    return model


def _stored(engine: Engine, slot: int, length: int) -> list[Tensor]:
    return [tensor[slot, :, :length].clone() for tensor in engine._cache.tensors()]


def _run(scheduler: Scheduler, request: Request) -> Generation:
    (found,) = scheduler.add(request)
    while found.finish_reason is None:
        scheduler.step()
    return found


def _require_bits(
    model: Decoder,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    chunk: int = CHUNK,
    slots: int = 1,
    cached: torch.dtype | None = None,
) -> int:
    """Prompts one after the other store what they store alone, bit by bit; how many of their
    tokens were found.
    """
    length = max(map(len, prompts)) + 3
    engine = Engine(model, length, slots=slots, cache_dtype=cached)
    monkeypatch.setattr(engine, "chunk_rows", chunk)
    scheduler = Scheduler(engine)
    for prompt in prompts:
        found = _run(scheduler, Request(prompt, 3, logprobs=2))
        own = Engine(model, length, cache_dtype=cached)
        monkeypatch.setattr(own, "chunk_rows", chunk)
        right = _run(Scheduler(own), Request(prompt, 3, logprobs=2))
        assert (found.tokens, found.logprobs) == (right.tokens, right.logprobs)
        stored = len(prompt) + 2
        for ours, theirs in zip(
            _stored(engine, found.slot, stored), _stored(own, 0, stored), strict=True
        ):
            assert torch.equal(ours, theirs)
    return scheduler.num_reused_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "cached"),
    [
        ("llama", "cpu-exact", None),
        ("llama", "cpu-fast", torch.int8),
        ("windows", "cpu-exact", None),
    ],
    ids=str,
)
def test_a_prompt_that_shares_a_beginning_has_its_own_bits(
    name: str,
    backend: str,
    cached: torch.dtype | None,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For lengths around chunks and what kernels take as few rows."""
    model = _model(folders / f"{name}-int8", backend)
    text, other = oracle.random_tokens(200, batch=2).tolist()
    chance, reused = random.Random(0), 0
    pairs = [
        (shared, first, second)
        for shared in BORDERS
        for first in (0, 1, 30)
        for second in (1, 17, 60)
    ]
    for shared, first, second in chance.sample(pairs, 60):
        prompts = [[*text[:shared], *other[:first]], [*text[:shared], *other[50 : 50 + second]]]
        reused += _require_bits(model, prompts, monkeypatch, cached=cached)
    assert reused > 60 * CHUNK / 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_any_prompts_one_after_the_other_have_their_own_bits(
    seed: int, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    model = _model(
        folders / f"{chance.choice(['llama', 'windows'])}-int8",
        chance.choice(["cpu-exact", "cpu-fast"]),
    )
    text, *others = oracle.random_tokens(520, batch=5).tolist()
    prompts: list[list[int]] = []
    for _ in range(12):
        start = chance.choice([text, *prompts])
        prompts.append(
            [*start[: chance.randrange(1, 500)], *chance.choice(others)[: chance.randrange(20)]]
        )
    slots, chunk = chance.randrange(1, 4), chance.choice([32, 100, 240])
    cached = chance.choice([None, torch.int8])
    reused = _require_bits(model, prompts, monkeypatch, slots=slots, chunk=chunk, cached=cached)
    assert reused > 0


def test_a_system_prompt_is_read_once(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(folders / "llama-int8")
    system = oracle.random_tokens(500)[0].tolist()
    engine = Engine(model, 560, slots=2)
    rows, step = list[int](), engine.step
    monkeypatch.setattr(engine, "step", lambda *given: rows.append(len(given[1])) or step(*given))
    scheduler = Scheduler(engine)
    for question in range(5):
        request = Request([*system, *[10 + question] * 30], 1)
        assert _run(scheduler, request).tokens == alone(model, request)[0].token_ids
    assert sum(rows) == 530 + 4 * 30
    assert scheduler.num_reused_tokens == 4 * 500


def test_a_conversation_goes_on_from_the_answer_before(folders: Path) -> None:
    model = _model(folders / "llama-int8")
    scheduler = Scheduler(Engine(model, 300), any_prefix=True)
    text = oracle.random_tokens(40)[0].tolist()
    for turn in range(4):
        before, found = scheduler.num_reused_tokens, _run(scheduler, Request(text, 20))
        assert scheduler.num_reused_tokens - before == (0 if turn == 0 else len(text) - 6)
        assert found.tokens == alone(model, Request(text, 20))[0].token_ids
        text = [*text, *found.tokens, 7, 8, 9, 10, 11]


def test_where_positions_are_stretched_prompts_of_other_lengths_share_nothing(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of a prompt past the trained context, 100, are turned by its length."""
    model = _model(folders / "dynamic-int8", "cpu-exact")
    text = oracle.random_tokens(200)[0].tolist()
    within, past = [text[:60], text[:90]], [text[:150], text[:170], text[:90]]
    assert _require_bits(model, within, monkeypatch, chunk=16) > 0
    assert _require_bits(model, past, monkeypatch, chunk=16) == 0
    scheduler = Scheduler(Engine(model, 200), any_prefix=True)
    for prompt in (text[:90], text[:120]):
        assert (
            _run(scheduler, Request(prompt, 3)).tokens
            == alone(model, Request(prompt, 3))[0].token_ids
        )
    with pytest.raises(RequestError, match="found 201, expected at most 200"):
        quantkit.generate(model, text[:191], max_new_tokens=10)


@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast"])
def test_where_positions_are_stretched_a_prompt_has_the_same_bits_next_to_others(
    backend: str, folders: Path
) -> None:
    """Also where a row's place in the step is that of a loop's remainder, whose powers are
    rounded otherwise.
    """
    model = _model(folders / "dynamic-int8", backend)
    texts = oracle.random_tokens(190, batch=9).tolist()
    requests = [Request(text[: 101 + 9 * at], 9, logprobs=2) for at, text in enumerate(texts)]
    for slots in (2, 9):
        for found in together(Engine(model, 200, slots=slots), requests):
            assert replace(found, prompt=0) == alone(model, requests[found.prompt])[0]
    positions, lengths = torch.randint(400, (240, 1)), torch.randint(101, 500, (240, 1))
    every = model.rotary(positions, lengths)
    for row in range(240):
        own = model.rotary(positions[row : row + 1], lengths[row : row + 1])
        assert torch.equal(every.cosine[row : row + 1], own.cosine)
        assert torch.equal(every.sine[row : row + 1], own.sine)


def test_what_two_begin_with() -> None:
    assert count_common_prefix([1, 2, 3], SlotContents()) == 0
    assert (
        count_common_prefix([1, 2, 3], SlotContents([1, 2, 3, 4])) == 2
    )  # the last is read for its logits
    assert count_common_prefix([1, 2, 3, 4], SlotContents([1, 2, 9])) == 2


def test_what_has_the_same_bits() -> None:
    text = list(range(200))
    held = SlotContents(text, 200)
    assert (
        bitwise_reusable_prefix(text[:100], held, 64, windows=False) == 83
    )  # 17 are left: many rows
    assert bitwise_reusable_prefix(text[:100], held, 64, windows=True) == 64
    assert (
        bitwise_reusable_prefix(text[:70], held, 64, windows=False) == 64
    )  # 6 rows, summed in another order
    assert bitwise_reusable_prefix(text[:100], SlotContents(text[:70], 70), 64, windows=False) == 64
    assert (
        bitwise_reusable_prefix(text[:100], SlotContents(text[:100], 30), 64, windows=False) == 30
    )  # not of its answer
    assert bitwise_reusable_prefix(text[:10], held, 64, windows=False) == 0


def test_slots_are_taken_by_what_they_hold_and_then_in_turn() -> None:
    table = SlotTable(3, 16, any_prefix=True, windows=False)
    slots = [table.take([number] * 5) for number in range(3)]
    assert slots == [0, 1, 2]
    assert not table.has_free_slot
    for slot in slots:
        table.record_contents(slot, [slot] * 5, 5)
    for slot in (1, 0):
        table.release(slot, [9])
    assert table.take([0, 0, 0, 0, 0, 9, 4]) == 0
    assert table.find_longest_prefix([1, 1, 1, 1, 1, 9, 4]) == (1, 6)
    assert table.take([7]) == 1
    assert table.find_whole_prompt([2] * 5) == 2
    assert table.find_whole_prompt([2] * 4) is None  # read as part of a longer one


def test_a_prompt_with_the_same_beginning_leaves_a_slot_to_who_goes_on_there() -> None:
    table = SlotTable(3, 16, any_prefix=True, windows=False)
    conversation = list(range(100))
    slot = table.take(conversation)
    table.record_contents(slot, conversation, 100)
    table.release(slot)
    other = table.take([*conversation[:40], 7, 7])
    assert other != slot
    assert table.find_longest_prefix([*conversation[:40], 7, 7]) == (slot, 40)
    assert table.take([*conversation, 5]) == slot


def test_slots_beyond_those_that_run_hold_prompts_that_come_again(folders: Path) -> None:
    model = _model(folders / "llama-int8")
    prompts = oracle.random_tokens(120, batch=3).tolist()
    for slots, expected in ((1, 0), (3, 3 * 119)):
        scheduler = Scheduler(Engine(model, 130, slots=slots), max_running=1)
        assert scheduler.max_running == 1
        for prompt in prompts:
            _run(scheduler, Request(prompt, 2))
        assert scheduler.num_reused_tokens == 0
        for prompt in prompts:
            assert (
                _run(scheduler, Request(prompt, 2)).tokens
                == alone(model, Request(prompt, 2))[0].token_ids
            )
        assert (scheduler.num_reused_tokens > 2 * expected / 3) == bool(expected)


def test_one_of_many_samples_waits_for_a_request_that_has_none(folders: Path) -> None:
    model = _model(folders / "llama-int8")
    scheduler = Scheduler(Engine(model, 60, slots=2))
    many = scheduler.add(Request([5, 6, 7], 10, samples=6))
    (one,) = scheduler.add(Request([8, 9], 10))
    while one.finish_reason is None:
        scheduler.step()
    assert sum(other.finish_reason is not None for other in many) <= 2
    while scheduler.busy:
        scheduler.step()
    assert all(len(other.tokens) == 10 for other in many)


def test_a_cache_takes_memory_only_for_what_it_holds() -> None:
    found = zeros((64, 1 << 20), torch.bfloat16, "cpu")
    before = _resident()
    assert not found[5, :1000].any()
    found[3, :100] = 1.0
    assert _resident() - before < 1 << 20
    assert found[3, :100].all()
    assert zeros((3, 5), torch.float32, "cpu").tolist() == [[0.0] * 5] * 3


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
