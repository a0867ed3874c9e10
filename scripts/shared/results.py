"""Options and results of the scripts that go through many architectures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_docs_options(parser: argparse.ArgumentParser) -> None:
    """Add the names of architectures, `--json` and `--update-docs`."""
    parser.add_argument("names", nargs="*", help="architectures; default: all")
    parser.add_argument("--json", type=Path, help="where to write the results, or to continue")
    parser.add_argument(
        "--update-docs", action="store_true", help="write the table of docs/models.md"
    )


def parse_docs_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line.

    Raises:
        SystemExit: with 2 if the page is to be written and only some architectures are named.
    """
    options = parser.parse_args()
    if options.names and options.update_docs:
        parser.error("the table is of all architectures")
    return options


def load_results(path: Path | None) -> dict[str, Any]:
    """Return what an interrupted run has written; nothing if there is no file."""
    if path is None or not path.exists():
        return {}
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def save_results(path: Path | None, results: object) -> None:
    """Write results as JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1))
