"""Calibration text from a file (plain, JSON lines or Parquet), or from a dataset on a hub through `datasets`.

The data of a hub's dataset are streamed and not kept on disk, and no code of a repository runs: `datasets` has had no
loading scripts since 4.0.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import QuantkitError, RequestError
from quantkit.files.hub import SECONDS, call_in_time, short
from quantkit.files.hub_answers import checked_answers, checked_commit

_TEXT = "text"  # the key or column that holds a document
_SEPARATOR = b"\n\n"
_JSON_LINES = (".json", ".jsonl")
_PARQUET = ".parquet"
_MAX_LINE = 64 * 2**20
_ROWS_AT_ONCE = 256
_BUFFER = 2**20
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([^:/]*))?(?::([\w.]+))?", re.ASCII)


@dataclass(frozen=True)
class HubId:
    """One split of a dataset on the hub; ``config`` is None for the only one or the default.

    It is spelled ``owner/name``, ``owner/name:config``, ``owner/name:config:split`` or, without a config,
    ``owner/name::split``; the default split is ``train``.
    """

    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        split = "" if self.split == "train" else f":{self.split}"
        return self.name + (f":{self.config or ''}" if self.config or split else "") + split


def hub_id(source: str | Path) -> HubId | None:
    """The dataset that a string spells; None for a path, an existing file, and a file's suffix."""
    found = None if isinstance(source, Path) or os.path.exists(source) else _HUB_ID.fullmatch(source)
    if found is None or found[1].lower().endswith((".txt", *_JSON_LINES, _PARQUET)):
        return None
    return HubId(found[1], found[2] or None, found[3] or "train")


def file_text(path: Path, limit: int) -> tuple[str, str]:
    """The first `limit` bytes of the text of a file, and the sha256 of the whole file: of UTF-8 text, or by its suffix
    of JSON lines with a ``text`` each, or Parquet with a column ``text``. If the file cannot be read, or is not what
    its suffix says, a `RequestError` is raised."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            if suffix in _JSON_LINES:
                text = _joined(_json_documents(file, path), limit)
            elif suffix == _PARQUET:
                text = _joined(_parquet_documents(path), limit)
            else:
                raw = bytearray()  # grows with the file, since a limit may be far beyond it
                while len(raw) < limit and (part := file.read(min(limit - len(raw), _BUFFER))):
                    raw += part
                # The rest is hashed in the same pass, as a pipe can be read only once.
                digest = hashlib.file_digest(file, lambda: hashlib.sha256(raw))
                return _decoded(raw, whole=len(raw) < limit), digest.hexdigest()
            file.seek(0)
            return text, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(
            f"the calibration text cannot be read: {error.strerror or error}", path=path,
            hint="give a file, or a hub dataset as owner/name:config:split",
        ) from error  # fmt: skip
    except ValueError as error:
        expected = {_PARQUET: "Parquet", **dict.fromkeys(_JSON_LINES, "JSON lines")}.get(suffix, "UTF-8 text")
        raise RequestError(f"is no calibration text: {error}", path=path, expected=expected) from error


def hub_text(dataset: HubId, limit: int) -> str:
    """The first `limit` bytes of a split's documents; no more than necessary is downloaded.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds.
        RequestError: if there is no such dataset, or the split cannot be read or has no ``text``.
        CheckpointError: if the hub's answer names no commit, or a file of it leads out of the hub's cache.
    """
    path = str(dataset)
    with _quiet_libraries(), checked_answers(path):
        from huggingface_hub import HfApi

        try:
            info = call_in_time(
                lambda: HfApi().dataset_info(dataset.name, timeout=SECONDS, expand=["sha"]), path, "dataset"
            )
        except RequestError as error:
            hint = "; or ".join([*filter(None, [error.hint]), "give a file of plain text, JSON lines or Parquet"])
            raise type(error)(f"no such file, and {error.problem}", path=path, hint=hint) from error
        try:
            return _joined(_hub_documents(dataset, checked_commit(info.sha, path)), limit)
        except QuantkitError:
            raise
        except Exception as error:  # of datasets, fsspec, pyarrow or the HTTP client
            raise RequestError(
                f"the hub dataset cannot be read: {short(error)}", path=path,
                hint="the form is owner/name:config:split; or give a file",
            ) from error  # fmt: skip


def _json_documents(file: BinaryIO, path: Path) -> Iterator[object]:
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ValueError(f"line {number} is no JSON object")
        _require_text(document, path)
        yield document[_TEXT]


def _parquet_documents(path: Path) -> Iterator[object]:
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        with ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as table:
            _require_text(table.schema_arrow.names, path)
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[_TEXT], use_threads=False):
                yield from batch.column(0).to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error


def _hub_documents(dataset: HubId, revision: str) -> Iterator[object]:
    from datasets import load_dataset  # type: ignore[import-untyped]

    rows = load_dataset(dataset.name, dataset.config, split=dataset.split, revision=revision, streaming=True)
    if rows.column_names is not None:
        _require_text(rows.column_names, str(dataset))
        rows = rows.select_columns([_TEXT])
    for row in rows:
        _require_text(row, str(dataset))
        yield row[_TEXT]


def _require_text(names: Collection[str], path: str | Path) -> None:
    if _TEXT not in names:
        raise RequestError(
            "has no text to calibrate on", path=path, found=", ".join(names) or "nothing", expected=_TEXT
        )


def _joined(documents: Iterable[object], limit: int) -> str:
    """The documents, separated by empty lines and cut after `limit` bytes of UTF-8; None is an empty document."""
    parts: list[bytes] = []
    size = 0
    for number, document in enumerate(documents, 1):
        if not isinstance(document, str | None):
            raise ValueError(f"the {_TEXT} of document {number} is of type {type(document).__name__}")
        parts.append((document or "").encode())
        size += len(parts[-1]) + len(_SEPARATOR)
        if size >= limit:
            break
    return _decoded(_SEPARATOR.join(parts)[:limit], whole=False)


def _decoded(raw: bytes | bytearray, *, whole: bool) -> str:
    """The text of UTF-8 bytes; unless `whole`, a last character that was cut is left out."""
    return codecs.getincrementaldecoder("utf-8")().decode(raw, final=whole)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep the hub's libraries from printing and from many minutes of retries; all settings are restored."""
    with warnings.catch_warnings(), ExitStack() as undo:
        warnings.simplefilter("ignore")
        import datasets
        from huggingface_hub import utils

        for logger in (logging.getLogger("datasets"), logging.getLogger("huggingface_hub")):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        for bars, groups in ((datasets, ()), (utils, ("huggingface_hub",))):
            if not bars.are_progress_bars_disabled(*groups):
                undo.callback(bars.enable_progress_bars, *groups)
                bars.disable_progress_bars(*groups)
        for name in [n for n in vars(datasets.config) if n.startswith("STREAMING_") and n.endswith("_MAX_RETRIES")]:
            undo.callback(setattr, datasets.config, name, getattr(datasets.config, name))
            setattr(datasets.config, name, 1)  # the layer below retries as often
        yield
