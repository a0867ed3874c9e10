"""Round the inputs of a quantized model's linears, as runtimes do that multiply weights and inputs
in a short type.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.tensors.activations import InputRounding


class RoundedInputs(CheckpointView):
    """A checkpoint that runs block by block with rounded inputs of some linears."""

    def __init__(self, source: Checkpoint, inputs: Mapping[str, InputRounding]) -> None:
        """Add roundings to a checkpoint; `inputs` has them by the name of the linear."""
        super().__init__(source)
        self.inputs = inputs


def round_inputs(checkpoint: Checkpoint, linear: str, x: Tensor) -> Tensor:
    """Round the inputs [..., I] of a linear, float32, if the checkpoint has a rounding for it."""
    if not isinstance(checkpoint, RoundedInputs):
        return x
    rounding = checkpoint.inputs.get(linear)
    # Runtimes may multiply some linears, such as the head, in a wide type.
    if rounding is None:
        return x
    return rounding.round_inputs(x)
