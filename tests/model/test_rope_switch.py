"""LongRoPE: past the length that a model was first trained to, all positions of a text turn by
other angles.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from drafts import speculate
from error_parts import raises
from rows import alone, read_late, together
from torch import Tensor

import quantkit
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.errors import RequestError, UnsupportedError
from quantkit.evals.harness import Scorer
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request, check_total_length
from quantkit.runtime.scheduler import Scheduler
from quantkit.runtime.slots import SlotTable

pytestmark = pytest.mark.cpu_kernels

SWITCH, CONTEXT = 40, 160
LENGTHS = (30, 5, 39, 40, 41, 90, 25)
"""Of prompts, on both sides of the switch and at it."""


def _longrope(pairs: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    short, long = (
        1 + torch.rand(pairs, generator=generator),
        2 + 6 * torch.rand(pairs, generator=generator),
    )
    return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}


def _make(**changes: Any) -> Any:
    return oracle.make(
        "phi3",
        **{"rope_parameters": _longrope(4), "num_hidden_layers": 2, **changes},
        pad_token_id=0,
        original_max_position_embeddings=SWITCH,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
    )


@pytest.fixture(scope="module")
def theirs() -> Any:
    return _make()


@pytest.fixture(scope="module")
def model(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    found = load_model(
        oracle.save(theirs, tmp_path_factory.mktemp("switch") / "model"), dtype=torch.float32
    )
    config = found.config
    assert (config.rope_switch, config.max_unscaled_context, config.max_positions) == (
        SWITCH,
        SWITCH,
        CONTEXT,
    )
    return found


def _prompts() -> list[list[int]]:
    texts = oracle.random_tokens(CONTEXT, batch=len(LENGTHS))
    return [text[:length].tolist() for text, length in zip(texts, LENGTHS, strict=True)]


def _generated(theirs: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by transformers' own cache, which it computes anew at the switch."""
    found = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sequences_next_to_each_other_are_as_with_transformers(
    compiled: bool, late: bool, theirs: Any, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_late(monkeypatch, late=late)
    if compiled:
        monkeypatch.setattr(
            "quantkit.runtime.engine._compile", lambda step, device: step
        )  # what is padded, as it is
    engine = Engine(model, 140, slots=3, compiled=compiled)
    monkeypatch.setattr(engine, "chunk_rows", 16)
    found = together(engine, [Request(prompt, 25) for prompt in _prompts()])
    assert [one.token_ids for one in found] == [
        _generated(theirs, prompt, 25) for prompt in _prompts()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast"])
def test_quantized_models_switch_as_well(backend: str, tmp_path: Path) -> None:
    """Through kernels of whole blocks, that take rows of several sequences.

    A backend rounds what goes into a linear, and float32 in another order turns some roundings the
    other way: two runs of one text differ by as much as either differs from floats. So the texts
    are as close to the reference through the engine as they are at once; positions that do not
    switch are much further from it.
    """
    source = oracle.save(_make(hidden_size=128, rope_parameters=_longrope(8)), tmp_path / "source")
    quantkit.quantize(source, tmp_path / "int8", "int8", accept_quality_loss=True)
    model = load_model(tmp_path / "int8", dtype=torch.float32, backend=backend)
    assert model.ops.ragged
    requests = [Request(prompt, 25, logprobs=2) for prompt in _prompts()]
    found = together(Engine(model, 140, slots=3), requests)
    for one, request in zip(found, requests, strict=True):
        assert one == replace(alone(model, request)[0], prompt=one.prompt)
    reference = load_model(tmp_path / "int8", dtype=torch.float32, backend="reference")
    never = replace(reference.config.rope, original_context=CONTEXT, factor=CONTEXT / SWITCH)
    unswitched = Decoder(replace(reference.config, rope=never)).eval()
    unswitched.model, unswitched.lm_head = reference.model, reference.lm_head
    texts = [
        (list(request.prompt), list(one.token_ids))
        for one, request in zip(found, requests, strict=True)
    ]
    expected = _log_probabilities(reference, texts)
    at_once, without = (_log_probabilities(one, texts) - expected for one in (model, unswitched))
    stated = torch.tensor(
        [value for one in found for value in (one.logprobs.tokens if one.logprobs else ())]
    )
    rounding = at_once.square().mean().sqrt().clamp(min=1e-5)  # float32 itself, in two layers
    assert (stated - expected).square().mean().sqrt() < 1.5 * rounding
    assert without.square().mean().sqrt() > 5 * rounding


@torch.inference_mode()
def _log_probabilities(model: Decoder, texts: list[tuple[list[int], list[int]]]) -> Tensor:
    """Those of the tokens generated after each prompt, each from all before it at once."""
    found = []
    for prompt, tokens in texts:
        text = torch.tensor([[*prompt, *tokens]])
        for place in range(len(prompt), text.shape[1]):
            logits = model(text[:, :place], torch.arange(place))[0, -1]
            found.append(logits.log_softmax(-1)[text[0, place]])
    return torch.stack(found)


def test_a_text_is_read_anew_once(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = Engine(model, 100, draft_tokens=0), list[int]()
    step = engine.step
    monkeypatch.setattr(
        engine, "step", lambda *given: (rows.append(len(given[1])), step(*given))[1]
    )
    together(engine, [Request(_prompts()[0], 30)])
    assert rows == [30, *[1] * 10, SWITCH + 1, *[1] * 18]


@pytest.mark.slow
def test_windows_and_partial_rotary_embedding_switch_as_well(tmp_path: Path) -> None:
    theirs = _make(
        hidden_size=128,
        sliding_window=11,
        rope_parameters={**_longrope(4), "partial_rotary_factor": 0.5},
    )
    ours = load_model(oracle.save(theirs, tmp_path / "model"), dtype=torch.float32)
    for prompt in _prompts():
        assert list(quantkit.generate(ours, prompt, max_new_tokens=25)) == _generated(
            theirs, prompt, 25
        )


def test_samples_and_their_log_probabilities_go_on_past_it(model: Decoder) -> None:
    """Some of a prompt's samples begin after others have switched."""
    request = Request(_prompts()[0], 20, samples=5, logprobs=2, echo=True)
    for one in together(Engine(model, 60, slots=2), [request]):
        assert one.logprobs is not None
        assert len(one.logprobs.tokens) == 50
        for place in (20, 35, 39, 40, 45):
            whole = torch.tensor([one.token_ids[:place]])
            reported = model(whole, torch.arange(place))[0, -1].log_softmax(-1)
            assert one.logprobs.tokens[place] == pytest.approx(
                float(reported[one.token_ids[place]]), abs=1e-4
            )


@pytest.mark.parametrize(
    ("count", "requested", "expected"), [(9, 3, [0, 20, 52, 96]), (3, 11, [0, 16, 16, 60])]
)
def test_a_conversation_goes_on_past_it(
    count: int, requested: int, expected: list[int], model: Decoder
) -> None:
    """Within an answer, or between two: then nothing of the turns before is of use."""
    scheduler, text = (
        Scheduler(Engine(model, 120), any_prefix=True),
        _prompts()[4][: 12 if count == 9 else 14],
    )
    reused = []
    for _ in expected:
        request = Request(text, count)
        (found,) = scheduler.add(request)
        while found.finish_reason is None:
            scheduler.step()
        assert found.tokens == alone(model, request)[0].token_ids
        text = [*text, *found.tokens, *range(7, 7 + requested)]
        reused.append(scheduler.num_reused_tokens)
    assert reused == expected


def test_prompts_on_two_sides_of_it_share_nothing() -> None:
    text = list(range(60))
    table = SlotTable(
        2, 16, any_prefix=True, windows=False, max_unscaled_length=SWITCH, switches_once=True
    )
    table.record_contents(table.take(text[:30]), text[:30], 30)
    table.record_contents(table.take(text[:50]), text[:50], 50)
    assert table.find_longest_prefix(text[:35]) == (0, 30)
    assert table.find_longest_prefix(text) == (1, 50)
    table.record_contents(0, text[:10], 10)
    assert table.find_longest_prefix(text[:45]) == (1, 44)
    assert table.find_longest_prefix(text[:40]) == (0, 10)


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("same", [True, False], ids=["right", "wrong"])
def test_drafts_go_past_it(same: bool, drafts: int, model: Decoder, tmp_path: Path) -> None:
    other = _make(num_hidden_layers=1)
    draft = (
        model if same else load_model(oracle.save(other, tmp_path / "draft"), dtype=torch.float32)
    )
    for prompt in _prompts():
        expected = list(quantkit.generate(model, prompt, max_new_tokens=25))
        assert speculate(model, draft, prompt, max_new_tokens=25, draft_tokens=drafts) == expected


def test_a_draft_that_switches_earlier(model: Decoder) -> None:
    early = Decoder(
        replace(model.config, rope=replace(model.config.rope, original_context=32))
    ).eval()
    early.model, early.lm_head = model.model, model.lm_head
    prompt = _prompts()[0]
    assert speculate(model, early, prompt, max_new_tokens=25) == list(
        quantkit.generate(model, prompt, max_new_tokens=25)
    )


def test_through_xla_texts_end_at_it(model: Decoder) -> None:
    config = model.config
    assert check_total_length(config, [3] * 30, 10, config.max_unscaled_context) == SWITCH
    with raises(RequestError, found=41, expected="at most 40"):
        check_total_length(config, [3] * 31, 10, config.max_unscaled_context)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_configs_of_phi_3_are_read(key: str, name: str) -> None:
    """Those of its first months call LongRoPE otherwise, and have its original context beside
    it.
    """
    scaling = {key: name, **{part: _longrope(4)[part] for part in ("short_factor", "long_factor")}}
    raw = {
        **oracle.SIZES,
        "model_type": "phi3",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": scaling,
    }
    found = config_from_hf({**raw, "original_max_position_embeddings": 32}, "config.json")
    assert (found.rope.type, found.rope.original_context, found.rope.factor) == (
        "longrope",
        32,
        2.0,
    )
    assert config_from_hf(raw, "config.json").rope.original_context == 4096  # as in transformers
    written = config_to_hf(found)
    assert set(written["rope_scaling"]) == {
        "type",
        "short_factor",
        "long_factor",
    }  # all that older readers take
    assert config_from_hf(written, "config.json") == found


def test_other_scalings_of_phi_3_are_refused_as_in_transformers() -> None:
    raw = {**oracle.SIZES, "model_type": "phi3", "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    with raises(UnsupportedError, found="linear", expected="default or longrope"):
        config_from_hf({**raw, "rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json")


def test_texts_that_are_scored_together_are_scored_as_alone(model: Decoder) -> None:
    scorer = Scorer.__new__(Scorer)
    scorer._model, scorer._path, scorer._progress = model, Path("model"), lambda *reported: None
    items = [(prompt[:-1], prompt[-1:]) for prompt in _prompts()]
    for (ids, targets), (total, _) in zip(items, scorer._score(items), strict=True):
        reported = model(torch.tensor([ids]), torch.arange(len(ids)))[0, -1].log_softmax(-1)
        assert total == pytest.approx(float(reported[targets[0]]), abs=1e-5)
