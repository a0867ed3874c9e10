"""Where chat templates run: Jinja's sandbox, with what `transformers` documents for templates, and an end to what they
may do.

A template comes with a model that somebody else has made. The sandbox keeps it from the machine; what is counted here
keeps it from running for ever, and from making things of any size out of small ones.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import random
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, Sized, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

LONGEST = 1 << 22
"""Letters of a rendered conversation, and of anything that a template makes, with all that it holds."""
_ITEM = 32
"""Letters that an item of a list counts as, besides its own."""
_MOST_STEPS = 1 << 20  # a few seconds
_LETTERS_A_STEP = 1 << 8
_STEPS_OF_A_MACRO = 8
_MOST_KEPT = 1 << 26
_MOST_BITS = 1 << 14  # the digits that Python prints
_LONGEST_NUMBER = 320  # of floats, by %f
_LONGEST_SOURCE = 1 << 17
_MOST_INDENT = 64
_METHODS = {
    str: {
        "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    },
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
}  # fmt: skip
"""All that may be called of what Python brings."""
_WITHOUT = ("pprint", "striptags", "urlize", "wordcount", "wordwrap", "xmlattr")
"""Filters for web pages, which take long."""
_LOOK_NO_DEEPER = {
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr", "slice",
}  # fmt: skip
"""Filters that read none of the items that they are given."""
_MAKE_NOTHING = {"attr", "d", "default", "first", "get", "last", "max", "min", "random"}
_SLOW = {"dictsort", "groupby", "max", "min", "sort", "title", "unique", "urlencode"}
_TIMES_AS_SLOW = 8
_TAKE_WIDTHS = ("batch", "center", "indent", "round", "slice")
_VIEWS = (KeysView, ValuesView, ItemsView)
_HOLD = (list, tuple, dict, *_VIEWS)
_FIXED_DATE = datetime.datetime(2024, 7, 26)  # that of Llama's templates where they are told none
_JOINED, _COUNTED, _READ, _MADE = "quantkit_joined", "quantkit_counted", "quantkit_read", "quantkit_made"


class Refusal(Exception):
    """What a template raises about a conversation that it does not take."""


class Unbounded(Exception):
    """A template does more than any chat template has a use for."""


class Bounds:
    """What is left to a template that is being rendered, and what it sees of the world around it."""

    def __init__(self, steps: int = _MOST_STEPS, room: int = _MOST_KEPT, *, repeatable: bool = False) -> None:
        """Of so many steps, and letters and items that are made; `repeatable` shows the same date and the same random
        choices at all times."""
        self._steps, self._room = steps, room
        self._repeatable = repeatable
        self.choose: Callable[[Sequence[Any]], Any] = random.Random(0).choice if repeatable else random.choice
        self._sizes: dict[int, tuple[Any, int]] = {}  # with what is measured, whose address is its own so long

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self._steps < 0 or self._room < 0

    def now(self) -> datetime.datetime:
        return _FIXED_DATE if self._repeatable else datetime.datetime.now()

    def take(self, letters: int = 0, kept: int = 0) -> None:
        """Take one step, and those for letters that are read or copied, and room for those that stay.

        Raises:
            Unbounded: if there are none left, or it is too large.
        """
        if letters > LONGEST:
            raise Unbounded(f"makes something of more than {LONGEST} letters or items")
        self._steps -= 1 + letters // _LETTERS_A_STEP
        self._room -= kept
        if self._steps < 0:
            raise Unbounded("takes more steps than any conversation needs")
        if self._room < 0:
            raise Unbounded(f"makes more than {_MOST_KEPT} letters or items in all")

    def size(self, value: Any) -> int:
        """Letters of a value and of all that it holds, as often as it holds it.

        Raises:
            Unbounded: if there are too many.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3
        if isinstance(value, range):
            return _ITEM * len(value)
        if not isinstance(value, _HOLD):
            return 0
        if id(value) not in self._sizes:
            held = _items(value)
            size = sum(map(self.size, held)) + _ITEM * len(held)
            if size > LONGEST:
                raise Unbounded(f"makes something of more than {LONGEST} letters or items")
            self._sizes[id(value)] = value, size
        return self._sizes[id(value)][1]

    def made(self, value: Any) -> Any:
        """What has been made, once it is counted; items that are still to be made, each of them.

        Raises:
            Unbounded: if it is too large.
        """
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise Unbounded(f"makes a number of more than {_MOST_BITS} bits")
        if isinstance(value, str):
            self.take(len(value))
        elif isinstance(value, _HOLD):
            self.size(value)
            held = _items(value)
            kept = _ITEM * len(held) + sum(len(one) for one in held if isinstance(one, str))
            keys = value if isinstance(value, dict) else ()
            self.take(kept + sum(self.size(key) for key in keys if isinstance(key, tuple)), kept)
        return map(self.made, _Counted(value)) if isinstance(value, Iterator) else value

    def shown(self, value: Any) -> Any:
        """A value that becomes a part of a text."""
        size = self.size(value)
        self.take(size, size)
        return value


