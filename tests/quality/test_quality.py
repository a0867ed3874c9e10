"""The measures against direct computations on a transformers model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises

from quantkit.errors import NonFiniteError, RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch, layerwise_hidden
from quantkit.quality import measures
from quantkit.quality.measures import (
    NOT_SCORED,
    Windows,
    compare,
    compare_batches,
    log_loss,
    text_windows,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    """Two models that differ a little, and their folders."""
    folder = tmp_path_factory.mktemp("pair")
    first, second = oracle.make("qwen2"), oracle.make("qwen2")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.02)
    return (
        first,
        second,
        oracle.save(first, folder / "first"),
        oracle.save(second, folder / "second"),
    )


def test_divergence_is_that_of_the_definitions(pair: tuple[Any, Any, Path, Path]) -> None:
    first, second, a, b = pair
    tokens = oracle.random_tokens(50, batch=3)
    p, q = oracle.logits(first, tokens), oracle.logits(second, tokens)
    found = compare_batches(open_checkpoint(a), open_checkpoint(b), [Batch.from_start(tokens)])[
        0
    ].divergence
    expected = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none"
    )
    assert found.tokens == 150
    assert found.kl == pytest.approx(expected.sum(-1).mean().item(), rel=1e-3)
    assert found.largest_logit_difference == pytest.approx((p - q).abs().max().item(), rel=1e-3)
    assert found.top1_agreement == pytest.approx(
        (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    )
    assert 0 < found.top1_agreement < 1


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )


def test_models_are_held_against_a_reference_by_the_definitions(
    pair: tuple[Any, Any, Path, Path],
) -> None:
    first, second, a, b = pair
    tokens = oracle.random_tokens(50, batch=3)
    p, q = oracle.logits(first, tokens), oracle.logits(second, tokens)
    apart = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    same, other = compare(open_checkpoint(a), [open_checkpoint(a), open_checkpoint(b)], tokens)
    assert (
        same.divergence.kl
        == same.divergence.kl_p99
        == same.divergence.largest_logit_difference
        == 0
    )
    assert same.divergence.top1_agreement == 1
    assert same.perplexity == same.reference_perplexity == other.reference_perplexity
    assert other.divergence.tokens == 150
    assert other.divergence.kl == pytest.approx(apart.mean().item(), rel=1e-3)
    assert other.divergence.kl_median == pytest.approx(apart.quantile(0.5).item(), rel=1e-3)
    assert other.divergence.kl_p99 == pytest.approx(apart.quantile(0.99).item(), rel=1e-3)
    assert other.divergence.kl_median < other.divergence.kl < other.divergence.kl_p99
    assert other.reference_perplexity == pytest.approx(
        _loss(p, tokens).mean().exp().item(), rel=1e-4
    )
    assert other.perplexity == pytest.approx(_loss(q, tokens).mean().exp().item(), rel=1e-4)


def test_errors_are_those_of_the_tokens_next_to_each_other(
    pair: tuple[Any, Any, Path, Path],
) -> None:
    """Held against the jackknife over the stretches, which leaves each out in turn."""
    first, second, a, b = pair
    tokens = oracle.random_tokens(40, batch=25)
    p, q = oracle.logits(first, tokens), oracle.logits(second, tokens)
    comparison = compare(open_checkpoint(a), [open_checkpoint(b)], tokens)[0]

    def jackknife(values: torch.Tensor, *, exp: bool) -> float:
        parts = list(values.flatten().double().tensor_split(20))
        means = torch.stack([torch.cat([*parts[:i], *parts[i + 1 :]]).mean() for i in range(20)])
        return (means.exp() if exp else means).std().item() * 19 / math.sqrt(20)

    apart = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert comparison.divergence.kl_error == pytest.approx(jackknife(apart, exp=False), rel=1e-3)
    agreed = (p.argmax(-1) == q.argmax(-1)).float()
    assert comparison.divergence.top1_error == pytest.approx(jackknife(agreed, exp=False), rel=1e-3)
    losses = [_loss(logits, tokens) for logits in (p, q)]
    assert comparison.reference_perplexity_error == pytest.approx(
        jackknife(losses[0], exp=True), rel=0.05
    )
    assert comparison.perplexity_error == pytest.approx(jackknife(losses[1], exp=True), rel=0.05)
    ratio = jackknife(losses[1] - losses[0], exp=True)
    assert comparison.ratio_error == pytest.approx(ratio, rel=0.05)
    (alone,) = measures.perplexity_estimates(open_checkpoint(b), [tokens])
    assert (alone.value, alone.error) == pytest.approx(
        (comparison.perplexity, comparison.perplexity_error), rel=1e-5
    )


def test_no_more_hidden_states_are_held_than_the_budget_allows(
    pair: tuple[Any, Any, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, a, b = pair
    reference, other = open_checkpoint(a), open_checkpoint(b)
    tokens = oracle.random_tokens(20, batch=7)
    whole = compare(reference, [other], tokens)[0]
    sizes = []

    def counted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        states = layerwise_hidden(*arguments, **options)
        sizes.append(sum(state.nbytes for state in states))
        return states

    window = 20 * oracle.SIZES["hidden_size"] * 4
    monkeypatch.setattr(measures, "STATES_BYTES", 3 * window)
    monkeypatch.setattr(measures, "TOKENS_THROUGH_A_BLOCK", 40)
    parts = compare(reference, [other], tokens, reference_hidden=counted)[0]
    assert sizes == [2 * window, 2 * window, 3 * window]  # in batches of two windows
    assert parts.divergence.kl == pytest.approx(whole.divergence.kl, rel=1e-5)
    assert parts.perplexity == pytest.approx(whole.perplexity, rel=1e-6)
    assert parts.divergence.tokens == whole.divergence.tokens == 140


def test_only_what_is_to_be_predicted_is_scored(pair: tuple[Any, Any, Path, Path]) -> None:
    model, _, folder, _ = pair
    long, short = oracle.random_tokens(30), oracle.random_tokens(12)
    losses = _loss(oracle.logits(model, long), long)
    expected = losses[20:].sum() + _loss(oracle.logits(model, short), short).sum()
    tail = Windows.of(long)
    tail.targets[:, :20] = NOT_SCORED
    assert (tail.targets != NOT_SCORED).sum() == 9
    assert log_loss(open_checkpoint(folder), [tail, Windows.of(short)]) == pytest.approx(
        expected.item(), rel=1e-4
    )


def test_logits_that_are_not_finite_are_an_error(
    pair: tuple[Any, Any, Path, Path], tmp_path: Path
) -> None:
    _, _, folder, _ = pair
    broken = oracle.make("qwen2")
    with torch.no_grad():
        broken.model.norm.weight[3] = float("inf")
    bad, good = open_checkpoint(oracle.save(broken, tmp_path / "broken")), open_checkpoint(folder)
    tokens = oracle.random_tokens(20)
    for reference, other in ((good, bad), (bad, good)):
        with raises(NonFiniteError, path=tmp_path / "broken"):
            compare(reference, [other], tokens)
    with raises(NonFiniteError, path=tmp_path / "broken"):
        measures.perplexity_estimates(bad, [tokens])
    assert math.isnan(compare_batches(good, bad, [Batch.from_start(tokens)])[0].divergence.kl)


def test_vocabularies_of_two_sizes_are_not_compared(
    pair: tuple[Any, Any, Path, Path], tmp_path: Path
) -> None:
    larger = oracle.save(
        oracle.make("qwen2", vocab_size=oracle.VOCABULARY + 32), tmp_path / "larger"
    )
    with raises(RequestError, path=larger, found="128 tokens"):
        compare(open_checkpoint(pair[2]), [open_checkpoint(larger)], oracle.random_tokens(20))


def test_a_perplexity_beyond_a_float_is_infinite() -> None:
    assert measures.perplexity(1e6, 10) == math.inf
    assert measures.perplexity(20.0, 10) == pytest.approx(math.e**2)


def test_perplexity_is_the_exponent_of_the_mean_loss(pair: tuple[Any, Any, Path, Path]) -> None:
    model, _, folder, _ = pair
    windows = oracle.random_tokens(40, batch=4)
    logits = oracle.logits(model, windows)[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    (estimate,) = measures.perplexity_estimates(open_checkpoint(folder), [windows])
    assert estimate.value == pytest.approx(math.exp(loss.item()), rel=1e-4)


def test_windows_each_begin_with_bos_and_hold_every_token_once() -> None:
    windows = text_windows([1, *range(10, 30)], [1], 6)
    assert windows.tolist() == [[1, *range(10 + 5 * i, 15 + 5 * i)] for i in range(4)]


def test_windows_without_bos_and_with_a_rest() -> None:
    assert text_windows(list(range(7)), [], 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_short_text_is_one_short_window() -> None:
    assert text_windows([1, 5, 6], [1], 256).tolist() == [[1, 5, 6]]


def test_a_text_without_tokens_has_no_windows() -> None:
    assert text_windows([1], [1], 256).shape[0] == text_windows([], [], 256).shape[0] == 0
