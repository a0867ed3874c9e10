"""Drawing tokens, and the loop around it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.errors import NonFiniteError, RequestError
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.sampling import (
    Sampler,
    adjust_logits,
    compute_probabilities,
    create_generator,
    sample,
)
from quantkit.runtime.sampling_params import OPTIONS, Option, SamplingParams

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Random, with no end token."""
    random = oracle.make("llama", num_hidden_layers=1, eos_token_id=None)
    return load_model(
        oracle.save(random, tmp_path_factory.mktemp("model") / "m"), dtype=torch.float32
    )


def _frequencies(params: SamplingParams, logits: Tensor, draws: int = 20000) -> Tensor:
    generator = create_generator(params, torch.device("cpu"))
    tokens = sample(logits.expand(draws, -1), params, generator)
    assert tokens.shape == (draws, 1)
    return tokens.flatten().bincount(minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, [0, 1, 2, 3, 4]),
        (0.96, [0, 1, 2, 3, 4]),
        (0.9, [1, 2, 3, 4]),
        (0.75, [1, 2, 3]),
        (0.6, [1, 3]),
        (0.3, [1]),
        (1e-6, [1]),
    ],
)
def test_top_p_draws_from_the_smallest_nucleus(top_p: float, kept: list[int]) -> None:
    found = _frequencies(SamplingParams(1.0, top_p, seed=3), PROBABILITIES.log())
    expected = torch.zeros(5)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    assert found.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    found = _frequencies(SamplingParams(temperature, seed=3), PROBABILITIES.log())
    expected = PROBABILITIES ** (1 / temperature)
    torch.testing.assert_close(found, expected / expected.sum(), rtol=0, atol=0.015)


def test_temperature_comes_before_the_nucleus() -> None:
    found = _frequencies(SamplingParams(0.5, 0.6, seed=3), PROBABILITIES.log())
    assert found.nonzero().flatten().tolist() == [1, 3]
    hot = _frequencies(SamplingParams(4.0, 0.6, seed=3), PROBABILITIES.log())
    assert hot.nonzero().flatten().tolist() == [1, 2, 3]


def test_temperature_zero_takes_the_likeliest_of_each_row() -> None:
    logits = torch.randn(50, 300)
    tokens = sample(logits, SamplingParams(), torch.Generator())
    assert torch.equal(tokens, logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-39, 5e-324])
def test_tiny_temperatures_take_the_likeliest_too(temperature: float) -> None:
    logits = torch.randn(8, 300) * 20
    tokens = sample(logits, SamplingParams(temperature, seed=0), torch.Generator())
    assert torch.equal(tokens, logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(1.0, top_k=1), [1]),
        (SamplingParams(1.0, top_k=3), [1, 2, 3]),
        (SamplingParams(1.0, top_k=99), [0, 1, 2, 3, 4]),
        (SamplingParams(1.0, min_p=0.3), [1, 2, 3]),
        (SamplingParams(1.0, min_p=1.0), [1]),
        (SamplingParams(1.0, 0.5, top_k=2), [1]),
        (SamplingParams(1.0, 0.6, top_k=2), [1, 3]),
        (SamplingParams(4.0, min_p=0.8), [1, 3]),
    ],
    ids=str,
)
def test_the_likeliest_are_kept_and_share_what_the_others_had(
    params: SamplingParams, kept: list[int]
) -> None:
    found = compute_probabilities(PROBABILITIES.log().expand(2, -1), params)
    expected = torch.zeros(5)
    hot = PROBABILITIES ** (1 / params.temperature)
    expected[kept] = hot[kept] / hot[kept].sum()
    torch.testing.assert_close(found, expected.expand(2, -1))


@pytest.mark.parametrize(
    "option", [one for one in OPTIONS if one.keep is not None], ids=lambda one: one.name
)
def test_an_option_keeps_without_sorting_what_it_does_not_drop(option: Option) -> None:
    """XLA uses the one, torch the other."""
    assert option.drops is not None
    assert option.keep is not None
    for value in (2, 7, 400) if option.type is int else (0.1, 0.5, 1.0):
        found = torch.randn(3, 300).softmax(-1)
        ranked, order = found.sort(dim=-1, descending=True)
        kept = ranked.masked_fill(
            option.drops(torch, ranked, torch.arange(300), torch.tensor(value)), 0
        )
        assert torch.equal(
            option.keep(found, value), torch.zeros_like(found).scatter(-1, order, kept)
        )


