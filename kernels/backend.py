"""The interface of kernel backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.kernels.block import BlockKernel, StackedLinear
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

EVEN, EVEN_COLUMNS = 127, 32
"""See `Rounding`."""


@dataclass(frozen=True)
class Rounding:
    """The allowed error of a product of activations x and a row w, relative to the product of norms ``|x| |w|``.

    Errors of float32 sums and of rounding the result to its dtype are added.

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
class ExpertKernel:
    """A kernel for the experts of a layer. It reads the weights of the selected experts only, and no tensor on the
    host, so it can be captured.

    Attributes:
        stack: stacks one of the tensors that `prepare` returned for each expert to [E, ...].
        run: for rows [N, D], weights [N, K] in float32 and numbers [N, K] of the chosen experts, each one's gate and up
            side by side, and down, the activation and its limit as in `ModelConfig`: the weighted sums [N, D] in the
            dtype of the rows.
    """

    stack: Callable[[Sequence[Tensor]], Tensor]
    run: Callable[[Tensor, Tensor, Tensor, StackedLinear, StackedLinear, str, float | None], Tensor]


@dataclass(frozen=True)
class Operations:
    """What a backend provides for the rest of a model, in addition to linears; None where it provides nothing.

    Attributes:
        cached_attention: see `ScoredAttention`.
        cached_attention_max_tokens: tokens T up to which it is faster than torch's attention; None is any number.
        float_linear: ``x @ weight.T`` with a weight of floats, in the dtype of x, whatever the weight's.
        block: for whole decoder blocks.
        experts: for mixtures of experts.
        single_threaded: a context in which torch's operations run on the calling thread. Threads that torch wakes
            up spin for milliseconds on processors that the kernels need.
    """

    cached_attention: ScoredAttention | None = None
    cached_attention_max_tokens: int | None = None
    float_linear: Callable[[Tensor, Tensor], Tensor] | None = None
    block: BlockKernel | None = None
    experts: ExpertKernel | None = None
    single_threaded: Callable[[], AbstractContextManager[None]] | None = None


class Backend(Protocol):
    """One way to multiply activations by a quantized weight.

    `prepare` converts the weight to the backend's layout, once, at load; that layout is never saved.
    """

    name: str

    def __hash__(self) -> int: ...

    def unsupported_reason(self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it does not support this case; None if it does."""
        ...

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """The allowed error of products of activations of `dtype`; the self-test at load checks it."""
        ...

    def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
        """The tensors its `linear` needs, by name."""
        ...

    def rows(self, prepared: dict[str, Tensor], scheme: QuantScheme, columns: int, index: Tensor) -> Tensor:
        """Rows of the weight by index [N], as float32 [N, I], for an embedding that is tied to the head."""
        ...

    def operations(self) -> Operations | None:
        """What else it provides; None if nothing."""
        ...

    def linear(
        self, x: Tensor, prepared: dict[str, Tensor], scheme: QuantScheme, rows: int, bias: Tensor | None
    ) -> Tensor:
        """``x @ weight.T + bias``: [..., I] to [..., O] in the dtype of x; O is `rows`."""
        ...
