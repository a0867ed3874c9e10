"""Products with weights in llama.cpp's block types as they are stored: codes of 2 to 8 bits in
planes, see `triton_planes`.

Weights become floats of the activations' dtype in registers, each rounded once, and tensor cores
multiply them: ``skinny`` takes up to 16 tokens of 16 bits, ``gemm`` more of them, and few of
float32. For many tokens, ``matmul`` stores the weights as floats in memory first.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels import triton_words as tw
from quantkit.kernels.triton_gemm import (
    dot_order,
    in_order,
    load_tokens,
    side_by_side,
    tile_rows,
)
from quantkit.kernels.triton_layout import LANES, PlaneLayout
from quantkit.kernels.triton_linear import multiply_in_parts
from quantkit.kernels.triton_planes import BASE, PlaneWeight, load_lanes, weights_of_pair
from quantkit.kernels.triton_skinny import (
    allocate_shared_parts,
    load_pairs,
    operand,
    present,
    store_product,
)
from quantkit.kernels.triton_tiles import UNIT, TileConfig, gpu_spec, tile_config_for
from quantkit.kernels.triton_words import dot_add, unit_range


@triton.jit
def plane_skinny(
    x,
    codes,
    high,
    scale,
    minimum,
    outer,
    outer_minimum,
    table,
    bias,
    out,
    parts,
    arrived,
    m,
    n,
    k,
    units,
    base,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    IN_TABLE: tl.constexpr,
    BIAS: tl.constexpr,
    JOINED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Compute ``x @ weight.T + bias`` for up to BLOCK_M tokens."""
    LAYOUT: tl.constexpr = (LOW, HIGH, GROUP, NESTED, MINIMA, IN_TABLE)
    DTYPE: tl.constexpr = x.dtype.element_ty
    weight = (codes, high, scale, minimum, outer, outer_minimum, table)
    token = tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * k)[:, None]
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)[:, None]
    lane = tl.arange(0, 16)
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    start_unit, end_unit = unit_range(units, UNITS, 1)
    for start in tl.range(start_unit, end_unit, UNITS):
        for ahead in tl.static_range(UNITS):
            unit = start + ahead
            present_unit = present(unit, units, WHOLE)
            lanes, upper = load_lanes(weight, safe, present_unit, units, LAYOUT)
            at = (safe, present_unit, units, base)
            for number in tl.static_range(4):
                first, second = weights_of_pair(weight, lanes, upper, at, number, LAYOUT, DTYPE)
                tokens = load_pairs(x, unit * 128 + number * 32 + lane, k, 16, WHOLE, BLOCK_M)
                product = dot_add(operand(first, second, BLOCK_N), tokens, product)
    store_product(
        product, bias, out, parts, arrived, m, n, row, tl.arange(0, BLOCK_M), BIAS, JOINED
    )


