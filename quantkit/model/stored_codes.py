"""Read the weights of a checkpoint as codes wherever kernels run them, also in block types that are
otherwise read as floats. Without torch, to state what a model takes before it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.registry import CONTAINERS
from quantkit.kernels.cpu_layout import explain_unsupported_scheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

RunsCodes = Callable[[TensorSpec], bool]
"""Tells whether kernels multiply a quantized weight."""


class RunnableCodes(CheckpointView):
    """A checkpoint that is read as codes where kernels run them, and otherwise as its source reads
    it.
    """

    def __init__(self, source: Checkpoint, coded: Checkpoint, runs: RunsCodes) -> None:
        """
        Args:
            coded: the same checkpoint, with all codes as such.
            runs: is asked about the codes that only `coded` reads.
        """
        super().__init__(source)
        self._coded = coded
        self._runs = runs

    def info(self, name: str) -> TensorSpec:
        return self._choose(name).info(name)

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        return self._choose(name).load(name, part)

    def _choose(self, name: str) -> Checkpoint:
        spec = self._coded.info(name)
        if spec.scheme is None or self._source.info(name).scheme is not None:
            return self._source
        if self._runs(spec):
            return self._coded
        return self._source


def keep_runnable_codes(checkpoint: Checkpoint, runs: RunsCodes) -> Checkpoint:
    """Adapt a checkpoint to read codes of all types that kernels run, see `RunnableCodes`; one that
    has no others is returned as it is.
    """
    container = CONTAINERS.get(checkpoint.format)
    if container is None:
        return checkpoint
    coded = container.with_codes(checkpoint)  # type: ignore[arg-type]
    if coded is checkpoint:
        return checkpoint
    return RunnableCodes(checkpoint, coded, runs)


def runs_on_cpu(spec: TensorSpec) -> bool:
    """Tell whether the CPU kernels multiply a quantized weight; a `RunsCodes`."""
    return spec.scheme is not None and explain_unsupported_scheme(spec.scheme) is None
