"""Assign a shard of each tensor to each device, in the layout of its programs.

Column-parallel linears are split by rows, row-parallel linears by columns, embedding and head by
the vocabulary; all other tensors are replicated. If there are fewer KV heads than devices, several
devices have the same KV head.

All devices run the same program, so their arrays have the same shape, with padding if necessary.
The processes of `quantkit.distributed.shard`, in contrast, may have shards of different sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.training.trained import has_trained_scales

# The largest padding, as a share of the feed-forward size. If more is necessary, groups become
# smaller and their scales are repeated.
_MAX_PADDING = 1 / 32
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
"""The features that programs for XLA support; tests compare each with torch."""


def require_served(config: ModelConfig) -> None:
    """Raise an `UnsupportedError` if a model has features that programs for XLA do not support."""
    unserved = config.features - _FEATURES
    # Such a norm needs a sum over devices.
    if config.qk_norm == "width":
        unserved |= {"qk_norm"}
    if unserved:
        names = ", ".join(name.replace("_", " ") for name in sorted(unserved))
        raise UnsupportedError(f"{config.architecture} is not supported by XLA", found=names)


def require_trainable(checkpoint: Checkpoint) -> None:
    """Raise an `UnsupportedError` if XLA cannot train a quantized model, because of its features or
    because weights of its layers are not integer codes with float scales and optional zero points.
    """
    require_served(checkpoint.config)
    scheme_by_module = schemes(checkpoint)
    for parameter in parameters(checkpoint.config):
        # Outside the layers, only embedding and head are quantized.
        if parameter.layer is None:
            continue
        scheme = scheme_by_module.get(parameter.module)
        if scheme is None:
            continue
        if scheme.has_minima or not has_trained_scales(scheme):
            raise UnsupportedError(
                f"XLA cannot train a model with weights like '{parameter.name}'",
                path=checkpoint.path,
                found="float offsets of groups" if scheme.has_minima else str(scheme),
                expected="int4 or int8 weights in all layers",
                hint=Message("leave ", Option("backend"), " out"),
            )


@dataclass(frozen=True)
class Shards:
    """The shards of a tensor on all devices.

    Attributes:
        axis: the axis that is split; None replicates the tensor.
        starts: the start of each device's shard.
        count: the length of each shard; it is padded with zeros beyond the tensor's end.
        group: columns that share a scale on the device, if the checkpoint has groups; padded scales
            are zeros as well.
    """

    axis: int | None
    starts: tuple[int, ...] = ()
    count: int = 0
    group: int = 1


@dataclass(frozen=True)
class Leaf:
    """An array on one device, with its name in the model. int4 is stored as int8, marked by
    `nibbles`, because torch has no int4.
    """

    name: str
    value: Tensor
    nibbles: bool = False


@dataclass(frozen=True)
class DeviceSplit:
    """A model, with the schemes of its quantized modules, over a number of devices.

    Raises:
        RequestError: if the devices do not divide the heads.
        UnsupportedError: if the model has features that programs for XLA do not support.
    """

    config: ModelConfig
    schemes: Mapping[str, QuantScheme]
    devices: int

    def __post_init__(self) -> None:
        require_served(self.config)
        heads = self.config.num_heads
        kv_heads = self.config.num_kv_heads
        divides_heads = self.devices >= 1 and heads % self.devices == 0
        # With more devices than KV heads, each KV head is on the same number of devices.
        if not divides_heads or (kv_heads % self.devices and self.devices % kv_heads):
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
        """Return the config of one device's decoder, with its number of heads. Vocabulary and
        feed-forward size stay complete, because only the arrays' shapes matter for them.
        """
        config = self.config
        devices = self.devices
        return replace(
            config,
            num_heads=config.num_heads // devices,
            num_kv_heads=max(1, config.num_kv_heads // devices),
        )

    def shards(self, parameter: Parameter) -> Shards:
        """Compute the shards of one tensor of the checkpoint."""
        axis = parameter.split_axis
        if axis is None:
            return Shards(None)
        size = parameter.dims[axis]
        if size == "kv":
            heads = self.config.num_kv_heads
            width = self.config.head_dim
            # The product is divided first, so several devices may start at the same head.
            starts = tuple(rank * heads // self.devices * width for rank in range(self.devices))
            return Shards(axis, starts, max(1, heads // self.devices) * width)
        reader = self._readers.get((parameter.layer, parameter.expert, size))
        if reader is None:
            return self._even(axis, parameter.shape[axis])
        # Rows of gate and up are split like the columns of down, which multiplies their outputs.
        group, width = self._columns(reader)
        return replace(self._even(axis, width), group=group)

    def leaves(self, parameter: Parameter, value: Tensor | QuantTensor, rank: int) -> list[Leaf]:
        """Convert a tensor of the checkpoint to the arrays of one device.

        A quantized weight becomes codes [G, O, I / G] minus half their levels, ``scale`` [G, O]
        and, for asymmetric schemes, ``zero`` [G, O] minus the same. Works on the meta device too.
        """
        shards = self.shards(parameter)
        if isinstance(value, Tensor):
            return [Leaf(parameter.name, _cut(value, shards, shards.axis, rank))]
        # Unsigned codes become signed: XLA has signed int4 and int8.
        middle = value.scheme.levels // 2
        codes = _cut(value.codes, shards, shards.axis, rank).short() - middle
        steps = {"scale": value.scale}
        if value.zero is not None:
            steps["zero"] = (value.zero.short() - middle).char()
        for name, step in steps.items():
            if shards.axis == 0:
                steps[name] = _cut(step, shards, 0, rank)
            elif shards.axis == 1 and value.scheme.group_size is not None:
                # A device's groups may be smaller than the checkpoint's.
                repeated = step.repeat_interleave(value.scheme.group_size // shards.group, dim=1)
                steps[name] = _cut(repeated, shards, 1, rank, shards.group)
        grouped = codes.char().view(codes.shape[0], steps["scale"].shape[1], -1)
        nibbles = value.scheme.bits == 4
        leaves = [Leaf(f"{parameter.module}.codes", grouped.transpose(0, 1), nibbles=nibbles)]
        for name, step in steps.items():
            leaves.append(Leaf(f"{parameter.module}.{name}", step.t()))
        return leaves

    def _even(self, axis: int, size: int) -> Shards:
        count = -(-size // self.devices)
        return Shards(axis, tuple(rank * count for rank in range(self.devices)), count)

    @cached_property
    def _readers(self) -> dict[tuple[int | None, int | None, str], Parameter]:
        """Find the row-parallel weights by layer, expert and the size of their inputs."""
        readers: dict[tuple[int | None, int | None, str], Parameter] = {}
        for parameter in parameters(self.config):
            if not parameter.linear or not parameter.is_linear_weight:
                continue
            if parameter.linear.parallel == "row":
                readers[(parameter.layer, parameter.expert, parameter.dims[1])] = parameter
        return readers

    def _columns(self, weight: Parameter) -> tuple[int, int]:
        """Choose a group size of a row-parallel weight, and the number of its columns with padding,
        which the devices divide.

        The group is the largest that divides the checkpoint's group and needs little padding.
        Repeating a scale for smaller groups does not change a weight. Columns of heads cannot be
        padded.
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
    """Cut one device's shard along an axis that counts in units of `unit` columns."""
    if axis is None:
        return tensor
    # The shard of the last device may consist only of padding.
    start = min(shards.starts[rank] // unit, tensor.shape[axis])
    count = shards.count // unit
    shard = tensor.narrow(axis, start, min(count, tensor.shape[axis] - start))
    missing = count - shard.shape[axis]
    if missing:
        # `F.pad` counts axes from the last one.
        return F.pad(shard, (0, 0) * (shard.dim() - 1 - axis) + (0, missing))
    return shard
