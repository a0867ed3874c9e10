"""What a kernel backend is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

EVEN, EVEN_COLUMNS = 127, 32
"""See `Rounding`."""


@dataclass(frozen=True)
class Rounding:
    """What a product of activations x and a row w may be off by, as a share of the norms' product ``|x| |w|``.

    Beyond that it may only be off by what sums in float32 are, and by what becomes of the result.

    Attributes:
        activations: from rounding activations, except *even* ones, which are taken exactly: of each `EVEN_COLUMNS`
            columns, integers up to `EVEN`, that among them, times a power of two; or zeros.
        weights: from rounding weights.
        result: steps of its dtype that the result may be off by; half of one is rounding to the nearest.
    """

    activations: float
    weights: float
    result: float = 0.5


@dataclass(frozen=True)
class Operations:
    """What a backend offers besides, for the rest of a model; None where it offers nothing.

    Attributes:
        lookup: attention of queries [B, H, T, Dh] over cached keys and values [B, K, S, Dh];
            then the queries' positions [T] and the window. To [B, T, H * Dh].
        lookup_most: tokens T up to which it does better than torch's attention; None is any number.
        linear: ``x @ weight.T`` of few rows x with a weight of floats, in the dtype of x, whatever the weight's.
        linear_most: rows up to which it does better than torch.
        block: a whole block, its hidden states [B, T, D] in place; over a cache or among the tokens given.
        alone: keeps torch's own operations, while in it, to the calling thread. Threads that torch wakes up look
            for more work for milliseconds, on processors that the kernels then lack.
    """

    lookup: Callable[[Tensor, Tensor, Tensor, Tensor, int | None], Tensor] | None = None
    lookup_most: int | None = None
    linear: Callable[[Tensor, Tensor], Tensor] | None = None
    linear_most: int = 0
    block: Callable[..., None] | None = None
    alone: Callable[[], AbstractContextManager[None]] | None = None


class Backend(Protocol):
    """One way to multiply activations by a quantized weight.

    A backend lays the weight out as it likes in `prepare`, once, at load; that layout is
    never saved.
    """

    name: str

    def __hash__(self) -> int: ...

    def refusal(self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it can't serve this case; None if it can."""
        ...

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """How far its products of activations of `dtype` may be off; they are held to it at load."""
        ...

    def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
        """The tensors its `linear` needs, by name."""
        ...

    def operations(self) -> Operations | None:
        """What else it can do; None if nothing."""
        ...

    def linear(
        self, x: Tensor, prepared: dict[str, Tensor], scheme: QuantScheme, rows: int, bias: Tensor | None
    ) -> Tensor:
        """``x @ weight.T + bias``: [..., I] to [..., O] in the dtype of x; O is `rows`."""
        ...
