"""Tables of figures: for a terminal, in Markdown, LaTeX and CSV; and the names of models in
them.
"""

from __future__ import annotations

import csv
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

Style = Literal["terminal", "markdown", "latex", "csv"]

NONE = "-"
"""A cell without a figure."""
WIDTH = 100
"""The maximum width of a table in a terminal."""

_GAP = "  "
_NUMBER = re.compile(r"[-+±(]*\d")
_PLUS_MINUS = re.compile(r"(?P<open>\(?)(?P<value>\S+) ± (?P<error>.*?)\)?(?P<exponent>e[-+]\d+)?")
_FIGURE = re.compile(
    r"(?P<digits>\(?[-+]?\d+(\.\d+)?( ± \d+(\.\d+)?)?\)?)(e(?P<exponent>[-+]?\d+))?"
)
_PERCENT = re.compile(r"\d+(\.\d+)?%")
_ESCAPES = (
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
    | {
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
    | {sign: "\\" + sign for sign in "&%$#_{}"}
)


@dataclass(frozen=True)
class Table:
    """Rows under heads; a figure with its error is written ``0.0123 ± 0.0004``, a missing one as
    `NONE`.
    """

    title: str | None
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def render(tables: Sequence[Table], style: Style, *, width: int = WIDTH) -> list[str]:
    """Tables as lines, a blank one between two.

    The first column and those without numbers are left-aligned.

    Args:
        style: Markdown's source is aligned too; LaTeX is for the package booktabs, a title the
            caption; CSV has no titles, heads in snake case, and a separate column for errors.
        width: of the terminal; where a table is wider, its heads are wrapped, or it is split into
            several, each with the first column.
    """
    if style == "terminal":
        blocks = [_render_terminal(table, width) for table in tables]
    else:
        writers: dict[str, Callable[[Table], list[str]]] = {
            "markdown": _render_markdown,
            "latex": _render_latex,
            "csv": _render_csv,
        }
        blocks = [writers[style](table) for table in tables]
    return [line for block in blocks for line in (*block, "")][:-1]


def _render_terminal(table: Table, width: int) -> list[str]:
    if table.title is None:
        lines = []
    else:
        lines = textwrap.wrap(table.title, width, break_on_hyphens=False)
    columns = _columns(table)
    columns = [_wrap_column(columns[0], 2 * width // 5), *columns[1:]]
    room = width - _wide(columns[0]) - len(_GAP)
    columns = [columns[0], *(_wrap_column(column, room) for column in columns[1:])]
    narrow = [columns[0], *map(_narrow, columns[1:])]
    if _total(columns) > width >= _total(narrow):
        columns = narrow
    to_right = columns_to_right(table)
    for index, some in enumerate(_side_by_side([_wide(column) for column in columns], width)):
        lines += [""] if index else []
        widths = [_wide(columns[place]) for place in some]
        rows = list(zip(*(columns[place] for place in some), strict=True))
        for row in (rows[0], ["-" * wide for wide in widths], *rows[1:]):
            for parts in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
                cells = []
                for one in zip(parts, widths, (to_right[place] for place in some), strict=True):
                    cells.append(_pad_cell(*one))
                lines.append(_GAP.join(cells).rstrip())
    return lines


def _side_by_side(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Columns that fit next to each other, the first in all."""
    some = [0]
    used = widths[0]
    for place, wide in enumerate(widths[1:], 1):
        if len(some) > 1 and used + len(_GAP) + wide > width:
            yield some
            some = [0]
            used = widths[0]
        some.append(place)
        used += len(_GAP) + wide
    yield some


def _wrap_column(column: Sequence[str], width: int) -> list[str]:
    """Return a column whose cells are broken between words; a word that is longer than the width,
    also at hyphens.
    """

    def lines(cell: str) -> list[str]:
        longest = max(map(len, cell.split()), default=0)
        return textwrap.wrap(cell, max(width, 1), break_on_hyphens=longest > width)

    return ["\n".join(lines(cell)) for cell in column]


def _narrow(column: Sequence[str]) -> list[str]:
    """Return a column whose head is no wider than its cells or its longest word."""
    head, *cells = column
    return [
        *_wrap_column([head], max([*map(len, head.split()), *([_wide(cells)] if cells else [])])),
        *cells,
    ]


def _total(columns: Sequence[Sequence[str]]) -> int:
    return sum(map(_wide, columns)) + len(_GAP) * (len(columns) - 1)


def _wide(column: Sequence[str]) -> int:
    return max(len(line) for cell in column for line in cell.split("\n"))


def _render_markdown(table: Table) -> list[str]:
    columns = []
    for column in _columns(table):
        columns.append([cell.replace("|", r"\|") for cell in column])
    widths = [max(3, _wide(column)) for column in columns]
    to_right = columns_to_right(table)
    lines = []
    for row in zip(*columns, strict=True):
        lines.append(
            "| "
            + " | ".join(_pad_cell(*one) for one in zip(row, widths, to_right, strict=True))
            + " |"
        )
    rule = []
    for wide, right in zip(widths, to_right, strict=True):
        rule.append("-" * (wide - right) + ":" * right)
    if table.title is None:
        title = []
    else:
        title = [table.title, ""]
    return [*title, lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _render_latex(table: Table) -> list[str]:
    head, *rows = (
        " & ".join(map(_latex_cell, row)) + r" \\" for row in zip(*_columns(table), strict=True)
    )
    alignment = "".join("r" if right else "l" for right in columns_to_right(table))
    begin = rf"\begin{{tabular}}{{{alignment}}}"
    end = r"\end{tabular}"
    body = [begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", end]
    if table.title is not None:
        caption = rf"\caption{{{_escape_latex(table.title)}}}"
        body = [r"\begin{table}", r"\centering", caption, *body, r"\end{table}"]
    return [r"% \usepackage{booktabs}", *body]


def _latex_cell(text: str) -> str:
    """Return a figure in mathematics, another text escaped."""
    if text == NONE:
        return "--"
    figure = _FIGURE.fullmatch(text)
    if figure is None:
        return _escape_latex(text)
    if figure["exponent"] is None:
        power = ""
    else:
        power = rf" \times 10^{{{int(figure['exponent'])}}}"
    digits = figure["digits"].replace("±", r"\pm")
    if power or not digits[0].isdigit() or " " in digits:
        return f"${digits}{power}$"
    return digits


def _escape_latex(text: str) -> str:
    return "".join(_ESCAPES.get(sign, sign) for sign in " ".join(text.split()))


def _render_csv(table: Table) -> list[str]:
    columns = []
    for head, *cells in _columns(table):
        key = re.sub(r"\W+", "_", head.lower()).strip("_")
        found = [_PLUS_MINUS.fullmatch(cell) for cell in cells]
        if any(found):
            errors = []
            for one in found:
                errors.append(f"{one['error']}{one['exponent'] or ''}" if one else "")
            values = []
            for cell, one in zip(cells, found, strict=True):
                values.append(f"{one['value']}{one['exponent'] or ''}" if one else cell)
            spread = any(error.endswith("%") for error in errors)
            columns += [
                [key, *values],
                _without_percent(f"{key}_{'spread' if spread else 'error'}", errors),
            ]
        else:
            columns.append(_without_percent(key, cells))
    out = io.StringIO()
    rows = zip(
        *([("" if cell == NONE else cell) for cell in column] for column in columns), strict=True
    )
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().splitlines()


def _without_percent(key: str, cells: Sequence[str]) -> list[str]:
    """Return a column of CSV, its unit in its head."""
    figures = [cell for cell in cells if cell not in ("", NONE)]
    if not figures or not all(_PERCENT.fullmatch(cell) for cell in figures):
        return [key, *cells]
    return [f"{key}_percent", *(cell.removesuffix("%") for cell in cells)]


def _columns(table: Table) -> list[list[str]]:
    """Return the cells of each column, its head first, each on one line."""
    columns: list[list[str]] = []
    for column in zip(table.head, *table.rows, strict=True):
        columns.append([" ".join(cell.split()) for cell in column])
    return columns


def columns_to_right(table: Table) -> list[bool]:
    """Return which columns are right-aligned: those of numbers, except the first."""
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.head)
    numbers = []
    for column in columns:
        numbers.append(all(cell in ("", NONE) or _NUMBER.match(cell) for cell in column))
    return [False, *numbers[1:]]


def _pad_cell(text: str, width: int, to_right: bool) -> str:
    if to_right:
        return text.rjust(width)
    return text.ljust(width)


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """Return the shortest ends of paths that are distinct: ``int4``, or ``a/int4`` where there is a
    ``b/int4`` too.
    """
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    result: list[str] = []
    for part in parts:
        result.append(_find_distinct_suffix(part, {other for other in parts if other != part}))
    return result


def _find_distinct_suffix(parts: tuple[str, ...], other_paths: set[tuple[str, ...]]) -> str:
    for count in range(1, len(parts)):
        if not any(other[-count:] == parts[-count:] for other in other_paths):
            return "/".join(parts[-count:])
    return str(Path(*parts))


def parse_named_paths(texts: Sequence[str | Path]) -> list[tuple[str | None, Path]]:
    """Paths with their names in ``NAME=PATH``; None for a path that exists under the whole
    string.
    """
    result: list[tuple[str | None, Path]] = []
    for text in map(str, texts):
        name, _, path = text.partition("=")
        whole = not name.strip() or not path or "/" in name or os.path.lexists(text)
        result.append((None, Path(text)) if whole else (name.strip(), Path(path)))
    return result
