"""How a product is laid out over a GPU: which kernel, in tiles of which size, for which shape.

Plans that were measured lie in ``triton_configs.json``, by card, scheme, shape [O, I] and number of tokens;
`scripts/tune_triton.py` writes them. For all else there is a rule.
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
from typing import Any

import torch

from quantkit.kernels.build import cache_folder

UNIT = 128
"""Columns that the kernels' layout keeps together."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Numbers of tokens that plans are measured for; a plan serves all up to its number, the last one all beyond."""

STORED = Path(str(files("quantkit.kernels") / "triton_configs.json"))
"""Plans that ship with the package."""

FOUND = "triton_configs.json"
"""The file in the cache folder for plans found on this machine; they come first."""

_NEAR = 1.0  # doublings of rows and columns together within which a measured shape stands for another
_WAVES = 2  # programs a processor that should at least be there
_LARGE = 512  # tokens beyond which floats are made first


@dataclass(frozen=True)
class Plan:
    """One way to multiply.

    Attributes:
        path: ``gemv``, each product by itself; ``gemm``, tensor cores with weights made floats in registers;
            ``matmul``, the weight made floats in memory and multiplied by torch.
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
        """What the kernels of the first two paths are compiled for."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "UNITS": self.units,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


@dataclass(frozen=True)
class Card:
    """What the rule needs to know of a GPU: its name, its processors, bytes of shared memory for a program."""

    name: str
    processors: int
    shared: int


INTERPRETER = Card("interpreter", 1, 1 << 16)
"""Stands for the CPU on which Triton interprets."""


@functools.cache
def card_of(device: torch.device) -> Card:
    """The card behind a device."""
    if device.type == "cpu":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or 1 << 16
    return Card(found.name, found.multi_processor_count, shared)


def plan_for(scheme: str, tokens: int, rows: int, columns: int, dtype: torch.dtype, card: Card) -> Plan:
    """The plan for `tokens` and a weight [rows, columns]: measured for such a shape on this card, or by the rule.

    Args:
        scheme: ``int8``, ``int4-g128`` and so on.
        dtype: of the activations; plans are measured for those that tensor cores take.
    """
    bucket = next((size for size in TOKENS if tokens <= size), TOKENS[-1])
    return _plan(scheme, bucket, rows, columns, dtype == torch.float32, card)


@functools.cache
def _plan(scheme: str, bucket: int, rows: int, columns: int, wide: bool, card: Card) -> Plan:
    shapes = measured().get(card.name, {}).get(scheme, {})
    near = min(shapes, key=lambda shape: _distance(shape, rows, columns), default=None)
    if not wide and near is not None and _distance(near, rows, columns) <= _NEAR and str(bucket) in shapes[near]:
        return Plan(**shapes[near][str(bucket)])
    plan = rule(4 if scheme.startswith("int4") else 8, bucket, rows, columns, wide, card)
    return replace(plan, block_n=512) if card is INTERPRETER else plan  # whose time goes by programs


@functools.cache
def measured() -> dict[str, Any]:
    """Measured plans as fields, by card, scheme, ``ROWSxCOLUMNS`` and tokens."""
    plans = _read(STORED)
    return _merged(plans, _read(cache_folder() / FOUND))


def save(path: Path, card: Card, scheme: str, rows: int, columns: int, plans: Mapping[int, Plan]) -> None:
    """Put plans by number of tokens into a file of measured ones, and use them from now on."""
    fields = {str(tokens): asdict(plan) for tokens, plan in plans.items()}
    merged = _merged(_read(path), {card.name: {scheme: {f"{rows}x{columns}": fields}}})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(_line_a_plan(merged))
    os.replace(partial, path)
    measured.cache_clear()
    _plan.cache_clear()


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings as one, down to the plans; the second's come first."""
    whole = dict(first)
    for key, value in second.items():
        deeper = "path" not in value and key in whole
        whole[key] = _merged(whole[key], value) if deeper else value
    return whole


def _line_a_plan(plans: dict[str, Any]) -> str:
    """JSON with each plan on a line of its own."""
    return re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), json.dumps(plans, indent=1)) + "\n"


def rule(bits: int, tokens: int, rows: int, columns: int, wide: bool, card: Card) -> Plan:
    """A plan for what nobody measured. When floats are made in memory is decided here and nowhere else.

    Args:
        wide: activations are float32, for which there are no tensor cores.
    """
    units = math.ceil(columns / UNIT)
    if tokens <= bits // 2:  # what the multipliers do while the weights come
        block_n = {1: 8, 2: 4, 4: 4}[tokens]  # as many as the registers hold
        tile = _power_below(min(units, 128 // bits))  # 16 bytes for each of 128 threads
        return _split(Plan("gemv", tokens, block_n, tile), tokens, rows, units, card)
    if wide or tokens > _LARGE:
        return Plan("matmul", 1, 16, _power_below(min(units, 4)))
    block_m = min(max(tokens, 16), 128)
    block_n = 128 if tokens >= 128 else 64
    tile = 2 if block_m <= 32 and units > 1 else 1
    stage = tile * (UNIT * block_m * 2 + block_n * 16 * bits)  # bytes of activations and words
    stages = max(2, min(4, (card.shared - (16 << 10)) // stage))
    warps = 8 if tokens >= 128 else 4
    return _split(Plan("gemm", block_m, block_n, tile, warps=warps, stages=stages), tokens, rows, units, card)


def _split(plan: Plan, tokens: int, rows: int, units: int, card: Card) -> Plan:
    """The plan with rows split until every processor has work, or there is nothing left to share."""
    programs = math.ceil(rows / plan.block_n) * math.ceil(tokens / plan.block_m)
    wanted = _WAVES * card.processors / programs
    most = math.ceil(units / plan.units)
    split = min(_power_below(max(1, math.ceil(wanted))), _power_below(most), 16)
    return replace(plan, split=split)


def _power_below(number: int) -> int:
    """The largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)


def _distance(shape: str, rows: int, columns: int) -> float:
    """Doublings from one shape to another."""
    other_rows, other_columns = map(int, shape.split("x"))
    return abs(math.log2(rows / other_rows)) + abs(math.log2(columns / other_columns))
