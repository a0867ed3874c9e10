r"""Stage 3 of `gpu_day.sh`: kernels and tiles side by side, where only a GPU can say which is
faster.

    python scripts/measure/gpu_kernels.py [--out FILE.json] [--seconds 300] \
        [--what few,gemv,many,attention]

few: tensor cores for 1 and 16 tokens, 16 or 32 rows a program, rows split 1 to 16 times, loads
ahead or not. gemv: the kernel for single products, some tiles, loads ahead or not. many: tiles of
64 to 256 rows and 64 or 128 tokens for 32 to 1024 tokens, next to the weight made floats first and
to bfloat16. attention: of one token over 256 to 8192 positions of either cache. Prints microseconds
and bytes a second as a share of a copy's, and at the end the fastest of each kind.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_setup as gpu
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.evals.timing import measure_bandwidth
from quantkit.kernels.triton_backend import TritonBackend
from quantkit.kernels.triton_tiles import TileConfig, count_staged_bytes, gemm_warps, max_split
from quantkit.kernels.triton_tune import copies_beyond_cache, multiply, seconds_each
from quantkit.model.cache import KVCache
from quantkit.tensors.scheme import QuantScheme

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.models import make_random_weight

SHAPES = ((48, 256),) if gpu.DRY else ((12288, 4096), (22016, 4096), (4096, 11008))
SCHEMES = ("int4-g128", "int8")
_SHARED = 200 << 10  # bytes of it that tiles may take


def few(bits: int, columns: int) -> Iterator[tuple[int, TileConfig]]:
    for tokens, rows, split, stages in itertools.product((1, 16), (16, 32), (1, 4, 8, 16), (1, 3)):
        allowed = min(split, max_split(bits, tokens, columns), columns // 128)
        yield (
            tokens,
            TileConfig(
                path="skinny",
                block_m=8 if tokens <= 8 else 16,
                block_n=rows,
                units=1,
                split=allowed,
                warps=1,
                stages=stages,
            ),
        )


def gemv(bits: int, columns: int) -> Iterator[tuple[int, TileConfig]]:
    tiles = (
        ((8, 32, 4), (4, 32, 4), (4, 16, 2)) if bits == 4 else ((8, 16, 4), (4, 16, 4), (4, 8, 2))
    )
    for (rows, units, warps), stages in itertools.product(tiles, (1, 3)):
        yield (
            1,
            TileConfig(
                path="gemv",
                block_m=1,
                block_n=rows,
                units=min(units, columns // 128),
                split=1,
                warps=warps,
                stages=stages,
            ),
        )


def many(bits: int, columns: int) -> Iterator[tuple[int, TileConfig]]:
    for tokens in (32, 64, 128, 256, 512, 1024):
        yield tokens, TileConfig("matmul", 1, 16, 4 if columns >= 512 else 1)
        for block_m, rows, units, split in itertools.product(
            (64, 128), (64, 128, 256), (1, 2, 4), (1, 2)
        ):
            each = units * count_staged_bytes(bits, min(block_m, tokens), rows)
            fits = (
                2 * each <= _SHARED
                and split <= max_split(bits, tokens, columns)
                and units * split <= columns // 128
            )
            held = block_m * rows <= 1 << 14 and not (block_m > tokens and block_m > 64)
            if fits and held:
                stages = min(4, _SHARED // each)
                yield (
                    tokens,
                    TileConfig(
                        path="gemm",
                        block_m=min(block_m, tokens),
                        block_n=rows,
                        units=units,
                        split=split,
                        warps=gemm_warps(rows),
                        stages=stages,
                    ),
                )


class Products:
    """Products of one kind, over all shapes and schemes."""

    def __init__(self, results: gpu.Results, copied: float, seconds: float) -> None:
        self.results, self.copied, self.seconds = results, copied, seconds
        self.best: dict[tuple[Any, ...], tuple[float, str]] = {}

    def run(self, what: str, kinds: Callable[[int, int], Iterator[tuple[int, TileConfig]]]) -> None:
        for text, (rows, columns) in itertools.product(SCHEMES, SHAPES):
            if what == "many" and columns > 2 * SHAPES[0][1]:
                continue
            self._shape(
                what,
                text,
                rows,
                columns,
                list(dict.fromkeys(kinds(4 if text != "int8" else 8, columns))),
            )

    def _shape(
        self, what: str, text: str, rows: int, columns: int, kinds: list[tuple[int, TileConfig]]
    ) -> None:
        scheme = QuantScheme.parse(text)
        group = scheme.group_size
        weight = make_random_weight(scheme, rows, columns, gpu.DEVICE)
        prepared = TritonBackend().prepare(weight)
        size = prepared["words"].nbytes + prepared["scale"].nbytes
        count = copies_beyond_cache(size, gpu.DEVICE)
        copies = [
            prepared,
            *({name: one.clone() for name, one in prepared.items()} for _ in range(count - 1)),
        ]
        floats = weight.dequantize().bfloat16()
        plain = [floats.clone() for _ in range(copies_beyond_cache(floats.nbytes, gpu.DEVICE))]
        if gpu.DRY:
            kinds = [
                next(one for one in kinds if one[1].path == path)
                for path in {config.path for _, config in kinds}
            ]
        x = {
            tokens: torch.randn(tokens, columns, device=gpu.DEVICE).bfloat16()
            for tokens, _ in kinds
        }
        with ThreadPoolExecutor() as pool:  # to compile; what fails will fail again
            list(pool.map(lambda kind: self._once(x[kind[0]], prepared, group, kind[1]), kinds))
        for tokens in x:
            calls = [partial(F.linear, x[tokens], one) for one in plain]
            self._time(what, text, rows, columns, tokens, "bf16", calls, floats.nbytes)
        for tokens, config in kinds:
            if gpu.spent(self.seconds):
                self.results.add(left_out=f"{what} {text} {rows}x{columns}: time is up")
                return
            calls = [partial(multiply, x[tokens], one, group, config) for one in copies]
            self._time(what, text, rows, columns, tokens, _describe(config), calls, size)

    def _once(
        self, x: Tensor, prepared: dict[str, Tensor], group: int | None, config: TileConfig
    ) -> None:
        with suppress(Exception):
            multiply(x, prepared, group, config)

    def _time(
        self,
        what: str,
        text: str,
        rows: int,
        columns: int,
        tokens: int,
        kind: str,
        calls: list[Any],
        size: int,
    ) -> None:
        def measure() -> None:
            seconds = seconds_each(calls, repeats=3)
            self.results.add(
                what=what,
                scheme=text,
                shape=f"{rows}x{columns}",
                tokens=tokens,
                kind=kind,
                us=1e6 * seconds,
                of_copy=size / seconds / self.copied,
            )
            key = what, text, f"{rows}x{columns}", tokens, kind.split()[0]
            self.best[key] = min(self.best.get(key, (float("inf"), "")), (seconds, kind))

        self.results.attempt(f"{what} {text} {rows}x{columns} {tokens} {kind}", measure)

    def summary(self) -> None:
        """The fastest of each path, side by side."""
        lines: dict[tuple[Any, ...], list[str]] = {}
        for (*shape, _), (seconds, kind) in self.best.items():
            lines.setdefault(tuple(shape), []).append(f"{kind}: {1e6 * seconds:.1f} us")
        for shape, figures in lines.items():
            print(*shape, "|", "; ".join(figures), flush=True)


def _describe(config: TileConfig) -> str:
    """Return what a tile config says, for the results."""
    return (
        f"{config.path} {config.block_m}x{config.block_n} units {config.units} split {config.split}"
        f" warps {config.warps} stages {config.stages}"
    )


def attention(results: gpu.Results, copied: float) -> None:
    """Of one token of Llama-3.1-8B's and Llama-2-7B's heads, next to torch's own over the
    bfloat16 cache.
    """
    attend = TritonBackend().offer_kernels().cached_attention
    assert attend is not None
    config = gpu.checkpoint("llama-2-7b", None, None, 1).config
    for kv_heads, length in itertools.product(
        (2,) if gpu.DRY else (8, 32), (32,) if gpu.DRY else (256, 2048, 8192)
    ):
        heads, size = (4, 32) if gpu.DRY else (32, 128)
        shaped = replace(config, num_heads=heads, num_kv_heads=kv_heads, head_dim=size)
        queries = torch.randn(1, heads, 1, size, device=gpu.DEVICE).bfloat16()
        new = torch.zeros(1, kv_heads, 1, size, device=gpu.DEVICE, dtype=torch.bfloat16)
        at = torch.tensor([length - 1], device=gpu.DEVICE)
        for dtype in (torch.bfloat16, torch.int8):
            held = 2 * kv_heads * length * size * dtype.itemsize
            count = copies_beyond_cache(held, gpu.DEVICE)
            caches = [
                KVCache(shaped, 1, length, dtype, gpu.DEVICE).update(0, at, new, new)
                for _ in range(count)
            ]
            calls = [partial(attend, queries, *cache, at, None, None) for cache in caches]
            _time_attention(results, copied, f"triton {dtype}", kv_heads, length, calls, held)
            if dtype == torch.bfloat16:
                shape = 1, kv_heads, length, size
                rows = [torch.zeros(shape, device=gpu.DEVICE, dtype=dtype) for _ in range(count)]
                own = partial(F.scaled_dot_product_attention, enable_gqa=True)
                _time_attention(
                    results,
                    copied,
                    "torch",
                    kv_heads,
                    length,
                    [partial(own, queries, r, r) for r in rows],
                    held,
                )


def _time_attention(
    results: gpu.Results,
    copied: float,
    kind: str,
    kv_heads: int,
    length: int,
    calls: list[Any],
    held: int,
) -> None:
    def measure() -> None:
        seconds = seconds_each(calls, repeats=3)
        results.add(
            what="attention",
            kind=kind,
            kv_heads=kv_heads,
            positions=length,
            us=1e6 * seconds,
            of_copy=held / seconds / copied,
        )

    results.attempt(f"attention {kind} {kv_heads} {length}", measure)


def main() -> None:
    given = gpu.options(__doc__.splitlines()[0], what="few,gemv,attention,many")
    results = gpu.Results(given.out)
    copied = 1e9 if gpu.DRY else measure_bandwidth(gpu.DEVICE)
    results.add(copy_bytes_a_second=copied)
    products = Products(results, copied, given.seconds)
    for what in given.what.split(","):
        if what == "attention":
            results.attempt(what, lambda: attention(results, copied))
        else:
            products.run(what, {"few": few, "gemv": gemv, "many": many}[what])
    products.summary()
    gpu.end(results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
