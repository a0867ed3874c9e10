"""Find where a model multiplies by the linears of a checkpoint: in its modules, or in parameters of
stacked experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from quantkit.passes.site import WEIGHT, Site
from quantkit.via_transformers.lazy_model import LazyModel, rows_of

REORDERED = "transformers stores its rows in another order"


def find_sites(lazy: LazyModel, linears: Iterable[str]) -> tuple[list[Site], dict[str, str]]:
    """Find the sites of linears, given by their modules on disk; and why others have none."""
    sites: list[Site] = []
    reasons = dict[str, str]()
    # Linears by the parameter in which they are merged or stacked.
    linears_of_target: dict[str, list[str]] = defaultdict(list)
    # Names of tensors on disk that contain all experts, by the linears in them.
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
        linears_with_site: set[str] = set()
        for site in _find_stacked_sites(lazy, target):
            sites.append(site)
            linears_with_site.update(linear for linear, _, _ in site.rows)
        for linear in target_linears:
            if linear not in linears_with_site:
                reasons[linear] = REORDERED
    return sites, reasons


def _find_stacked_sites(lazy: LazyModel, target: str) -> Iterator[Site]:
    """Yield the sites in a parameter of stacked experts.

    Each row on disk is numbered, and the numbers are merged by transformers' own loader: so they
    show where the rows of the parameter come from, whatever the loader does.
    """
    names = [name for name, (parameter, _) in lazy.targets.items() if parameter == target]
    if lazy.model.get_parameter(target).dim() != 3:
        return
    numbers = dict[str, Tensor]()
    # The linear that begins with a row, and the count of its rows.
    first_rows = dict[int, tuple[str, int]]()
    total = 0
    for name in names:
        numbers[name] = torch.full(lazy.shape(name), -1, dtype=torch.int32)
        numbered_linears: list[tuple[str, Tensor]] = []
        for part, stack in lazy.list_stacked_linears(name):
            numbered_linears.append((part.name, rows_of(numbers[name], stack, part.shape[0])))
        # A tensor of one linear.
        if not numbered_linears:
            numbered_linears.append((name, numbers[name]))
        for linear, rows in numbered_linears:
            if rows.dim() != 2:
                return
            rows.copy_(torch.arange(total, total + len(rows)).unsqueeze(1))
            first_rows[total] = linear, len(rows)
            total += len(rows)
    if lazy.targets[names[0]][1] is None:
        merged = numbers[names[0]]
    else:
        merged = lazy.merge_tensors(target, numbers)
    module, _, leaf = target.rpartition(".")
    for expert, weight in enumerate(merged):
        for transposed in (False, True):
            rows = weight.t() if transposed else weight
            # All elements of a row must come from one row on disk.
            if not bool((rows == rows[:, :1]).all()):
                continue
            parts = _parts(rows[:, 0].tolist(), first_rows)
            if parts:
                yield Site(
                    module=module,
                    leaf=leaf,
                    expert=expert,
                    rows=tuple(parts),
                    transposed=transposed,
                )
                break


def _parts(numbers: list[int], ends: Mapping[int, tuple[str, int]]) -> list[tuple[str, int, int]]:
    """List the linears whose rows follow each other; empty if the rows of one are not together, or
    in another order.
    """
    parts: list[tuple[str, int, int]] = []
    start = 0
    while start < len(numbers):
        first = numbers[start]
        name, count = ends.get(first, ("", 0))
        stop = start + count
        if not count or numbers[start:stop] != list(range(first, first + count)):
            return []
        parts.append((name.removesuffix(f".{WEIGHT}"), start, stop))
        start = stop
    return parts
