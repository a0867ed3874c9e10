"""What restricts the tokens of a continuation, such as a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Constraint(Protocol):
    """Restricts the tokens of one continuation.

    Only its `Sampler` calls this, once for each token.
    """

    def compute_token_mask(self) -> Tensor:
        """Compute which tokens may come next, as bool [V] on the CPU.

        End tokens are allowed if the text may end here. Raises `QuantkitError` if no token is
        allowed.
        """
        ...

    def accept(self, token: int) -> None:
        """Append a token that is allowed. Raises `QuantkitError` if none can follow it."""
        ...


ConstraintFactory = Callable[[], Constraint]
"""Called when the first token of a continuation is drawn."""
