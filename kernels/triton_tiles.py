"""Tile configs: which kernel multiplies a weight of some shape on a GPU, in tiles of which size.

Measured configs lie in ``triton_configs.json``, by GPU, scheme, shape [O, I] and number of tokens;
`scripts/tune_triton.py` writes them. For all else there is `default_config`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantkit.kernels.build import cache_folder

UNIT = 128
"""Columns that the kernels' layout packs together."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Numbers of tokens that configs are measured for; a config serves all up to its number, the
last one all beyond.
"""

SKINNY_ROWS = 16
"""The fewest rows of a program of the path ``skinny``: as many as tensor cores take at a time."""

CACHED_FILE = "triton_configs.json"
"""The file in the cache folder for configs found on this machine; they take precedence over
`SHIPPED_FILE`.
"""

SHIPPED_FILE = Path(str(files("quantkit.kernels") / CACHED_FILE))

_NEAR = (
    1.0  # doublings of rows and columns together within which a measured shape stands for another
)
_WAVES = 2  # programs for each processor, at least
_SKINNY_WAVES = {
    4: 24,
    8: 5,
}  # by bits, of one warp each: what they have loaded ahead has to fill the memory's latency
_SKINNY_STAGES = {
    4: 1,
    8: 3,
}  # on an H200, 8 bits are faster with few programs that load ahead, 4 bits with many
_SKINNY_TOKENS = 16  # up to which tensor cores are fed without converting weights
_LARGE = 512  # tokens beyond which the weight is converted to floats first


@dataclass(frozen=True)
class TileConfig:
    """How one product is computed.

    Attributes:
        path: ``gemv``, each product by itself; ``skinny``, tensor cores for few tokens, codes as
            they are; ``gemm``, tensor cores, weights converted to floats in registers; ``matmul``,
            the weight converted to floats in memory and multiplied by torch.
        block_m, block_n: tokens and rows of a program's tile.
        units: units of columns that a program loads at a time.
        split: programs that share a row's columns.
        warps, stages: as Triton takes them.
    """

    path: str
    block_m: int
    block_n: int
    units: int
    split: int = 1
    warps: int = 4
    stages: int = 3

    def constants(self) -> dict[str, int]:
        """What the kernels of the first three paths are compiled for."""
        ahead = (
            {"STAGES": self.stages} if self.path == "gemv" else {}
        )  # Triton looks ahead for tensor cores only
        return ahead | {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "UNITS": self.units,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


class GpuSpec(NamedTuple):
    """A GPU: its name, its processors, bytes of shared memory for a program."""

    name: str
    processors: int
    shared_memory: int


INTERPRETER = GpuSpec("interpreter", 1, 1 << 16)
"""Stands for the CPU on which Triton interprets."""


@functools.cache
def gpu_spec(device: torch.device) -> GpuSpec:
    """The GPU behind a device."""
    if device.type == "cpu":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    shared_memory = getattr(found, "shared_memory_per_block_optin", 0) or 1 << 16
    return GpuSpec(found.name, found.multi_processor_count, shared_memory)


def tile_config_for(
    scheme: str, tokens: int, rows: int, columns: int, dtype: torch.dtype, gpu: GpuSpec
) -> TileConfig:
    """The config for `tokens` of a dtype and a weight [rows, columns] in a scheme (``int8``,
    ``int4-g128`` and so on): measured for such a shape on this GPU and a dtype that tensor cores
    take, or the default.
    """
    bucket = next((size for size in TOKENS if tokens <= size), TOKENS[-1])
    shape = (
        int(rows),
        int(columns),
    )  # while torch.compile traces, they can be symbols, which have no hash
    return _tile_config(scheme, bucket, *shape, dtype == torch.float32, gpu)


@functools.cache
def _tile_config(
    scheme: str, bucket: int, rows: int, columns: int, wide: bool, gpu: GpuSpec
) -> TileConfig:
    shapes = read_measured_configs().get(gpu.name, {}).get(scheme, {})
    near = min(shapes, key=lambda shape: _distance(shape, rows, columns), default=None)
    if (
        not wide
        and near is not None
        and _distance(near, rows, columns) <= _NEAR
        and str(bucket) in shapes[near]
    ):
        return TileConfig(**shapes[near][str(bucket)])
    config = default_config(4 if scheme.startswith("int4") else 8, bucket, rows, columns, wide, gpu)
    return (
        replace(config, block_n=512) if gpu is INTERPRETER else config
    )  # its time goes by programs


@functools.cache
def read_measured_configs() -> dict[str, Any]:
    """Measured configs as fields, by GPU, scheme, ``ROWSxCOLUMNS`` and tokens."""
    return _merge_configs(_read(SHIPPED_FILE), _read(cache_folder() / CACHED_FILE))


def save_configs(
    path: Path,
    gpu: GpuSpec,
    scheme: str,
    rows: int,
    columns: int,
    configs: Mapping[int, TileConfig],
) -> None:
    """Put configs by number of tokens into a file of measured ones, and use them from now on."""
    fields = {str(tokens): asdict(config) for tokens, config in configs.items()}
    merged = _merge_configs(_read(path), {gpu.name: {scheme: {f"{rows}x{columns}": fields}}})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    text = re.sub(
        r"\{[^{}]*\}", lambda config: " ".join(config[0].split()), json.dumps(merged, indent=1)
    )
    partial.write_text(text + "\n")  # one config a line
    os.replace(partial, path)
    read_measured_configs.cache_clear()
    _tile_config.cache_clear()


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _merge_configs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings merged down to the configs; the second's take precedence."""
    whole = dict(first)
    for key, value in second.items():
        deeper = "path" not in value and key in whole
        whole[key] = _merge_configs(whole[key], value) if deeper else value
    return whole


