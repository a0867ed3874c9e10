"""The C++ kernels: every instruction set at hand against plain C++ and against float64."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from closeness import require_close
from error_parts import raises
from fused_blocks import list_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import DTYPES, HERE
from quick_compiler import quick_compiler
from torch import Tensor

from quantkit.architectures.families import config_from_hf
from quantkit.errors import RequestError, UnsupportedError
from quantkit.kernels import build, library
from quantkit.kernels.backend import REFERENCE
from quantkit.kernels.dispatch import list_allowed_backends, select_backend
from quantkit.kernels.library import load_kernels
from quantkit.model.cache import KVCache
from quantkit.tensors.cached_rows import to_cached_rows
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

ATTENTION_SHAPES = [
    (1, 4, 4, 1, 7, 32),
    (1, 8, 2, 1, 600, 64),
    (2, 8, 8, 3, 300, 80),
    (3, 6, 1, 5, 777, 128),
    (1, 8, 2, 40, 300, 80),
    (2, 4, 4, 150, 160, 64),
    (1, 6, 1, 33, 260, 20),
]
"""Batch, heads, KV heads, tokens, length of the cache, head size."""


def _random(scheme: QuantScheme, rows: int, columns: int, dtype: torch.dtype) -> QuantTensor:
    """Codes over the whole range, scales of many sizes, any zero points."""
    shape = rows, scheme.groups(columns)
    zero = None if scheme.symmetric else torch.randint(0, scheme.levels, shape, dtype=torch.uint8)
    codes = torch.randint(0, scheme.levels, (rows, columns), dtype=torch.uint8)
    return QuantTensor(codes, (torch.rand(shape) + 0.01).to(dtype), zero, scheme)


def _linear(ops: Any, x: Tensor, weight: QuantTensor, exact: bool) -> Tensor:
    packed = ops.pack([weight], len(weight.codes), exact=exact)
    product: Tensor = ops.linear(x, packed, None, len(weight.codes))
    return product


def _rounding(x: Tensor, weight: Tensor, maximum: int) -> Tensor:
    """How far products [M, O] may be off when each 32 of x are rounded to integers up to `most`."""
    padding = 0, -x.shape[1] % 32
    steps = F.pad(x.double(), padding).unflatten(1, (-1, 32)).abs().amax(-1) / maximum
    return 0.5001 * steps @ F.pad(weight.abs(), padding).unflatten(1, (-1, 32)).sum(-1).t()


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([None, 32, 64, 96, 128]),
    symmetric=st.booleans(),
    groups=st.integers(1, 5),
    ragged=st.integers(0, 40),
    rows=st.integers(1, 70),
    tokens=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    exact=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_all_instruction_sets_agree_and_are_right(
    bits: int,
    group: int | None,
    symmetric: bool,
    groups: int,
    ragged: int,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    exact: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    columns = groups * 32 + ragged if group is None else groups * group
    weight = _random(QuantScheme(bits, group, symmetric), rows, columns, scale_dtype)
    x = torch.randn(tokens, columns).to(dtype)
    wide = weight.dequantize().double()
    expected, size = x.double() @ wide.t(), x.double().abs() @ wide.abs().t()
    sums = torch.finfo(torch.float32).eps * columns * size + torch.finfo(dtype).eps * expected.abs()
    found = {name: _linear(load_kernels(name), x, weight, exact).double() for name in HERE}
    for product in found.values():
        assert (
            (product - expected).abs() <= _rounding(x, wide, 127 * 256 if exact else 127) + sums
        ).all()
        assert ((product - found["portable"]).abs() <= sums).all()


@pytest.mark.parametrize("variant", HERE)
def test_what_is_not_finite_reaches_every_output(variant: str) -> None:
    for exact, bad in itertools.product((True, False), (torch.nan, torch.inf, -torch.inf)):
        weight = quantize_rtn(torch.randn(20, 96), QuantScheme.parse("int4-g32"), torch.float32)
        x = torch.randn(3, 96)
        x[1, 40] = bad
        product = _linear(load_kernels(variant), x, weight, exact)
        assert product[1].isnan().all(), (exact, bad)
        assert product[[0, 2]].isfinite().all(), (exact, bad)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_the_largest_codes_and_activations_do_not_overflow(variant: str, exact: bool) -> None:
    for bits in (4, 8):
        scheme = QuantScheme(bits, None, symmetric=False)
        codes = torch.full((16, 4096), scheme.levels - 1, dtype=torch.uint8)
        weight = QuantTensor(
            codes, torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.uint8), scheme
        )
        for sign in (1.0, -1.0):
            found = _linear(load_kernels(variant), torch.full((5, 4096), sign), weight, exact)
            torch.testing.assert_close(
                found, torch.full((5, 16), sign * 4096 * (scheme.levels - 1))
            )


@pytest.mark.parametrize("variant", HERE)
def test_activations_of_any_magnitude_keep_their_precision(variant: str) -> None:
    weight = quantize_rtn(torch.randn(20, 64), QuantScheme.parse("int8"), torch.float32)
    x = torch.randn(4, 64) * torch.tensor([1e-25, 1e-10, 1e10, 1e30]).unsqueeze(1)
    expected = x.double() @ weight.dequantize().double().t()
    error = (_linear(load_kernels(variant), x, weight, True).double() - expected).norm(
        dim=1
    ) / expected.norm(dim=1)
    assert (error < 1e-4).all()
    assert _linear(load_kernels(variant), torch.zeros(1, 64), weight, True).eq(0).all()


def test_the_exact_mode_is_far_closer_than_the_fast_one() -> None:
    weight = quantize_rtn(torch.randn(64, 1024), QuantScheme.parse("int4-g32"), torch.float16)
    x = torch.randn(16, 1024)
    expected = x.double() @ weight.dequantize().double().t()
    ops = load_kernels()
    exact, fast = (
        (_linear(ops, x, weight, mode).double() - expected).norm() / expected.norm()
        for mode in (True, False)
    )
    assert exact < 5e-5
    assert 1e-3 < fast < 1e-2


@pytest.mark.parametrize("variant", HERE)
def test_attention_over_the_cache_equals_softmax(variant: str) -> None:
    cached_attention = load_kernels(variant).cached_attention
    for dtype, window, shape in itertools.product(DTYPES, (None, 100), ATTENTION_SHAPES):
        batch, heads, shared, tokens, length, size = shape
        queries = torch.randn(batch, heads, tokens, size).to(dtype)
        keys, values = torch.randn(2, batch, shared, length, size).to(dtype)
        positions = torch.arange(length - tokens - 1, length - 1)
        keys[:, :, -1] = torch.nan  # not yet written: never looked at
        mixed = cached_attention(
            queries, keys, None, values, None, positions, None, window or 0, size**-0.5
        )
        distance = positions.unsqueeze(-1) - torch.arange(length - 1)
        mask = (distance >= 0) & (distance < (window or length))
        expected = F.scaled_dot_product_attention(
            queries.double(),
            keys[:, :, :-1].double(),
            values[:, :, :-1].double(),
            attn_mask=mask,
            enable_gqa=True,
        )
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        require_close(
            mixed.double(),
            expected.transpose(1, 2).flatten(2),
            (dtype, window, shape),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("variant", HERE)
def test_rows_of_many_sequences_attend_as_each_alone(variant: str) -> None:
    """Some go on by one token, one by a few, two by many; bit by bit."""
    cached_dtypes = (torch.float32, torch.bfloat16, torch.int8)
    for window, cached in itertools.product((None, 30), cached_dtypes):
        config = config_from_hf(
            oracle.make("llama", num_key_value_heads=2, head_dim=32).config.to_dict(),
            Path("config.json"),
        )
        cache = KVCache(config, 5, 300, cached, "cpu")
        every = torch.arange(300)
        keys, values = cache.update(
            0, every, torch.randn(5, 2, 300, 32), torch.randn(5, 2, 300, 32)
        )
        runs = [(3, 250, 1), (0, 0, 1), (4, 40, 5), (1, 7, 40), (2, 200, 17), (0, 1, 1)]
        slots = torch.cat([torch.full((count,), slot) for slot, _, count in runs])
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in runs])
        queries = torch.randn(len(slots), 6, 1, 32)
        attention = load_kernels(variant).cached_attention
        together = attention(
            queries, *keys, *values, positions.unsqueeze(1), slots, window or 0, 0.2
        )
        done = 0
        for slot, start, count in runs:
            sequence = queries[done : done + count, :, 0].transpose(0, 1).unsqueeze(0)
            place = torch.tensor([slot])
            stored = *keys.of_slots(place), *values.of_slots(place)
            alone = attention(
                sequence, *stored, torch.arange(start, start + count), None, window or 0, 0.2
            )
            case = window, cached, slot
            assert torch.equal(together[done : done + count].squeeze(1), alone[0]), case
            done += count


@pytest.mark.parametrize("slots", [[0, 2], [-1, 0], [0]])
def test_slots_outside_the_cache_are_refused(slots: list[int]) -> None:
    keys = torch.zeros(2, 1, 9, 32)
    with pytest.raises(RuntimeError, match="slot"):
        load_kernels().cached_attention(
            torch.zeros(2, 1, 1, 32),
            keys,
            None,
            keys,
            None,
            torch.tensor([3]),
            torch.tensor(slots),
            0,
            1.0,
        )


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("tokens", [1, 20])
def test_attention_hands_on_what_is_not_finite(variant: str, tokens: int) -> None:
    queries, keys = torch.randn(1, 2, tokens, 32), torch.randn(1, 2, 90, 32)
    values = keys.clone()
    keys[0, 1, 4, 3] = torch.nan
    positions = torch.arange(70 - tokens, 70)
    found = load_kernels(variant).cached_attention(
        queries, keys, None, values, None, positions, None, 0, 1.0
    )
    assert found[..., :32].isfinite().all()
    assert found[..., 32:].isnan().all()


@pytest.mark.parametrize("position", [-1, 9])
def test_positions_outside_the_cache_are_refused(position: int) -> None:
    keys = torch.zeros(1, 1, 9, 32)
    with pytest.raises(RuntimeError, match=f"position {position} "):
        load_kernels().cached_attention(
            torch.zeros(1, 1, 1, 32), keys, None, keys, None, torch.tensor([position]), None, 0, 1.0
        )


@pytest.mark.parametrize("variant", HERE)
def test_products_with_float_rows_are_right(variant: str) -> None:
    for dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        x, weight = torch.randn(2, 3, 77).to(dtype), torch.randn(130, 77).to(weight_dtype)
        expected = x.double() @ weight.double().t()
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
        product = load_kernels(variant).float_linear(x, weight).double()
        case = dtype, weight_dtype
        require_close(product, expected, case, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [32, 77, 576, 600, 640, 896, 4864])
def test_products_with_float_rows_have_the_bits_of_each_row_alone(
    variant: str, weight_dtype: torch.dtype, columns: int
) -> None:
    """Also more tokens than are multiplied at a time, and rows that are no multiple of a tile's."""
    x, weight = torch.randn(600, columns), torch.randn(45, columns).to(weight_dtype)
    product = load_kernels(variant).float_linear
    alone = torch.cat([product(row, weight) for row in x.split(1)])
    exact = x.double() @ weight.double().t()
    sizes = x.double().abs() @ weight.double().abs().t()
    assert bool(((alone - exact).abs() <= 2e-6 * sizes).all())
    for count in (*range(2, 34), 83, 600):
        assert torch.equal(product(x[:count], weight), alone[:count])


