"""Compile the C++ kernels on first use, into a cache.

The sources ship with the package. The binary depends on the machine and its torch, so it is built where it runs;
later processes find it in the cache.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import RequestError, UnsupportedError

VARIANTS = {
    "native": ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",),
    "avx2": ("-march=x86-64-v3",),
    "portable": ("-DQUANTKIT_PORTABLE",),
}
"""Compiler flags by the instruction set they choose."""

VARIANT_SETTING = "QUANTKIT_CPU"
"""Environment variable that chooses the instruction set: native, avx2 or portable."""

_SOURCES = files("quantkit.kernels") / "csrc"
_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-w",
    "-fno-trapping-math", "-fno-math-errno",  # change no result; without them exp stays scalar
)  # fmt: skip
_log = logging.getLogger(__name__)


def load_kernels(variant: str, source: str = "ops") -> Any:
    """Compile one variant of ``csrc/SOURCE.cpp`` and load it: torch's operators, or from other sources than ``ops``
    functions that do not use torch. Raises `RequestError` if there is no such variant, and `UnsupportedError` if there
    is no compiler, it fails, or the cache can't be written."""
    if variant not in VARIANTS:
        raise RequestError("unknown variant of the CPU kernels", found=variant, expected=", ".join(VARIANTS))
    found = _load_once(source, variant)
    if isinstance(found, UnsupportedError):
        raise found
    return found


@functools.cache
def _load_once(source: str, variant: str) -> Any:
    """The loaded library or the error: a compiler that fails is not called again for every layer."""
    try:
        if source == "ops":
            return _load_operators(variant)
        return ctypes.CDLL(str(_compiled(source, f"quantkit_{source}_{variant}", variant)))
    except UnsupportedError as error:
        return error
    except OSError as error:
        return UnsupportedError(f"the compiled kernels do not load: {error}")


def _load_operators(variant: str) -> Any:
    library, home = f"quantkit_cpu_{variant}", Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    flags = f"-DQUANTKIT_LIBRARY={library}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"
    linked = f"-isystem{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"
    torch.ops.load_library(_compiled("ops", library, variant, flags, linked))  # type: ignore[no-untyped-call]
    for name, shape in _SHAPES.items():
        torch.library.register_fake(f"{library}::{name}", shape)
    return getattr(torch.ops, library)


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``QUANTKIT_CACHE``, or ``quantkit`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUANTKIT_CACHE") or Path(base) / "quantkit")


_SHAPES: dict[str, Callable[..., Any]] = {
    "linear": lambda x, packed, bias, rows: x.new_empty(*x.shape[:-1], rows),
    "rows": lambda packed, index, columns: packed.new_empty(*index.shape, columns, dtype=torch.float32),
    "cached_attention": lambda q, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1] * q.shape[3]),
    "float_linear": lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]),
    "block": lambda *operands: None,  # updates its first operand
    "experts": lambda rows, *operands: torch.empty_like(rows),
}
"""What operators return, for tracing."""


def _compiled(source: str, library: str, variant: str, more: Sequence[str] = (), linked: Sequence[str] = ()) -> Path:
    """The library compiled from ``csrc/SOURCE.cpp``, with `more` flags and those `linked` after the source."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnsupportedError("there is no C++ compiler", hint="install g++ or clang++, or name one in CXX")
    flags = (*_FLAGS, *VARIANTS[variant], *more)
    sources = {Path(entry.name): entry.read_bytes() for entry in sorted(_SOURCES.iterdir(), key=lambda e: e.name)}
    known = _run([compiler, *VARIANTS[variant], "-E", "-dM", "-x", "c++", os.devnull])  # the compiler and the processor
    key = hashlib.sha256(repr((known, flags, torch.__version__, sorted(sources.items()))).encode())
    target = cache_folder() / f"{library}-{key.hexdigest()[:32]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling
            if not target.exists():
                _log.info("compiling the CPU kernels, once for this machine and this torch")
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    for name, text in sources.items():
                        Path(folder, name).write_bytes(text)
                    made = f"{folder}/made.so"
                    _run([compiler, *flags, f"{folder}/{source}.cpp", *linked, "-o", made])
                    os.replace(made, target)
    except OSError as error:
        raise UnsupportedError(
            f"the cache of compiled kernels can't be written: {error.strerror}", path=target.parent,
            hint="name another folder in QUANTKIT_CACHE",
        ) from error  # fmt: skip
    return target


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UnsupportedError(f"the C++ compiler does not start: {error.strerror}", path=command[0]) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
        raise UnsupportedError(f"the C++ compiler failed: {lines[0]}", path=command[0])
    return done.stdout
