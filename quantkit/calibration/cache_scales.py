"""The scales of a quantized key/value cache: the largest key and value of each layer on samples,
over float8's largest.

GPTQ sees them while its samples pass through the blocks as quantized; a rounded model is run on a
small sample first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.kv_scales import NO_SCALE, scale_names
from quantkit.model.cache_rounding import CacheMaxima
from quantkit.model.layerwise import Batch, layerwise_hidden
from quantkit.quality.bounds import window_length
from quantkit.tensors.dtypes import DType
from quantkit.tensors.float8 import E4M3_MAX
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

CACHE_SCALES = "scales of the KV cache"
"""The name of the phase in reports of progress."""

_SAMPLES = 8
_LENGTH = 256


def scale_tokens(source: Checkpoint) -> tuple[int, int]:
    """Return the samples that a rounded model is run on, and the tokens of each."""
    return _SAMPLES, min(_LENGTH, window_length(source))


def scales_of(layer: int, largest: Tensor, dtype: DType, path: Path) -> dict[str, Tensor]:
    """Return the scales [1] of a layer by name, for its largest key and value, [2]; 1 where all are
    zero.

    Args:
        dtype: of the scales; none is below its smallest normal number.
        path: of the model, for the error.

    Raises:
        NonFiniteError: for keys or values that are NaN or Inf, or too large for scales of the type.
    """
    result = {}
    limits = torch.finfo(dtype.torch)
    for name, what, value in zip(
        scale_names(layer), ("keys", "values"), largest.tolist(), strict=True
    ):
        if not value / E4M3_MAX <= limits.max:
            problem = f"{what} of layer {layer} are NaN, Inf or too large for a scale in {dtype}"
            raise NonFiniteError(
                problem, path=path, hint=Message("leave ", Option("kv_cache"), " out")
            )
        if value > 0:
            scale = max(value / E4M3_MAX, limits.tiny)
        else:
            scale = NO_SCALE
        result[name] = torch.tensor([scale], dtype=dtype.torch)
    return result


def scales_on_sample(
    source: Checkpoint,
    specs: Mapping[str, TensorSpec],
    rounded: Callable[[TensorSpec], Weight],
    tokens: Tensor,
    progress: Progress = silent,
) -> dict[str, Tensor]:
    """Return the scales of all layers by name, for samples [B, T] that pass through a rounded
    model.

    Args:
        specs: the tensors of the result, by name; its scales have the type that is stated for them.
        rounded: makes one of the other tensors.

    Raises:
        NonFiniteError: see `scales_of`.
    """
    maxima = [CacheMaxima("cpu") for _ in source.config.layers]
    layerwise_hidden(
        _Rounded(source, specs, rounded),
        [Batch.from_start(tokens)],
        maxima=maxima,
        progress=progress,
    )
    result: dict[str, Tensor] = {}
    for layer, one in enumerate(maxima):
        result |= scales_of(layer, one.largest, specs[scale_names(layer)[0]].dtype, source.path)
    return result


class _Rounded(CheckpointView):
    """A model of floats as the result will have it: each tensor is made when it is loaded."""

    def __init__(
        self,
        source: Checkpoint,
        specs: Mapping[str, TensorSpec],
        rounded: Callable[[TensorSpec], Weight],
    ) -> None:
        super().__init__(source)
        self._specs = specs
        self._make = rounded

    def info(self, name: str) -> TensorSpec:
        return self._specs[name]

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        value = self._make(self._specs[name])
        if part is None:
            return value
        return part.of_weight(value)
