"""A draft model changes how fast tokens come, not which."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import oracle
import pytest
import torch
from command import run
from drafts import speculate

import quantkit
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime import speculative
from quantkit.runtime.draft_lengths import Chance, StepTimes, choose_lengths
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.generate_batch import completions
from quantkit.runtime.generation import Generation, Share, Siblings
from quantkit.runtime.lookup import Acceptance, Lookup
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import compute_probabilities
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.runtime.scheduler import Scheduler

PROMPT = [1, 306, 505, 278]


@pytest.fixture(scope="module")
def folders(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    quantkit.convert(demo_model, base / "fp32", dtype="fp32")
    for scheme in ("int8", "int4-g32"):
        quantkit.quantize(demo_model, base / scheme, scheme, method="rtn", accept_quality_loss=True)
    random = oracle.make("llama", vocab_size=2048, num_hidden_layers=1, max_position_embeddings=512)
    oracle.save(random, base / "random")
    return {name: base / name for name in ("fp32", "int8", "int4-g32", "random")}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Decoder]:
    return {name: load_model(folder, dtype=torch.float32) for name, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "draft"), [("fp32", "int4-g32"), ("int8", "fp32"), ("int4-g32", "random")]
)
def test_greedy_text_is_that_of_the_model_alone(
    name: str, draft: str, draft_tokens: int, models: dict[str, Decoder]
) -> None:
    expected = list(generate(models[name], PROMPT, max_new_tokens=60))
    found = speculate(
        models[name], models[draft], PROMPT, max_new_tokens=60, draft_tokens=draft_tokens
    )
    assert list(found) == expected
    assert expected


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals are as long as they may be, whatever they cost."""
    monkeypatch.setattr(
        speculative,
        "choose_lengths",
        lambda chances, *others: {one: chance.limit for one, chance in chances.items()},
    )


@pytest.mark.usefixtures("always")
def test_a_draft_that_is_right_saves_steps(
    models: dict[str, Decoder], steps: list[list[int]]
) -> None:
    model, prompt = models["fp32"], [*PROMPT, 7]
    expected = list(generate(model, prompt, max_new_tokens=20))
    steps.clear()
    assert speculate(model, model, prompt, max_new_tokens=20, draft_tokens=4) == expected
    assert sum(len(slots) == 5 for slots in steps) == 4


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The slots of the rows of each step that any engine takes."""
    found: list[list[int]] = []
    step = Engine.step
    monkeypatch.setattr(
        Engine, "step", lambda engine, *given: (found.append(given[1]), step(engine, *given))[1]
    )
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("draft", ["int4-g32", "random", None])
def test_many_sequences_have_the_text_that_each_has_alone(
    draft: str | None, models: dict[str, Decoder]
) -> None:
    model = models["int8"]
    requests = [
        Request(
            PROMPT * 3 + [number],
            30 + number,
            SamplingParams(temperature=number % 2, seed=number),
            samples=2,
            logprobs=1,
        )
        for number in range(5)
    ]
    small = None if draft is None else models[draft]
    found = []
    for slots, helper, proposed in ((1, None, 0), (4, small, 6)):
        engine = Engine(model, 60, slots=slots, draft=helper, draft_tokens=proposed)
        ended = completions(engine, requests, None, [()] * len(requests))
        found.append(sorted(ended, key=lambda one: (one.prompt, one.sample)))
    assert found[0] == found[1]


@pytest.mark.usefixtures("always")
def test_what_repeats_itself_needs_few_steps(
    models: dict[str, Decoder], steps: list[list[int]]
) -> None:
    model = models["int8"]
    plain = Engine(model, 200, draft_tokens=0)
    expected = list(generate(plain, PROMPT, max_new_tokens=150, temperature=0))
    before = len(steps)
    steps.clear()
    engine = Engine(model, 200)
    assert list(generate(engine, PROMPT, max_new_tokens=150)) == expected
    saved = before - len(steps)
    assert saved == engine.num_accepted_tokens > 20
    assert engine.num_proposed_tokens >= engine.num_accepted_tokens


def test_proposals_come_in_the_order_of_the_sequences(
    models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that share a model must put the same rows in the same places, and hashes differ
    between them.
    """
    monkeypatch.setattr(Generation, "__hash__", lambda one: 15 - one.sample)
    engine = Engine(models["int8"], 60, slots=8, draft=models["fp32"])
    scheduler, orders = Scheduler(engine), list[list[int]]()
    propose = scheduler.speculation.propose

    def watched(sequences: Sequence[Generation], rows: int) -> dict[Generation, list[int]]:
        found = propose(sequences, rows)
        if len(found) == 8:
            orders.append([one.sample for one in found])
            assert orders[-1] == [one.sample for one in sequences]
        return found

    monkeypatch.setattr(Lookup, "propose", lambda lookup, count: [])
    monkeypatch.setattr(scheduler.speculation, "_adaptive", False)
    monkeypatch.setattr(scheduler.speculation, "propose", watched)
    scheduler.add(Request(PROMPT, 20, SamplingParams(temperature=1.0, seed=0), samples=8))
    while scheduler.busy:
        scheduler.step()
    assert orders


