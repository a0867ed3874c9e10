"""A constraint that begins after a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.runtime.constraint import Constraint

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Reasoning:
    """The tokens between which a model reasons.

    Attributes:
        opened: whether the prompt ends with the first of them; otherwise an answer may begin with
            it.
    """

    begin: int
    end: int
    opened: bool


class AfterReasoning:
    """A `Constraint` that allows any text up to the end of the reasoning, and then what another
    constraint allows.
    """

    def __init__(
        self,
        inner: Constraint,
        reasoning: Reasoning,
        forbidden: Sequence[int],
        size: int,
        vocab_size: int,
    ) -> None:
        """
        Args:
            forbidden: tokens that end the text.
            size: tokens that the tokenizer knows; the others, up to `vocab_size`, are forbidden
                too.
        """
        self._inner = inner
        self._reasoning = reasoning
        # Within the reasoning, an end token would end the answer before its required part.
        self._forbidden = [*forbidden, reasoning.begin]
        self._size = size
        self._vocab_size = vocab_size
        self._inside = reasoning.opened
        self._first = True

    def compute_token_mask(self) -> Tensor:
        import torch

        if not self._inside:
            mask = self._inner.compute_token_mask()
            # Only the first token may begin the reasoning.
            if self._first:
                mask[self._reasoning.begin] = True
            return mask
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[: self._size] = True
        mask[self._forbidden] = False
        return mask

    def accept(self, token: int) -> None:
        if self._inside:
            self._inside = token != self._reasoning.end
        elif self._first and token == self._reasoning.begin:
            self._inside = True
        else:
            self._inner.accept(token)
        self._first = False
