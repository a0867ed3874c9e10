"""The quantized tensor: packing, round-to-nearest and what the codes mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_names import case
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from error_parts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import any_scheme
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.tensors import qtensor
from quantkit.tensors.qtensor import (
    QuantTensor,
    pack_int32,
    quantize_rtn,
    relative_error,
    unpack_int32,
)
from quantkit.tensors.scheme import QuantScheme

SCHEMES = [
    "int8",
    "int8-asym",
    "int8-g32",
    "int4",
    "int4-g32",
    "int4-g64",
    "int4-g32-asym",
    "int4-g64-asym",
]
SCALE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]

quick = settings(deadline=None, max_examples=30, derandomize=True)


def _codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)


def _weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


def _dequantized(quantized: QuantTensor) -> Tensor:
    """The definition in float64, one group at a time."""
    rows, columns = quantized.shape
    size = quantized.scheme.group_size or columns
    result = torch.empty(rows, columns, dtype=torch.float64)
    for group in range(columns // size):
        part = slice(group * size, (group + 1) * size)
        zero = torch.full((rows,), 2.0 ** (quantized.scheme.bits - 1), dtype=torch.float64)
        if quantized.zero is not None:
            zero = quantized.zero[:, group].double()
        steps = quantized.codes[:, part].double() - zero[:, None]
        result[:, part] = quantized.scale[:, group].double()[:, None] * steps
    return result


def _steps(quantized: QuantTensor) -> Tensor:
    """The stored scale of every element [O, I], in float64."""
    return quantized.scale.double().repeat_interleave(
        quantized.shape[1] // quantized.scale.shape[1], dim=1
    )


@quick
@given(
    bits=st.sampled_from([4, 8]),
    lead=st.lists(st.integers(1, 4), max_size=2),
    count=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_unpacking_undoes_packing_for_any_shape(
    bits: int, lead: list[int], count: int, seed: int
) -> None:
    codes = _codes((*lead, count), bits, seed)
    words = pack_int32(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (*lead, math.ceil(count * bits / 32))
    assert torch.equal(unpack_int32(words, bits, count), codes)


@quick
@given(
    bits=st.sampled_from([4, 8]),
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6),
)
def test_packing_undoes_unpacking_for_any_words(bits: int, words: list[int]) -> None:
    packed = torch.tensor([words], dtype=torch.int32)
    codes = unpack_int32(packed, bits, len(words) * 32 // bits)
    assert int(codes.max()) < 1 << bits
    assert torch.equal(pack_int32(codes, bits), packed)


@quick
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    axis=st.sampled_from([0, 1]),
)
def test_packing_equals_that_of_compressed_tensors(
    bits: int, rows: int, columns: int, axis: Any
) -> None:
    codes = _codes((rows, columns), bits)
    signed = (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    expected = pack_to_int32(signed, bits, packed_dim=axis)
    if axis == 1:
        packed = pack_int32(codes, bits)
    else:
        packed = pack_int32(codes.t(), bits).t()
    assert torch.equal(packed, expected)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda base: base.t(),
    "every-other-column": lambda base: base[:, ::2],
    "every-other-row": lambda base: base[::2],
    "inner-columns": lambda base: base[:, 1:9],
    "one-column": lambda base: base[:, 3:4],
    "one-row": lambda base: base[2:3],
    "one-element": lambda base: base.t()[1:2, 1:2],
    "odd-offset": lambda base: base[0, 1:9],
    "expanded": lambda base: base[:1].expand(3, -1),
}


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_a_view_equals_packing_its_copy(bits: int) -> None:
    for name, view in VIEWS.items():
        codes = view(_codes((8, 16), bits))
        expected = pack_int32(codes.clone(memory_format=torch.contiguous_format), bits)
        assert torch.equal(pack_int32(codes, bits), expected), name
        assert torch.equal(unpack_int32(expected, bits, codes.shape[-1]), codes), name


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_a_view_equals_unpacking_its_copy(bits: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (8, 16), dtype=torch.int32)
    for name, view in VIEWS.items():
        chosen = view(words)
        count = chosen.shape[-1] * 32 // bits - 1
        expected = unpack_int32(torch.tensor(chosen.tolist(), dtype=torch.int32), bits, count)
        assert torch.equal(unpack_int32(chosen, bits, count), expected), name


@quick
@given(
    text=st.sampled_from(SCHEMES),
    dtype=st.sampled_from(SCALE_DTYPES),
    seed=st.integers(0, 999),
    spread=st.sampled_from([1e-3, 1.0, 300.0]),
    shift=st.sampled_from([-3.0, 0.0, 0.4, 3.0]),
    stored=st.sampled_from(SCALE_DTYPES),
)
def test_every_weight_gets_the_nearest_code_and_errs_by_half_a_step(
    text: str, dtype: torch.dtype, seed: int, spread: float, shift: float, stored: torch.dtype
) -> None:
    weight = ((_weight(3, 128, seed) + shift) * spread).to(dtype)
    quantized = quantize_rtn(weight, any_scheme(text), stored)
    assert quantized.scale.dtype == stored
    step = _steps(quantized)
    error = (_dequantized(quantized) - weight.double()).abs()
    # Rounding the scale moves the ends of the grid: by so much, and no more.
    reach = quantized.scheme.levels * (1.0 if quantized.zero is not None else 0.5)
    kind = torch.finfo(stored)
    slack = reach * (kind.eps * step).clamp(min=kind.eps * kind.smallest_normal) / step
    assert (error <= step * (0.5 + slack)).all()
    low = _dequantized(_with_codes(quantized, 0))
    high = _dequantized(_with_codes(quantized, quantized.scheme.levels - 1))
    inside = (weight.double() >= low) & (weight.double() <= high)
    assert inside.double().mean() > 0.9
    assert (error <= step * (0.5 + 1e-4))[inside].all()


def _with_codes(quantized: QuantTensor, code: int) -> QuantTensor:
    return QuantTensor(
        torch.full_like(quantized.codes, code), quantized.scale, quantized.zero, quantized.scheme
    )


def test_dequantizing_follows_the_definition() -> None:
    for text, dtype in itertools.product(SCHEMES, SCALE_DTYPES):
        quantized = quantize_rtn(_weight(5, 128), any_scheme(text), dtype)
        expected = _dequantized(quantized)
        floats = quantized.dequantize()
        assert floats.dtype == torch.float32, (text, dtype)
        # One product, rounded once.
        assert torch.equal(floats, expected.float()), (text, dtype)
        assert expected.abs().max() > 1, (text, dtype)


@pytest.mark.parametrize("text", ["int8", "int8-g32", "int4-g32", "int4"])
def test_symmetric_grid_values_survive_exactly(text: str) -> None:
    scheme = any_scheme(text)
    maximum = scheme.levels // 2 - 1
    weight = (torch.arange(64) * 5 % (2 * maximum + 1) - maximum).float()[None]
    weight[0, 0::32] = -(scheme.levels - 1) / 2  # makes every scale 1
    quantized = quantize_rtn(weight, scheme, torch.float32)
    assert torch.equal(quantized.scale, torch.ones_like(quantized.scale))
    on_grid = weight == weight.round()
    assert on_grid.sum() == 62
    assert torch.equal(quantized.dequantize()[on_grid], weight[on_grid])


@pytest.mark.parametrize("text", ["int4-g32-asym", "int8-asym"])
@pytest.mark.parametrize("zero", [0, 1, 7, 15])
def test_asymmetric_grid_values_survive_exactly(text: str, zero: int) -> None:
    scheme = any_scheme(text)
    codes = torch.arange(64) % scheme.levels if scheme.bits == 4 else torch.arange(64) * 4
    codes[-1] = codes[31] = scheme.levels - 1
    weight = 0.25 * (codes - zero).float()[None]
    quantized = quantize_rtn(weight, scheme, torch.bfloat16)
    assert quantized.zero is not None
    assert torch.equal(quantized.zero, torch.full_like(quantized.zero, zero))
    assert torch.equal(quantized.dequantize(), weight)


def test_groups_of_zeros_stay_zero_next_to_others() -> None:
    weight = _weight(3, 128)
    weight[1] = 0
    weight[2, :64] = 0
    for text, dtype in itertools.product(SCHEMES, SCALE_DTYPES):
        quantized = quantize_rtn(weight, any_scheme(text), dtype)
        assert torch.isfinite(quantized.scale).all(), (text, dtype)
        assert (quantized.scale > 0).all(), (text, dtype)
        assert (quantized.dequantize()[weight == 0] == 0).all(), (text, dtype)


def test_constant_groups_keep_their_value_within_half_a_step() -> None:
    for text, value in itertools.product(SCHEMES, (0.75, -0.75, 1e-20, -1e20)):
        quantized = quantize_rtn(torch.full((2, 64), value), any_scheme(text), torch.float32)
        floats = quantized.dequantize().double()
        step = float(quantized.scale.max())
        assert (floats - value).abs().max() <= 0.50001 * step, (text, value)
        if not quantized.scheme.symmetric:
            assert (floats / value - 1).abs().max() < 1e-6, (text, value)


@pytest.mark.parametrize("text", ["int4-g32", "int8", "int4-g32-asym", "int8-asym"])
def test_one_huge_outlier_spoils_its_own_group_only(text: str) -> None:
    weight = _weight(2, 64)
    weight[0, 3] = 1e6
    scheme = any_scheme(text)
    quantized = quantize_rtn(weight, scheme, torch.float32)
    floats = quantized.dequantize()
    assert abs(float(floats[0, 3]) / 1e6 - 1) < 0.6 / scheme.levels * 2
    calm = quantize_rtn(_weight(2, 64), scheme, torch.float32).dequantize()
    assert torch.equal(floats[1], calm[1])
    if scheme.group_size == 32:
        assert torch.equal(floats[0, 32:], calm[0, 32:])


@pytest.mark.parametrize("sign", [1, -1])
def test_one_sided_groups_use_the_whole_asymmetric_range(sign: int) -> None:
    weight = sign * (_weight(4, 64).abs() + 0.1)
    quantized = quantize_rtn(weight, QuantScheme.parse("int4-g32-asym"), torch.float32)
    assert quantized.zero is not None
    assert torch.equal(quantized.zero, torch.full_like(quantized.zero, 0 if sign > 0 else 15))
    farthest = (
        quantized.codes.view(4, 2, 32).amax(-1)
        if sign > 0
        else quantized.codes.view(4, 2, 32).amin(-1)
    )
    assert torch.equal(farthest, torch.full_like(farthest, 15 if sign > 0 else 0))


@pytest.mark.parametrize("text", SCHEMES)
def test_quantizing_leaves_its_input_alone_and_repeats(text: str) -> None:
    weight = _weight(5, 128)
    before = weight.clone()
    first = quantize_rtn(weight, any_scheme(text), torch.bfloat16)
    second = quantize_rtn(weight, any_scheme(text), torch.bfloat16)
    relative_error(first, weight)
    first.dequantize().mul_(2)
    assert torch.equal(weight, before)
    _require_equal(first, second)


@pytest.mark.parametrize("text", ["int8", "int4-g32", "int4-g32-asym"])
@pytest.mark.parametrize("elements", [1, 64, 200])
def test_the_chunk_size_changes_nothing(
    text: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _weight(7, 64)
    whole = quantize_rtn(weight, any_scheme(text), torch.bfloat16)
    error = relative_error(whole, weight)
    monkeypatch.setattr(qtensor, "CHUNK_ELEMENTS", elements)
    _require_equal(quantize_rtn(weight, any_scheme(text), torch.bfloat16), whole)
    assert relative_error(whole, weight) == pytest.approx(error, rel=1e-12)


def _require_equal(value: QuantTensor, expected: QuantTensor) -> None:
    assert torch.equal(value.codes, expected.codes)
    assert torch.equal(value.scale, expected.scale)
    assert (value.zero is None) == (expected.zero is None)
    if value.zero is not None and expected.zero is not None:
        assert torch.equal(value.zero, expected.zero)


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("text", ["int8", "int4-g32-asym"])
def test_non_contiguous_weights_quantize_as_their_copies(text: str, dtype: torch.dtype) -> None:
    scheme = any_scheme(text)
    weight = _weight(64, 6).to(dtype).t()
    _require_equal(
        quantize_rtn(weight, scheme, dtype), quantize_rtn(weight.contiguous(), scheme, dtype)
    )


def test_a_group_that_does_not_divide_the_row_is_refused() -> None:
    with raises(RequestError, "int4-g64", found="96 columns"):
        quantize_rtn(_weight(2, 96), QuantScheme.parse("int4-g64"), torch.float32)


CODES, SCALE, ZERO = (
    torch.zeros(4, 64, dtype=torch.uint8),
    torch.ones(4, 2),
    torch.zeros(4, 2, dtype=torch.uint8),
)
# What is wrong, and the word for the part that the error names.
CONTRADICTIONS: dict[str, tuple[Tensor, Tensor, Tensor | None, str, str]] = {
    "signed codes": (CODES.to(torch.int8), SCALE, None, "int4-g32", "codes"),
    "flat codes": (CODES[0], SCALE, None, "int4-g32", "codes"),
    "scale of another group size": (CODES, SCALE[:, :1], None, "int4-g32", "scale"),
    "scale of other rows": (CODES, SCALE[:3], None, "int4-g32", "scale"),
    "flat scale": (CODES, SCALE[:, 0], None, "int4", "scale"),
    "zero with a symmetric scheme": (CODES, SCALE, ZERO, "int4-g32", "zero"),
    "no zero with an asymmetric one": (CODES, SCALE, None, "int4-g32-asym", "zero"),
    "zero of another shape": (CODES, SCALE, ZERO[:, :1], "int4-g32-asym", "zero"),
    "zero of floats": (CODES, SCALE, ZERO.float(), "int4-g32-asym", "zero"),
}


def test_tensors_that_contradict_the_scheme_are_refused() -> None:
    for name, (codes, scale, zero, text, part) in CONTRADICTIONS.items():
        with case(name), pytest.raises(ValueError, match=part):
            QuantTensor(codes, scale, zero, any_scheme(text))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64], ids=str)
def test_scales_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="scale"):
        QuantTensor(CODES, SCALE.to(dtype), None, QuantScheme.parse("int4-g32"))


@pytest.mark.parametrize("text", ["int8", "int4-g32", "int4-g32-asym"])
def test_rows_equal_a_slice_and_share_memory(text: str) -> None:
    quantized = quantize_rtn(_weight(6, 64), any_scheme(text), torch.float32)
    part = quantized.rows(2, 5)
    assert part.shape == (3, 64)
    assert torch.equal(part.dequantize(), quantized.dequantize()[2:5])
    assert part.codes.untyped_storage().data_ptr() == quantized.codes.untyped_storage().data_ptr()


@quick
@given(
    text=st.sampled_from(SCHEMES),
    seed=st.integers(0, 99),
    power=st.integers(-8, 8),
    dtype=st.sampled_from(SCALE_DTYPES[:2]),
)
def test_relative_error_equals_a_direct_computation(
    text: str, seed: int, power: int, dtype: torch.dtype
) -> None:
    weight = (_weight(4, 128, seed) * 10.0**power).to(dtype)
    quantized = quantize_rtn(weight, any_scheme(text), torch.float32)
    exact = weight.double()
    expected = float(((_dequantized(quantized) - exact).norm() / exact.norm()).item())
    assert expected > 0
    assert relative_error(quantized, weight) == pytest.approx(expected, rel=1e-4)


def test_relative_error_of_zeros_is_zero() -> None:
    weight = torch.zeros(2, 64)
    assert (
        relative_error(quantize_rtn(weight, QuantScheme.parse("int8"), torch.float32), weight) == 0
    )
