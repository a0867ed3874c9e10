"""Figures with their standard errors."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.quality.figures import Estimate, average_estimates, mean_estimate, significant

FIGURES: list[tuple[float, float | None, str]] = [
    (0.012345, 0.00041, "0.0123 ± 0.0004"),
    (0.012346, 0.00014, "0.01235 ± 0.00014"),
    (0.012345, 0.000295, "0.0123 ± 0.0003"),
    (61.2745, 1.234, "61.3 ± 1.2"),
    (9012.3, 351.0, "9000 ± 400"),
    (9012.3, 151.0, "9010 ± 150"),
    (1.00072, 0.00097, "1.0007 ± 0.0010"),
    (0.000104, 0.000004, "0.000104 ± 0.000004"),
    (8.77e-5, 7.4e-7, "(8.77 ± 0.07)e-05"),
    (-0.004, 0.04, "0.00 ± 0.04"),
    (1e-7, 2e-6, "(0.1 ± 2.0)e-06"),
    (0.0, 0.0, "0"),
    (1.0, 0.0, "1.00"),
    (0.123456, None, "0.123"),
    (12345.6, None, "12346"),
    (1.23456e-5, None, "1.23e-05"),
    (9876543.2, None, "9876543"),
    (2.3456e59, None, "2.35e+59"),
    (2.3456e59, 1.2e57, "(2.346 ± 0.012)e+59"),
    (math.inf, 3.0, "inf"),
    (2.0, math.nan, "2.00"),
]
"""Values, their errors, and how they are shown."""


def test_a_figure_has_no_digits_beyond_its_error() -> None:
    for value, error, shown in FIGURES:
        assert str(Estimate(value, error)) == shown, (value, error)


def test_digits_that_count() -> None:
    assert [significant(value, 4) for value in (61.2745, 5.47212, 9012.3, 99999.4, 0.99999)] == [
        "61.27",
        "5.472",
        "9012",
        "99999",
        "1.000",
    ]


def test_another_unit() -> None:
    assert str(Estimate(0.88123, 0.0041).times(100)) == "88.1 ± 0.4"
    assert Estimate(0.5).times(100) == Estimate(50.0)


def test_the_exponent_of_a_mean_of_logarithms() -> None:
    found = Estimate(2.0, 0.01).exp()
    assert found.value == pytest.approx(math.e**2)
    assert found.error == pytest.approx(0.01 * math.e**2)
    assert Estimate(1e6, 1.0).exp().value == math.inf


def test_stretches_of_a_text_are_what_is_independent() -> None:
    """Tokens of one stretch that are all alike are worth no more than one."""
    means = torch.randn(20, dtype=torch.float64)
    found = mean_estimate(means.repeat_interleave(30))
    assert found.value == pytest.approx(means.mean().item())
    assert found.error == pytest.approx(means.std().item() / math.sqrt(20))


def test_the_error_of_independent_tokens_is_theirs() -> None:
    """Over many texts the mean falls as far from the truth as its error says."""
    texts = [mean_estimate(torch.randn(1001, dtype=torch.float64)) for _ in range(300)]
    spread = torch.tensor([one.value for one in texts]).std().item()
    errors = torch.tensor([one.error for one in texts])
    assert errors.square().mean().sqrt().item() == pytest.approx(spread, rel=0.1)
    assert spread == pytest.approx(1 / math.sqrt(1001), rel=0.1)


def test_a_text_too_short_has_no_error() -> None:
    assert mean_estimate(torch.ones(31, dtype=torch.float64)) == Estimate(1.0)
    assert mean_estimate(torch.ones(32, dtype=torch.float64)) == Estimate(1.0, 0.0)


def test_figures_of_several_texts_are_weighted() -> None:
    found = average_estimates([Estimate(1.0, 0.3), Estimate(3.0, 0.4)], [100, 100])
    assert (found.value, found.error) == (2.0, pytest.approx(0.25))
    assert average_estimates([Estimate(1.0, 0.3), Estimate(3.0)], [3, 1]) == Estimate(1.5)
