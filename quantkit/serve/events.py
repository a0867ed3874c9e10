"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""

# Line ends for Python's `str.splitlines`, and so for the lines of httpx and requests, which would
# divide an event there.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def encode_event(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON value as an event."""
    text = json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)
    # A lone surrogate, which a template or a body may contain, has no encoding in UTF-8.
    return b"data: " + text.encode(errors="backslashreplace") + b"\n\n"
