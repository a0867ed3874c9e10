"""Which slice of every tensor is one process's, by the sizes that its axes have.

Queries are split by whole heads, evenly; keys and values by the heads that the queries need, so that a KV
head lies on several processes where there are fewer of them than processes. The feed-forward width is split
by whole groups of the row-parallel linears' schemes, as evenly as they go; where the fullest would get over
an eighth more than its share, groups are halved, down to 32, and both halves keep the scale. The
vocabulary is split into equal numbers of rows, the last process's padded with zeros.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import RequestError, UnsupportedError
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

_LEAST_GROUP = 32  # that the CPU kernels take
_UNEVEN = 1.125


@dataclass(frozen=True)
class Split:
    """What one process has of a model.

    Attributes:
        rank: of the process.
        config: the model's, with this process's heads, KV heads and feed-forward width.
        ranges: this process's part of each size that is split, by its name in the topology.
        vocab_rows: rows of the embedding and the head on every process, padding included.
    """

    rank: int
    config: ModelConfig
    ranges: Mapping[str, tuple[tuple[int, int], ...]]
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
        RequestError: if so many processes cannot share the model.
        UnsupportedError: if it has a part that only one process can run.
    """
    heads, width = config.num_heads // size, config.head_dim
    if config.num_heads % size:
        divisors = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise RequestError(
            "the processes do not divide the attention heads", found=f"{size} processes, {config.num_heads} heads",
            expected=f"one of {', '.join(map(str, divisors))}",
        )  # fmt: skip
    kv_heads = _kv_heads(range(rank * heads, (rank + 1) * heads), config.num_heads // config.num_kv_heads)
    inner = _inner_range(config, schemes, rank, size)
    rows = -(-config.vocab_size // size)
    last = min((rank + 1) * rows, config.vocab_size)
    if (size - 1) * rows >= config.vocab_size:
        raise RequestError("there are too many processes for the vocabulary", found=size, expected=config.vocab_size)
    own = replace(config, num_heads=heads, num_kv_heads=len(kv_heads), intermediate_size=inner[1] - inner[0])
    ranges = {
        "query": ((rank * heads * width, (rank + 1) * heads * width),),
        "kv": _merged([(head * width, (head + 1) * width) for head in kv_heads]),
        "intermediate": (inner,),
        "vocab": ((rank * rows, last),),
    }
    for parameter in parameters(config):
        if parameter.split_axis is not None and parameter.dims[parameter.split_axis] not in ranges:
            raise UnsupportedError("processes cannot share this architecture", found=f"tensor '{parameter.name}'")
    if config.qk_norm == "width" and size > 1:
        raise UnsupportedError("processes cannot share this architecture", found="norms over all heads together")
    return Split(rank, own, ranges, rows)


def _kv_heads(queries: range, per_head: int) -> list[int]:
    """The KV heads of some queries: each once if all serve equally many, else one for each query."""
    counts = Counter(query // per_head for query in queries)
    if len(set(counts.values())) == 1:
        return list(counts)
    return [query // per_head for query in queries]


def _inner_range(config: ModelConfig, schemes: Mapping[str, QuantScheme], rank: int, size: int) -> tuple[int, int]:
    """The range of the feed-forward width."""
    width = config.intermediate_size
    downs = [p.module for p in parameters(config) if p.is_linear_weight and p.dims == ("hidden", "intermediate")]
    sizes = [schemes[module].group_size for module in downs if module in schemes]
    unit = math.lcm(*(group for group in sizes if group is not None))

    def uneven(unit: int) -> bool:
        units = width // unit
        return -(-units // size) * size > _UNEVEN * units

    while unit % (2 * _LEAST_GROUP) == 0 and uneven(unit):
        unit //= 2
    units = width // unit
    if units < size:
        raise RequestError(
            "there are too many processes for the feed-forward width", found=size,
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
