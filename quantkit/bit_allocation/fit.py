"""Choose the schemes with the smallest loss for a size, from calibration samples.

Only schemes that the format can hold are considered, and a size that no choice has is refused
before any work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.base.memory import size_text
from quantkit.base.progress import Progress, silent
from quantkit.bit_allocation.allocation import (
    CANDIDATES,
    Allocation,
    SizeTarget,
    Unit,
    UnitChoice,
    units,
)
from quantkit.bit_allocation.knapsack import Option, choose
from quantkit.bit_allocation.losses import estimate_losses
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod, Reason, codec_of
from quantkit.formats.codecs.compressed_weights import SHAPE
from quantkit.formats.codecs.ggml import BlockType
from quantkit.formats.codecs.gptq_zeros import G_IDX
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

INT8 = CANDIDATES[-1]
_ROUNDS = 16


@dataclass(frozen=True)
class Fit:
    """A model and its requested size.

    Attributes:
        codes: the format of quantized weights.
        method: its name in the folder; None if it needs none.
        settled: the schemes of modules for which none is chosen: requested ones, and None for kept
            modules.
        total_bytes: the size of all files of weights, given the scheme of each module that gets
            one.
    """

    source: Checkpoint
    target: SizeTarget
    codes: CodeFormat
    method: QuantMethod | None
    settled: Mapping[str, QuantScheme | None]
    total_bytes: Callable[[Mapping[str, QuantScheme]], int]

    def __post_init__(self) -> None:
        """If no choice has the size, a `RequestError` names the smallest and the largest; a format
        that cannot hold several schemes is an `UnsupportedError`.
        """
        if not self.units:
            raise RequestError("no linear is left to choose a scheme for", path=self.source.path)
        self._require_mixed()
        smallest, largest = (self._measure_size(self._uniform(last)) for last in (False, True))
        if self.target.bits is not None:
            size = self.target.bits
        else:
            size = float(self.target.bytes or 0)
        if not smallest <= size < largest:
            requested, low, high = (
                f"{one:.4g} bits a weight"
                if self.target.bits is not None
                else f"{int(one)} bytes ({size_text(int(one))})"
                for one in (size, smallest, largest)
            )
            raise RequestError(
                "no choice of schemes has this size",
                path=self.source.path,
                found=requested,
                expected=f"at least {low}, and less than the {high} of its floats",
                hint=self._hint(size) if size < smallest else None,
            )

    def _hint(self, requested: float) -> str | None:
        """Return which tensors other than the units make the size too small; None if they are not
        the reason.
        """
        coarsest = self._uniform(last=False)
        if self.target.bits is not None:
            units_alone = sum(
                self._unit_bytes(unit, one) for unit, one in zip(self.units, coarsest, strict=True)
            )
            if 8 * units_alone > requested * sum(unit.weights for unit in self.units):
                return None
            modules = [spec.name.removesuffix(".weight") for spec in self._preset_specs]
            if len(modules) > 1:
                more = f" and {len(modules) - 1} more"
            else:
                more = ""
            return f"linears that are kept or named count too: {modules[0]}{more}"
        found = {}
        # Rows are as long as those of head and embedding.
        if INT8 in self.options[0]:
            if not self.source.config.tied_embeddings:
                found["head"] = CANONICAL["head"]
            if not isinstance(self.codes.codec(INT8, embedding=True), Reason):
                found["embedding"] = EMBEDDING
            found = {name: module for name, module in found.items() if module not in self.settled}
        with_them = self._schemes(coarsest) | dict.fromkeys(found.values(), INT8)
        if not found or self.total_bytes(with_them) > requested:
            return None
        names = " and ".join(f'`{name}="{INT8}"`' for name in found)
        if len(found) == 1:
            keep = "keeps its"
        else:
            keep = "keep their"
        return f"there is one with {names}, which {keep} floats now"

    @cached_property
    def units(self) -> list[Unit]:
        return units(self.source.config, self.settled)

    @cached_property
    def options(self) -> list[list[QuantScheme]]:
        """Return the schemes that each unit may have: those that the format holds and that fit the
        rows, without any that is as large as a finer one.
        """
        result = []
        for unit in self.units:
            own = []
            for one in CANDIDATES:
                if not isinstance(codec_of(self.codes, one), Reason):
                    own.append(one)
            own = [
                one
                for one in own
                if all(one.fit_to_columns(p.shape[1]) == one for p in unit.parameters)
            ]
            sizes = [self._unit_bytes(unit, one) for one in own]
            result.append(
                [
                    one
                    for at, one in enumerate(own)
                    if sizes[at] < min(sizes[at + 1 :], default=math.inf)
                ]
            )
        return result

    @property
    def max_bytes(self) -> int:
        """Return the approximate size of all files of weights, before the choice is made."""
        return self._others_bytes + self._room

    def choose_allocation(
        self,
        samples: Tensor,
        *,
        device: torch.device,
        memory_bytes: int,
        group: ProcessGroup,
        progress: Progress = silent,
    ) -> Allocation:
        """Return the choice, the same in all processes; for arguments and errors see
        `estimate_losses`.
        """
        schemes = dict(zip(self.units, self.options, strict=True))
        losses = estimate_losses(
            self.source,
            samples,
            self.units,
            schemes,
            device=device,
            memory_bytes=memory_bytes,
            scale_dtype=self._scale_dtype.torch,
            group=group,
            progress=progress,
        )
        return group.broadcast_from_rank0(self.allocation(losses))

    def allocation(self, losses: Sequence[Mapping[QuantScheme, float]]) -> Allocation:
        """Return the choice, given the loss of each scheme of each unit."""
        every: list[list[QuantScheme | None]] = [[*option, None] for option in self.options]
        items = []
        for unit, own, lost in zip(self.units, every, losses, strict=True):
            items.append(
                [
                    Option(self._unit_bytes(unit, one), 0.0 if one is None else lost[one])
                    for one in own
                ]
            )
        room = self._room
        best = self._uniform(last=False)
        for _ in range(_ROUNDS):
            numbers = choose(items, room)
            if numbers is None:
                break
            chosen = [own[number] for own, number in zip(every, numbers, strict=True)]
            over = self._measure_size(chosen) - (self.target.bits or self.target.bytes or 0)
            if over <= 0 and any(chosen):
                best = chosen
                break
            taken = sum(item[number].size for item, number in zip(items, numbers, strict=True))
            room = min(room, taken) - max(1, math.ceil(over) if self.target.bytes else 1)
        choices = []
        for unit, one, lost in zip(self.units, best, losses, strict=True):
            choices.append(UnitChoice.of(unit, one, lost))
        return Allocation(
            self.target, round(self._bits(best), 6), self.total_bytes(self._schemes(best)), choices
        )

    @property
    def _room(self) -> int:
        """Bytes for the units."""
        if self.target.bytes is not None:
            return self.target.bytes - self._others_bytes
        return (
            math.floor((self.target.bits or 0) * self._total_weights / 8 + 1e-6)
            - self._preset_bytes
        )

    @cached_property
    def _others_bytes(self) -> int:
        """Bytes of all files of weights without the units."""
        floats = sum(self._unit_bytes(unit, None) for unit in self.units)
        return self.total_bytes(self._schemes(self._uniform(last=True))) - floats

    def _uniform(self, last: bool) -> list[QuantScheme | None]:
        """Return the coarsest scheme for each unit, or floats for all."""
        result: list[QuantScheme | None] = []
        for option in self.options:
            result.append(None if last or not option else option[0])
        return result

    def _measure_size(self, chosen: Sequence[QuantScheme | None]) -> float:
        """Return a choice's size, in the unit of the target."""
        if self.target.bits is not None:
            return self._bits(chosen)
        return self.total_bytes(self._schemes(chosen))

    def _bits(self, chosen: Sequence[QuantScheme | None]) -> float:
        own = sum(
            self._unit_bytes(unit, scheme) for unit, scheme in zip(self.units, chosen, strict=True)
        )
        return 8 * (own + self._preset_bytes) / self._total_weights

    @cached_property
    def _total_weights(self) -> int:
        """Weights of all linears; an embedding is not one."""
        return sum(unit.weights for unit in self.units) + sum(
            math.prod(spec.shape) for spec in self._preset_specs
        )

    @cached_property
    def _preset_bytes(self) -> int:
        return sum(count_stored_bytes(spec, self.codes) for spec in self._preset_specs)

    @cached_property
    def _preset_specs(self) -> list[TensorSpec]:
        linears = (
            (module, scheme) for module, scheme in self.settled.items() if module != EMBEDDING
        )
        return [self._spec(f"{module}.weight", scheme) for module, scheme in linears]

    def _schemes(self, chosen: Sequence[QuantScheme | None]) -> dict[str, QuantScheme]:
        result = {module: scheme for module, scheme in self.settled.items() if scheme is not None}
        for unit, scheme in zip(self.units, chosen, strict=True):
            if scheme is not None:
                result |= dict.fromkeys(unit.modules, scheme)
        return result

    @cached_property
    def _scale_dtype(self) -> DType:
        return self.codes.scale_dtype or DType(self.source.config.dtype)

    def _unit_bytes(self, unit: Unit, scheme: QuantScheme | None) -> int:
        return sum(
            count_stored_bytes(self._spec(parameter.name, scheme), self.codes)
            for parameter in unit.parameters
        )

    def _spec(self, name: str, scheme: QuantScheme | None) -> TensorSpec:
        info = self.source.info(name)
        return TensorSpec(
            name, info.shape, info.dtype if scheme is None else self._scale_dtype, scheme
        )

    def _require_mixed(self) -> None:
        """Check that a folder of the format can hold several schemes."""
        every = list(dict.fromkeys(one for option in self.options for one in option))
        name = self.codes.name
        path = self.source.path
        if not every:
            raise UnsupportedError(f"{name} holds none of the schemes to choose among", path=path)
        mixed = {f"layer{number}": scheme for number, scheme in enumerate(every)}
        try:
            if self.method is not None:
                self.method.write_settings(mixed, dict.fromkeys(mixed, 128))
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{name} does not support a size to fit: {error.problem}",
                path=path,
                found=error.found,
                hint="choose a scheme, or another format",
            ) from error


def count_stored_bytes(spec: TensorSpec, codes: CodeFormat) -> int:
    """Bytes of a weight's codes, scales and zero points in a format that holds them, or of its
    floats.
    """
    if spec.scheme is None:
        return math.prod(spec.shape) * spec.dtype.itemsize
    holder = codes.codec(spec.scheme, embedding=spec.name == f"{EMBEDDING}.weight")
    assert not isinstance(holder, Reason)
    if isinstance(holder, BlockType):
        return spec.shape[0] * holder.type.row_bytes(spec.shape[1])
    stored = holder.list_stored_tensors(spec)  # type: ignore[attr-defined]
    return sum(one.nbytes for one in stored if not one.name.endswith((SHAPE, G_IDX)))
