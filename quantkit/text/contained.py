"""Contain calls into the tokenizers' libraries, which panic, print, and raise any error on damaged
files.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import CheckpointError, QuantkitError

_STDERR = 2
_redirecting = threading.Lock()


@contextmanager
def convert_library_errors(path: Path, problem: str) -> Iterator[None]:
    """Raise any error of a library as a `CheckpointError` of a file, also a panic of Rust, which is
    not an `Exception`.
    """
    try:
        yield
    except QuantkitError:
        raise
    except BaseException as error:
        # Ctrl-C and an exit are not the library's.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        if isinstance(error, Exception):
            library = ""
        else:
            library = "its library failed: "
        raise CheckpointError(f"{problem}: {library}{reason}", path=path) from error


def is_panic(error: BaseException) -> bool:
    """Return whether Rust panicked; each library has its own class for that, which it does not
    export.
    """
    return type(error).__name__ == "PanicException"


@contextmanager
def quiet_on_failure() -> Iterator[None]:
    """Hold back what libraries print on stderr, and print it at the end unless the block raises an
    error.

    For short calls: it affects all threads.
    """
    # Libraries in C++ and Rust write to the file descriptor and not to `sys.stderr`.
    with _redirecting, tempfile.TemporaryFile() as captured:
        try:
            saved = os.dup(_STDERR)
        except OSError:
            # The process has no stderr.
            yield
            return
        _flush()
        os.dup2(captured.fileno(), _STDERR)
        try:
            yield
        except BaseException:
            captured.truncate(0)
            raise
        finally:
            _flush()
            os.dup2(saved, _STDERR)
            os.close(saved)
            captured.seek(0)
            printed = captured.read()
            if printed:
                os.write(_STDERR, printed)


def _flush() -> None:
    # A program without a console has no `sys.stderr`.
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
