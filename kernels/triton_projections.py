"""Products of up to 16 tokens with what follows them in a decoder block, in one launch each.

An RMS norm before a product is folded into it. Whoever writes hidden states also writes them
*weighted* by the weights of the norm that comes next, and of each block of their columns the sum of
squares; the product takes the weighted ones, and its sums are divided by the root mean square.

Every program stores its sums, in as many parts as share a row. The last to arrive of those that
share an output adds them up, in one order, and does what follows: one launch, and the same bits
each time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels.triton_skinny import base_bits, last_to_arrive, skinny_tile
from quantkit.kernels.triton_tiles import (
    SKINNY_ROWS,
    UNIT,
    TileConfig,
    gpu_spec,
    skinny_config,
    tile_config_for,
)
from quantkit.kernels.triton_words import operator

MAX_TOKENS = 16
"""As many as the kernels take."""

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")
"""Of a gate, by the numbers that kernels know them by."""

# Columns of hidden states that a program weighs at a time.
_COLUMNS = 2048
SUM_ROWS = tl.constexpr(SKINNY_ROWS)
"""Columns of hidden states whose squares are summed up together, at least."""

# Sums of squares that a program adds up at a time.
_SUMS = tl.constexpr(1024)


@triton.jit
def complete(arrived, PROGRAMS: tl.constexpr):
    """Check whether all of the programs that share an output have stored their sums; called at the
    end of a program.
    """
    if PROGRAMS == 1:
        # The program's own threads read what others of them have stored.
        tl.debug_barrier()
        last = True
    else:
        last = last_to_arrive(arrived, PROGRAMS)
    return last


@triton.jit
def store_part(parts, product, m, n, row, BLOCK_M: tl.constexpr):
    """Store this program's sums [N, M] of some rows of n, in parts [split, m, n]."""
    token = tl.arange(0, BLOCK_M)
    at = (tl.program_id(1) * m + token).to(tl.int64)[None, :] * n + row[:, None]
    tl.store(parts + at, product, mask=(token < m)[None, :] & (row < n)[:, None])


@triton.jit
def sum_parts(parts, m, n, token, row, mask, SPLIT: tl.constexpr):
    """Add up all parts for tokens and rows that go with each other, [A, B]; zeros for those that
    are not there.
    """
    part = tl.arange(0, SPLIT)[:, None, None] * m
    at = (part + token[None, :, :]).to(tl.int64) * n + row[None, :, :]
    mask = tl.broadcast_to(mask[None, :, :], at.shape)
    # Past the processor's own cache, which may not have what other programs have stored.
    return tl.sum(tl.load(parts + at, mask=mask, other=0, cache_modifier=".cg"), 0)


@triton.jit
def inverse_rms(squares, token, mask, blocks, columns, EPS: tl.constexpr, TOKENS: tl.constexpr):
    """Compute 1 over the root mean square of tokens [TOKENS], whose squares are summed up in [m,
    blocks].
    """
    CHUNK: tl.constexpr = _SUMS // TOKENS
    total = tl.zeros((TOKENS, CHUNK), tl.float32)
    for start in tl.range(0, blocks, CHUNK):
        block = (start + tl.arange(0, CHUNK))[None, :]
        total += tl.load(
            squares + token[:, None] * blocks + block,
            mask=mask[:, None] & (block < blocks),
            other=0,
        )
    return tl.rsqrt(tl.sum(total, 1) / columns + EPS)


@triton.jit
def weigh_states(x, norm, weighted, squares, k, BLOCK: tl.constexpr):
    """Store hidden states of one token [k] weighted by a norm's weights, and the sum of their
    squares.
    """
    token = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(x + token * k + column, mask=column < k, other=0).to(tl.float32)
        weights = tl.load(norm + column, mask=column < k, other=0)
        tl.store(
            weighted + token * k + column,
            (values * weights).to(weighted.dtype.element_ty),
            mask=column < k,
        )
        total += values * values
    tl.store(squares + token, tl.sum(total, 0))


