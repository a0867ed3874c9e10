"""Several prompts at once through XLA, over virtual CPU devices."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
from schemes import any_scheme
from virtual_devices import found_by, require_torchax

import quantkit

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one process; by the folder's name."""
    require_torchax()
    home = tmp_path_factory.mktemp("xla")
    small = {"num_hidden_layers": 2, "vocab_size": 99, "eos_token_id": None}
    source = oracle.save(oracle.make("llama", num_key_value_heads=4, **small), home / "float32")
    quantkit.quantize(
        source, home / "int4-g32", any_scheme("int4-g32"), method="rtn", accept_quality_loss=True
    )
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    oracle.save(oracle.make("qwen3", **window, **small), home / "qwen3")
    return found_by("xla_batch_cases", {"qwen3": 4, "int4-g32": 8, "float32": 8}, home)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "int4-g32", "qwen3"])
def test_eight_prompts_at_once_are_continued_as_by_torch(name: str, cases: dict[str, Any]) -> None:
    case = cases[name]
    assert case["found"] == case["expected"]
    assert [reason for _, reason in case["found"]][:4] == ["stop"] * 4
    assert "length" in [reason for _, reason in case["found"]][4:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "int4-g32", "qwen3"])
def test_a_batch_ends_with_its_longest_text(name: str, cases: dict[str, Any]) -> None:
    """Of 24 tokens asked for, and chunks of ten."""
    case = cases[name]
    longest = max(len(tokens) + (reason == "stop") for tokens, reason in case["expected"])
    assert 10 < longest < 20
    assert case["steps"] == [[10, 8], [longest - 10, 8]]


def test_more_texts_than_rows_run_in_turn(cases: dict[str, Any]) -> None:
    numbers, counts, tokens, few = cases["rows"]
    assert numbers == [*([n, 0] for n in range(11)), [10, 1]]
    assert counts == [[3, 8], [3, 8]]  # compiled once
    assert few == [[3, 4]]
    assert tokens[:2] == tokens[8:10]
    assert tokens[2] == tokens[10] == tokens[11]


def test_what_is_drawn_for_a_text_depends_on_its_seed_alone(cases: dict[str, Any]) -> None:
    alone, among, other, second = cases["seeds"]
    assert alone == among == second != other


def test_a_stop_string_ends_a_text_and_its_batch(cases: dict[str, Any]) -> None:
    whole, found, counts = cases["stopped"]
    assert len(whole) == 24
    assert found == [[whole[:2], whole[2], "stop", 3]] * 3
    assert counts == [[10, 2], [10, 2]]


def test_a_token_that_ends_one_text_ends_it_and_its_batch(cases: dict[str, Any]) -> None:
    whole, ended, chunks = cases["own ends"]
    assert ended == [whole[: whole.index(whole[3])], "stop"]
    assert chunks == 1


def test_bias_and_penalty_are_those_of_torch(cases: dict[str, Any]) -> None:
    plain, *others = cases["options"]
    assert len(others) == 3
    for by_torch, found in (plain, *others):
        assert by_torch == found
    assert plain[0] not in [by_torch for by_torch, _ in others]


def test_log_probabilities_are_those_of_torch(cases: dict[str, Any]) -> None:
    for count, distance, same in cases["logprobs"]:
        assert count > 0
        assert distance < 1e-4
        assert same


def test_log_probabilities_of_prompts_are_refused(cases: dict[str, Any]) -> None:
    assert cases["refused"].startswith(
        "RequestError: XLA does not support log-probabilities of prompts; leave"
    )


def test_nan_in_one_text_is_an_error(cases: dict[str, Any]) -> None:
    assert cases["nan"].startswith("NonFiniteError: the model's logits are NaN or Inf")


def test_tokens_are_drawn_by_the_rules_of_torch(cases: dict[str, Any]) -> None:
    for found, expected in cases["frequencies"]:
        assert found == pytest.approx(expected, abs=0.03)
        assert [share > 0 for share in found] == [share > 0 for share in expected]
