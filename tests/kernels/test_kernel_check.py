"""What the trial of a backend at load finds out, and that it lets pass what is right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from instruction_sets import HERE
from schemes import any_scheme
from torch import Tensor

from quantkit.kernels import dispatch as check
from quantkit.kernels.backend import Backend
from quantkit.kernels.cpu import CpuBackend
from quantkit.kernels.dispatch import BACKENDS, is_within, self_test
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEMES = ("int8", "int8-asym", "int4", "int4-g32-asym", "int4-g64", "int4-g128")
ROWS = check.SMALL.rows


class Wrapped:
    """A backend that gets something wrong."""

    name = "wrapped"

    def __init__(self, inner: str) -> None:
        self.inner = next(backend for backend in BACKENDS if backend.name == inner)
        assert self.inner.explain_unsupported(QuantScheme(8, None), CPU, torch.float32) is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WrongRow(Wrapped):
    """One row of products is too large; of so many tokens, or of any number."""

    def __init__(self, inner: str, row: int, share: float, tokens: int | None = None) -> None:
        super().__init__(inner)
        self.row, self.share, self.tokens = row, share, tokens

    def linear(self, x: Tensor, *rest: Any) -> Tensor:
        product: Tensor = self.inner.linear(x, *rest)
        if self.tokens in (None, len(x)):
            product[:, self.row] *= 1 + self.share
        return product


class WrongScales(Wrapped):
    """Scales of one dtype are read wrongly, where `places` is."""

    def __init__(
        self, inner: str, dtype: torch.dtype, places: tuple[slice, slice], share: float
    ) -> None:
        super().__init__(inner)
        self.dtype, self.places, self.share = dtype, places, share

    def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
        scale = weight.scale.clone()
        if scale.dtype == self.dtype:
            scale[self.places] *= 1 + self.share
        return self.inner.prepare(QuantTensor(weight.codes, scale, weight.zero, weight.scheme))


MODES = ("reference", "cpu-exact", "cpu-fast")


@pytest.mark.parametrize("inner", MODES)
def test_one_wrong_row_is_found_out(inner: str) -> None:
    for text, share in itertools.product(("int8", "int4-g128-asym"), (0.15, 0.02)):
        for row, dtype, scale_dtype in itertools.product((0, 17, ROWS - 1), DTYPES, DTYPES[:2]):
            wrong = WrongRow(inner, row, share)
            problem = self_test(wrong, any_scheme(text), CPU, dtype, scale_dtype)
            assert problem is not None, (text, share, row, dtype, scale_dtype)


@pytest.mark.parametrize("inner", MODES)
def test_a_row_that_is_wrong_for_some_number_of_tokens_is_found_out(inner: str) -> None:
    for tokens in check.SMALL.tokens:
        for row in (0, 17, ROWS - 1):
            wrong = WrongRow(inner, row, 0.15, tokens)
            scheme = QuantScheme.parse("int4-g32")
            problem = self_test(wrong, scheme, CPU, torch.bfloat16, torch.bfloat16)
            assert problem is not None, (tokens, row)
            assert str(tokens) in problem


@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("wrong", DTYPES, ids=str)
def test_scales_of_one_dtype_that_are_read_wrongly_are_found_out(
    wrong: torch.dtype, inner: str
) -> None:
    scheme = QuantScheme.parse("int4-g32")
    for places in (
        (slice(5, 6), slice(None)),
        (slice(None), slice(4, None)),
        (slice(36, None), slice(1, 2)),
    ):
        backend = WrongScales(inner, wrong, places, -0.15)
        for scale_dtype in DTYPES:
            found = self_test(backend, scheme, CPU, torch.bfloat16, scale_dtype)
            assert (found is not None) == (scale_dtype == wrong), places


@pytest.mark.parametrize("inner", MODES)
def test_zero_points_and_negative_scales_that_are_lost_are_found_out(inner: str) -> None:
    class Positive(Wrapped):
        def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
            return self.inner.prepare(
                QuantTensor(weight.codes, weight.scale.abs(), weight.zero, weight.scheme)
            )

    class Centred(Wrapped):
        def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
            zero = torch.full_like(weight.zero, 8)
            return self.inner.prepare(QuantTensor(weight.codes, weight.scale, zero, weight.scheme))

    for kind in (Positive, Centred):
        assert self_test(
            kind(inner), QuantScheme.parse("int4-g64-asym"), CPU, torch.bfloat16, torch.bfloat16
        )


@pytest.mark.slow
@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_what_is_right_passes(variant: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    _require_no_fault(CpuBackend(variant, exact=exact))


def test_the_reference_passes() -> None:
    _require_no_fault(Backend())


def _require_no_fault(backend: Backend) -> None:
    for text, dtype, scale_dtype in itertools.product(SCHEMES, DTYPES, DTYPES):
        scheme = any_scheme(text)
        assert backend.explain_unsupported(scheme, CPU, dtype) is None
        assert self_test(backend, scheme, CPU, dtype, scale_dtype) is None, (
            text,
            dtype,
            scale_dtype,
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "size", [check.SMALL, *check.ON_GPUS], ids=["small", "gpu", "gpu, whole units"]
)
def test_the_example_has_what_real_weights_have(size: check._Size) -> None:
    for text in (*SCHEMES, "int4-g4096"):
        scheme = any_scheme(text)
        weight = check._example(scheme, size, torch.bfloat16)
        rows, columns = weight.shape
        assert set(weight.codes.unique().tolist()) == set(range(scheme.levels)), text
        assert weight.scale.dtype == torch.bfloat16, text
        assert (weight.scale > 0).any(), text
        assert (weight.scale < 0).any(), text
        assert weight.scale.abs().max() > 100 * weight.scale.abs().min() > 0, text
        assert rows % 16, text
        assert columns >= size.columns, text
        if size.has_odd_columns:
            groups = weight.scale.shape[1]
            assert groups % 2 == 1, text
            if scheme.group_size is None:
                assert columns % 32, text
            else:
                assert groups > 1, text
        if weight.zero is not None:
            assert weight.zero.unique().numel() > 10, text
        if size in check.ON_GPUS:
            assert {2, 16, 128} <= set(size.tokens)
            if not size.has_odd_columns:
                assert columns == 4096, text
            else:
                assert columns % 128 or (scheme.group_size or 0) % 128 == 0, text


def test_a_number_that_is_not_finite_is_not_within_anything() -> None:
    right = torch.ones(1, 2, dtype=torch.float64)
    assert is_within(torch.ones(1, 2), right, 0 * right)
    assert not is_within(torch.ones(1, 1), right, right)
    for wrong in (torch.nan, torch.inf):
        assert not is_within(torch.tensor([[1.0, wrong]]), right, 100 * right)
