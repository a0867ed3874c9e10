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

_ROWS = (
    512 if INTERPRETED else 32
)  # of one program, which is a warp: a few hundred of them fill a GPU
_WHOLE = tl.constexpr(1.5 * 2.0**23)  # a float that it is added to keeps no fraction


@triton.jit
def round_columns(
    start,
    target,
    ratios,
    inverse,
    columns,
    scale,
    zero,
    codes,
    errors,
    rows,
    count,
    size,
    levels,
    SYMMETRIC: tl.constexpr,
    DESCEND: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Round some columns of ROWS rows; `errors` are those of the columns before one, too."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    row = row.to(tl.int64)
    for i in tl.range(0, count):
        here = tl.load(start + i * rows + row, mask=mask, other=0.0)
        for j in tl.range(0, i):  # each thread has stored these itself
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


def _in_turn(
    start: Tensor,
    other: Tensor,
    ratios: Tensor,
    columns: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: int,
    size: int,
    codes: Tensor,
    errors: Tensor,
    *,
    descend: bool,
) -> None:
    count, rows = start.shape
    wanted, inverse = (start, other) if descend else (other, ratios)
    read = (start, wanted, ratios, inverse, columns, scale, scale if zero is None else zero)
    with torch.cuda.device_of(start):
        round_columns[triton.cdiv(rows, _ROWS),](
            *(one.contiguous() for one in read),
            codes,
            errors,
            rows,
            count,
            size,
            float(levels),
            SYMMETRIC=zero is None,
            DESCEND=descend,
            ROWS=_ROWS,
            num_warps=1,
            num_stages=1,
        )


round_in_turn = partial(_in_turn, descend=False)
"""See `ColumnKernels`."""

improve_in_turn = partial(_in_turn, descend=True)
"""See `ColumnKernels`."""
