"""One process's shard of a checkpoint, as a checkpoint; and its slice of every tensor, by the sizes
of the axes.

Queries and attention sinks are split by whole heads, evenly; keys and values by the heads that the
queries need, so that a KV head lies on several processes where there are fewer of them than
processes. The feed-forward width, and that of every expert, is split by whole groups of the
row-parallel linears' schemes, as evenly as they go; where the fullest would get over an eighth more
than its share, groups are halved, down to 32, and both halves keep the scale. The vocabulary is
split into equal numbers of rows, the last process's padded with zeros.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters, sizes
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.files.source import SourceFile
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, CheckpointView, schemes
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.version import __version__

_SAMPLE = 1 << 20
# That the CPU kernels take.
_MIN_GROUP = 32
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
        config: the model's, with this process's heads, KV heads and widths of feed-forward and
            experts.
        ranges: this process's part of each size that is split, by its name in the topology.
        kv_shares: for each of this process's KV heads, one over how many there are of it on all
            processes.
        vocab_rows: rows of the embedding and the head on every process, padding included.
    """

    rank: int
    config: ModelConfig
    ranges: Mapping[str, tuple[tuple[int, int], ...]]
    kv_shares: tuple[float, ...]
    vocab_rows: int

    @property
    def vocab_start(self) -> int:
        """Return the first of this process's rows of the vocabulary."""
        return self.ranges["vocab"][0][0]

    def tensor_slice(self, parameter: Parameter) -> TensorSlice | None:
        """This process's slice of a tensor; None where it is replicated on every process."""
        axis = parameter.split_axis
        if axis is None:
            return None
        return TensorSlice(axis, self.ranges[parameter.dims[axis]])


