"""A draft model changes how fast tokens come, not which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import run

import quantkit
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.sampling import probabilities
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.runtime.speculative import accepted, speculate

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


@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
@pytest.mark.parametrize(("name", "draft"), [("fp32", "int4-g32"), ("int8", "fp32"), ("int4-g32", "random")])
def test_greedy_text_is_that_of_the_model_alone(
    name: str, draft: str, draft_tokens: int, models: dict[str, Decoder]
) -> None:
    expected = list(generate(models[name], PROMPT, max_new_tokens=60))
    found = speculate(models[name], models[draft], PROMPT, max_new_tokens=60, draft_tokens=draft_tokens)
    assert list(found) == expected
    assert expected


def test_a_draft_that_is_right_saves_steps(models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["fp32"]
    copy: Any = Decoder.__new__(Decoder)
    copy.__dict__.update(model.__dict__)
    steps = []

    def counted(*arguments: Any, **options: Any) -> Any:
        steps.append(arguments[0].shape[1])
        return Decoder.hidden(model, *arguments, **options)

    monkeypatch.setattr(copy, "hidden", counted)
    found = list(speculate(copy, model, PROMPT, max_new_tokens=20, draft_tokens=4))
    assert found == list(generate(model, PROMPT, max_new_tokens=20))
    assert steps == [len(PROMPT) + 4, 5, 5, 5]


def test_long_prompts_are_read_in_chunks(models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine, *given: (rows.append(len(given[1])), step(engine, *given))[1])
    for name in ("int8", "fp32"):
        model, prompt = models[name], PROMPT * 75
        rows.clear()
        found = list(speculate(model, models["int4-g32"], prompt, max_new_tokens=12, draft_tokens=3))
        assert max(rows) == 240
        assert sum(count == 240 for count in rows) == 2
        assert found == list(generate(model, prompt, max_new_tokens=12))


@pytest.mark.parametrize("guess", [[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1], [0.0, 0.1, 0.1, 0.8]])
def test_tokens_are_drawn_as_the_large_model_would(guess: list[float]) -> None:
    judged = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.0, 0.0]])
    small, generator = torch.tensor(guess), torch.Generator().manual_seed(0)
    firsts, seconds = torch.zeros(4), torch.zeros(4)
    for _ in range(8000):
        proposed = int(torch.multinomial(small, 1, generator=generator))
        fresh = accepted(judged, [small], [proposed], generator)
        firsts[fresh[0]] += 1
        if len(fresh) == 2:
            assert fresh[0] == proposed
            seconds[fresh[1]] += 1
    torch.testing.assert_close(firsts / firsts.sum(), judged[0], rtol=0, atol=0.02)
    torch.testing.assert_close(seconds / seconds.sum(), judged[1], rtol=0, atol=0.03)


def test_a_seed_gives_one_text(models: dict[str, Decoder]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9}
    texts = [list(speculate(models["int8"], models["int4-g32"], PROMPT, seed=s, **options)) for s in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_the_nucleus_holds_for_what_is_drawn() -> None:
    logits = torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]]).log()
    found = probabilities(logits, SamplingParams(1.0, 0.6))
    torch.testing.assert_close(found, torch.tensor([[0, 4 / 7, 0, 3 / 7, 0]]))
    assert probabilities(logits, SamplingParams(0.0)).tolist() == [[0, 1, 0, 0, 0]]


def test_it_stops_at_an_end_token(models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["fp32"]
    whole = list(generate(model, PROMPT, max_new_tokens=20))
    end = next(token for token in whole[5:] if token not in whole[:5])
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(end,)))
    found = list(speculate(model, models["int8"], PROMPT, max_new_tokens=20, draft_tokens=6))
    assert found == whole[: whole.index(end)]


def test_requests_that_make_no_sense(models: dict[str, Decoder], tmp_path: Path) -> None:
    model = models["fp32"]
    with pytest.raises(RequestError, match="nothing to propose"):
        speculate(model, model, PROMPT, max_new_tokens=5, draft_tokens=0)
    small = load_model(oracle.save(oracle.make("llama"), tmp_path / "small"))
    with pytest.raises(RequestError, match="another vocabulary"):
        speculate(model, small, PROMPT, max_new_tokens=5)
    with pytest.raises(RequestError, match="context"):
        speculate(model, models["random"], PROMPT, max_new_tokens=600)


def test_the_command_takes_a_draft(folders: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", folders["int8"], "--dtype", "fp32", "--prompt", "My fellow", "--max-new-tokens", "15"]
    code, expected, _ = run(capfd, *command)
    assert code == 0
    assert run(capfd, *command, "--draft", folders["int4-g32"], "--draft-tokens", "3")[:2] == (0, expected)
    no_tokens = ["--draft", folders["int8"], "--draft-tokens", "0"]
    for wrong in (["--draft-tokens", "3"], no_tokens, ["--draft", folders["int8"], "--compile"]):
        assert run(capfd, *command, *wrong)[0] == 2
