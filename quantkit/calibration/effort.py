"""The amount of calibration: batches, the effort against drift, and the memory and disk that
activations need.

Without torch, so that the command line's help can show the defaults.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quantkit.architectures.config import ModelConfig, OpaqueTensor
from quantkit.architectures.topology import compute_sizes, input_groups, layer_kinds
from quantkit.tensors.scheme import QuantScheme, Scales

EffortName = Literal["quick", "default", "thorough"]
SAMPLES = 128
MIN_LENGTH = 128
MAX_LENGTH = 2048
"""Tokens of a sample by default, unless the model's context is shorter."""
SEED = 0
ACTIVATION_MEMORY = 4 * 10**9
"""Bytes of activations in memory, unless half of what is available is less."""

BATCH_TOKENS = 2048
# Elements of the feed-forward's inner states.
_BATCH_VALUES = 1 << 22
_MIN_FOLLOWED = 4  # batches
_MIN_TOKENS_PER_INPUT = 2  # of the widest linear; its drift is not known from fewer
FACTOR_ROWS = 2048
"""Outputs of linears whose gradients are multiplied with each other, at most."""
GRADIENTS = "gradients"
"""The name of the backward pass in reports of progress."""
# Of the size of a float, for each expert that a token is sent to: two indices of 64 bits for the
# experts' tokens, one of its number, and its share.
_CHOICE_ELEMENTS = 7
# The tokens of an expert that gets many, in units of the mean.
_BUSY_EXPERT = 2
STATE_BYTES = 2
"""Bytes of an element of a block's inputs, kept as bfloat16 for the backward pass."""


