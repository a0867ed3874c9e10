"""Sizes of the files of weights of a model, compared with its source."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.base.memory import size_text
from quantkit.base.messages import Message, Option
from quantkit.tensors.scheme import EMBEDDING_SCHEME

# An embedding of floats that takes more of the output is worth a hint.
_LARGE_SHARE = 1 / 4


@dataclass(frozen=True)
class WeightSizes:
    """Sizes of weights in bytes.

    Attributes:
        source_bytes: of the source's files of weights.
        output_bytes: of the output's.
        embedding_bytes: of the output's embedding, and of a head that is tied to it; 0 if it is not
            known.
        embedding_int8_bytes: of the same with ``embedding="int8"``; None if it has a scheme
            already, or the target format has no codes of embeddings.
    """

    source_bytes: int
    output_bytes: int
    embedding_bytes: int
    embedding_int8_bytes: int | None

    def text(self) -> str:
        """Write the output's size and how it compares."""
        if self.output_bytes < self.source_bytes:
            compared = "smaller"
        else:
            compared = "not smaller"
        return (
            f"{size_text(self.output_bytes)}, {compared} than the source's"
            f" {size_text(self.source_bytes)}"
        )

    def hints(self) -> list[str]:
        """Suggest what would help if the output is not smaller, or much of it is an embedding of
        floats.
        """
        if self.embedding_int8_bytes is None:
            return []
        is_smaller = self.output_bytes < self.source_bytes
        has_large_embedding = self.embedding_bytes > _LARGE_SHARE * self.output_bytes
        if is_smaller and not has_large_embedding:
            return []
        int8 = Message(
            Option("embedding", value=str(EMBEDDING_SCHEME)),
            f" makes it {size_text(self.embedding_int8_bytes)}",
        )
        return [Message(f"the embedding is {size_text(self.embedding_bytes)} of that; ", int8)]
