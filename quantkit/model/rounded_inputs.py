"""A quantized model whose linears round their inputs, as runtimes do that multiply both in a
short type.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.tensors.activations import InputRounding


class RoundedInputs(CheckpointView):
    """A checkpoint that is run block by block with the inputs of some linears rounded."""

    def __init__(self, source: Checkpoint, inputs: Mapping[str, InputRounding]) -> None:
        """`inputs` are by name of the linear."""
        super().__init__(source)
        self.inputs = inputs


def as_multiplied(checkpoint: Checkpoint, linear: str, x: Tensor) -> Tensor:
    """Return the inputs [..., I] of a linear as they are multiplied, float32."""
    if isinstance(checkpoint, RoundedInputs):
        found = checkpoint.inputs.get(linear)
    else:
        found = None
    if found is None:
        return x
    return found.round_inputs(x)
