"""What refining trains, and the checkpoint that it makes of a quantized one.

A scale is multiplied by ``1 + factor``, and rounded to the type in which it is stored; a minimum
follows it so that the middle code stays where it is, and is moved by another factor; a code is
moved by an offset, and rounded. All are trained as if they were not rounded (straight-through
estimation, 1308.3432), so the model that is measured during training is the one that is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.calibration.activation_store import ActivationStore
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.model.load import BLOCK_PREFIX, floats_of
from quantkit.tensors.qtensor import QuantTensor, relative_error
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

OFFSET_BYTES = 4
_EDGE = 0.49  # of a step: how far from its code a weight may start
# relative error; above it, the float model's weights are another model's, as after AWQ's scaling
_SAME_WEIGHTS = 0.3
_TRAINED_SCALES = (Scales.FLOATS, Scales.BLOCKS)


@dataclass(frozen=True)
class TrainedNames:
    """The tensors that are trained.

    Attributes:
        weights: quantized weights, whose scales are trained.
        norms: norms, by layer; None is the norm before the head.
        codes: whether the codes of the weights are trained too.
    """

    weights: tuple[str, ...]
    norms: tuple[str, ...]
    codes: bool

    @classmethod
    def of(cls, quantized: Checkpoint, *, norms: bool, codes: bool) -> TrainedNames:
        """Return those of a model.

        Raises `UnsupportedError` if no weight of its layers has scales that can be trained.
        """
        weights = []
        found = []
        for parameter in parameters(quantized.config):
            if parameter.layer is not None and has_trained_scales(
                quantized.info(parameter.name).scheme
            ):
                weights.append(parameter.name)
            elif norms and parameter.module.endswith("norm") and parameter.leaf == "weight":
                found.append(parameter.name)
        if not weights:
            raise UnsupportedError(
                "no weight has scales that can be trained",
                path=quantized.path,
                expected="int4 or int8 codes, each group with a scale in floats",
            )
        return cls(tuple(weights), tuple(found), codes)

    def in_layer(self, layer: int) -> TrainedNames:
        """Return those of a layer."""
        prefix = BLOCK_PREFIX.format(layer)
        weights, norms = (
            tuple(name for name in names if name.startswith(prefix))
            for names in (self.weights, self.norms)
        )
        return replace(self, weights=weights, norms=norms)


def has_trained_scales(scheme: QuantScheme | None) -> bool:
    """Return whether a scheme has integer codes, and a scale in floats for each group."""
    return scheme is not None and scheme.scales in _TRAINED_SCALES and not scheme.of_small_floats


class TrainedCheckpoint(CheckpointView):
    """A quantized model with the trained values in place of its own.

    Attributes:
        names: of the trained tensors.
        factors: by name, float32: of scales [O, G], of scales and minima [2, O, G], of norms [D].
    """

    def __init__(
        self, quantized: Checkpoint, names: TrainedNames, store: ActivationStore, memory_bytes: int
    ) -> None:
        """
        Args:
            store: keeps the offsets of codes.
            memory_bytes: of codes that are kept in memory; others are read again for each use.
        """
        super().__init__(quantized)
        self.names_trained = names
        self.factors: dict[str, Tensor] = {}
        for name in (*names.weights, *names.norms):
            self.factors[name] = torch.zeros(factor_shape(quantized.info(name)))
        self._trained = frozenset(self.factors)
        self._store = store
        self._free = memory_bytes
        self._start_weights: dict[tuple[str, TensorSlice | None], QuantTensor] = {}

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        if name not in self._trained:
            return self._source.load(name, part)
        if self._source.info(name).scheme is not None and not self.names_trained.codes:
            return self.build_weight(name, part)
        value = (
            self._norm(name) if self._source.info(name).scheme is None else self.build_weight(name)
        )
        if part is None:
            return value
        return part.of_weight(value)

    def start(self, name: str, part: TensorSlice | None = None) -> QuantTensor:
        """Return a weight, or a part of it, as it was before."""
        if (held := self._start_weights.get((name, part))) is not None:
            return held
        value = self._source.load(name, part)
        assert isinstance(value, QuantTensor)
        size = value.codes.nbytes + value.scale.nbytes
        if size <= self._free:
            self._free -= size
            self._start_weights[name, part] = value
        return value

    def build_weight(self, name: str, part: TensorSlice | None = None) -> QuantTensor:
        """Return a weight as it is now, or, if codes are not trained, a part of it."""
        value = self.start(name, part)
        factors = self.factors[name]
        if part is not None:
            factors = factors.index_select(
                *factor_places(part, self._source.info(name), value.scale.shape[1])
            )
        result = with_factors(value, factors)
        if not self.names_trained.codes:
            return result
        return replace(result, codes=move_codes(value, self.offsets(name)))

    def offsets(self, name: str) -> Tensor:
        """Return the offsets of a weight's codes, [O, I] float32."""
        return self._store.get(name)

    def has_offsets(self, name: str) -> bool:
        """Return whether a tensor has them."""
        return self.names_trained.codes and self._source.info(name).scheme is not None

    def set_offsets(self, name: str, offsets: Tensor) -> None:
        """Replace the offsets of a weight's codes."""
        self._store.update(name, offsets)

    def begin(self, source: Checkpoint) -> None:
        """Give each code the offset that brings it closest to the float model's weight, see
        `first_offsets`.
        """
        for name in self.names_trained.weights if self.names_trained.codes else ():
            self._store.put(name, first_offsets(self.start(name), floats_of(source.load(name))))

    def _norm(self, name: str) -> Tensor:
        value = floats_of(self._source.load(name))
        offset = self.config.norm_offset
        return ((value.float() + offset) * (1 + self.factors[name]) - offset).to(value.dtype)


