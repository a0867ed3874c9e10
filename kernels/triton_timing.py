"""How long GPU work takes: CUDA events around graphs, so that launching costs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def seconds_each(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median time of one of the calls, which are captured into a graph one after another.

    Give them operands of their own, together larger than the L2 cache (`copies_beyond_cache`), and each call
    finds it cold.

    Args:
        repeats: replays that are timed, after one that is not.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles, and lets libraries allocate what they need
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / len(calls))
    return statistics.median(times)


def copies_beyond_cache(size: int, device: torch.device) -> int:
    """How many operands of so many bytes it takes to be twice the card's L2 cache; at least 4."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
    return max(4, -(-2 * cache // size))
