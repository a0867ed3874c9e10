"""Measure how readable the Python code is, and fail if a measure got worse than the recorded one.

    python scripts/release/check_style.py             # compare with the limits in
                                                      scripts/release/style.toml
    python scripts/release/check_style.py --update    # record better measures as the new limits
    python scripts/release/check_style.py FOLDER...   # print the measures of any code

Exits with 1 if a measure is worse than its limit. The measures say nothing about a single line.
They show where code is hard to read on average, next to code bases such as click, accelerate and
llm-compressor.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Path(__file__).with_name("style.toml")
PACKAGE = ("quantkit", "cli", "evals", "kernels")

# Names that say nothing about what they hold.
VAGUE_NAMES = frozenset(
    [
        "one",
        "found",
        "own",
        "there",
        "given",
        "made",
        "more",
        "others",
        "here",
        "where",
        "both",
        "left",
        "stated",
        "named",
        "wanted",
        "known",
        "got",
        "which",
        "what",
        "these",
        "those",
        "such",
        "so",
        "then",
        "each",
        "all",
        "rest",
        "same",
        "held",
        "taken",
        "seen",
    ]
)

# Words that look like participles but are verbs or nouns.
VERBS_AND_NOUNS = frozenset(
    [
        "embed",
        "feed",
        "hidden",
        "kept_alive",
        "need",
        "open",
        "seed",
        "speed",
        "token",
        "when",
        "then",
        "even",
        "children",
    ]
)

_PARTICIPLE = re.compile(r"_*([a-z]+(?:ed|en|wn))(?:_|$)")

# A docstring that begins with one of these names a value instead of the action.
_NOUN_START = re.compile(
    r"(the|a|an|what|which|where|how|whether|all|each|one|this|these|its|those|see|as|for|if|in)\b",
    re.IGNORECASE,
)
_DIRECTIVE = re.compile(r"#\s*(fmt|type|noqa|ruff|pylint|isort|!)")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Counts:
    """Count what the measures are made of.

    Attributes:
        vague: assigned names and parameters that are in `VAGUE_NAMES`.
        participles: functions whose name begins with a participle instead of a verb.
        tuples: assignments to a tuple of names.
        comments: comments on their own line.
        definitions: functions and classes.
        documented: definitions with a docstring.
        function_docs: functions with a docstring.
        verb_docs: docstrings of functions that begin with a verb.
        skips: comments that switch off the formatter.
        places: file and line of each vague name and participle.
    """

    statements: int = 0
    names: int = 0
    vague: int = 0
    functions: int = 0
    participles: int = 0
    ternaries: int = 0
    comprehensions: int = 0
    tuples: int = 0
    comments: int = 0
    definitions: int = 0
    documented: int = 0
    function_docs: int = 0
    verb_docs: int = 0
    skips: int = 0
    places: list[str] = field(default_factory=list)

    def add_file(self, path: Path) -> None:
        """Count what one file has."""
        source = path.read_text(encoding="utf-8")
        self._add_comments(source)
        for node in ast.walk(ast.parse(source)):
            self.statements += isinstance(node, ast.stmt)
            self.ternaries += isinstance(node, ast.IfExp)
            self.comprehensions += isinstance(node, _COMPREHENSIONS)
            if isinstance(node, ast.Assign):
                self.tuples += any(isinstance(target, ast.Tuple) for target in node.targets)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._add_definition(node, path)
            elif isinstance(node, ast.arg):
                self._add_name(node.arg, path, node.lineno)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._add_name(node.id, path, node.lineno)

    def _add_comments(self, source: str) -> None:
        self.skips += source.count("# fmt: skip") + source.count("# fmt: off")
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            is_own_line = not token.line[: token.start[1]].strip()
            if token.type == tokenize.COMMENT and is_own_line:
                self.comments += not _DIRECTIVE.match(token.string)

    def _add_name(self, name: str, path: Path, line: int) -> None:
        self.names += 1
        if name in VAGUE_NAMES:
            self.vague += 1
            self.places.append(f"{path}:{line}: {name!r} does not say what it holds")

    def _add_definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, path: Path
    ) -> None:
        docstring = ast.get_docstring(node)
        self.definitions += 1
        self.documented += docstring is not None
        if isinstance(node, ast.ClassDef):
            return
        self.functions += 1
        match = _PARTICIPLE.match(node.name)
        if match is not None and match[1] not in VERBS_AND_NOUNS:
            self.participles += 1
            self.places.append(f"{path}:{node.lineno}: {node.name}() begins with a participle")
        if docstring is not None:
            self.function_docs += 1
            self.verb_docs += not _NOUN_START.match(docstring.strip())

    def to_measures(self) -> dict[str, float]:
        """Return shares in percent, counts for each 1,000 statements, and the number of skips."""
        statements = max(1, self.statements)
        return {
            "vague names, %": 100 * self.vague / max(1, self.names),
            "participle functions, %": 100 * self.participles / max(1, self.functions),
            "ternaries": 1000 * self.ternaries / statements,
            "comprehensions": 1000 * self.comprehensions / statements,
            "tuple assignments": 1000 * self.tuples / statements,
            "formatter skips": float(self.skips),
            "comments": 1000 * self.comments / statements,
            "documented, %": 100 * self.documented / max(1, self.definitions),
            "docstrings that begin with a verb, %": 100
            * self.verb_docs
            / max(1, self.function_docs),
        }


HIGHER_IS_BETTER = ("comments", "documented, %", "docstrings that begin with a verb, %")


def find_python_files(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the Python files below the folders, in order."""
    for folder in folders:
        if folder.is_file():
            yield folder
        else:
            yield from sorted(folder.rglob("*.py"))


def count_folders(folders: Sequence[Path]) -> Counts:
    """Count over all Python files below the folders."""
    counts = Counts()
    for path in find_python_files(folders):
        counts.add_file(path)
    return counts


def is_worse(name: str, value: float, limit: float) -> bool:
    """Return whether a measure is worse than its limit, which is rounded to one digit."""
    if name in HIGHER_IS_BETTER:
        return round(value, 1) < limit
    return round(value, 1) > limit


def write_limits(measures: dict[str, float]) -> None:
    """Write the measures as the new limits."""
    lines = [
        "# Limits of scripts/release/check_style.py; no measure may get worse; --update writes them"
    ]
    for name, value in measures.items():
        lines.append(f'"{name}" = {value:.1f}')
    LIMITS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Print the measures; return 1 if one is worse than its limit."""
    update = "--update" in arguments
    folders = [Path(argument) for argument in arguments if argument != "--update"]
    is_package = not folders
    if is_package:
        folders = [ROOT / name for name in PACKAGE]
    counts = count_folders(folders)
    measures = counts.to_measures()
    limits = (
        tomllib.loads(LIMITS.read_text(encoding="utf-8")) if is_package and LIMITS.exists() else {}
    )
    failures = 0
    for name, value in measures.items():
        limit = limits.get(name)
        failed = limit is not None and is_worse(name, value, limit)
        failures += failed
        note = "" if limit is None else f"  limit {limit:.1f}{'  WORSE' if failed else ''}"
        print(f"{value:8.1f}  {name}{note}")
    if not is_package or (failures and not update):
        print("\n".join(counts.places))
    if update and is_package:
        write_limits(measures)
        return 0
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
