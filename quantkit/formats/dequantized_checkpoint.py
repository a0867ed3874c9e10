"""A quantized checkpoint whose weights are read as floats, each computed in float32 and rounded
once.
"""

from __future__ import annotations

from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.containers.hf_settings import without_settings
from quantkit.formats.registry import GGUF
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice


class DequantizedCheckpoint(CheckpointView):
    """A `StoredCheckpoint` of floats in the model's type; sizes on disk are the source's."""

    method = None

    def __init__(self, source: StoredCheckpoint) -> None:
        super().__init__(source)
        self.extra_config = without_settings(source.extra_config)
        self.layout = source.layout
        self.count_stored_bytes = source.count_stored_bytes
        self.readers = source.readers

    def info(self, name: str) -> TensorSpec:
        spec = self._source.info(name)
        is_quantized = spec.scheme is not None or spec.stored_as is not None
        # Other tensors keep their own float type, which may be wider than the model's.
        dtype = spec.dtype
        if is_quantized or may_be_in_blocks(self._source, spec):
            dtype = DType(self.config.dtype)
        return TensorSpec(name, spec.shape, dtype)

    def load(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Load one tensor, or a part of it, in floats."""
        value = self._source.load(name, part)
        dtype = self.info(name).dtype.torch
        if isinstance(value, qtensor.QuantTensor):
            return value.floats(dtype)
        return value.to(dtype)


def may_be_in_blocks(source: Checkpoint, spec: TensorSpec) -> bool:
    """Return whether a tensor may be stored in GGUF's blocks, which are read as float32 where that
    is exact.
    """
    return source.format == GGUF.name and len(spec.shape) > 1
