"""GPTQ's work on single weights in C++: a vector takes neighbouring outputs, and a thread some vectors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from quantkit.kernels.build import VARIANT_SETTING, load_functions

_FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def search_scales(
    weight: Tensor, importance: Tensor, size: int, levels: int, symmetric: bool, scale_dtype: torch.dtype,
    coarse: Sequence[float], fine: Sequence[float],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scale [G, O] in `scale_dtype`, and zero point [G, O] uint8 where codes are not symmetric, of groups of `size`
    inputs: the best of some steps, in units of what spans the group, then of those beside it.

    Args:
        weight: [I, O] float32.
        importance: [I] float32, not negative: the error's weights.
        levels: number of codes.
        coarse, fine: the steps, and how far those beside the best of them are from it.

    Raises:
        UnsupportedError: if the kernels cannot be compiled.
    """
    inputs, outputs = weight.shape
    scale = torch.empty(inputs // size, outputs, dtype=scale_dtype)
    zero = None if symmetric else torch.empty_like(scale, dtype=torch.uint8)
    _functions().quantkit_search_scales(
        *_sizes(inputs, outputs, size, levels), _floats(weight), _floats(importance),
        (c_float * len(coarse))(*coarse), c_int64(len(coarse)), (c_float * len(fine))(*fine), c_int64(len(fine)),
        c_int64(_FLOAT_TYPES[scale_dtype]), _pointer(scale), _pointer(zero), torch.get_num_threads(),
    )  # fmt: skip
    return scale, zero


def round_in_turn(
    start: Tensor, wanted: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None, levels: int,
    size: int, codes: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    """See `ColumnKernels`."""
    _in_turn(
        _functions().quantkit_round_in_turn, start, wanted, ratios, columns, scale, zero, levels, size, codes, errors
    )


def improve_in_turn(
    start: Tensor, inverse: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None, levels: int,
    size: int, codes: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    """See `ColumnKernels`."""
    _in_turn(
        _functions().quantkit_improve_in_turn, start, inverse, ratios, columns, scale, zero, levels, size, codes, errors
    )  # fmt: skip


def _in_turn(
    function: ctypes._NamedFuncPointer, start: Tensor, other: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor,
    zero: Tensor | None, levels: int, size: int, codes: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    read = [one.contiguous() for one in (start, other, ratios)]  # held until the call is over
    function(
        *_sizes(*codes.shape, size, levels), c_int64(len(start)), *(_floats(one) for one in read), _pointer(columns),
        _floats(scale), None if zero is None else _floats(zero), _floats(codes), _floats(errors),
        torch.get_num_threads(),
    )  # fmt: skip


def _functions() -> ctypes.CDLL:
    return load_functions("gptq", os.environ.get(VARIANT_SETTING, "native"))


def _sizes(*sizes: int) -> list[c_int64]:
    return [c_int64(size) for size in sizes]


def _floats(tensor: Tensor) -> c_void_p:
    assert tensor.dtype == torch.float32
    return _pointer(tensor)


def _pointer(tensor: Tensor | None) -> c_void_p:
    if tensor is None:
        return c_void_p(None)
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return c_void_p(tensor.data_ptr())
