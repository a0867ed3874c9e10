"""Tables in Markdown, printed row by row or written into a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def format_row(*cells: object) -> str:
    """Return one row."""
    return f"| {' | '.join(map(str, cells))} |"


def format_header(*titles: str) -> str:
    """Return the row of the titles, and on the next line the rule below it."""
    return format_row(*titles) + "\n" + "|---" * len(titles) + "|"


def format_table(titles: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table of formatted rows, with a line break at its end."""
    return "\n".join([format_header(*titles), *rows, ""])


def format_names(names: Iterable[str]) -> str:
    """Return names in backticks, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def print_row(*cells: object) -> None:
    """Print one row at once, also where output is not a terminal."""
    print(format_row(*cells), flush=True)


def print_header(*titles: str) -> None:
    """Print the row of the titles and the rule below it."""
    print(format_header(*titles), flush=True)


@dataclass(frozen=True)
class Section:
    """What a script writes into a page, between a mark that names the script and an end mark.

    Attributes:
        script: the script, by its path in the repository.
    """

    script: str

    def find(self, page: str) -> str | None:
        """Return the section of a page's text; None if the page has no marks of it."""
        match = self._pattern.search(page)
        return None if match is None else match[0]

    def write(self, path: Path, text: str) -> None:
        """Write the section of a page anew."""
        page = path.read_text(encoding="utf-8")
        path.write_text(self._pattern.sub(lambda _: text, page), encoding="utf-8")

    @property
    def _pattern(self) -> re.Pattern[str]:
        begin = re.escape(f"<!-- made by {self.script} -->\n")
        return re.compile(f"(?<={begin}).*?(?=<!-- end -->\n)", re.DOTALL)
