"""Errors of code that is not quantkit's, in one line."""

from __future__ import annotations

from quantkit.base.foreign_errors import describe_foreign_error


def test_a_message_is_whole_and_in_one_line() -> None:
    message = "The expanded size of the tensor (128) must match\n  the existing size (64) at 3."
    described = describe_foreign_error(RuntimeError(message))
    assert described == f"RuntimeError: {' '.join(message.split())}"
    assert describe_foreign_error(KeyError()) == "KeyError"


def test_a_long_message_ends_after_a_whole_word() -> None:
    described = describe_foreign_error(ValueError("word " * 1000))
    assert set(described.removeprefix("ValueError: ").split()) == {"word", "..."}
    assert len(described) < 1000


def test_control_characters_are_spelled() -> None:
    assert describe_foreign_error(ValueError("\x1b[31mred")) == r"ValueError: \x1b[31mred"
