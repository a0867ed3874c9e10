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
        """Return which tokens may come next, bool [V] on the CPU; end tokens are among them if the
        text may end here. Raises `QuantkitError` if there is none.
        """
        ...

    def accept(self, token: int) -> None:
        """Append a token that is allowed. Raises `QuantkitError` if none can follow it."""
        ...


ConstraintFactory = Callable[[], Constraint]
"""Called when the first token of a continuation is drawn."""
