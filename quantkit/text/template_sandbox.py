"""Where chat templates run: Jinja's sandbox, with what `transformers` documents for templates, and an end to what they
may do.

A template comes with a model that somebody else has made. The sandbox keeps it from the machine; what it counts here
keeps it from running for ever, and from making texts of any size out of a small one.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

LONGEST = 1 << 22
"""Letters of a rendered conversation, and letters, items or digits of anything that a template makes."""
_MOST_STEPS = 1 << 21  # a few seconds
_LETTERS_A_STEP = 1 << 12
_LARGEST_POWER, _LARGEST_FACTOR = 64, 4096  # the latter in bits
_COUNTED, _JOINED = "quantkit_counted", "quantkit_joined"
_PASS_ON = {
    "attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map",
    "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique",
}  # fmt: skip
"""Filters that make no text of the lists they are given."""
_TAKE_WIDTHS = ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "wordwrap", "zfill")


class Refusal(Exception):
    """What a template raises about a conversation that it does not take."""


class Unbounded(Exception):
    """A template does more than any chat template has a use for."""


class _Steps:
    """What is left to a template that is being rendered: turns of loops, calls, and letters that are copied."""

    def __init__(self) -> None:
        self._left = _MOST_STEPS

    def take(self, size: int = 0) -> None:
        """Take one step, and those for letters or items of something that is made.

        Raises:
            Unbounded: if there are none left, or it is too large.
        """
        if size > LONGEST:
            raise Unbounded(f"makes something of more than {LONGEST} letters or items")
        self._left -= 1 + size // _LETTERS_A_STEP
        if self._left < 0:
            raise Unbounded("takes more steps than any conversation needs")


_steps: ContextVar[_Steps] = ContextVar("steps")


@contextmanager
def bounded() -> Iterator[None]:
    """The bounds of compiling a template, or of one rendering.

    Raises:
        Unbounded: within, where a template goes beyond them.
    """
    token = _steps.set(_Steps())
    try:
        yield
    finally:
        _steps.reset(token)


class _Counted:
    """What a loop goes over, its turns counted; its length is known where it was."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        steps = _steps.get()
        for item in self._items:
            steps.take()
            yield item

    def __len__(self) -> int:
        if isinstance(self._items, Sized):
            return len(self._items)
        raise TypeError("of no known length")


def environment() -> Any:
    """A sandbox; what it compiles and renders is to be within `bounded`."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what a model is trained on; here it is text as any other."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Bounded(ImmutableSandboxedEnvironment):
        """Counts what a template does, and looks at the size of what it makes."""

        intercepted_binops = frozenset(["+", "*", "**", "%"])

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            template = super()._parse(source, name, filename)
            for loop in template.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None)
            for joined in template.find_all(nodes.Concat):
                joined.nodes = [nodes.Filter(nodes.List(joined.nodes), _JOINED, [], [], None, None)]
            for block in template.find_all(nodes.AssignBlock):
                block.filter = nodes.Filter(block.filter, "string", [], [], None, None)
            return template

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(__obj, LoopContext):  # a loop that is entered anew
                args = (_Counted(args[0]), *args[1:])
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # Jinja wraps `str.format`
            given = (owner, *args) if isinstance(owner, str) else args
            _steps.get().take(_size(getattr(__obj, "__name__", ""), [*given, *kwargs.values()]))
            return _taken(super().call(__context, __obj, *args, **kwargs))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _steps.get().take(_size_of_operation(operator, left, right))
            return super().call_binop(context, operator, left, right)

    made = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_shown)
    made.filters["tojson"] = _to_json
    made.filters[_JOINED] = lambda items: "".join(map(str, items))
    made.filters = {name: _watched(name, filter) for name, filter in made.filters.items()}
    made.filters[_COUNTED] = _Counted
    del made.globals["lipsum"]
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = _now
    return made


def _watched(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter, of which arguments and result are looked at."""

    @functools.wraps(filter)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if name in ("join", _JOINED):
            args = tuple(_listed(one) if isinstance(one, Iterator) else one for one in args)
        given = [*args, *kwargs.values()]
        _steps.get().take(_size(name, given))
        if name not in _PASS_ON:
            for one in given:
                _shown(one)
        return _taken(filter(*args, **kwargs))

    return watched


def _listed(items: Iterator[Any]) -> list[Any]:
    listed, size = [], 0
    for item in items:
        listed.append(item)
        size += 1 + (len(item) if isinstance(item, _SIZED) else 0)
        _steps.get().take(size if size > LONGEST else 0)
    return listed


def _shown(value: Any) -> Any:
    """What is made a text of, once all that it holds has been counted; lists may hold one another many times over."""
    within = [value] if isinstance(value, (list, tuple, dict)) else []
    while within:
        one = within.pop()
        _steps.get().take(len(one) if isinstance(one, str) else 0)
        if isinstance(one, (list, tuple)):
            within += one
        elif isinstance(one, dict):
            within += [*one, *one.values()]
    return value


def _taken(made: Any) -> Any:
    """What was made, once its size has been counted."""
    if isinstance(made, _SIZED):
        _steps.get().take(len(made))
    return made


_SIZED = (str, list, tuple, dict)


def _size(name: str, args: Sequence[Any]) -> int:
    """At most so many letters or items does a filter or a method of texts make, as far as its arguments tell."""
    size = sum(len(one) for one in args if isinstance(one, _SIZED))
    texts = [one for one in args if isinstance(one, str)]
    if name in _TAKE_WIDTHS:
        size += sum(one for one in args if isinstance(one, int))
    elif name in ("format", "format_map"):
        size += sum(_width(text, args) for text in texts)
    elif name == "replace" and len(texts) == 3:
        size += texts[0].count(texts[1]) * len(texts[2])
    elif name in ("join", _JOINED):
        for items in (one for one in args if isinstance(one, (list, tuple))):
            size += sum(len(one) for one in items if isinstance(one, str)) + len(items) * sum(map(len, texts))
    return size


def _size_of_operation(operator: str, left: Any, right: Any) -> int:
    """Letters, items or digits of what an operator makes; the digits of small numbers count as none."""
    of_left, of_right = (len(one) if isinstance(one, _SIZED) else None for one in (left, right))
    if operator == "%" and isinstance(left, str):
        return len(left) + _width(left, right if isinstance(right, tuple) else (right,))
    if of_left is not None and of_right is not None:
        return of_left + of_right
    if operator == "*" and isinstance(left, int) and isinstance(right, int):
        return LONGEST + 1 if max(abs(left), abs(right)) >> _LARGEST_FACTOR else 0
    if operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        return int((of_left or 0) * right if of_left is not None else (of_right or 0) * left)
    if operator == "**" and (abs(right) > _LARGEST_POWER or abs(left) >= 1 << 64):
        return LONGEST + 1
    return 0


def _width(text: str, args: Sequence[Any]) -> int:
    """At most so wide does a format make what it shows; also where the width is one of the arguments."""
    wide = sum(map(int, re.findall(r"\d{1,9}", text)))
    asks = "*" in text or re.search(r":[^}]*\{", text)
    return wide + (sum(one for one in args if isinstance(one, int)) if asks else 0)


def _refuse(message: str) -> None:
    raise Refusal(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what stands for itself in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
