"""Documents, wherever they are from, into one text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable
from pathlib import Path

from quantkit.errors import RequestError

TEXT = "text"
"""The key or column that holds a document."""

_BETWEEN = b"\n\n"


def joined(documents: Iterable[object], limit: int) -> str:
    """The documents with an empty line between any two, cut after `limit` bytes of UTF-8.

    No more documents are asked for than that takes. None is an empty one.

    Raises:
        ValueError: if a document is not text.
    """
    parts: list[bytes] = []
    size = 0
    for number, document in enumerate(documents, 1):
        if not isinstance(document, str | None):
            raise ValueError(f"the {TEXT} of document {number} is of type {type(document).__name__}")
        parts.append((document or "").encode())
        size += len(parts[-1]) + len(_BETWEEN)
        if size >= limit:
            break
    return decoded(_BETWEEN.join(parts)[:limit], whole=False)


def decoded(raw: bytes | bytearray, *, whole: bool) -> str:
    """The text of UTF-8 bytes; unless `whole`, a last character that was cut is left out.

    Raises:
        ValueError: if they are not UTF-8.
    """
    return codecs.getincrementaldecoder("utf-8")().decode(raw, final=whole)


def require_text(names: Collection[str], path: str | Path) -> None:
    """Check that a document has its text under the key or column that is read.

    Raises:
        RequestError: if it has not.
    """
    if TEXT not in names:
        raise RequestError("has no text to calibrate on", path=path, found=", ".join(names) or "nothing", expected=TEXT)
