"""Scales and zero points by search: for each group, the step with the smallest weighted error.

Also how much the solver processes at a time: on a CPU as much as its caches hold, on a GPU as much
as its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.scheme import QuantScheme

# From 1.05 down to 0.40; 1, the step that spans a group, is among them.
_COARSE = tuple(1.05 - 0.05 * step for step in range(14))
FINE = (-0.025, -0.0125, 0.0125, 0.025)
"""The distances of finer steps from the best coarse one."""
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


def list_trial_steps(scheme: QuantScheme) -> list[float]:
    """List the steps that are tried first, in units of the step that spans a group."""
    result: list[float] = []
    for factor in _COARSE:
        result.append(factor)
        # Symmetric codes have one more negative value than positive ones: either side may be it.
        if scheme.symmetric:
            result.append(-factor)
    return result


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
        if scheme.symmetric:
            span = torch.maximum(-self._low, high) / (self._top / 2)
        else:
            span = (high - self._low) / self._top
        self._span = span
        self._loss = torch.full_like(span, torch.inf)
        self._codes = torch.empty_like(grouped)
        self.scale = torch.ones_like(span, dtype=scale_dtype)
        self.offset = torch.full_like(span, scheme.levels // 2)
        self._best = torch.ones_like(span)
        trial_steps: Sequence[float] = _COARSE
        if signed:
            trial_steps = list_trial_steps(scheme)
        for factor in trial_steps:
            self._try(torch.full_like(span, factor))
        coarse = self._best.clone()
        for step in FINE:
            self._try(coarse + step)

    def _try(self, factor: Tensor) -> None:
        """Use a step of `factor` spans wherever it has a smaller error than the best so far."""
        # Errors are those of the scale as it is stored, after its rounding.
        stored = (self._span * factor).to(self.scale.dtype)
        wide = stored.float()
        offset = self.offset
        if not self._scheme.symmetric:
            offset = (-self._low * factor / wide).round_().clamp_(0, self._top)
        step = wide.unsqueeze(1)
        codes = torch.div(self._grouped, step, out=self._codes).round_()
        if self._scheme.symmetric:
            half = self._scheme.levels // 2
            codes.clamp_(-half, half - 1)
        else:
            codes.add_(offset.unsqueeze(1)).clamp_(0, self._top).sub_(offset.unsqueeze(1))
        error = codes.mul_(step).sub_(self._grouped).square_()
        loss = torch.bmm(self._importance, error).squeeze(1)
        # Never true of NaN, which a step of zero gives.
        better = loss < self._loss * _LESS
        self._loss = torch.where(better, loss, self._loss)
        self._best = torch.where(better, factor, self._best)
        self.scale = torch.where(better, stored, self.scale)
        self.offset = torch.where(better, offset, self.offset)
