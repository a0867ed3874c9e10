"""Calibration text from a file: plain, JSON lines or Parquet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from quantkit.calibration.documents import TEXT, decoded, joined, require_text
from quantkit.errors import RequestError

JSON_LINES = (".json", ".jsonl")
PARQUET = ".parquet"
_LONGEST_LINE = 64 * 2**20
_ROWS_AT_ONCE = 256
_BUFFER = 2**20


def file_text(path: Path, limit: int) -> tuple[str, str]:
    """The first `limit` bytes of a file's text, and the sha256 of the whole file.

    Args:
        path: UTF-8 text, or by its suffix JSON lines with a ``text`` each, or Parquet with
            a column ``text``.

    Raises:
        RequestError: if the file cannot be read, or is not what its suffix says.
    """
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            if suffix in JSON_LINES:
                text = joined(_json_documents(file, path), limit)
            elif suffix == PARQUET:
                text = joined(_parquet_documents(path), limit)
            else:
                raw = _first_bytes(file, limit)
                # In one go: what comes through a pipe is there once.
                digest = hashlib.file_digest(file, lambda: hashlib.sha256(raw))
                return decoded(raw, whole=len(raw) < limit), digest.hexdigest()
            file.seek(0)
            return text, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(
            f"the calibration text cannot be read: {error.strerror or error}", path=path,
            hint="give a file, or a hub dataset as owner/name:config:split",
        ) from error  # fmt: skip
    except ValueError as error:
        expected = {PARQUET: "Parquet", **dict.fromkeys(JSON_LINES, "JSON lines")}.get(suffix, "UTF-8 text")
        raise RequestError(f"is no calibration text: {error}", path=path, expected=expected) from error


def _first_bytes(file: BinaryIO, limit: int) -> bytearray:
    """What a file begins with: memory is taken as it comes, since a limit may be far beyond any file."""
    raw = bytearray()
    while len(raw) < limit and (part := file.read(min(limit - len(raw), _BUFFER))):
        raw += part
    return raw


def _json_documents(file: BinaryIO, path: Path) -> Iterator[object]:
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ValueError(f"line {number} is no JSON object")
        require_text(document, path)
        yield document[TEXT]


def _parquet_documents(path: Path) -> Iterator[object]:
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        with ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as table:
            require_text(table.schema_arrow.names, path)
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[TEXT], use_threads=False):
                yield from batch.column(0).to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error
