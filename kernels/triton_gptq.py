"""GPTQ's rounding of some columns, one after the other: a thread takes a row, and reads back the
errors it made.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.triton_words import INTERPRETED
from quantkit.tensors.code_table import CodeTable

# Rows of one program, which is a warp: a few hundred of them fill a GPU.
_ROWS = 512 if INTERPRETED else 32
# A float that it is added to keeps no fraction.
_WHOLE = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def find_in_table(quotients, values, bounds, count):
    """Round quotients to the nearest of some numbers by bisection; see `CodeTable`."""
    first = tl.zeros_like(quotients).to(tl.int32)
    remaining = count
    while remaining > 1:
        half = remaining // 2
        bound = tl.load(bounds + first + (half - 1))
        first += tl.where(quotients <= bound, 0, half)
        remaining -= half
    return tl.load(values + first)


@triton.jit
def round_columns(
    start,
    target,
    ratios,
    inverse,
    columns,
    scale,
    zero,
    values,
    bounds,
    codes,
    errors,
    rows,
    count,
    size,
    levels,
    IN_TABLE: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DESCEND: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Round some columns of ROWS rows; `errors` are those of the columns before one, too.

    `values` and `bounds` are a table's, of `levels` numbers.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    row = row.to(tl.int64)
    for i in tl.range(0, count):
        here = tl.load(start + i * rows + row, mask=mask, other=0.0)
        # Each thread has stored these errors itself, so it need not wait for others.
        for j in tl.range(0, i):
            here += tl.load(ratios + j * count + i) * tl.load(
                errors + j * rows + row, mask=mask, other=0.0
            )
        column = tl.load(columns + i)
        place = column * rows + row
        group = (column // size) * rows + row
        step = tl.load(scale + group, mask=mask, other=1.0)
        steps = tl.div_rn(here, step)
        if DESCEND:
            before = tl.load(codes + place, mask=mask, other=0.0)
            steps = before + steps * tl.load(inverse + i)
        if IN_TABLE:
            best = find_in_table(steps, values, bounds, levels)
        else:
            if SYMMETRIC:
                low = -0.5 * levels
                high = 0.5 * levels - 1
            else:
                low = -tl.load(zero + group, mask=mask, other=0.0)
                high = levels - 1 + low
            best = tl.minimum(tl.maximum(steps, low), high)
            best = (best + _WHOLE) - _WHOLE
        if DESCEND:
            error = (before - best) * step
        else:
            error = tl.load(target + i * rows + row, mask=mask, other=0.0) - best * step
        tl.store(codes + place, best, mask=mask)
        tl.store(errors + i * rows + row, error, mask=mask)


def _run_column_step(
    start: Tensor,
    other: Tensor,
    ratios: Tensor,
    columns: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: int,
    table: CodeTable | None,
    size: int,
    codes: Tensor,
    errors: Tensor,
    *,
    descend: bool,
) -> None:
    count, rows = start.shape
    # The kernel reads `inverse` only to descend, and `target` only otherwise: any tensor stands
    # for the other.
    if descend:
        target = start
        inverse = other
    else:
        target = other
        inverse = ratios
    symmetric = zero is None
    if zero is None:
        zero = scale
    if table is None:
        values = scale
        bounds = scale
    else:
        values = table.values
        bounds = table.bounds
        levels = len(values)
    operands = (start, target, ratios, inverse, columns, scale, zero, values, bounds)
    with torch.cuda.device_of(start):
        round_columns[triton.cdiv(rows, _ROWS),](
            *[operand.contiguous() for operand in operands],
            codes,
            errors,
            rows,
            count,
            size,
            levels,
            IN_TABLE=table is not None,
            SYMMETRIC=symmetric,
            DESCEND=descend,
            ROWS=_ROWS,
            num_warps=1,
            num_stages=1,
        )


round_in_turn = partial(_run_column_step, descend=False)
"""See `ColumnKernels`."""

improve_in_turn = partial(_run_column_step, descend=True)
"""See `ColumnKernels`."""
