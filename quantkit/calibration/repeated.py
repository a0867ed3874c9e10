"""Solve the linears that a forward pass uses several times, before the other linears of a model.

The later inputs of such a linear depend on its own solution, so samples cannot wait at it until all
its inputs are known. It is solved on the inputs of all its uses in the float model instead, and the
quantized model has the solution from its first use on.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import nn

from quantkit.base.memory import malloc_trim
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import ROWS_AT_ONCE, HessianAccumulator
from quantkit.calibration.sample_streams import Batches
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.partwise_model import PartwiseModel
from quantkit.passes.passage import Inputs, Observer, Passage
from quantkit.passes.site import gather_weights

_FLOAT32_BYTES = 4
_SUMS = "sums over inputs"


def solve_repeated(
    passage: Passage[PartwiseModel],
    groups: Sequence[Inputs],
    batches: Batches,
    solver: GroupSolver,
    *,
    store: ActivationStore,
    memory_bytes: int,
) -> Generator[tuple[Inputs, dict[str, Result]]]:
    """Solve groups of linears that a forward pass uses several times, on the inputs of all their
    uses.

    Args:
        passage: the float model.
        batches: of which each goes through the model once for every portion of the groups.
        store: keeps the tensors of stopped batches.
        memory_bytes: of the sums over inputs at a time, at least those of one group.

    Yields:
        Each group with its results by module on disk.

    Raises:
        NonFiniteError: if a weight or the inputs of a linear contain NaN or Inf.
        UnsupportedError: if the model fails.
    """
    tokens = [
        batch
        for batch, is_float in zip(batches.tokens, batches.is_float, strict=True)
        if not is_float
    ]
    device = passage.partwise.device
    for portion, sum_bytes in _divide(passage, groups, memory_bytes):
        sums: dict[Inputs, HessianAccumulator] = {}
        for group in portion:
            sums[group] = HessianAccumulator(_count_inputs(passage, group), 0, device)
        observer = _Summation(sums, is_ghost=batches.is_ghost)
        # Batches and sums share the memory.
        store.reserve(_SUMS, sum_bytes)
        places = passage.iterate_inputs(portion, tokens, store, observer, to_end=True)
        with closing(places):
            for _ in places:
                pass
        store.reserve(_SUMS, 0)
        for group in portion:
            linears = _load_linears(passage, group, solver)
            # Consumed, so that their memory is free for the solver.
            yield group, solver.solve(linears, sums.pop(group), outputs=False, bounded=True)
        malloc_trim()


class _Summation(Observer):
    """Adds up the inputs of groups."""

    def __init__(self, sums: Mapping[Inputs, HessianAccumulator], *, is_ghost: bool) -> None:
        self._sums = sums
        self._is_ghost = is_ghost

    def arrive(self, index: int, place: Hashable, value: Any) -> None:
        """Add the inputs of a batch, at each use."""
        if isinstance(place, Inputs) and not self._is_ghost:
            # There is no drift, because these are the inputs of the float model.
            self._sums[place].add_pair(value.inputs.float(), None)

    def runs_ahead(self, index: int, place: Hashable) -> bool:
        """Let batches go on at once, because no weight changes."""
        return isinstance(place, Inputs)


def _divide(
    passage: Passage[PartwiseModel], groups: Sequence[Inputs], memory_bytes: int
) -> Generator[tuple[list[Inputs], int]]:
    """Yield portions of groups whose sums have room in memory together, with the sums' bytes."""
    portion: list[Inputs] = []
    portion_bytes = 0
    for group in groups:
        width = _count_inputs(passage, group)
        # The rows that wait to be added, too.
        group_bytes = _FLOAT32_BYTES * width * (width + ROWS_AT_ONCE)
        if portion and portion_bytes + group_bytes > memory_bytes:
            yield portion, portion_bytes
            portion = []
            portion_bytes = 0
        portion.append(group)
        portion_bytes += group_bytes
    if portion:
        yield portion, portion_bytes


def _count_inputs(passage: Passage[PartwiseModel], group: Inputs) -> int:
    site = group.sites[0]
    return site.of(passage.partwise.model.get_parameter(site.parameter)).shape[1]


def _load_linears(
    passage: Passage[PartwiseModel], group: Inputs, solver: GroupSolver
) -> dict[str, nn.Linear]:
    """Load the float32 linears of a group that have a scheme, by module on disk."""
    part = passage.partwise.part_of(group.sites[0].module)
    assert part is not None
    with passage.load_when_entered([part]):
        weights = gather_weights(group.sites, solver.schemes, passage.partwise.model.get_parameter)
    linears: dict[str, nn.Linear] = {}
    for module, weight in weights.items():
        linears[module] = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
        linears[module].weight = nn.Parameter(weight, requires_grad=False)
    return linears
