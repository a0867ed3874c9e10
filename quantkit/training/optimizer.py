"""Adam for the factors of scales and norms, signed descent for codes, and their schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.training.trained import TrainedCheckpoint, factor_gradient, move

FACTOR_RATE = 2e-3
"""The largest step of a factor, for int4 and norms of a small model. It is smaller with more
levels, because codes are larger, and in a larger model, because the noise of more factors adds up.
"""
# Width times layers, up to which a model is small.
_SMALL = 256 * 6
_LEVELS = 16
# Steps of a code that an offset moves in all if its gradient keeps its sign.
_CODE_TRAVEL = 0.1
# A limit, so that a short training does not move many codes by the noise of their gradients.
_MAX_CODE_STEP = 5e-4
# At most; a tenth of a short training.
_WARMUP_STEPS = 20
_BETAS = (0.9, 0.999)
# Far below Adam's usual 1e-8, because the gradients of an accurate model are tiny.
_EPSILON = 1e-15
FACTOR_BYTES = 12
"""Of a factor and its moments."""
FIRST = ".first"
SECOND = ".second"
"""What the names of a tensor's moments end in."""


@dataclass(frozen=True)
class Schedule:
    """How fast values change, over a number of steps: a cosine that falls to zero (1608.03983)."""

    steps: int

    def share(self, step: int) -> float:
        """Compute the share of the largest rate at a step, counted from 0."""
        warmup = min(_WARMUP_STEPS, 1 + self.steps // 10)
        return min(1.0, (step + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))

    def code_step(self, step: int) -> float:
        """Compute by how much offsets of codes move at a step."""
        # The mean share of the cosine is a half, hence the factor 2.
        return self.share(step) * min(_MAX_CODE_STEP, 2 * _CODE_TRAVEL / self.steps)


def factor_rate(config: ModelConfig) -> float:
    """Compute the largest step of a factor in a model."""
    return FACTOR_RATE * min(1.0, math.sqrt(_SMALL / (config.hidden_size * config.num_layers)))


def adam(
    first: Any, second: Any, gradient: Any, corrections: tuple[Any, Any]
) -> tuple[Any, Any, Any]:
    """Update the running means of gradients and of their squares, and compute the step at a rate
    of 1 (Adam, 1412.6980), for torch's tensors or JAX's arrays.

    Args:
        corrections: see `corrections`.
    """
    first = first + (1 - _BETAS[0]) * (gradient - first)
    second = _BETAS[1] * second + (1 - _BETAS[1]) * (gradient * gradient)
    return first, second, (first / corrections[0]) / ((second / corrections[1]) ** 0.5 + _EPSILON)


def corrections(step: int) -> tuple[float, float]:
    """Compute the divisors of the running means after a step, which correct that they began at
    zero.
    """
    return 1 - _BETAS[0] ** (step + 1), 1 - _BETAS[1] ** (step + 1)


def tensor_rate(config: ModelConfig, scheme: QuantScheme | None) -> float:
    """Compute the largest step of a tensor's factors."""
    if scheme is None:
        return factor_rate(config)
    return factor_rate(config) * min(1.0, _LEVELS / scheme.levels)


class SharedGradients(Protocol):
    """This process's part of the tensors and gradients of a training."""

    def part(self, name: str) -> TensorSlice | None:
        """Find this process's slice of a tensor; None for all of it."""
        ...

    def total(self, name: str, local_gradient: Tensor | None) -> Tensor | None:
        """Sum the gradient by the factors of a tensor over all processes; None if none has one."""
        ...


class Optimizer:
    """Changes the trained values of a model with their gradients.

    Attributes:
        moments: the running means of `adam` by the tensor's name and `FIRST` or `SECOND`.
    """

    def __init__(
        self, model: TrainedCheckpoint, schedule: Schedule, shares: SharedGradients
    ) -> None:
        self._model = model
        self._schedule = schedule
        self._shares = shares
        self.moments: dict[str, Tensor] = {}
        for name, factor in model.factors.items():
            self.moments[name + FIRST] = torch.zeros_like(factor)
            self.moments[name + SECOND] = torch.zeros_like(factor)

    def update(self, step: int, name: str, gradient: Tensor | None) -> None:
        """Change one tensor's values at a step, given the gradient by this process's part of the
        tensor, float32; None if its samples had none. All processes call this in the same order.
        """
        model = self._model
        part = self._shares.part(name)
        by_factors = None
        if gradient is not None:
            value = model.load(name, part)
            gradient = gradient.cpu()
            if isinstance(value, QuantTensor):
                by_factors = factor_gradient(value, model.start(name, part), gradient)
            else:
                # A factor multiplies the norm's weight with its offset.
                by_factors = gradient * (value.float() + model.config.norm_offset)
        # Called without a gradient too, because all processes take part in the sum.
        total = self._shares.total(name, by_factors)
        if total is None:
            return
        rate = self._schedule.share(step) * tensor_rate(model.config, model.info(name).scheme)
        self._step(step, name, total, rate)
        if gradient is not None and model.has_offsets(name):
            offsets = model.offsets(name)
            move(offsets, gradient, model.start(name).scale, self._schedule.code_step(step))
            model.set_offsets(name, offsets)

    def _step(self, step: int, name: str, gradient: Tensor, rate: float) -> None:
        first = self.moments[name + FIRST]
        second = self.moments[name + SECOND]
        new_first, new_second, change = adam(first, second, gradient, corrections(step))
        first.copy_(new_first)
        second.copy_(new_second)
        self._model.factors[name].sub_(change, alpha=rate)
