"""Compile the C++ kernels on first use, into a cache, where quantkit comes without compiled ones.

They are functions of C that know nothing of torch or Python, so a library serves all versions of
both.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from quantkit.errors import UnsupportedError
from quantkit.kernels.variants import VARIANTS

NATIVE = "native"
"""The name of the kernels for the instruction set of this machine."""

_SOURCES = Path(str(files("quantkit.kernels"))) / "csrc"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-w",
    "-fno-trapping-math",
    # Change no result; without them exp stays scalar.
    "-fno-math-errno",
)
if platform.machine() in ("aarch64", "arm64"):
    _NATIVE_FLAGS = ("-mcpu=native",)
else:
    _NATIVE_FLAGS = ("-march=native",)
_HINT = "name one for C++20 in CXX"
_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return where compiled kernels are kept: ``QUANTKIT_CACHE``, or ``quantkit`` in the user's
    cache folder.
    """
    if named := os.environ.get("QUANTKIT_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "quantkit"


def ensure_compiled(name: str) -> Path:
    """Return the library of the kernels for one of `VARIANTS`, or `NATIVE`; compiled unless it is
    in the cache. Raises `UnsupportedError` if there is no compiler, it fails, or the cache can't be
    written.
    """
    command, target = _library(name)
    if intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            # Another process may be compiling.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not intact(target):
                _log.info("compiling the CPU kernels, once for this machine")
                for path in target.parent.glob(f"{target.stem}.*/"):
                    shutil.rmtree(path, ignore_errors=True)  # by a process that was killed
                with tempfile.TemporaryDirectory(
                    prefix=f"{target.stem}.", dir=target.parent
                ) as folder:
                    made = Path(folder, "made.so")
                    compile_library(command, made)
                    seal(made, target)
    except OSError as error:
        raise UnsupportedError(
            f"the cache of compiled kernels can't be written: {error.strerror}",
            path=target.parent,
            hint="name another folder in QUANTKIT_CACHE",
        ) from error
    return target


def is_compiled(name: str) -> bool:
    """Return whether `compiled` finds the library in the cache.

    Raises `UnsupportedError` if there is no compiler.
    """
    return intact(_library(name)[1])


def seal(library: Path, target: Path) -> None:
    """Move a library to where it is kept, with its SHA-256 in a file next to it."""
    target.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    os.replace(library, target)


def intact(library: Path) -> bool:
    """Return whether a library is there as `seal` left it: a truncated one would end the process
    when it is loaded.
    """
    try:
        return (
            library.with_suffix(".sha256").read_text()
            == hashlib.sha256(library.read_bytes()).hexdigest()
        )
    except (OSError, ValueError):
        return False


def _library(name: str) -> tuple[list[str], Path]:
    """Return the command that compiles the kernels, and where in the cache they are."""
    found = filter(None, map(shutil.which, ("c++", "g++", "clang++")))
    compiler = shlex.split(os.environ.get("CXX", "")) or list(found)[:1]
    if not compiler:
        raise UnsupportedError(
            "there is no C++ compiler", hint="install g++ or clang++, or name one in CXX"
        )
    command = [*compiler, *(VARIANTS[name].flags if name in VARIANTS else _NATIVE_FLAGS)]
    # The compiler and the processor.
    known = _run([*command, "-E", "-dM", "-x", "c++", os.devnull])
    sources = [(path.name, path.read_bytes()) for path in sorted(_SOURCES.iterdir())]
    key = hashlib.sha256(repr((known, _FLAGS, command[1:], sources)).encode())
    return command, cache_folder() / f"quantkit-{name}-{key.hexdigest()[:32]}.so"


def compile_library(command: Sequence[str], target: Path) -> None:
    """Compile the kernels with a compiler and its flags for an instruction set. Raises
    `UnsupportedError` if it fails.
    """
    objects = {}
    for source in _SOURCES.glob("*.cpp"):
        objects[str(source)] = f"{target}.{source.stem}.o"
    _run(*([*command, *_FLAGS, "-c", source, "-o", object_] for source, object_ in objects.items()))
    _run([*command, "-shared", "-pthread", *objects.values(), "-o", str(target)])


def _run(*commands: list[str]) -> str:
    """Run commands at the same time; what the last prints."""
    running: list[tuple[str, subprocess.Popen[str]]] = []
    for command in commands:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running.append((command[0], process))
        except OSError as error:
            problem = f"the C++ compiler does not start: {error.strerror}"
            raise UnsupportedError(problem, path=command[0], hint=_HINT) from error
    printed = [process.communicate() for _, process in running]
    for (compiler, process), (_, errors) in zip(running, printed, strict=True):
        if process.returncode:
            full = os.strerror(errno.ENOSPC) in errors
            if full:
                hint = "free some space, or name other folders in QUANTKIT_CACHE and TMPDIR"
            else:
                hint = _HINT
            lines = [line for line in errors.splitlines() if "error" in line] or ["no reason given"]
            raise UnsupportedError(f"the C++ compiler failed: {lines[0]}", path=compiler, hint=hint)
    return printed[-1][0]
