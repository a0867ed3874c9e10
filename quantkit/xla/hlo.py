"""What devices exchange in a compiled program, from its text (HLO)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
# What the name of a computation says that does both.
_SCATTERED = "all-reduce-scatter"
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{([^}]*)\}"
)
_SIZE = re.compile(r"'(\w+)'=(\d+)")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_HALF = ("s4", "u4")


@dataclass(frozen=True)
class Collective:
    """One kind of exchange.

    Attributes:
        devices: numbers of the devices that exchange with device 0's group, the first group of
            them.
        dtype: of the values, as HLO names it.
        shape: of what a device has after it, or before it where that is more.
    """

    kind: str
    devices: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of the values on one device."""
        count = math.prod(self.shape)
        if self.dtype in _HALF:
            return -(-count // 2)
        return count * _width(self.dtype)


def exchanges(program: str) -> Counter[Collective]:
    """Return the collectives of a program with how often each is run, those of loops in each of
    their rounds.
    """
    computations = _computations(program)
    result: Counter[Collective] = Counter()
    spread: dict[tuple[str, Collective], int] = {}
    entry = re.search(r"^ENTRY %?([\w.\-]+) ", program, re.MULTILINE)
    for one, times, channel in (
        _run(computations, entry[1], 1, fused=False) if entry is not None else ()
    ):
        if channel is None:
            result[one] += times
        else:
            # Its start, its end and parts between may be in several fusions.
            spread[channel, one] = min(times, spread.get((channel, one), times))
    for (_, one), times in spread.items():
        result[one] += times
    return result


def _computations(program: str) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            lines = result.setdefault(head[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return result


def _run(
    computations: dict[str, list[str]], name: str, times: int, *, fused: bool
) -> Iterator[tuple[Collective, int, str | None]]:
    """Yield the collectives of a computation that is run so often; in a fusion with their
    channel.
    """
    for line in computations.get(name, ()):
        if (match := _COLLECTIVE.search(line)) is not None:
            if fused:
                channel = _CHANNEL.search(line)
            else:
                channel = None
            for one in _collectives(line, match):
                if _SCATTERED in name:
                    one = replace(one, kind="reduce-scatter")
                else:
                    one = one
                yield one, times, None if channel is None else channel[1]
            # What it applies is an addition.
            continue
        rounds = _rounds(computations, line)
        called = [one[1] for one in _CALLED.finditer(line)]
        if (branches := _BRANCHES.search(line)) is not None:
            called += [one.strip().lstrip("%") for one in branches[1].split(",")]
        for other in called:
            yield from _run(computations, other, times * rounds, fused=fused or " fusion(" in line)


def _rounds(computations: dict[str, list[str]], line: str) -> int:
    """Return how often an instruction runs what it calls: the limit of a loop's counter, which
    begins at zero.
    """
    if (trips := _TRIPS.search(line)) is not None:
        return int(trips[1])
    if (condition := _CONDITION.search(line)) is None:
        return 1
    limits = []
    for inside in computations.get(condition[1], ()):
        for one in _LIMIT.finditer(inside):
            limits.append(int(one[1]))
    return max(limits, default=1)


def _collectives(line: str, match: re.Match[str]) -> Iterator[Collective]:
    """Yield those of one instruction; several arrays may be exchanged together."""
    kind = match[2]
    devices = _devices(line)
    operands = []
    for one in _ARRAY.finditer(line[match.end() :].partition("), ")[0]):
        operands.append((one[1], _shape(one[2])))
    results = [(one[1], _shape(one[2])) for one in _ARRAY.finditer(match[1])]
    # A start has its operands among its results.
    if match[3] and len(results) > len(operands):
        if len(results) % 2 == 0:
            results = results[len(results) // 2 :]
        else:
            results = results[-1:]
    if len(operands) == len(results):
        for before, after in zip(operands, results, strict=True):
            dtype, shape = max(before, after, key=lambda one: math.prod(one[1]))
            yield Collective(kind, devices, dtype, shape)
    else:
        # Operands are printed without their shapes.
        if kind == "reduce-scatter":
            times = len(devices)
        else:
            times = 1
        for dtype, shape in results:
            yield Collective(
                kind, devices, dtype, (times * shape[0], *shape[1:]) if shape else shape
            )


def _devices(line: str) -> tuple[int, ...]:
    """Return the first group of devices that exchange; empty for all together."""
    if (listed := _LISTED.search(line)) is not None:
        return tuple(map(int, listed[1].split(",")))
    if (pairs := _PAIRS.search(line)) is not None:
        return int(pairs[1]), int(pairs[2])
    if (iota := _IOTA.search(line)) is not None:
        order = _order(iota[3], iota[4])
        return tuple(order[: int(iota[2])])
    if (mesh := _MESH.search(line)) is None:
        return ()
    sizes = [(one[1], int(one[2])) for one in _SIZE.finditer(mesh[1])]
    count = math.prod(size for _, size in sizes)
    if mesh[2]:
        order = _order(mesh[2], mesh[3])
    else:
        order = list(range(count))
    places = [0]
    for axis, before, size in _AXIS.findall(mesh[4]):
        place = next(place for place, (name, _) in enumerate(sizes) if name == axis)
        stride = math.prod(size for _, size in sizes[place + 1 :])
        whole = sizes[place][1]
        own = int(size or whole)
        stride *= whole // (int(before or 1) * own)
        places = [start + number * stride for start in places for number in range(own)]
    return tuple(order[one] for one in places)


def _order(sizes: str, transposed: str | None) -> list[int]:
    """Numbers that count through axes of some sizes, in the order of the transposed axes."""
    shape = [int(one) for one in sizes.split(",")]
    if transposed:
        axes = [int(one) for one in transposed.split(",")]
    else:
        axes = list(range(len(shape)))
    result = [0]
    for axis in axes:
        stride = math.prod(shape[axis + 1 :])
        result = [start + number * stride for start in result for number in range(shape[axis])]
    return result


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(",") if one)


def _width(dtype: str) -> int:
    if dtype == "pred":
        return 1
    return int(re.sub(r"\D*(\d+).*", r"\1", dtype)) // 8
