"""Sequences that share the steps of an engine: each is as if it were alone."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import torch
from architecture_cases import ROPES
from batch_cases import CONTEXT, batch_model, random_prompts, staggered_requests
from rows import alone, forward_logprobs, read_late, require_same, together
from torch import Tensor
from transformers import DynamicCache

import quantkit
from quantkit.errors import NonFiniteError, RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.load import load_model
from quantkit.runtime import engine as engine_module
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.runtime.scheduler import Scheduler
from quantkit.runtime.slots import FEW_ROWS
from quantkit.tensors.qtensor import QuantTensor

pytestmark = pytest.mark.cpu_kernels

NEAR = 2e-3
"""Where sums are made in another order: how near two log-probabilities may be for either to be
the larger.
"""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "windows": ("mistral", {"sliding_window": 50}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by kind and scheme."""
    base = tmp_path_factory.mktemp("batch")
    for name, (kind, changes) in KINDS.items():
        oracle.save(oracle.make(kind, **changes, max_position_embeddings=CONTEXT), base / name)
        for scheme in ("int8", "int4-g32"):
            quantkit.quantize(
                base / name,
                base / f"{name}-{scheme}",
                scheme,
                method="rtn",
                accept_quality_loss=True,
            )
    return base


@pytest.mark.slow
@pytest.mark.parametrize("cached", [None, torch.int8], ids=["float", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast"])
def test_each_sequence_has_the_bits_of_itself_alone(
    backend: str, scheme: str, kind: str, cached: torch.dtype | None, folders: Path
) -> None:
    model = batch_model(folders / f"{kind}-{scheme}", backend)
    assert model.ops.ragged
    requests = staggered_requests(logprobs=2)
    expected = [
        replace(alone(model, one, cache_dtype=cached)[0], prompt=at)
        for at, one in enumerate(requests)
    ]
    for slots in (3, 16):
        assert together(Engine(model, 430, slots=slots, cache_dtype=cached), requests) == expected
    assert len({tuple(one.token_ids) for one in expected}) == len(expected)


_SHARED = """
import sys, torch
from dataclasses import replace
from batch_cases import batch_model, staggered_requests
from quantkit.distributed.group import join_processes
from rows import alone, together
from quantkit.runtime.engine import Engine
torch.set_num_threads(1)
with join_processes("cpu") as group:
    for folder in sys.argv[1:]:
        model = batch_model(folder, "cpu-exact", group)
        assert model.ops.ragged and model.config.num_kv_heads == 1
        requests = staggered_requests(logprobs=1)[::2]
        expected = [replace(alone(model, one)[0], prompt=at) for at, one in enumerate(requests)]
        assert together(Engine(model, 430, slots=5), requests) == expected
        print([one.token_ids for one in expected])
"""


@pytest.mark.slow
def test_each_sequence_has_the_bits_of_itself_alone_in_two_processes(tmp_path: Path) -> None:
    model = oracle.make(
        "llama", intermediate_size=128, max_position_embeddings=CONTEXT, num_hidden_layers=1
    )
    oracle.save(model, tmp_path / "model")
    folders = [tmp_path / scheme for scheme in ("int8", "int4-g32")]
    for folder in folders:
        quantkit.quantize(
            tmp_path / "model", folder, folder.name, method="rtn", accept_quality_loss=True
        )
    first, second = forked.group(2, _SHARED, *folders)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout
    for line, folder in zip(first.stdout.splitlines(), folders, strict=True):
        own = batch_model(folder, "cpu-exact")
        for tokens, request in zip(
            json.loads(line), staggered_requests(logprobs=2)[::2], strict=True
        ):
            right = alone(own, request)[0]
            shared = replace(right, token_ids=tokens)
            assert require_same(shared, right, NEAR) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["", "-int8"], ids=["floats", "reference"])
def test_without_kernels_for_them_sequences_are_themselves_but_for_ties(
    name: str, kind: str, folders: Path
) -> None:
    model = batch_model(folders / f"{kind}{name}", "reference")
    assert not model.ops.ragged
    requests = staggered_requests(logprobs=2)
    found = together(Engine(model, 430, slots=5), requests)
    same = [require_same(one, alone(model, requests[one.prompt])[0], NEAR) for one in found]
    assert sum(same) > 0.9 * sum(one.max_new_tokens for one in requests)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "backend", "bound"),
    [
        ("", None, 1e-4),
        ("-int8", "reference", 1e-4),
        ("-int8", "cpu-exact", 1e-3),
        ("-int4-g32", "cpu-fast", 0.05),
    ],
)
def test_log_probabilities_are_those_of_a_plain_pass(
    name: str, backend: str | None, bound: float, kind: str, folders: Path
) -> None:
    """Of prompts that are echoed as well as of new tokens."""
    model = batch_model(folders / f"{kind}{name}", backend)
    requests = [
        *staggered_requests(logprobs=3, echo=True)[:8],
        Request(random_prompts()[9], 0, logprobs=0, echo=True),
    ]
    for one in together(Engine(model, 430, slots=4), requests):
        request, reported = requests[one.prompt], one.logprobs
        assert reported is not None
        assert len(reported.tokens) == len(reported.top) == len(one.token_ids) == request.length
        assert (reported.tokens[0], reported.top[0]) == (None, {})
        expected = forward_logprobs(model, one.token_ids)
        torch.testing.assert_close(torch.tensor(reported.tokens[1:]), expected, rtol=0, atol=bound)
        for token, value, top in zip(
            one.token_ids[1:], reported.tokens[1:], reported.top[1:], strict=True
        ):
            assert len(top) == request.logprobs
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert top.get(token, value) == value