@pytest.mark.parametrize("variant", HERE)
def test_products_with_float_rows_are_as_accurate_as_torchs(variant: str) -> None:
    for columns, dtype in itertools.product((576, 1536), DTYPES):
        x, weight = torch.randn(33, columns), torch.randn(101, columns).to(dtype)
        exact = x.double() @ weight.double().t()
        product = load_kernels(variant).float_linear(x, weight)
        off, torchs = (
            (y - exact).square().mean().sqrt() for y in (product, x @ weight.float().t())
        )
        assert off < 2 * torchs, (columns, dtype)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("columns", [32, 77, 576, 896, 4864])
def test_fast_products_with_float_rows_round_activations_to_bfloat16_at_most(
    variant: str, columns: int
) -> None:
    ops = load_kernels(variant)
    x, weight = torch.randn(40, columns), torch.randn(45, columns).bfloat16()
    product = ops.float_linear(x, weight, False)
    # Processors that do not multiply bfloat16 have no faster products.
    rounded = x.bfloat16().float() if ops.instructions() == "avx512-bf16" else x
    exact = rounded.double() @ weight.double().t()
    sizes = rounded.double().abs() @ weight.double().abs().t()
    assert bool(((product - exact).abs() <= 2e-6 * sizes).all())
    for count in (1, 2, 3, 7, 16, 33):
        assert torch.equal(ops.float_linear(x[:count], weight, False), product[:count])
    for dtype in (torch.float32, torch.float16):
        other = weight.to(dtype)
        assert torch.equal(ops.float_linear(x, other, False), ops.float_linear(x, other))


