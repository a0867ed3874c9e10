"""The C++ kernels for rotations, norms and drawing: every instruction set at hand against torch."""

from __future__ import annotations

import math

import pytest
import torch
from instruction_sets import HERE

from quantkit.kernels.library import load_kernels
from quantkit.model.rope import compute_rotations
from quantkit.runtime.greedy import draw_greedily

pytestmark = pytest.mark.cpu_kernels


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("num_pairs", [1, 20, 32], ids="{} pairs".format)
@pytest.mark.parametrize("shape", [(1,), (700,), (2, 1)], ids=str)
def test_positions_turn_by_the_same_angles(
    variant: str, num_pairs: int, shape: tuple[int, ...]
) -> None:
    """Also where some pairs are not rotated, and far beyond any context."""
    positions = torch.randint(0, 2**20, shape, generator=torch.Generator().manual_seed(0))
    frequencies = 10_000 ** -(torch.arange(num_pairs) / num_pairs)
    by_row = frequencies / torch.arange(1, 1 + shape[-1]).unsqueeze(-1)
    of_sequences = torch.stack((by_row, 2 * by_row))
    for turning in (frequencies, by_row, of_sequences):
        expected = compute_rotations(positions, turning, 1.25, 64)
        actual = load_kernels(variant).rotations(positions, turning, 1.25, 64)
        for own, torchs in zip(actual, expected, strict=True):
            assert own.shape == torchs.shape
            torch.testing.assert_close(own, torchs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("is_centered", [False, True], ids=["plain", "centered"])
@pytest.mark.parametrize("size", [1, 20, 576, 4864])
def test_the_norm_is_right_whatever_the_size_of_the_states(
    variant: str, size: int, is_centered: bool
) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    kernels = load_kernels(variant)
    for magnitude in (1e-6, 1.0, 1e6):
        # The mean is not small beside the deviation.
        x = (1 + torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0))) * magnitude
        wide = x.double()
        if is_centered:
            wide = wide - wide.mean(-1, keepdim=True)
        mean_square = wide.square().mean(-1, keepdim=True)
        expected = wide / (mean_square + 1e-5).sqrt() * weight.double()
        normed = kernels.norm(x, weight, 1e-5, is_centered)
        torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
        alone = torch.stack([kernels.norm(row, weight, 1e-5, is_centered) for row in x])
        assert torch.equal(normed, alone)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("vocabulary", [1, 33, 511, 512, 513, 1500, 5000])
def test_the_likeliest_tokens_are_those_of_torch(variant: str, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Few values, so that several are the largest, among them 0.0 and -0.0.
    few = torch.randint(-3, 1, (40, vocabulary), generator=generator) * 0.5
    few = torch.where(torch.rand(few.shape, generator=generator) < 0.5, few, -few.abs())
    for logits in (few, torch.randn(40, vocabulary, generator=generator)):
        tokens, checked = draw_greedily(logits, load_kernels(variant).find_likeliest)
        assert torch.equal(tokens, logits.argmax(-1))
        assert torch.equal(checked, tokens)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 511, 512, 1299])
def test_rows_that_are_not_finite_are_marked(variant: str, value: float, place: int) -> None:
    logits = torch.randn(3, 1300, generator=torch.Generator().manual_seed(0))
    logits[1, place] = math.copysign(value, value)
    expected = logits.argmax(-1)
    tokens, checked = load_kernels(variant).find_likeliest(logits)
    assert torch.equal(tokens, expected)
    assert checked.tolist() == [int(expected[0]), -1, int(expected[2])]


def test_operands_that_do_not_fit_are_refused() -> None:
    kernels = load_kernels()
    with pytest.raises(RuntimeError, match="pairs"):
        kernels.rotations(torch.zeros(2, dtype=torch.long), torch.zeros(33), 1.0, 64)
    with pytest.raises(RuntimeError, match="weight"):
        kernels.norm(torch.zeros(2, 64), torch.zeros(63), 1e-5)
    with pytest.raises(RuntimeError, match="logits"):
        kernels.find_likeliest(torch.zeros(2, 64, dtype=torch.float64))
