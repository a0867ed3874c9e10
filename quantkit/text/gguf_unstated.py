"""What a GGUF file leaves open about its tokenizer, and what the folder made of it therefore only assumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.text import gguf_vocabulary as keys
from quantkit.text.sentencepiece_file import PieceType

_BARS = (("<|", "|>"), ("<\uff5c", "\uff5c>"))


@dataclass(frozen=True)
class GgufUnstated:
    """
    Attributes:
        unused: ids that only fill a row of the embedding.
        set_apart: tokens of which the file does not say whether they are special or added: llama.cpp and its converter
            decide that by the spelling.
        pipeline: whether quantkit put the parts of a tokenizer.json into the file that GGUF has no keys for.
    """

    unused: frozenset[int]
    set_apart: frozenset[int]
    pipeline: bool


def gguf_unstated(metadata: Mapping[str, Any], path: Path) -> GgufUnstated | None:
    """What a file's metadata leaves open; None of a file without a tokenizer.

    Raises:
        CheckpointError: if the metadata contradicts itself.
        UnsupportedError: for a tokenizer that cannot be rebuilt exactly.
    """
    vocabulary = keys.read_vocabulary(metadata, path)
    if vocabulary is None:
        return None
    pipeline = keys.PIPELINE in metadata
    types = dict(enumerate(vocabulary.types))
    stated = {PieceType.CONTROL, PieceType.UNKNOWN}
    apart = {number for number in keys.control_tokens(vocabulary) if types[number] not in stated}
    if not pipeline:
        apart |= {
            number for number, kind in types.items()
            if kind is PieceType.CONTROL and any(
                vocabulary.tokens[number].startswith(start) and vocabulary.tokens[number].endswith(end)
                for start, end in _BARS
            )
        }  # fmt: skip
    unused = frozenset(number for number, kind in types.items() if kind is PieceType.UNUSED)
    return GgufUnstated(unused, frozenset(apart), pipeline)