def test_a_request_may_want_none(models: dict[str, Decoder]) -> None:
    engine = Engine(models["int8"], 200, draft=models["fp32"])
    scheduler = Scheduler(engine)
    scheduler.add(Request(PROMPT, 60, draft_tokens=0))
    while scheduler.busy:
        scheduler.step()
    assert engine.num_proposed_tokens == 0


def test_a_draft_of_a_padded_vocabulary_serves(models: dict[str, Decoder], tmp_path: Path) -> None:
    for more in (100, -100):
        padded = oracle.make(
            "llama", vocab_size=2048 + more, num_hidden_layers=1, max_position_embeddings=512
        )
        draft = load_model(oracle.save(padded, tmp_path / str(more)), dtype=torch.float32)
        expected = list(generate(models["fp32"], PROMPT, max_new_tokens=20))
        assert speculate(models["fp32"], draft, PROMPT, max_new_tokens=20) == expected


def test_a_draft_model_reads_again_what_replaced_its_proposals(models: dict[str, Decoder]) -> None:
    """Also if steps without it came in between, after which the text is longer."""
    model = models["fp32"]
    proposals = []
    for times in (2, 1):
        draft = Engine(model, 100, draft=model, draft_tokens=4).draft
        assert draft is not None
        generation = Generation(Request(PROMPT, 30), 0, Siblings(waiting=1, share=Share()), model)
        generation.slot = 0
        if times == 2:
            first = draft.propose({generation: 4})[generation]
            replaced = [(token + 1) % 2048 for token in first]
        generation.tokens += [*replaced, 7, 8]
        proposals.append(draft.propose({generation: 4})[generation])
    assert proposals[0] == proposals[1]


def test_lookup_proposes_what_came_before() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 2, 3])
    assert lookup.propose(3) == [4, 5, 2]
    lookup.extend([9])
    assert lookup.propose(3) == []
    lookup.extend([7, 8, 7, 8])
    assert lookup.propose(5) == [7, 8, 7, 8, 7]


