"""The layout that the Triton kernels share: codes in words of 32 bits, in units of 128 columns.

A unit is ``UNIT`` columns of a row. Its words each hold one code of every *plane*, and a plane is a
run of columns: the code of plane p in word i is column ``p * run + i`` of the unit, where run is
the number of words in it. So a mask takes a plane out of a tile of words, and the activations that
belong to it lie side by side. Two planes of a group lie 16 bits apart (`word_bit`), so a mask may
take out both, as a pair of small numbers.

A code becomes a float without a conversion: its bits, left where they are in the word, are put
under the exponent of 2**23. That is ``2**23 + code * 2**position``, exactly; the kernels subtract
the offset and divide the power of two out of the scale or the activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op

from quantkit.kernels.triton_tiles import UNIT, TileConfig

MAGIC = 0x4B000000
"""The bits of 2**23.

It is an argument of kernels: as a constant it would cost an instruction for each code.
"""

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Triton runs the kernels itself, on the CPU (TRITON_INTERPRET=1)."""

WIDEN = tl.constexpr(INTERPRETED)
"""Its interpreter takes the bits of bfloat16 for integers in `tl.dot`."""

# Codes that are packed at a time: the intermediate integers take four bytes for each.
_PACK_CODES = 1 << 25


def operator(name: str, result: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Any:
    """Register an operator whose kernels torch.compile can see; while Triton interprets, one that
    it cannot.

    Kernels are launched on the GPU of the operator's first tensor, whichever is the current one.
    For tracing, `result` returns empty tensors of the result's shapes and dtypes for the same
    arguments.
    """

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def on_its_gpu(x: Tensor, /, *arguments: Any, **options: Any) -> Any:
            with torch.cuda.device_of(x):
                return function(x, *arguments, **options)

        # torch.compile cannot trace kernels that the interpreter runs as Python.
        make: Any = custom_op if INTERPRETED else triton_op
        registered = make(f"quantkit_triton::{name}", on_its_gpu, mutates_args=mutates)
        registered.register_fake(result)
        return registered

    return register


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 [O, I], into words, int32 [O, ceil(I / UNIT) * UNIT * bits / 32]; zeros
    fill the last unit.
    """
    parts = []
    for rows in codes.split(max(1, _PACK_CODES // codes.shape[1])):
        parts.append(_pack_rows(rows, bits))
    return torch.cat(parts)


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    planes = 32 // bits
    padded = F.pad(codes, (0, -codes.shape[1] % UNIT))
    units = padded.view(codes.shape[0], -1, planes, UNIT // planes)
    words = torch.zeros_like(units[:, :, 0], dtype=torch.int32)
    for plane in range(planes):
        words |= units[:, :, plane].to(torch.int32) << word_bit(plane, bits)
    return words.flatten(1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Extract codes, uint8 [O, N] of whole units, from words [O, N * bits / 32]."""
    planes = 32 // bits
    units = words.view(words.shape[0], -1, 1, UNIT // planes)
    positions = [word_bit(plane, bits) for plane in range(planes)]
    shifts = torch.tensor(positions, device=words.device, dtype=torch.int32).view(-1, 1)
    # The mask removes the other planes, and the sign that a shift of an int32 repeats.
    codes: Tensor = ((units >> shifts) & (2**bits - 1)).to(torch.uint8)
    return codes.flatten(1)


def product_buffer(x: Tensor, rows: int, config: TileConfig) -> Tensor:
    """Allocate memory for products [M, rows], or float32 parts of them [split, M, rows]."""
    if config.split == 1:
        return x.new_empty(len(x), rows)
    return x.new_empty(config.split, len(x), rows, dtype=torch.float32)


def sum_splits(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum the parts of products in order; torch.compile fuses it with the next operation."""
    if out.dim() == 2:
        return out
    product = out.sum(0)
    if bias is not None:
        product = product + bias
    return product.to(dtype)


@triton.constexpr_function
def word_bit(plane, bits):
    """Compute the bit of a word at which a plane's codes begin."""
    return plane // 2 * 4 + plane % 2 * 16 if bits == 4 else plane * 8


@triton.constexpr_function
def bit_position(plane, bits):
    """Compute the bit at which `to_biased_floats` takes a plane's codes, in the word or in the
    shifted word.
    """
    at = word_bit(plane, bits)
    # A float32 has 23 bits below its exponent: higher codes are shifted down.
    return at if at + bits <= 23 else at - (12 if bits == 4 else 16)


@triton.jit
def to_biased_floats(words, magic, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Compute ``2**23 + code * 2**position`` in float32 for one plane of words."""
    at: tl.constexpr = bit_position(PLANE, BITS)
    shift: tl.constexpr = word_bit(PLANE, BITS) - at
    if shift != 0:
        words = words >> shift
    return ((words & ((2**BITS - 1) << at)) | magic).to(tl.float32, bitcast=True)


@triton.jit
def columns_of(word, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Compute the columns of a plane of words that are counted along a row."""
    RUN: tl.constexpr = 4 * BITS
    return word // RUN * 128 + PLANE * RUN + word % RUN


@triton.jit
def spread(values, ROWS: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr):
    """Repeat values of each unit [ROWS, UNITS] for each of its words [ROWS, UNITS * run]."""
    RUN: tl.constexpr = 4 * BITS
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, UNITS, RUN)), (ROWS, UNITS * RUN))


@triton.jit
def load_tokens(x, word, k, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Load activations [M, 1, words] over ``2**position`` of a plane's columns, for pointers to
    tokens [M, 1, 1].
    """
    column = columns_of(word, PLANE, BITS)[None, None, :]
    # As many as words in a load: the layouts agree, and nothing moves between threads.
    column = tl.max_contiguous(column, (1, 1, 4))
    return tl.load(x + column, mask=column < k, other=0).to(tl.float32) * 0.5 ** bit_position(
        PLANE, BITS
    )


@triton.jit
def unit_range(units, UNITS: tl.constexpr, AXIS: tl.constexpr):
    """Find the first unit of this program's share of a row, and the first beyond it."""
    size = tl.cdiv(tl.cdiv(units, UNITS), tl.num_programs(AXIS)) * UNITS
    first = tl.program_id(AXIS) * size
    return first, tl.minimum(first + size, units)


@triton.jit
def dot_add(weight, x, sums):
    """Compute ``sums + weight @ x`` on tensor cores."""
    if WIDEN:
        weight, x = weight.to(tl.float32), x.to(tl.float32)
    return tl.dot(weight, x, sums, input_precision="ieee")
