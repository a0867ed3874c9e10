"""Find the fastest tile config for a weight on the GPU at hand, by trying; times are those of
graphs of calls.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from quantkit.kernels import triton_tiles
from quantkit.kernels.triton_linear import linear_product
from quantkit.kernels.triton_tiles import SKINNY_ROWS, UNIT, TileConfig, default_config, gpu_spec
from quantkit.kernels.triton_words import INTERPRETED

# Of a graph that is timed.
_MIN_SECONDS = 1e-3
_log = logging.getLogger(__name__)


def tune(
    prepared: dict[str, Tensor], scheme: str, columns: int, tokens: Iterable[int]
) -> dict[int, TileConfig]:
    """Measure the fastest tile configs for a weight that the backend prepared, by number of tokens;
    `scheme` is ``int8``, ``int4-g128`` and so on.
    """
    if scheme == "int8":
        group = None
    else:
        group = int(scheme.removeprefix("int4-g"))
    with torch.cuda.device_of(prepared["words"]):  # type: ignore[no-untyped-call]
        configs = {}
        for count in tokens:
            configs[count] = fastest(prepared, group, columns, count)
        return configs


def multiply(
    x: Tensor, prepared: dict[str, Tensor], group: int | None, config: TileConfig
) -> Tensor:
    """Compute ``x @ weight.T`` in the tiles of a config, for a weight that the backend prepared;
    `group` is None for int8.
    """
    words = prepared["words"]
    scale = prepared["scale"]
    zero = prepared.get("zero")
    arrived = prepared["arrived"]
    # Threads that compile begin with the first GPU as their current one.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return linear_product(x, words, scale, zero, None, group, config, arrived)


def fastest(
    prepared: dict[str, Tensor], group: int | None, columns: int, tokens: int
) -> TileConfig:
    """Find the fastest of the candidates for a number of bfloat16 tokens, with a cold cache.

    A candidate that does not fit the GPU is left out, and so is one whose product is not that of
    the default config.
    """
    words = prepared["words"]
    if group is None:
        bits = 8
    else:
        bits = 4
    gpu = gpu_spec(words.device)
    rows = len(words)
    default = default_config(bits, tokens, rows, columns, False, gpu)
    x = torch.randn(tokens, columns, device=words.device, dtype=torch.bfloat16)
    count = copies_beyond_cache(words.nbytes, words.device)
    copies = []
    for _ in range(count):
        copy = {}
        for name, tensor in prepared.items():
            copy[name] = tensor.clone()
        copies.append(copy)
    expected = multiply(x, prepared, group, default).float()
    best = default
    shortest = float("inf")
    configs = list(dict.fromkeys((default, *candidates(bits, tokens, rows, columns))))
    # To compile many at a time. What a call raises is ignored: `multiply` below raises it again.
    with ThreadPoolExecutor() as pool:
        compilations = []
        for config in configs:
            compilations.append(pool.submit(multiply, x, prepared, group, config))
        wait(compilations)
    for config in configs:
        try:
            product = multiply(x, prepared, group, config).float()
            error = (product - expected).norm() / expected.norm()
            # Also true of NaN.
            if not error < 2**-6:
                raise RuntimeError(f"a product is off by {error.item():.0e}")
            calls = []
            for copy in copies:
                calls.append(partial(multiply, x, copy, group, config))
            seconds = seconds_each(calls)
        except Exception as error:
            # What a compiler or a driver says to a tile that does not fit.
            _log.debug("%s: %s", config, error)
            continue
        if seconds < shortest:
            best = config
            shortest = seconds
    _log.info("%dx%d, %d tokens: %s, %.1f us", rows, columns, tokens, best, shortest * 1e6)
    return best


def candidates(bits: int, tokens: int, rows: int, columns: int) -> Iterator[TileConfig]:
    """Yield tile configs worth trying."""
    units = -(-columns // UNIT)
    largest_split = triton_tiles.max_split(bits, tokens, columns)
    if tokens <= 8:
        tiles = []
        for size in (32 // bits, 64 // bits, 128 // bits, 256 // bits):
            if size <= units:
                tiles.append(size)
        kinds = itertools.product(tiles, (2, 4, 8, 16), (1, 2, 4), (1, 2, 4), (1, 3))
        for tile, block_n, warps, split, stages in kinds:
            # Of a row.
            words_per_thread = tile * 4 * bits // (32 * warps)
            fits = words_per_thread in (4, 8) and 4 <= block_n * tokens <= 16
            if fits and split * tile <= units and split <= largest_split:
                yield TileConfig(
                    path="gemv",
                    block_m=1 << (tokens - 1).bit_length(),
                    block_n=block_n,
                    units=tile,
                    split=split,
                    warps=warps,
                    stages=stages,
                )
    if tokens <= 16:
        block_m = 8 if tokens <= 8 else 16
        for block_n, tile, stages in itertools.product(
            (SKINNY_ROWS, 2 * SKINNY_ROWS), (1, 2), (1, 2, 3, 4)
        ):
            for split in (1, 2, 4, 8, 16):
                programs = -(-rows // block_n) * split
                fits = split <= largest_split and split * tile <= units
                # More programs than these need no split to fill a GPU.
                if fits and (split == 1 or programs <= 1 << 14):
                    yield TileConfig(
                        path="skinny",
                        block_m=block_m,
                        block_n=block_n,
                        units=tile,
                        split=split,
                        warps=1,
                        stages=stages,
                    )
    if 16 <= tokens <= 1024:
        sizes = set()
        for part in (1, 2, 4):
            sizes.add(max(min(tokens, 256) // part, 16))
        for block_m, block_n, tile, stages in itertools.product(
            sorted(sizes), (64, 128, 256), (1, 2), (2, 3, 4)
        ):
            in_registers = block_m * block_n <= 1 << 14 or block_n == 128
            ahead = stages * tile * triton_tiles.count_staged_bytes(bits, block_m, block_n)
            for split in (1, 2, 4, 8):
                programs = -(-rows // block_n) * -(-tokens // block_m) * split
                # An H200 has 227 KiB of shared memory for a program.
                in_memory = in_registers and ahead <= 200 << 10
                fits = in_memory and tile * split <= units and split <= largest_split
                if fits and (split == 1 or programs <= 1024) and (tile == 1 or block_m <= 32):
                    yield TileConfig(
                        path="gemm",
                        block_m=block_m,
                        block_n=block_n,
                        units=tile,
                        split=split,
                        warps=triton_tiles.gemm_warps(block_n),
                        stages=stages,
                    )
    if tokens >= 128:
        for block_n, tile, warps in itertools.product((4, 16), (1, 4), (4, 8)):
            yield TileConfig(
                path="matmul", block_m=1, block_n=block_n, units=tile, split=1, warps=warps
            )


def seconds_each(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Measure the median seconds of one of the calls over timed replays of a CUDA graph of them, so
    that launching costs nothing; while Triton interprets, the time of one call.

    If each call has its own operands, together larger than the L2 cache (`copies_beyond_cache`),
    each finds it cold. The graph takes a millisecond or more and is launched behind another replay:
    neither the clock's steps nor the host's time is in the figure.
    """
    if INTERPRETED:
        started = time.perf_counter()
        calls[0]()
        return time.perf_counter() - started
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles, and lets libraries allocate what they need.
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    # A first graph, to estimate how many rounds of calls take long enough.
    graph = _capture_graph(calls, 1)
    rounds = math.ceil(_MIN_SECONDS / max(min(_replays(graph, 3)), 1e-7))
    if rounds > 1:
        graph = _capture_graph(calls, rounds)
    return statistics.median(_replays(graph, repeats)) / (rounds * len(calls))


def _capture_graph(calls: Sequence[Callable[[], object]], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    return graph


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Measure the seconds that replays of a graph take."""
    times = []
    for _ in range(count):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # The GPU is busy with it while the next one is launched.
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return times


def copies_beyond_cache(size: int, device: torch.device) -> int:
    """Count the operands of `size` bytes that fill twice the GPU's L2 cache; at least 4."""
    if device.type == "cpu":
        return 2
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
    return max(4, -(-2 * cache // size))
