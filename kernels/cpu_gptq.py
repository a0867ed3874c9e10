"""GPTQ's work on single weights in C++: a vector takes neighbouring outputs, and a thread some
vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.library import load_kernels
from quantkit.tensors.code_table import CodeTable

# The numbers by which the C++ functions know the types of scales.
_FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def search_scales(
    weight: Tensor,
    importance: Tensor,
    size: int,
    levels: int,
    table: CodeTable | None,
    symmetric: bool,
    scale_dtype: torch.dtype,
    coarse: Sequence[float],
    fine: Sequence[float],
) -> tuple[Tensor, Tensor | None]:
    """Search the scale [G, O] in `scale_dtype`, and the zero point [G, O] uint8 if codes are not
    symmetric, of groups of `size` inputs: first among some steps, in units of the step that spans
    the group, then among those next to the best.

    Args:
        weight: [I, O] float32.
        importance: [I] float32, not negative: the error's weights.
        levels: number of codes.
        table: their numbers, if they are not whole ones; then each coarse step is followed by the
            one that fits its codes best, and a group of zeros has a scale of 0.
        coarse, fine: the steps, and how far those next to the best of them are from it.

    Raises:
        UnsupportedError: if the kernels cannot be compiled.
    """
    inputs, outputs = weight.shape
    scale = torch.empty(inputs // size, outputs, dtype=scale_dtype)
    if symmetric:
        zero = None
        zero_pointer = None
    else:
        zero = torch.empty_like(scale, dtype=torch.uint8)
        zero_pointer = _pointer(zero, torch.uint8)
    _functions().quantkit_search_scales(
        *_sizes(inputs, outputs, size, levels),
        *_table_arguments(table),
        _floats(weight),
        _floats(importance),
        (c_float * len(coarse))(*coarse),
        c_int64(len(coarse)),
        (c_float * len(fine))(*fine),
        c_int64(len(fine)),
        c_int64(_FLOAT_TYPES[scale_dtype]),
        _pointer(scale, scale_dtype),
        zero_pointer,
        torch.get_num_threads(),
    )
    return scale, zero


def _run_column_step(
    name: str,
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
) -> None:
    step = getattr(_functions(), name)
    # The list keeps copies alive until the call is over: C++ has only their addresses.
    operands = []
    for operand in (start, other, ratios):
        operands.append(operand.contiguous())
    if zero is None:
        zero_pointer = None
    else:
        zero_pointer = _floats(zero)
    step(
        *_sizes(*codes.shape, size, levels),
        *_table_arguments(table),
        c_int64(len(start)),
        *[_floats(operand) for operand in operands],
        _pointer(columns, torch.int64),
        _floats(scale),
        zero_pointer,
        _floats(codes),
        _floats(errors),
        torch.get_num_threads(),
    )


round_in_turn = partial(_run_column_step, "quantkit_round_in_turn")
"""See `ColumnKernels`."""

improve_in_turn = partial(_run_column_step, "quantkit_improve_in_turn")
"""See `ColumnKernels`."""


def _functions() -> Any:
    return load_kernels().library


def _sizes(*sizes: int) -> list[c_int64]:
    return [c_int64(size) for size in sizes]


def _table_arguments(table: CodeTable | None) -> tuple[c_int64, c_void_p | None, c_void_p | None]:
    if table is None:
        return c_int64(0), None, None
    return c_int64(len(table.values)), _floats(table.values), _floats(table.bounds)


def _floats(tensor: Tensor) -> c_void_p:
    return _pointer(tensor, torch.float32)


def _pointer(tensor: Tensor, dtype: torch.dtype) -> c_void_p:
    """Take the address of a tensor; raise `ValueError` for one that C++ would read wrongly."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"expected a contiguous {dtype} tensor on the CPU, found {tensor.dtype} on"
            f" {tensor.device}"
        )
    return c_void_p(tensor.data_ptr())
