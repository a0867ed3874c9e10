"""What the choice of schemes costs in time and memory, and how many samples it uses."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.architectures.config import ModelConfig
from quantkit.calibration.effort import every_group, inner_width
from quantkit.calibration.estimate import backward_bytes, block_flops, largest_block

CHOICE = "choose schemes"
"""The name of the phase in reports of progress."""
_GRADIENT_TOKENS = 8192
# For the Hessian of the widest linear, which has no full rank with fewer tokens than inputs.
_TOKENS_PER_INPUT = 2
# An element of a block's inputs is kept as bfloat16.
_STATE_BYTES = 2
# Tensors as wide as the inner states that a sample keeps where it waits for the others.
_WAITING_WIDTHS = 4
# Forward passes of the blocks that cost as much as that of the gradients and the backward pass,
# which computes the blocks again.
_GRADIENT_PASSES = 4
# Copies of a Hessian while it is factored.
_FACTOR_COPIES = 3
# Products of a Hessian with itself that take as long as its Cholesky factor.
_FACTOR_PRODUCTS = 2


def sample_counts(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> tuple[int, int]:
    """Count the samples of a shape [N, T] that are used for the Hessians, and those that are used
    for the gradients; `memory_bytes` are for their activations.
    """
    count, length = shape
    # Samples wait within the blocks, all in memory.
    waiting_bytes = _WAITING_WIDTHS * inner_width(config) * length * 4
    widest = max(group.columns for group, _ in every_group(config))
    hessian_tokens = max(_GRADIENT_TOKENS, _TOKENS_PER_INPUT * widest)
    for_hessians = min(-(-hessian_tokens // length), max(1, memory_bytes // waiting_bytes))
    # The backward pass needs the inputs of all blocks at once.
    sample_bytes = config.num_layers * length * config.hidden_size * _STATE_BYTES
    for_gradients = min(-(-_GRADIENT_TOKENS // length), max(1, memory_bytes // sample_bytes))
    return min(count, for_hessians), min(count, for_gradients)


def choice_bytes(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Estimate the peak memory: of the samples that wait for each other, with a block's weights and
    a Hessian that is factored; or of the backward pass with the inputs of the blocks.
    """
    for_hessians, for_gradients = sample_counts(config, shape, memory_bytes)
    length = shape[1]
    widest = max(group.columns for group, _ in every_group(config))
    waiting = for_hessians * _WAITING_WIDTHS * inner_width(config) * length
    # All of them are float32.
    forward = 4 * (largest_block(config) + (1 + _FACTOR_COPIES) * widest**2 + waiting)
    block_inputs = _STATE_BYTES * config.num_layers * for_gradients * length * config.hidden_size
    return max(forward, block_inputs + backward_bytes(config, for_gradients, length))


def choice_flops(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Count the operations in the blocks: of the forward pass with the Hessians, which are
    factored, and of the backward pass.
    """
    hessian_samples, gradient_samples = sample_counts(config, shape, memory_bytes)
    hessian_tokens = hessian_samples * shape[1]
    gradient_tokens = gradient_samples * shape[1]
    hessians = 0.0
    for group, count in every_group(config):
        # An expert gets only its share of the tokens.
        summed = 2 * hessian_tokens * group.share * group.columns**2
        factored = _FACTOR_PRODUCTS * group.columns**3
        hessians += count * (summed + factored)
    forward = block_flops(config, hessian_tokens)
    backward = _GRADIENT_PASSES * block_flops(config, gradient_tokens)
    return int(forward + backward + hessians)
