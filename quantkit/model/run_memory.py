"""State what a model takes to run, from the shapes of its tensors: the weights as they will lie in
memory, and the keys and values of each token. Without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.base.memory import size_text
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.kernels.cpu_layout import count_packed_bytes
from quantkit.tensors.dtypes import DType
from quantkit.tensors.spec import TensorSpec


@dataclass(frozen=True)
class RunMemory:
    """What a model takes to run, besides the program and its libraries.

    Attributes:
        weight_bytes: of all weights, as kernels hold them.
        cache_bytes_per_token: keys and values of a token of one sequence; 0 if none are kept.
        state_bytes: the states of one sequence, whatever its length, in layers without attention.
    """

    weight_bytes: int
    cache_bytes_per_token: int
    state_bytes: int = 0

    def count_cache_bytes(self, length: int, slots: int = 1) -> int:
        """Count the bytes of keys, values and states of `slots` sequences of `length` tokens."""
        return slots * (length * self.cache_bytes_per_token + self.state_bytes)

    def text(self, length: int, slots: int = 1) -> str:
        """Write it for people, with the whole cache of `slots` sequences of `length` tokens."""
        weights = f"{size_text(self.weight_bytes)} of weights"
        if not self.cache_bytes_per_token:
            return f"{weights}, and no keys and values"
        cache = size_text(self.count_cache_bytes(length, slots))
        sequences = f"{slots} x {length}" if slots > 1 else str(length)
        text = f"{weights}, and {size_text(self.cache_bytes_per_token)} of keys and values for each"
        if self.state_bytes:
            text += f" token and {size_text(self.state_bytes)} of states for each"
        else:
            text += " token of a"
        return f"{text} sequence, {cache} for {sequences}"

    def require_fit(self, free: int, path: Path | None, *, length: int = 0, slots: int = 1) -> None:
        """Raise a `RequestError` if the weights, with the cache of `slots` sequences of `length`
        tokens, exceed `free` bytes of memory.

        Systems grant more memory than they have, and kill the process that uses it.
        """
        cache = self.count_cache_bytes(length, slots)
        if self.weight_bytes + cache <= free:
            return
        found = f"{size_text(self.weight_bytes)} of weights"
        hint = "use a model with fewer bits per weight"
        if cache:
            found += f", {size_text(cache)} of keys and values"
            if self.weight_bytes <= free:
                hint = "use fewer tokens or sequences at a time"
        raise RequestError(
            "does not fit in memory",
            path=path,
            found=found,
            expected=f"at most {size_text(free)}",
            hint=hint,
        )


NOT_RUN = RunMemory(0, 0)
"""Of a model that nothing here runs."""


def count_weight_bytes(
    specs: Iterable[TensorSpec],
    floats_as: DType | None = None,
    count_codes: Callable[[TensorSpec], int] = count_packed_bytes,
) -> int:
    """Count the bytes of weights as they will lie in memory.

    Args:
        specs: of the tensors as a model is loaded: with a scheme only if it runs their codes.
        floats_as: the dtype of all others; None is that of each.
        count_codes: returns the bytes of a weight of codes; by default those of the CPU kernels.
    """
    total = 0
    for spec in specs:
        if spec.scheme is None:
            total += math.prod(spec.shape) * (floats_as or spec.dtype).itemsize
        else:
            total += count_codes(spec)
    return total


def count_cache_bytes_per_token(config: ModelConfig, dtype: DType) -> int:
    """Count the bytes of the keys and values of a token of one sequence, in all layers with
    attention.
    """
    total = 0
    for layer in config.caching_layers:
        row_bytes = config.head_dim_of(layer) * dtype.itemsize
        if dtype is DType.INT8:
            # The scale of a row.
            row_bytes += DType.FLOAT32.itemsize
        # Keys and values.
        total += 2 * config.kv_heads_of(layer) * row_bytes
    return total


def count_state_bytes(config: ModelConfig) -> int:
    """Count the bytes of the states of one sequence, in all layers without attention."""
    count = 0
    for layer in range(config.num_layers):
        count += sum(map(math.prod, config.state_shapes(layer)))
    return count * DType.FLOAT32.itemsize


def measure_by_transformers(checkpoint: Checkpoint) -> RunMemory:
    """State what a model takes that transformers runs: all weights in float32, and no cache, since
    each token reads the whole text again.
    """
    return RunMemory(DType.FLOAT32.itemsize * parameter_count(checkpoint), 0)