def _as_transformers(model: Any, request: Request) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens over transformers' own cache, the prompt in one pass, and the
    log-probabilities of each place.
    """
    name = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )  # before 5.24
    cache = {name: DynamicCache(config=model.config)}
    tokens, found, reported = torch.tensor([request.prompt]), list[int](), list[Tensor]()
    for _ in range(request.max_new_tokens):
        with torch.inference_mode():
            logits = model(tokens, **cache, use_cache=True).logits
        reported.append(logits[0, -1].log_softmax(-1))
        tokens = reported[-1].argmax().view(1, 1)
        found.append(int(tokens))
    return found, reported


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize(
    ("rope", "compiled"), [*((rope, False) for rope in ROPES), ("dynamic", True)]
)
def test_past_the_original_context_each_sequence_is_as_with_transformers(
    rope: str,
    compiled: bool,
    scheme: str | None,
    graphs: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts and texts that go beyond it and others that do not, beside each other, in chunks
    of 48.
    """
    context = 64 if rope == "dynamic" else 160
    theirs = oracle.make(
        "llama",
        rope_parameters=dict(ROPES[rope]),
        max_position_embeddings=context,
        eos_token_id=None,
        num_hidden_layers=2,
    )
    folder = oracle.save(theirs, tmp_path / "model")
    if scheme is not None:
        quantkit.quantize(folder, tmp_path / scheme, scheme, method="rtn", accept_quality_loss=True)
        folder = tmp_path / scheme
        _take_weights(theirs, folder)
    backend = "reference" if scheme is None else None
    model = load_model(folder, dtype=torch.float32, backend=backend)
    assert model.ops.ragged == (scheme is not None)
    lengths = (100, 5, 49) if compiled else (100, 5, 55, 108, 1, 49)
    requests = [Request(prompt, 20, logprobs=2) for prompt in random_prompts(lengths)]
    engine = Engine(model, 128, slots=4, compiled=compiled)
    monkeypatch.setattr(engine, "chunk_rows", 48)
    for one in together(engine, requests):
        tokens, reported = _as_transformers(theirs, requests[one.prompt])
        assert one.logprobs is not None
        for at, (ours, right, value) in enumerate(
            zip(one.token_ids, tokens, one.logprobs.tokens, strict=True)
        ):
            assert value == pytest.approx(float(reported[at][ours]), abs=NEAR)
            if ours != right:
                assert float(reported[at][right] - reported[at][ours]) < NEAR
                break


