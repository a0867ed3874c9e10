"""A short convolution between two gates (LFM2, 2511.23404).

B batch, T new positions, D hidden size, K tokens that the convolution sees.
"""

from __future__ import annotations

from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.model.mixers.convolution import convolve
from quantkit.model.mixers.mixer import Mixer, States, Step


class ShortConv(Mixer):
    """A causal convolution of each channel over the latest tokens, with a gate before and after it.

    Its state is the convolution's inputs of the latest K - 1 tokens, [B, K - 1, D].
    """

    NAME = "conv"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.short_conv is not None
        size = config.hidden_size
        bias = config.short_conv.bias
        self.in_proj = nn.Linear(size, 3 * size, bias=bias)
        # Contains the weight [D, 1, K] and its bias; `convolve` multiplies by them.
        self.conv = nn.Conv1d(size, size, config.short_conv.size, groups=size, bias=bias)
        self.out_proj = nn.Linear(size, size, bias=bias)

    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Compute gated outputs of the convolution, [B, T, D], for normed hidden states
        [B, T, D].
        """
        gate_before, gate_after, values = self.in_proj(x).chunk(3, dim=-1)
        convolved = step.scan(self.layer, self._convolve, (gate_before * values,))
        gated: Tensor = gate_after * convolved
        return gated

    def output(self, mixed: Tensor) -> Tensor:
        """Project gated outputs of the convolution to the branch's output, [B, T, D]."""
        out: Tensor = self.out_proj(mixed)
        return out

    def _convolve(self, inputs: tuple[Tensor, ...], states: States | None) -> tuple[Tensor, States]:
        """Convolve [B, T, D]: a `Recurrence`."""
        (x,) = inputs
        earlier = None if states is None else states[0]
        out, latest = convolve(x, self.conv, earlier)
        return out.to(x.dtype), (latest,)
