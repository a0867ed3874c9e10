"""Finds words in the repository for which the field has plainer ones.

Reads names (identifiers and file names), docstrings, comments, strings and documentation; prints
``file:line: 'word': use 'replacement'`` for each word of `WORDS` that is not in `EXCEPTIONS`, and
exits with 1 if there are any.

    python scripts/check_words.py            # the whole repository
    python scripts/check_words.py evals docs/evals.md
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

WORDS = {
    r"told|tell|tells|telling": "report, pass, show or print",
    r"asked|ask|asks|asking": "requested, request",
    r"h[eo]ld against|holds? \S+ against|held to": "compared with, checked against",
    r"beside": "next to, along with, in addition to",
    r"(?<!model )cards?": "GPU",
    r"so many|so much": "n, a given number of",
    r"alike": "the same, in the same way",
    r"of (its|their) own": "its own, separate",
    r"whole numbers?": "integer",
    r"(a|one|each|no) text(?! (file|of|is|measured|as|and|that|to|in|on|by|with|at|has))": "string",
    r"truth values?": "boolean",
    r"heard|hear|hears": "deduplicated, received",
    r"lend|lends|lent": "acquire, is_owned",
    r"(given|gives?|giving) back": "freed, returned",
    r"(taken|takes?|took) up": "loaded, used",
    r"passed by": "skipped, not supported",
    r"ma[dk]es? up for": "compensates",
}
"""Patterns of words in prose, and what to write instead."""

NAMES = {
    r"told|tell|tells": "reported, received",
    r"asked|ask": "requested",
    r"beside": "neighbor, sibling",
    r"cards?": "gpu",
    r"alike": "equal, same",
    r"heard": "deduplicated, received",
    r"lent|lend": "acquired",
    r"most": "max",
    r"least": "min",
}
"""Parts of names, between underscores or capitals, and what to write instead."""

EXCEPTIONS = {
    "model_card": "the field's word for the README of a model",
    "ModelCard": "a class of huggingface_hub",
    "cards?": dict.fromkeys(
        (
            "quantkit/jobs/",
            "quantkit/formats/authorship",
            "tests/jobs/test_authorship",
            "tests/jobs/test_card",
            "tests/jobs/test_push",
            "docs/formats.md",
            "docs/push.md",
        ),
        "model cards",
    ),
    "alike": {"scripts/gpu_gptq.py": "a quotation"},
    "most|least": {
        "evals/timing.py": "keys of the JSON of `bench`",
        "evals/bench": "keys of the JSON of `bench`",
        "tests/evals/test_bench": "keys of the JSON of `bench`",
    },
    "ask": {
        "docs/chat.md": "`ChatSession.ask`",
        "cli/conversation.py": "`ChatSession.ask`",
        "quantkit/runtime/chat_session.py": "`ChatSession.ask`",
        "quantkit/serve/remote_chat.py": "`ChatSession.ask`",
        "tests/": "`ChatSession.ask`",
    },
    "asked": dict.fromkeys(
        (
            "docs/errors.md",
            "quantkit/jobs/quantize/certificate.py",
            "quantkit/quality/positions.py",
        ),
        "a key of the manifest",
    ),
    "(a|one|each|no) text": dict.fromkeys(
        (
            "evals/",
            "quantkit/quality/",
            "quantkit/jobs/quantize/certificate.py",
            "tests/evals/",
            "docs/",
            "cli/measure.py",
        ),
        "a piece of running text",
    ),
}
"""Names, or patterns with the paths in which they may stand, each with the reason."""

_SKIPPED = (
    "quantkit/data/",
    "tests/data/",
    "CHANGELOG.md",
    "scripts/check_words.py",
    "tests/test_words.py",
)
_COMMENTS = {
    ".cpp": "//",
    ".h": "//",
    ".js": "//",
    ".sh": "#",
    ".toml": "#",
    ".yml": "#",
    ".css": "/*",
}
_PROSE = {".md", ".jinja", ".txt"}
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class Finding(NamedTuple):
    """A word at a line of a file."""

    path: str
    line: int
    word: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.word}': use {self.replacement}"


def find_words(paths: list[str]) -> list[Finding]:
    """All findings in files of the repository.

    Args:
        paths: files or folders, relative to the repository; none stand for all.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    findings = []
    for path in listed:
        if not path.startswith(_SKIPPED) and (ROOT / path).is_file():
            findings += find_in_file(path, ROOT / path)
    return sorted(set(findings))


def find_in_file(path: str, file: Path) -> Iterator[Finding]:
    """The findings in one file; `path` is its name in the repository."""
    yield from _in_name(path, 1, file.stem)
    if file.suffix == ".py":
        text = file.read_text(encoding="utf-8")
        for line, name in _identifiers(ast.parse(text)):
            yield from _in_name(path, line, name)
        yield from _in_prose(path, list(_strings_and_comments(text)))
    elif file.suffix in _PROSE:
        yield from _in_prose(
            path, list(enumerate(file.read_text(encoding="utf-8").splitlines(), 1))
        )
    elif file.suffix in _COMMENTS:
        mark = _COMMENTS[file.suffix]
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        yield from _in_prose(
            path, [(number, line.split(mark, 1)[1]) for number, line in lines if mark in line]
        )


def _identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _strings_and_comments(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and strings with spaces, which users or readers see, line by line."""
    kinds = {
        tokenize.COMMENT,
        tokenize.STRING,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds and (token.type == tokenize.COMMENT or " " in token.string.strip()):
            for number, line in enumerate(token.string.split("\n")):
                yield token.start[0] + number, line


def _in_prose(path: str, lines: list[tuple[int, str]]) -> Iterator[Finding]:
    for index, (number, line) in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else (0, "")
        joined = line + (" " + following[1].strip(" #\"'/*") if following[0] == number + 1 else "")
        for pattern, replacement in WORDS.items():
            for match in re.finditer(rf"\b(?:{pattern})\b", joined, re.IGNORECASE):
                if match.start() < len(line) and not _is_excepted(path, match[0]):
                    yield Finding(path, number, match[0], replacement)


def _in_name(path: str, line: int, name: str) -> Iterator[Finding]:
    if name in EXCEPTIONS:
        return
    for part in _PART.findall(re.sub(r"at_(most|least)(?![a-z])", "", name)):  # plain English
        for pattern, replacement in NAMES.items():
            if re.fullmatch(pattern, part, re.IGNORECASE) and not _is_excepted(path, part):
                yield Finding(path, line, name, replacement)


def _is_excepted(path: str, word: str) -> bool:
    return any(
        isinstance(places, dict)
        and re.fullmatch(pattern, word, re.IGNORECASE)
        and path.startswith(tuple(places))
        for pattern, places in EXCEPTIONS.items()
    )


def main() -> int:
    """Print the findings; 1 if there are any."""
    findings = find_words(sys.argv[1:])
    for finding in findings:
        print(finding)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