def _take_weights(theirs: Any, folder: Path) -> None:
    """Let a model of transformers have the weights that a quantized folder stands for."""
    checkpoint = open_checkpoint(folder)
    for name, parameter in theirs.named_parameters():
        weight = checkpoint.load(name)
        parameter.data.copy_(weight.dequantize() if isinstance(weight, QuantTensor) else weight)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Steps become graphs as they do where they are compiled, but no code is generated, which takes
    long; tells how many there are so far.
    """
    torch.compiler.reset()

    def compiled(step: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
        graph = torch.compile(step, fullgraph=True, dynamic=False, backend="eager")
        return torch._dynamo.config.patch(recompile_limit=64)(graph)  # type: ignore[no-any-return]

    monkeypatch.setattr(engine_module, "_compile", functools.cache(compiled))
    yield lambda: int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.reset()


# What is compiled


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["cpu-exact", "reference"])
def test_nothing_is_compiled_after_the_warm_up(
    backend: str, folders: Path, graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which says how much it compiles. Compiled sequences are themselves but for ties."""
    model = batch_model(folders / "llama-int8", backend)
    engine = Engine(model, 100, slots=3, compiled=True)
    monkeypatch.setattr(engine, "chunk_rows", 16)
    before = graphs()
    assert engine.warm_up() == graphs() - before == 5
    requests = [
        Request(prompt[:90], 2 + at % 7, logprobs=2) for at, prompt in enumerate(random_prompts())
    ]
    expected = [alone(model, request)[0] for request in requests]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for part in (requests[:1], requests[2:4], requests):
            for one in together(engine, part):
                right = expected[requests.index(part[one.prompt])]
                assert require_same(one, right, NEAR) > 0
        sampled = [
            Request(requests[1].prompt, 6, SamplingParams(1.0, seed=3), samples=4),
            requests[3],
        ]
        assert len(together(engine, sampled)) == 5
    assert graphs() - before == engine.warm_up()


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("backend", ["cpu-exact", "reference"])
def test_nothing_is_compiled_for_proposals_after_the_warm_up(
    backend: str, slots: int, folders: Path, graphs: Callable[[], int]
) -> None:
    model = batch_model(folders / "llama-int8", backend)
    draft = batch_model(folders / "llama-int8", backend)
    before = graphs()
    engine = Engine(model, 100, slots=slots, compiled=True, draft=draft, draft_tokens=6)
    assert engine.draft is not None
    for used in (engine, engine.draft._engine):
        used.chunk_rows = 16
    # Models of one structure may have graphs in common.
    assert engine.warm_up() >= graphs() - before > 0
    compiled = graphs()
    requests = [Request(prompt[:90], 9 + at % 7) for at, prompt in enumerate(random_prompts())]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for part in (requests[:1], requests[2:4], requests):
            assert len(together(engine, part)) == len(part)
    assert engine.num_accepted_tokens > 0
    assert graphs() == compiled


@pytest.mark.slow
@pytest.mark.compiles
def test_what_a_draft_model_stored_is_forgotten_in_a_warm_up(
    folders: Path, graphs: Callable[[], int]
) -> None:
    model = batch_model(folders / "llama-int8", "cpu-exact")
    engine = Engine(model, 60, compiled=True, draft=model, draft_tokens=6)
    request = Request(random_prompts()[0][:20], 12)
    first = together(engine, [request])
    engine.warm_up()
    assert together(engine, [request])[0].token_ids == first[0].token_ids
    # Keys that the warm-up has overwritten would make the draft propose something else.
    assert 0 < engine.num_proposed_tokens == engine.num_accepted_tokens


def test_eager_engines_need_no_warm_up(folders: Path) -> None:
    assert Engine(batch_model(folders / "llama-int8"), 20).warm_up() == 0


@pytest.mark.slow
@pytest.mark.compiles
def test_a_warm_up_covers_more_rows_than_a_slot_holds(
    folders: Path, graphs: Callable[[], int]
) -> None:
    model = batch_model(folders / "llama-int8", "cpu-exact")
    model.config = replace(model.config, max_context=20)
    engine = Engine(model, 20, slots=4, compiled=True)
    before = graphs()
    assert engine.warm_up() == graphs() - before == 7
    with torch._dynamo.config.patch(error_on_recompile=True):
        together(engine, [Request(prompt[:15], 4) for prompt in random_prompts()])


# Who waits for whom


