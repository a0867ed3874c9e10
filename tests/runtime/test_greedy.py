"""The likeliest token is that of torch's argmax, and logits that are NaN or Inf are marked."""

from __future__ import annotations

import pytest
import torch

from quantkit.runtime.greedy import find_likeliest, mark_nonfinite


@pytest.mark.parametrize("shape", [(5,), (1, 1023), (3, 1024), (2, 1500), (2, 3, 5000)])
def test_the_largest_of_each_row_is_found(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        # Few values, so that several are the largest.
        logits = torch.randint(-9, 9, shape, generator=generator).float()
        assert torch.equal(find_likeliest(logits), logits.argmax(-1))
        distinct = torch.randn(shape, generator=generator)
        assert torch.equal(find_likeliest(distinct), distinct.argmax(-1))


@pytest.mark.parametrize("place", [0, 511, 512, 1023, 1024, 1299])
def test_it_is_found_at_each_end_of_a_span(place: int) -> None:
    logits = torch.full((1, 1300), -torch.inf)
    logits[0, place] = -1e30
    assert find_likeliest(logits).tolist() == [place]
    logits[0, place] = torch.nan
    assert find_likeliest(logits).tolist() == [place]


def test_rows_may_lie_apart() -> None:
    logits = torch.randn(6, 4000, generator=torch.Generator().manual_seed(0))[::2, 1:2600]
    assert torch.equal(find_likeliest(logits), logits.argmax(-1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_tokens_of_logits_without_sense_are_marked(value: float) -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    logits[1, 700] = value
    assert mark_nonfinite(torch.tensor([4, 5, 6]), logits).tolist() == [4, -1, 6]
