"""The values that refining trains, and the checkpoint that it makes of a quantized one.

A scale is multiplied by ``1 + factor``, and rounded to the type in which it is stored. A minimum
follows it, so that the value of the middle code does not change, and is moved by another factor. A
code is moved by an offset, and rounded. All are trained as if they were not rounded
(straight-through estimation, 1308.3432), so the model that is measured during training is the one
that is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.model.load import BLOCK_PREFIX, narrow_to_floats
from quantkit.passes.activation_store import ActivationStore
from quantkit.tensors.qtensor import QuantTensor, relative_error
from quantkit.tensors.scheme import Codes, QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

OFFSET_BYTES = 4
# How far from its code a weight may start, in steps. Half a step would round to the next code.
_EDGE = 0.49
# The largest relative error between weights of the same model. AWQ's scaling, for example, gives
# larger ones.
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
        """Find the tensors of a model that can be trained.

        Raises `UnsupportedError` if no weight of its layers has scales that can be trained.
        """
        weights: list[str] = []
        norm_names: list[str] = []
        for parameter in parameters(quantized.config):
            # Head and embedding have no layer, and do not change.
            in_layer = parameter.layer is not None
            if in_layer and has_trained_scales(quantized.info(parameter.name).scheme):
                weights.append(parameter.name)
            elif norms and parameter.module.endswith("norm") and parameter.leaf == "weight":
                norm_names.append(parameter.name)
        names = cls(tuple(weights), tuple(norm_names), codes)
        names.require_weights(quantized)
        return names

    def require_weights(self, quantized: Checkpoint) -> None:
        """Raise `UnsupportedError` unless a weight of a model is trained."""
        if not self.weights:
            raise UnsupportedError(
                "no weight has trainable scales",
                path=quantized.path,
                expected="int4 or int8 codes, each group with a scale in floats",
            )

    def in_layer(self, layer: int) -> TrainedNames:
        """Select the tensors of a layer."""
        prefix = BLOCK_PREFIX.format(layer)
        weights = tuple(name for name in self.weights if name.startswith(prefix))
        norms = tuple(name for name in self.norms if name.startswith(prefix))
        return replace(self, weights=weights, norms=norms)


def has_trained_scales(scheme: QuantScheme | None) -> bool:
    """Check that a scheme has integer codes, and a scale in floats for each group."""
    if scheme is None or scheme.codes is not Codes.INTEGERS:
        return False
    return scheme.scales in _TRAINED_SCALES


class TrainedCheckpoint(CheckpointView):
    """A quantized model with the trained values in place of its own.

    Attributes:
        names_trained: the names of the trained tensors.
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
        has_scheme = self._source.info(name).scheme is not None
        if has_scheme and not self.names_trained.codes:
            return self.build_weight(name, part)
        # Offsets of codes are stored for complete weights, so the part is cut at the end.
        value = self.build_weight(name) if has_scheme else self._norm(name)
        if part is None:
            return value
        return part.of_weight(value)

    def start(self, name: str, part: TensorSlice | None = None) -> QuantTensor:
        """Load a weight, or a part of it, as it was before training."""
        kept = self._start_weights.get((name, part))
        if kept is not None:
            return kept
        value = self._source.load(name, part)
        assert isinstance(value, QuantTensor)
        # Weights that exceed the memory are read again for each use.
        size = value.codes.nbytes + value.scale.nbytes
        if size <= self._free:
            self._free -= size
            self._start_weights[name, part] = value
        return value

    def build_weight(self, name: str, part: TensorSlice | None = None) -> QuantTensor:
        """Apply the trained values to a weight or, if codes are not trained, to a part of it."""
        value = self.start(name, part)
        factors = self.factors[name]
        if part is not None:
            groups = value.scale.shape[1]
            axis, places = factor_places(part, self._source.info(name), groups)
            factors = factors.index_select(axis, places)
        weight = with_factors(value, factors)
        if not self.names_trained.codes:
            return weight
        return replace(weight, codes=move_codes(value, self.offsets(name)))

    def offsets(self, name: str) -> Tensor:
        """Load the offsets of a weight's codes, [O, I] float32."""
        return self._store.get(name)

    def has_offsets(self, name: str) -> bool:
        """Check that a tensor has offsets: the codes of quantized weights are trained."""
        return self.names_trained.codes and self._source.info(name).scheme is not None

    def set_offsets(self, name: str, offsets: Tensor) -> None:
        """Replace the offsets of a weight's codes."""
        self._store.update(name, offsets)

    def begin(self, source: Checkpoint) -> None:
        """Set the offset of each code so that it is closest to the float model's weight, see
        `first_offsets`.
        """
        if not self.names_trained.codes:
            return
        for name in self.names_trained.weights:
            self._store.put(
                name, first_offsets(self.start(name), narrow_to_floats(source.load(name)))
            )

    def _norm(self, name: str) -> Tensor:
        value = narrow_to_floats(self._source.load(name))
        # Some architectures multiply by ``1 + weight``. The factor applies to that sum.
        offset = self.config.norm_offset
        return ((value.float() + offset) * (1 + self.factors[name]) - offset).to(value.dtype)


def multiply_scales(scale: Tensor, factor: Tensor) -> Tensor:
    """Multiply scales [O, G] by ``1 + factor``, in their type; those that would overflow it, or
    become 0, do not change.
    """
    product = (scale.float() * (1 + factor)).to(scale.dtype)
    usable = product.isfinite() & ((product != 0) | (scale == 0))
    return torch.where(usable, product, scale)


