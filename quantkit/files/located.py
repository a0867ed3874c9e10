"""Where a model is that somebody names."""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.errors import CheckpointError, RequestError
from quantkit.files.gguf_types import GGUF, first_parts
from quantkit.files.hub import PREFIX, HubModel, download, hub_model

_downloaded: dict[HubModel, Path] = {}


def located(path: str | Path) -> Path:
    """The folder or file of a model on this machine. ``hf:owner/name`` is downloaded, once in a process; an existing
    path is always itself. ``X.gguf`` stands for ``X-00001-of-0000N.gguf`` where only that is there.

    Raises:
        RequestError, NoSpaceError, CheckpointError: see `download`.
    """
    model = hub_model(str(path))
    if model is None:
        whole = Path(path)
        parts = sorted(whole.parent.glob(first_parts(whole))) if whole.suffix == GGUF and not whole.exists() else []
        return parts[0] if len(parts) == 1 else whole
    found = _downloaded.get(model)
    if found is None or not found.exists():
        found = _downloaded[model] = download(model)
    return found


def require_there(path: str | Path) -> Path:
    """`located`, of what is there.

    Raises:
        CheckpointError: if nothing is at the path.
        RequestError, NoSpaceError: see `download`.
    """
    found = located(path)
    if not found.exists():
        raise CheckpointError("does not exist", path=path, hint=_spelled(str(path)))
    return found


def _spelled(path: str) -> str | None:
    """How a model on the hub would be named, where a path could be meant for one."""
    name = re.sub(r"^(https?:/+huggingface\.co/|HF:)", "", path)
    try:
        model = hub_model(f"{PREFIX}{name}")
    except RequestError:
        return None
    return None if model is None else f"if it is a model of the Hugging Face hub: {model}"
