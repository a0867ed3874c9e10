"""Triton kernels for weights of 8 bits with one scale a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels.triton_tiles import Plan, card_of, plan_for
from quantkit.kernels.triton_words import (
    MAGIC,
    by_parts,
    columns,
    dotted,
    operator,
    partial_sums,
    place,
    raised,
    share,
    summed,
    tokens_of,
)  # fmt: skip


@triton.jit
def centred(words, magic, PLANE: tl.constexpr):
    """``(code - 128) * 2**place`` of one plane, exact in float32."""
    return raised(words, magic, PLANE, 8) - (8388608.0 + 128.0 * 2.0 ** place(PLANE, 8))


@triton.jit
def int8_gemv(
    x, words, scale, bias, out, m, n, k, units, magic,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Few tokens: each thread multiplies words of BLOCK_N rows, in float32."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    token = tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * k)[:, None, None]
    first, last = share(units, UNITS, 1)
    sums = tl.zeros((BLOCK_M, BLOCK_N, UNITS * 32), tl.float32)
    for start in tl.range(first, last, UNITS):
        word = start * 32 + tl.arange(0, UNITS * 32)
        at = (safe * (units * 32))[:, None] + word[None, :]
        tile = tl.load(words + at, mask=(word < units * 32)[None, :], other=0)
        for plane in tl.static_range(4):
            sums = tl.fma(centred(tile, magic, plane)[None, :, :], tokens_of(x, word, k, plane, 8), sums)
    product = tl.sum(sums, 2) * tl.load(scale + safe).to(tl.float32)[None, :]
    if BIAS:
        product += tl.load(bias + safe).to(tl.float32)[None, :]
    at = (tl.program_id(1) * m + token)[:, None].to(tl.int64) * n + row[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :])


@triton.jit
def int8_gemm(
    x, words, scale, bias, out, m, n, k, units, magic,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """More tokens: tensor cores, codes made floats of x's dtype, which is exact; the transposed product."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    x += (tl.where(token < m, token, 0) * k)[None, :]
    first, last = share(units, UNITS, 2)
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, UNITS):
        word = start * 32 + tl.arange(0, UNITS * 32)
        at = (safe * (units * 32))[:, None] + word[None, :]
        tile = tl.load(words + at, mask=(word < units * 32)[None, :], other=0)
        for plane in tl.static_range(4):
            column = columns(word, plane, 8)[:, None]
            piece = tl.load(x + column, mask=column < k, other=0)
            codes = (centred(tile, magic, plane) * 0.5 ** place(plane, 8)).to(piece.dtype)
            product = dotted(codes, piece, product)
    product *= tl.load(scale + safe).to(tl.float32)[:, None]
    if BIAS:
        product += tl.load(bias + safe).to(tl.float32)[:, None]
    at = (tl.program_id(2) * m + token)[None, :].to(tl.int64) * n + row[:, None]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=(token < m)[None, :] & (row < n)[:, None])


@triton.jit
def int8_floats(
    words, scale, out, n, k, units, magic, BLOCK_N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The weight itself [n, k] in the dtype of `out`."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    word = tl.program_id(0) * UNITS * 32 + tl.arange(0, UNITS * 32)
    at = (safe * (units * 32))[:, None] + word[None, :]
    tile = tl.load(words + at, mask=(word < units * 32)[None, :], other=0)
    step = tl.load(scale + safe).to(tl.float32)[:, None]
    for plane in tl.static_range(4):
        weight = centred(tile, magic, plane) * (step * 0.5 ** place(plane, 8))
        column = columns(word, plane, 8)[None, :]
        mask = (column < k) & (row < n)[:, None]
        tl.store(out + safe.to(tl.int64)[:, None] * k + column, weight.to(out.dtype.element_ty), mask=mask)


@operator("int8_linear")
def int8_linear(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, [M, I] to [M, O], by the plan for the shape.

    Args:
        words: int32 [O, W], from `pack`.
        scale: [O, 1].
    """
    plan = plan_for("int8", len(x), len(scale), x.shape[1], x.dtype, card_of(x.device))
    return int8_product(x, words, scale, bias, plan)


@int8_linear.register_fake
def _(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], len(scale))


def int8_product(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    """As `int8_linear`, by this plan."""
    (m, k), n, units = x.shape, len(scale), words.shape[1] // 32
    if m == 0:
        return x.new_empty(0, n)
    if plan.path == "matmul":

        def fill(floats: Tensor, part: slice) -> None:
            grid = triton.cdiv(units, plan.units), triton.cdiv(len(floats), plan.block_n)
            wrap_triton(int8_floats)[grid](
                words[part], scale[part], floats, len(floats), k, units, MAGIC,
                BLOCK_N=plan.block_n, UNITS=plan.units, num_warps=plan.warps, num_stages=plan.stages,
            )  # fmt: skip

        return by_parts(x, n, bias, fill)
    out = partial_sums(x, n, plan)
    fused = bias is not None and plan.split == 1
    arguments = (x.contiguous(), words, scale, bias if fused else scale, out, m, n, k, units, MAGIC, fused)
    blocks = triton.cdiv(n, plan.block_n)
    if plan.path == "gemv":
        wrap_triton(int8_gemv)[(blocks, plan.split)](*arguments, **plan.constants())
    else:
        wrap_triton(int8_gemm)[(triton.cdiv(m, plan.block_m), blocks, plan.split)](*arguments, **plan.constants())
    return summed(out, bias, x.dtype)