def test_lookup_prefers_longer_runs_and_later_ones() -> None:
    assert Lookup([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).propose(1) == [7]
    assert Lookup([1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).propose(1) == [8]


def test_lookup_learns_how_often_it_is_right() -> None:
    right, wrong = Lookup([1, 2, 3] * 4), Lookup([1, 2, 3] * 4)
    for number in range(12):
        (token,) = right.propose(1)
        right.extend([token])
        wrong.propose(1)
        wrong.extend([100 + number, 1, 2])
    right.propose(1), wrong.propose(1)
    assert wrong.rate < 0.3 < 0.8 < right.rate


def test_no_other_lengths_give_more_tokens_a_second() -> None:
    times = StepTimes()
    for rows in (1, 4, 8, 2, 16) * 8:
        times.add(rows, 0.01 + 0.002 * rows)
    random = torch.Generator().manual_seed(0)
    for _ in range(40):
        rates = torch.rand(3, generator=random).tolist()
        chances = {name: Chance(4, rate, 0.001 * name) for name, rate in enumerate(rates)}

        def speed(counts: Sequence[int], chances: dict[int, Chance] = chances) -> float:
            tokens = 3 + sum(
                chances[name].rate ** at
                for name, count in enumerate(counts)
                for at in range(1, count + 1)
            )
            drafting = sum(count * chances[name].seconds for name, count in enumerate(counts))
            return tokens / (0.01 + 0.002 * (3 + sum(counts)) + drafting)

        best = max(map(speed, itertools.product(range(5), repeat=3)))
        found = choose_lengths(chances, 3, 3, times)
        assert speed([found[name] for name in range(3)]) == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("row", [0.05, 0.1, 0.33, 0.8], ids=lambda row: f"a row costs {row}")
@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.8])
def test_lengths_become_those_that_pay(row: float, right: float) -> None:
    """One sequence, whose proposals are right with a probability, and steps whose times vary by
    a tenth.
    """
    random, times, rate = Random(0), StepTimes(), Acceptance()
    tokens = seconds = 0.0
    times.add(64, 1 + 63 * row)
    for _ in range(600):
        count = choose_lengths({0: Chance(8, rate.rate)}, 1, 1, times)[0]
        accepted = next((at for at in range(count) if random.random() >= right), count)
        if count:
            rate.add(accepted, int(accepted < count))
        taken = (1 + row * count) * random.lognormvariate(0, 0.1)
        times.add(1 + count, taken)
        tokens, seconds = tokens + accepted + 1, seconds + taken
    best = max(sum(right**at for at in range(count + 1)) / (1 + row * count) for count in range(9))
    assert tokens / seconds > 0.85 * best


def test_a_step_that_waited_for_something_else_counts_little() -> None:
    times = StepTimes()
    for _ in range(50):
        times.add(2, 0.01)
    times.add(2, 30.0)
    seconds, _ = times.estimate(2) or (0.0, 0.0)
    assert seconds < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("draft", [None, "int4-g32"])