@triton.jit
def pair_in_order(
    weight,
    lanes,
    upper,
    at,
    NUMBER: tl.constexpr,
    LAYOUT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute one of the four tiles [ROWS, 32] of a unit's weights, of rows in the order of
    `tile_rows`.
    """
    first, second = weights_of_pair(weight, lanes, upper, at, NUMBER, LAYOUT, DTYPE)
    return in_order(first, second, ROWS)


@triton.jit
def plane_gemm_tile(
    x,
    weight,
    start_row,
    first_row,
    n,
    units,
    base,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Multiply rows from the first one on by pointers to tokens [1, M] in `dot_order`, to [N, M].
    The n rows of the weight begin at `start_row`: those of an expert are among others.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tile_rows(first_row, BLOCK_N)
    safe = start_row + tl.where(row < n, row, 0)[:, None]
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    start_unit, end_unit = unit_range(units, UNITS, 2)
    for start in tl.range(start_unit, end_unit, UNITS):
        for ahead in tl.static_range(UNITS):
            unit = start + ahead
            present_unit = unit if UNITS == 1 else tl.minimum(unit, units - 1)
            lanes, upper = load_lanes(weight, safe, present_unit, units, LAYOUT)
            at = (safe, present_unit, units, base)
            if DTYPE.is_fp32():
                # No tensor cores: as much at a time as the registers hold.
                for number in tl.static_range(4):
                    tokens = load_tokens(x, unit, units, number, 32, UNITS)
                    tile = pair_in_order(weight, lanes, upper, at, number, LAYOUT, DTYPE, BLOCK_N)
                    product = dot_add(tile, tokens, product)
            else:
                tokens = load_tokens(x, unit, units, 0, 128, UNITS)
                tile0 = pair_in_order(weight, lanes, upper, at, 0, LAYOUT, DTYPE, BLOCK_N)
                tile1 = pair_in_order(weight, lanes, upper, at, 1, LAYOUT, DTYPE, BLOCK_N)
                tile2 = pair_in_order(weight, lanes, upper, at, 2, LAYOUT, DTYPE, BLOCK_N)
                tile3 = pair_in_order(weight, lanes, upper, at, 3, LAYOUT, DTYPE, BLOCK_N)
                product = dot_add(
                    side_by_side(tile0, tile1, tile2, tile3, BLOCK_N), tokens, product
                )
    return product


@triton.jit
def plane_gemm(
    x,
    codes,
    high,
    scale,
    minimum,
    outer,
    outer_minimum,
    table,
    bias,
    out,
    m,
    n,
    units,
    base,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    IN_TABLE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Compute the transposed product, for tokens in `dot_order`."""
    LAYOUT: tl.constexpr = (LOW, HIGH, GROUP, NESTED, MINIMA, IN_TABLE)
    weight = (codes, high, scale, minimum, outer, outer_minimum, table)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * (units * 128))[None, :]
    first_row = tl.program_id(1) * BLOCK_N
    product = plane_gemm_tile(
        x, weight, 0, first_row, n, units, base, LAYOUT, BLOCK_M, BLOCK_N, UNITS
    )
    row = first_row + tl.arange(0, BLOCK_N)
    if BIAS:
        product += tl.load(bias + tl.where(row < n, row, 0)).to(tl.float32)[:, None]
    at = (tl.program_id(2) * m + token)[None, :].to(tl.int64) * n + row[:, None]
    tl.store(
        out + at, product.to(out.dtype.element_ty), mask=(token < m)[None, :] & (row < n)[:, None]
    )


