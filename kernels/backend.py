"""What a kernel backend is."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quantkit.qtensor import QuantTensor
from quantkit.scheme import QuantScheme


class Backend(Protocol):
    """One way to multiply activations by a quantized weight.

    A backend lays the weight out as it likes in `prepare`, once, at load; that layout is
    never saved.
    """

    name: str

    def refusal(self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it can't serve this case; None if it can."""
        ...

    def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
        """The tensors its `linear` needs, by name."""
        ...

    def linear(self, x: Tensor, prepared: dict[str, Tensor], scheme: QuantScheme, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``: [..., I] to [..., O] in the dtype of x."""
        ...
