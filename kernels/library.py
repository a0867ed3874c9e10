"""Loads the C++ kernels: those that a wheel has for this machine, or else those that its compiler
makes.

Choosing and compiling them does not import torch.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import logging
import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError, RequestError, UnsupportedError
from quantkit.kernels.build import NATIVE, ensure_compiled, is_compiled, is_intact
from quantkit.kernels.variants import VARIANTS, runs_here

if TYPE_CHECKING:
    from quantkit.kernels.cpu_operators import CppOperators

_log = logging.getLogger(__name__)

SETTING = "QUANTKIT_CPU"
"""Environment variable that chooses the kernels: ``native``, which are compiled for this machine,
or those for one of `VARIANTS`. Without it they are the fastest that come with quantkit, or else
native.
"""


def load_kernels(name: str | None = None) -> CppOperators:
    """Load the kernels that `SETTING` or `name` chooses. Raises `RequestError` if there are none
    of that name, and `UnsupportedError` if they do not run here or cannot be compiled.
    """
    loaded = _load_once(_choose_kernels(name))
    if isinstance(loaded, UnsupportedError):
        raise loaded
    return loaded


def describe_kernels() -> str:
    """Describe which kernels `load_kernels` chooses and where they come from, or why there are
    none.

    Compiles nothing.
    """
    try:
        name = _choose_kernels(None)
        if _find_shipped_library(name):
            return f"{name}, included"
        if is_compiled(name):
            return f"{name}, compiled"
        return f"{name}, not compiled yet"
    except QuantkitError as error:
        return f"none: {error}"


def _choose_kernels(name: str | None) -> str:
    source = "" if name else f" in {SETTING}"
    name = name or os.environ.get(SETTING) or _find_fastest_shipped()
    if name not in (NATIVE, *VARIANTS):
        expected = ", ".join((NATIVE, *VARIANTS))
        raise RequestError(f"unknown CPU kernels{source}", found=name, expected=expected)
    if name != NATIVE and not runs_here(name):
        # Such a library would end the process with an illegal instruction.
        raise UnsupportedError(f"the processor lacks the instructions that the {name} kernels use")
    return name


def _find_fastest_shipped() -> str:
    """Find the fastest kernels that come with quantkit and run here, or else choose `NATIVE`."""
    for variant in VARIANTS:
        if runs_here(variant) and _find_shipped_library(variant):
            return variant
    return NATIVE


def compile_ahead() -> Thread:
    """Compile the kernels that `load_kernels` will choose, if need be, while the process does
    something else; the end of the process does not wait for it. What is wrong is for `load_kernels`
    to say.
    """

    def work() -> None:
        with suppress(QuantkitError):
            name = _choose_kernels(None)
            if not _find_shipped_library(name):
                ensure_compiled(name)

    # A daemon, so that the end of the process does not wait for the compiler.
    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


@functools.cache
def _load_once(name: str) -> CppOperators | UnsupportedError:
    """Load kernels, or return the error: a compiler that fails is not called again for every
    layer.
    """
    try:
        return _open(_find_shipped_library(name) or ensure_compiled(name), name)
    except UnsupportedError as error:
        return error
    except (OSError, AttributeError) as error:
        # ctypes raises `AttributeError` for a library without the functions.
        if _find_shipped_library(name):
            hint = "reinstall quantkit"
        else:
            hint = "name another folder in QUANTKIT_CACHE"
        return UnsupportedError(f"the compiled kernels cannot be loaded: {error}", hint=hint)


def _reduce_operators(operators: CppOperators) -> tuple[Any, ...]:
    """Tell pickle and `copy` to load the library again by its name."""
    return load_kernels, (operators.name,)


@functools.cache
def _open(path: Path, name: str) -> CppOperators:
    from quantkit.kernels.cpu_operators import CppOperators

    # Copies of a model share the library, which cannot be pickled.
    copyreg.pickle(CppOperators, _reduce_operators)
    operators = CppOperators(ctypes.CDLL(str(path)), name)
    # Native kernels call themselves by the instructions that they were compiled for.
    if name != NATIVE and operators.instructions() != name:
        raise UnsupportedError(
            "the library was compiled for other instructions",
            path=path,
            found=operators.instructions(),
            expected=name,
        )
    return operators


@functools.cache
def _find_shipped_library(name: str) -> Path | None:
    """Find the library that this installation of quantkit has; None if it has none, or, with a
    warning, a damaged one.
    """
    path = Path(str(files("quantkit.kernels"))) / "compiled" / f"{name}.so"
    if is_intact(path):
        return path
    if os.path.lexists(path):
        _log.warning("%s is damaged, and not used; reinstall quantkit", path)
    return None
