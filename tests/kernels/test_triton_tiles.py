"""Tile configs of the Triton kernels: defaults, measured ones, those worth trying, and how they
are timed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from quantkit.kernels import triton_tiles
from quantkit.kernels.triton_tiles import (
    SHIPPED_FILE,
    TOKENS,
    GpuSpec,
    TileConfig,
    default_config,
    max_split,
    save_configs,
    tile_config_for,
)

pytest.importorskip("triton")

LARGE, SMALL = GpuSpec("large", 132, 232448), GpuSpec("small", 84, 1 << 16)
PATHS = {"gemv", "skinny", "gemm", "matmul"}


def test_the_default_gives_tile_configs_that_fit() -> None:
    shapes = itertools.product(
        (4, 8), TOKENS, (1, 4096, 128256), (1, 4096, 14336), (False, True), (LARGE, SMALL)
    )
    for bits, tokens, rows, columns, wide, gpu in shapes:
        config = default_config(bits, tokens, rows, columns, wide, gpu)
        sizes = (config.block_m, config.block_n, config.units, config.split, config.warps)
        assert all(size & (size - 1) == 0 and size > 0 for size in sizes)
        assert config.units * (config.split - 1) < columns / 128  # no program is without columns
        assert config.split <= max_split(bits, tokens, columns)
        assert config.path not in ("gemm", "skinny") or not wide
        if config.path in ("gemv", "skinny"):
            assert config.block_m >= tokens
        if config.path == "gemm":
            ahead = (
                config.stages
                * config.units
                * (128 * config.block_m * 2 + config.block_n * 16 * bits)
            )
            assert ahead <= gpu.shared_memory
            assert config.warps == config.block_n // 16


@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_split_rows_move_a_quarter_of_the_weight_at_most(bits: int) -> None:
    for tokens, columns in itertools.product((1, 16, 128), (1024, 4096, 14336)):
        split = max_split(bits, tokens, columns)
        assert (
            split == 1
            or split * tokens * 4 * 2 <= columns * bits / 8 / 4 < (split + 1) * tokens * 4 * 2
        )
    assert max_split(4, 128, 4096) == 1


def test_the_default_converts_to_floats_for_many_tokens_only() -> None:
    for wide, expected in ((False, ["skinny", "gemm", "matmul"]), (True, ["gemv", "matmul"])):
        paths = [default_config(4, tokens, 4096, 4096, wide, LARGE).path for tokens in TOKENS]
        assert paths == sorted(paths, key=expected.index)
        assert set(paths) == set(expected)


def test_measured_configs_serve_their_gpu_and_shapes_near_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    mine, other = TileConfig("gemm", 16, 32, 2, split=4), TileConfig("gemv", 2, 4, 8)
    try:
        save_configs(tmp_path / triton_tiles.CACHED_FILE, LARGE, "int8", 4096, 4096, {16: mine})
        save_configs(tmp_path / triton_tiles.CACHED_FILE, LARGE, "int8", 1024, 1024, {2: other})
        found = {
            (rows, tokens, dtype, gpu.name): tile_config_for("int8", tokens, rows, 4096, dtype, gpu)
            for rows in (4096, 6144, 16384)
            for tokens in (9, 16, 17)
            for dtype in (torch.bfloat16, torch.float32)
            for gpu in (LARGE, SMALL)
        }
        assert tile_config_for("int8", 2, 1024, 1024, torch.float16, LARGE) == other
    finally:
        triton_tiles.read_measured_configs.cache_clear()
        triton_tiles._tile_config.cache_clear()
    served = {key for key, config in found.items() if config == mine}
    assert served == {
        (rows, tokens, torch.bfloat16, "large") for rows in (4096, 6144) for tokens in (9, 16)
    }


def test_sizes_can_be_symbols() -> None:
    """As `torch.compile` has them for shapes that may change."""
    shapes = ShapeEnv()
    symbol = shapes.create_symbol(4096, source=ConstantSource("columns"))
    columns = shapes.create_symintnode(symbol, hint=4096)
    assert tile_config_for("int8", 1, 4096, columns, torch.bfloat16, LARGE) == default_config(
        8, 1, 4096, 4096, False, LARGE
    )


def test_candidates_are_those_that_fit() -> None:
    from quantkit.kernels import triton_tune

    for bits, tokens, rows, columns in itertools.product((4, 8), TOKENS, (256, 22016), (256, 4096)):
        found = list(triton_tune.candidates(bits, tokens, rows, columns))
        assert len(set(found)) == len(found) > 0
        for config in found:
            assert config.split <= max_split(bits, tokens, columns)
            assert config.path == "matmul" or config.split * config.units <= columns / 128
            assert config.path not in ("gemv", "skinny") or config.block_m >= tokens
        paths = {config.path for config in found}
        assert ("skinny" in paths) == (tokens <= 16)
        assert ("matmul" in paths) == (tokens >= 128)


def test_a_graph_is_timed_for_a_millisecond_while_the_gpu_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quantkit.kernels import triton_tune

    clock, log, graphs = [0.0], [], []

    class Graph:
        calls = 0

        def replay(self) -> None:
            clock[0] += self.calls * 1e-5
            log.append("replay")

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = clock[0]
            log.append("event")

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    @contextmanager
    def captured(graph: Graph) -> Iterator[None]:
        before = counted[0]
        yield
        graph.calls = counted[0] - before
        graphs.append(graph)

    def call() -> None:
        counted[0] += 1

    counted = [0]
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stub in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda which: nullcontext(),
        "CUDAGraph": Graph,
        "graph": captured,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    assert triton_tune.seconds_each([call] * 4, repeats=3) == pytest.approx(1e-5)
    assert graphs[-1].calls >= 100  # of ten microseconds
    assert all(log[at - 1] == "replay" for at, what in enumerate(log) if what == "event")


def test_every_config_in_the_package_is_one() -> None:
    for schemes in json.loads(SHIPPED_FILE.read_text()).values():
        for scheme, shapes in schemes.items():
            assert scheme in ("int8", "int4-g32", "int4-g64", "int4-g128")
            for configs in shapes.values():
                assert {int(tokens) for tokens in configs} <= set(TOKENS)
                assert all(
                    TileConfig(**fields).path in ("gemv", "skinny", "gemm", "matmul")
                    for fields in configs.values()
                )