def test_a_nucleus_ends_with_the_token_that_exceeds_it() -> None:
    """As in Meta's rule, where the tokens before one must hold more than `top_p` to leave it
    out.
    """
    halves = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert compute_probabilities(halves, SamplingParams(1.0, 0.5))[0, 1:].sum() > 0
    assert compute_probabilities(halves, SamplingParams(1.0, 0.49))[0, 1:].sum() == 0


def test_tokens_that_a_text_holds_are_penalized() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [2.0, 1.5, -1.0]])
    seen = torch.tensor([[True, False, True], [False, False, False]])
    params = SamplingParams(repetition_penalty=2.0)
    assert adjust_logits(logits, params, seen).tolist() == [[1.0, 1.5, -2.0], [2.0, 1.5, -1.0]]
    assert sample(logits, params, torch.Generator(), seen).tolist() == [[1], [0]]


def test_new_tokens_are_penalized_once_and_for_each_time() -> None:
    """By OpenAI's formula: the count times one penalty, and the other where it is above zero."""
    logits, counts = torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([[2.0, 0.0, 1.0]])
    both = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)
    assert adjust_logits(logits, both, counts=counts).tolist() == [[2.0, 1.5, -1.25]]
    assert adjust_logits(logits, SamplingParams(frequency_penalty=2.0), counts=counts).tolist() == [
        [-2.0, 1.5, -3.0]
    ]
    with pytest.raises(RequestError, match="presence_penalty is not supported here"):
        adjust_logits(logits, both)


def test_a_sampler_counts_new_tokens_alone() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    often = Sampler(SamplingParams(frequency_penalty=0.4), [0, 0, 0], 3, torch.device("cpu"))
    assert [int(often.draw(logits)) for _ in range(6)] == [0, 0, 1, 0, 1, 0]
    once = Sampler(SamplingParams(presence_penalty=0.6), [1, 1], 3, torch.device("cpu"))
    assert [int(once.draw(logits)) for _ in range(4)] == [0, 1, 0, 0]


def test_a_bias_forbids_and_forces_tokens() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0]]).bfloat16()
    assert sample(logits, SamplingParams(logit_bias={0: -100.0}), torch.Generator()).tolist() == [
        [1]
    ]
    drawn = compute_probabilities(logits, SamplingParams(1.0, logit_bias={2: 100.0}))
    assert drawn.argmax() == 2
    assert drawn[0, :2].sum() < 1e-30
    assert logits.tolist() == [[2.0, 1.5, -1.0]]
    with pytest.raises(
        RequestError, match=r"outside the vocabulary \(found \[3\], expected 0 to 2\)"
    ):
        sample(logits, SamplingParams(logit_bias={3: 1.0}), torch.Generator())


def test_top_k_is_off_as_in_vllm_too() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": -2},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": {0: float("nan")}},
        {"temperature": float("inf")},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 101},
        {"logit_bias": {0: 1e300}},
        {"logit_bias": {0: 1.0, 1: -10001}},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"presence_penalty": float("nan")},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_settings_within_range_make_probabilities_break(dtype: torch.dtype) -> None:
    seen = torch.tensor([[True, True, False, True]])
    bases = [
        torch.tensor([[1.0, -1.0, 0.5, 1.0]]) * scale for scale in (1e-30, 1.0, 900.0, 60000.0)
    ]
    for logits, temperature, top_p, top_k, min_p, penalty, bias in itertools.product(
        bases,
        (5e-324, 1e-30, 1.7e308),
        (5e-324, 1.0),
        (0, 10**30),
        (0.0, 5e-324, 1.0),
        (0.01, 1.0, 100.0),
        ({}, {0: 1e4, 1: 1e4}, {0: 1e4, 1: -1e4}, dict.fromkeys(range(4), -10000.0)),
    ):
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            seed=0,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=penalty,
            logit_bias=bias,
        )
        found = compute_probabilities(logits.to(dtype), params, seen)
        assert found.sum() == pytest.approx(1), (logits, params)
        assert (found >= 0).all()


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, float("nan")])
def test_temperatures_out_of_range_are_refused(temperature: float) -> None:
    with pytest.raises(RequestError, match="temperature must be finite and not negative"):
        SamplingParams(temperature)


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.0001, float("nan"), float("inf")])
def test_top_p_out_of_range_is_refused(top_p: float) -> None:
    with pytest.raises(RequestError, match=r"top_p must lie in \(0, 1\]"):
        SamplingParams(1.0, top_p)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    with pytest.raises(RequestError, match="seed"):
        SamplingParams(1.0, 1.0, seed)


