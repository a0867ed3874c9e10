"""Estimates for blocks and their calibration from a model's shapes: memory, arithmetic and time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import layer_kinds
from quantkit.calibration.effort import (
    FACTOR_ROWS,
    Effort,
    batch_samples,
    compute_float_share,
    every_group,
    gradient_activation_bytes,
    groups_of,
    inner_width,
)
from quantkit.calibration.head_gradients import HEAD_TOKENS
from quantkit.calibration.hessian import ROWS_AT_ONCE
from quantkit.model.head_product import HEAD_WEIGHTS
from quantkit.solver.grid import refit_bytes, weights_at_once
from quantkit.tensors.dtypes import DType

_SOLVER_MATRICES = 10  # of the size of the solved rows, at a time
_REFIT_COPIES = 3  # of the least-squares systems that fit scales
_OF_BATCH = 6  # of the size of its widest states, at a time
_CPU = torch.device("cpu")
_FINEST = 32  # columns of a group
_GPU_SHARE = 0.85  # of a GPU's free memory; the rest is lost to fragmentation
# The share of the products of a symmetric sum that is computed.
_OF_ONE_SQUARE = 0.5625
_SOLVER_PRODUCTS = 3.6  # of a weight with a matrix of the size of its Hessian, where there is drift
_TWO_SIDED_PRODUCTS = 1.5  # of a weight with the products of gradients of its outputs
_BACKWARD_PASSES = (
    # Forward passes of the blocks that cost as much as the one forward and the one backward.
    4
)
_OF_BACKWARD = 12  # of the size of its widest states, at a time
# Copies: products, logits, their softmax, the gradients, and one under way.
_OF_HEAD_LOGITS = 5
# Through the linears that share an input.
_SECONDS_OF_BATCH = 0.001
_SECONDS_OF_COLUMN = 1e-4  # of a weight that GPTQ solves
_SECONDS_OF_GPU_COLUMN = 1e-5  # a guess, not measured


def gptq_bytes(
    config: ModelConfig, tokens: int, device: torch.device, *, two_sided: bool = False
) -> int:
    """Peak bytes of weights, sums and temporaries over the branches of a block, for batches of
    `tokens` tokens; `two_sided` is with the gradients of outputs, for which more rows are solved
    together.
    """
    groups = [group for group, _ in every_group(config)]
    batch = tokens * 6 * max(group.columns for group in groups if group.writes)
    passes = []
    held = 0
    for group in groups:
        held += 2 * group.weights
        if group.writes:
            passes.append(held + 2 * group.columns**2 + batch)
            held = 0
    solves = [2 * group.weights + 3 * group.columns**2 for group in groups]
    solver = _SOLVER_MATRICES * min(weights_at_once(device), max(group.weights for group in groups))
    if two_sided:
        for group in groups:
            rows = min(group.rows, FACTOR_ROWS)
            columns = group.columns
            if group.factored:
                solver = max(solver, _SOLVER_MATRICES * rows * columns + 4 * rows**2 + columns**2)
    # Where scales are fitted for as many rows as memory holds.
    if device.type == "cuda":
        finest = max(4 * group.weights * (group.columns // _FINEST**2 + 3) for group in groups)
        solver += _REFIT_COPIES * min(refit_bytes(device), finest) // 4
    return 4 * max(*passes, max(solves) + solver)


def lockstep_bytes(config: ModelConfig, tokens: int, device: torch.device = _CPU) -> int:
    """Peak bytes of weights, sums and temporaries where transformers runs the blocks, for batches
    of `tokens` tokens: a block's floats, the block as it is quantized, and what one of its linears
    is solved with.
    """
    solved = [0]
    for group, _ in every_group(config):
        sums = 3 * group.columns**2 + 3 * ROWS_AT_ONCE * group.columns
        solved.append(
            sums + group.weights + _SOLVER_MATRICES * min(weights_at_once(device), group.weights)
        )
    return 4 * (2 * largest_block(config) + max(solved) + _OF_BATCH * tokens * inner_width(config))


def gpu_activation_bytes(config: ModelConfig, shape: Sequence[int], device: torch.device) -> int:
    """Bytes of activations of samples of a shape [N, T] that fit on a GPU in addition to GPTQ; 0
    on a CPU.
    """
    if device.type != "cuda":
        return 0
    free = torch.cuda.mem_get_info(device)[0]
    tokens = batch_samples(config, shape[1]) * shape[1]
    if config.run_by is not None:
        required = lockstep_bytes(config, tokens, device)
    else:
        required = gptq_bytes(config, tokens, device)
    return max(0, int(_GPU_SHARE * free) - required)


def largest_block(config: ModelConfig) -> int:
    """Parameters of the linears in the largest block."""
    layers = layer_kinds(config) if config.tensors is None else range(config.num_layers)
    return max(sum(group.weights for group in groups_of(config, layer)) for layer in layers)


def forward_flops(config: ModelConfig, tokens: int) -> int:
    """Count the operations of a pass through blocks and head."""
    return block_flops(config, tokens) + 2 * tokens * config.vocab_size * config.hidden_size


def block_flops(config: ModelConfig, tokens: int) -> int:
    """Count the operations of a pass through the blocks alone."""
    active = sum(count * group.share * group.weights for group, count in every_group(config))
    return tokens * int(2 * active)


def calibration_seconds(
    config: ModelConfig, shape: Sequence[int], effort: Effort, device: torch.device
) -> float:
    """Seconds of calibration on a device in addition to arithmetic, for samples of a shape [N,
    T].
    """
    samples, length = shape
    batches = -(-samples // batch_samples(config, length)) * (
        1 + compute_float_share(config, shape, effort)
    )
    groups = every_group(config)
    columns = sum(count * group.columns for group, count in groups)
    if device.type == "cuda":
        each = _SECONDS_OF_GPU_COLUMN
    else:
        each = _SECONDS_OF_COLUMN
    return columns * each + sum(count for _, count in groups) * batches * _SECONDS_OF_BATCH


def calibration_flops(config: ModelConfig, shape: Sequence[int], effort: Effort) -> int:
    """Operations of samples of a shape [N, T] in the blocks, which may be in bfloat16."""
    followed = compute_float_share(config, shape, effort)
    total = 0.0
    for group, count in every_group(config):
        # An expert is run for its sums, and for its output.
        passes = 1 + (group.share < 1)
        total += (
            count * passes * 2 * group.share * math.prod(shape) * (1 + followed) * group.weights
        )
    return int(total)


def gradient_bytes(
    config: ModelConfig, shape: Sequence[int], effort: Effort, memory_bytes: int
) -> int:
    """Peak bytes of the backward pass: a block's weights and states, and in `memory_bytes` at most
    the inputs of all blocks and the products of gradients.
    """
    samples = effort.gradient_samples(config, shape)
    length = shape[1]
    kept = min(memory_bytes, gradient_activation_bytes(config, shape, effort))
    if samples:
        return kept + backward_bytes(config, samples, length)
    return 0


def backward_bytes(config: ModelConfig, samples: int, length: int) -> int:
    """Peak bytes of a backward pass without the inputs that it keeps: the states of all samples,
    and either a block with what one batch keeps for its gradients, or the head with the logits of a
    few tokens.
    """
    batch = _OF_BACKWARD * batch_samples(config, length) * length * inner_width(config)
    in_block = 4 * (largest_block(config) + batch)
    head_weights = config.vocab_size * config.hidden_size
    logits = _OF_HEAD_LOGITS * HEAD_TOKENS * config.vocab_size
    in_head = DType(config.dtype).itemsize * head_weights + 4 * (
        min(HEAD_WEIGHTS, head_weights) + logits
    )
    return max(in_block, in_head) + 4 * samples * length * config.hidden_size


def gradient_flops(config: ModelConfig, shape: Sequence[int], effort: Effort) -> int:
    """Count the operations of the blocks in the pass that measures how errors of outputs add up,
    always in float32.
    """
    tokens = effort.gradient_samples(config, shape) * shape[1]
    groups = [(group.rows, count) for group, count in every_group(config) if group.factored]
    squares = sum(count * rows * min(rows, FACTOR_ROWS) for rows, count in groups)
    return _BACKWARD_PASSES * block_flops(config, tokens) + int(
        2 * tokens * _OF_ONE_SQUARE * squares
    )


def solving_flops(config: ModelConfig, shape: Sequence[int], effort: Effort) -> int:
    """Operations of the sums over samples of a shape [N, T] and of the solver, always in
    float32.
    """
    tokens = math.prod(shape)
    followed = compute_float_share(config, shape, effort)
    total = 0.0
    for group, count in every_group(config):
        own = group.share * tokens
        summed = own if own >= group.columns else tokens
        squares = 2 * summed * (_OF_ONE_SQUARE + followed) * group.columns**2
        solving = _SOLVER_PRODUCTS * 2 * group.weights * group.columns + 4 * group.columns**3
        if group.factored and effort.gradient_samples(config, shape):
            solving += _TWO_SIDED_PRODUCTS * 2 * group.weights * min(group.rows, FACTOR_ROWS)
        total += count * (squares + solving)
    return int(total)
