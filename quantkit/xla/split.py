"""Which shard of each tensor lies on which device, and in what form.

Column-parallel linears are split by rows, row-parallel ones by columns, embedding and head by the
vocabulary; the rest is replicated on every device. Where there are fewer KV heads than devices,
several have the same one.

All devices run one program, so their arrays have one shape, padded where need be; the processes of
`quantkit.distributed.shard` may have shards of different sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.training.trained import has_trained_scales

_MAX_PADDING = 1 / 32  # of the feed-forward size; beyond it scales are repeated for smaller groups
_FEATURES = frozenset(
    {
        "qkv_bias",
        "output_bias",
        "mlp_bias",
        "qk_norm",
        "window",
        "rotary",
        "window_rope",
        "norms",
        "norm_offset",
        "activation",
        "attention_scale",
        "attention_softcap",
        "logit_softcap",
        "embedding_multiplier",
        "logit_multiplier",
        "residual_multiplier",
    }
)
"""Model features other than the basic ones; tests compare each with torch."""


def require_served(config: ModelConfig) -> None:
    """Raise an `UnsupportedError` if a model has features that programs for XLA do not serve."""
    unserved = config.features - _FEATURES
    if config.qk_norm == "width":
        unserved |= {"qk_norm"}
    if unserved:
        names = ", ".join(name.replace("_", " ") for name in sorted(unserved))
        raise UnsupportedError(f"{config.architecture} is not run by XLA", found=names)


def require_trainable(checkpoint: Checkpoint) -> None:
    """Raise an `UnsupportedError` if XLA does not train a quantized model: for its features, or for
    weights of its layers that are no integer codes with scales in floats and zero points or none.
    """
    require_served(checkpoint.config)
    found = schemes(checkpoint)
    for parameter in parameters(checkpoint.config):
        if parameter.layer is not None:
            scheme = found.get(parameter.module)
        else:
            scheme = None
        if scheme is not None and (scheme.has_minima or not has_trained_scales(scheme)):
            raise UnsupportedError(
                f"XLA does not train a model with weights like '{parameter.name}'",
                path=checkpoint.path,
                found="offsets of groups in floats" if scheme.has_minima else str(scheme),
                expected="int4 or int8 codes in all layers",
                hint="leave `backend` out",
            )


@dataclass(frozen=True)
class Shards:
    """What each device has of a tensor.

    Attributes:
        axis: that is split; None replicates the tensor.
        starts: where each device's shard begins.
        count: its length; beyond the tensor's end lie zeros.
        group: columns that share a scale on the device, where the checkpoint has groups; beyond the
            end scales are zeros as well.
    """

    axis: int | None
    starts: tuple[int, ...] = ()
    count: int = 0
    group: int = 1


@dataclass(frozen=True)
class Leaf:
    """An array on one device, by the name that the model has for it; int4 is held as int8, and
    `nibbles` says so.
    """

    name: str
    value: Tensor
    nibbles: bool = False


@dataclass(frozen=True)
class DeviceSplit:
    """A model, with the schemes of its quantized modules, over a number of devices.

    Raises:
        RequestError: if the devices do not divide the heads.
        UnsupportedError: if the model has features that programs for XLA do not serve.
    """

    config: ModelConfig
    schemes: Mapping[str, QuantScheme]
    devices: int

    def __post_init__(self) -> None:
        require_served(self.config)
        heads = self.config.num_heads
        kv_heads = self.config.num_kv_heads
        if (
            self.devices < 1
            or heads % self.devices
            or (kv_heads % self.devices and self.devices % kv_heads)
        ):
            raise RequestError(
                "attention heads can't be divided among the devices",
                found=f"{self.devices} devices",
                expected=(
                    f"a divisor of {heads} heads that divides {kv_heads} KV heads or is a multiple"
                    " of them"
                ),
            )

    @property
    def local(self) -> ModelConfig:
        """Return the architecture of what one device computes; vocabulary and feed-forward size are
        the whole ones.
        """
        config = self.config
        devices = self.devices
        return replace(
            config,
            num_heads=config.num_heads // devices,
            num_kv_heads=max(1, config.num_kv_heads // devices),
        )

    def shards(self, parameter: Parameter) -> Shards:
        """Return what each device has of one tensor of the checkpoint."""
        axis = parameter.split_axis
        if axis is None:
            return Shards(None)
        size = parameter.dims[axis]
        if size == "kv":
            heads = self.config.num_kv_heads
            width = self.config.head_dim
            starts = tuple(rank * heads // self.devices * width for rank in range(self.devices))
            return Shards(axis, starts, max(1, heads // self.devices) * width)
        if (reader := self._readers.get((parameter.layer, parameter.expert, size))) is None:
            return self._even(axis, parameter.shape[axis])
        group, width = self._columns(reader)
        return replace(self._even(axis, width), group=group)

    def leaves(self, parameter: Parameter, value: Tensor | QuantTensor, rank: int) -> list[Leaf]:
        """Return a tensor of the checkpoint as it lies on one device.

        A quantized weight becomes codes [G, O, I / G] less half their levels, ``scale`` [G, O] and,
        if it has them, ``zero`` [G, O] less the same. Works on the meta device as well.
        """
        shards = self.shards(parameter)
        if isinstance(value, Tensor):
            return [Leaf(parameter.name, _cut(value, shards, shards.axis, rank))]
        middle = value.scheme.levels // 2
        codes = _cut(value.codes, shards, shards.axis, rank).short() - middle
        steps = {"scale": value.scale}
        if value.zero is not None:
            steps["zero"] = (value.zero.short() - middle).char()
        for name, step in steps.items():
            if shards.axis == 0:
                steps[name] = _cut(step, shards, 0, rank)
            elif shards.axis == 1 and value.scheme.group_size is not None:
                repeated = step.repeat_interleave(value.scheme.group_size // shards.group, dim=1)
                steps[name] = _cut(repeated, shards, 1, rank, shards.group)
        grouped = codes.char().view(codes.shape[0], steps["scale"].shape[1], -1)
        return [
            Leaf(
                f"{parameter.module}.codes", grouped.transpose(0, 1), nibbles=value.scheme.bits == 4
            ),
            *(Leaf(f"{parameter.module}.{name}", step.t()) for name, step in steps.items()),
        ]

    def _even(self, axis: int, size: int) -> Shards:
        count = -(-size // self.devices)
        return Shards(axis, tuple(rank * count for rank in range(self.devices)), count)

    @cached_property
    def _readers(self) -> dict[tuple[int | None, int | None, str], Parameter]:
        """Return the row-parallel weight of a layer, and of an expert in it, that has inputs of
        a size.
        """
        weights = (p for p in parameters(self.config) if p.linear and p.is_linear_weight)
        readers: dict[tuple[int | None, int | None, str], Parameter] = {}
        for p in weights:
            if p.linear and p.linear.parallel == "row":
                readers[(p.layer, p.expert, p.dims[1])] = p
        return readers

    def _columns(self, weight: Parameter) -> tuple[int, int]:
        """Group size and number of a row-parallel weight's columns, padding included, that the
        devices divide.

        The largest group that divides the checkpoint's and takes little padding; a scale that is
        repeated changes nothing. Between heads there is no room for padding.
        """
        columns = weight.shape[1]
        scheme = self.schemes.get(weight.module)
        if scheme is None or scheme.group_size is None:
            group = 1
        else:
            group = scheme.group_size
        padding = 0 if weight.dims[1] == "query" else columns * _MAX_PADDING
        for size in range(group, 0, -1):
            unit = size * self.devices
            width = -(-columns // unit) * unit
            if group % size == 0 and (width - columns <= padding or size == 1):
                break
        return size, width


def _cut(tensor: Tensor, shards: Shards, axis: int | None, rank: int, unit: int = 1) -> Tensor:
    """Return one device's shard along an axis that counts in units of `unit` columns."""
    if axis is None:
        return tensor
    start = min(shards.starts[rank] // unit, tensor.shape[axis])
    count = shards.count // unit
    kept = tensor.narrow(axis, start, min(count, tensor.shape[axis] - start))
    missing = count - kept.shape[axis]
    if missing:
        return F.pad(kept, (0, 0) * (kept.dim() - 1 - axis) + (0, missing))
    return kept
