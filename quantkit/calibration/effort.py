"""How much calibration does: batches, what is done about drift, and the memory and disk that activations take.

Without torch, so that the command line's help can tell the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import input_groups, layer_kinds, sizes

SAMPLES = 128
MAX_LENGTH = 2048
"""Tokens of a sample by default: the model's context, but no more than this."""
SEED = 0
ACTIVATION_MEMORY = 4 * 10**9
"""Bytes of activations in memory."""

_BATCH_TOKENS = 2048
_BATCH_VALUES = 1 << 22  # of the feed-forward's inner states
_MIN_FOLLOWED = 4  # batches
_TELLING = 2  # tokens for each input of the widest linear; fewer tell little of its drift


@dataclass(frozen=True)
class Effort:
    """How much is done about the drift between the quantized model and the float one.

    Attributes:
        stride: the float stream takes every so many batches, though never fewer than four.
    """

    stride: int

    def for_samples(self, config: ModelConfig, shape: Sequence[int]) -> Effort:
        """The same, or half of it where samples of a shape [N, T] are too few to tell much of drift."""
        few = math.prod(shape) < self.stride * _TELLING * inner_width(config)
        return Effort(2 * self.stride) if few and self.stride > 1 else self

    def follows(self, index: int, batches: int) -> bool:
        """Whether the float stream takes a batch."""
        return index % self._stride(batches) == 0

    def followed(self, batches: int) -> int:
        """How many of so many batches the float stream takes."""
        return -(-batches // self._stride(batches))

    def _stride(self, batches: int) -> int:
        return max(1, min(self.stride, batches // _MIN_FOLLOWED))


STANDARD = Effort(4)
THOROUGH = Effort(1)


def batch_samples(config: ModelConfig, length: int) -> int:
    """How many samples of a length go through the model together."""
    return max(1, min(_BATCH_TOKENS, _BATCH_VALUES // inner_width(config)) // length)


def inner_width(config: ModelConfig) -> int:
    """Of a feed-forward's inner states, the widest there are at once: of a mixture those of one expert."""
    counts = sizes(config)
    groups = [group for layer in layer_kinds(config) for group in input_groups(config, layer)]
    return max(counts[group.linears[0].dims[1]] for group in groups if group.branch == "mlp" and group.writes)


def followed_share(config: ModelConfig, shape: Sequence[int], effort: Effort) -> float:
    """The share of the batches of samples of a shape [N, T] that the float stream takes."""
    samples, length = shape
    batches = -(-samples // batch_samples(config, length))
    return effort.followed(batches) / batches


def activation_bytes(
    config: ModelConfig, shape: Sequence[int], effort: Effort, memory_bytes: int, gpu_bytes: int = 0
) -> tuple[int, int, int]:
    """What the streams, and what is kept between two passes, take up for samples of a shape [N, T]: the inputs of a
    branch's last linear, or what experts have given to each stream so far.

    It is that of one process with all samples. Several share them and have the memory each, so they put less
    on the disk, unless their shares are so few batches that they follow more of them.

    Returns:
        Bytes in memory, where there is room for so many, bytes on disk, and bytes on a card, which come before both.
    """
    counts, streams = sizes(config), 1 + followed_share(config, shape, effort)
    between = 0.0
    for layer in layer_kinds(config):
        groups = [group for group in input_groups(config, layer) if group.writes]
        if config.layers[layer].experts:
            groups = [group for group in groups if group.branch != "mlp"]
            between = max(between, streams * config.hidden_size)
        between = max(between, *(counts[group.linears[0].dims[1]] for group in groups))
    total = int(4 * math.prod(shape) * (streams * config.hidden_size + between))
    on_gpu = min(total, gpu_bytes)
    held = min(total - on_gpu, memory_bytes)
    return held, total - on_gpu - held, on_gpu
