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
    """Write tables as lines, with a blank one between two.

    The first column and those without numbers are left-aligned.

    Args:
        style: Markdown's source is aligned too; LaTeX is for the package booktabs, a title the
            caption; CSV has no titles, heads in snake case, and a separate column for errors.
        width: of the terminal; where a table is wider, its heads are wrapped, or it is split into
            several, each with the first column.
    """
    writers: dict[str, Callable[[Table], list[str]]] = {
        "markdown": _render_markdown,
        "latex": _render_latex,
        "csv": _render_csv,
    }
    lines: list[str] = []
    for table in tables:
        if style == "terminal":
            lines += _render_terminal(table, width)
        else:
            lines += writers[style](table)
        lines.append("")
    # Without the blank line after the last table.
    return lines[:-1]


def _render_terminal(table: Table, width: int) -> list[str]:
    if table.title is None:
        lines = []
    else:
        lines = textwrap.wrap(table.title, width, break_on_hyphens=False)
    first, *other_columns = _columns(table)
    # The first column is repeated in every part of a table that is split, so it is limited.
    first = _wrap_column(first, 2 * width // 5)
    room = width - _column_width(first) - len(_GAP)
    columns = [first]
    narrow_columns = [first]
    for column in other_columns:
        wrapped = _wrap_column(column, room)
        columns.append(wrapped)
        narrow_columns.append(_wrap_head(wrapped))
    # Heads are wrapped only where that saves the table from being split.
    if _total(columns) > width >= _total(narrow_columns):
        columns = narrow_columns
    to_right = columns_to_right(table)
    column_widths = [_column_width(column) for column in columns]
    for index, places in enumerate(_side_by_side(column_widths, width)):
        if index > 0:
            lines.append("")
        group = []
        widths = []
        alignments = []
        rule = []
        for place in places:
            group.append(columns[place])
            widths.append(column_widths[place])
            alignments.append(to_right[place])
            rule.append("-" * column_widths[place])
        head, *rows = zip(*group, strict=True)
        for row in (head, rule, *rows):
            # A wrapped cell has several lines, next to the only line of another.
            for line_cells in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
                lines.append(_GAP.join(_pad_cells(line_cells, widths, alignments)).rstrip())
    return lines


def _pad_cells(
    cells: Sequence[str], widths: Sequence[int], alignments: Sequence[bool]
) -> list[str]:
    """Pad the cells of a row to the widths of their columns; the alignments tell which are
    right-aligned.
    """
    padded_cells: list[str] = []
    for cell, width, to_right in zip(cells, widths, alignments, strict=True):
        padded_cells.append(_pad_cell(cell, width, to_right))
    return padded_cells


def _side_by_side(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Divide columns into groups that fit next to each other, the first column in all."""
    group = [0]
    group_width = widths[0]
    for place, column_width in enumerate(widths[1:], 1):
        # A group has a column besides the first, even if it is too wide: otherwise it would never
        # be written.
        if len(group) > 1 and group_width + len(_GAP) + column_width > width:
            yield group
            group = [0]
            group_width = widths[0]
        group.append(place)
        group_width += len(_GAP) + column_width
    yield group


def _wrap_column(column: Sequence[str], width: int) -> list[str]:
    """Break the cells of a column between words; a word that is longer than the width, also at
    hyphens.
    """
    wrapped_cells: list[str] = []
    for cell in column:
        longest_word = max(map(len, cell.split()), default=0)
        lines = textwrap.wrap(cell, max(width, 1), break_on_hyphens=longest_word > width)
        wrapped_cells.append("\n".join(lines))
    return wrapped_cells


def _wrap_head(column: Sequence[str]) -> list[str]:
    """Wrap the head of a column, to be no wider than its cells or its longest word."""
    head, *cells = column
    widths = [len(word) for word in head.split()]
    # A table can have no rows.
    if cells:
        widths.append(_column_width(cells))
    return [*_wrap_column([head], max(widths)), *cells]


def _total(columns: Sequence[Sequence[str]]) -> int:
    return sum(map(_column_width, columns)) + len(_GAP) * (len(columns) - 1)


def _column_width(column: Sequence[str]) -> int:
    widest = 0
    for cell in column:
        for line in cell.split("\n"):
            widest = max(widest, len(line))
    return widest


def _render_markdown(table: Table) -> list[str]:
    columns = []
    widths = []
    for column in _columns(table):
        # A bar would end the cell.
        escaped_column = [cell.replace("|", r"\|") for cell in column]
        columns.append(escaped_column)
        # GitHub's documentation asks for three characters in each column of the rule.
        widths.append(max(3, _column_width(escaped_column)))
    to_right = columns_to_right(table)
    lines: list[str] = []
    for row in zip(*columns, strict=True):
        lines.append(f"| {' | '.join(_pad_cells(row, widths, to_right))} |")
    rule = []
    for width, is_right in zip(widths, to_right, strict=True):
        # A colon at the end of the rule aligns a column to the right.
        rule.append("-" * (width - 1) + ":" if is_right else "-" * width)
    title = [] if table.title is None else [table.title, ""]
    return [*title, lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _render_latex(table: Table) -> list[str]:
    lines: list[str] = []
    for row in zip(*_columns(table), strict=True):
        lines.append(" & ".join(map(_latex_cell, row)) + r" \\")
    head, *rows = lines
    alignment = ""
    for is_right in columns_to_right(table):
        alignment += "r" if is_right else "l"
    begin = rf"\begin{{tabular}}{{{alignment}}}"
    end = r"\end{tabular}"
    body = [begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", end]
    if table.title is not None:
        caption = rf"\caption{{{_escape_latex(table.title)}}}"
        body = [r"\begin{table}", r"\centering", caption, *body, r"\end{table}"]
    return [r"% \usepackage{booktabs}", *body]


def _latex_cell(text: str) -> str:
    """Write a figure in mathematics, another text escaped."""
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
    # Text mode would write a minus as a hyphen, and has neither ± nor powers.
    if power or not digits[0].isdigit() or " " in digits:
        return f"${digits}{power}$"
    return digits


def _escape_latex(text: str) -> str:
    return "".join(_ESCAPES.get(sign, sign) for sign in " ".join(text.split()))


def _render_csv(table: Table) -> list[str]:
    columns = []
    for head, *cells in _columns(table):
        key = re.sub(r"\W+", "_", head.lower()).strip("_")
        values = []
        errors = []
        for cell in cells:
            figure = _PLUS_MINUS.fullmatch(cell)
            if figure is None:
                values.append(cell)
                errors.append("")
            else:
                # The exponent in (1.23 ± 0.04)e-05 is that of both.
                exponent = figure["exponent"] or ""
                values.append(f"{figure['value']}{exponent}")
                errors.append(f"{figure['error']}{exponent}")
        if any(errors):
            # Standard errors have the unit of their figure; spreads between runs are percentages.
            is_spread = any(error.endswith("%") for error in errors)
            kind = "spread" if is_spread else "error"
            columns.append([key, *values])
            columns.append(_without_percent(f"{key}_{kind}", errors))
        else:
            columns.append(_without_percent(key, cells))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in zip(*columns, strict=True):
        # Programs read an empty cell as a missing figure, but a hyphen as text.
        writer.writerow(["" if cell == NONE else cell for cell in row])
    return file.getvalue().splitlines()


def _without_percent(key: str, cells: Sequence[str]) -> list[str]:
    """Move the unit of a column of CSV to its head, if all figures are percentages."""
    figures = [cell for cell in cells if cell not in ("", NONE)]
    if not figures or not all(_PERCENT.fullmatch(cell) for cell in figures):
        return [key, *cells]
    column = [f"{key}_percent"]
    for cell in cells:
        column.append(cell.removesuffix("%"))
    return column


def _columns(table: Table) -> list[list[str]]:
    """Collect the cells of each column, its head first, each on one line."""
    columns: list[list[str]] = []
    for column in zip(table.head, *table.rows, strict=True):
        columns.append([" ".join(cell.split()) for cell in column])
    return columns


def columns_to_right(table: Table) -> list[bool]:
    """Find which columns are right-aligned: those of numbers, except the first."""
    # Without rows, `zip` has no columns.
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.head)
    has_numbers = []
    for column in columns:
        has_text = False
        for cell in column:
            if cell not in ("", NONE) and not _NUMBER.match(cell):
                has_text = True
        has_numbers.append(not has_text)
    return [False, *has_numbers[1:]]


def _pad_cell(text: str, width: int, to_right: bool) -> str:
    if to_right:
        return text.rjust(width)
    return text.ljust(width)


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """Find the shortest ends of paths that are distinct: ``int4``, or ``a/int4`` where there is a
    ``b/int4`` too.
    """
    # Not resolved, so that a symbolic link keeps its own name.
    parts_by_path = []
    for path in paths:
        parts_by_path.append(Path(os.path.abspath(path)).parts)
    names: list[str] = []
    for parts in parts_by_path:
        # A path that is given twice has one name.
        other_paths = set(parts_by_path) - {parts}
        names.append(_find_distinct_suffix(parts, other_paths))
    return names


def _find_distinct_suffix(parts: tuple[str, ...], other_paths: set[tuple[str, ...]]) -> str:
    for length in range(1, len(parts)):
        other_suffixes = {other_parts[-length:] for other_parts in other_paths}
        if parts[-length:] not in other_suffixes:
            return "/".join(parts[-length:])
    return str(Path(*parts))


def parse_named_paths(texts: Sequence[str | Path]) -> list[tuple[str | None, Path]]:
    """Split ``NAME=PATH`` into names and paths; the name is None for a path that exists under the
    whole string.
    """
    named_paths: list[tuple[str | None, Path]] = []
    for text in map(str, texts):
        name, _, path = text.partition("=")
        is_incomplete = not name.strip() or not path
        # A name has no slash: ``a/b=c`` is a path with an equals sign. So is what exists as it is.
        if is_incomplete or "/" in name or os.path.lexists(text):
            named_paths.append((None, Path(text)))
        else:
            named_paths.append((name.strip(), Path(path)))
    return named_paths