@pytest.mark.parametrize("variant", HERE)
def test_products_with_float_rows_hand_on_what_is_not_finite(variant: str) -> None:
    x, weight = torch.randn(3, 64), torch.randn(17, 64).bfloat16()
    x[1, 5], weight[3, 7] = torch.inf, torch.nan
    found = load_kernels(variant).float_linear(x, weight)
    expected = x @ weight.float().t()
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("variant", HERE)
def test_half_floats_are_read_and_rounded_as_torch_does(variant: str) -> None:
    ops = load_kernels(variant)
    halves = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    found = ops.float_linear(torch.ones(1, 1), halves.unsqueeze(1))
    torch.testing.assert_close(found, halves.float().unsqueeze(0), rtol=0, atol=0, equal_nan=True)
    finite = halves[halves.isfinite()].float().sort().values
    between = (finite[1:] + finite[:-1]) / 2
    wide = torch.cat(
        [torch.randint(-(2**31), 2**31, (1 << 16,)).int().view(torch.float32), between]
    )
    found = ops.float_linear(torch.ones(1, 1, dtype=torch.float16), wide.unsqueeze(1))
    torch.testing.assert_close(found, wide.half().unsqueeze(0), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_the_operators_pass_torchs_own_checks() -> None:
    ops = load_kernels()
    weight = quantize_rtn(torch.randn(20, 64), QuantScheme.parse("int4-g32"), torch.float16)
    packed = ops.pack([weight], len(weight.codes), exact=True)
    keys, positions = torch.randn(1, 2, 9, 32), torch.tensor([3, 4])
    codes = to_cached_rows(keys, torch.int8)
    calls = (
        ("linear", (torch.randn(2, 3, 64), packed, torch.randn(20), 20)),
        ("linear", (torch.randn(1, 64).bfloat16(), packed, None, 20)),
        ("rows", (packed, torch.tensor([3, 0]), 64)),
        (
            "cached_attention",
            (torch.randn(1, 4, 2, 32), keys, None, keys.clone(), None, positions, None, 0, 0.5),
        ),
        ("cached_attention", (torch.randn(1, 4, 2, 32), *codes, *codes, positions, None, 0, 0.5)),
        ("float_linear", (torch.randn(2, 64), torch.randn(10, 64))),
    )
    for name, arguments in calls:
        torch.library.opcheck(getattr(ops.namespace, name).default, arguments)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("cached", [None, torch.float32, torch.int8], ids=str)
def test_the_operator_on_blocks_passes_torchs_own_checks(
    own: bool, cached: torch.dtype | None
) -> None:
    ops = load_kernels()

    def packed(rows: int, columns: int) -> Tensor:
        weight = quantize_rtn(
            torch.randn(rows, columns) / 8, QuantScheme.parse("int8"), torch.float32
        )
        product: Tensor = ops.pack([weight], len(weight.codes), exact=True)
        return product

    attention = [
        torch.ones(64),
        packed(128, 64),
        *[None] * 8,
        packed(64, 64),
        None,
        None,
    ]
    feed_forward = [
        torch.ones(64),
        packed(192, 64),
        torch.randn(192),
        None,
        None,
        packed(64, 96),
        None,
        None,
    ]
    settings = list_settings(heads=4, kv_heads=2)
    blocks = ops.prepare_blocks([("attention", attention, feed_forward, settings)] * 2)
    x, angles = torch.randn(2, 3, 64), list(torch.randn(4, 3, 16))
    rows = (
        []
        if cached is None
        else [part for _ in range(4) for part in to_cached_rows(torch.zeros(2, 2, 9, 16), cached)]
    )
    stored = [part for part in rows if part is not None]
    scales = [None, torch.rand(3)]
    arguments = (x, blocks.number, angles, scales, torch.arange(3), None, stored, own)
    if own or cached is not None:
        torch.library.opcheck(ops.namespace.run_blocks.default, arguments)
    else:
        with pytest.raises(RuntimeError, match="prefill"):
            ops.run_blocks(*arguments)


def test_operands_that_do_not_fit_are_refused() -> None:
    ops = load_kernels()
    weight = quantize_rtn(torch.randn(20, 64), QuantScheme.parse("int8"), torch.float16)
    packed = ops.pack([weight], len(weight.codes), exact=True)
    for x, operand, bias, rows, named in (
        (torch.randn(2, 63), packed, None, 20, "63"),
        (torch.randn(2, 64), packed, None, 19, "20"),
        (torch.randn(2, 64), packed[:-1], None, 20, "packed"),
        (torch.randn(2, 64), packed, torch.randn(19), 20, "bias"),
        (torch.randn(2, 64).double(), packed, None, 20, "float32"),
    ):
        with pytest.raises(RuntimeError, match=named):
            ops.linear(x, operand, bias, rows)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    ops = load_kernels()
    weight = quantize_rtn(torch.randn(500, 256), QuantScheme.parse("int4-g32"), torch.float16)
    packed = ops.pack([weight], len(weight.codes), exact=True)
    queries, keys = torch.randn(1, 8, 90, 64), torch.randn(1, 2, 900, 64)
    found = []
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            products = [
                ops.linear(torch.ones(tokens, 256) / 3, packed, None, 500) for tokens in (1, 3, 130)
            ]
            mixed = [
                ops.cached_attention(
                    queries[:, :, -count:],
                    keys,
                    None,
                    keys,
                    None,
                    torch.arange(850 - count, 850),
                    None,
                    0,
                    0.1,
                )
                for count in (1, 90)
            ]
            found.append([*products, *mixed])
    finally:
        torch.set_num_threads(1)
    for other in found[1:]:
        for first, again in zip(found[0], other, strict=True):
            assert torch.equal(first, again)


def test_several_python_threads_may_multiply_at_once() -> None:
    ops = load_kernels()
    weight = quantize_rtn(torch.randn(500, 256), QuantScheme.parse("int8"), torch.float16)
    packed = ops.pack([weight], len(weight.codes), exact=True)
    inputs = [torch.randn(3, 256) for _ in range(8)]
    expected = [ops.linear(x, packed, None, 500) for x in inputs]
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(4) as several:
            for _ in range(20):
                found = several.map(lambda x: ops.linear(x, packed, None, 500), inputs)
                assert all(map(torch.equal, found, expected))
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_a_forked_process_multiplies_without_the_threads_of_its_parent() -> None:
    code = (
        "import os, sys, torch\n"
        "from quantkit.kernels.library import load_kernels\n"
        "from quantkit.tensors.qtensor import quantize_rtn\n"
        "from quantkit.tensors.scheme import QuantScheme\n"
        "ops = load_kernels()\n"
        "scheme = QuantScheme.parse('int8')\n"
        "weight = quantize_rtn(torch.randn(600, 512), scheme, torch.float32)\n"
        "packed = ops.pack([weight], 600, exact=True)\n"
        "torch.set_num_threads(2)\n"
        "first = ops.linear(torch.ones(1, 512), packed, None, 600)\n"
        "child = os.fork()\n"
        "again = ops.linear(torch.ones(1, 512), packed, None, 600)\n"
        "if not child: os._exit(0 if torch.equal(first, again) else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=600, cwd="/")


def test_a_group_size_that_the_kernels_do_not_support_is_refused_with_the_reason() -> None:
    case = QuantScheme(4, 40), torch.device("cpu"), torch.float32, torch.bfloat16
    with raises(RequestError, "int4-g40", "cpu-exact, cpu-fast", " 32", options=["allow_slow"]):
        select_backend(*case, list_allowed_backends())
    assert select_backend(*case, list_allowed_backends(allow_slow=True)) is REFERENCE


def test_without_a_compiler_the_reason_is_reported_and_looked_for_once(
    without_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    monkeypatch.setattr(build.shutil, "which", requested.append)
    case = QuantScheme.parse("int8"), torch.device("cpu"), torch.float32, torch.bfloat16
    with raises(RequestError, "cpu-exact, cpu-fast", "g++", options=["allow_slow"]):
        select_backend(*case, list_allowed_backends())
    before = len(requested)
    assert select_backend(*case, list_allowed_backends(allow_slow=True)) is REFERENCE
    assert len(requested) == before  # once, not once a layer


@pytest.mark.parametrize(
    ("compiler", "names"), [("/nowhere/c++", ["No such file", "CXX"]), ("false", ["CXX"])]
)
def test_a_compiler_that_fails_is_reported(
    compiler: str, names: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    library._load_once.cache_clear()
    try:
        with raises(UnsupportedError, *names, path=Path(compiler)):
            load_kernels("native")
    finally:
        library._load_once.cache_clear()


def test_a_cache_that_cannot_be_written_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", "true")  # a compiler must be found
    library._load_once.cache_clear()
    try:
        with raises(UnsupportedError, "QUANTKIT_CACHE", path=tmp_path / "file"):
            load_kernels("native")
    finally:
        library._load_once.cache_clear()


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    expected = "native, avx512-bf16, avx512-vnni, avx2, neon-dotprod, neon, portable"
    with raises(RequestError, found="sse9", expected=expected):
        load_kernels("sse9")


@pytest.mark.slow
@pytest.mark.compiles
def test_two_processes_at_once_compile_one_library_and_a_third_finds_it(tmp_path: Path) -> None:
    compiler = quick_compiler(
        "native", tmp_path / "c++", seconds=2
    )  # while which the other process begins
    code = (
        "from quantkit.kernels.library import load_kernels;"
        " load_kernels('native').library.quantkit_round_in_turn"
    )
    environment = {**os.environ, "QUANTKIT_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, cwd="/") for _ in range(2)
    ]
    assert [process.wait() for process in both] == [0, 0]
    calls = Path(f"{compiler}.calls").read_text().splitlines()
    sources = [call.split(" -c ")[1].split()[0] for call in calls if " -c " in call]
    assert len(sources) == len(set(sources)) > 0
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd="/")
    assert Path(f"{compiler}.calls").read_text().splitlines() == calls