def test_a_short_prompt_waits_for_no_long_one(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first token, while 8 sequences decode and a prompt of 2000 is read: within three
    chunks.
    """
    model = batch_model(folders / "llama-int8")
    model.config = replace(model.config, max_context=2500)
    engine = Engine(model, 2100, slots=10, draft_tokens=0)
    rows: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda *given: rows.append(len(given[1])) or step(*given))
    scheduler = Scheduler(engine)
    running = [scheduler.add(Request(prompt, 100))[0] for prompt in random_prompts((9,) * 8)]
    while any(len(one.tokens) < 3 for one in running):
        scheduler.step()
    long, drawn = scheduler.add(Request([5] * 2000, 10))[0], [len(one.tokens) for one in running]
    scheduler.step()
    short = scheduler.add(Request(random_prompts((16,))[0], 10))[0]
    rows.clear()
    while not short.tokens:
        scheduler.step()
    assert len(rows) <= 3
    assert max(rows) <= engine.chunk_rows + 9
    assert long.num_stored < len(long.tokens_to_read)
    assert [len(one.tokens) for one in running] == [count + 1 + len(rows) for count in drawn]


@pytest.mark.parametrize("backend", ["cpu-exact", "reference"])
def test_a_prompt_is_read_in_small_pieces_only_where_someone_waits_for_them(
    folders: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """And only where the numbers of a prompt do not depend on the pieces."""
    model = batch_model(folders / "llama-int8", backend)
    model.config = replace(model.config, max_context=1000)
    engine = Engine(model, 900, slots=3, draft_tokens=0)
    rows: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda *given: rows.append(len(given[1])) or step(*given))
    scheduler = Scheduler(engine)
    decoding = scheduler.add(Request([4] * 500, 100))[0]
    while not decoding.tokens:
        scheduler.step()
    assert rows == [240, 240, 20]
    rows.clear()
    reading = scheduler.add(Request([5] * 500, 2))[0]
    while not reading.tokens:
        scheduler.step()
    if backend == "cpu-exact":
        assert max(rows) <= 1 + engine.shared_chunk_rows + FEW_ROWS < 100
        # Once it has ended, the rest of a prompt is read as one alone.
        scheduler.end(decoding)
        scheduler.end(reading)
        rows.clear()
        scheduler.add(Request([6] * 500, 1))
        scheduler.step()
        assert rows == [240]
    else:
        assert max(rows) == 241


@pytest.mark.parametrize("name", ["llama-int8", "windows-int4-g32"])
def test_the_numbers_of_a_prompt_do_not_depend_on_its_pieces(name: str, folders: Path) -> None:
    """As long as each has more than a few rows; also with windows that begin within a piece."""
    model = batch_model(folders / name, "cpu-exact")
    model.config = replace(model.config, max_context=1000)
    prompt = torch.randint(0, 40, (500,), generator=torch.Generator().manual_seed(0))

    def read(ends: list[int]) -> Tensor:
        engine = Engine(model, 500, draft_tokens=0)
        for start, end in itertools.pairwise([0, *ends]):
            places = range(start, end)
            logits = engine.step(prompt[start:end], [0] * len(places), places, [len(places) - 1])
        return logits

    whole = read([240, 480, 500])
    assert torch.equal(read([64, 128, 192, 240, 304, 368, 432, 480, 500]), whole)
    assert torch.equal(read([100, 223, 240, 417, 480, 500]), whole)


def test_long_prompts_take_turns(folders: Path) -> None:
    model = batch_model(folders / "llama-int8")
    model.config = replace(model.config, max_context=2500)
    scheduler = Scheduler(Engine(model, 1500, slots=2))
    first, second = (scheduler.add(Request([token] * 1400, 2))[0] for token in (5, 6))
    for _ in range(4):
        scheduler.step()
    assert first.num_stored == second.num_stored == 480


# Requests that come and go


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["llama-int8", "windows-int4-g32"])
@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_and_go_as_they_like(
    seed: int, name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random: when they come, what they share, how they are drawn, and when they are left."""
    model, chance = batch_model(folders / name, "cpu-exact"), random.Random(seed)
    texts = random_prompts((200, 200))
    cached = chance.choice([None, torch.int8])
    engine = Engine(model, 260, slots=chance.choice([1, 2, 5]), cache_dtype=cached)
    monkeypatch.setattr(engine, "chunk_rows", chance.choice([32, 48, 240]))
    scheduler = Scheduler(engine)
    left = [_any_request(chance, texts) for _ in range(14)]
    requests, begun = list(left), []
    while left or scheduler.busy:
        while left and chance.random() < 0.4:
            begun.append(scheduler.add(left.pop(0)))
        scheduler.step()
        for one in (one for several in begun for one in several):
            if one.finish_reason is None and chance.random() < 0.01:
                scheduler.end(one)
    for request, several in zip(requests, begun, strict=True):
        own = Engine(model, 260, cache_dtype=cached)
        monkeypatch.setattr(own, "chunk_rows", engine.chunk_rows)
        for one, right in zip(several, together(own, [request]), strict=True):
            count = len(one.tokens)
            echoed = len(request.prompt) if request.echo else 0
            assert one.tokens == right.token_ids[echoed:][:count]
            assert one.finish_reason == "stop" or count == request.max_new_tokens
            if one.logprobs is not None and right.logprobs is not None and count:
                assert one.logprobs == right.logprobs.cut(echoed + count)


def _finish(scheduler: Scheduler) -> None:
    while scheduler.busy:
        scheduler.step()


def _any_request(chance: random.Random, texts: list[list[int]]) -> Request:
    text, other = chance.sample(texts, 2)
    shared, own = chance.randrange(1, 190), chance.randrange(0, 40)
    sampling = SamplingParams(
        chance.choice([0.0, 1.0]), seed=chance.randrange(100), top_k=chance.choice([0, 5])
    )
    if chance.random() < 0.2:
        sampling = replace(sampling, repetition_penalty=1.3, logit_bias={7: 2.0})
    return Request(
        prompt=[*text[:shared], *other[:own]],
        max_new_tokens=chance.randrange(1, 20),
        sampling=sampling,
        samples=chance.choice([1, 1, 3]),
        logprobs=chance.choice([None, 0, 2]),
        echo=chance.random() < 0.3,
    )


def _read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rows of each step."""
    rows, step = list[int](), engine.step
    monkeypatch.setattr(engine, "step", lambda *given: rows.append(len(given[1])) or step(*given))
    return rows


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["llama", "llama-int8", "windows-int8"])
def test_samples_of_a_prompt_share_it(
    name: str, slots: int, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = batch_model(folders / name)
    prompt = random_prompts((250,))[0]
    request = Request(prompt, 6, SamplingParams(1.5, seed=4), samples=6)
    single = [Request(prompt, 6, SamplingParams(1.5, seed=4 + number)) for number in range(6)]
    expected = [alone(model, one)[0].token_ids for one in single]
    engine = Engine(model, 260, slots=slots)
    rows = _read(engine, monkeypatch)
    assert [one.token_ids for one in together(engine, [request])] == expected
    assert sum(rows) == len(prompt) + 6 * 5
    assert len({tuple(one) for one in expected}) == 6


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_samples_go_on_without_the_one_that_read_their_prompt(steps: int, folders: Path) -> None:
    model = batch_model(folders / "llama-int8")
    prompt = random_prompts((300,))[0]
    request = Request(prompt, 6, SamplingParams(1.5, seed=4), samples=3)
    expected = [one.token_ids for one in alone(model, request)]
    for slots in (1, 2, 3):
        scheduler = Scheduler(Engine(model, 310, slots=slots))
        several = scheduler.add(request)
        for _ in range(steps):
            scheduler.step()
        scheduler.end(several[0])
        _finish(scheduler)
        assert [one.tokens for one in several[1:]] == expected[1:]
        assert several[0].tokens == expected[0][: len(several[0].tokens)]


def test_seeds_and_samples_do_not_depend_on_what_else_runs(folders: Path) -> None:
    model = batch_model(folders / "llama-int4-g32", "cpu-fast")
    drawn = {"temperature": 1.2, "top_p": 0.9, "seed": 5}
    requested = [
        Request(prompt, 12, SamplingParams(**drawn), samples=2)
        for prompt in random_prompts((40, 3, 260))
    ]
    expected = [one.token_ids for request in requested for one in alone(model, request)]
    for slots in (2, 6):
        assert [
            one.token_ids for one in together(Engine(model, 300, slots=slots), requested)
        ] == expected
    found = quantkit.generate_batch(
        model, [one.prompt for one in requested], max_new_tokens=12, n=2, **drawn
    )
    assert [one.token_ids for one in found] == expected


# Where tokens are looked at late


@pytest.mark.slow
def test_what_is_looked_at_late_is_cut_at_the_same_place(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End tokens, stop strings, counts, samples and log-probabilities, several at once."""
    quantkit.quantize(demo_model, tmp_path / "int8", "int8", accept_quality_loss=True)
    model, tokenizer = quantkit.load(tmp_path / "int8")
    prompts = ["My fellow citizens", "The", "Fellow citizens, the state of the union", "We"]
    whole = quantkit.generate_batch(model, prompts, tokenizer=tokenizer, max_new_tokens=40)
    ends = {whole[0].token_ids[17], whole[2].token_ids[9]}
    model.config = replace(model.config, eos_token_ids=tuple(ends))
    stop = [whole[1].text[30:33], whole[3].text[60:62]]
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_new_tokens": 40,
        "logprobs": 2,
        "batch_size": 3,
    }
    cases = [
        {},
        {"stop": stop},
        {"stop": stop, "n": 3, "temperature": 0.8, "seed": 1},
        {"echo": True, "n": 2},
    ]
    for case in cases:
        found = []
        for late in (False, True):
            read_late(monkeypatch, late=late)
            found.append(quantkit.generate_batch(model, prompts, **options, **case))
            monkeypatch.undo()
        assert found[0] == found[1]
        assert {one.finish_reason for one in found[0]} >= {"stop"}
        for one in found[0]:
            assert one.logprobs is not None
            assert len(one.logprobs.tokens) == len(one.logprobs.top) == len(one.token_ids)
            if "stop" in case:
                assert not any(string in (one.text or "") for string in stop)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wrong", ["prompt", "new"])