def _generate(model: Decoder, seed: int | None) -> list[int]:
    prompt = oracle.random_tokens(5)[0].tolist()
    return list(quantkit.generate(model, prompt, max_new_tokens=30, temperature=1.5, seed=seed))


def test_a_seed_repeats_and_another_differs(model: Decoder) -> None:
    assert _generate(model, 7) == _generate(model, 7)
    assert _generate(model, 7) != _generate(model, 8)
    assert _generate(model, None) != _generate(model, None)


def test_the_global_random_state_is_neither_used_nor_moved(model: Decoder) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = _generate(model, 7)
    _generate(model, None)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert _generate(model, 7) == first


REFUSED: dict[str, tuple[list[int], int, str]] = {
    "empty": ([], 1, "the prompt is empty"),
    "too long": ([3] * 60, 5, r"exceed the model's context \(found 65, expected at most 64\)"),
    "far too long": ([3] * 65, 1, "exceed the model's context"),
    "past the vocabulary": ([3, 96], 1, r"outside the vocabulary \(expected 0 to 95\)"),
    "negative": ([3, -1], 1, "outside the vocabulary"),
    "no new tokens": ([3], 0, "nothing to generate"),
    "fewer than none": ([3], -2, "nothing to generate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_prompts_that_make_no_sense_are_refused_at_once(case: str, model: Decoder) -> None:
    prompt, count, message = REFUSED[case]
    with pytest.raises(RequestError, match=message):
        quantkit.generate(model, prompt, max_new_tokens=count)


def test_bad_settings_are_refused_at_once(model: Decoder) -> None:
    with pytest.raises(RequestError, match="top_p"):
        quantkit.generate(model, [3], max_new_tokens=1, top_p=0.0)


def test_the_whole_context_can_be_filled(model: Decoder) -> None:
    assert len(list(quantkit.generate(model, [3] * 60, max_new_tokens=4))) == 4
    assert len(list(quantkit.generate(model, [3], max_new_tokens=63))) == 63


@pytest.mark.parametrize("as_list", [False, True], ids=["one-end", "many-ends"])
def test_generation_stops_at_an_end_token_and_keeps_it_back(
    as_list: bool, model: Decoder, tmp_path: Path
) -> None:
    prompt = oracle.random_tokens(5)[0].tolist()
    free = list(quantkit.generate(model, prompt, max_new_tokens=20))
    end = free[6]
    folder = oracle.save(
        oracle.make("llama", num_hidden_layers=1, eos_token_id=None), tmp_path / "m"
    )
    oracle.edit_json(folder / "config.json", eos_token_id=[95, end] if as_list else end)
    stopping = load_model(folder, dtype=torch.float32)
    assert list(quantkit.generate(stopping, prompt, max_new_tokens=20)) == free[: free.index(end)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_end_generation_with_an_error(
    value: float, temperature: float, tmp_path: Path
) -> None:
    random = oracle.make("llama", num_hidden_layers=1)
    with torch.no_grad():
        random.model.norm.weight[3] = value
    broken = load_model(oracle.save(random, tmp_path / "m"), dtype=torch.float32)
    with pytest.raises(NonFiniteError, match="logits are NaN or Inf"):
        next(quantkit.generate(broken, [3, 4], max_new_tokens=2, temperature=temperature))