@triton.jit
def add_product(
    x,
    words,
    scale,
    zero,
    bias,
    states,
    norm,
    out,
    weighted,
    squares,
    parts,
    arrived,
    m,
    n,
    k,
    units,
    base,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Add products to hidden states [m, n], and store what the next norm needs of them."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    product = skinny_tile(
        x,
        words,
        scale,
        zero,
        safe,
        m,
        k,
        units,
        base,
        GROUP,
        SYMMETRIC,
        WHOLE,
        BLOCK_M,
        BLOCK_N,
        UNITS,
    )
    store_part(parts, product, m, n, row, BLOCK_M)
    if complete(arrived + tl.program_id(0), SPLIT):
        token = tl.arange(0, TOKENS)
        there = (token < m)[:, None] & (row < n)[None, :]
        column = tl.broadcast_to(row[None, :], (TOKENS, BLOCK_N))
        line = tl.broadcast_to(token[:, None], (TOKENS, BLOCK_N))
        total = sum_parts(parts, m, n, line, column, there, SPLIT)
        if BIAS:
            total += tl.load(bias + safe)[None, :].to(tl.float32)
        at = line.to(tl.int64) * n + column
        total = tl.load(states + at, mask=there, other=0).to(tl.float32) + total * MULTIPLIER
        # Rounded first: the squares are those of the hidden states as they are stored.
        total = total.to(out.dtype.element_ty)
        tl.store(out + at, total, mask=there)
        total = tl.where(there, total.to(tl.float32), 0.0)
        weights = tl.load(norm + safe)[None, :]
        tl.store(weighted + at, (total * weights).to(weighted.dtype.element_ty), mask=there)
        # A program of more than SUM_ROWS columns stores their sum as the first part, and zeros as
        # the others.
        part = tl.arange(0, BLOCK_N // SUM_ROWS)[None, :]
        place = tl.program_id(0) * (BLOCK_N // SUM_ROWS) + part
        blocks = tl.cdiv(n, SUM_ROWS)
        sums = tl.where(part == 0, tl.sum(total * total, 1)[:, None], 0.0)
        tl.store(
            squares + token[:, None] * blocks + place,
            sums,
            mask=(token < m)[:, None] & (place < blocks),
        )


@triton.jit
def apply_gate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Multiply an activated gate by `up`."""
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == 1:
        # GELU's tanh, as a sigmoid of twice its argument; the first constant is 2 sqrt(2 / pi).
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    if LIMIT > 0:
        # Comparisons, unlike minima and maxima, keep NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1)


@triton.jit
def gate_product(
    x,
    squares,
    words,
    scale,
    zero,
    bias,
    out,
    parts,
    arrived,
    growth,
    m,
    n,
    k,
    units,
    base,
    blocks,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Compute gated products [m, n] of 2 n rows, gates and then ups: a program takes as many of
    either.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    index = tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * HALF
    row = start + index % HALF
    row = tl.where(row < n, row + index // HALF * n, 2 * n)
    safe = tl.where(row < 2 * n, row, 0)
    product = skinny_tile(
        x,
        words,
        scale,
        zero,
        safe,
        m,
        k,
        units,
        base,
        GROUP,
        SYMMETRIC,
        WHOLE,
        BLOCK_M,
        BLOCK_N,
        UNITS,
    )
    store_part(parts, product, m, 2 * n, row, BLOCK_M)
    if complete(arrived + tl.program_id(0), SPLIT):
        token = tl.arange(0, TOKENS)
        inner = start + tl.arange(0, HALF)
        there = (token < m)[:, None] & (inner < n)[None, :]
        column, line = (
            tl.broadcast_to(inner[None, :], (TOKENS, HALF)),
            tl.broadcast_to(token[:, None], (TOKENS, HALF)),
        )
        factor = inverse_rms(squares, token, token < m, blocks, k, EPS, TOKENS)[:, None] * growth
        gate = sum_parts(parts, m, 2 * n, line, column, there, SPLIT) * factor
        up = sum_parts(parts, m, 2 * n, line, column + n, there, SPLIT) * factor
        if BIAS:
            gate += tl.load(bias + inner, mask=inner < n, other=0)[None, :].to(tl.float32)
            up += tl.load(bias + n + inner, mask=inner < n, other=0)[None, :].to(tl.float32)
        given = apply_gate(gate, up, ACTIVATION, LIMIT, ALPHA)
        tl.store(out + line.to(tl.int64) * n + column, given.to(out.dtype.element_ty), mask=there)


def choose_skinny_config(
    x: Tensor, rows: int, group: int, block_n: int | None = None
) -> TileConfig:
    """Choose the tiles for a product of x [M, K] with a weight of `rows` rows, as for `skinny`, of
    at most `block_n` rows.
    """
    tokens, columns = x.shape
    gpu = gpu_spec(x.device)
    if group:
        name = f"int4-g{group}"
        bits = 4
    else:
        name = "int8"
        bits = 8
    config = tile_config_for(name, tokens, rows, columns, x.dtype, gpu)
    # The fastest path of a single product may be another one, but these kernels have only this.
    if config.path != "skinny":
        config = skinny_config(bits, tokens, rows, columns, gpu)
    return replace(config, block_n=min(config.block_n, block_n or config.block_n))


def tile_constants(
    x: Tensor, group: int, zero: Tensor | None, config: TileConfig
) -> dict[str, int | bool]:
    """List the constants of the kernels to multiply x [M, K]."""
    return {
        "GROUP": group,
        "SYMMETRIC": zero is None,
        "WHOLE": x.shape[1] % (UNIT * config.units) == 0,
        "TOKENS": triton.next_power_of_2(len(x)),
        "SPLIT": config.split,
        **config.constants(),
    }


def allocate_parts(x: Tensor, rows: int, config: TileConfig) -> Tensor:
    """Allocate memory for the sums of programs: float32 [split, M, rows]."""
    return x.new_empty(config.split, len(x), rows, dtype=torch.float32)


def count_units(words: Tensor, group: int) -> int:
    """Count the units of columns in a row of words."""
    if group:
        return words.shape[1] // 16
    return words.shape[1] // 32


@operator(
    "weighted_states",
    lambda x, norm: (torch.empty_like(x), x.new_empty(len(x), 1, dtype=torch.float32)),
)
def apply_norm_weights(x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh hidden states x [M, D] by a norm's weights, float32 [D], and sum up their squares,
    float32 [M, 1].
    """
    weighted = torch.empty_like(x)
    squares = x.new_empty(len(x), 1, dtype=torch.float32)
    block = min(_COLUMNS, triton.next_power_of_2(x.shape[1]))
    wrap_triton(weigh_states)[(len(x),)](
        x, norm, weighted, squares, x.shape[1], BLOCK=block, num_warps=4
    )
    return weighted, squares


def _empty_states(
    x: Tensor, states: Tensor, words: object, scale: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    squares = states.new_empty(len(x), triton.cdiv(len(scale), SKINNY_ROWS), dtype=torch.float32)
    return torch.empty_like(states), torch.empty_like(states), squares


@operator("added_product", _empty_states, mutates=("arrived",))
def project_and_add(
    x: Tensor,
    states: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    arrived: Tensor,
    group: int,
    norm: Tensor,
    multiplier: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``(x @ weight.T + bias) * multiplier`` to hidden states [M, D]; return them, them
    weighted, and sums of squares, float32 [M, blocks], that make up those of each.

    Args:
        words, scale, zero, bias, arrived: as for `skinny_product`.
        group: columns that share a scale, 0 for all of 8 bits.
        norm: the weights of the norm that comes next, float32 [D].
    """
    m, k = x.shape
    n = len(scale)
    config = choose_skinny_config(x, n, group)
    out, weighted, squares = _empty_states(x, states, words, scale)
    # A kernel takes no None: the scale stands for zero points or a bias that it does not read.
    wrap_triton(add_product)[(triton.cdiv(n, config.block_n), config.split)](
        x,
        words,
        scale,
        scale if zero is None else zero,
        scale if bias is None else bias,
        states,
        norm,
        out,
        weighted,
        squares,
        allocate_parts(x, n, config),
        arrived,
        m,
        n,
        k,
        count_units(words, group),
        base_bits(x.dtype),
        BIAS=bias is not None,
        MULTIPLIER=multiplier,
        **tile_constants(x, group, zero, config),
    )
    return out, weighted, squares


@operator(
    "gated_product",
    lambda x, _, words, scale, *__: x.new_empty(len(x), len(scale) // 2),
    mutates=("arrived",),
)
def project_and_gate(
    x: Tensor,
    squares: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    arrived: Tensor,
    group: int,
    eps: float,
    growth: float,
    activation: int,
    limit: float,
    alpha: float,
) -> Tensor:
    """Compute the gated inner states [M, F] of normed hidden states.

    Args:
        x: hidden states weighted by the norm's weights, [M, D].
        squares: sums of squares, float32 [M, blocks], that make up those of each's hidden states.
        words, scale, zero, bias, arrived, group: of gates and then ups, as for `project_and_add`.
        eps, growth: of the norm, and what its weights were divided by.
        activation: its number in `ACTIVATIONS`.
        limit: of gates and ups, 0 for none; of ``swiglu_oai`` as is `alpha`.
    """
    m, k = x.shape
    # A row of the gates and one of the ups make one output.
    n = len(scale) // 2
    config = choose_skinny_config(x, 2 * n, group)
    out = x.new_empty(m, n)
    wrap_triton(gate_product)[(triton.cdiv(n, config.block_n // 2), config.split)](
        x,
        squares,
        words,
        scale,
        scale if zero is None else zero,
        scale if bias is None else bias,
        out,
        allocate_parts(x, 2 * n, config),
        arrived,
        growth,
        m,
        n,
        k,
        count_units(words, group),
        base_bits(x.dtype),
        squares.shape[1],
        BIAS=bias is not None,
        ACTIVATION=activation,
        LIMIT=limit,
        ALPHA=alpha,
        EPS=eps,
        **tile_constants(x, group, zero, config),
    )
    return out
