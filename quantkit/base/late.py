"""Modules, their functions, and tables of what they define, imported when they are first used.

What only some models or options need is declared late by the modules that use it: a module, or
single functions of it. Type checkers see ordinary imports::

    if TYPE_CHECKING:
        from quantkit.formats.lora import merged_checkpoint
    else:
        merged_checkpoint = LateModule("quantkit.formats.lora.merged_checkpoint")
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any, TypeVar

Value = TypeVar("Value")


def import_attribute(place: str) -> Any:
    """Import the module in ``module:attribute``, and return its attribute."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


class LateModule(ModuleType):
    """Stands for a module, given by its full name, until an attribute of it is read."""

    # Python calls this for attributes that this object lacks: all of the module's.
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class LateFunction:
    """Stands for a function, given as ``module:name``, until it is called."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_attribute(self._place)(*arguments, **options)


class LateTable(MutableMapping[str, Value]):
    """Values by name; the module of each is imported when the value is first looked up."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """Set up the table; `places` has ``module:attribute`` of each value, by name."""
        self._places = dict(places)
        self._values: dict[str, Value] = {}

    def load(self, place: str) -> Value:
        """Import the module of a value, and return the value."""
        value: Value = import_attribute(place)
        return value

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            self._values[name] = self.load(self._places[name])
        return self._values[name]

    def __setitem__(self, name: str, value: Value) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._places.pop(name, None)
        self._values.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **self._values})

    def __len__(self) -> int:
        return len({**self._places, **self._values})
