"""What a choice of schemes takes: samples, memory and arithmetic, from a model's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import layer_kinds
from quantkit.calibration.estimate import every_group, forward_flops, groups_of, largest_block

_GRADIENT_TOKENS = 8192
_TOKENS_A_COLUMN = 2
"""Tokens for the Hessian of the widest linear, for each of its inputs."""
_STATE_BYTES = 2  # of a number that a block was given, kept as bfloat16
_GRADIENT_PASSES = 3  # forward passes that the way back is worth: blocks computed anew, their gradients, the head's


def sample_counts(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> tuple[int, int]:
    """How many samples of a shape [N, T] serve for the Hessians, and how many of these for the gradients.

    Args:
        memory_bytes: for what the blocks were given.
    """
    count, length = shape
    widest = max(group.columns for group, _ in every_group(config))
    kept = memory_bytes // (config.num_layers * length * config.hidden_size * _STATE_BYTES)
    for_gradients = min(count, max(1, min(kept, -(-_GRADIENT_TOKENS // length))))
    for_hessians = min(count, -(-max(_GRADIENT_TOKENS, _TOKENS_A_COLUMN * widest) // length))
    return max(for_hessians, for_gradients), for_gradients


def choice_bytes(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Peak of a block's weights, its Hessians, the samples' states and what the blocks were given."""
    for_hessians, for_gradients = (count * shape[1] for count in sample_counts(config, shape, memory_bytes))
    hessians = max(sum(group.columns**2 for group in groups_of(config, layer)) for layer in layer_kinds(config))
    states = 4 * for_hessians + _STATE_BYTES * config.num_layers * for_gradients
    return 4 * (largest_block(config) + hessians) + states * config.hidden_size


def choice_flops(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Of the pass forward with the Hessians, and of the way back."""
    for_hessians, for_gradients = (count * shape[1] for count in sample_counts(config, shape, memory_bytes))
    squares = sum(count * 2 * for_hessians * group.share * group.columns**2 for group, count in every_group(config))
    forward = forward_flops(config, for_hessians) + _GRADIENT_PASSES * forward_flops(config, for_gradients)
    return int(forward + squares)
