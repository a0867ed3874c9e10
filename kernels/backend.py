"""What a kernel backend is, and what it may offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

EVEN, EVEN_COLUMNS = 127, 32
"""See `Rounding`."""


@dataclass(frozen=True)
class Rounding:
    """The error that a product of activations x and a row w may have, as a share of the norms' product ``|x| |w|``.

    Errors of float32 sums, and of rounding the result to its dtype, come on top.

    Attributes:
        activations: from rounding activations, except *even* ones, which are taken exactly: of each `EVEN_COLUMNS`
            columns, integers up to `EVEN`, that among them, times a power of two; or zeros.
        weights: from rounding weights.
        result: steps of its dtype that the result may be off by; half of one is rounding to the nearest.
    """

    activations: float
    weights: float
    result: float = 0.5


ScoredAttention = Callable[
    [Tensor, CachedRows, CachedRows, Tensor, Tensor | None, int | None, float | None, float | None, Tensor | None],
    Tensor,
]
"""Attention over a cache: queries [B, H, T, Dh]; cached keys and values [slots, K, S, Dh]; the queries' positions, [T]
or [B, T]; the sequences' slots [B], None for 0, 1, 2, ...; the window, None for all; and of the scores the scale, None
for 1 over the root of Dh, the soft cap or None, and the heads' sinks [H] or None. To [B, T, H * Dh]."""


@dataclass(frozen=True)
class BlockKernel:
    """A kernel for a whole decoder block.

    Attributes:
        run: updates hidden states [B, T, D] in place, attending to a cache or among the tokens given.
        features: what it serves besides RMS norms before both branches, rotary grouped-query attention and SwiGLU:
            names of fields of `ModelConfig`, `LayerConfig` and `RopeConfig` that may differ from their defaults.
            Models that need more run without it.
    """

    run: Callable[..., None]
    features: frozenset[str]


@dataclass(frozen=True)
class StackedLinear:
    """A linear of every expert of a layer.

    Attributes:
        prepared: what the backend's `prepare` gave for each, by name, as one tensor [E, ...].
        rows: outputs of one.
        bias: [E, O] in float32, or None.
    """

    prepared: dict[str, Tensor]
    scheme: QuantScheme
    rows: int
    bias: Tensor | None


@dataclass(frozen=True)
class ExpertKernel:
    """A kernel for the experts of a layer. It reads the weights of those that are chosen only, and nothing that it is
    given on the host: it can be captured.

    Attributes:
        stack: one of the tensors that `prepare` gave for each expert, as one tensor [E, ...].
        run: for rows [N, D], weights [N, K] in float32 and numbers [N, K] of the chosen experts, each one's gate and up
            side by side, and down, the activation and its limit as in `ModelConfig`: the weighted sums [N, D] in the
            dtype of the rows.
    """

    stack: Callable[[Sequence[Tensor]], Tensor]
    run: Callable[[Tensor, Tensor, Tensor, StackedLinear, StackedLinear, str, float | None], Tensor]


@dataclass(frozen=True)
class Operations:
    """What a backend offers for the rest of a model, besides its linears; None where it offers nothing.

    Attributes:
        cached_attention: see `ScoredAttention`.
        cached_attention_max_tokens: tokens T up to which it is faster than torch's attention; None is any number.
        float_linear: ``x @ weight.T`` with a weight of floats, in the dtype of x, whatever the weight's.
        block: for whole decoder blocks.
        experts: for mixtures of experts.
        single_threaded: keeps torch's own operations, while in it, to the calling thread. Threads that torch wakes
            up look for more work for milliseconds, on processors that the kernels then lack.
    """

    cached_attention: ScoredAttention | None = None
    cached_attention_max_tokens: int | None = None
    float_linear: Callable[[Tensor, Tensor], Tensor] | None = None
    block: BlockKernel | None = None
    experts: ExpertKernel | None = None
    single_threaded: Callable[[], AbstractContextManager[None]] | None = None


class Backend(Protocol):
    """One way to multiply activations by a quantized weight.

    A backend lays the weight out as it likes in `prepare`, once, at load; that layout is never saved.
    """

    name: str

    def __hash__(self) -> int: ...

    def unsupported_reason(self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it can't serve this case; None if it can."""
        ...

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """How far its products of activations of `dtype` may be off; the self-test at load holds them to it."""
        ...

    def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
        """The tensors its `linear` needs, by name."""
        ...

    def rows(self, prepared: dict[str, Tensor], scheme: QuantScheme, columns: int, index: Tensor) -> Tensor:
        """Rows of the weight by their numbers [N], [N, I] in float32: what an embedding gives that is the head too."""
        ...

    def operations(self) -> Operations | None:
        """What else it offers; None if nothing."""
        ...

    def linear(
        self, x: Tensor, prepared: dict[str, Tensor], scheme: QuantScheme, rows: int, bias: Tensor | None
    ) -> Tensor:
        """``x @ weight.T + bias``: [..., I] to [..., O] in the dtype of x; O is `rows`."""
        ...
