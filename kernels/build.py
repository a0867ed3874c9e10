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
    # These two change no result; without them exp stays scalar.
    "-fno-trapping-math",
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
    folder = os.environ.get("QUANTKIT_CACHE")
    if folder:
        return Path(folder)
    # By the XDG specification, an empty variable counts as one that is not set.
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(user_cache) / "quantkit"


def ensure_compiled(name: str) -> Path:
    """Compile the kernels for one of `VARIANTS`, or `NATIVE`, unless they are in the cache, and
    return the library. Raises `UnsupportedError` if there is no compiler, it fails, or the cache
    can't be written.
    """
    command, target = _plan_compilation(name)
    if is_intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            # Another process may be compiling the same library.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_intact(target):
                _log.info("compiling the CPU kernels, once for this machine")
                # A process that was killed leaves its folder behind.
                for stale_folder in target.parent.glob(f"{target.stem}.*/"):
                    shutil.rmtree(stale_folder, ignore_errors=True)
                # In the same folder as the target, because `os.replace` needs one file system.
                with tempfile.TemporaryDirectory(
                    prefix=f"{target.stem}.", dir=target.parent
                ) as folder:
                    library = Path(folder, "made.so")
                    compile_library(command, library)
                    seal(library, target)
    except OSError as error:
        raise UnsupportedError(
            f"the cache of compiled kernels can't be written: {error.strerror}",
            path=target.parent,
            hint="name another folder in QUANTKIT_CACHE",
        ) from error
    return target


def is_compiled(name: str) -> bool:
    """Check whether `ensure_compiled` would find the library in the cache.

    Raises `UnsupportedError` if there is no compiler.
    """
    _, target = _plan_compilation(name)
    return is_intact(target)


def seal(library: Path, target: Path) -> None:
    """Move a library to where it is kept, with its SHA-256 in a file next to it."""
    target.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    os.replace(library, target)


def is_intact(library: Path) -> bool:
    """Check that a library is there as `seal` left it: a truncated one would end the process
    when it is loaded.
    """
    try:
        expected = library.with_suffix(".sha256").read_text()
        actual = hashlib.sha256(library.read_bytes()).hexdigest()
        return expected == actual
    except (OSError, ValueError):
        return False


def _plan_compilation(name: str) -> tuple[list[str], Path]:
    """Find a compiler; return the command that compiles the kernels, and their cached path."""
    # CXX may include arguments, such as "zig c++".
    compiler = shlex.split(os.environ.get("CXX", "")) or _find_compiler()
    if not compiler:
        raise UnsupportedError(
            "there is no C++ compiler", hint="install g++ or clang++, or name one in CXX"
        )
    if name in VARIANTS:
        flags = VARIANTS[name].flags
    else:
        flags = _NATIVE_FLAGS
    command = [*compiler, *flags]
    # They identify the compiler's version and, with "native", the processor's instructions.
    predefined_macros = _run([*command, "-E", "-dM", "-x", "c++", os.devnull])
    sources = []
    for path in sorted(_SOURCES.iterdir()):
        sources.append((path.name, path.read_bytes()))
    # A new version of quantkit, of the compiler or another processor gets another file. The
    # compiler's own path does not matter.
    key = hashlib.sha256(repr((predefined_macros, _FLAGS, command[1:], sources)).encode())
    return command, cache_folder() / f"quantkit-{name}-{key.hexdigest()[:32]}.so"


def _find_compiler() -> list[str]:
    """Look for the system's C++ compilers; return the path of the first, or an empty list."""
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return [path]
    return []


def compile_library(command: Sequence[str], target: Path) -> None:
    """Compile the kernels with a compiler and its flags for an instruction set. Raises
    `UnsupportedError` if it fails.
    """
    objects = {}
    for source in _SOURCES.glob("*.cpp"):
        objects[str(source)] = f"{target}.{source.stem}.o"
    compile_commands = []
    for source_path, object_path in objects.items():
        compile_commands.append([*command, *_FLAGS, "-c", source_path, "-o", object_path])
    _run(*compile_commands)
    _run([*command, "-shared", "-pthread", *objects.values(), "-o", str(target)])


def _run(*commands: list[str]) -> str:
    """Run commands at the same time, and return what the last one prints."""
    running: list[tuple[str, subprocess.Popen[str]]] = []
    for command in commands:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running.append((command[0], process))
        except OSError as error:
            problem = f"the C++ compiler cannot be started: {error.strerror}"
            raise UnsupportedError(problem, path=command[0], hint=_HINT) from error
    printed = [process.communicate() for _, process in running]
    for (compiler, process), (_, errors) in zip(running, printed, strict=True):
        if process.returncode:
            # A compiler reports a full disk only by the system's message among its own.
            full = os.strerror(errno.ENOSPC) in errors
            if full:
                hint = "free some space, or name other folders in QUANTKIT_CACHE and TMPDIR"
            else:
                hint = _HINT
            lines = [line for line in errors.splitlines() if "error" in line] or ["no reason given"]
            raise UnsupportedError(f"the C++ compiler failed: {lines[0]}", path=compiler, hint=hint)
    return printed[-1][0]
