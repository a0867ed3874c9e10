"""The target format of a job: the requested one, or the one that follows from the source."""

from __future__ import annotations

import sys
from pathlib import Path

from quantkit.arguments import as_integer, as_string
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import read_as_floats, schemes
from quantkit.formats.codecs.table import NATIVE as native
from quantkit.formats.container import Container, StoredCheckpoint
from quantkit.formats.registry import GGUF, HF, Target, target, targets

NATIVE = native.name
"""The target of quantized models by default."""


def requested_target(to: str | None, dst: Path, *, dequantize: bool = False, requantize: bool = False) -> Target | None:
    """The requested target, by name or by the suffix of the destination; None if it follows from the source.

    Raises:
        RequestError: for an unknown name, and for requests that contradict each other.
    """
    if dequantize and requantize:
        raise RequestError("`dequantize=True` and `requantize=True` exclude each other")
    found = None if to is None else target(as_string("to", to))
    if dst.suffix.lower() == f".{GGUF.name}":
        if found is not None and found.name != GGUF.name:
            raise RequestError(
                f"the destination is a GGUF file by its name, and `to=\"{found.name}\"` requests a folder",
                found=str(dst), hint="choose a name without .gguf, or leave `to` out",
            )  # fmt: skip
        found = target(GGUF.name)
    if found is None:
        return None
    for given, name, allowed in (
        (dequantize, "dequantize", found.floats), (requantize, "requantize", found.codes is not None),
    ):  # fmt: skip
        if given and not allowed:
            able = [one.name for one in targets().values() if (one.floats if dequantize else one.codes is not None)]
            raise RequestError(f'`{name}=True` does not go with `to="{found.name}"`', expected=", ".join(able))
    return found


def target_of(source: StoredCheckpoint, *, dequantize: bool) -> Target:
    """The default target of a source: floats as Hugging Face folders, codes as they lie there
    if that is written, else as compressed-tensors."""
    if dequantize or not (schemes(source) or read_as_floats(source)):
        return target(HF.name)
    own = targets().get(source.method or "")
    return own if own is not None and own.method is not None else target(NATIVE)


def quantized_target(to: str | None, dst: Path) -> Target:
    """As what a model is quantized.

    Raises:
        RequestError: for what holds floats only; see also `requested_target`.
    """
    found = requested_target(to, dst) or target(NATIVE)
    if found.codes is None:
        able = ", ".join(one.name for one in targets().values() if one.codes is not None)
        raise RequestError(f'`to="{found.name}"` is a format of floats', expected=able)
    return found


def shard_bytes(asked: int | None, container: Container, default: int) -> int:
    """The bytes of the largest file of weights.

    Args:
        default: if nothing was requested, and the container has several files.

    Raises:
        RequestError: for no size that a file can have, or a container whose files are not cut by size.
    """
    if asked is None:
        return sys.maxsize if container.one_file else default
    size = as_integer("split_max_size", asked)
    if size <= 0:
        raise RequestError("`split_max_size` must be positive", found=size)
    if container.model_parallel:
        raise RequestError(
            f'`split_max_size` does not go with `to="{container.name}"`', hint="`mp` says how many files"
        )
    return size
