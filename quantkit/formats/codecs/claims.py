"""Values and names in the settings of a quantization, read for claims: what makes no sense is a `ValueError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.json_values import shown

_SKIPPED = ("modules_to_not_convert", "ignored_layers", "modules_in_block_to_skip", "llm_int8_skip_modules")
_HEADS = ("lm_head", "embed_out", "output")


class Skipped:
    """The modules that settings leave in floats, by their names or parts of them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._names = [one for key in _SKIPPED for one in names_in(settings.get(key))]

    def __call__(self, module: str) -> bool:
        return any(name in module for name in self._names)


def is_head(module: str) -> bool:
    """Whether a module is the output head."""
    return module.rpartition(".")[2] in _HEADS


def spellings(module: str) -> list[str]:
    """A module's name as configs may spell it: with and without the prefix before the layers."""
    found = [module]
    for before, after in (("model.", ""), ("language_model.model.", "model.language_model."), ("", "model.")):
        if module.startswith(before):
            found.append(after + module.removeprefix(before))
    if module.startswith("model.language_model."):
        found.append("language_model.model." + module.removeprefix("model.language_model."))
    return found


def names_in(value: object) -> list[str]:
    """A list of names.

    Raises:
        ValueError: if it is none.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"a list of names is {shown(value)}")
    return value


def bits_in(value: object) -> int | None:
    """The bits of a code.

    Raises:
        ValueError: if there are no such codes.
    """
    if value is not None and (type(value) is not int or not 1 <= value <= 16):
        raise ValueError(f"the bits of a code are {shown(value)}")
    return value


def block_in(value: object) -> tuple[int, int] | None:
    """Rows and columns of a block.

    Raises:
        ValueError: if it is none.
    """
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        raise ValueError(f"the size of a block is {shown(value)}")
    return value[0], value[1]


def group_size_in(value: object) -> int | None:
    """The size of a group; -1 and null stand for a row.

    Raises:
        ValueError: if it is none.
    """
    if value in (None, -1, 0):
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"the size of a group is {shown(value)}")
    return value