@dataclass(frozen=True)
class Effort:
    """How much calibration GPTQ does.

    Attributes:
        tokens_per_input: calibration tokens by default, in units of the inputs of the widest
            linear, over the share of all tokens that it gets; infinite for samples of `MAX_LENGTH`.
        stride: the float stream, which shows the drift of the quantized model, has every
            `stride`-th batch, but at least four.
        gradient_tokens: calibration tokens, at most, that go through a backward pass, which shows
            how errors of outputs add up; 0 for none.
    """

    tokens_per_input: float
    stride: int
    gradient_tokens: int = 0

    def length(self, config: ModelConfig) -> int:
        """Return the tokens of a sample by default: a power of two, or the model's context if that
        is shorter.
        """
        inputs = max(
            (group.columns / group.share for group, _ in every_group(config)),
            default=config.hidden_size,
        )
        wanted = self.tokens_per_input * inputs / SAMPLES
        if wanted > MAX_LENGTH:
            length = MAX_LENGTH
        else:
            length = max(MIN_LENGTH, 1 << math.ceil(math.log2(wanted)))
        return min(length, config.max_context)

    def for_samples(self, config: ModelConfig, shape: Sequence[int]) -> Effort:
        """Return the same, or half of it where samples of a shape [N, T] are too few to measure the
        drift.
        """
        few = math.prod(shape) < self.stride * _MIN_TOKENS_PER_INPUT * inner_width(config)
        if few and self.stride > 1:
            return replace(self, stride=2 * self.stride)
        return self

    def for_schemes(self, schemes: Iterable[QuantScheme]) -> Effort:
        """Return the same, or without the backward pass where none of the schemes uses it."""
        if any(map(uses_factor, schemes)):
            return self
        return replace(self, gradient_tokens=0)

    def gradient_samples(self, config: ModelConfig, shape: Sequence[int]) -> int:
        """Return how many of the samples, of a shape [N, T], go through the backward pass."""
        if not config.measurable:
            return 0
        samples, length = shape
        return min(samples, -(-self.gradient_tokens // length))

    def follows(self, index: int, batches: int) -> bool:
        """Return whether the float stream has a batch."""
        return index % self._stride(batches) == 0

    def count_float_batches(self, batches: int) -> int:
        """Return how many of all batches the float stream has."""
        return -(-batches // self._stride(batches))

    def _stride(self, batches: int) -> int:
        return max(1, min(self.stride, batches // _MIN_FOLLOWED))


EFFORTS: dict[EffortName, Effort] = {
    "quick": Effort(8, 4),
    "default": Effort(32, 4),
    "thorough": Effort(math.inf, 1, 32768),
}


def batch_samples(config: ModelConfig, length: int) -> int:
    """Return the number of samples of a length that go through the model together."""
    return max(1, min(BATCH_TOKENS, _BATCH_VALUES // inner_width(config)) // length)


@dataclass(frozen=True)
class GroupShape:
    """Linears of a block that share their inputs, as one linear with weights [rows, columns].
    `count` is their number, `writes` whether it ends a branch, or an expert; `share` is the share
    of all tokens that go through it, `factored` whether the gradients by its outputs are used.
    """

    branch: str
    count: int
    rows: int
    columns: int
    writes: bool
    share: float
    factored: bool

    @property
    def weights(self) -> int:
        return self.rows * self.columns


def groups_of(config: ModelConfig, layer: int) -> list[GroupShape]:
    """Return the groups of a block; of a model known by its tensors only, each linear by itself."""
    if config.tensors is not None:
        result: list[GroupShape] = []
        for tensor in config.tensors:
            if _is_solved(tensor, layer):
                result.append(_alone(tensor.module, tensor.shape, measurable=config.measurable))
        return result
    counts = compute_sizes(config)
    experts = config.experts
    groups: list[GroupShape] = []
    for group in input_groups(config, layer):
        groups.append(
            GroupShape(
                group.branch,
                len(group.linears),
                sum(counts[linear.dims[0]] for linear in group.linears),
                counts[group.linears[0].dims[1]],
                group.writes,
                1.0
                if experts is None or group.expert is None
                else experts.per_token / experts.count,
                # The tokens of experts are weighted by the router.
                group.expert is None,
            )
        )
    return groups


def _is_solved(tensor: OpaqueTensor, layer: int) -> bool:
    return tensor.role == "linear" and tensor.layer == layer


def _alone(module: str, shape: tuple[int, ...], *, measurable: bool) -> GroupShape:
    """Return a linear by itself; which share of the tokens an expert gets is not known, and taken
    as a quarter.
    """
    rows, columns = shape
    is_expert = "expert" in module
    return GroupShape(
        "mlp",
        1,
        rows,
        columns,
        writes=True,
        share=0.25 if is_expert else 1.0,
        factored=measurable and not is_expert,
    )


def every_group(config: ModelConfig) -> list[tuple[GroupShape, int]]:
    """Return the groups of all kinds of blocks, with the number of blocks that have them."""
    if config.tensors is not None:
        layers = range(config.num_layers)
        return list(
            Counter(group for layer in layers for group in groups_of(config, layer)).items()
        )
    result: list[tuple[GroupShape, int]] = []
    for layer, count in layer_kinds(config).items():
        for group in groups_of(config, layer):
            result.append((group, count))
    return result


def uses_factor(scheme: QuantScheme) -> bool:
    """Return whether rows of a scheme are solved with the gradients by their outputs."""
    return scheme.scales is Scales.FLOATS


def factor_bytes(config: ModelConfig) -> int:
    """Bytes of the products of gradients for all blocks."""
    return sum(
        count * 4 * group.rows**2 // -(-group.rows // FACTOR_ROWS)
        for group, count in every_group(config)
        if group.factored
    )


def gradient_activation_bytes(config: ModelConfig, shape: Sequence[int], effort: Effort) -> int:
    """Bytes of the inputs of all blocks, for samples of a shape [N, T], which the backward pass
    replaces by products of gradients; 0 without one.
    """
    tokens = effort.gradient_samples(config, shape) * shape[1]
    inputs = STATE_BYTES * config.num_layers * tokens * config.hidden_size
    if tokens:
        return max(inputs, factor_bytes(config))
    return 0


def inner_width(config: ModelConfig) -> int:
    """Return the largest width of a feed-forward's inner states at a time: in a mixture, of one
    expert.
    """
    columns = (
        group.columns for group, _ in every_group(config) if group.branch == "mlp" and group.writes
    )
    return max(columns, default=config.hidden_size)


def compute_float_share(config: ModelConfig, shape: Sequence[int], effort: Effort) -> float:
    """Return the share of batches, for samples of a shape [N, T], that the float stream has."""
    samples, length = shape
    batches = -(-samples // batch_samples(config, length))
    return effort.count_float_batches(batches) / batches


def activation_bytes(
    config: ModelConfig, shape: Sequence[int], effort: Effort, memory_bytes: int, gpu_bytes: int = 0
) -> tuple[int, int, int]:
    """Bytes in memory, on disk, and on a GPU, which is used first, for samples of a shape [N, T]:
    of both streams where all samples stop, and of the products of gradients, if there are some. On
    disk there may be more before that, of the backward pass.

    The figures are for one process with all samples. Several processes share the samples, each with
    this memory, so they write less to disk, unless their shares are so few batches that the float
    stream has more of them.
    """
    floats = compute_float_share(config, shape, effort)
    streams = 1 + floats
    hidden = config.hidden_size
    # What each token has in both streams where the samples stop.
    stopped: list[float] = [2 * streams * hidden]
    if config.tensors is not None:
        # Of models that transformers runs, the residual twice, its norm, and a linear's inputs.
        stopped.append(streams * (3 * hidden + inner_width(config)))
        layers: Iterable[int] = ()
    else:
        layers = layer_kinds(config)
    for layer in layers:
        for group in groups_of(config, layer):
            if group.share < 1:
                # The norm and the sum of the experts' outputs too, and the choice of experts.
                assert config.experts is not None
                choice = _CHOICE_ELEMENTS * config.experts.per_token
                # Some experts get more tokens than others.
                share = min(1, _BUSY_EXPERT * group.share)
                stopped.append(streams * (3 * hidden + share * group.columns + choice))
            elif group.writes:
                # The float stream reaches the last linear of a branch, and leaves it, before the
                # quantized one.
                stopped.append(streams * hidden + group.columns)
                stopped.append((1 + streams) * hidden + floats * group.columns)
    total = int(4 * math.prod(shape) * max(stopped))
    before = gradient_activation_bytes(config, shape, effort)
    if before:
        total += factor_bytes(config)
    on_gpu = min(total, gpu_bytes)
    held = min(total - on_gpu, memory_bytes)
    return held, max(total - on_gpu - held, before - memory_bytes), on_gpu
