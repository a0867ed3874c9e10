"""Which part of each tensor lies on which device, and in what form.

Rows of q, k, v, gate, up and the head are divided, columns of o and down, the vocabulary of the embedding;
the rest is whole on every device. Where there are fewer KV heads than devices, several have the same one.

All devices run one program, so their arrays have one shape, padded where need be; the processes of
`quantkit.distributed.split` may have shares of different sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter
from quantkit.errors import RequestError
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

COLUMNS = ("o_proj", "down_proj")
"""Linears of which columns are divided, so that their products are to be added up."""

_MOST_PADDING = 1 / 32  # of the feed-forward size; beyond it scales are repeated for smaller groups


@dataclass(frozen=True)
class Share:
    """What each device has of a tensor.

    Attributes:
        axis: that is divided; None leaves the tensor whole.
        starts: where each device's part begins.
        count: its length; beyond the tensor's end lie zeros.
        group: columns that share a scale on the device, where the checkpoint has groups; beyond the end
            scales are zeros as well.
    """

    axis: int | None
    starts: tuple[int, ...] = ()
    count: int = 0
    group: int = 1


@dataclass(frozen=True)
class Leaf:
    """An array on one device, by the name that the model has for it.

    Attributes:
        value: what it holds; int4 as int8.
        nibbles: whether it is int4.
    """

    name: str
    value: Tensor
    nibbles: bool = False


@dataclass(frozen=True)
class Layout:
    """A model over a number of devices.

    Attributes:
        schemes: of the quantized modules.

    Raises:
        RequestError: if the heads can't be divided.
    """

    config: ModelConfig
    schemes: Mapping[str, QuantScheme]
    devices: int

    def __post_init__(self) -> None:
        heads, shared = self.config.num_heads, self.config.num_kv_heads
        if self.devices < 1 or heads % self.devices or (shared % self.devices and self.devices % shared):
            raise RequestError(
                "attention heads can't be divided among the devices", found=f"{self.devices} devices",
                expected=f"a divisor of {heads} heads that divides {shared} KV heads or is a multiple of them",
            )  # fmt: skip

    @property
    def local(self) -> ModelConfig:
        """The architecture of what one device computes; vocabulary and feed-forward size are the whole ones."""
        config, devices = self.config, self.devices
        return replace(
            config, num_heads=config.num_heads // devices, num_kv_heads=max(1, config.num_kv_heads // devices)
        )

    def share(self, parameter: Parameter) -> Share:
        """What each device has of one tensor of the checkpoint."""
        child = parameter.module.rpartition(".")[2]
        size = self.config.head_dim
        if child == "q_proj":
            return self._even(0, self.config.num_heads * size)
        if child in ("k_proj", "v_proj"):
            shared = self.config.num_kv_heads
            count = max(1, shared // self.devices)
            starts = tuple(rank * shared // self.devices * size for rank in range(self.devices))
            return Share(0, starts, count * size)
        if child in ("embed_tokens", "lm_head"):
            return self._even(0, self.config.vocab_size)
        if child in ("gate_proj", "up_proj"):
            _, width = self._columns(parameter.module.replace(child, "down_proj"), self.config.intermediate_size)
            return self._even(0, width)
        if child in COLUMNS and parameter.name.endswith(".weight"):
            group, width = self._columns(parameter.module, parameter.shape[1])
            return replace(self._even(1, width), group=group)
        return Share(None)

    def leaves(self, parameter: Parameter, value: Tensor | QuantTensor, rank: int) -> list[Leaf]:
        """A tensor of the checkpoint as it lies on one device.

        A quantized weight becomes codes [G, O, I / G] less half their levels, ``scale`` [G, O] and, if it has
        them, ``zero`` [G, O] less the same. Works on the meta device as well.
        """
        share = self.share(parameter)
        if isinstance(value, Tensor):
            return [Leaf(parameter.name, _cut(value, share, share.axis, rank))]
        middle = value.scheme.levels // 2
        codes = _cut(value.codes, share, share.axis, rank).short() - middle
        parameters = {"scale": value.scale}
        if value.zero is not None:
            parameters["zero"] = (value.zero.short() - middle).char()
        for name, each in parameters.items():
            if share.axis == 0:
                parameters[name] = _cut(each, share, 0, rank)
            elif share.axis == 1 and value.scheme.group_size is not None:
                repeated = each.repeat_interleave(value.scheme.group_size // share.group, dim=1)
                parameters[name] = _cut(repeated, share, 1, rank, share.group)
        grouped = codes.char().view(codes.shape[0], parameters["scale"].shape[1], -1)
        return [
            Leaf(f"{parameter.module}.codes", grouped.transpose(0, 1), nibbles=value.scheme.bits == 4),
            *(Leaf(f"{parameter.module}.{name}", each.t()) for name, each in parameters.items()),
        ]

    def _even(self, axis: int, size: int) -> Share:
        count = -(-size // self.devices)
        return Share(axis, tuple(rank * count for rank in range(self.devices)), count)

    def _columns(self, module: str, columns: int) -> tuple[int, int]:
        """Group size and number of columns, zeros included, that can be divided among the devices.

        The largest group that divides the checkpoint's and takes little padding; a scale that is repeated
        changes nothing.
        """
        scheme = self.schemes.get(module)
        group = 1 if scheme is None or scheme.group_size is None else scheme.group_size
        for size in range(group, 0, -1):
            unit = size * self.devices
            width = -(-columns // unit) * unit
            if group % size == 0 and (width - columns <= columns * _MOST_PADDING or size == 1):
                break
        return size, width


def _cut(tensor: Tensor, share: Share, axis: int | None, rank: int, unit: int = 1) -> Tensor:
    """One device's part along an axis that counts in units of so many columns."""
    if axis is None:
        return tensor
    start, count = min(share.starts[rank] // unit, tensor.shape[axis]), share.count // unit
    kept = tensor.narrow(axis, start, min(count, tensor.shape[axis] - start))
    missing = count - kept.shape[axis]
    return F.pad(kept, (0, 0) * (kept.dim() - 1 - axis) + (0, missing)) if missing else kept
