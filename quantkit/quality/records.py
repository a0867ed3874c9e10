"""Dataclasses in a manifest: read back from the JSON form of `dataclasses.asdict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from quantkit.errors import CheckpointError
from quantkit.formats import manifest

T = TypeVar("T")


def read_record(kind: type[T], value: Any, path: Path, what: str) -> T:
    """A dataclass from the manifest at a path; keys that it does not have are ignored.

    Args:
        what: what the record states, for the error.

    Raises:
        CheckpointError: if the value has another form, or `kind` raises ValueError for it.
    """
    try:
        found: T = _decoded(kind, value)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise CheckpointError(f"does not state {what}", path=path, hint="make it again") from None
    return found


def manifest_or_empty(model: Path) -> dict[str, Any]:
    """A model's manifest; empty if it has none that can be read."""
    try:
        return manifest.read(model)
    except CheckpointError:
        return {}


def module_records(made: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a manifest states of each module; empty if it has another form."""
    modules = made.get("modules")
    return {name: one for name, one in modules.items() if isinstance(one, dict)} if isinstance(modules, dict) else {}


def _decoded(kind: Any, value: Any) -> Any:
    """A value of a type: a dataclass, a list, tuple or dict, an optional value, or a string or number."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        values = {
            field.name: _decoded(hints[field.name], value[field.name])
            for field in fields(kind)
            if (field.default is MISSING and field.default_factory is MISSING) or value.get(field.name) is not None
        }
        return kind(**values)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return [_decoded(arguments[0], one) for one in value]
    if origin is tuple:
        return tuple(_decoded(one, part) for one, part in zip(arguments, value, strict=True))
    if origin is dict:
        return {str(key): _decoded(arguments[1], one) for key, one in value.items()}
    if arguments:  # X | None
        return None if value is None else _decoded(arguments[0], value)
    return kind(value)
