"""Where a model multiplies by the linears of a checkpoint: in its modules, or as experts that
are stacked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.via_transformers.lazy_model import LazyModel, rows_of

WEIGHT = "weight"
REORDERED = "transformers stores its rows in another order"


@dataclass(frozen=True)
class Site:
    """A product with a weight [O, I].

    Attributes:
        module: of transformers, which has it.
        leaf: its parameter there.
        expert: which of the weights that are stacked in the parameter; None if it is the whole.
        rows: the linears on disk that it is made of, with the first of their rows and the one after
            the last.
        transposed: whether the module has it as [I, O].
    """

    module: str
    leaf: str
    expert: int | None
    rows: tuple[tuple[str, int, int], ...]
    transposed: bool = False

    @property
    def parameter(self) -> str:
        return f"{self.module}.{self.leaf}"

    def of(self, parameter: Tensor) -> Tensor:
        """Return the weight [O, I] in its parameter, not copied."""
        if self.expert is None:
            weight = parameter
        else:
            weight = parameter[self.expert]
        if self.transposed:
            return weight.t()
        return weight


def find_sites(lazy: LazyModel, linears: Iterable[str]) -> tuple[list[Site], dict[str, str]]:
    """Return the sites of linears, given by their modules on disk; and why others have none."""
    found = []
    reasons = dict[str, str]()
    stacked: dict[str, list[str]] = defaultdict(list)
    in_stacks = {}
    for name in lazy.targets:
        for part, _ in lazy.list_stacked_linears(name):
            in_stacks[part.module] = name
    for linear in linears:
        target, merged = lazy.targets[in_stacks.get(linear, f"{linear}.{WEIGHT}")]
        if merged is None and linear not in in_stacks:
            count = lazy.model.get_parameter(target).shape[0]
            found.append(Site(target.rpartition(".")[0], WEIGHT, None, ((linear, 0, count),)))
        else:
            stacked[target].append(linear)
    for target, own in stacked.items():
        sites = list(_find_stacked_sites(lazy, target))
        found += sites
        there = {linear for site in sites for linear, _, _ in site.rows}
        reasons |= {linear: REORDERED for linear in own if linear not in there}
    return found, reasons


def _find_stacked_sites(lazy: LazyModel, target: str) -> Iterator[Site]:
    """Yield the sites in a parameter of stacked experts.

    Where rows come from is seen by merging their numbers.
    """
    names = [name for name, (own, _) in lazy.targets.items() if own == target]
    if lazy.model.get_parameter(target).dim() != 3:
        return
    numbers = dict[str, Tensor]()
    ends = dict[int, tuple[str, int]]()
    total = 0
    for name in names:
        numbers[name] = torch.full(lazy.shape(name), -1, dtype=torch.int32)
        own = []
        for part, stack in lazy.list_stacked_linears(name):
            own.append((part.name, rows_of(numbers[name], stack, part.shape[0])))
        for linear, rows in own or [(name, numbers[name])]:
            if rows.dim() != 2:
                return
            rows.copy_(torch.arange(total, total + len(rows)).unsqueeze(1))
            ends[total] = linear, len(rows)
            total += len(rows)
    if lazy.targets[names[0]][1] is None:
        made = numbers[names[0]]
    else:
        made = lazy.merge_tensors(target, numbers)
    module, _, leaf = target.rpartition(".")
    for expert, weight in enumerate(made):
        for transposed in (False, True):
            rows = weight.t() if transposed else weight
            if bool((rows == rows[:, :1]).all()) and (parts := _parts(rows[:, 0].tolist(), ends)):
                yield Site(module, leaf, expert, tuple(parts), transposed)
                break


def _parts(numbers: list[int], ends: Mapping[int, tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Return the linears whose rows follow each other; none if rows of one are not together, or in
    another order.
    """
    result = []
    at = 0
    while at < len(numbers):
        name, count = ends.get(numbers[at], ("", 0))
        if not count or numbers[at : at + count] != list(range(numbers[at], numbers[at] + count)):
            return []
        result.append((name.removesuffix(f".{WEIGHT}"), at, at + count))
        at += count
    return result
