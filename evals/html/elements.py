"""Elements of HTML and SVG: what is not one is text, and escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from quantkit.evals.table import NONE, Table, columns_to_right

_VOID = frozenset({"br", "meta", "link", "input"})
_SVG_EMPTY = frozenset({"line", "rect", "circle", "path"})

Attributes = Mapping[str, str | float | None]


class Markup(str):
    """HTML as it stands, and not text to be escaped."""

    __slots__ = ()


def element(name: str, attributes: Attributes | None = None, *content: str) -> Markup:
    """One element.

    Args:
        attributes: by name; those that are None are left out, and of ``""`` the name alone is written.
        content: elements, and texts, which are escaped.
    """
    told = "".join(
        f" {key}" if value == "" else f' {key}="{_attribute(value)}"'
        for key, value in (attributes or {}).items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    if name in _SVG_EMPTY and not content:
        return Markup(f"<{name}{told}/>")
    return Markup(f"<{name}{told}>{joined(*content)}</{name}>")


def joined(*content: str) -> Markup:
    """Elements and texts, one after the other."""
    return Markup("".join(one if isinstance(one, Markup) else html.escape(one, quote=False) for one in content))


def scrolled(label: str, *content: str) -> Markup:
    """What may be wider than a window: it scrolls by itself, also by keyboard."""
    return element("div", {"class": "scroll", "role": "region", "aria-label": label, "tabindex": 0}, *content)


def figures(table: Table, label: str, marks: Sequence[str] = ()) -> Markup:
    """A table of figures, each as it is spelled there; its first column are heads of rows.

    Args:
        marks: what stands before the head of each row; nothing where there are none.
    """
    right = ["num" if one else None for one in columns_to_right(table)]
    head = [element("th", {"scope": "col", "class": side}, text) for text, side in zip(table.head, right, strict=True)]
    rows = []
    for index, (name, *cells) in enumerate(table.rows):
        mark = [Markup(marks[index])] if marks else []
        shown = [element("td", {"class": side}, _figure(cell)) for cell, side in zip(cells, right[1:], strict=True)]
        rows.append(element("tr", None, element("th", {"scope": "row"}, *mark, name), *shown))
    body = element("table", {"class": "figures"}, element("thead", None, element("tr", None, *head)),
                   element("tbody", None, *rows))  # fmt: skip
    return scrolled(label, body)


def _figure(cell: str) -> Markup:
    """A figure whose error stands back."""
    if cell in ("", NONE):
        return element("span", {"class": "none"}, NONE)
    value, plus_minus, error = cell.partition(" ± ")
    return joined(value, element("span", {"class": "error"}, f" ± {error}")) if plus_minus else joined(cell)


def _attribute(value: str | float) -> str:
    return html.escape(value) if isinstance(value, str) else f"{value:g}" if abs(value) < 1e5 else f"{value:.0f}"
