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
from quantkit.architectures.topology import Parameter, compute_sizes, parameters
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

# Bytes at each end of a file that are compared: a hash of whole files would take too long.
_SAMPLE = 1 << 20
# The smallest group size that the CPU kernels support.
_MIN_GROUP = 32
# The largest share of a width that a process may have, relative to an even one.
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
        """Return the index of this process's first row of the vocabulary."""
        return self.ranges["vocab"][0][0]

    def tensor_slice(self, parameter: Parameter) -> TensorSlice | None:
        """Find this process's slice of a tensor; None if it is replicated on every process."""
        axis = parameter.split_axis
        if axis is None:
            return None
        return TensorSlice(axis, self.ranges[parameter.dims[axis]])


def split_model(
    config: ModelConfig, schemes: Mapping[str, QuantScheme], rank: int, size: int
) -> Split:
    """Compute the heads, widths and rows that process `rank` of `size` has.

    Args:
        schemes: of the quantized modules.

    Raises:
        RequestError: if this number of processes cannot share the model.
        UnsupportedError: if it has a part that only one process can run.
    """
    heads = config.num_heads // size
    head_dim = config.head_dim
    if config.num_heads % size:
        divisors = []
        for number in range(1, config.num_heads + 1):
            if config.num_heads % number == 0:
                divisors.append(number)
        raise RequestError(
            "the attention heads cannot be divided among the processes",
            found=f"{size} processes, {config.num_heads} heads",
            expected=f"one of {', '.join(map(str, divisors))}",
        )
    # On how many processes each KV head is, so that sums over all of them count it once.
    copies: Counter[int] = Counter()
    for process in range(size):
        copies.update(_kv_heads_of_process(config.num_heads, config.num_kv_heads, process, size))
    kv_heads = _kv_heads_of_process(config.num_heads, config.num_kv_heads, rank, size)
    # Layers without a window may have other heads.
    full_head_dim = config.full_head_dim or head_dim
    full_kv_heads = _kv_heads_of_process(
        config.num_heads, config.full_kv_heads or config.num_kv_heads, rank, size
    )
    model_parameters = parameters(config)
    # Backwards, so that errors name the first tensor of each size.
    split = {}
    for parameter in reversed(model_parameters):
        if parameter.split_axis is not None:
            split[parameter.dims[parameter.split_axis]] = parameter.name
    widths: dict[str, tuple[int, int]] = {}
    for name, split_width in compute_sizes(config).items():
        if name in _WIDTHS and name in split:
            downs = [p for p in model_parameters if p.dims[1:] == (name,)]
            widths[name] = _inner_range(name, split_width, downs, schemes, rank, size)
    rows = -(-config.vocab_size // size)
    last = min((rank + 1) * rows, config.vocab_size)
    if (size - 1) * rows >= config.vocab_size:
        raise RequestError(
            "there are too many processes for the vocabulary",
            found=size,
            expected=config.vocab_size,
        )
    ranges: dict[str, tuple[tuple[int, int], ...]] = {
        "query": ((rank * heads * head_dim, (rank + 1) * heads * head_dim),),
        "query_and_gate": ((2 * rank * heads * head_dim, 2 * (rank + 1) * heads * head_dim),),
        "kv": _head_ranges(kv_heads, head_dim),
        "full_query": ((rank * heads * full_head_dim, (rank + 1) * heads * full_head_dim),),
        "full_kv": _head_ranges(full_kv_heads, full_head_dim),
        "heads": ((rank * heads, (rank + 1) * heads),),
        "vocab": ((rank * rows, last),),
    }
    local_widths: dict[str, int] = {}
    for name, (start, stop) in widths.items():
        ranges[name] = ((start, stop),)
        local_widths[name] = stop - start
    if "intermediate" in ranges:
        # Twice the width has twice the range, so that it begins between groups as well.
        ((start, stop),) = ranges["intermediate"]
        ranges["wide_intermediate"] = ((2 * start, 2 * stop),)
    for name, tensor in split.items():
        if name not in ranges:
            raise UnsupportedError(
                "this architecture cannot be split among processes", found=f"tensor '{tensor}'"
            )
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            size=local_widths.get("expert_intermediate", experts.size),
            shared_size=local_widths.get("shared_intermediate", experts.shared_size),
        )
    local_config = replace(
        config,
        num_heads=heads,
        num_kv_heads=len(kv_heads),
        full_kv_heads=None if config.full_kv_heads is None else len(full_kv_heads),
        experts=experts,
        intermediate_size=local_widths.get("intermediate", config.intermediate_size),
    )
    kv_shares = tuple(1 / copies[head] for head in kv_heads)
    return Split(rank, local_config, ranges, kv_shares, rows)


