"""The measures against direct computations on a transformers model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

from quantkit.formats.detect import open_checkpoint
from quantkit.model.blockwise import Batch
from quantkit.quality import divergence, text_windows, token_perplexity


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    """Two models that differ a little, and their folders."""
    folder = tmp_path_factory.mktemp("pair")
    first, second = oracle.make("qwen2"), oracle.make("qwen2")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.02)
    return first, second, oracle.save(first, folder / "first"), oracle.save(second, folder / "second")


def test_divergence_is_that_of_the_definitions(pair: tuple[Any, Any, Path, Path]) -> None:
    first, second, a, b = pair
    tokens = oracle.random_tokens(50, batch=3)
    p, q = oracle.logits(first, tokens), oracle.logits(second, tokens)
    found = divergence(open_checkpoint(a), open_checkpoint(b), [Batch.from_start(tokens)])[0]
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none")
    assert found.tokens == 150
    assert found.kl == pytest.approx(expected.sum(-1).mean().item(), rel=1e-3)
    assert found.largest_logit_difference == pytest.approx((p - q).abs().max().item(), rel=1e-3)
    assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    assert 0 < found.top1_agreement < 1


def test_perplexity_is_the_exponent_of_the_mean_loss(pair: tuple[Any, Any, Path, Path]) -> None:
    model, _, folder, _ = pair
    windows = oracle.random_tokens(40, batch=4)
    logits = oracle.logits(model, windows)[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert token_perplexity(open_checkpoint(folder), windows) == pytest.approx(math.exp(loss.item()), rel=1e-4)


def test_windows_each_begin_with_bos_and_hold_every_token_once() -> None:
    windows = text_windows([1, *range(10, 30)], 1, 6)
    assert windows.tolist() == [[1, *range(10 + 5 * i, 15 + 5 * i)] for i in range(4)]


def test_windows_without_bos_and_with_a_rest() -> None:
    assert text_windows(list(range(7)), None, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_short_text_is_one_short_window() -> None:
    assert text_windows([1, 5, 6], 1, 256).tolist() == [[1, 5, 6]]