def split_model(
    config: ModelConfig, schemes: Mapping[str, QuantScheme], rank: int, size: int
) -> Split:
    """Return what process `rank` of `size` has.

    Args:
        schemes: of the quantized modules.

    Raises:
        RequestError: if this number of processes cannot share the model.
        UnsupportedError: if it has a part that only one process can run.
    """
    heads = config.num_heads // size
    head_dim = config.head_dim
    if config.num_heads % size:
        divisors = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise RequestError(
            "the processes do not divide the attention heads",
            found=f"{size} processes, {config.num_heads} heads",
            expected=f"one of {', '.join(map(str, divisors))}",
        )
    each = []
    for at in range(size):
        each.append(
            _kv_heads(range(at * heads, (at + 1) * heads), config.num_heads // config.num_kv_heads)
        )
    kv_heads = each[rank]
    copies = Counter(head for own in each for head in own)
    found = parameters(config)
    split = {}
    for p in reversed(found):
        if p.split_axis is not None:
            split[p.dims[p.split_axis]] = p.name
    widths = {
        name: _inner_range(
            name, split_width, [p for p in found if p.dims == ("hidden", name)], schemes, rank, size
        )
        for name, split_width in sizes(config).items()
        if name in _WIDTHS and name in split
    }
    rows = -(-config.vocab_size // size)
    last = min((rank + 1) * rows, config.vocab_size)
    if (size - 1) * rows >= config.vocab_size:
        raise RequestError(
            "there are too many processes for the vocabulary",
            found=size,
            expected=config.vocab_size,
        )
    ranges = {
        "query": ((rank * heads * head_dim, (rank + 1) * heads * head_dim),),
        "kv": _merge_ranges([(head * head_dim, (head + 1) * head_dim) for head in kv_heads]),
        "heads": ((rank * heads, (rank + 1) * heads),),
        "vocab": ((rank * rows, last),),
        **{name: (own,) for name, own in widths.items()},
    }
    for name, tensor in split.items():
        if name not in ranges:
            raise UnsupportedError(
                "processes cannot share this architecture", found=f"tensor '{tensor}'"
            )
    width = {name: stop - start for name, (start, stop) in widths.items()}
    experts = config.experts
    if experts is not None:
        shared = width.get("shared_intermediate", experts.shared_size)
        experts = replace(
            experts, size=width.get("expert_intermediate", experts.size), shared_size=shared
        )
    own = replace(
        config,
        num_heads=heads,
        num_kv_heads=len(kv_heads),
        experts=experts,
        intermediate_size=width.get("intermediate", config.intermediate_size),
    )
    return Split(rank, own, ranges, tuple(1 / copies[head] for head in kv_heads), rows)


def _kv_heads(queries: range, per_head: int) -> list[int]:
    """Return the KV heads of some queries: each once if all serve equally many, else one for each
    query.
    """
    counts = Counter(query // per_head for query in queries)
    if len(set(counts.values())) == 1:
        return list(counts)
    return [query // per_head for query in queries]


def _inner_range(
    name: str,
    width: int,
    downs: Iterable[Parameter],
    schemes: Mapping[str, QuantScheme],
    rank: int,
    size: int,
) -> tuple[int, int]:
    """Return the range of the width of a feed-forward, or of experts, that goes into some
    linears.
    """
    groups = {schemes[down.module].group_size for down in downs if down.module in schemes}
    unit = math.lcm(*(group for group in groups if group is not None))

    def is_uneven(unit: int) -> bool:
        units = width // unit
        return -(-units // size) * size > _UNEVEN * units

    while unit % (2 * _MIN_GROUP) == 0 and is_uneven(unit):
        unit //= 2
    units = width // unit
    if units < size:
        raise RequestError(
            f"there are too many processes for the {_WIDTHS[name]}",
            found=size,
            expected=f"at most {units}: {width} in groups of {unit}",
        )
    return rank * units // size * unit, (rank + 1) * units // size * unit


def _merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the same indices in as few ranges as go."""
    merged = ranges[:1]
    for start, stop in ranges[1:]:
        if start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def require_shareable(checkpoint: Checkpoint, group: ProcessGroup) -> None:
    """Go on only if all processes of the group have the same checkpoint and can share its model.

    Raises:
        GroupError: on all of them, naming what differs.
        RequestError: if this number of processes cannot share the model.
    """
    if group.size > 1:
        require_same_checkpoint(checkpoint, group)
        split_model(checkpoint.config, schemes(checkpoint), group.rank, group.size)


def require_same_checkpoint(checkpoint: Checkpoint, group: ProcessGroup) -> None:
    """Go on only if all processes of the group have the same config, files and versions of the
    software.

    Raises:
        GroupError: on all of them, naming what differs.
    """
    if group.size == 1:
        return
    facts: dict[str, object] = {
        "versions of quantkit and torch": f"{__version__} and {torch.__version__}"
    }
    facts |= {f"config.{key}": value for key, value in vars(checkpoint.config).items()}
    facts |= {f"contents of {file.path.name}": _contents(file) for file in checkpoint.files()}
    facts["manifest"] = None
    # Not all models have one.
    with suppress(CheckpointError):
        facts["manifest"] = manifest.read(checkpoint.path)["files"]
    group.require_same(facts)


class CheckpointShard(CheckpointView):
    """A view of a checkpoint with one process's slices; of the file it reads only these.

    The bias of a row-parallel linear is the first process's; the others see zeros, so that it is
    added once. ``config`` says what this process holds, but for the vocabulary, whose size is the
    model's.
    """

    def __init__(self, source: Checkpoint, split: Split) -> None:
        super().__init__(source, split.config)
        self._split = split
        self._parameters = {parameter.name: parameter for parameter in parameters(source.config)}

    def info(self, name: str) -> TensorSpec:
        info = self._source.info(name)
        part = self._slice(name)
        if part is None:
            return info
        shape = list(info.shape)
        scheme = info.scheme
        shape[part.axis] = max(part.size, self._rows(name))
        if scheme is not None and part.axis == 1:
            scheme = scheme.cut(*part.ranges[0])
        return TensorSpec(name, tuple(shape), info.dtype, scheme)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        own = self._slice(name)
        if part is None or part.axis == 1 or len(part.ranges) > 1 or name.endswith(".bias"):
            if part is None:
                return self._load_shard(name)
            return part.of_weight(self._load_shard(name))
        if own is None or own.axis == 1:
            rows = self._source.load(name, part)
            if own is None:
                return rows
            return own.of_weight(rows)
        start, stop = part.ranges[0]
        there = min(stop, own.size)
        if start >= there:
            return part.of_weight(self._load_shard(name))
        rows = self._source.load(name, own.rows(start, there))
        if there == stop:
            return rows
        return _pad_rows(rows, stop - there)

    def _load_shard(self, name: str) -> Tensor | QuantTensor:
        value = self._source.load(name, self._slice(name))
        parameter = self._parameters[name]
        is_bias = (
            parameter.leaf == "bias"
            and parameter.linear is not None
            and parameter.linear.parallel == "row"
        )
        if isinstance(value, Tensor) and self._split.rank and is_bias:
            return torch.zeros_like(value)
        missing = self._rows(name) - value.shape[0]
        if missing > 0:
            return _pad_rows(value, missing)
        return value

    def _slice(self, name: str) -> TensorSlice | None:
        return self._split.tensor_slice(self._parameters[name])

    def _rows(self, name: str) -> int:
        """Return how many rows every process has of a vocabulary-parallel tensor, padding included;
        0 for others.
        """
        if self._parameters[name].dims[0] == "vocab":
            return self._split.vocab_rows
        return 0


def _pad_rows(value: Tensor | QuantTensor, rows: int) -> Tensor | QuantTensor:
    """Return a weight with rows of zeros below."""

    def fill(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0, 0, 0, rows))

    if isinstance(value, Tensor):
        return fill(value)
    return value.map(fill)


def _contents(file: SourceFile) -> str:
    """Size of a file, and the sha256 of its first and last MiB."""
    digest = hashlib.sha256(file.read(0, min(file.size, _SAMPLE)))
    last = max(file.size - _SAMPLE, 0)
    digest.update(file.read(last, file.size - last))
    return f"{file.size} bytes, {digest.hexdigest()[:12]}"
