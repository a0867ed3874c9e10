"""The scales and minima of GGUF's blocks: float16 numbers for each group, or integers with a
float16 for 256 weights.

Sources: ggml's block_q4_1, block_q5_0, block_q5_1, block_q2_K to block_q6_K, block_iq4_nl and
block_iq4_xs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.tensors.scheme import SUPER_BLOCK, QuantScheme, Scales

_MINIMA = {2: 15, 4: 63, 5: 63}
"""By bits of codes, the largest integer for a minimum, and for a scale of groups that have one."""
_SIGNED = {3: 32, 4: 32, 6: 128}
"""By bits of symmetric codes, minus the smallest integer for a scale; the largest is one less
than this.
"""


@dataclass(frozen=True)
class BlockScales:
    """The scales of groups: ``w = outer * scale * code - outer_minimum * minimum``, codes of
    symmetric schemes less ``2 ** (bits - 1)``.

    Attributes:
        scale, minimum: [O, G] float16; no minimum for symmetric schemes. Integers if there are
            outer ones.
        outer, outer_minimum: [O, S] float16, one for 256 weights; None for blocks without.
    """

    scale: Tensor
    minimum: Tensor | None
    outer: Tensor | None
    outer_minimum: Tensor | None

    @classmethod
    def nearest(cls, steps: Tensor, offsets: Tensor | None, scheme: QuantScheme) -> BlockScales:
        """Round steps and offsets [O, G] float32 to the nearest scales of a scheme.

        A group with a step keeps one, however small, and offsets below zero become zero.
        """
        if scheme.scales is not Scales.SUPER_BLOCKS:
            minimum = None if offsets is None else offsets.half()
            return cls(steps.half(), minimum, None, None)
        count = SUPER_BLOCK // (scheme.group_size or SUPER_BLOCK)
        if offsets is None:
            limit = _SIGNED[scheme.bits]
            grouped = _by_block(steps, count)
            largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)).squeeze(-1)
            # The largest scale becomes the integer `-limit`: in the other direction integers end at
            # `limit - 1`.
            outer = (largest / -limit).half()
            return cls(_round_to_integers(steps, outer, -limit, limit - 1), None, outer, None)
        limit = _MINIMA[scheme.bits]
        outer = (_by_block(steps, count).amax(-1) / limit).half()
        outer_minimum = (_by_block(offsets, count).amax(-1).clamp(min=0) / limit).half()
        scale = _round_to_integers(steps, outer, 0, limit)
        # A scale of 0 would turn all weights of the group into one value.
        has_step = (steps > 0) & (outer.repeat_interleave(count, 1) > 0)
        scale = torch.where(has_step, scale.clamp(min=1), scale)
        minimum = _round_to_integers(offsets, outer_minimum, 0, limit)
        return cls(scale, minimum, outer, outer_minimum)

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockScales:
        """Apply a change to all tensors, which are [O, G] or [O, S]."""

        def change_existing(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return BlockScales(
            change(self.scale),
            change_existing(self.minimum),
            change_existing(self.outer),
            change_existing(self.outer_minimum),
        )

    @property
    def steps(self) -> Tensor:
        """Compute the difference of the values of neighbouring codes, [O, G] float32."""
        return _multiply_scales(self.scale, self.outer)

    @property
    def offsets(self) -> Tensor | None:
        """Compute minus the value of code 0, [O, G] float32; None for symmetric schemes."""
        if self.minimum is None:
            return None
        return _multiply_scales(self.minimum, self.outer_minimum)


def _by_block(values: Tensor, count: int) -> Tensor:
    """View values [O, G] as [O, S, count]."""
    return values.reshape(len(values), -1, count)


def _multiply_scales(inner: Tensor, outer: Tensor | None) -> Tensor:
    """Multiply an integer of 8 bits by a float16, exactly."""
    # 8 bits and the 11 of a float16 fit into the 24 of a float32.
    if outer is None:
        return inner.float()
    return inner.float() * outer.float().repeat_interleave(inner.shape[1] // outer.shape[1], 1)


def _round_to_integers(values: Tensor, outer: Tensor, lowest: int, highest: int) -> Tensor:
    """Round values [O, G] to multiples of a float16, and return the integers; 0 if it is zero."""
    wide = outer.float().repeat_interleave(values.shape[1] // outer.shape[1], 1)
    # float16 represents all integers up to 2048.
    return torch.where(wide == 0, 0, values / wide).round_().clamp_(lowest, highest).half()
