"""The path of a model that the user names."""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.errors import CheckpointError, RequestError
from quantkit.files.gguf_types import GGUF, first_parts
from quantkit.files.hub import PREFIX, HubModel, download, hub_model

_downloaded: dict[HubModel, Path] = {}


def located(path: str | Path) -> Path:
    """The folder or file of a model on this machine.

    ``hf:owner/name`` is downloaded, once per process; an existing path has priority. ``X.gguf`` stands for
    ``X-00001-of-0000N.gguf`` if only that exists.

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
    """`located`, but the path must exist.

    Raises:
        CheckpointError: if it does not.
        RequestError, NoSpaceError: see `download`.
    """
    found = located(path)
    if not found.exists():
        raise CheckpointError("does not exist", path=path, hint=_spelled(str(path)))
    return found


def _spelled(path: str) -> str | None:
    """A hint with the name of the model on the hub, if a missing path looks like one."""
    name = re.sub(r"^(https?:/+huggingface\.co/|HF:)", "", path)
    try:
        model = hub_model(f"{PREFIX}{name}")
    except RequestError:
        return None
    return None if model is None else f"if it is a model of the Hugging Face hub: {model}"
