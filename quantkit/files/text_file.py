"""Files of plain text to measure on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quantkit.errors import RequestError


def text_of(path: Path) -> tuple[str, str]:
    """A file's text, and its sha256.

    Raises:
        RequestError: if it cannot be read, is not UTF-8, or is empty.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise RequestError(f"the text cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise RequestError("is not plain text", path=path, found=f"byte {error.start}", expected="UTF-8") from error
    if not text.strip():
        raise RequestError("the text is empty", path=path)
    return text, hashlib.sha256(raw).hexdigest()