@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"logprobs": 1, "echo": True}], ids=str)
def test_what_is_not_finite_is_given_to_nobody(
    options: dict[str, Any], wrong: str, late: bool, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_late(monkeypatch, late=late)
    engine = Engine(batch_model(folders / "llama-int8"), 420, slots=4)
    step, count = engine.step, iter(range(1000))

    def broken(*given: Any) -> Tensor:
        logits, at = step(*given), next(count)
        if len(logits) and (at < 2 if wrong == "prompt" else at == 9):
            logits[0, 3] = torch.inf
        return logits

    monkeypatch.setattr(engine, "step", broken)
    scheduler = Scheduler(engine)
    several = [
        scheduler.add(Request(prompt, 30, **options))[0] for prompt in random_prompts((300, 5, 7))
    ]
    with pytest.raises(NonFiniteError):
        _finish(scheduler)
    assert all(len(one.tokens) < 10 for one in several)


# What does not fit


def test_a_cache_that_cannot_fit_is_refused_at_once(folders: Path) -> None:
    model = batch_model(folders / "llama-int8")
    with pytest.raises(
        RequestError,
        match=(
            r"the cache does not fit in memory \(found .* GB for \d+ x 400 positions, expected at"
            r" most"
        ),
    ) as refused:
        Engine(model, 400, slots=10**9)
    assert "fewer sequences" in str(refused.value)
    with pytest.raises(RequestError, match="does not fit in memory") as refused:
        quantkit.generate_batch(
            model, [[3] * 100] * 60, n=4096, batch_size=10**8, max_new_tokens=390
        )
    model.config = replace(model.config, max_context=10**12)
    with pytest.raises(RequestError, match="use fewer tokens"):
        Engine(model, 10**12)


def test_a_slot_must_hold_what_is_requested(folders: Path) -> None:
    scheduler = Scheduler(Engine(batch_model(folders / "llama-int8"), 20, slots=2))
    with pytest.raises(RequestError, match="exceed the engine"):
        scheduler.add(Request([5] * 15, 6))
    assert not scheduler.busy