def default_config(
    bits: int, tokens: int, rows: int, columns: int, wide: bool, gpu: GpuSpec
) -> TileConfig:
    """The config for shapes that were not measured; `wide` activations are float32, for which there
    are no tensor cores. Only here a path that converts weights in memory is chosen.
    """
    if tokens <= _SKINNY_TOKENS and not wide:
        return skinny_config(bits, tokens, rows, columns, gpu)
    if tokens <= bits // 2:  # what the multipliers do while the weights come
        return gemv_config(bits, tokens, rows, columns, gpu)
    if wide or tokens > _LARGE:
        return TileConfig("matmul", 1, 16, _power_below(min(math.ceil(columns / UNIT), 4)))
    return gemm_config(bits, tokens, rows, columns, gpu)


def skinny_config(bits: int, tokens: int, rows: int, columns: int, gpu: GpuSpec) -> TileConfig:
    """The default config of ``skinny`` for up to 16 tokens; of its instructions a weight takes
    fewer in 32 rows.
    """
    block_m, block_n = (
        8 if tokens <= 8 else 16,
        2 * SKINNY_ROWS if rows > SKINNY_ROWS else SKINNY_ROWS,
    )
    config = TileConfig("skinny", block_m, block_n, 1, warps=1, stages=_SKINNY_STAGES[bits])
    return _split(config, bits, tokens, rows, columns, gpu, _SKINNY_WAVES[bits])


def gemv_config(bits: int, tokens: int, rows: int, columns: int, gpu: GpuSpec) -> TileConfig:
    """The default config of ``gemv`` for up to 4 tokens."""
    block_n = {1: 8, 2: 4, 4: 4}[tokens]  # as many as the registers hold
    tile = _power_below(
        min(math.ceil(columns / UNIT), 128 // bits)
    )  # 16 bytes for each of 128 threads
    return _split(
        TileConfig("gemv", tokens, block_n, tile, stages=1), bits, tokens, rows, columns, gpu
    )


def gemm_config(
    bits: int, tokens: int, rows: int, columns: int, gpu: GpuSpec, wide: bool = False
) -> TileConfig:
    """The default config of ``gemm``; for `wide` see `default_config`."""
    block_m, block_n = min(max(tokens, 16), 128), 128 if tokens >= 128 else 64
    room = gpu.shared_memory - (16 << 10)
    while 2 * count_staged_bytes(bits, block_m, block_n, wide) > room and block_m > 16:
        block_m //= 2
    stages = 2 if wide else max(2, min(4, room // count_staged_bytes(bits, block_m, block_n)))
    config = TileConfig("gemm", block_m, block_n, 1, warps=gemm_warps(block_n), stages=stages)
    return _split(config, bits, tokens, rows, columns, gpu)


def gemm_warps(block_n: int) -> int:
    """The warps of a program of the path ``gemm``, with 16 rows each: weights are multiplied
    where they are loaded.
    """
    return max(4, block_n // 16)


def count_staged_bytes(bits: int, block_m: int, block_n: int, wide: bool = False) -> int:
    """Bytes of activations and words that a program of the path ``gemm`` loads at a time, for
    each unit.
    """
    return UNIT * block_m * (4 if wide else 2) + block_n * UNIT * bits // 8


def max_split(bits: int, tokens: int, columns: int) -> int:
    """The most splits of rows: their parts, 4 bytes a number written and read, move a quarter of
    the weight at most.
    """
    return max(1, columns * bits // 32 // (8 * tokens))


def _split(
    config: TileConfig,
    bits: int,
    tokens: int,
    rows: int,
    columns: int,
    gpu: GpuSpec,
    waves: int = _WAVES,
) -> TileConfig:
    """The config with rows split until every processor has work, or nothing is left to split."""
    programs = math.ceil(rows / config.block_n) * math.ceil(tokens / config.block_m)
    wanted = max(1, math.ceil(waves * gpu.processors / programs))
    units = math.ceil(columns / UNIT)
    limits = wanted, math.ceil(units / config.units), max_split(bits, tokens, columns), 16
    return replace(config, split=min(_power_below(limit) for limit in limits))


def _power_below(number: int) -> int:
    """The largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)


def _distance(shape: str, rows: int, columns: int) -> float:
    """Doublings from one shape to another."""
    other_rows, other_columns = map(int, shape.split("x"))
    return abs(math.log2(rows / other_rows)) + abs(math.log2(columns / other_columns))
