"""Options in messages: the library names Python's arguments, the command line its own options."""

from __future__ import annotations

import re

_RENAMED = {"runtime": "for"}  # a keyword of Python
_POSITIONAL = ("path", "src", "dst")
_ARGUMENT = re.compile(r"`(?P<name>[a-z]\w*)(?:=(?P<value>[^`]*))?`")


def as_options(text: str) -> str:
    """A message of the library with the command line's options.

    In such messages an argument stands in backquotes: `` `resume=True` `` becomes ``--resume``,
    `` `source_check=False` `` becomes ``--no-source-check``, `` `to="meta"` `` becomes ``--to meta``, and a bare name
    becomes its option, or its argument, such as ``SRC``.
    """
    return _ARGUMENT.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if name in _POSITIONAL:
        return name.upper()
    name = _RENAMED.get(name, name).replace("_", "-")
    if value in (None, "True"):
        return f"--{name}"
    if value == "False":
        return f"--no-{name}"
    return f"--{name} {value.strip(chr(34))}"
