"""Refuse folders whose tokenizer is in files that quantkit does not read, and say what makes a
tokenizer.json of them.

transformers builds such a tokenizer from a Python class, with rules that the files do not state:
how text is split, whether it is normalized, which tokens are special. A tokenizer.json states them.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import UnsupportedError

_BY_CLASS = (
    "from transformers import AutoTokenizer;"
    " AutoTokenizer.from_pretrained({folder}).save_pretrained({folder})"
)
_BY_TEKKEN = (
    "from transformers.integrations.mistral import convert_tekken_tokenizer;"
    " convert_tekken_tokenizer({file}).save_pretrained({folder})"
)


@dataclass(frozen=True)
class _UnreadKind:
    """A kind of tokenizer that is not read: its files, and the Python code that makes a
    tokenizer.json of them.
    """

    files: tuple[str, ...]
    code: str


_UNREAD_KINDS = (
    _UnreadKind(("tekken.json",), _BY_TEKKEN),
    _UnreadKind(("vocab.json", "merges.txt"), _BY_CLASS),
    _UnreadKind(("vocab.json",), _BY_CLASS),
    _UnreadKind(("vocab.txt",), _BY_CLASS),
    _UnreadKind(("spiece.model",), _BY_CLASS),
    _UnreadKind(("sentencepiece.bpe.model",), _BY_CLASS),
)


def require_no_unread_tokenizer(folder: Path) -> None:
    """Check a folder without a tokenizer.json or tokenizer.model for a tokenizer of another kind.

    Raises:
        UnsupportedError: if there is one, naming its files and the command that makes a
            tokenizer.json.
    """
    for kind in _UNREAD_KINDS:
        if all((folder / name).is_file() for name in kind.files):
            # Spelled with double quotes, so that the shell's single quotes around the code stay
            # readable.
            code = kind.code.format(
                folder=json.dumps(str(folder)), file=json.dumps(str(folder / kind.files[0]))
            )
            raise UnsupportedError(
                "this type of tokenizer is not supported",
                path=folder,
                found=" with ".join(kind.files),
                expected="tokenizer.json or tokenizer.model",
                hint=f"create a tokenizer.json with transformers: python -c {shlex.quote(code)}",
            )
