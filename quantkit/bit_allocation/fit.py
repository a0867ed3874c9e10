"""Choose the schemes with the smallest loss for a size, from calibration samples.

Only schemes that the format supports are considered, and a size that no choice has is refused
before any work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.base.late import LateModule
from quantkit.base.memory import size_text
from quantkit.base.messages import Message, Option, join_messages
from quantkit.base.progress import Progress, silent
from quantkit.bit_allocation.allocation import Allocation, Measure, Unit, UnitChoice, units
from quantkit.bit_allocation.size_target import CANDIDATES, SizeTarget
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod, Reason, choose_codec
from quantkit.formats.container import count_stored_bytes
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

# The size of a given choice is known without these.
if TYPE_CHECKING:
    from quantkit.bit_allocation import knapsack, losses
    from quantkit.formats.codecs import ggml
    from quantkit.passes.passage import Inputs, Passage
else:
    knapsack = LateModule("quantkit.bit_allocation.knapsack")
    losses = LateModule("quantkit.bit_allocation.losses")
    ggml = LateModule("quantkit.formats.codecs.ggml")

INT8 = CANDIDATES[-1]
# Attempts to find a choice whose files have the requested size.
_ROUNDS = 16


@dataclass(frozen=True)
class Fit:
    """A model and its requested size.

    Attributes:
        codes: the format of quantized weights.
        method: its name in the folder; None if it needs none.
        settled: the schemes of modules for which none is chosen: requested ones, and None for kept
            modules.
        unsolved: other modules that keep their floats, and do not count: those that cannot be
            solved.
        total_bytes: the size of all files of weights, given the scheme of each module that gets
            one.
    """

    source: Checkpoint
    target: SizeTarget
    codes: CodeFormat
    method: QuantMethod | None
    settled: Mapping[str, QuantScheme | None]
    total_bytes: Callable[[Mapping[str, QuantScheme]], int]
    unsolved: Collection[str] = ()

    def __post_init__(self) -> None:
        """Check that the size is possible. If no choice has it, a `RequestError` names the smallest
        and the largest size; a format that cannot mix schemes is an `UnsupportedError`.
        """
        if not self.units:
            raise RequestError("there is no linear to choose a scheme for", path=self.source.path)
        self._require_mixed()
        smallest = self._measure_size(self._uniform(last=False))
        largest = self._measure_size(self._uniform(last=True))
        if self.target.bits is not None:
            size = self.target.bits
        else:
            size = float(self.target.bytes or 0)
        if not smallest <= size < largest:
            low = self._format_size(smallest)
            high = self._format_size(largest)
            raise RequestError(
                "no choice of schemes has this size",
                path=self.source.path,
                found=self._format_size(size),
                expected=f"at least {low}, and less than {high}, its unquantized size",
                hint=self._hint(size) if size < smallest else None,
            )

    def _format_size(self, size: float) -> str:
        """Write a size in the unit of the target."""
        if self.target.bits is not None:
            return f"{size:.4g} bits a weight"
        return f"{int(size)} bytes ({size_text(int(size))})"

    def _hint(self, requested: float) -> str | None:
        """Explain which tensors other than the units make the size impossible; None if they are
        not the reason.
        """
        coarsest = self._uniform(last=False)
        if self.target.bits is not None:
            # If the units alone are too large, other linears are not the reason.
            if 8 * self._sum_unit_bytes(coarsest) > requested * self._count_unit_weights():
                return None
            first_module = self._preset_specs[0].name.removesuffix(".weight")
            if len(self._preset_specs) > 1:
                further = f" and {len(self._preset_specs) - 1} more"
            else:
                further = ""
            return f"linears with a fixed scheme count too: {first_module}{further}"
        # Modules that could be quantized too, by the name of their option.
        quantizable: dict[str, str] = {}
        # The rows of the first unit are as long as those of head and embedding.
        if INT8 in self.options[0]:
            head = CANONICAL["head"]
            if not self.source.config.tied_embeddings and head not in self.settled:
                quantizable["head"] = head
            embedding_codec = self.codes.codec(INT8, embedding=True)
            if not isinstance(embedding_codec, Reason) and EMBEDDING not in self.settled:
                quantizable["embedding"] = EMBEDDING
        schemes = self._schemes(coarsest) | dict.fromkeys(quantizable.values(), INT8)
        if not quantizable or self.total_bytes(schemes) > requested:
            return None
        options = [Message(Option(name, value=str(INT8))) for name in quantizable]
        if len(quantizable) == 1:
            verb = "stays"
        else:
            verb = "stay"
        names = join_messages(" and ", options)
        return Message(
            "this size is possible with ", names, f", which {verb} unquantized otherwise"
        )

    @cached_property
    def units(self) -> list[Unit]:
        kept = {*self.settled, *self.unsolved}
        return units(self.source.config, kept, self.source.extra_config)

    @cached_property
    def options(self) -> list[list[QuantScheme]]:
        """Find the schemes that each unit may have: those that the format supports and that fit the
        rows, without any that is as large as a finer one.
        """
        return [self._unit_options(unit) for unit in self.units]

    def _unit_options(self, unit: Unit) -> list[QuantScheme]:
        """Find the schemes that one unit may have, see `options`."""
        schemes: list[QuantScheme] = []
        sizes: list[int] = []
        for scheme in CANDIDATES:
            # The codec decides first: only its schemes have a size in the format.
            if isinstance(choose_codec(self.codes, scheme), Reason):
                continue
            if _fits_rows(scheme, unit):
                schemes.append(scheme)
                sizes.append(self._unit_bytes(unit, scheme))
        options: list[QuantScheme] = []
        for number, scheme in enumerate(schemes):
            # CANDIDATES are in the order of their bits, so the later ones are finer.
            if sizes[number] < min(sizes[number + 1 :], default=math.inf):
                options.append(scheme)
        return options

    @property
    def max_bytes(self) -> int:
        """Estimate the size of all files of weights, before the choice is made."""
        return self._others_bytes + self._room

    def choose_allocation(
        self,
        samples: Tensor,
        passage: Passage[Any],
        groups: Sequence[Inputs],
        *,
        memory_bytes: int,
        group: ProcessGroup,
        progress: Progress = silent,
    ) -> Allocation:
        """Estimate the losses and choose the schemes, the same in all processes; for arguments and
        errors see `estimate_losses`.
        """
        estimated = losses.estimate_losses(
            self.source,
            passage,
            groups,
            samples,
            self.units,
            dict(zip(self.units, self.options, strict=True)),
            memory_bytes=memory_bytes,
            scale_dtype=self._scale_dtype.torch,
            group=group,
            progress=progress,
        )
        # A difference in rounding between processes could change the choice.
        return group.broadcast_from_rank0(self.allocation(estimated.by_unit, estimated.measure))

    def allocation(
        self, losses_by_unit: Sequence[Mapping[QuantScheme, float]], measure: Measure = "KL"
    ) -> Allocation:
        """Choose the schemes, given the loss of each scheme of each unit, and what it estimates."""
        # Floats, as None, are the last option of each unit.
        choices_of_units: list[list[QuantScheme | None]] = []
        items: list[list[knapsack.ItemChoice]] = []
        for unit, unit_schemes, unit_losses in zip(
            self.units, self.options, losses_by_unit, strict=True
        ):
            item: list[knapsack.ItemChoice] = []
            for scheme in unit_schemes:
                item.append(
                    knapsack.ItemChoice(self._unit_bytes(unit, scheme), unit_losses[scheme])
                )
            item.append(knapsack.ItemChoice(self._unit_bytes(unit, None), 0.0))
            items.append(item)
            choices_of_units.append([*unit_schemes, None])
        room = self._room
        best = self._uniform(last=False)
        # The sum of the units' bytes is not the exact size of the files, whose headers depend on
        # the choice. A choice that is too large is repeated with less room.
        for _ in range(_ROUNDS):
            numbers = knapsack.choose(items, room)
            if numbers is None:
                break
            chosen: list[QuantScheme | None] = []
            chosen_bytes = 0
            for choices, item, number in zip(choices_of_units, items, numbers, strict=True):
                chosen.append(choices[number])
                chosen_bytes += item[number].size
            excess = self._measure_size(chosen) - (self.target.bits or self.target.bytes or 0)
            # A choice of floats for all units would have no scheme as its default.
            if excess <= 0 and any(chosen):
                best = chosen
                break
            reduction = math.ceil(excess) if self.target.bytes else 1
            room = min(room, chosen_bytes) - max(1, reduction)
        unit_choices: list[UnitChoice] = []
        for unit, best_scheme, unit_losses in zip(self.units, best, losses_by_unit, strict=True):
            unit_choices.append(UnitChoice.of(unit, best_scheme, unit_losses))
        return Allocation(
            self.target,
            round(self._bits(best), 6),
            self.total_bytes(self._schemes(best)),
            unit_choices,
            measure,
        )

    @property
    def _room(self) -> int:
        """Count the bytes that the units may use."""
        if self.target.bytes is not None:
            return self.target.bytes - self._others_bytes
        # Without 1e-6, a rounding error of the product could remove a byte that the size allows.
        all_bytes = math.floor((self.target.bits or 0) * self._total_weights / 8 + 1e-6)
        return all_bytes - self._preset_bytes

    @cached_property
    def _others_bytes(self) -> int:
        """Count the bytes of all files of weights without the units."""
        floats = self._uniform(last=True)
        return self.total_bytes(self._schemes(floats)) - self._sum_unit_bytes(floats)

    def _uniform(self, last: bool) -> list[QuantScheme | None]:
        """Choose the coarsest scheme for each unit, or floats for all."""
        chosen: list[QuantScheme | None] = []
        for option in self.options:
            chosen.append(None if last or not option else option[0])
        return chosen

    def _measure_size(self, chosen: Sequence[QuantScheme | None]) -> float:
        """Measure a choice's size, in the unit of the target."""
        if self.target.bits is not None:
            return self._bits(chosen)
        return self.total_bytes(self._schemes(chosen))

    def _bits(self, chosen: Sequence[QuantScheme | None]) -> float:
        return 8 * (self._sum_unit_bytes(chosen) + self._preset_bytes) / self._total_weights

    def _sum_unit_bytes(self, chosen: Sequence[QuantScheme | None]) -> int:
        """Sum the bytes of all units in a choice."""
        total = 0
        for unit, scheme in zip(self.units, chosen, strict=True):
            total += self._unit_bytes(unit, scheme)
        return total

    def _count_unit_weights(self) -> int:
        """Count the weights of all units."""
        return sum(unit.weights for unit in self.units)

    @cached_property
    def _total_weights(self) -> int:
        """Count the weights of all linears; an embedding is not one."""
        preset_weights = sum(math.prod(spec.shape) for spec in self._preset_specs)
        return self._count_unit_weights() + preset_weights

    @cached_property
    def _preset_bytes(self) -> int:
        return sum(count_stored_bytes(spec, self.codes) for spec in self._preset_specs)

    @cached_property
    def _preset_specs(self) -> list[TensorSpec]:
        specs: list[TensorSpec] = []
        for module, scheme in self.settled.items():
            if module != EMBEDDING:
                specs.append(self._spec(f"{module}.weight", scheme))
        return specs

    def _schemes(self, chosen: Sequence[QuantScheme | None]) -> dict[str, QuantScheme]:
        schemes: dict[str, QuantScheme] = {}
        for module, settled_scheme in self.settled.items():
            if settled_scheme is not None:
                schemes[module] = settled_scheme
        for unit, scheme in zip(self.units, chosen, strict=True):
            if scheme is not None:
                schemes |= dict.fromkeys(unit.modules, scheme)
        return schemes

    @cached_property
    def _scale_dtype(self) -> DType:
        return self.codes.scale_dtype or DType(self.source.config.dtype)

    def _unit_bytes(self, unit: Unit, scheme: QuantScheme | None) -> int:
        total = 0
        for parameter in unit.parameters:
            total += count_stored_bytes(self._spec(parameter.name, scheme), self.codes)
        return total

    def _spec(self, name: str, scheme: QuantScheme | None) -> TensorSpec:
        info = self.source.info(name)
        dtype = info.dtype if scheme is None else self._scale_dtype
        return TensorSpec(name, info.shape, dtype, scheme)

    def _require_mixed(self) -> None:
        """Check that a folder of the format can contain several schemes."""
        schemes: list[QuantScheme] = []
        for unit_schemes in self.options:
            for scheme in unit_schemes:
                if scheme not in schemes:
                    schemes.append(scheme)
        name = self.codes.name
        path = self.source.path
        if not schemes:
            raise UnsupportedError(f"{name} supports none of the candidate schemes", path=path)
        mixed = {f"layer{number}": scheme for number, scheme in enumerate(schemes)}
        # Writing the settings of invented modules is the check: only the method knows which schemes
        # its settings can express together.
        try:
            if self.method is not None:
                self.method.write_settings(mixed, dict.fromkeys(mixed, 128))
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{name} cannot mix schemes, as a target size requires: {error.problem}",
                path=path,
                found=error.found,
                hint="choose a scheme, or another format",
            ) from error


def _fits_rows(scheme: QuantScheme, unit: Unit) -> bool:
    """Check that a scheme's groups divide the rows of all linears of a unit."""
    row_lengths = {parameter.shape[1] for parameter in unit.parameters}
    return all(scheme.fit_to_columns(length) == scheme for length in row_lengths)