def multiply_scales(scale: Tensor, factor: Tensor) -> Tensor:
    """Scales [O, G] times ``1 + factor``, in their type; those that would overflow it stay as
    they are.
    """
    found = (scale.float() * (1 + factor)).to(scale.dtype)
    return torch.where(found.isfinite() & ((found != 0) | (scale == 0)), found, scale)


def factor_shape(info: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor's factors."""
    if info.scheme is None:
        return info.shape
    groups = info.shape[0], info.scheme.groups(info.shape[1])
    if info.scheme.has_minima:
        return (2, *groups)
    return groups


def factor_places(part: TensorSlice | None, info: TensorSpec, groups: int) -> tuple[int, Tensor]:
    """Return which factors of a tensor are those of a part of it: an axis, and their numbers on it
    in the part's order.

    Args:
        part: None is the whole tensor.
        groups: a row, that the part has: a cut through a group gives each side one.
    """
    shape = factor_shape(info)
    if info.scheme is None or part is None or part.axis == 0:
        axis = -1 if info.scheme is None else -2
        ranges = ((0, shape[axis]),) if part is None else part.ranges
        return axis, torch.cat([torch.arange(*range_) for range_ in ranges])
    ((start, stop),) = part.ranges
    return -1, torch.arange(start, stop, (stop - start) // groups) // (info.shape[1] // shape[-1])


def with_factors(value: QuantTensor, factors: Tensor) -> QuantTensor:
    """Return a weight with scales, and minima if it has any, that are changed by its factors; see
    `TrainedCheckpoint`.
    """
    if value.minimum is None:
        return replace(value, scale=multiply_scales(value.scale, factors))
    before = value.scale.float()
    middle = value.scheme.levels // 2
    scale = multiply_scales(value.scale, factors[0])
    wider = middle * (scale.float() - before)
    moved_by = factors[1] * (before * _minimum_unit(value))
    minimum = (value.minimum.float() + wider - moved_by).to(value.minimum.dtype)
    return replace(
        value, scale=scale, minimum=torch.where(minimum.isfinite(), minimum, value.minimum)
    )


def move_codes(value: QuantTensor, offsets: Tensor) -> Tensor:
    """Return the codes [O, I] uint8 of a weight, moved by offsets [O, I] float32, in steps of a
    code, and rounded.
    """
    return (value.codes + offsets).round_().clamp_(0, value.scheme.levels - 1).to(torch.uint8)


def first_offsets(value: QuantTensor, weight: Tensor) -> Tensor:
    """Offsets [O, I] float32 that bring codes as close to a float weight [O, I] as they may be
    without another code.

    Weights that are not those of the same model, as after a method that scales channels, give none.
    """
    if measure_weight_error(value, weight) is None:
        return torch.zeros(value.shape, dtype=torch.float32)
    steps = value.scale.float().unsqueeze(-1)
    grouped = (weight.float() - value.dequantize()).view(*value.scale.shape, -1)
    return torch.where(steps == 0, 0, grouped / steps).clamp_(-_EDGE, _EDGE).flatten(1)


def measure_weight_error(value: QuantTensor, weight: Tensor | QuantTensor) -> float | None:
    """Return the relative error of a weight; None if it is not compared with the float model's,
    which has other channels.
    """
    error = relative_error(value, floats_of(weight))
    if error <= _SAME_WEIGHTS:
        return error
    return None


def factor_gradient(value: QuantTensor, start: QuantTensor, gradient: Tensor) -> Tensor:
    """Return the gradient by factors, [O, G] or [2, O, G], given that by the weight, [O, I].

    Args:
        start: the weight before any step.
    """
    rows, groups = value.scale.shape
    units = value.codes.float()
    scale = start.scale.float()
    if value.zero is not None:
        units.sub_(value.zero.float().repeat_interleave(value.shape[1] // groups, 1))
    else:
        units.sub_(value.scheme.levels // 2)
    by_scale = (units * gradient).view(rows, groups, -1).sum(-1).mul_(scale)
    if value.minimum is None:
        return by_scale
    return torch.stack(
        [by_scale, gradient.view(rows, groups, -1).sum(-1).mul_(scale * _minimum_unit(value))]
    )


def _minimum_unit(value: QuantTensor) -> float:
    """Return the steps that a factor of 1 moves a group: about the distance of a code from the
    middle.
    """
    return value.scheme.levels / 4


def move(offsets: Tensor, gradient: Tensor, scale: Tensor, step: float) -> None:
    """Move offsets [O, I] by a step against the sign of the gradient by the weight [O, I] (signed
    descent, as in SignRound, 2309.05516); scales [O, G] may be negative.
    """
    rows, groups = scale.shape
    signs = gradient.view(rows, groups, -1).sign() * scale.float().sign().unsqueeze(-1)
    offsets.sub_(signs.flatten(1), alpha=step)
