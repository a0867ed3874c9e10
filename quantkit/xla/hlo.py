"""Find the data that devices exchange in a compiled program, from its text (HLO)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
# Part of the name of the computation into which XLA fuses an all-reduce and the slice after it.
_SCATTERED = "all-reduce-scatter"
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
# XLA prints the groups of devices in one of three forms: as lists, as a transposed range, or by the
# axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{([^}]*)\}"
)
_SIZE = re.compile(r"'(\w+)'=(\d+)")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
# Two values per byte.
_HALF = ("s4", "u4")


@dataclass(frozen=True)
class Collective:
    """One kind of exchange.

    Attributes:
        devices: numbers of the devices in the first group that exchanges; empty for all devices.
        dtype: of the values, by HLO's name.
        shape: of the array on a device before or after the exchange, whichever is larger.
    """

    kind: str
    devices: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the size of the values on one device."""
        count = math.prod(self.shape)
        if self.dtype in _HALF:
            return -(-count // 2)
        return count * _width(self.dtype)


def count_exchanges(program: str) -> Counter[Collective]:
    """Count how often a program runs each collective, including every round of its loops."""
    computations = _computations(program)
    counts: Counter[Collective] = Counter()
    entry = re.search(r"^ENTRY %?([\w.\-]+) ", program, re.MULTILINE)
    if entry is None:
        return counts
    by_channel: dict[tuple[str, Collective], int] = {}
    for collective, times, channel in _iterate_collectives(computations, entry[1], 1, fused=False):
        if channel is None:
            counts[collective] += times
        else:
            # The start, the end and the steps of one collective may be in several fusions, which
            # have the same channel.
            key = channel, collective
            by_channel[key] = min(times, by_channel.get(key, times))
    for (_, collective), times in by_channel.items():
        counts[collective] += times
    return counts


def _computations(program: str) -> dict[str, list[str]]:
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            lines = computations.setdefault(head[1], [])
        elif line.startswith("  "):
            # The instructions of a computation are indented.
            lines.append(line)
    return computations


def _iterate_collectives(
    computations: dict[str, list[str]], name: str, times: int, *, fused: bool
) -> Iterator[tuple[Collective, int, str | None]]:
    """Yield the collectives of a computation and how often they run, if the computation runs so
    many times; in a fusion also their channel.
    """
    for line in computations.get(name, ()):
        match = _COLLECTIVE.search(line)
        if match is not None:
            channel = _CHANNEL.search(line) if fused else None
            channel_id = None if channel is None else channel[1]
            for collective in _collectives(line, match):
                if _SCATTERED in name:
                    collective = replace(collective, kind="reduce-scatter")
                yield collective, times, channel_id
            # The computation that a collective applies is an addition, without collectives.
            continue
        rounds = _count_rounds(computations, line)
        called = [call[1] for call in _CALLED.finditer(line)]
        branches = _BRANCHES.search(line)
        if branches is not None:
            for branch in branches[1].split(","):
                called.append(branch.strip().lstrip("%"))
        in_fusion = fused or " fusion(" in line
        for called_name in called:
            yield from _iterate_collectives(
                computations, called_name, times * rounds, fused=in_fusion
            )


def _count_rounds(computations: dict[str, list[str]], line: str) -> int:
    """Find how often an instruction runs the computations that it calls: the limit of a loop's
    counter, which starts at zero.
    """
    trips = _TRIPS.search(line)
    if trips is not None:
        return int(trips[1])
    condition = _CONDITION.search(line)
    if condition is None:
        return 1
    # Without a known count, the loop's condition compares the counter with a constant.
    limits: list[int] = []
    for condition_line in computations.get(condition[1], ()):
        for limit in _LIMIT.finditer(condition_line):
            limits.append(int(limit[1]))
    return max(limits, default=1)


def _collectives(line: str, match: re.Match[str]) -> Iterator[Collective]:
    """Yield the collectives of one instruction, which may exchange several arrays together."""
    kind = match[2]
    devices = _devices(line)
    operands = _parse_arrays(line[match.end() :].partition("), ")[0])
    results = _parse_arrays(match[1])
    # The results of a start include its operands.
    if match[3] and len(results) > len(operands):
        if len(results) % 2 == 0:
            results = results[len(results) // 2 :]
        else:
            results = results[-1:]
    if len(operands) == len(results):
        for before, after in zip(operands, results, strict=True):
            # `max` returns the first of equal sizes.
            dtype, shape = max(before, after, key=_count_elements)
            yield Collective(kind, devices, dtype, shape)
    else:
        # The text names operands without shapes. Those of a reduce-scatter are larger than its
        # results.
        times = len(devices) if kind == "reduce-scatter" else 1
        for dtype, shape in results:
            if shape:
                shape = times * shape[0], *shape[1:]
            yield Collective(kind, devices, dtype, shape)


def _parse_arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Parse the dtypes and shapes of the arrays in a part of an instruction."""
    return [(array[1], _shape(array[2])) for array in _ARRAY.finditer(text)]


def _count_elements(array: tuple[str, tuple[int, ...]]) -> int:
    """Count the elements of an array, given as dtype and shape."""
    return math.prod(array[1])


def _devices(line: str) -> tuple[int, ...]:
    """Parse the first group of devices that exchange; empty for all devices together."""
    listed = _LISTED.search(line)
    if listed is not None:
        return tuple(map(int, listed[1].split(",")))
    pairs = _PAIRS.search(line)
    if pairs is not None:
        return int(pairs[1]), int(pairs[2])
    iota = _IOTA.search(line)
    if iota is not None:
        order = _order(iota[3], iota[4])
        return tuple(order[: int(iota[2])])
    mesh = _MESH.search(line)
    if mesh is None:
        return ()
    return _parse_mesh(mesh)


def _parse_mesh(mesh: re.Match[str]) -> tuple[int, ...]:
    """Compute the first group of devices along some axes of a mesh."""
    names: list[str] = []
    sizes: list[int] = []
    for axis in _SIZE.finditer(mesh[1]):
        names.append(axis[1])
        sizes.append(int(axis[2]))
    if mesh[2]:
        order = _order(mesh[2], mesh[3])
    else:
        order = list(range(math.prod(sizes)))
    positions = [0]
    for name, before, part in _AXIS.findall(mesh[4]):
        index = names.index(name)
        stride = math.prod(sizes[index + 1 :])
        # `'axis':(before)part` is a part of an axis, after parts whose sizes multiply to `before`.
        count = int(part or sizes[index])
        stride *= sizes[index] // (int(before or 1) * count)
        positions = _add_axis(positions, count, stride)
    return tuple(order[position] for position in positions)


def _add_axis(positions: list[int], count: int, stride: int) -> list[int]:
    """Extend the positions of some axes by an inner axis of `count` steps."""
    extended: list[int] = []
    for position in positions:
        for step in range(count):
            extended.append(position + step * stride)
    return extended


def _order(sizes: str, transposed: str | None) -> list[int]:
    """Number the devices of axes with some sizes, in the order of the transposed axes."""
    shape = _shape(sizes)
    if transposed:
        axes: Sequence[int] = _shape(transposed)
    else:
        axes = range(len(shape))
    positions = [0]
    for axis in axes:
        positions = _add_axis(positions, shape[axis], math.prod(shape[axis + 1 :]))
    return positions


def _shape(text: str) -> tuple[int, ...]:
    # A scalar has an empty shape.
    return tuple(int(size) for size in text.split(",") if size)


def _width(dtype: str) -> int:
    if dtype == "pred":
        # A boolean takes a byte.
        return 1
    # The first number of a name such as bf16 or f8e4m3fn is its number of bits.
    return int(re.sub(r"\D*(\d+).*", r"\1", dtype)) // 8
