"""What all mixers have in common, and what they get from the decoder in each step.

B batch, T new positions, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.model.attention import Attend
from quantkit.model.cache import KVCache
from quantkit.model.rope import Angles

States = tuple[Tensor, ...]
"""The states of one layer after some tokens, float32 [B, ...] each; see
`ModelConfig.state_shapes`.
"""

Recurrence = Callable[[tuple[Tensor, ...], States | None], tuple[Tensor, States]]
"""From inputs [B, T, ...] of consecutive tokens, and the states before them, to outputs [B, T, ...]
and the states after them. None stands for the beginning of the sequences, where states are zero.
"""

Scan = Callable[[int, Recurrence, tuple[Tensor, ...]], Tensor]
"""Run a layer's recurrence over its inputs [B, T, ...]; returns its outputs [B, T, ...]."""


def scan_from_start(layer: int, recurrence: Recurrence, inputs: tuple[Tensor, ...]) -> Tensor:
    """Run a recurrence over whole sequences, and drop the states after them: a `Scan`."""
    return recurrence(inputs, None)[0]


def make_cached_scan(
    cache: KVCache, positions: Tensor, slots: Tensor | None = None, *, is_prefill: bool = False
) -> Scan:
    """Build a scan that continues the states of slots [B], None for all in order, and stores those
    after the tokens at positions, [T] or [B, T]. A sequence that begins at position 0 begins with
    zeros, whatever the slot contains; with `is_prefill`, all sequences do.
    """

    def scan(layer: int, recurrence: Recurrence, inputs: tuple[Tensor, ...]) -> Tensor:
        stored = cache.states(layer)
        if is_prefill:
            before = None
        else:
            before = stored.read(slots, is_first=positions[..., 0] == 0)
        outputs, after = recurrence(inputs, before)
        stored.write(slots, after)
        return outputs

    return scan


@dataclass(frozen=True)
class Step:
    """The inputs that all blocks share in one pass through the decoder.

    Attributes:
        angles: of the tokens' positions.
        attend: attention.
        scan: of layers with states.
        layer_inputs: the vectors [B, T, P] of each layer, in models that have some; see
            `LayerInputs`.
        shared: the keys and values [B, K, T, Dh] of layers before, by their numbers, which later
            layers take.
    """

    angles: Angles
    attend: Attend
    scan: Scan = scan_from_start
    layer_inputs: Sequence[Tensor] = ()
    shared: MutableMapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Mixer(nn.Module, ABC):
    """The first branch of a decoder layer, which moves information from token to token.

    It has two halves, as `Block` describes. Between them, all tokens of a sequence may be mixed;
    the linears before and after see each token alone.
    """

    NAME: ClassVar[str]
    """The name of the module in its block, as in canonical names of tensors."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = config.layers[layer]

    @abstractmethod
    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Compute the inputs of the last linear, [B, T, I], for normed hidden states [B, T, D]."""

    @abstractmethod
    def output(self, mixed: Tensor) -> Tensor:
        """Project the result of `inner` to the branch's output, [B, T, D]."""
