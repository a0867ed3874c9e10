"""Messages that name options of a job, which each front end spells in its own way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """Refer to an option of a job in a message.

    Attributes:
        name: the name of the Python argument, such as ``activation_memory``.
        value: the value to give it; None refers to the option without a value.
        metavar: a placeholder for a value that the reader has to choose, such as ``FILE``.
        job: the job that has the option, if it is another one than the job that is running; empty
            if the text around the option says which it is.
    """

    name: str
    value: bool | int | float | str | None = None
    metavar: str | None = None
    job: str | None = None

    def __str__(self) -> str:
        """Spell the option as in a Python call."""
        text = f"`{self.name}`"
        if self.metavar is not None:
            text = f"`{self.name}={self.metavar}`"
        elif isinstance(self.value, str):
            text = f'`{self.name}="{self.value}"`'
        elif self.value is not None:
            text = f"`{self.name}={self.value}`"
        if not self.job:
            return text
        return f"{text} of {self.job}"


class Message(str):
    """A line of text in which options are data: as a string, it spells them as Python does.

    >>> message = Message("round it with ", Option("method", "rtn"))
    >>> str(message)
    'round it with `method="rtn"`'
    >>> message.render(lambda option: f"{option.name}: {option.value}")
    'round it with method: rtn'

    Formatting a message into another string loses the options; pass it as a part of a `Message`
    instead.
    """

    parts: tuple[str | Option, ...]

    def __new__(cls, *parts: str | Option) -> Message:
        """Join strings, options and other messages."""
        flat: list[str | Option] = []
        for part in parts:
            if isinstance(part, Message):
                flat.extend(part.parts)
            else:
                flat.append(part)
        # A string is immutable, so its text is set here and not in `__init__`.
        message = super().__new__(cls, "".join(map(str, flat)))
        message.parts = tuple(flat)
        return message

    def __add__(self, other: str) -> Message:
        """Append a string or another message."""
        return Message(self, other)

    def removeprefix(self, prefix: str, /) -> Message:
        """Remove a prefix that contains no option, as `str.removeprefix` does."""
        first, *rest = self.parts or ("",)
        if isinstance(first, str):
            first = first.removeprefix(prefix)
        return Message(first, *rest)

    def render(self, spell: Callable[[Option], str]) -> str:
        """Spell each option as a front end does, and join the parts to a text."""
        texts: list[str] = []
        for part in self.parts:
            if isinstance(part, Option):
                texts.append(spell(part))
            else:
                texts.append(part)
        return "".join(texts)

    def join_lines(self) -> Message:
        """Put the message in one line: each run of whitespace becomes a space."""
        parts: list[str | Option] = []
        for part in self.parts:
            if isinstance(part, Option):
                parts.append(part)
            else:
                parts.append(re.sub(r"\s+", " ", part))
        # Whitespace at the ends of inner parts separates them from options.
        if parts and isinstance(parts[0], str):
            parts[0] = parts[0].lstrip()
        if parts and isinstance(parts[-1], str):
            parts[-1] = parts[-1].rstrip()
        return Message(*parts)


def join_messages(separator: str, messages: Iterable[str]) -> Message:
    """Join strings and messages as `str.join` does, and keep the options of the messages."""
    parts: list[str | Option] = []
    for message in messages:
        if parts:
            parts.append(separator)
        parts.append(message)
    return Message(*parts)
