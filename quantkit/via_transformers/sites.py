"""Find where a model multiplies by the linears of a checkpoint: in its modules, or in parameters of
stacked experts, of several linears, or of a part of one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from quantkit.passes.site import WEIGHT, Site
from quantkit.via_transformers.experts import experts_of
from quantkit.via_transformers.lazy_model import LazyModel, rows_of

REORDERED = "transformers stores its rows in another order"


def find_sites(lazy: LazyModel, linears: Iterable[str]) -> tuple[list[Site], dict[str, str]]:
    """Find the sites of linears, given by their modules on disk; and why others have none."""
    sites: list[Site] = []
    reasons = dict[str, str]()
    # Linears by the first parameter in which they are merged, stacked or split.
    linears_of_target: dict[str, list[str]] = defaultdict(list)
    # Names of tensors on disk that contain linears, by linear.
    stack_of_linear: dict[str, str] = {}
    for name in lazy.targets:
        for part, _ in lazy.list_stacked_linears(name):
            stack_of_linear[part.module] = name
    for linear in linears:
        stored_name = stack_of_linear.get(linear, f"{linear}.{WEIGHT}")
        target, pattern = lazy.targets[stored_name]
        if pattern is None and linear not in stack_of_linear:
            count = lazy.model.get_parameter(target).shape[0]
            module = target.rpartition(".")[0]
            sites.append(Site(module, WEIGHT, None, ((linear, 0, count),)))
        else:
            linears_of_target[target].append(linear)
    for target, target_linears in linears_of_target.items():
        numbering = _Numbering(lazy, target)
        # Rows that have a site, by linear.
        counts: Counter[str] = Counter()
        for site in numbering.iterate_sites():
            sites.append(site)
            for linear, start, stop in site.rows:
                counts[linear] += stop - start
        for linear in target_linears:
            if counts[linear] != numbering.count_of_linear.get(linear):
                reasons[linear] = REORDERED
    return sites, reasons


class _Numbering:
    """Numbers for the rows on disk of the tensors that a parameter is made of.

    The numbers are converted by transformers' own loader: so they show where the rows of the
    parameters come from, whatever the loader does.

    Attributes:
        count_of_linear: the number of rows of each linear.
    """

    def __init__(self, lazy: LazyModel, target: str) -> None:
        """
        Args:
            target: the parameter that the tensors are merged into, or the first that one of them is
                split into.
        """
        self.count_of_linear: dict[str, int] = {}
        self._lazy = lazy
        self._target = target
        # The number of the first row of each linear.
        self._first_numbers: list[int] = []
        self._total = 0
        self._numbers: dict[str, Tensor] = {}
        for name, (parameter, _) in lazy.targets.items():
            if parameter == target:
                self._number_rows(name)

    def _number_rows(self, name: str) -> None:
        """Number the rows of a tensor on disk."""
        numbers = torch.full(self._lazy.shape(name), -1, dtype=torch.int32)
        self._numbers[name] = numbers
        rows_of_linear: list[tuple[str, Tensor]] = []
        for part, stack in self._lazy.list_stacked_linears(name):
            rows_of_linear.append((part.module, rows_of(numbers, stack, part.shape)))
        # A tensor of one linear; others, such as experts that stay floats, are not numbered.
        if not rows_of_linear and numbers.dim() == 2:
            rows_of_linear.append((name.removesuffix(f".{WEIGHT}"), numbers))
        for linear, rows in rows_of_linear:
            rows.copy_(torch.arange(self._total, self._total + len(rows)).unsqueeze(1))
            self.count_of_linear[linear] = len(rows)
            self._first_numbers.append(self._total)
            self._total += len(rows)

    def iterate_sites(self) -> Iterator[Site]:
        """Yield the sites in the parameters that the tensors become."""
        first_name = next(iter(self._numbers))
        if self._lazy.targets[first_name][1] is None:
            parameters: Mapping[str, Tensor] = {self._target: self._numbers[first_name]}
        else:
            parameters = self._lazy.convert_tensors(self._target, self._numbers)
        for name, numbers in parameters.items():
            module, _, leaf = name.rpartition(".")
            experts = experts_of(self._lazy.model.get_submodule(module))
            if experts is None or leaf not in experts.linears:
                yield from self._iterate_sites_of_weight(Site(module, leaf, None, ()), numbers)
                continue
            count = experts.count if experts.is_flat else None
            for expert, weight in enumerate(experts.split(numbers)):
                site = Site(module, leaf, expert, (), count=count)
                yield from self._iterate_sites_of_weight(site, weight)

    def _iterate_sites_of_weight(self, site: Site, weight: Tensor) -> Iterator[Site]:
        """Yield the site of a weight with its rows, given the numbers of its elements; none if it
        is not made of rows of linears.
        """
        if weight.dim() != 2:
            return
        for transposed in (False, True):
            rows = weight.t() if transposed else weight
            # All elements of a row must come from one row on disk.
            if not bool((rows == rows[:, :1]).all()):
                continue
            parts = self._find_parts(rows[:, 0].long())
            if parts:
                firsts: tuple[int, ...] = ()
                if any(self._is_cut(*part) for part in parts):
                    firsts = tuple(first for *_, first in parts)
                yield replace(
                    site,
                    rows=tuple((linear, start, stop) for linear, start, stop, _ in parts),
                    transposed=transposed,
                    firsts=firsts,
                )
                return

    def _is_cut(self, linear: str, start: int, stop: int, first: int) -> bool:
        """Return whether rows of a linear are not all that it has."""
        return first > 0 or stop - start < self.count_of_linear[linear]

    def _find_parts(self, numbers: Tensor) -> list[tuple[str, int, int, int]]:
        """List the linears whose rows follow each other, with the first of the rows, the one after
        the last, and the number of the first in the linear; empty if the rows of one are not
        together, or in another order.
        """
        # Some elements come from no linear.
        if bool((numbers < 0).any()):
            return []
        linears = list(self.count_of_linear)
        # The index in `linears` of each row.
        indices = torch.bucketize(numbers, torch.tensor(self._first_numbers), right=True) - 1
        follows = (numbers.diff() == 1) & (indices.diff() == 0)
        starts = [0, *((~follows).nonzero().flatten() + 1).tolist()]
        parts: list[tuple[str, int, int, int]] = []
        for start, stop in pairwise([*starts, len(numbers)]):
            index = int(indices[start])
            first = int(numbers[start]) - self._first_numbers[index]
            parts.append((linears[index], start, stop, first))
        if len({linear for linear, *_ in parts}) < len(parts):
            return []
        return parts
