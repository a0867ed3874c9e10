"""Kernel backends against the definition of the quantized product, and how one is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from closeness import require_close
from error_parts import raises
from schemes import any_scheme
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.kernels import dispatch
from quantkit.kernels.backend import REFERENCE, Backend, OfferedKernels
from quantkit.kernels.dispatch import BACKENDS, list_allowed_backends, select_backend
from quantkit.model.linear import QuantLinear
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

CPU = torch.device("cpu")
SCHEMES = [
    "int8",
    "int8-asym",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-g32-asym",
    "int4-g128-asym",
]
SIZES = [1, 2, 3, 15, 16, 17, 64]
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
MODES = {"reference": 0.0, "cpu-exact": 2e-4, "cpu-fast": 4e-2}
"""What rounding the products and the activations may cost, of the size of the products."""


def _quantized(
    text: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> QuantTensor:
    return quantize_rtn(torch.randn(rows, columns), any_scheme(text), dtype)


def _require_product(
    product: Tensor,
    x: Tensor,
    weight: QuantTensor,
    bias: Tensor | None,
    tolerance: float,
    case: object,
) -> None:
    """Hold a product against float64, the error against what products of such terms are like."""
    wide = weight.dequantize().double()
    exact = x.double() @ wide.t()
    size = x.double().square() @ wide.square().t()
    if bias is not None:
        exact += bias.double()
        size += bias.double().square()
    assert product.dtype == x.dtype, case
    assert product.shape == exact.shape, case
    assert (product.double() - exact).norm() < tolerance * size.sum().sqrt(), case


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("backend", MODES)
def test_the_product_equals_dequantize_times_x(text: str, backend: str) -> None:
    for dtype, with_bias in itertools.product(DTYPES, (False, True)):
        for size, rows, columns in itertools.product(SIZES, (1, 33), (128, 384)):
            weight = _quantized(text, rows, columns)
            bias = torch.randn(rows).to(dtype) if with_bias else None
            x = torch.randn(size, columns).to(dtype)
            layer = QuantLinear(weight, bias, CPU, dtype, list_allowed_backends(backend))
            tolerance = DTYPES[dtype] + MODES[backend]
            case = dtype, with_bias, size, rows, columns
            _require_product(layer(x), x, weight, bias, tolerance, case)


@pytest.mark.parametrize("backend", MODES)
def test_any_width_that_the_scheme_allows_is_served(backend: str) -> None:
    widths = [("int8", 1), ("int8", 7), ("int8", 129), ("int4", 5), ("int4-g32", 96)]
    for text, columns in widths:
        weight = _quantized(text, 3, columns, torch.float32)
        x = torch.randn(2, columns)
        layer = QuantLinear(weight, None, CPU, torch.float32, list_allowed_backends(backend))
        tolerance = 1e-6 + MODES[backend]
        _require_product(layer(x), x, weight, None, tolerance, (text, columns))


@pytest.mark.parametrize("backend", MODES)
def test_leading_axes_are_kept(backend: str) -> None:
    for lead in ((), (1,), (2, 3), (2, 1, 4)):
        weight = _quantized("int4-g32", 5, 64)
        x = torch.randn(*lead, 64)
        layer = QuantLinear(weight, None, CPU, torch.float32, list_allowed_backends(backend))
        product = layer(x)
        assert product.shape == (*lead, 5)
        _require_product(product, x, weight, None, 1e-6 + MODES[backend], lead)


@pytest.mark.parametrize("backend", MODES)
def test_views_multiply_as_their_copies_and_stay_as_they_are(backend: str) -> None:
    for dtype in DTYPES:
        # Torch may add up the products of a view in another order.
        eps = max(1e-5, torch.finfo(dtype).eps)
        layer = QuantLinear(
            _quantized("int4-g32", 7, 64), None, CPU, dtype, list_allowed_backends(backend)
        )
        base = torch.randn(64, 128).to(dtype)
        before = base.clone()
        for x in (base[:, :64].t(), base[::2, 1:65], base[:, ::2], base[:1, 64:].expand(3, -1)):
            require_close(layer(x), layer(x.contiguous()), dtype, rtol=eps, atol=1e-5)
        assert torch.equal(base, before), dtype


def test_large_values_accumulate_in_float32() -> None:
    weight = QuantTensor(
        torch.full((1, 4096), 255, dtype=torch.uint8),
        torch.ones(1, 1),
        None,
        QuantScheme.parse("int8"),
    )
    x = torch.full((1, 4096), 0.125, dtype=torch.bfloat16)
    x[0, ::2] = -0.125
    x[0, 0] = 0.25
    assert (
        QuantLinear(weight, None, CPU, torch.bfloat16, list_allowed_backends("reference"))(x).item()
        == torch.tensor(0.375 * 127).bfloat16().item()
    )


def test_a_layer_holds_its_backends_tensors_as_buffers_and_trains_nothing() -> None:
    weight = _quantized("int4-g32-asym", 6, 64)
    layer = QuantLinear(
        weight, torch.randn(6), CPU, torch.float16, list_allowed_backends("reference")
    )
    assert weight.zero is not None
    buffers = dict(layer.named_buffers())
    assert set(buffers) == {"codes", "scale", "zero"}
    assert torch.equal(buffers["codes"], weight.codes)
    assert torch.equal(buffers["zero"], weight.zero)
    assert [(name, p.dtype, p.requires_grad) for name, p in layer.named_parameters()] == [
        ("bias", torch.float16, False)
    ]
    assert (layer.in_features, layer.out_features, layer.backend.name) == (64, 6, "reference")


def test_a_layers_state_can_be_handed_to_another() -> None:
    first = QuantLinear(
        _quantized("int8", 6, 64), torch.randn(6), CPU, torch.float32, list_allowed_backends()
    )
    second = QuantLinear(
        _quantized("int8", 6, 64), torch.randn(6), CPU, torch.float32, list_allowed_backends()
    )
    x = torch.randn(2, 64)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


def test_the_reference_backend_serves_every_scheme_and_is_the_last_resort() -> None:
    assert BACKENDS[-1] is REFERENCE
    for text, dtype in itertools.product(SCHEMES, DTYPES):
        allowed = list_allowed_backends("reference")
        assert select_backend(any_scheme(text), CPU, dtype, torch.bfloat16, allowed) is REFERENCE
    assert len({backend.name for backend in BACKENDS}) == len(BACKENDS)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with raises(
        RequestError, found="cuda-magic", expected="cpu-exact, cpu-fast, triton, reference"
    ):
        list_allowed_backends("cuda-magic")


class _Refusing(Backend):
    """A backend that serves nothing, for a reason."""

    def __init__(self, name: str, reason: str | None) -> None:
        self.name = name
        self._reason = reason

    def explain_unsupported(
        self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        return self._reason


def test_without_kernels_each_reason_is_stated_once_and_the_reference_needs_permission(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listed = (
        _Refusing("one", "needs a GPU"),
        _Refusing("two", "needs groups"),
        _Refusing("three", "needs a GPU"),
    )
    monkeypatch.setattr(dispatch, "BACKENDS", (*listed, REFERENCE))
    case = QuantScheme.parse("int8"), CPU, torch.bfloat16, torch.bfloat16
    reasons = "one, three: needs a GPU; two: needs groups"
    with raises(RequestError, "int8", "cpu", "bfloat16", reasons, options=["allow_slow"]):
        select_backend(*case, list_allowed_backends())
    with raises(RequestError, "two: needs groups", options=["allow_slow"]) as caught:
        select_backend(*case, list_allowed_backends("two"))
    assert "one" not in str(caught.value)
    assert not caplog.records
    for _ in range(2):
        assert select_backend(*case, list_allowed_backends(allow_slow=True)) is REFERENCE
    assert select_backend(*case, list_allowed_backends("reference")) is REFERENCE
    (record,) = caplog.records
    assert record.message.startswith("int8 ")
    assert record.message.endswith(reasons)


def test_the_first_backend_that_can_serve_is_chosen_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = (
        _Refusing("one", "needs a GPU"),
        _Refusing("two", None),
        _Refusing("three", None),
        REFERENCE,
    )
    monkeypatch.setattr(dispatch, "BACKENDS", listed)
    case = QuantScheme.parse("int8"), CPU, torch.float32, torch.bfloat16
    for allow_slow in (False, True):
        assert select_backend(*case, list_allowed_backends(allow_slow=allow_slow)) is listed[1]
        assert (
            select_backend(*case, list_allowed_backends("three", allow_slow=allow_slow))
            is listed[2]
        )
    assert select_backend(*case, list_allowed_backends("one", allow_slow=True)) is REFERENCE


def test_integer_activations_are_refused() -> None:
    with raises(RequestError, "torch.int8"):
        select_backend(
            QuantScheme.parse("int8"),
            CPU,
            torch.int8,
            torch.bfloat16,
            list_allowed_backends(allow_slow=True),
        )


class _Mistaken(Backend):
    """A backend that mistakes something."""

    name = "mistaken"

    def __init__(self, mistake: Callable[[Tensor], Tensor]) -> None:
        self._mistake = mistake

    def linear(
        self,
        x: Tensor,
        prepared: dict[str, Tensor],
        scheme: QuantScheme,
        rows: int,
        bias: Tensor | None,
    ) -> Tensor:
        return self._mistake(super().linear(x, prepared, scheme, rows, bias))


def _failing(product: Tensor) -> Tensor:
    raise ValueError("no such\ninstruction")


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (lambda product: product * 1.1, " 1 tokens"),
        (lambda product: product.roll(1, -1), " 1 tokens"),
        (lambda product: product.roll(1, 0), " 4 tokens"),
        (lambda product: product * float("nan"), " 1 tokens"),
        (_failing, "no such instruction"),
    ],
    ids=["scaled", "rows", "tokens", "nan", "failing"],
)
@pytest.mark.parametrize("text", ["int8", "int4-g32-asym"])
def test_a_backend_that_gets_a_small_product_wrong_is_not_used(
    text: str, mistake: Callable[[Tensor], Tensor], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "BACKENDS", (_Mistaken(mistake), REFERENCE))
    case = any_scheme(text), CPU, torch.bfloat16, torch.bfloat16
    assert select_backend(*case, list_allowed_backends(allow_slow=True)) is REFERENCE
    with raises(RequestError, "mistaken: ", named):
        select_backend(*case, list_allowed_backends())


def test_a_model_of_floats_takes_the_operations_of_the_first_backend_that_has_some() -> None:
    class Offering(_Refusing):
        def offer_kernels(self) -> OfferedKernels:
            return offered

    offered, device = OfferedKernels(), torch.device("meta")
    case = device, torch.bfloat16
    allowed = _Refusing("one", "runs on CPUs"), Offering("two", None)
    assert dispatch.offer_kernels_for_floats(*case, allowed) is offered
    for allowed in ((_Refusing("one", "runs on CPUs"), REFERENCE), (REFERENCE,), ()):
        assert dispatch.offer_kernels_for_floats(*case, allowed) is None