_bounds: ContextVar[Bounds] = ContextVar("bounds")


@contextmanager
def bounded(bounds: Bounds | None = None) -> Iterator[None]:
    """The bounds of compiling a template, or of rendering.

    Args:
        bounds: that several renderings share; None is those of one.

    Raises:
        Unbounded: within, where a template goes beyond them.
    """
    token = _bounds.set(bounds or Bounds())
    try:
        yield
    finally:
        _bounds.reset(token)


class _Counted:
    """What a loop goes over, its turns counted; its length is known where it was."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        bounds = _bounds.get()
        for item in self._items:
            bounds.take()
            yield item

    def __len__(self) -> int:
        if isinstance(self._items, Sized):
            return len(self._items)
        raise TypeError("of no known length")


def environment() -> Any:
    """A sandbox; what it compiles and renders is to be within `bounded`."""
    from jinja2 import nodes, pass_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.filters import sync_do_map
    from jinja2.runtime import BlockReference, LoopContext, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer

    class Generation(Extension):
        """``{% generation %}`` marks what a model is trained on; here it is text as any other."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Looked(NodeTransformer):
        """Has all that a template makes, compares and goes through looked at, by filters of our own."""

        def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
            node = super().generic_visit(node, *args, **kwargs)
            match node:
                case nodes.Tuple(ctx="store"):
                    return node
                case nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.Getitem(arg=nodes.Slice()):
                    return self._through(_MADE, node)
                case nodes.TemplateData():
                    return self._through(_MADE, nodes.Const(node.data))
                case nodes.Concat():
                    return self._through(_JOINED, nodes.List(node.nodes))
                case nodes.Compare():
                    node.expr = self._through(_READ, node.expr)
                    for operand in node.ops:
                        operand.expr = self._through(_READ, operand.expr)
                case nodes.For():
                    node.iter = self._through(_COUNTED, node.iter)
                case nodes.AssignBlock():
                    node.filter = self._through(_MADE, node.filter)
            return node

        def _through(self, name: str, node: Any) -> Any:
            return nodes.Filter(node, name, [], [], None, None)

    class Held(Namespace):
        """A namespace that does not show what it holds, which may be itself."""

        def __repr__(self) -> str:
            return "<Namespace>"

    class Bounded(ImmutableSandboxedEnvironment):
        """Counts what a template does, and looks at the size of what it makes."""

        intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            if len(source) > _LONGEST_SOURCE:
                raise Unbounded(f"is longer than {_LONGEST_SOURCE} letters")
            return Looked().visit(super()._parse(source, name, filename)).set_environment(self)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if type(obj).__module__ == "builtins" or isinstance(obj, tuple(_METHODS)):
                return any(isinstance(obj, kind) and attr in methods for kind, methods in _METHODS.items())
            return bool(super().is_safe_attribute(obj, attr, value))

        def getitem(self, obj: Any, argument: Any) -> Any:
            _bounds.get().take(_bounds.get().size(argument))
            return super().getitem(obj, argument)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            bounds, name = _bounds.get(), getattr(__obj, "__name__", "")
            if isinstance(__obj, LoopContext):  # a loop that is entered anew
                args = (_Counted(args[0]), *args[1:])
            if isinstance(__obj, (BlockReference, LoopContext, Macro)):
                bounds.take(_STEPS_OF_A_MACRO * _LETTERS_A_STEP)
            else:
                owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # Jinja wraps `str.format`
                args = _listed(name, args)
                given = args if isinstance(owner, dict) else (owner, *args)
                bounds.take(_size(name, [*given, *kwargs.values()]))
            result = super().call(__context, __obj, *args, **kwargs)
            return result if name in _MAKE_NOTHING else bounds.made(result)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _bounds.get().take(_size_of_operation(operator, left, right))
            return _bounds.get().made(super().call_binop(context, operator, left, right))

    @pass_context
    def total(context: Any, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            items = sync_do_map(context, items, attribute=attribute)
        add = functools.partial(made.call_binop, context, "+")
        return functools.reduce(add, items, start)

    made: Any = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols],
        finalize=lambda value: _bounds.get().shown(value),
    )  # fmt: skip
    for name in _WITHOUT:
        del made.filters[name]
    made.filters |= {"tojson": _to_json, "sum": total, "random": pass_context(_random)}
    made.filters[_JOINED] = lambda items: "".join(map(str, items))
    made.filters = {name: _watched(name, filter) for name, filter in made.filters.items()}
    made.tests = {name: _watched(name, test) for name, test in made.tests.items()}
    # Of the context, so that nothing is folded when the template is compiled.
    made.filters[_COUNTED] = pass_context(lambda context, items: _Counted(items))
    made.filters[_MADE] = pass_context(lambda context, value: _bounds.get().made(value))
    made.filters[_READ] = pass_context(lambda context, value: _read(value))
    del made.globals["lipsum"]
    made.globals |= {"namespace": Held, "raise_exception": _refuse}
    made.globals["strftime_now"] = lambda format: _bounds.get().now().strftime(format)
    return made


