"""Find the fastest plan for a weight on the card at hand, by trying."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from quantkit.kernels.triton_int4 import int4_product
from quantkit.kernels.triton_int8 import int8_product
from quantkit.kernels.triton_tiles import UNIT, Plan, card_of, rule
from quantkit.kernels.triton_timing import copies_beyond_cache, seconds_each

_log = logging.getLogger(__name__)


def tune(prepared: dict[str, Tensor], scheme: str, columns: int, tokens: Iterable[int]) -> dict[int, Plan]:
    """The fastest plans for a weight that the backend prepared, by number of tokens.

    Args:
        scheme: ``int8``, ``int4-g128`` and so on.
    """
    group = None if scheme == "int8" else int(scheme.removeprefix("int4-g"))
    return {size: fastest(prepared, group, columns, size) for size in tokens}


def product(x: Tensor, prepared: dict[str, Tensor], group: int | None, plan: Plan) -> Tensor:
    """``x @ weight.T`` by a plan, for what the backend prepared; `group` is None for int8."""
    if group is None:
        return int8_product(x, prepared["words"], prepared["scale"], None, plan)
    return int4_product(x, prepared["words"], prepared["scale"], prepared.get("zero"), None, group, plan)


def fastest(prepared: dict[str, Tensor], group: int | None, columns: int, tokens: int) -> Plan:
    """The fastest of the candidates for so many bfloat16 tokens, with a cold cache.

    A candidate that does not fit the card is left out, and so is one whose product is not that of the rule's
    plan.
    """
    words = prepared["words"]
    card, rows = card_of(words.device), len(words)
    plain = rule(8 if group is None else 4, tokens, rows, columns, False, card)
    x = torch.randn(tokens, columns, device=words.device, dtype=torch.bfloat16)
    count = copies_beyond_cache(words.nbytes, words.device)
    copies = [{name: tensor.clone() for name, tensor in prepared.items()} for _ in range(count)]
    expected = product(x, prepared, group, plain).float()
    best, least = plain, float("inf")
    plans = list(dict.fromkeys((plain, *candidates(8 if group is None else 4, tokens, rows, columns))))
    with ThreadPoolExecutor() as pool:  # to compile; what fails will fail again
        list(pool.map(lambda plan: _attempt(lambda: product(x, prepared, group, plan)), plans))
    for plan in plans:
        try:
            error = (product(x, prepared, group, plan).float() - expected).norm() / expected.norm()
            if not error < 2**-6:
                raise RuntimeError(f"a product is off by {error.item():.0e}")
            seconds = seconds_each([partial(product, x, copy, group, plan) for copy in copies])
        except Exception as error:  # what a compiler or a driver says to a tile that does not fit
            _log.debug("%s: %s", plan, error)
            continue
        if seconds < least:
            best, least = plan, seconds
    _log.info("%dx%d, %d tokens: %s, %.1f us", rows, columns, tokens, best, least * 1e6)
    return best


def _attempt(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        call()


def candidates(bits: int, tokens: int, rows: int, columns: int) -> Iterator[Plan]:
    """Plans worth trying."""
    units = -(-columns // UNIT)
    if tokens <= 8:
        tiles = [size for size in (32 // bits, 64 // bits, 128 // bits, 256 // bits) if size <= units]
        for tile, block_n, warps, split in itertools.product(tiles, (2, 4, 8, 16), (1, 2, 4), (1, 2, 4)):
            of_a_thread = tile * 4 * bits // (32 * warps)  # words of a row
            if of_a_thread in (4, 8) and 4 <= block_n * tokens <= 16 and split * tile <= units:
                yield Plan("gemv", 1 << (tokens - 1).bit_length(), block_n, tile, split, warps, 1)
    if 2 <= tokens <= 1024:
        sizes = sorted({min(max(tokens // part, 16), 256) for part in (1, 2, 4)})
        for block_m, block_n, tile, stages in itertools.product(sizes, (64, 128), (1, 2), (2, 3, 4)):
            warps = 8 if block_n * block_m >= 8192 else 4
            bytes_ahead = stages * tile * (UNIT * block_m * 2 + block_n * 16 * bits)
            for split in (1, 2, 4, 8):
                programs = -(-rows // block_n) * -(-tokens // block_m) * split
                if bytes_ahead <= 200 << 10 and tile * split <= units and (split == 1 or programs <= 1024):
                    yield Plan("gemm", block_m, block_n, tile, split, warps, stages)
    if tokens >= 128:
        for block_n, tile, warps in itertools.product((4, 16), (1, 4), (4, 8)):
            yield Plan("matmul", 1, block_n, tile, 1, warps)
