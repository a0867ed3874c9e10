"""Triton's interpreter, without the third of its time that goes into looking for the same functions again."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from quantkit.kernels.triton_words import INTERPRETED

_patch_attr = interpreter._patch_attr


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's own, which goes through all members at every call of a function of a kernel."""
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            _patch_attr(package, name, member, builder, scope)


def quicken() -> None:
    if INTERPRETED:
        interpreter._patch_builtin = _patch_builtin
