"""Text from a file (plain, JSON lines or Parquet), from a dataset on a hub or on disk through
`datasets`, or from Python objects.

The data of a hub's dataset are streamed and not kept on disk, and no code of a repository runs:
`datasets` has had no loading scripts since 4.0.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.base.json_values import LINES_OF_ARRAY
from quantkit.base.messages import Message, Option
from quantkit.calibration.collector import TOOLS, Collector, DocumentText, decode_utf8
from quantkit.calibration.conversations import ModelChat
from quantkit.errors import QuantkitError, RequestError
from quantkit.files.hub import SECONDS, call_in_time
from quantkit.files.hub_answers import validate_commit, validate_hub_answers
from quantkit.files.hub_failures import short

TextSource = str | Path | Iterable[object]
"""A file, a folder of `datasets`, a dataset on a hub by its name, a dataset, or strings."""

_JSON_LINES = (".json", ".jsonl")
_PARQUET = ".parquet"
_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")  # in folders that `datasets` saved
_MAX_LINE = 64 * 2**20
_ROWS_AT_ONCE = 256
_BUFFER = 2**20
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([^:/]*))?(?::([\w.]+))?", re.ASCII)


@dataclass(frozen=True)
class HubId:
    """One split of a dataset on the hub; ``config`` is None for the only one or the default.

    It is spelled ``owner/name``, ``owner/name:config``, ``owner/name:config:split`` or, without a
    config, ``owner/name::split``; the default split is ``train``.
    """

    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        if self.split == "train":
            split = ""
        else:
            split = f":{self.split}"
        return self.name + (f":{self.config or ''}" if self.config or split else "") + split


def hub_id(source: str | Path) -> HubId | None:
    """Return the dataset that a string spells; None for a path, an existing file, and a file's
    suffix.
    """
    if isinstance(source, Path) or os.path.exists(source):
        found = None
    else:
        found = _HUB_ID.fullmatch(source)
    if found is None or found[1].lower().endswith((".txt", *_JSON_LINES, _PARQUET)):
        return None
    return HubId(found[1], found[2] or None, found[3] or "train")


def has_documents(path: Path) -> bool:
    """Return whether a path is a folder or a file of documents, not plain text."""
    return path.suffix.lower() in (*_JSON_LINES, _PARQUET) or path.is_dir()


def read_documents(
    source: TextSource,
    limit: int,
    *,
    column: str | None = None,
    chat: ModelChat | None = None,
    name: str = "calibration",
) -> DocumentText:
    """Return the first `limit` bytes of a source's documents, separated by empty lines where no
    template ends them.

    Args:
        source: UTF-8 text; by the suffix, JSON lines or Parquet; a folder that `datasets` saved; a
            dataset on a hub, of which no more than necessary is downloaded; or a `Dataset`, strings
            or rows in Python.
        column: has the documents; None is ``text``, ``messages`` or ``conversations``, or the only
            one of strings.
        chat: renders conversations, which are lists of messages; None for a base model.
        name: of a source in Python, for messages.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds.
        RequestError: if there is no such source, it cannot be read, is not what its suffix says, or
            no column has the text.
        CheckpointError: if the hub's answer names no commit, or a file of it leads out of the hub's
            cache.
    """
    if not isinstance(source, str | os.PathLike):
        collector = Collector(name, limit, column, chat)
        collector.collect(
            _dataset_rows(source, collector)
            if hasattr(source, "features")
            else _number_rows(source)
        )
        return collector.text()
    if dataset := hub_id(source):
        collector = Collector(str(dataset), limit, column, chat)
        _collect_hub(dataset, collector)
        return collector.text(source=str(dataset))
    path = Path(source)
    if path.is_dir():
        if not any((path / file).is_file() for file in _SAVED_DATASET_FILES):
            raise RequestError(
                "is not a folder of text",
                path=path,
                expected=(
                    "a file of plain text, JSON lines or Parquet, or a folder that"
                    " Dataset.save_to_disk wrote"
                ),
            )
        collector = Collector(path, limit, column, chat)
        with _translate_dataset_errors(path, "give a folder that Dataset.save_to_disk wrote"):
            collector.collect(_dataset_rows(_load_saved_dataset(path), collector))
        return collector.text()
    return _file_text(path, limit, column, chat)


def _file_text(path: Path, limit: int, column: str | None, chat: ModelChat | None) -> DocumentText:
    suffix = path.suffix.lower()
    collector = Collector(path, limit, column, chat)
    try:
        with path.open("rb") as file:
            if suffix in _JSON_LINES:
                collector.collect(_json_rows(file, path))
            elif suffix == _PARQUET:
                collector.collect(_parquet_rows(path, collector))
            elif column is not None:
                raise RequestError(
                    "plain text has no columns",
                    path=path,
                    hint=Message("leave ", Option("text_column"), " out"),
                )
            else:
                # Grows with the file, since a limit may be far beyond it.
                raw = bytearray()
                while len(raw) < limit and (part := file.read(min(limit - len(raw), _BUFFER))):
                    raw += part
                # The rest is hashed in the same pass, as a pipe can be read only once.
                digest = hashlib.file_digest(file, lambda: hashlib.sha256(raw))
                return DocumentText(decode_utf8(raw, whole=len(raw) < limit), digest.hexdigest())
            file.seek(0)
            return collector.text(hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise RequestError(
            f"the text cannot be read: {error.strerror or error}",
            path=path,
            hint="give a file, or a hub dataset as owner/name:config:split",
        ) from error
    except ValueError as error:
        expected = {_PARQUET: "Parquet", **dict.fromkeys(_JSON_LINES, "JSON lines")}.get(
            suffix, "UTF-8 text"
        )
        raise RequestError(
            f"cannot be read as text: {error}", path=path, expected=expected
        ) from error


def _collect_hub(dataset: HubId, collector: Collector) -> None:
    path = str(dataset)
    with _quiet_libraries(), validate_hub_answers(path):
        from datasets import load_dataset  # type: ignore[import-untyped]
        from huggingface_hub import HfApi

        try:
            info = call_in_time(
                lambda: HfApi().dataset_info(dataset.name, timeout=SECONDS, expand=["sha"]),
                path,
                "dataset",
            )
        except RequestError as error:
            hint = "; or ".join(
                [*filter(None, [error.hint]), "give a file of plain text, JSON lines or Parquet"]
            )
            raise type(error)(f"no such file, and {error.problem}", path=path, hint=hint) from error
        with _translate_dataset_errors(path, "the form is owner/name:config:split; or give a file"):
            revision = validate_commit(info.sha, path)
            rows = load_dataset(
                dataset.name, dataset.config, split=dataset.split, revision=revision, streaming=True
            )
            collector.collect(_dataset_rows(rows, collector))


@contextmanager
def _translate_dataset_errors(path: str | Path, hint: str) -> Iterator[None]:
    """Turn errors of datasets, fsspec, pyarrow or the HTTP client into a `RequestError`."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:
        raise RequestError(
            f"the dataset cannot be read: {short(error)}", path=path, hint=hint
        ) from error