def _watched(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test, of which arguments and result are looked at."""

    @functools.wraps(filter)
    def watched(*args: Any, **kwargs: Any) -> Any:
        args = _listed(name, args)
        _bounds.get().take(_size(name, [*args, *kwargs.values()]))
        made = filter(*args, **kwargs)
        return made if name in _MAKE_NOTHING else _bounds.get().made(made)

    return watched


def _listed(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, with all the items there are where they are to be joined."""
    if name != "join":
        return args
    return tuple(_bounds.get().made(list(one)) if isinstance(one, Iterator) else one for one in args)


def _read(value: Any) -> Any:
    _bounds.get().take(_bounds.get().size(value))
    return value


def _items(value: Any) -> list[Any]:
    return list(itertools.chain(value, value.values())) if isinstance(value, dict) else list(value)


def _size(name: str, args: Sequence[Any]) -> int:
    """At most so many letters does a filter, a test or a method read and make, as far as its arguments tell."""
    bounds = _bounds.get()
    if name in _LOOK_NO_DEEPER:
        size = sum(len(one) for one in args if isinstance(one, (str, *_HOLD)))
    else:
        size = sum(map(bounds.size, args)) * (_TIMES_AS_SLOW if name in _SLOW else 1)
    texts = [one for one in args if isinstance(one, str)]
    if name in _TAKE_WIDTHS:
        size += _ITEM * sum(abs(one) for one in args[1:] if isinstance(one, int))
        if name == "indent":  # each line, by a text or so wide
            size += sum(map(len, texts[1:])) * texts[0].count("\n") if texts else 0
    elif name == "format" and texts:
        size += _width(texts[0], [one for one in args if one is not texts[0]])
    elif name == "replace" and len(texts) == 3:
        size += texts[0].count(texts[1]) * len(texts[2])
    elif name == "join":
        held = [len(one) for one in args if isinstance(one, _HOLD)]
        size += sum(held) * sum(map(len, texts))
    return size


def _size_of_operation(operator: str, left: Any, right: Any) -> int:
    """Letters of what an operator reads and makes."""
    size = _bounds.get().size
    of_left, of_right = size(left), size(right)
    if operator == "%" and isinstance(left, str):
        return of_left + _width(left, [right])
    if operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        return LONGEST + 1 if left.bit_length() * right > _MOST_BITS else 0
    if operator == "*" and isinstance(left, int) != isinstance(right, int):
        return max(of_left * right, 0) if isinstance(right, int) else max(of_right * left, 0)
    return of_left + of_right


def _width(text: str, args: Sequence[Any]) -> int:
    """At most so wide does a format make what it shows, each of its fields the widest; also where the width is one of
    the arguments."""
    wide = sum(map(int, re.findall(r"\d{1,9}", text)))
    asks = "*" in text or re.search(r":[^}]*\{", text)
    numbers = itertools.chain.from_iterable(one if isinstance(one, tuple) else [one] for one in args)
    fields = text.count("%") + text.count("{")
    widest = _LONGEST_NUMBER if re.search(r"[efgEFG%]", text) else 0
    widest += sum(map(_bounds.get().size, args)) + (sum(one for one in numbers if isinstance(one, int)) if asks else 0)
    return wide + fields * widest


def _random(context: Any, items: Sequence[Any]) -> Any:
    return _bounds.get().choose(items) if items else context.environment.undefined("nothing to choose from")


def _refuse(message: str) -> None:
    raise Refusal(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what stands for itself in a prompt."""
    widths = [indent] if isinstance(indent, int) else [len(one) for one in (indent, *(separators or ())) if one]
    if max(widths, default=0) > _MOST_INDENT:
        raise Unbounded(f"indents or separates by more than {_MOST_INDENT} letters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return "".join(map(_bounds.get().shown, encoder.iterencode(value)))
