"""Describe errors of code that is not quantkit's, such as a model's own code or a driver."""

from __future__ import annotations

import textwrap

from quantkit.base.json_values import spell_control_characters

# The messages of torch about shapes and devices fit; dumps of whole configs do not.
_WIDTH = 300


def describe_foreign_error(error: BaseException) -> str:
    """Describe an error in one line by its type and message; a long message ends with " ..." after
    a whole word.
    """
    message = textwrap.shorten(str(error), _WIDTH, placeholder=" ...")
    if not message:
        return type(error).__name__
    return f"{type(error).__name__}: {spell_control_characters(message)}"
