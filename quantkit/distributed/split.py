"""Which slice of every tensor is one process's, by the sizes that its axes have.

Queries and attention sinks are split by whole heads, evenly; keys and values by the heads that the queries need, so
that a KV head lies on several processes where there are fewer of them than processes. The feed-forward width, and
that of every expert, is split by whole groups of the row-parallel linears' schemes, as evenly as they go; where the
fullest would get over an eighth more than its share, groups are halved, down to 32, and both halves keep the scale.
The vocabulary is split into equal numbers of rows, the last process's padded with zeros.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters, sizes
from quantkit.errors import RequestError, UnsupportedError
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

_MIN_GROUP = 32  # that the CPU kernels take
_UNEVEN = 1.125
_WIDTHS = {
    "intermediate": "feed-forward width",
    "expert_intermediate": "width of an expert",
    "shared_intermediate": "width of the shared experts",
}


@dataclass(frozen=True)
class Split:
    """What one process has of a model.

    Attributes:
        rank: of the process.
        config: the model's, with this process's heads, KV heads and widths of feed-forward and experts.
        ranges: this process's part of each size that is split, by its name in the topology.
        kv_shares: for each of this process's KV heads, one over how many there are of it on all processes.
        vocab_rows: rows of the embedding and the head on every process, padding included.
    """

    rank: int
    config: ModelConfig
    ranges: Mapping[str, tuple[tuple[int, int], ...]]
    kv_shares: tuple[float, ...]
    vocab_rows: int

    @property
    def vocab_start(self) -> int:
        """The first of this process's rows of the vocabulary."""
        return self.ranges["vocab"][0][0]

    def tensor_slice(self, parameter: Parameter) -> TensorSlice | None:
        """This process's slice of a tensor; None where it is replicated on every process."""
        axis = parameter.split_axis
        return None if axis is None else TensorSlice(axis, self.ranges[parameter.dims[axis]])


def split_model(config: ModelConfig, schemes: Mapping[str, QuantScheme], rank: int, size: int) -> Split:
    """What process `rank` of `size` has.

    Args:
        schemes: of the quantized modules.

    Raises:
        RequestError: if this number of processes cannot share the model.
        UnsupportedError: if it has a part that only one process can run.
    """
    heads, width = config.num_heads // size, config.head_dim
    if config.num_heads % size:
        divisors = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise RequestError(
            "the processes do not divide the attention heads", found=f"{size} processes, {config.num_heads} heads",
            expected=f"one of {', '.join(map(str, divisors))}",
        )  # fmt: skip
    each = [
        _kv_heads(range(at * heads, (at + 1) * heads), config.num_heads // config.num_kv_heads) for at in range(size)
    ]
    kv_heads, copies = each[rank], Counter(head for own in each for head in own)
    found = parameters(config)
    split = {p.dims[p.split_axis]: p.name for p in reversed(found) if p.split_axis is not None}
    widths = {
        name: _inner_range(name, split_width, [p for p in found if p.dims == ("hidden", name)], schemes, rank, size)
        for name, split_width in sizes(config).items()
        if name in _WIDTHS and name in split
    }
    rows = -(-config.vocab_size // size)
    last = min((rank + 1) * rows, config.vocab_size)
    if (size - 1) * rows >= config.vocab_size:
        raise RequestError("there are too many processes for the vocabulary", found=size, expected=config.vocab_size)
    ranges = {
        "query": ((rank * heads * width, (rank + 1) * heads * width),),
        "kv": _merged([(head * width, (head + 1) * width) for head in kv_heads]),
        "heads": ((rank * heads, (rank + 1) * heads),),
        "vocab": ((rank * rows, last),),
        **{name: (own,) for name, own in widths.items()},
    }
    for name, tensor in split.items():
        if name not in ranges:
            raise UnsupportedError("processes cannot share this architecture", found=f"tensor '{tensor}'")
    own = _with_widths(config, {name: stop - start for name, (start, stop) in widths.items()})
    own = replace(own, num_heads=heads, num_kv_heads=len(kv_heads))
    return Split(rank, own, ranges, tuple(1 / copies[head] for head in kv_heads), rows)


def _with_widths(config: ModelConfig, widths: Mapping[str, int]) -> ModelConfig:
    """A model with other widths of feed-forward and experts, where they are given."""
    config = replace(config, intermediate_size=widths.get("intermediate", config.intermediate_size))
    if config.experts is None:
        return config
    size, shared = config.experts.size, config.experts.shared_size
    return replace(
        config, experts=replace(
            config.experts, size=widths.get("expert_intermediate", size),
            shared_size=widths.get("shared_intermediate", shared),
        ),
    )  # fmt: skip


def _kv_heads(queries: range, per_head: int) -> list[int]:
    """The KV heads of some queries: each once if all serve equally many, else one for each query."""
    counts = Counter(query // per_head for query in queries)
    if len(set(counts.values())) == 1:
        return list(counts)
    return [query // per_head for query in queries]


def _inner_range(
    name: str, width: int, downs: Iterable[Parameter], schemes: Mapping[str, QuantScheme], rank: int, size: int
) -> tuple[int, int]:  # fmt: skip
    """The range of the width of a feed-forward, or of experts, that goes into some linears."""
    groups = {schemes[down.module].group_size for down in downs if down.module in schemes}
    unit = math.lcm(*(group for group in groups if group is not None))

    def uneven(unit: int) -> bool:
        units = width // unit
        return -(-units // size) * size > _UNEVEN * units

    while unit % (2 * _MIN_GROUP) == 0 and uneven(unit):
        unit //= 2
    units = width // unit
    if units < size:
        raise RequestError(
            f"there are too many processes for the {_WIDTHS[name]}", found=size,
            expected=f"at most {units}: {width} in groups of {unit}",
        )  # fmt: skip
    return rank * units // size * unit, (rank + 1) * units // size * unit


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same indices in as few ranges as go."""
    merged = ranges[:1]
    for start, stop in ranges[1:]:
        if start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
