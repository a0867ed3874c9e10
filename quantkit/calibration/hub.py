"""Calibration text from a dataset on a hub, streamed through `datasets`.

The data themselves are not kept on disk, and no code of a repository runs: `datasets` has had no
loading scripts since 4.0.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibration.documents import TEXT, joined, require_text
from quantkit.calibration.files import JSON_LINES, PARQUET
from quantkit.errors import QuantkitError, RequestError
from quantkit.files.hub import SECONDS, UnknownError, call_in_time, short
from quantkit.files.hub_answers import checked_answers, checked_commit

_SPELLING = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([^:/]*))?(?::([\w.]+))?", re.ASCII)
_SUFFIXES = (".txt", *JSON_LINES, PARQUET)
_LOCAL = "give a file of plain text, JSON lines or Parquet"


@dataclass(frozen=True)
class HubId:
    """One split of a dataset on the hub; ``config`` is None for the only one or the default.

    It is spelled ``owner/name``, ``owner/name:config``, ``owner/name:config:split`` or, without
    a config, ``owner/name::split``; the split is ``train`` where none is named.
    """

    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        split = "" if self.split == "train" else f":{self.split}"
        return self.name + (f":{self.config or ''}" if self.config or split else "") + split


def hub_id(source: str | Path) -> HubId | None:
    """The dataset that a string spells; None for a path, a file that is there, and a file's suffix."""
    found = None if isinstance(source, Path) or os.path.exists(source) else _SPELLING.fullmatch(source)
    if found is None or found[1].lower().endswith(_SUFFIXES):
        return None
    return HubId(found[1], found[2] or None, found[3] or "train")


def hub_text(dataset: HubId, limit: int) -> str:
    """The first `limit` bytes of a split's documents; no more of them is read than that takes.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds.
        RequestError: if it does not know the dataset, or the split cannot be read or has no ``text``.
        CheckpointError: if the hub's answer names no commit, or a file of it leads out of the hub's cache.
    """
    path = str(dataset)
    with _quietly(), checked_answers(path):
        revision = _revision(dataset.name, path)
        try:
            return joined(_documents(dataset, revision), limit)
        except QuantkitError:
            raise
        except Exception as error:  # of datasets, fsspec, pyarrow and the HTTP client alike
            raise RequestError(
                f"the hub dataset cannot be read: {short(error)}", path=path,
                hint="the form is owner/name:config:split; or give a file",
            ) from error  # fmt: skip


def _documents(dataset: HubId, revision: str) -> Iterator[object]:
    from datasets import load_dataset  # type: ignore[import-untyped]

    rows = load_dataset(dataset.name, dataset.config, split=dataset.split, revision=revision, streaming=True)
    if rows.column_names is not None:
        require_text(rows.column_names, str(dataset))
        rows = rows.select_columns([TEXT])
    for row in rows:
        require_text(row, str(dataset))
        yield row[TEXT]


def _revision(name: str, path: str) -> str:
    """The dataset's commit.

    Raises:
        UnreachableError, RequestError, CheckpointError: see `hub_text`.
    """
    from huggingface_hub import HfApi

    try:
        info = call_in_time(lambda: HfApi().dataset_info(name, timeout=SECONDS, expand=["sha"]), path, "dataset")
    except RequestError as error:
        raise (RequestError if isinstance(error, UnknownError) else type(error))(
            f"no such file, and {error.problem}", path=path,
            hint=error.hint if isinstance(error, UnknownError) else _LOCAL,
        ) from error  # fmt: skip
    return checked_commit(info.sha, path)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the hub's libraries from printing, and from trying again for many minutes.

    What is set for that is set back.
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
        for name in [n for n in vars(datasets.config) if n.startswith("STREAMING_") and n.endswith("_MAX_RETRIES")]:
            undo.callback(setattr, datasets.config, name, getattr(datasets.config, name))
            setattr(datasets.config, name, 1)  # for as often again tries the layer below
        yield
