"""Calls into the tokenizers' libraries, which panic, print and raise what they like on damaged files."""

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
def contained(path: Path, problem: str) -> Iterator[None]:
    """Whatever a library raises within is the fault of a file.

    Raises:
        CheckpointError: for it, a panic of Rust among it, which Python does not take for an `Exception`.
    """
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:
        raise CheckpointError(f"{problem}: {_short(error)}", path=path) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise CheckpointError(f"{problem}: its library failed: {_short(error)}", path=path) from error


def is_panic(error: BaseException) -> bool:
    """Whether Rust gave up; each library has a class of its own for that, which it does not export."""
    return type(error).__name__ == "PanicException"


@contextmanager
def quiet_on_failure() -> Iterator[None]:
    """Keep what libraries print on stderr back, and print it at the end unless an error leaves the block.

    Meant for short calls: it holds for all threads.
    """
    with _redirecting, tempfile.TemporaryFile() as kept:
        try:
            saved = os.dup(_STDERR)
        except OSError:  # there is none
            yield
            return
        _flush()
        os.dup2(kept.fileno(), _STDERR)
        try:
            yield
        except BaseException:
            kept.truncate(0)
            raise
        finally:
            _flush()
            os.dup2(saved, _STDERR)
            os.close(saved)
            kept.seek(0)
            if told := kept.read():
                os.write(_STDERR, told)


def _flush() -> None:
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()


def _short(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
