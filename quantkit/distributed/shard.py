"""One process's shard of a checkpoint, as a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.distributed.group import ProcessGroup
from quantkit.distributed.split import Split, split_model
from quantkit.errors import CheckpointError
from quantkit.files.source import SourceFile
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.version import __version__

_SAMPLE = 1 << 20


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
    """Go on only if all processes of the group have the same config, files and versions of the software.

    Raises:
        GroupError: on all of them, naming what differs.
    """
    if group.size == 1:
        return
    facts: dict[str, object] = {"versions of quantkit and torch": f"{__version__} and {torch.__version__}"}
    facts |= {f"config.{key}": value for key, value in vars(checkpoint.config).items()}
    facts |= {f"contents of {file.path.name}": _contents(file) for file in checkpoint.files()}
    facts["manifest"] = _manifest(checkpoint.path)
    group.require_same(facts)


class CheckpointShard:
    """A view of a checkpoint with one process's slices; of the file it reads only these.

    The bias of a row-parallel linear is the first process's; the others see zeros, so that it is added once.
    ``config`` says what this process holds, but for the vocabulary, whose size is the model's.
    """

    def __init__(self, source: Checkpoint, split: Split) -> None:
        self._source = source
        self._split = split
        self._parameters = {parameter.name: parameter for parameter in parameters(source.config)}
        self.config = split.config
        self.path, self.format = source.path, source.format
        self.extra_config: Mapping[str, Any] = source.extra_config
        self.notes = source.notes

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorSpec:
        info, part = self._source.info(name), self._slice(name)
        if part is None:
            return info
        shape, scheme = list(info.shape), info.scheme
        shape[part.axis] = max(part.size, self._rows(name))
        if scheme is not None and part.axis == 1:
            scheme = scheme.cut(*part.ranges[0])
        return TensorSpec(name, tuple(shape), info.dtype, scheme)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        own = self._slice(name)
        if part is None or part.axis == 1 or len(part.ranges) > 1 or name.endswith(".bias"):
            return self._own(name) if part is None else part.of_weight(self._own(name))
        if own is None or own.axis == 1:
            rows = self._source.load(name, part)
            return rows if own is None else own.of_weight(rows)
        start, stop = part.ranges[0]
        there = min(stop, own.size)
        if start >= there:
            return part.of_weight(self._own(name))
        rows = self._source.load(name, own.rows(start, there))
        return rows if there == stop else _filled(rows, stop - there)

    def files(self) -> list[SourceFile]:
        return self._source.files()

    def _own(self, name: str) -> Tensor | QuantTensor:
        value = self._source.load(name, self._slice(name))
        if isinstance(value, Tensor) and self._split.rank and self._is_added_up(name):
            return torch.zeros_like(value)
        missing = self._rows(name) - value.shape[0]
        return _filled(value, missing) if missing > 0 else value

    def _is_added_up(self, name: str) -> bool:
        """Whether a tensor is the bias of a row-parallel linear."""
        parameter = self._parameters[name]
        return parameter.leaf == "bias" and parameter.linear is not None and parameter.linear.parallel == "row"

    def _slice(self, name: str) -> TensorSlice | None:
        return self._split.tensor_slice(self._parameters[name])

    def _rows(self, name: str) -> int:
        """How many rows every process has of a vocabulary-parallel tensor, padding included; 0 for others."""
        return self._split.vocab_rows if self._parameters[name].dims[0] == "vocab" else 0


def _filled(value: Tensor | QuantTensor, rows: int) -> Tensor | QuantTensor:
    """A weight with rows of zeros below."""

    def fill(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0, 0, 0, rows))

    if isinstance(value, Tensor):
        return fill(value)
    zero = None if value.zero is None else fill(value.zero)
    return QuantTensor(fill(value.codes), fill(value.scale), zero, value.scheme)


def _contents(file: SourceFile) -> str:
    """Size of a file, and the sha256 of its first and last MiB."""
    digest = hashlib.sha256(file.read(0, min(file.size, _SAMPLE)))
    last = max(file.size - _SAMPLE, 0)
    digest.update(file.read(last, file.size - last))
    return f"{file.size} bytes, {digest.hexdigest()[:12]}"


def _manifest(folder: Path) -> object:
    """The sha256 of all files as quantkit's manifest has them; None where there is none."""
    try:
        return manifest.read(folder)["files"]
    except CheckpointError:
        return None
