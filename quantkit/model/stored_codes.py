"""Read the weights of a checkpoint as codes wherever kernels run them, also in block types that are
otherwise read as floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.registry import CONTAINERS
from quantkit.kernels.backend import REFERENCE, Backend
from quantkit.kernels.dispatch import select_backend
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice


class RunnableCodes(CheckpointView):
    """A checkpoint that is read as codes where a backend runs them, and otherwise as its source
    reads it.
    """

    def __init__(
        self,
        source: Checkpoint,
        coded: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        allowed: Sequence[Backend],
    ) -> None:
        """
        Args:
            coded: the same checkpoint, with all codes as such.
            device, dtype: of activations.
            allowed: the backends that may run layers; the reference does not count, because it is
                slower than products of floats.
        """
        super().__init__(source)
        self._coded = coded
        self._device = device
        self._dtype = dtype
        self._backends = [backend for backend in allowed if backend is not REFERENCE]

    def info(self, name: str) -> TensorSpec:
        return self._choose(name).info(name)

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        return self._choose(name).load(name, part)

    def _choose(self, name: str) -> Checkpoint:
        spec = self._coded.info(name)
        if spec.scheme is None or self._source.info(name).scheme is not None:
            return self._source
        try:
            # Its self-tests run once for each scheme.
            select_backend(spec.scheme, self._device, self._dtype, spec.dtype.torch, self._backends)
        except RequestError:
            return self._source
        return self._coded


def keep_runnable_codes(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, allowed: Sequence[Backend]
) -> Checkpoint:
    """Adapt a checkpoint to read codes of all types that a backend runs, see `RunnableCodes`; one
    that has no others is returned as it is.
    """
    container = CONTAINERS.get(checkpoint.format)
    if container is None:
        return checkpoint
    coded = container.with_codes(checkpoint)  # type: ignore[arg-type]
    if coded is checkpoint:
        return checkpoint
    return RunnableCodes(checkpoint, coded, device, dtype, allowed)
