"""Names of models on the hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from quantkit.base.json_values import format_value
from quantkit.errors import RequestError

PREFIX = "hf:"
SPELLING = "hf:owner/name, hf:owner/name/FILE.gguf, or either with @revision"
"""How users spell a model on the hub, for messages and help."""
_PART = r"[A-Za-z0-9][\w.-]*"
# It becomes a path in the cache: no part is "..".
REVISION = r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*"
_NAME = re.compile(
    rf"{PREFIX}({_PART}/{_PART})(?:/([^@]+\.(?i:gguf)))?(?:@({REVISION}))?", re.ASCII
)
# The folder of a snapshot in the cache: models--OWNER--NAME/snapshots/COMMIT.
_SNAPSHOT = re.compile(rf"models--({_PART}?)--({_PART})/snapshots/([^/]+)", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model, or one of its GGUF files, at a revision; None is the default branch."""

    name: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        if self.revision:
            revision = f"@{self.revision}"
        else:
            revision = ""
        return f"{PREFIX}{self.name}{file}{revision}"


def parse_hub_name(path: str) -> HubModel | None:
    """Parse the name of a model on the hub; None for a path.

    Raises:
        RequestError: if the string begins with ``hf:`` and is not such a name.
    """
    # A file or folder of this name has priority.
    if not path.startswith(PREFIX) or os.path.exists(path):
        return None
    match = _NAME.fullmatch(path)
    # A revision that ends in .gguf is a file name in the wrong place.
    if match is None or (match[3] or "").lower().endswith(".gguf"):
        raise RequestError(
            "is not the name of a model on the hub", found=format_value(path), expected=SPELLING
        )
    return HubModel(match[1], match[2], match[3])


def read_origin(path: Path) -> dict[str, str] | None:
    """Read name and commit of a model from its path in the hub's cache; None for any other path."""
    # Not resolved: files of a snapshot are links to blobs, whose paths have no commit.
    match = _SNAPSHOT.search(path.absolute().as_posix())
    if match is None:
        return None
    return {"name": f"{match[1]}/{match[2]}", "commit": match[3]}
