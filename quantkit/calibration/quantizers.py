"""The tensors of a quantized model, block after block: by rounding alone, or by GPTQ on calibration text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import input_groups
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.block_quantizer import BlockQuantizer
from quantkit.calibration.data import Calibration
from quantkit.calibration.effort import Effort
from quantkit.calibration.estimate import gpu_activation_bytes
from quantkit.calibration.group_solver import Result
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import Written
from quantkit.formats.output.staging import SCRATCH
from quantkit.memory import malloc_trim, set_mmap_threshold
from quantkit.progress import Progress, silent
from quantkit.tensors.finite import all_finite, checked_cast
from quantkit.tensors.products import exact_float32
from quantkit.tensors.qtensor import ROUNDING, QuantTensor, quantize_rtn, relative_error
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

_LARGE_BUFFER = 8 << 20

Solved = tuple[str, Tensor | QuantTensor, Mapping[str, object] | None]
"""A tensor's name, its value, and what the manifest says of how it was found."""


@dataclass(frozen=True)
class TensorBlock:
    """Tensors of the output that follow each other in it.

    Attributes:
        layer: the decoder block that they are all those of, or None for what lies before or behind the blocks.
        tensors: in order.
    """

    layer: int | None
    tensors: tuple[TensorSpec, ...]


class Quantizer(Protocol):
    """Finds the tensors of an output, block after block."""

    def running(self, blocks: Sequence[TensorBlock], written: Written) -> AbstractContextManager[None]:
        """What `solve` is called within, for each of the blocks in order.

        Args:
            blocks: all there are.
            written: what an interrupted run has left of them.
        """
        ...

    def solve(self, block: TensorBlock) -> Iterator[Solved]:
        """The tensors of a block that are not written yet, in order, each made as it is asked for.

        Raises:
            NonFiniteError: if a tensor holds NaN or Inf and must not, or weights too large for their scales.
        """
        ...


class RtnQuantizer:
    """Rounds to nearest, one tensor at a time."""

    def __init__(self, source: Checkpoint, *, allow_nonfinite: bool) -> None:
        self._source = source
        self._allow_nonfinite = allow_nonfinite
        self._done: frozenset[str] = frozenset()

    def running(self, blocks: Sequence[TensorBlock], written: Written) -> AbstractContextManager[None]:
        self._done = written.names
        return nullcontext()

    def solve(self, block: TensorBlock) -> Iterator[Solved]:
        missing = (spec for spec in block.tensors if spec.name not in self._done)
        return (_solved(self._source, spec, None, self._allow_nonfinite) for spec in missing)


