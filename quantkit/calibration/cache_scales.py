"""The scales of a quantized key/value cache: the largest key and value of each layer on samples,
over float8's largest.

GPTQ sees them while its samples pass through the blocks as quantized; a rounded model is run on a
small sample first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.errors import NonFiniteError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.kv_scales import NO_SCALE, attention_name, scale_names
from quantkit.model.cache_rounding import CacheMaxima
from quantkit.model.layerwise import Batch, layerwise_hidden
from quantkit.quality.bounds import window_length
from quantkit.tensors.dtypes import DType
from quantkit.tensors.float8 import E4M3_MAX
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.via_transformers.forward import passage_of

# Only a quantized cache needs it.
if TYPE_CHECKING:
    from quantkit.passes import cache_recorder
else:
    cache_recorder = LateModule("quantkit.passes.cache_recorder")

CACHE_SCALES = "scales of the KV cache"
"""The name of the phase in reports of progress."""

_SAMPLES = 8
_LENGTH = 256


def scale_tokens(source: Checkpoint) -> tuple[int, int]:
    """Return the samples that a rounded model is run on, and the tokens of each."""
    return _SAMPLES, min(_LENGTH, window_length(source))


def scales_of(attention: str, largest: Tensor, dtype: DType, path: Path) -> dict[str, Tensor]:
    """Return the scales [1] of an attention module on disk by name, for its largest key and value,
    [2]; 1 where all are zero.

    Args:
        dtype: of the scales; none is below its smallest normal number.
        path: of the model, for the error.

    Raises:
        NonFiniteError: for keys or values that are NaN or Inf, or too large for scales of the type.
    """
    result = {}
    limits = torch.finfo(dtype.torch)
    for name, what, value in zip(
        scale_names(attention), ("keys", "values"), largest.tolist(), strict=True
    ):
        if not value / E4M3_MAX <= limits.max:
            problem = f"{what} of '{attention}' are NaN, Inf or too large for a scale in {dtype}"
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
    """Return the scales of all attention modules by name, for samples [B, T] that pass through a
    rounded model.

    Args:
        specs: the tensors of the result, by name; its scales have the type that is stated for them.
        rounded: makes one of the other tensors.

    Raises:
        NonFiniteError: see `scales_of`.
        UnsupportedError: if transformers fails, or no sample reaches an attention.
    """
    largest = _measure_largest(_Rounded(source, specs, rounded), tokens, progress)
    result: dict[str, Tensor] = {}
    for attention, maxima in largest.items():
        dtype = specs[scale_names(attention)[0]].dtype
        result |= scales_of(attention, maxima, dtype, source.path)
    return result


def _measure_largest(
    checkpoint: Checkpoint, tokens: Tensor, progress: Progress
) -> dict[str, Tensor]:
    """Measure the largest key and value, [2], of each attention module on disk that caches some, on
    samples [B, T].
    """
    if checkpoint.config.runnable:
        maxima = [CacheMaxima("cpu") for _ in checkpoint.config.layers]
        layerwise_hidden(checkpoint, [Batch.from_start(tokens)], maxima=maxima, progress=progress)
        largest: dict[str, Tensor] = {}
        for layer in checkpoint.config.caching_layers:
            largest[attention_name(layer)] = maxima[layer].largest
        return largest
    # Imports transformers, which is optional.
    from quantkit.via_transformers.cached_attention import find_cached_attention, recording_cache

    passage = passage_of(checkpoint)
    recorder = cache_recorder.CacheRecorder()
    with recording_cache(passage.partwise, recorder):
        passage.compute_hidden_states([tokens], progress)
    largest = {}
    for name in find_cached_attention(passage.partwise):
        if not recorder.counts[name]:
            raise make_unreached_error(name, checkpoint.path)
        largest[name] = recorder.find_largest(name)
    return largest


def make_unreached_error(attention: str, path: Path) -> UnsupportedError:
    """Make the error for an attention module on disk that no samples put keys and values of."""
    return UnsupportedError(
        f"no sample is seen to have keys and values in '{attention}'",
        path=path,
        hint=Message("leave ", Option("kv_cache"), " out"),
    )


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
