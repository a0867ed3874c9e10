"""Tile configs: which kernel multiplies a weight of some shape on a GPU, in tiles of which size.

Measured configs lie in ``triton_configs.json``, by GPU, scheme, shape [O, I] and number of tokens;
`scripts/measure/tune_triton.py` writes them. For all else there is `default_config`.
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

# Doublings of rows and columns together within which a measured shape stands for another.
_NEAR = 1.0
# Programs for each processor, at least.
_WAVES = 2
# By bits, of one warp each: what they have loaded ahead has to fill the memory's latency.
_SKINNY_WAVES = {4: 24, 8: 5}
# On an H200, 8 bits are faster with few programs that load ahead, 4 bits with many.
_SKINNY_STAGES = {4: 1, 8: 3}
# Tokens up to which tensor cores are fed without converting weights.
_SKINNY_TOKENS = 16
# Tokens beyond which the weight is converted to floats first.
_LARGE = 512


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
        """List the constants that the kernels of the first three paths are compiled for."""
        constants = {}
        if self.path == "gemv":
            # By `num_stages`, Triton loads ahead for tensor cores only; other loops name theirs.
            constants["STAGES"] = self.stages
        return constants | {
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
    """Describe the GPU behind a device."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    # 64 KiB if torch does not have this property.
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or 1 << 16
    return GpuSpec(properties.name, properties.multi_processor_count, shared_memory)


def tile_config_for(
    scheme: str, tokens: int, rows: int, columns: int, dtype: torch.dtype, gpu: GpuSpec
) -> TileConfig:
    """Choose the config for `tokens` of a dtype and a weight [rows, columns] in a scheme (``int8``,
    ``int4-g128`` and so on): one measured for such a shape on this GPU and a dtype that tensor
    cores take, or the default.
    """
    bucket = next((size for size in TOKENS if tokens <= size), TOKENS[-1])
    # While torch.compile traces, sizes can be symbols, which have no hash for the cache.
    rows = int(rows)
    columns = int(columns)
    return _tile_config(scheme, bucket, rows, columns, dtype == torch.float32, gpu)


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
    if scheme.startswith("int4"):
        bits = 4
    else:
        bits = 8
    config = default_config(bits, bucket, rows, columns, wide, gpu)
    if gpu is INTERPRETER:
        # The interpreter's time depends on the number of programs.
        return replace(config, block_n=512)
    return config


@functools.cache
def read_measured_configs() -> dict[str, Any]:
    """Read measured configs as fields, by GPU, scheme, ``ROWSxCOLUMNS`` and tokens."""
    return _merge_configs(_read(SHIPPED_FILE), _read(cache_folder() / CACHED_FILE))


def save_configs(
    path: Path,
    gpu: GpuSpec,
    scheme: str,
    rows: int,
    columns: int,
    configs: Mapping[int, TileConfig],
) -> None:
    """Add configs by number of tokens to a file of measured ones, and use them from now on."""
    fields = {}
    for tokens, config in configs.items():
        fields[str(tokens)] = asdict(config)
    merged = _merge_configs(_read(path), {gpu.name: {scheme: {f"{rows}x{columns}": fields}}})
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read or write the file: it always sees a complete one.
    partial = path.with_suffix(f".{os.getpid()}")
    # One config a line: the innermost braces.
    text = re.sub(
        r"\{[^{}]*\}", lambda match: " ".join(match[0].split()), json.dumps(merged, indent=1)
    )
    partial.write_text(text + "\n")
    os.replace(partial, path)
    read_measured_configs.cache_clear()
    _tile_config.cache_clear()


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    configs: dict[str, Any] = json.loads(path.read_text())
    return configs


def _merge_configs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge nested mappings down to the configs; the second's take precedence."""
    merged = dict(first)
    for key, value in second.items():
        # A mapping with a path is a config, which is replaced as one.
        if "path" not in value and key in merged:
            merged[key] = _merge_configs(merged[key], value)
        else:
            merged[key] = value
    return merged


