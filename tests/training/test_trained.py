"""What is trained: factors of scales, offsets of codes, and the values that they give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.training.optimizer import FACTOR_RATE, Schedule, factor_rate
from quantkit.training.trained import (
    first_offsets,
    measure_weight_error,
    move,
    move_codes,
    multiply_scales,
)

INT4 = QuantScheme(4, 32)


def weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", [INT4, QuantScheme(4, 32, False), QuantScheme(8, None)], ids=str)
def test_first_offsets_change_no_code(scheme: QuantScheme) -> None:
    """They bring a weight that was rounded elsewhere as close to the float one as its codes
    allow.
    """
    floats = weight()
    step = quantize_rtn(floats, scheme, torch.float32).scale.mean()
    value = quantize_rtn(floats + 0.3 * step * weight(1), scheme, torch.float32)
    offsets = first_offsets(value, floats)
    assert torch.equal(move_codes(value, offsets), value.codes)
    inside = offsets.abs() < 0.48
    closer = (value.codes + offsets - (scheme.levels // 2 if value.zero is None else 0)) * (
        value.scale.repeat_interleave(64 // value.scale.shape[1], 1)
    )
    if value.zero is not None:
        closer -= (value.zero * value.scale).repeat_interleave(64 // value.scale.shape[1], 1)
    assert inside.float().mean() > 0.5
    assert torch.allclose(closer[inside], floats[inside], atol=1e-5)


def test_weights_of_other_channels_give_no_offsets() -> None:
    """As after AWQ, which scales the inputs of a linear."""
    floats, value = weight(), quantize_rtn(weight() * torch.linspace(1, 4, 64), INT4, torch.float32)
    assert measure_weight_error(value, floats) is None
    assert not first_offsets(value, floats).any()


def test_offsets_move_against_the_gradient_by_the_code() -> None:
    """With a negative scale a larger code is a smaller weight."""
    scale = torch.tensor([[0.1], [-0.1]])
    offsets, gradient = torch.zeros(2, 8), torch.ones(2, 8)
    gradient[:, 4:] = -2
    move(offsets, gradient, scale, 0.25)
    signs = torch.tensor([[-1.0] * 4 + [1.0] * 4])
    assert torch.equal(offsets, torch.cat([signs, -signs]) * 0.25)


def test_codes_stay_in_their_range() -> None:
    value = QuantTensor(
        torch.tensor([[0] * 16 + [15] * 16], dtype=torch.uint8), torch.ones(1, 1), None, INT4
    )
    offsets = torch.tensor([[-1.9] * 16 + [1.9] * 16])
    assert torch.equal(move_codes(value, offsets), value.codes)


def test_scales_that_would_overflow_or_vanish_stay() -> None:
    scale = torch.tensor([[60000.0, 6e-8, 0.0, 1.0]], dtype=torch.float16)
    found = multiply_scales(scale, torch.tensor([[0.5, -0.9, 0.5, 0.5]]))
    assert found.tolist() == [[60000.0, scale[0, 1].item(), 0.0, 1.5]]


def test_steps_are_smaller_in_a_larger_model(demo_model: Path) -> None:
    """On SmolLM2-135M, steps as large as those of a small model bring it away from its float
    model.
    """
    config = open_checkpoint(demo_model).config
    assert factor_rate(config) == FACTOR_RATE
    larger = factor_rate(replace(config, hidden_size=576, layers=config.layers[:1] * 30))
    assert 5e-4 < larger < 7e-4


def test_the_schedule_falls_to_zero_and_moves_codes_by_a_tenth_at_most() -> None:
    schedule = Schedule(400)
    shares = [schedule.share(step) for step in range(400)]
    assert max(shares) <= 1
    assert shares[-1] < 0.001
    assert shares[30:] == sorted(shares[30:], reverse=True)
    assert 0.08 < sum(schedule.code_step(step) for step in range(400)) < 0.1
    short = Schedule(4)
    assert max(short.code_step(step) for step in range(4)) < 1e-3