def _load_saved_dataset(path: Path) -> Any:
    from datasets import load_from_disk

    from_disk = load_from_disk(str(path))
    if isinstance(from_disk, dict):
        raise RequestError(
            "is a DatasetDict, not one of its splits",
            path=path,
            found=", ".join(from_disk),
            hint=f"use the folder of a split: {path / next(iter(from_disk))}",
        )
    return from_disk


def _dataset_rows(rows: Any, collector: Collector) -> Iterator[tuple[str, object]]:
    """Return the rows of a `Dataset` or `IterableDataset`, with only the columns to read if the
    columns are known.
    """
    if rows.features is not None:
        columns = {}
        for name, kind in rows.features.items():
            columns[name] = str(getattr(kind, "dtype", "")).endswith("string")
        rows = rows.select_columns(collector.choose_columns(columns))
    return _number_rows(_without_nulls(row) for row in rows)


def _without_nulls(row: Any) -> Any:
    """Leave the nulls out of a row's tools: in a table, every schema has the keys of all others."""
    if isinstance(row, Mapping) and row.get(TOOLS) is not None:
        return {**row, TOOLS: _prune(row[TOOLS])}
    return row


def _prune(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _prune(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_prune(item) for item in value]
    return value


def _number_rows(rows: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _json_rows(file: BinaryIO, path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), 1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith(b"["):
            raise RequestError(
                "contains a JSON array",
                path=path,
                expected="a JSON object on each line",
                hint=LINES_OF_ARRAY,
            )
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ValueError(f"line {number} is not a JSON object")
        yield f"line {number}", document


def _parquet_rows(path: Path, collector: Collector) -> Iterator[tuple[str, object]]:
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        with ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as table:
            names = collector.choose_columns(
                {field.name: str(field.type).endswith("string") for field in table.schema_arrow}
            )
            batches = table.iter_batches(_ROWS_AT_ONCE, columns=names, use_threads=False)
            yield from _number_rows(
                _without_nulls(row) for batch in batches for row in batch.to_pylist()
            )
    except ArrowException as error:
        raise ValueError(str(error)) from error


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep the hub's libraries from printing and from many minutes of retries; all settings are
    restored.
    """
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
        for name in [
            n
            for n in vars(datasets.config)
            if n.startswith("STREAMING_") and n.endswith("_MAX_RETRIES")
        ]:
            undo.callback(setattr, datasets.config, name, getattr(datasets.config, name))
            # The layer below retries as often.
            setattr(datasets.config, name, 1)
        yield