def default_config(
    bits: int, tokens: int, rows: int, columns: int, wide: bool, gpu: GpuSpec
) -> TileConfig:
    """Choose the config for shapes that were not measured; `wide` activations are float32, for
    which there are no tensor cores. Only here a path that converts weights in memory is chosen.
    """
    if tokens <= _SKINNY_TOKENS and not wide:
        return skinny_config(bits, tokens, rows, columns, gpu)
    if tokens <= bits // 2:
        # As many tokens as the multipliers finish while the weights are loaded.
        return gemv_config(bits, tokens, rows, columns, gpu)
    if wide or tokens > _LARGE:
        return TileConfig("matmul", 1, 16, _power_below(min(math.ceil(columns / UNIT), 4)))
    return gemm_config(bits, tokens, rows, columns, gpu)


def skinny_config(bits: int, tokens: int, rows: int, columns: int, gpu: GpuSpec) -> TileConfig:
    """Choose the default config of ``skinny`` for up to 16 tokens."""
    block_m = 8 if tokens <= 8 else 16
    # With 32 rows, a weight takes fewer instructions.
    block_n = SKINNY_ROWS
    if rows > SKINNY_ROWS:
        block_n = 2 * SKINNY_ROWS
    config = TileConfig("skinny", block_m, block_n, 1, warps=1, stages=_SKINNY_STAGES[bits])
    return _split(config, bits, tokens, rows, columns, gpu, _SKINNY_WAVES[bits])


def gemv_config(bits: int, tokens: int, rows: int, columns: int, gpu: GpuSpec) -> TileConfig:
    """Choose the default config of ``gemv`` for up to 4 tokens."""
    # As many rows as the registers hold.
    block_n = {1: 8, 2: 4, 4: 4}[tokens]
    # 16 bytes for each of 128 threads.
    tile = _power_below(min(math.ceil(columns / UNIT), 128 // bits))
    config = TileConfig("gemv", tokens, block_n, tile, stages=1)
    return _split(config, bits, tokens, rows, columns, gpu)


def gemm_config(
    bits: int, tokens: int, rows: int, columns: int, gpu: GpuSpec, wide: bool = False
) -> TileConfig:
    """Choose the default config of ``gemm``; for `wide` see `default_config`."""
    block_m = min(max(tokens, 16), 128)
    block_n = 128 if tokens >= 128 else 64
    room = gpu.shared_memory - (16 << 10)
    # At least two stages have to fit.
    while 2 * count_staged_bytes(bits, block_m, block_n, wide) > room and block_m > 16:
        block_m //= 2
    if wide:
        stages = 2
    else:
        stages = max(2, min(4, room // count_staged_bytes(bits, block_m, block_n)))
    config = TileConfig("gemm", block_m, block_n, 1, warps=gemm_warps(block_n), stages=stages)
    return _split(config, bits, tokens, rows, columns, gpu)


def gemm_warps(block_n: int) -> int:
    """Choose the warps of a program of the path ``gemm``, with 16 rows each: weights are multiplied
    where they are loaded.
    """
    return max(4, block_n // 16)


def count_staged_bytes(bits: int, block_m: int, block_n: int, wide: bool = False) -> int:
    """Count the bytes of activations and words that a program of the path ``gemm`` loads at a time,
    for each unit.
    """
    activation_bytes = 4 if wide else 2
    return UNIT * block_m * activation_bytes + block_n * UNIT * bits // 8


def max_split(bits: int, tokens: int, columns: int) -> int:
    """Compute the most splits of rows: their parts, 4 bytes a number written and read, move a
    quarter of the weight at most.
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
    """Split the rows of a config until every processor has work, or nothing is left to split."""
    programs = math.ceil(rows / config.block_n) * math.ceil(tokens / config.block_m)
    useful = max(1, math.ceil(waves * gpu.processors / programs))
    units = math.ceil(columns / UNIT)
    limit = min(useful, math.ceil(units / config.units), max_split(bits, tokens, columns), 16)
    return replace(config, split=_power_below(limit))


def _power_below(number: int) -> int:
    """Compute the largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)


def _distance(shape: str, rows: int, columns: int) -> float:
    """Count the doublings from one shape to another."""
    other_rows, other_columns = shape.split("x")
    row_doublings = abs(math.log2(rows / int(other_rows)))
    return row_doublings + abs(math.log2(columns / int(other_columns)))