def factor_shape(info: TensorSpec) -> tuple[int, ...]:
    """Compute the shape of a tensor's factors."""
    if info.scheme is None:
        return info.shape
    groups = info.shape[0], info.scheme.groups(info.shape[1])
    if info.scheme.has_minima:
        return (2, *groups)
    return groups


def factor_places(part: TensorSlice | None, info: TensorSpec, groups: int) -> tuple[int, Tensor]:
    """Find the factors of a tensor that belong to a part of it: an axis, and their numbers on it
    in the part's order.

    Args:
        part: None is all of the tensor.
        groups: groups of a row in the part. A cut through a group gives each side one.
    """
    shape = factor_shape(info)
    # Negative axes, because a stack of scales and minima has one axis more.
    if info.scheme is None or part is None or part.axis == 0:
        axis = -1 if info.scheme is None else -2
        ranges = ((0, shape[axis]),) if part is None else part.ranges
        return axis, torch.cat([torch.arange(*range_) for range_ in ranges])
    # A part of the columns: the first column of each of its groups shows the group of the tensor.
    ((start, stop),) = part.ranges
    first_columns = torch.arange(start, stop, (stop - start) // groups)
    columns_per_group = info.shape[1] // shape[-1]
    return -1, first_columns // columns_per_group


def with_factors(value: QuantTensor, factors: Tensor) -> QuantTensor:
    """Change the scales of a weight, and its minima if it has any, by its factors; see
    `TrainedCheckpoint`.
    """
    if value.minimum is None:
        return replace(value, scale=multiply_scales(value.scale, factors))
    before = value.scale.float()
    middle = value.scheme.levels // 2
    scale = multiply_scales(value.scale, factors[0])
    # A weight is code * scale - minimum. With this term, the value of the middle code stays.
    compensation = middle * (scale.float() - before)
    shift = factors[1] * (before * _minimum_unit(value))
    minimum = (value.minimum.float() + compensation - shift).to(value.minimum.dtype)
    # A minimum that would overflow its type does not change.
    minimum = torch.where(minimum.isfinite(), minimum, value.minimum)
    return replace(value, scale=scale, minimum=minimum)


def move_codes(value: QuantTensor, offsets: Tensor) -> Tensor:
    """Move the codes [O, I] uint8 of a weight by offsets [O, I] float32, in steps of a code, and
    round them.
    """
    return (value.codes + offsets).round_().clamp_(0, value.scheme.levels - 1).to(torch.uint8)


def first_offsets(value: QuantTensor, weight: Tensor) -> Tensor:
    """Compute the offsets [O, I] float32 that bring codes as close to a float weight [O, I] as
    possible without changing the code.

    Weights of another model, as after a method that scales channels, give offsets of 0.
    """
    if measure_weight_error(value, weight) is None:
        return torch.zeros(value.shape, dtype=torch.float32)
    steps = value.scale.float().unsqueeze(-1)
    grouped = (weight.float() - value.dequantize()).view(*value.scale.shape, -1)
    # A group whose scale is 0 has no steps.
    return torch.where(steps == 0, 0, grouped / steps).clamp_(-_EDGE, _EDGE).flatten(1)


def measure_weight_error(value: QuantTensor, weight: Tensor | QuantTensor) -> float | None:
    """Measure the relative error of a weight; None if the float model has other weights, because
    its channels were scaled.
    """
    error = relative_error(value, narrow_to_floats(weight))
    if error <= _SAME_WEIGHTS:
        return error
    return None


def factor_gradient(value: QuantTensor, start: QuantTensor, gradient: Tensor) -> Tensor:
    """Compute the gradient by factors, [O, G] or [2, O, G], from the gradient by the weight,
    [O, I].

    Args:
        start: the weight before any step.
    """
    rows, groups = value.scale.shape
    # The derivative of a weight by its scale: the code, counted from the zero point. With minima,
    # the middle code's value does not depend on the scale, see `with_factors`.
    units = value.codes.float()
    scale = start.scale.float()
    if value.zero is not None:
        units.sub_(value.zero.float().repeat_interleave(value.shape[1] // groups, 1))
    else:
        units.sub_(value.scheme.levels // 2)
    # A factor multiplies the scale before training, hence that scale.
    by_scale = (units * gradient).view(rows, groups, -1).sum(-1).mul_(scale)
    if value.minimum is None:
        return by_scale
    by_minimum = gradient.view(rows, groups, -1).sum(-1).mul_(scale * _minimum_unit(value))
    return torch.stack([by_scale, by_minimum])


def _minimum_unit(value: QuantTensor) -> float:
    """Compute the steps by which a factor of 1 moves a group: about the mean distance of a code
    from the middle.
    """
    # So a factor of a minimum changes weights about as much as a factor of a scale.
    return value.scheme.levels / 4


def move(offsets: Tensor, gradient: Tensor, scale: Tensor, step: float) -> None:
    """Move offsets [O, I] by a step against the sign of the gradient by the weight [O, I] (signed
    descent, as in SignRound, 2309.05516); scales [O, G] may be negative.
    """
    rows, groups = scale.shape
    signs = gradient.view(rows, groups, -1).sign() * scale.float().sign().unsqueeze(-1)
    offsets.sub_(signs.flatten(1), alpha=step)
