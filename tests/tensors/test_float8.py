"""Rounding to float8 in float32 arithmetic: what torch's cast and compressed-tensors give."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from quantkit.model.cache_rounding import Fp8Rounding
from quantkit.tensors.float8 import E4M3_MAX, round_to_e4m3

ARGS = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_becomes_what_a_saturating_cast_makes_of_it(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    expected = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    assert expected.isnan().sum() == x.isnan().sum() > 0
    rounded = round_to_e4m3(x)
    assert torch.equal(rounded.nan_to_num(nan=math.pi), expected.nan_to_num(nan=math.pi))


def test_all_float8_numbers_stay_and_ties_go_to_even() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].unique()
    assert torch.equal(round_to_e4m3(every), every)
    ties = (every[1:] + every[:-1]) / 2
    for x in (ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)):
        assert torch.equal(round_to_e4m3(x), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("scale", [0.0123, 1.0, 3e-5])
def test_keys_and_values_are_rounded_as_compressed_tensors_rounds_them(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 50, 16, generator=generator) * torch.logspace(-6, 4, 16)
    values = keys.flip(-1).transpose(1, 2)  # which is not contiguous
    rounded = Fp8Rounding((scale, 2 * scale), "cpu")(keys, values)
    for rows, floats, step in zip(rounded, (keys, values), (scale, 2 * scale), strict=True):
        zero = torch.zeros(1, dtype=torch.float8_e4m3fn)
        assert torch.equal(rows, fake_quantize(floats, torch.tensor([step]), zero, ARGS))
