"""Triton's interpreter, without most of its time: what it works out anew at every call is worked
out once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from quantkit.kernels.triton_words import INTERPRETED

_patch_attr = interpreter._patch_attr
_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_new_block_type = tl.block_type.__init__
_unwrap = tl.core._unwrap_if_constexpr
_semantic = interpreter.TritonSemantic
_cast = _semantic.cast
_broadcast = _semantic.broadcast_impl_value
_operands = _semantic.binary_op_type_checking_impl
_PLAIN = {
    id(dtype)
    for dtype in (
        tl.int8,
        tl.int16,
        tl.int32,
        tl.int64,
        tl.uint8,
        tl.uint16,
        tl.uint32,
        tl.uint64,
        tl.float16,
        tl.bfloat16,
        tl.float32,
        tl.float64,
    )
}
"""What two operands of it are computed in without a cast, by `id`."""
_patched: set[int] = set()
"""The modules of Triton's language, by `id`, that the kernel now running has patched."""


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """The interpreter's own looks at all members of a package."""
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            _patch_attr(package, name, member, builder, scope)


class _Scope(interpreter._LangPatchScope):
    """Of a kernel: what is patched for the functions that it calls is patched until its end."""

    def restore(self) -> None:
        super().restore()
        _patched.clear()


@cache
def _languages(function: Callable[..., Any]) -> frozenset[int]:
    return frozenset(
        id(value) for value in function.__globals__.values() if value is tl or value is tl.core
    )


def _patch_once(function: Callable[..., Any]) -> Any:
    """The interpreter's own patches the language again for each function that a kernel calls."""
    scope = _Scope()
    if not (languages := _languages(function)) or not languages <= _patched:
        scope._changes = _patch_lang(function)._changes
        _patched.update(languages)
    return scope


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    if type(element_ty) is not tl.dtype:  # pointers are not hashable
        _new_block_type(self, element_ty, shape)
    else:
        sizes = tuple([size if type(size) is int else size.value for size in shape])
        self.__dict__.update(_block_type(element_ty, sizes))


@cache
def _block_type(element: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    made = object.__new__(tl.block_type)
    _new_block_type(made, element, list(sizes))
    return vars(made)


@cache
def _np_dtype(element: Any) -> Any:
    return _get_np_dtype(element)


def _scalar_np_dtype(given: Any) -> Any:
    element = given.element_ty if type(given) is tl.block_type else given
    return _np_dtype(element) if type(element) is tl.dtype else _get_np_dtype(given)


@cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.core.constexpr(math.prod(sizes)), tl.core.tuple(
        [tl.core.constexpr(size) for size in sizes]
    )


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape_of(tuple(type.shape) if type.is_block() else ())


def _unwrap_if_constexpr(given: Any) -> Any:
    kind = type(given)
    if kind is tl.tensor or kind is int:
        return given
    return given.value if kind is tl.core.constexpr else _unwrap(given)


def _cast_if_needed(self: Any, value: Any, dtype: Any, rounding: str | None = None) -> Any:
    return value if value.type.scalar is dtype.scalar else _cast(self, value, dtype, rounding)


def _broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
    if (
        left.type.is_block() == right.type.is_block()
        and left.handle.data.shape == right.handle.data.shape
    ):
        return left, right
    return _broadcast(self, left, right)


def _operands_of(
    self: Any,
    left: Any,
    right: Any,
    left_ptr: bool = False,
    right_ptr: bool = False,
    arithmetic: bool = True,
    division: bool = False,
) -> Any:
    same = type(left) is type(right) is tl.tensor and left.dtype is right.dtype
    if same and not division and id(left.dtype) in _PLAIN:
        return _broadcast_if_needed(self, left, right)
    return _operands(self, left, right, left_ptr, right_ptr, arithmetic, division)


def _no_overflow(*_: Any) -> None:
    """The interpreter's own works out whether integers overflow, for an assertion that it leaves
    out.
    """


def quicken() -> None:
    """Only where kernels are interpreted."""
    if INTERPRETED and interpreter._patch_lang is _patch_lang:
        interpreter._patch_builtin = _patch_builtin
        interpreter._patch_lang = _patch_once
        interpreter._get_np_dtype = _scalar_np_dtype
        tl.block_type.__init__ = _init_block_type
        tl.tensor.__init__ = _init_tensor
        tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
        _semantic.cast = _cast_if_needed
        _semantic.broadcast_impl_value = _broadcast_if_needed
        _semantic.binary_op_type_checking_impl = _operands_of
        if not interpreter.InterpreterOptions().debug:
            _semantic.binary_op_sanitize_overflow_impl = _no_overflow
