"""What lies beside the weights of any checkpoint: the tokenizer, generation settings, licences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.files.source import SourceFile
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
READ_BESIDE = {"generation_config.json", *TOKENIZER_FILES}
"""Files beside weights and config that decide what a model says."""
OTHER_FILES = ("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md", "NOTICE")


def checked_tokenizer(source: Checkpoint) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of a checkpoint, held against its embedding, and what to note about it.

    Raises:
        CheckpointError: if it is damaged, or knows more tokens than the embedding.
    """
    if not present(source.path, TOKENIZER_FILES[:2]):
        return None, [f"{source.path}: has no tokenizer; the output will have none"]
    tokenizer, rows = load_tokenizer(source.path), source.config.vocab_size
    require_rows(tokenizer, rows, source.path)
    if tokenizer.vocab_size < rows:
        return tokenizer, [f"{source.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {rows} rows"]
    return tokenizer, []


def require_rows(tokenizer: Tokenizer, rows: int, path: Path) -> None:
    """Check that an embedding has a row for every token.

    Raises:
        CheckpointError: if it has not.
    """
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            "the tokenizer knows more tokens than the embedding has rows", path=path,
            found=f"{tokenizer.vocab_size} tokens", expected=f"at most {rows}",
            hint="the tokenizer is another model's",
        )  # fmt: skip


def present(folder: Path, names: tuple[str, ...]) -> dict[str, bytes | Path]:
    """Those of the names that a folder has a file of."""
    return {name: folder / name for name in names if (folder / name).is_file()}


def tokenizer_files(folder: Path) -> list[SourceFile]:
    """The files of a folder that say how it tokenizes, opened.

    Raises:
        CheckpointError: if one cannot be.
    """
    return [SourceFile(folder / name) for name in present(folder, TOKENIZER_FILES)]


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """A small file of JSON."""
    return json.dumps(value, indent=2).encode() + b"\n"
