"""The Triton kernels against float64: through Triton's interpreter, or on a GPU where there is one.

`test_triton_interpreter` runs this file in a separate process, as Triton's interpreter is chosen
before it is imported. On a GPU: ``pytest tests/kernels/triton_products.py``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from error_parts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import any_scheme
from torch import Tensor
from triton_quick import quicken

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import RequestError
from quantkit.kernels import triton_gemm, triton_linear, triton_skinny, triton_tune
from quantkit.kernels.dispatch import list_allowed_backends, select_backend, self_test
from quantkit.kernels.triton_backend import TritonBackend
from quantkit.kernels.triton_linear import linear_product
from quantkit.kernels.triton_tiles import TileConfig
from quantkit.kernels.triton_words import INTERPRETED, MAGIC
from quantkit.model.linear import QuantLinear
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

quicken()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SCHEMES = (
    "int8",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-g32-asym",
    "int4-g64-asym",
    "int4-g128-asym",
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONFIGS = (
    (1, TileConfig("gemv", 1, 16, 1)),
    (3, TileConfig("gemv", 4, 8, 2, split=2)),
    (5, TileConfig("gemm", 16, 16, 1)),
    (17, TileConfig("gemm", 16, 32, 2, split=2)),
    (9, TileConfig("matmul", 1, 16, 2)),
)
"""Numbers of tokens, and tile configs that leave tiles half empty for them."""

SKINNY = (
    (1, 19, 4, 1, TileConfig("skinny", 8, 16, 1, split=3, warps=1)),
    (3, 1, 5, 0, TileConfig("skinny", 8, 16, 2, split=2, warps=1)),
    (5, 40, 6, 0, TileConfig("skinny", 8, 32, 2, split=2, warps=1)),
    (16, 35, 1, 1, TileConfig("skinny", 16, 32, 1, warps=1)),
)
"""Numbers of tokens, of rows, of whole units of columns and of groups beyond them, and tile
configs.
"""

WRITERS = ("cached_attention", "projected_heads", "added_product", "gated_product")
"""Operators that write to arguments, besides ``linear``."""

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"
)


def _random(
    text: str, rows: int, columns: int, scale_dtype: torch.dtype = torch.float16
) -> QuantTensor:
    """Codes over the whole range, scales of many sizes, any zero points."""
    scheme = any_scheme(text)
    shape = rows, scheme.groups(columns)
    zero = None if scheme.symmetric else torch.randint(0, scheme.levels, shape, dtype=torch.uint8)
    codes = torch.randint(0, scheme.levels, (rows, columns), dtype=torch.uint8)
    return QuantTensor(codes, (torch.rand(shape) + 0.01).to(scale_dtype), zero, scheme)


def _product(x: Tensor, weight: QuantTensor, bias: Tensor | None, config: TileConfig) -> Tensor:
    prepared = TritonBackend().prepare(weight.to(DEVICE))
    words, scale, arrived = prepared["words"], prepared["scale"], prepared["arrived"]
    bias = None if bias is None else bias.to(DEVICE)
    zero, group = prepared.get("zero"), weight.scheme.group_size
    return linear_product(x.to(DEVICE), words, scale, zero, bias, group, config, arrived).cpu()


def _require_right(
    found: Tensor,
    x: Tensor,
    weight: QuantTensor,
    bias: Tensor | None,
    rounding_of_weights: float = 0.5,
) -> None:
    """Each product within the rounding of weights, of the result, and of float32 sums in any
    order.
    """
    wide = weight.dequantize().double()
    expected = x.double() @ wide.t()
    terms = x.double().abs() @ wide.abs().t()
    if bias is not None:
        expected += bias.double()
    rounding = torch.finfo(x.dtype).eps
    bound = (
        rounding * rounding_of_weights + torch.finfo(torch.float32).eps * x.shape[1]
    ) * terms + rounding * expected.abs()
    assert found.dtype == x.dtype
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((text, DTYPES[number % 3]) for number, text in enumerate(SCHEMES)),
        *(("int4-g32-asym", dtype) for dtype in (torch.float32, torch.bfloat16)),
        ("int8", torch.bfloat16),
    ],
    ids=str,
)
def test_every_path_is_right_for_awkward_shapes(text: str, dtype: torch.dtype) -> None:
    group = any_scheme(text).group_size
    for number, (tokens, config) in enumerate(CONFIGS):
        columns = (
            (1, 300, 129, 513, 256)[number]
            if group is None
            else 128 * (0, 2, 1, 4, 2)[number] + group
        )
        weight = _random(text, (19, 1, 17, 40, 17)[number], columns)
        x = torch.randn(tokens, columns).to(dtype)
        bias = None if number == 1 else torch.randn(weight.shape[0]).to(dtype)
        _require_right(_product(x, weight, bias, config), x, weight, bias)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [(text, DTYPES[1 + number % 2]) for number, text in enumerate((*SCHEMES, "int8"))],
    ids=str,
)
def test_few_tokens_meet_codes_that_nothing_rounds(text: str, dtype: torch.dtype) -> None:
    group = any_scheme(text).group_size
    for tokens, rows, units, beyond, config in SKINNY:
        weight = _random(text, rows, 128 * units + beyond * (group or 47))
        x = torch.randn(tokens, weight.shape[1]).to(dtype)
        bias = None if tokens == 3 else torch.randn(rows).to(dtype)
        found = _product(x, weight, bias, config)
        _require_right(found, x, weight, bias, rounding_of_weights=0)


def test_programs_that_share_rows_leave_their_counters_as_they_were() -> None:
    prepared = TritonBackend().prepare(_random("int4-g64", 40, 640).to(DEVICE))
    x = torch.randn(2, 640).to(DEVICE, torch.bfloat16)
    config = TileConfig("skinny", 8, 16, 1, split=4, warps=1)
    products = [
        linear_product(
            x, prepared["words"], prepared["scale"], None, None, 64, config, prepared["arrived"]
        )
        for _ in range(2)
    ]
    assert torch.equal(*products)
    assert prepared["arrived"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "scale_dtype"),
    [
        ("int8", torch.float16),
        ("int4-g128", torch.float16),
        ("int4-g32-asym", torch.float16),
        ("int4-g64-asym", torch.bfloat16),
    ],
    ids=str,
)
def test_tensor_cores_take_weights_that_were_rounded_once(
    text: str, scale_dtype: torch.dtype
) -> None:
    weight, x = _random(text, 70, 384, scale_dtype), torch.eye(384, dtype=torch.float16)
    found = _product(x, weight, None, TileConfig("gemm", 512 if INTERPRETED else 64, 128, 2))
    assert torch.equal(found.t(), weight.dequantize().half())


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    text=st.sampled_from(SCHEMES),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 40),
    rows=st.integers(1, 70),
    groups=st.integers(1, 6),
    ragged=st.integers(0, 127),
    path=st.sampled_from(["gemv", "skinny", "gemm", "matmul"]),
    units=st.sampled_from([1, 2, 4]),
    split=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**20),
)
def test_drawn_shapes_are_right(
    text: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    tokens: int,
    rows: int,
    groups: int,
    ragged: int,
    path: str,
    units: int,
    split: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    group = any_scheme(text).group_size
    weight = _random(
        text, rows, groups * 32 + ragged if group is None else groups * group, scale_dtype
    )
    few = path == "gemv" or path == "skinny"
    tokens = min(tokens, 8) if few else tokens
    path = "gemv" if path == "skinny" and dtype == torch.float32 else path
    config = TileConfig(
        path=path,
        block_m=8 if few else 16,
        block_n=64,
        units=units,
        split=1 if path == "matmul" else split,
    )
    x, bias = torch.randn(tokens, weight.shape[1]).to(dtype), torch.randn(rows).to(dtype)
    _require_right(_product(x, weight, bias, config), x, weight, bias)


@pytest.mark.parametrize("text", ["int8", "int4-g32-asym"])
def test_a_large_weight_is_made_floats_in_parts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_linear, "FLOAT_BYTES", 300 * 96 * 4)
    weight, x, bias = _random(text, 600, 96), torch.randn(9, 96), torch.randn(600)
    parts, multiply = [], torch.nn.functional.linear

    def linear(x: Tensor, part: Tensor, bias: Tensor | None) -> Tensor:
        parts.append(part.shape)
        return multiply(x, part, bias)

    monkeypatch.setattr(triton_linear.F, "linear", linear)
    found = _product(x, weight, bias, TileConfig("matmul", 1, 256, 1))
    assert parts == [(256, 96), (256, 96), (88, 96)]
    _require_right(found, x, weight, bias)


@pytest.mark.parametrize("path", ["gemv", "gemm"])
@pytest.mark.parametrize("text", ["int8", "int4-g32-asym"])
def test_split_rows_give_the_same_each_time_and_what_whole_ones_give(path: str, text: str) -> None:
    weight, x = _random(text, 20, 640), torch.randn(2, 640)
    whole, split = (
        TileConfig(path=path, block_m=2 if path == "gemv" else 16, block_n=32, units=1, split=parts)
        for parts in (1, 4)
    )
    found = _product(x, weight, None, split)
    assert torch.equal(found, _product(x, weight, None, split))
    torch.testing.assert_close(found, _product(x, weight, None, whole), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("path", ["gemv", "skinny", "gemm"])
@pytest.mark.parametrize("text", ["int8", "int4-g32"])
def test_what_is_not_finite_stays_with_its_token(path: str, text: str) -> None:
    weight, x = _random(text, 20, 160), torch.randn(3, 160, dtype=torch.float16)
    x[1, 40] = torch.nan
    found = _product(
        x, weight, None, TileConfig(path, {"gemv": 4, "skinny": 8, "gemm": 16}[path], 32, 1)
    )
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("path", ["gemv", "skinny", "gemm"])
def test_sums_are_kept_in_float32(path: str) -> None:
    weight = QuantTensor(
        torch.full((1, 4096), 255, dtype=torch.uint8),
        torch.ones(1, 1),
        None,
        QuantScheme.parse("int8"),
    )
    x = torch.full((1, 4096), 0.125, dtype=torch.bfloat16)
    x[0, ::2] = -0.125
    x[0, 0] = 0.25
    found = _product(
        x, weight, None, TileConfig(path, {"gemv": 1, "skinny": 8, "gemm": 16}[path], 16, 4)
    )
    assert found.item() == torch.tensor(0.375 * 127).bfloat16().item()


@pytest.mark.parametrize("text", ["int8", "int4-g64"])
def test_a_layer_takes_views_leading_axes_and_nothing(text: str) -> None:
    weight = _random(text, 7, 64)
    layer = QuantLinear(
        weight, torch.randn(7), DEVICE, torch.float32, list_allowed_backends("triton")
    )
    base = torch.randn(64, 128, device=DEVICE)
    for x in (base[:, :64].t()[:3], base[:6:2, 1:65].unflatten(0, (3, 1)), base[0, ::2]):
        found = layer(x)
        assert found.shape == (*x.shape[:-1], 7)
        torch.testing.assert_close(found, layer(x.contiguous()))
        wide = weight.dequantize().double().to(DEVICE)
        expected = x.double() @ wide.t() + layer.bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-2)
    assert layer(base[:0, :64]).shape == (0, 7)


def test_the_operators_pass_torchs_own_checks() -> None:
    for text, group in (("int8", None), ("int4-g32-asym", 32)):
        weight = _random(text, 20, 96).to(DEVICE)
        prepared = TritonBackend().prepare(weight)
        x, bias = (
            torch.randn(2, 96, device=DEVICE),
            torch.randn(20, device=DEVICE) if group is None else None,
        )
        operands = (
            x,
            prepared["words"],
            prepared["scale"],
            prepared.get("zero"),
            bias,
            group,
            prepared["arrived"],
        )
        torch.library.opcheck(torch.ops.quantkit_triton.linear.default, operands)


def test_operators_that_write_to_arguments_are_given_all_of_them() -> None:
    """torch 2.11 does not find an argument that is written to and left to its default."""
    TritonBackend().offer_kernels()  # registers them
    operators = torch.ops.quantkit_triton
    schemas = [getattr(operators, name).default._schema for name in ("linear", *WRITERS)]
    assert all(schema.is_mutable for schema in schemas)
    assert not [
        one.name for schema in schemas for one in schema.arguments if one.has_default_value()
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_compiles_into_one_graph(backend: str) -> None:
    layer = QuantLinear(
        _random("int4-g32", 20, 96), None, DEVICE, torch.bfloat16, list_allowed_backends("triton")
    )
    compiled = torch.compile(lambda x: torch.relu(layer(x)) + 1, backend=backend, fullgraph=True)
    x = torch.randn(2, 96, device=DEVICE).bfloat16()
    with torch.inference_mode():
        assert torch.equal(compiled(x), torch.relu(layer(x)) + 1)


@pytest.mark.parametrize("text", ["int8", "int4-g128"])
def test_a_model_says_what_the_reference_says(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model") / text
    quantkit.quantize(DEMO_MODEL, folder, text, method="rtn", accept_quality_loss=True)
    said = []
    for backend in ("triton", "reference"):
        model, tokenizer = quantkit.load(
            folder, device=DEVICE, dtype=torch.float32, backend=backend
        )
        said.append(
            list(quantkit.generate(model, tokenizer.encode("The first time"), max_new_tokens=2))
        )
    assert said[0] == said[1]
    assert len(said[0]) == 2


@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        ("gemv", torch.float32),
        ("skinny", torch.bfloat16),
        ("gemm", torch.bfloat16),
        ("floats", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["int8", "int4-g32"])
def test_a_kernel_that_multiplies_wrongly_is_found_out_at_load(
    text: str, path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: ModuleType = {"skinny": triton_skinny, "gemm": triton_gemm}.get(path, triton_linear)
    wrong = getattr(module, path)
    wrap = module.wrap_triton
    turned = {MAGIC: MAGIC ^ 1 << 22, 0x43004300: 0x43804300}

    class Misled:
        """The kernel, with a bit of its arguments turned."""

        def __getitem__(self, grid: Any) -> Any:
            return lambda *operands, **constants: wrap(wrong)[grid](
                *(
                    turned.get(operand, operand) if isinstance(operand, int) else operand
                    for operand in operands
                ),
                **constants,
            )

    monkeypatch.setattr(
        module, "wrap_triton", lambda kernel: Misled() if kernel is wrong else wrap(kernel)
    )
    self_test.cache_clear()
    with pytest.raises(RequestError, match=r"triton: .* \d+ tokens "):
        select_backend(
            any_scheme(text), DEVICE, dtype, torch.bfloat16, list_allowed_backends("triton")
        )
    self_test.cache_clear()


def test_a_matmul_that_adds_parts_in_16_bits_is_not_found_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of torch does on GPUs."""
    multiply = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = zip(x.chunk(16, dim=1), weight.chunk(16, dim=1), strict=True)
        product = sum(multiply(*part) for part in parts)
        return product if bias is None else product + bias

    monkeypatch.setattr(triton_linear.F, "linear", linear)
    for text in ("int8", "int4-g32"):
        self_test.cache_clear()
        assert (
            self_test(TritonBackend(), any_scheme(text), DEVICE, torch.bfloat16, torch.bfloat16)
            is None
        )
    self_test.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_scales_is_tried_at_load(dtype: torch.dtype) -> None:
    scheme, right = QuantScheme.parse("int4-g32-asym"), TritonBackend()
    for scale_dtype in (torch.float16, torch.bfloat16):
        assert self_test(right, scheme, DEVICE, dtype, scale_dtype) is None

    class Misread(TritonBackend):
        """Takes one row's scales in bfloat16 for others."""

        def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
            prepared = super().prepare(weight)
            if prepared["scale"].dtype == torch.bfloat16:
                prepared["scale"][20] *= 1.15
            return prepared

    found = [
        self_test(Misread(), scheme, DEVICE, dtype, scale_dtype)
        for scale_dtype in (torch.float16, torch.bfloat16)
    ]
    assert found[0] is None
    assert found[1] is not None