@triton.jit
def plane_floats(
    codes,
    high,
    scale,
    minimum,
    outer,
    outer_minimum,
    table,
    out,
    n,
    k,
    units,
    base,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    IN_TABLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Convert the weight [n, k] to the dtype of `out`."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    LAYOUT: tl.constexpr = (LOW, HIGH, GROUP, NESTED, MINIMA, IN_TABLE)
    weight = (codes, high, scale, minimum, outer, outer_minimum, table)
    row = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    safe = tl.where(row < n, row, 0)
    for ahead in tl.static_range(UNITS):
        unit = tl.program_id(0) * UNITS + ahead
        present_unit = tl.minimum(unit, units - 1)
        lanes, upper = load_lanes(weight, safe, present_unit, units, LAYOUT)
        at = (safe, present_unit, units, base)
        for number in tl.static_range(4):
            first, second = weights_of_pair(weight, lanes, upper, at, number, LAYOUT, DTYPE)
            column = (unit * 128 + number * 32 + tl.arange(0, 16))[None, :]
            target = out + safe.to(tl.int64) * k + column
            tl.store(target, first, mask=(column < k) & (row < n))
            tl.store(target + 16, second, mask=(column + 16 < k) & (row < n))


@tw.operator(
    "plane_linear", lambda x, codes, *_: x.new_empty(len(x), len(codes)), mutates=("arrived",)
)
def plane_linear(
    x: Tensor,
    codes: Tensor,
    high: Tensor | None,
    scale: Tensor,
    minimum: Tensor | None,
    outer: Tensor | None,
    outer_minimum: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    low_bits: int,
    high_bits: int,
    group: int,
    name: str,
    arrived: Tensor,
) -> Tensor:
    """Compute ``x @ weight.T + bias``, [M, I] to [M, O], in the tiles for the shape.

    Args:
        codes, high, scale, minimum, outer, outer_minimum, table: of a `PlaneWeight`.
        low_bits, high_bits, group: of its `PlaneLayout`.
        name: of its scheme, for tile configs.
        arrived: for `skinny_product`.
    """
    weight = PlaneWeight(codes, high, scale, minimum, outer, outer_minimum, table)
    layout = weight.find_layout(low_bits, high_bits, group)
    config = tile_config_for(
        name, len(x), len(codes), x.shape[1], x.dtype, gpu_spec(x.device), layout.bits
    )
    return plane_product(x, weight, layout, bias, config, arrived)


def plane_product(
    x: Tensor,
    weight: PlaneWeight,
    layout: PlaneLayout,
    bias: Tensor | None,
    config: TileConfig,
    arrived: Tensor,
) -> Tensor:
    """Compute ``x @ weight.T + bias``, [M, I] to [M, O]; `arrived` is from `allocate_counters`."""
    m = x.shape[0]
    k = x.shape[1]
    n = len(weight.codes)
    units = weight.codes.shape[1] // LANES
    if m == 0:
        return x.new_empty(0, n)
    constants = layout.constants()
    if config.path == "matmul":

        def convert(part: slice, weights: Tensor) -> None:
            rows = len(weights)
            grid = triton.cdiv(units, config.units), triton.cdiv(rows, config.block_n)
            wrap_triton(plane_floats)[grid](
                *list_operands(weight, part),
                weights,
                rows,
                k,
                units,
                BASE,
                **constants,
                BLOCK_N=config.block_n,
                UNITS=config.units,
                num_warps=config.warps,
                num_stages=config.stages,
            )

        return multiply_in_parts(x, n, bias, convert)
    operands = list_operands(weight)
    constants |= config.constants()
    if config.path == "skinny":
        out = x.new_empty(m, n)
        wrap_triton(plane_skinny)[(triton.cdiv(n, config.block_n), config.split)](
            x.contiguous(),
            *operands,
            stand_in(bias, weight.codes),
            out,
            allocate_shared_parts(x, out, config),
            arrived,
            m,
            n,
            k,
            units,
            BASE,
            BIAS=bias is not None,
            JOINED=config.split > 1,
            WHOLE=k % (UNIT * config.units) == 0,
            **constants,
        )
        return out
    out = tw.product_buffer(x, n, config)
    # With several programs for a row, `sum_splits` adds the bias to the sum of their parts.
    fused_bias = None
    if config.split == 1:
        fused_bias = bias
    grid = triton.cdiv(m, config.block_m), triton.cdiv(n, config.block_n), config.split
    wrap_triton(plane_gemm)[grid](
        # Pairs of lanes are in the order of words of 4 bits.
        dot_order(x, 4),
        *operands,
        stand_in(fused_bias, weight.codes),
        out,
        m,
        n,
        units,
        BASE,
        BIAS=fused_bias is not None,
        **constants,
    )
    return tw.sum_splits(out, bias, x.dtype)


def list_operands(weight: PlaneWeight, part: slice = slice(None)) -> list[Any]:
    """List the tensors of some rows as kernels take them."""
    operands = [weight.codes[part]]
    for tensor in (
        weight.high,
        weight.scale,
        weight.minimum,
        weight.outer,
        weight.outer_minimum,
    ):
        operands.append(stand_in(tensor, weight.codes)[part])
    # All rows share the table.
    operands.append(stand_in(weight.table, weight.codes))
    return operands


def stand_in(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor, or another one in place of None, which kernels do not take; what they do not
    have, they do not read.
    """
    if tensor is None:
        return other
    return tensor
