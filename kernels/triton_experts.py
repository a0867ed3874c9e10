"""Triton kernels for mixtures of experts: the rows of each expert together, all experts in one
launch.

A *place* is one of the N * K choices of experts for tokens, in their order. Places are put into
blocks of one expert each. How many blocks that takes depends on the choices, so there are as many
as it can take at most, and those that are left over do nothing: nothing that is chosen is needed on
the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels.triton_gemm import base_of, dot_order, gemm_tile
from quantkit.kernels.triton_linear import gemv_tile
from quantkit.kernels.triton_tiles import (
    INTERPRETER,
    TOKENS,
    GpuSpec,
    TileConfig,
    gemm_config,
    gemv_config,
    gpu_spec,
)
from quantkit.kernels.triton_words import MAGIC, operator

# Tokens of an expert, beyond which tiles do not grow.
_MAX_TOKENS = 512


@triton.jit
def block_of(places, experts, axis: tl.constexpr, m, BLOCK_M: tl.constexpr):
    """Load the expert of this program's block, the block's places, and which of them are used: the
    others are `m`.
    """
    block = tl.program_id(axis)
    place = tl.load(places + block * BLOCK_M + tl.arange(0, BLOCK_M))
    return tl.load(experts + block).to(tl.int64), place, place < m


@triton.jit
def grouped_gemv(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    places,
    experts,
    m,
    n,
    k,
    units,
    magic,
    count,
    per_row,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply few places of an expert; codes of 8 bits where GROUP is 0."""
    expert, place, there = block_of(places, experts, 2, m, BLOCK_M)
    # A block that is left over, see the module.
    if expert >= count:
        return
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    x += (tl.where(there, place, 0) // per_row * k)[:, None, None]
    groups = 1 if GROUP == 0 else units * (128 // GROUP)
    words += expert * (n * units * (32 if GROUP == 0 else 16))
    scale += expert * (n * groups)
    zero += expert * (n * groups)
    product = gemv_tile(
        x,
        words,
        scale,
        zero,
        safe,
        k,
        units,
        magic,
        GROUP,
        SYMMETRIC,
        BLOCK_M,
        BLOCK_N,
        UNITS,
        STAGES,
    )
    if BIAS:
        product += tl.load(bias + expert * n + safe).to(tl.float32)[None, :]
    at = place[:, None].to(tl.int64) * n + row[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=there[:, None] & (row < n)[None, :])


@triton.jit
def grouped_gemm(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    places,
    experts,
    m,
    n,
    units,
    base,
    count,
    per_row,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Multiply more places of an expert; codes of 8 bits where GROUP is 0."""
    expert, place, there = block_of(places, experts, 0, m, BLOCK_M)
    # A block that is left over, see the module.
    if expert >= count:
        return
    first_row = tl.program_id(1) * BLOCK_N
    x += (tl.where(there, place, 0) // per_row * (units * 128))[None, :]
    groups = 1 if GROUP == 0 else units * (128 // GROUP)
    words += expert * (n * units * (32 if GROUP == 0 else 16))
    scale += expert * (n * groups)
    zero += expert * (n * groups)
    product = gemm_tile(
        x, words, scale, zero, first_row, n, units, base, GROUP, SYMMETRIC, BLOCK_M, BLOCK_N, UNITS
    )
    row = first_row + tl.arange(0, BLOCK_N)
    if BIAS:
        product += tl.load(bias + expert * n + tl.where(row < n, row, 0)).to(tl.float32)[:, None]
    at = place[None, :].to(tl.int64) * n + row[:, None]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=there[None, :] & (row < n)[:, None])


def sort_places_into_blocks(chosen: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Sort places into blocks of one expert each, int32 [blocks * size], and list the experts of
    the blocks, int32 [blocks].

    Args:
        chosen: of `count` experts, [N, K].
        size: places in a block; padding is N * K, and the expert of a block without places is
            `count`.
    """
    flat = chosen.flatten()
    total = len(flat)
    if size == 1:
        # Every place is a block: nothing to sort.
        return torch.arange(total, dtype=torch.int32, device=flat.device), flat.to(torch.int32)
    # Not `bincount`, whose result has a size that the host would have to wait for.
    counts = torch.zeros(count, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + size - 1) // size * size
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    owner = flat[order]
    index = torch.arange(total, device=flat.device)
    # The index of a place among those of its expert.
    within = index - (counts.cumsum(0) - counts)[owner]
    # Full blocks, and for each expert with places one that may not be full.
    blocks = total // size + min(total, count)
    places = torch.full((blocks * size,), total, dtype=torch.int32, device=flat.device)
    places.scatter_(0, (ends - padded)[owner] + within, order.to(torch.int32))
    starts = torch.arange(blocks, device=flat.device) * size
    return places, torch.searchsorted(ends, starts, right=True).to(torch.int32)


def choose_experts_config(
    bits: int, places: int, count: int, rows: int, columns: int, wide: bool, gpu: GpuSpec
) -> TileConfig:
    """Choose the tiles for `places` places of `count` experts with weights [rows, columns]; `wide`:
    see `default_config`.
    """
    if places <= count:
        # Most experts that are chosen are chosen once.
        config = gemv_config(bits, 1, rows, columns, gpu)
    else:
        expected = min(max(bits, places // count), _MAX_TOKENS)
        tokens = next(size for size in TOKENS if expected <= size)
        config = gemm_config(bits, tokens, rows, columns, gpu, wide)
    if gpu is INTERPRETER:
        # The interpreter's time depends on the number of programs.
        config = replace(config, block_n=512)
    # The kernels write their products once: no program shares a row with others.
    return replace(config, split=1)


def _empty_products(x: Tensor, words: Tensor, *operands: Any) -> Tensor:
    # By position, because operators are called so: `chosen` is the last but one.
    chosen = operands[-2]
    return x.new_empty(*chosen.shape, words.shape[1])


@operator("grouped_linear", _empty_products)
def grouped_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    chosen: Tensor,
    group: int | None,
) -> Tensor:
    """Multiply each token by each of its experts, [N, K, O] in the dtype of x.

    Args:
        x: [N, I], or [N, K, I] with a row for each expert of a token.
        words, scale, zero, bias, group: as for `linear`, of all experts [E, ...].
        chosen: the experts, int64 [N, K].
    """
    count, n, width = words.shape
    k = x.shape[-1]
    total = chosen.numel()
    # Places that read the same row of x.
    if x.dim() == 2:
        per_row = chosen.shape[1]
    else:
        per_row = 1
    out = x.new_empty(*chosen.shape, n)
    if total == 0:
        return out
    if group is None:
        bits = 8
    else:
        bits = 4
    config = choose_experts_config(
        bits, total, count, n, k, x.dtype == torch.float32, gpu_spec(x.device)
    )
    places, experts = sort_places_into_blocks(chosen, count, config.block_m)
    units = width // (4 * bits)
    blocks = triton.cdiv(n, config.block_n)
    constants = {
        "GROUP": group or 0,
        "SYMMETRIC": zero is None,
        "BIAS": bias is not None,
        **config.constants(),
    }
    # A kernel takes no None; these constants keep it from reading what stands for it.
    if zero is None:
        zero = scale
    if bias is None:
        bias = scale
    weight = (words, scale, zero, bias)
    if config.path == "gemv":
        wrap_triton(grouped_gemv)[(blocks, 1, len(experts))](
            x.contiguous(),
            *weight,
            out,
            places,
            experts,
            total,
            n,
            k,
            units,
            MAGIC,
            count,
            per_row,
            **constants,
        )
    else:
        wrap_triton(grouped_gemm)[(len(experts), blocks, 1)](
            dot_order(x, bits),
            *weight,
            out,
            places,
            experts,
            total,
            n,
            units,
            base_of(x.dtype),
            count,
            per_row,
            **constants,
        )
    return out