@pytest.mark.parametrize("text", ["int8-asym", "int4", "int4-g96", "int4-g256", "int8-g32"])
def test_other_schemes_are_refused(text: str) -> None:
    with raises(RequestError, text, "triton: ", "32, 64 or 128"):
        select_backend(
            any_scheme(text),
            DEVICE,
            torch.bfloat16,
            torch.bfloat16,
            list_allowed_backends("triton"),
        )


def test_other_activations_are_refused() -> None:
    with raises(RequestError, "torch.float64"):
        select_backend(
            QuantScheme(8, None),
            DEVICE,
            torch.float64,
            torch.bfloat16,
            list_allowed_backends("triton"),
        )


def test_tuning_takes_the_fastest_candidate_that_multiplies_rightly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong, slow, fast = (TileConfig("gemm", 16, 64, 1, warps=warps) for warps in (1, 2, 8))
    seconds = {wrong: 1e-6, fast: 2e-6}
    right = triton_tune.multiply

    def multiply(
        x: Tensor, prepared: dict[str, Tensor], group: int | None, config: TileConfig
    ) -> Tensor:
        return right(x, prepared, group, config) * (2 if config == wrong else 1)

    monkeypatch.setattr(triton_tune, "multiply", multiply)
    monkeypatch.setattr(triton_tune, "candidates", lambda *shape: iter((wrong, slow, fast)))
    monkeypatch.setattr(triton_tune, "copies_beyond_cache", lambda size, device: 2)
    monkeypatch.setattr(
        triton_tune, "seconds_each", lambda calls: seconds.get(calls[1].args[3], 1.0)
    )
    prepared = TritonBackend().prepare(_random("int4-g32", 20, 96).to(DEVICE))
    assert triton_tune.tune(prepared, "int4-g32", 96, [16]) == {16: fast}