class GptqQuantizer:
    """GPTQ for the linears of decoder blocks, on the inputs they will really see; rounding for others.

    Of several processes each takes some of the samples and some of the rows; all of them solve the same blocks.
    """

    def __init__(
        self, source: Checkpoint, calibration: Calibration, schemes: Mapping[str, QuantScheme], *,
        device: torch.device, memory_bytes: int, effort: Effort, allow_nonfinite: bool, group: ProcessGroup,
        progress: Progress = silent,
    ) -> None:  # fmt: skip
        """
        Args:
            schemes: by module.
            device: where it computes.
            memory_bytes: activations held in memory; more go to disk.
            effort: how much to do about drift.
            group: this process among those that share the work.
            progress: told of all linears that are passed through, or solved.
        """
        self._source = source
        self._calibration = calibration
        self._schemes = schemes
        self._device = device
        self._memory_bytes = memory_bytes
        self._effort = effort
        self._allow_nonfinite = allow_nonfinite
        self._group = group
        self._progress = progress
        self._done = 0
        self._linears = [
            sum(len(group.modules) for group in input_groups(source.config, layer))
            for layer in range(source.config.num_layers)
        ]  # fmt: skip
        self._finished = 0
        self._written: Written | None = None
        self._unsolved = 0
        self._blocks: BlockQuantizer | None = None

    @contextmanager
    def running(self, blocks: Sequence[TensorBlock], written: Written) -> Iterator[None]:
        set_mmap_threshold(_LARGE_BUFFER)
        self._written = written = replace(written, count=self._group.broadcast_from_rank0(written.count))
        open_layers = [block.layer for block in blocks if block.layer is not None and not _finished(block, written)]
        self._unsolved = 1 + max(open_layers, default=-1)
        self._finished = min(open_layers, default=0)
        scratch = written.folder / f"{SCRATCH}-{self._group.rank}"
        tokens = self._calibration.tokens
        room = gpu_activation_bytes(self._source.config, tokens.shape, self._device)
        store = ActivationStore(scratch, self._memory_bytes, room // self._group.size)  # all may be on one card
        try:
            with exact_float32():
                if self._unsolved:
                    self._blocks = BlockQuantizer(
                        self._source, tokens, self._schemes, store, self._device, self._effort, self._group
                    )
                yield
        finally:
            store.close()
            self._blocks = None
            malloc_trim()
        self._group.wait()  # until no process has anything left on disk

    def solve(self, block: TensorBlock) -> Iterator[Solved]:
        assert self._written is not None
        done, found = self._written.names, self._block_results(block)
        missing = (spec for spec in block.tensors if spec.name not in done)
        return (_solved(self._source, spec, found.pop(spec.name, None), self._allow_nonfinite) for spec in missing)

    def _block_results(self, block: TensorBlock) -> dict[str, Result]:
        """The codes of a block, by tensor name; none behind the last block that there is something to solve in."""
        if block.layer is None or block.layer >= self._unsolved:
            return {}
        assert self._blocks is not None
        assert self._written is not None
        self._tell(block.layer, 0)
        finished = self._written.load if _finished(block, self._written) else None
        try:
            return self._blocks.next_block(finished, partial(self._tell, block.layer))
        except NonFiniteError:
            for spec in block.tensors:  # the first that is not finite has made the others so
                _require_finite(self._source, spec.name)
            raise

    def _tell(self, layer: int, more: int) -> None:
        """Tell how many linears the samples have come through: of the blocks that an earlier run has solved, or else
        of all."""
        phase, layers = ("quantize", len(self._linears)) if layer >= self._finished else ("calibrate", self._finished)
        self._done += more
        self._progress(phase, self._done, sum(self._linears[:layers]), "linears")


def _finished(block: TensorBlock, written: Written) -> bool:
    """Whether nothing is left to solve in a block."""
    return all(spec.name in written.names for spec in block.tensors if spec.scheme is not None)


def _without_codes(name: str) -> str:
    """What to do about a tensor that holds NaN or Inf."""
    module = name.removesuffix(".weight")
    if module == EMBEDDING:
        keep = "leave the scheme of the embedding out, and `allow_nonfinite=True` leaves it as it is"
    else:
        keep = f'`keep="{module}"` and `allow_nonfinite=True` leave it as it is'
    return f"it has no codes; repair the source, or {keep}"


def _solved(source: Checkpoint, spec: TensorSpec, result: Result | None, allow_nonfinite: bool) -> Solved:
    """One tensor of the output; what is to be quantized and has no codes yet is rounded."""
    weight = source.load(spec.name)
    assert isinstance(weight, Tensor)
    if spec.scheme is None:
        return spec.name, checked_cast(weight, spec.dtype.torch, spec.name, source.path, allow_nonfinite), None
    checked_cast(weight, weight.dtype, spec.name, source.path, allow_nonfinite=False, hint=_without_codes(spec.name))
    quantized, record = result or (quantize_rtn(weight, spec.scheme, spec.dtype.torch), {"solver": ROUNDING})
    if not all_finite(quantized.scale):
        raise NonFiniteError(
            f"tensor '{spec.name}' holds values too large for scales in {spec.dtype}",
            path=source.path, hint="convert the source to another dtype first",
        )  # fmt: skip
    return spec.name, quantized, {**record, "relative_error": float(f"{relative_error(quantized, weight):.4g}")}


def _require_finite(source: Checkpoint, name: str) -> None:
    value = source.load(name)
    assert isinstance(value, Tensor)
    checked_cast(value, value.dtype, name, source.path, allow_nonfinite=False)
