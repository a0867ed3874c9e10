"""Scales and zero points by search: for each group, the step with the smallest weighted error.

Also how much the solver processes at a time: on a CPU as much as its caches hold, on a GPU as much
as its memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.code_table import find_table
from quantkit.tensors.scheme import Codes, QuantScheme

# From 1.05 down to 0.40; 1, the step that spans a group, is among them.
_COARSE = tuple(1.05 - 0.05 * step for step in range(14))
_FINE = (-0.025, -0.0125, 0.0125, 0.025)
"""The distances of finer steps from the best coarse one."""
# Of a table. 1 comes first: of equal losses, as where no weight counts, the first one is kept.
_TABLE_COARSE = (1.0, 1.05, 0.95, 0.9, 0.85, 0.8, 0.75)
# Steps of both signs often have equal losses except for rounding: the first is kept.
_LESS = 1 - 1e-6
MIN_TILE_ROWS = 16
ENDLESS = 1e30
"""A step with which all codes are zero."""

WEIGHTS_AT_ONCE = 1 << 22
_DIVIDED_AT_ONCE = 1 << 23
_GPU_WEIGHTS = 1 << 28
# GPU bytes reserved for each weight: twice what the solver needs.
_GPU_BYTES = 80
_REFIT_BYTES = 1 << 26
# Weights whose scales one thread searches at a time on a CPU.
_SEARCHED = 1 << 15


def weights_at_once(device: torch.device) -> int:
    """Count the weights of a layer that are solved together; on a GPU they depend on its total
    memory, so that runs are equal.
    """
    if device.type != "cuda":
        return WEIGHTS_AT_ONCE
    fitting = torch.cuda.get_device_properties(device).total_memory // _GPU_BYTES
    return min(_GPU_WEIGHTS, 1 << (fitting.bit_length() - 1))


def max_divided_elements(device: torch.device) -> int:
    """Count the elements that are divided by a Hessian together; its factor is read twice for each
    portion.
    """
    if device.type == "cuda":
        return weights_at_once(device) // 2
    return _DIVIDED_AT_ONCE


def refit_bytes(device: torch.device) -> int:
    """Limit the bytes of the least-squares systems that fit the scales of some rows."""
    if device.type == "cuda":
        return 2 * weights_at_once(device)
    return _REFIT_BYTES


def choose_search_batch_size(device: torch.device) -> int:
    """Count the weights whose scales are searched together."""
    if device.type == "cuda":
        return weights_at_once(device) // 8
    return _SEARCHED


@dataclass(frozen=True)
class Grid:
    """Scales [G, O], zero points and minima [G, O] or None, all float32, of groups of `size`
    columns.
    """

    scale: Tensor
    zero: Tensor | None
    scheme: QuantScheme
    size: int
    minimum: Tensor | None = None

    @classmethod
    def of(cls, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, columns: int) -> Grid:
        """Build the grid of stored scales and zero points."""
        if zero is not None:
            zero = zero.float()
        return cls(scale.float(), zero, scheme, columns // scale.shape[0])

    @classmethod
    def of_blocks(cls, scales: BlockScales, scheme: QuantScheme, columns: int) -> Grid:
        """Build the grid of scales [O, G] as blocks of GGUF store them.

        A step of zero is so long that all codes are zero.
        """
        steps = scales.steps.t()
        offsets = scales.offsets
        steps = torch.where(steps == 0, ENDLESS, steps).contiguous()
        if offsets is None:
            minimum = None
            zero = None
        else:
            minimum = offsets.t().contiguous()
            # Without zero points, codes would be signed; these begin at zero, less the minimum.
            zero = torch.zeros_like(steps)
        return cls(steps, zero, scheme, columns // len(steps), minimum)

    def values(self, codes: Tensor) -> Tensor:
        """Compute the weights [I, O] of codes less their zero points."""
        grouped = codes.view(self.scale.shape[0], self.size, -1) * self.scale.unsqueeze(1)
        if self.minimum is not None:
            grouped.sub_(self.minimum.unsqueeze(1))
        return grouped.view_as(codes)

    def add_minima(self, target: Tensor) -> Tensor:
        """Add the minima of groups to weights [I, O]: what codes times scales approximate."""
        if self.minimum is None:
            return target
        return target + self.minimum.repeat_interleave(self.size, 0)


def search_scales(
    weight: Tensor,
    importance: Tensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    *,
    signed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Search the scale and zero point of each group that minimize ``sum(importance * error **
    2)``.

    Steps from 1.05 down to 0.40 times the one that spans the group are tried, then four
    close to the best of them. Symmetric codes have one more negative value than positive ones, so
    symmetric scales may be negative: the longer side is then used for the larger weights.

    The numbers of a table are not evenly spaced: each of fewer steps, from 1.05 down to 0.75, is
    followed by the one that fits its codes best, by least squares, which replaces the finer steps.
    A group of zeros has a scale of 0 then, and otherwise of 1.

    Args:
        weight: [I, O] float32: inputs first.
        importance: [I] float32, not negative: how much the errors of an input's weights count; for
            GPTQ the diagonal of the Hessian.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in; errors are those of stored scales.
        signed: whether symmetric scales may be negative.

    Returns:
        Scale [G, O] in `scale_dtype`, and zero point [G, O] uint8 if the scheme has one.
    """
    columns, rows = weight.shape
    groups = scheme.groups(columns)
    grouped = weight.view(groups, -1, rows)
    grouped_importance = importance.view(groups, 1, -1)
    scale = torch.empty(groups, rows, dtype=scale_dtype, device=weight.device)
    if scheme.symmetric:
        zero = None
    else:
        zero = torch.empty_like(scale, dtype=torch.uint8)
    # Each thread has its own mode: the ones that search take over this thread's.
    inference = torch.is_inference_mode_enabled()

    def search(tile: tuple[slice, slice]) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            part = grouped[tile[0], :, tile[1]].contiguous()
            tile_importance = grouped_importance[tile[0]]
            result = _Search(part, tile_importance, scheme, scale_dtype, signed=signed)
            scale[tile] = result.scale
            if zero is not None:
                zero[tile] = result.offset.to(torch.uint8)

    size = columns // groups
    max_weights = choose_search_batch_size(weight.device)
    width = min(rows, max(MIN_TILE_ROWS, max_weights // size))
    height = max(1, max_weights // (size * width))
    tiles = []
    for first in range(0, groups, height):
        for start in range(0, rows, width):
            tiles.append((slice(first, first + height), slice(start, start + width)))
    if weight.device.type == "cpu":
        count = torch.get_num_threads()
        try:
            # Otherwise each of the threads would start as many torch threads.
            with ThreadPoolExecutor(
                count, initializer=torch.set_num_threads, initargs=(1,)
            ) as threads:
                # The list waits for all of them, and raises their errors.
                list(threads.map(search, tiles))
        finally:
            torch.set_num_threads(count)
    else:
        for tile in tiles:
            search(tile)
    return scale, zero


def list_trial_steps(
    scheme: QuantScheme, *, signed: bool = True
) -> tuple[list[float], list[float]]:
    """List the steps that are tried first, in units of the step that spans a group, and the
    distances from the best of them of those that are tried then.
    """
    if scheme.codes is Codes.TABLE:
        negative = [-factor for factor in _TABLE_COARSE]
        return [*_TABLE_COARSE, *negative], []
    coarse: list[float] = []
    for factor in _COARSE:
        coarse.append(factor)
        # Symmetric codes have one more negative value than positive ones: either side may be it.
        if scheme.symmetric and signed:
            coarse.append(-factor)
    return coarse, list(_FINE)


class _Search:
    """The search over one tile [G, size, O], small enough to stay in a core's cache."""

    def __init__(
        self,
        grouped: Tensor,
        importance: Tensor,
        scheme: QuantScheme,
        scale_dtype: torch.dtype,
        *,
        signed: bool,
    ) -> None:
        self._grouped = grouped
        self._importance = importance
        self._scheme = scheme
        self._top = scheme.levels - 1
        # Zero is always within the span, so that it has a code.
        self._low = grouped.amin(1).clamp(max=0)
        high = grouped.amax(1).clamp(min=0)
        self._table = find_table(scheme.codes, grouped.device)
        if self._table is not None:
            first, *_, last = self._table.values.tolist()
            self._span = torch.maximum(high / last, self._low / first)
            # A negative step turns the table around, which may reach further on one side.
            self._turned_span = torch.maximum(high / -first, self._low / -last)
        elif scheme.symmetric:
            self._span = torch.maximum(-self._low, high) / (self._top / 2)
            self._turned_span = self._span
        else:
            self._span = (high - self._low) / self._top
            self._turned_span = self._span
        self._loss = torch.full_like(high, torch.inf)
        self._codes = torch.empty_like(grouped)
        if self._table is None:
            self.scale = torch.ones_like(high, dtype=scale_dtype)
        else:
            # Kept also where squares overflow, so that no step has a smaller loss.
            self.scale = self._span.to(scale_dtype)
        self.offset = torch.full_like(high, scheme.levels // 2)
        self._best = torch.ones_like(high)
        coarse, fine = list_trial_steps(scheme, signed=signed)
        for factor in coarse:
            self._try(
                torch.full_like(high, factor), self._turned_span if factor < 0 else self._span
            )
        best = self._best.clone()
        for distance in fine:
            self._try(best + distance, self._span)

    def _try(self, factor: Tensor, span: Tensor) -> None:
        """Use a step of `factor` spans wherever it has a smaller error than the best so far; then
        also the one that fits its codes best, if they are in a table.
        """
        # Errors are those of the scale as it is stored, after its rounding.
        stored = (span * factor).to(self.scale.dtype)
        codes = self._compare(stored, factor)
        if self._table is not None:
            weighted = codes * self._importance.transpose(1, 2)
            products = torch.linalg.vecdot(weighted, self._grouped, dim=1)
            fitted = products / torch.linalg.vecdot(weighted, codes, dim=1)
            self._compare(fitted.to(self.scale.dtype), factor)

    def _compare(self, stored: Tensor, factor: Tensor) -> Tensor:
        """Use a stored step wherever it has a smaller error; return the codes less offsets."""
        wide = stored.float()
        offset = self.offset
        if not self._scheme.symmetric:
            offset = (-self._low * factor / wide).round_().clamp_(0, self._top)
        step = wide.unsqueeze(1)
        codes = torch.div(self._grouped, step, out=self._codes)
        if self._table is not None:
            codes = self._table.round(codes)
        elif self._scheme.symmetric:
            half = self._scheme.levels // 2
            codes.round_().clamp_(-half, half - 1)
        else:
            rounded = codes.round_().add_(offset.unsqueeze(1)).clamp_(0, self._top)
            rounded.sub_(offset.unsqueeze(1))
        error = (codes * step).sub_(self._grouped).square_()
        loss = torch.bmm(self._importance, error).squeeze(1)
        # Never true of NaN, which a step of zero gives.
        better = loss < self._loss * _LESS
        self._loss = torch.where(better, loss, self._loss)
        self._best = torch.where(better, factor, self._best)
        self.scale = torch.where(better, stored, self.scale)
        self.offset = torch.where(better, offset, self.offset)
        return codes
