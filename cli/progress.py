"""Progress bars on stderr, silent where that is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from quantkit.progress import Progress


@contextmanager
def bar(title: str, unit: str = "B", *, show: bool = True) -> Iterator[Progress]:
    """A bar that a job's progress calls move; it starts anew when the total changes."""
    with tqdm(desc=title, unit=unit, unit_scale=unit == "B", disable=None if show else True, leave=False) as line:

        def report(done: int, total: int, name: str) -> None:
            if line.total != total:
                line.reset(total)
            line.set_postfix_str(name, refresh=False)
            line.update(done - line.n)

        yield report
