"""What people call a model, and what they say of it for its card."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.arguments import as_text
from quantkit.errors import RequestError
from quantkit.files.gguf_types import GGUF
from quantkit.files.hub import origin
from quantkit.formats.checkpoint import Checkpoint
from quantkit.jobs.command import file_name
from quantkit.json_values import read_json, shown

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_LICENSE = re.compile(r"[A-Za-z0-9][\w.+-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class Labels:
    """What a user says of the model for its card.

    Attributes:
        base_model: the source's name on a hub.
        license: as hubs spell it, such as ``apache-2.0``.
    """

    base_model: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            RequestError: if one is no name or licence that a hub could know.
        """
        for value, pattern, option, expected in (
            (self.base_model, _HUB_NAME, "base_model", "owner/name"),
            (self.license, _LICENSE, "license", "apache-2.0, llama3.1, other, ..."),
        ):
            if value is not None and not pattern.fullmatch(as_text(option, value)):
                raise RequestError(f"`{option}` is none that a hub knows", found=shown(value), expected=expected)


def model_name(source: Checkpoint, base: str | None = None) -> str:
    """What people call a model.

    Args:
        base: its name on a hub; None takes what `base_model` finds.
    """
    base = base or base_model(source)
    path = source.path.with_suffix("") if source.path.suffix == GGUF else source.path
    return base.rpartition("/")[2] if base else file_name(path) or source.config.architecture


def base_model(source: Checkpoint) -> str | None:
    """The source's name on a hub, where its config, or its place in the hub's cache, tells one."""
    config = source.path / "config.json"
    named = read_json(config).get("_name_or_path") if config.is_file() else None
    if isinstance(named, str) and "/" in named and _HUB_NAME.fullmatch(named):
        return named
    cached = origin(source.path)
    return None if cached is None else cached["name"]
