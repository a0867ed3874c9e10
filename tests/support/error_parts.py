"""Require errors by what they hold, their type and their parts, not by how they are worded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from quantkit.base.messages import Message, Option
from quantkit.errors import QuantkitError

Error = TypeVar("Error", bound=QuantkitError)


@contextmanager
def raises(
    error_type: type[Error] | tuple[type[Error], ...],
    *names: str,
    path: Path | None = None,
    found: object = None,
    expected: object = None,
    argument: str | None = None,
    options: Iterable[str] = (),
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Require that the block raises an error with these parts; what is None may be anything.

    Args:
        error_type: the type of the error, or several types of which it has one.
        names: the names of tensors, files, keys and values that its line contains, apart from the
            folder that its path is in: a folder of pytest's may contain any short one.
        path: the file or folder that it concerns.
        found, expected: its attributes of these names, compared as text.
        argument: the name of the argument that is wrong.
        options: the names of options that its line refers to, among others.
    """
    with pytest.raises(error_type) as caught:
        yield caught
    error = caught.value
    if path is not None:
        assert error.path is not None
        assert Path(error.path) == path
    if found is not None:
        assert str(error.found) == str(found)
    if expected is not None:
        assert str(error.expected) == str(expected)
    if argument is not None:
        assert error.argument == argument
    missing_options = set(options) - list_options(error.message)
    assert not missing_options, str(error)
    line = str(error)
    if error.path is not None:
        line = line.removeprefix(str(Path(error.path).parent))
    missing_names = [name for name in names if name not in line]
    assert not missing_names, str(error)


def list_options(text: str) -> set[str]:
    """List the names of the options that a message refers to; a plain string has none."""
    if not isinstance(text, Message):
        return set()
    return {part.name for part in text.parts if isinstance(part, Option)}
