"""How fast this machine does the work of a job, measured in a fraction of a second on numbers of
the model's shapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.base.late import LateFunction
from quantkit.calibration.data import is_self
from quantkit.calibration.effort import every_group, inner_width
from quantkit.calibration.estimate import block_flops, forward_flops
from quantkit.calibration.head_gradients import HEAD_TOKENS, differentiate_head
from quantkit.calibration.packaged import estimate_tried_tokens
from quantkit.calibration.settings import GptqSettings
from quantkit.model.column_kernels import select_column_kernels
from quantkit.model.head_product import compute_head_logits
from quantkit.model.layerwise import TOKENS_THROUGH_A_BLOCK
from quantkit.quality.measures import TOKENS_THROUGH_THE_HEAD, Tally, tokens_per_head_pass
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.products import bfloat16_linear, compute_dtype, times
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import QuantScheme

if TYPE_CHECKING:
    from quantkit.calibration.self_text import count_rows_together
else:
    count_rows_together = LateFunction("quantkit.calibration.self_text:count_rows_together")

_FEWEST_RUNS = 3
_MEASURED_SECONDS = 0.1
# Weights of the matrix that is rounded to measure.
_WEIGHTS = 1 << 19
# Of the head whose gradients are computed.
_HEAD_WEIGHTS = 1 << 23
_ROWS_ON_GPU = 4096
# Of a model known by its tensors only.
_WIDTH = 1024
# Of matrices that are multiplied: a measurement is to take a fraction of a second.
_MAX_WIDTH = 2048
_CPU = torch.device("cpu")
# Measured on small models, in one pass: to load and set up a linear.
_SECONDS_OF_LINEAR = 0.0015
# Measured as well: to read and convert a weight.
_SECONDS_OF_WEIGHT = 1.5e-9
# To read a weight that is in memory already, as small products do; and for each of these, the rest
# of a layer counted in.
_SECONDS_OF_WEIGHT_IN_MEMORY = 5e-10
_SECONDS_OF_SMALL_LINEAR = 5e-5
_SECONDS_OF_WEIGHT_ON_GPU = 1e-12
_SECONDS_OF_LINEAR_ON_GPU = 4e-5
# For each element of a token's hidden state in a layer: norms, RoPE, attention, additions.
_SECONDS_OF_STATE = 3e-8
# A few pieces of each kind of text, and all pieces of doubtful kinds.
_TRYING_PASSES = 2
# Bytes a second through reading, hashing and writing; not measured here.
_GUESSED_DISK_RATE = 1.5e9
# Opened, hashed, synced and read back.
_SECONDS_OF_FILES = 0.12


class Speed:
    """The seconds that parts of a job take for a model on this machine while it does nothing
    else.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def products(
        self, flops: float, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
    ) -> float:
        """Estimate the time of operations in matrix products."""
        inputs = min(_MAX_WIDTH, self.config.hidden_size)
        outputs = min(_MAX_WIDTH, inner_width(self.config))
        return flops * _seconds_of_operation(inputs, outputs, dtype, device)

    def forward(self, tokens: int, *, models: int = 1, passes: int = 1) -> float:
        """Estimate the time of a number of tokens through models on disk, up to their logits, in a
        number of passes.
        """
        return models * (self.blocks(tokens, passes=passes) + self.head(tokens, passes=passes))

    def blocks(self, tokens: int, *, passes: int = 1) -> float:
        """Estimate the time of tokens through the blocks of a model on disk."""
        config = self.config
        states = tokens * config.num_layers * config.hidden_size * _SECONDS_OF_STATE
        weights = sum(count * group.weights for group, count in every_group(config))
        loaded = self.linears * _SECONDS_OF_LINEAR + weights * _SECONDS_OF_WEIGHT
        return self.products(block_flops(config, tokens)) + states + passes * loaded

    def head(self, tokens: int, *, passes: int = 1) -> float:
        """Estimate the time of the logits of tokens, from their hidden states."""
        config = self.config
        elements = config.vocab_size * config.hidden_size
        logits = tokens * config.vocab_size * _seconds_of_logit(config.vocab_size)
        # The head is read again for each part of the tokens, because the logits of all of them
        # would not fit into memory.
        parts = max(1, tokens // tokens_per_head_pass(config.vocab_size))
        loaded = passes * parts * elements * _SECONDS_OF_WEIGHT
        return self.products(2 * tokens * elements) + logits + loaded

    def writing_rows(self, tokens: int, rows: int, device: torch.device) -> float:
        """Estimate the time in which a model in memory writes a number of tokens, in rows that are
        written together.
        """
        config = self.config
        if device.type == "cuda":
            read = _SECONDS_OF_WEIGHT_ON_GPU
            launched = _SECONDS_OF_LINEAR_ON_GPU
        else:
            read = _SECONDS_OF_WEIGHT_IN_MEMORY
            launched = _SECONDS_OF_SMALL_LINEAR
        weights = sum(count * group.weights for group, count in every_group(config))
        weights += config.vocab_size * config.hidden_size
        steps = -(-tokens // rows)
        products = self.products(forward_flops(config, tokens), compute_dtype(device), device)
        drawn = tokens * config.vocab_size * _seconds_of_logit(config.vocab_size)
        if device.type == "cuda":
            drawn = 0.0
        return products + drawn + steps * (weights * read + self.linears * launched)

    def head_gradients(self, tokens: int) -> float:
        """Estimate the time of the gradients of tokens that are drawn from the model, by the
        inputs of its head.
        """
        return tokens * self.config.vocab_size * _seconds_of_head_gradient(self.config)

    def rounding(self, schemes: Mapping[QuantScheme, int], *, searched: bool) -> float:
        """Estimate the time to round numbers of weights, by scheme; below 8 bits on scales that are
        searched or span groups.
        """
        width = self.config.hidden_size or _WIDTH
        seconds = 0.0
        for scheme, count in schemes.items():
            is_searched = searched and scheme.bits < 8
            seconds += count * _seconds_of_rounding(scheme, width, searched=is_searched)
        return seconds

    def writing(self, size: int, source: int) -> float:
        """Estimate the time to hash files of a source and write those of an output, of these sizes
        in bytes.
        """
        # The output is written and hashed.
        return _SECONDS_OF_FILES + (source + 2 * size) / _GUESSED_DISK_RATE

    def reading(self, size: int) -> float:
        """Estimate the time to read files again, of this size in bytes."""
        return size / _GUESSED_DISK_RATE

    @cached_property
    def linears(self) -> int:
        """Count the linears in the decoder."""
        return sum(count * group.count for group, count in every_group(self.config))


def estimate_draw(settings: GptqSettings, speed: Speed) -> float:
    """Estimate the seconds in which a model chooses or writes calibration samples; 0 for the user's
    own text, which is used as it is.
    """
    samples = settings.samples
    length = settings.length
    if is_self(settings.text):
        rows = count_rows_together(speed.config, length, settings.device)
        return speed.writing_rows(samples * length, min(rows, samples), settings.device)
    if settings.text is not None:
        return 0.0
    tried = estimate_tried_tokens(samples, length)
    return speed.forward(tried, passes=_TRYING_PASSES)


@cache
def _seconds_of_logit(vocab_size: int) -> float:
    """Measure a softmax over one logit, and its use."""
    p, q = torch.randn(2, TOKENS_THROUGH_THE_HEAD, vocab_size)
    targets = torch.zeros(len(p), dtype=torch.long)
    seconds: float = _shortest(lambda: Tally().add(p, q, targets)) / (2 * p.numel())
    return seconds


@cache
def _seconds_of_head_gradient(config: ModelConfig) -> float:
    """Measure the gradient of one token by one row of the head."""
    rows = min(config.vocab_size, max(1, _HEAD_WEIGHTS // config.hidden_size))
    # Logits of about the size of a model's: larger ones give probabilities that are denormal, on
    # which CPUs are slow.
    head = (torch.randn(rows, config.hidden_size) * config.hidden_size**-0.5).bfloat16()
    states = torch.randn(1, HEAD_TOKENS, config.hidden_size)

    def compute_logits(states: Tensor) -> Tensor:
        return compute_head_logits(states, head, config)

    def differentiate() -> None:
        differentiate_head(states, compute_logits, first_sample=0, advance=lambda tokens: None)

    return _shortest(differentiate) / (HEAD_TOKENS * rows)


@cache
def _seconds_of_rounding(scheme: QuantScheme, width: int, *, searched: bool) -> float:
    """Measure the rounding of one weight of a matrix as wide as the model."""
    if scheme.group_size:
        columns = scheme.unit
    else:
        columns = min(width, _WEIGHTS)
    # The number of groups in a row changes the time, so rows are about as wide as the model.
    columns *= max(1, width // columns)
    weight = torch.randn(max(1, _WEIGHTS // columns), columns, dtype=torch.bfloat16)
    if searched:
        seconds = _shortest(
            lambda: round_to_nearest(weight, scheme, weight.dtype, select_column_kernels)
        )
    else:
        seconds = _shortest(lambda: quantize_rtn(weight, scheme, weight.dtype))
    return seconds / weight.numel()


@cache
def _seconds_of_operation(
    inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Measure one of the operations of a matrix product of these widths."""
    if device.type == "cpu":
        rows = TOKENS_THROUGH_A_BLOCK
    else:
        rows = _ROWS_ON_GPU
    a = torch.randn(rows, inputs, device=device)
    weight = torch.randn(outputs, inputs, device=device)
    narrow = weight.bfloat16()

    def multiply() -> None:
        if dtype == torch.bfloat16:
            product = bfloat16_linear(a, narrow)
        else:
            product = times(a, weight.t())
        # Waits for the GPU, which computes in the background.
        product[0, 0].item()

    return _shortest(multiply) / (2 * rows * inputs * outputs)


def _shortest(work: Callable[[], object]) -> float:
    """Measure the seconds of the fastest of some runs: other work on the machine only adds time."""
    best = math.inf
    began = time.perf_counter()
    runs = 0
    while runs < _FEWEST_RUNS or time.perf_counter() - began < _MEASURED_SECONDS:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
        runs += 1
    return best
