"""Compile the C++ kernels on first use, into a cache.

The sources ship with the package. The binary depends on the machine and its torch, so it is built where it runs;
later processes find it in the cache.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RequestError, UnsupportedError

VARIANTS = {
    "native": ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",),
    "avx2": ("-march=x86-64-v3",),
    "portable": ("-DQUANTKIT_PORTABLE",),
}
"""Compiler flags by the instruction set they choose."""

_SOURCES = files("quantkit.kernels") / "csrc"
_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-w",
    "-fno-trapping-math", "-fno-math-errno",  # change no result; without them exp stays scalar
)  # fmt: skip
_log = logging.getLogger(__name__)


def load_kernels(variant: str) -> Any:
    """Compile and load one variant; its operators.

    Raises:
        RequestError: if there is no such variant.
        UnsupportedError: if there is no compiler, it fails, or the cache can't be written.
    """
    if variant not in VARIANTS:
        raise RequestError("unknown variant of the CPU kernels", found=variant, expected=", ".join(VARIANTS))
    operators = _loaded(variant)
    if isinstance(operators, UnsupportedError):
        raise operators
    return operators


@functools.cache
def _loaded(variant: str) -> Any:
    """The operators, or the error: a compiler that fails is not called again for every layer."""
    try:
        return _load(variant)
    except UnsupportedError as error:
        return error


def _load(variant: str) -> Any:
    library = f"quantkit_cpu_{variant}"
    try:
        torch.ops.load_library(_compiled(library, VARIANTS[variant]))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UnsupportedError(f"the compiled kernels do not load: {error}") from error
    for name, shape in _SHAPES.items():
        torch.library.register_fake(f"{library}::{name}", shape)
    return getattr(torch.ops, library)


def _linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _rows_shape(packed: Tensor, index: Tensor, columns: int) -> Tensor:
    return packed.new_empty(*index.shape, columns, dtype=torch.float32)


def _cached_attention_shape(
    queries: Tensor, keys: Tensor, key_scales: Tensor | None, values: Tensor, value_scales: Tensor | None,
    positions: Tensor, slots: Tensor | None, window: int, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, heads, tokens, size = queries.shape
    return queries.new_empty(batch, tokens, heads * size)


def _in_place(*operands: Any) -> None:
    """Updates its first operand and gives nothing."""


def _float_linear_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``QUANTKIT_CACHE``, or ``quantkit`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUANTKIT_CACHE") or Path(base) / "quantkit")


def _as_first(first: Tensor, *operands: Any) -> Tensor:
    """Gives what is like its first operand."""
    return torch.empty_like(first)


_SHAPES: dict[str, Callable[..., Any]] = {
    "linear": _linear_shape,
    "rows": _rows_shape,
    "cached_attention": _cached_attention_shape,
    "float_linear": _float_linear_shape,
    "block": _in_place,
    "experts": _as_first,
}
"""The shapes that operators return, for tracing."""


def _compiled(library: str, variant: tuple[str, ...]) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnsupportedError("there is no C++ compiler", hint="install g++ or clang++, or name one in CXX")
    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    flags = (*_FLAGS, *variant, f"-DQUANTKIT_LIBRARY={library}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
    torch_flags = (f"-isystem{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10")
    sources = {Path(entry.name): entry.read_bytes() for entry in sorted(_SOURCES.iterdir(), key=lambda e: e.name)}
    known = _run([compiler, *variant, "-E", "-dM", "-x", "c++", os.devnull])  # the compiler and the processor
    key = hashlib.sha256(repr((known, flags, torch.__version__, sorted(sources.items()))).encode())
    target = cache_folder() / f"{library}-{key.hexdigest()[:32]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
            if not target.exists():
                _log.info("compiling the CPU kernels, once for this machine and this torch")
                _build([compiler, *flags], torch_flags, sources, target)
    except OSError as error:
        raise UnsupportedError(
            f"the cache of compiled kernels can't be written: {error.strerror}", path=target.parent,
            hint="name another folder in QUANTKIT_CACHE",
        ) from error  # fmt: skip
    return target


def _build(command: list[str], torch_flags: tuple[str, ...], sources: dict[Path, bytes], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for name, text in sources.items():
            Path(folder, name).write_bytes(text)
        _run([*command, str(Path(folder, "ops.cpp")), *torch_flags, "-o", str(Path(folder, "ops.so"))])
        os.replace(Path(folder, "ops.so"), target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UnsupportedError(f"the C++ compiler does not start: {error.strerror}", path=command[0]) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
        raise UnsupportedError(f"the C++ compiler failed: {lines[0]}", path=command[0])
    return done.stdout