def test_tokens_are_drawn_with_the_probabilities_of_the_model(
    draft: str | None, models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pearson's chi-squared of two tokens, of which the second is proposed: by a draft, or at
    random.
    """
    model, options, number = models["int8"], SamplingParams(temperature=1.5, top_k=4), 1200
    chances: dict[tuple[int, ...], float] = {}
    for token, chance in _chances(model, PROMPT, options).items():
        chances |= {
            (token, other): chance * one
            for other, one in _chances(model, [*PROMPT, token], options).items()
        }
    if draft is None:
        random, others = Random(0), [other for _, other in chances]
        monkeypatch.setattr(
            Lookup, "propose", lambda lookup, count: random.choices(others, k=count)
        )
    engine = Engine(model, 16, slots=48, draft=None if draft is None else models[draft])
    requests = [Request(PROMPT, 3, replace(options, seed=seed)) for seed in range(number)]
    counts = Counter(
        tuple(one.token_ids[:2]) for one in completions(engine, requests, None, [()] * number)
    )
    assert number < engine.num_proposed_tokens + 1
    assert number / 20 < engine.num_accepted_tokens < number
    assert counts.keys() <= chances.keys()
    common = {pair: chance * number for pair, chance in chances.items() if chance * number >= 5}
    found = sum((counts[pair] - expected) ** 2 / expected for pair, expected in common.items())
    degrees = len(common) - 1
    assert found < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations above the mean


@torch.inference_mode()
def _chances(model: Decoder, text: list[int], options: SamplingParams) -> dict[int, float]:
    """The probabilities of the tokens that may follow a text."""
    found = compute_probabilities(
        model(torch.tensor([text]), torch.arange(len(text)))[:, -1], options
    )[0]
    return {token: float(found[token]) for token in found.nonzero().flatten().tolist()}


@pytest.mark.usefixtures("always")
def test_long_prompts_are_read_in_chunks(
    models: dict[str, Decoder], steps: list[list[int]]
) -> None:
    model, prompt = models["int8"], PROMPT * 75
    expected = list(generate(model, prompt, max_new_tokens=40))
    steps.clear()
    assert (
        speculate(model, models["int4-g32"], prompt, max_new_tokens=40, draft_tokens=3) == expected
    )
    assert max(map(len, steps)) == 240
    assert sum(len(slots) == 240 for slots in steps) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_a_seed_gives_the_same_text_without_proposals(models: dict[str, Decoder]) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "temperature": 1.0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    }
    for draft in (models["int4-g32"], models["fp32"], None):
        texts = [speculate(models["int8"], draft, PROMPT, seed=seed, **options) for seed in (5, 6)]
        expected = [list(generate(models["int8"], PROMPT, seed=seed, **options)) for seed in (5, 6)]
        assert texts == expected
        assert texts[0] != texts[1]


@pytest.mark.usefixtures("always")
def test_the_model_as_its_draft_is_right_when_it_draws(models: dict[str, Decoder]) -> None:
    """Both have the same random numbers."""
    model = models["int8"]
    engine = Engine(model, 60, draft=model, draft_tokens=5)
    prompt = [5, 900, 17]  # of which nothing repeats
    list(generate(engine, prompt, max_new_tokens=40, temperature=1.0, seed=3))
    assert engine.num_accepted_tokens == engine.num_proposed_tokens > 20


def test_the_nucleus_holds_for_what_is_drawn() -> None:
    logits = torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]]).log()
    found = compute_probabilities(logits, SamplingParams(1.0, 0.6))
    torch.testing.assert_close(found, torch.tensor([[0, 4 / 7, 0, 3 / 7, 0]]))
    assert compute_probabilities(logits, SamplingParams(0.0)).tolist() == [[0, 1, 0, 0, 0]]


def test_it_stops_at_an_end_token(
    models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["fp32"]
    whole = list(generate(model, PROMPT, max_new_tokens=20))
    end = next(token for token in whole[5:] if token not in whole[:5])
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(end,)))
    found = speculate(model, models["int8"], PROMPT, max_new_tokens=20, draft_tokens=6)
    assert found == whole[: whole.index(end)]


def test_requests_that_make_no_sense(models: dict[str, Decoder], tmp_path: Path) -> None:
    model = models["fp32"]
    for wrong in (-1, 16):
        with pytest.raises(RequestError, match="out of range"):
            speculate(model, model, PROMPT, max_new_tokens=5, draft_tokens=wrong)
    small = load_model(oracle.save(oracle.make("llama"), tmp_path / "small"))
    with pytest.raises(RequestError, match="a different vocabulary"):
        speculate(model, small, PROMPT, max_new_tokens=5)


@pytest.mark.usefixtures("always")
def test_the_command_takes_a_draft(
    folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    command = [
        "generate",
        folders["int8"],
        "--dtype",
        "fp32",
        "--prompt",
        "My fellow",
        "--max-new-tokens",
        "15",
    ]
    code, expected, _ = run(capfd, *command)
    assert code == 0
    assert run(capfd, *command, "--draft", folders["int4-g32"], "--draft-tokens", "3")[:2] == (
        0,
        expected,
    )
    assert run(capfd, *command, "--draft-tokens", "0")[:2] == (0, expected)
    assert run(capfd, *command, "--draft-tokens", "16")[0] == 2
    code, _, error = run(
        capfd, *command, "--draft", folders["int4-g32"], "--stats", "--max-new-tokens", "60"
    )
    assert code == 0
    assert re.search(r"^proposed: \d+ tokens, \d+% accepted$", error, re.MULTILINE)