def _kv_heads_of_process(num_heads: int, num_kv_heads: int, rank: int, size: int) -> list[int]:
    """List the KV heads of a process's queries: each once if all serve equally many, else one for
    each query.
    """
    count = num_heads // size
    per_head = num_heads // num_kv_heads
    heads = [query // per_head for query in range(rank * count, (rank + 1) * count)]
    counts = Counter(heads)
    # Attention takes groups of queries of one size only.
    if len(set(counts.values())) == 1:
        return list(counts)
    return heads


def _inner_range(
    name: str,
    width: int,
    downs: Iterable[Parameter],
    schemes: Mapping[str, QuantScheme],
    rank: int,
    size: int,
) -> tuple[int, int]:
    """Compute the range of the width of a feed-forward, or of experts, that goes into some
    linears.
    """
    group_sizes: list[int] = []
    for down in downs:
        if down.module in schemes:
            group_size = schemes[down.module].group_size
            if group_size is not None:
                group_sizes.append(group_size)
    # 1 without groups.
    unit = math.lcm(*group_sizes)

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


def _head_ranges(heads: list[int], head_dim: int) -> tuple[tuple[int, int], ...]:
    """Find the rows of heads of a size."""
    return _merge_ranges([(head * head_dim, (head + 1) * head_dim) for head in heads])


def _merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge ranges that follow each other, to as few as possible."""
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
    for key, value in vars(checkpoint.config).items():
        facts[f"config.{key}"] = value
    for file in checkpoint.files():
        facts[f"contents of {file.path.name}"] = _contents(file)
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
        self._parameters: dict[str, Parameter] = {}
        for parameter in parameters(source.config):
            self._parameters[parameter.name] = parameter

    def info(self, name: str) -> TensorSpec:
        info = self._source.info(name)
        part = self._slice(name)
        if part is None:
            return info
        shape = list(info.shape)
        scheme = info.scheme
        shape[part.axis] = max(part.size, self._rows(name))
        # Columns are split between groups or within one; rows change no scheme.
        if scheme is not None and part.axis == 1:
            scheme = scheme.cut(*part.ranges[0])
        return TensorSpec(name, tuple(shape), info.dtype, scheme)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        if part is None:
            return self._load_shard(name)
        # Cut from the whole shard: columns, several ranges, and biases, which may become zeros.
        if part.axis == 1 or len(part.ranges) > 1 or name.endswith(".bias"):
            return part.of_weight(self._load_shard(name))
        shard_slice = self._slice(name)
        if shard_slice is None:
            return self._source.load(name, part)
        if shard_slice.axis == 1:
            rows = self._source.load(name, part)
            return shard_slice.of_weight(rows)
        start, stop = part.ranges[0]
        # Rows beyond the shard's are padding of the vocabulary.
        last = min(stop, shard_slice.size)
        if start >= last:
            return part.of_weight(self._load_shard(name))
        rows = self._source.load(name, shard_slice.rows(start, last))
        if last == stop:
            return rows
        return _pad_rows(rows, stop - last)

    def _load_shard(self, name: str) -> Tensor | QuantTensor:
        value = self._source.load(name, self._slice(name))
        if isinstance(value, Tensor) and self._split.rank > 0 and self._is_row_parallel_bias(name):
            return torch.zeros_like(value)
        missing = self._rows(name) - value.shape[0]
        if missing > 0:
            return _pad_rows(value, missing)
        return value

    def _is_row_parallel_bias(self, name: str) -> bool:
        parameter = self._parameters[name]
        if parameter.leaf != "bias" or parameter.linear is None:
            return False
        return parameter.linear.parallel == "row"

    def _slice(self, name: str) -> TensorSlice | None:
        return self._split.tensor_slice(self._parameters[name])

    def _rows(self, name: str) -> int:
        """Count the rows that every process has of a vocabulary-parallel tensor, padding included;
        0 for others.
        """
        if self._parameters[name].dims[0] == "vocab":
            return self._split.vocab_rows
        return 0


def _pad_rows(value: Tensor | QuantTensor, rows: int) -> Tensor | QuantTensor:
    """Append rows of zeros to a weight."""

    def fill(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0, 0, 0, rows))

    if isinstance(value, Tensor):
        return fill(value)
    return value.map(fill)


def _contents(file: SourceFile) -> str:
    """Describe a file by its size and the sha256 of its first and last MiB."""
    digest = hashlib.sha256(file.read(0, min(file.size, _SAMPLE)))
    last = max(file.size - _SAMPLE, 0)
    digest.update(file.read(last, file.size - last))
    return f"{file.size} bytes, {digest.hexdigest()[:12]}"
