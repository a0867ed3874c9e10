"""Models on the Hugging Face hub, ``hf:owner/name``: what of one is needed is downloaded into the hub's own cache.

Files are downloaded one by one with `hf_hub_download`, in daemon threads. `snapshot_download` waits for its own threads
before the process may end, which would hold up Ctrl-C until the files that they download are there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import CheckpointError, NoSpaceError, QuantkitError, RequestError, UnreachableError
from quantkit.files.hub_answers import (
    COMMIT,
    HubFile,
    announced_file,
    checked_answers,
    checked_commit,
    siblings_by_name,
)
from quantkit.files.hub_cache import CachedModel
from quantkit.json_values import shown

PREFIX = "hf:"
SPELLING = "hf:owner/name, hf:owner/name/FILE.gguf, or either with @revision"
"""What a model on the hub is called, for messages and help."""


class UnknownError(RequestError):
    """The hub knows no such repository."""


_Answer = TypeVar("_Answer")
_PART = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*"  # a path of the cache is made of it: no part is ".."
_NAME = re.compile(rf"{PREFIX}({_PART}/{_PART})(?:/([^@]+\.(?i:gguf)))?(?:@({_REVISION}))?", re.ASCII)
_SNAPSHOT = re.compile(rf"models--({_PART}?)--({_PART})/snapshots/([^/]+)", re.ASCII)
SECONDS = 8.0
"""How long an answer of the hub is waited for."""
_NOT_NOW = (408, 429, *range(500, 600))  # statuses after which another try may succeed
_SPARE_BYTES = 16 << 20
_AT_ONCE = 4
_log = logging.getLogger(__name__)

_BESIDE = re.compile(r"[^/]*\.(json|jinja|model|txt|tiktoken)|(LICENSE|NOTICE|README|USE_POLICY)[^/]*|"
                     r"additional_chat_templates/[^/]*\.jinja")  # fmt: skip
_INDEX = ".index.json"
_WEIGHTS = (  # in the order in which a folder that holds several is read
    re.compile(r"(?!consolidated|adapter_)[^/]*\.safetensors(\.index\.json)?"),
    re.compile(r"pytorch_model[^/]*\.bin(\.index\.json)?"),
    re.compile(r"consolidated\.\d+\.pth"),
)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class HubModel:
    """A model, or one GGUF file of many, at a revision; None is what the repository shows first."""

    name: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        file, revision = (f"/{self.file}" if self.file else ""), (f"@{self.revision}" if self.revision else "")
        return f"{PREFIX}{self.name}{file}{revision}"


def hub_model(path: str) -> HubModel | None:
    """The model that a text spells; None for a path.

    Raises:
        RequestError: if it begins as such a name and is none.
    """
    if not path.startswith(PREFIX) or os.path.exists(path):
        return None
    found = _NAME.fullmatch(path)
    if found is None or (found[3] or "").lower().endswith(".gguf"):
        raise RequestError("is no name of a model on the hub", found=shown(path), expected=SPELLING)
    return HubModel(found[1], found[2], found[3])


def origin(path: Path) -> dict[str, str] | None:
    """The name and the commit of a model that lies in the hub's cache; None elsewhere."""
    found = _SNAPSHOT.search(path.absolute().as_posix())
    return None if found is None else {"name": f"{found[1]}/{found[2]}", "commit": found[3]}


def download(model: HubModel) -> Path:
    """The folder, or the file, of a model in the hub's cache, with all that is needed and no more. Where the hub
    cannot be reached, what the cache holds, if that is all of it.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds, or breaks off.
        RequestError: if it does not know the model, does not give it to us, or it has no weights that are read.
        NoSpaceError: if the disk of the cache has too little space.
        CheckpointError: if the hub's answer makes no sense, or what came is not what it announced.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    with _quietly():
        try:
            info: Any = call_in_time(
                lambda: HfApi().model_info(model.name, revision=model.revision, files_metadata=True),
                str(model), "model",
            )  # fmt: skip
        except RequestError as error:
            if not isinstance(error, UnreachableError) and not HF_HUB_OFFLINE:
                raise
            found = _cached(model, error)
            if not HF_HUB_OFFLINE:
                _log.warning("%s: the hub cannot be reached; what its cache holds is taken", model)
            return found
        expected = model.revision if COMMIT.fullmatch(model.revision or "") else None
        commit = checked_commit(info.sha, str(model), expected)
        siblings = siblings_by_name(info, str(model))
        files = [announced_file(siblings[name], str(model)) for name in needed_files(siblings, model)]
        cached = CachedModel(model.name, model.file)
        missing = [file for file in files if not (cached.snapshot(commit) / file.name).is_file()]
        _require_space(sum(file.size for file in missing), model)
        _fetch(model, commit, files, cached.recorded(commit).difference(missing))
    cached.record(commit, files)
    return _opened(cached.snapshot(commit), model, [file.name for file in files])


def needed_files(names: Collection[str], model: HubModel) -> list[str]:
    """What of a repository is downloaded: configs, tokenizer, templates, licences, and one set of weights.

    Raises:
        RequestError: if it has no weights that are read, or several of GGUF.
    """
    beside = [name for name in names if _BESIDE.fullmatch(name) and not name.endswith(_INDEX)]
    if model.file is not None:
        if model.file not in names:
            raise RequestError("the repository has no such file", path=str(model), found=shown(model.file))
        return _parts(model.file, names)
    for kind in _WEIGHTS:
        found = [name for name in names if kind.fullmatch(name)]
        if not all(name.endswith(_INDEX) for name in found):
            return sorted({*beside, *found})
    first = sorted({_parts(name, names)[0] for name in names if name.lower().endswith(".gguf")})
    if len(first) > 1:
        raise RequestError(
            "the repository has several GGUF models", path=str(model), found=f"{len(first)}, such as {first[0]}",
            expected=f"one of them: {HubModel(model.name, first[0], model.revision)}",
        )  # fmt: skip
    if first:
        return sorted({*beside, *_parts(first[0], names)})
    if "adapter_config.json" in names:
        return beside  # whoever opens it says what it is
    raise RequestError("the repository has no weights that are read", path=str(model))


def call_in_time(ask: Callable[[], _Answer], path: str, what: str) -> _Answer:
    """One question to the hub: no retries are waited for where there is no network.

    Args:
        path: what errors name.
        what: kind of repository.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds, or not now.
        RequestError: if it knows no such repository, or must not be asked.
        CheckpointError: if its answer does not have the form of one.
    """
    answers: queue.SimpleQueue[tuple[_Answer | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    # In a thread, since the client's own limit holds for each address alone, and not for their look-up.
    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=SECONDS)
    except queue.Empty:
        answer, error = None, TimeoutError(f"no answer in {SECONDS:.0f} seconds")
    if type(error) is ValueError or isinstance(error, LookupError | TypeError | AttributeError | RecursionError):
        raise CheckpointError(
            f"the hub's answer cannot be read: {short(error)}", path=path, hint="try again"
        ) from error
    if error is not None:
        raise _failure(error, path, what) from error
    return answer  # type: ignore[return-value]


def short(error: Exception) -> str:
    """What a library says of an error, in a line."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def _failure(error: Exception, path: str, what: str) -> Exception:
    """One of our errors for one of the hub's library."""
    import huggingface_hub.utils

    errors: Any = huggingface_hub.utils
    if isinstance(error, errors.OfflineModeIsEnabled):
        return RequestError("HF_HUB_OFFLINE keeps from the hub", path=path, hint="unset it, or give a path")
    if isinstance(error, errors.GatedRepoError):
        return RequestError("the hub gives it to those who were allowed only", path=path, hint="log in: hf auth login")
    if isinstance(error, errors.RevisionNotFoundError):
        return RequestError("the hub knows no such revision of it", path=path)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return RequestError(
            f"the hub knows no such {what}",
            path=path,
            hint="check the spelling; for a private one, log in: hf auth login",
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return NoSpaceError("the disk of the hub's cache is full", path=path)
    if isinstance(error, OSError) and error.filename is not None:
        return RequestError(
            f"the hub's cache cannot be written: {error.strerror}", path=error.filename, hint="HF_HOME chooses another"
        )
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    kind = UnreachableError if status is None or status in _NOT_NOW else RequestError
    reason = short(error) if status is None else f"status {status}"
    return kind(f"the hub cannot be reached for a {what}: {reason}", path=path, hint="try again, or give a path")


def _fetch(model: HubModel, commit: str, files: Sequence[HubFile], checked: Collection[HubFile]) -> None:
    """Download files into the cache, some at a time, and compare each with what the hub announced.

    Args:
        checked: those of which only the size is compared.

    Raises:
        UnreachableError, RequestError, NoSpaceError, CheckpointError: see `download`.
    """
    from huggingface_hub import hf_hub_download

    waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    ended = threading.Event()
    cached = CachedModel(model.name, model.file)
    for file in files:
        waiting.put(file)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while not ended.is_set():
                file = waiting.get_nowait()
                try:
                    with checked_answers(str(model), commit, file):
                        # by its branch: the cache notes that
                        hf_hub_download(model.name, file.name, revision=model.revision)
                    cached.require_announced(commit, file, file in checked)
                except Exception as error:  # of the hub's library and the HTTP client alike
                    answers.put(error)
                else:
                    answers.put(None)

    for _ in range(min(_AT_ONCE, len(files))):
        threading.Thread(target=run, name="quantkit-hub", daemon=True).start()
    try:
        for _ in files:
            error = answers.get()
            if isinstance(error, QuantkitError):
                raise error
            if error is not None:
                raise _failure(error, str(model), "model") from error
    finally:
        ended.set()


def _cached(model: HubModel, unreachable: RequestError) -> Path:
    """What the cache holds of a model: all that was needed of it, or all of it.

    Raises:
        RequestError: the one that is given, if it holds nothing, or perhaps not everything.
    """
    found = CachedModel(model.name, model.file).complete(model.revision)
    if found is None:
        raise unreachable
    folder, names = found
    return _opened(folder, model, needed_files(names, model))


def _opened(folder: Path, model: HubModel, wanted: Sequence[str]) -> Path:
    """What is opened of a snapshot: the folder, or a GGUF file."""
    if model.file is not None:
        return folder / model.file
    gguf = [name for name in wanted if name.lower().endswith(".gguf")]
    return folder / gguf[0] if gguf else folder


def _parts(file: str, names: Collection[str]) -> list[str]:
    """The files that a GGUF model is split into, of which one is named."""
    stem = _SPLIT.sub("", file)
    if stem == file:
        return [file]
    return sorted(name for name in names if _SPLIT.search(name) and _SPLIT.sub("", name) == stem)


def _require_space(size: int, model: HubModel) -> None:
    from quantkit.memory import size_text

    cache = CachedModel(model.name, model.file).folder.parent.absolute()
    there = next(parent for parent in (cache, *cache.parents) if parent.is_dir())
    if size and (free := shutil.disk_usage(there).free) < size + _SPARE_BYTES:
        raise NoSpaceError(
            f"too little space on the disk of the hub's cache for {model}", path=cache,
            found=f"{size_text(free)} free", expected=size_text(size + _SPARE_BYTES),
            hint="HF_HOME chooses another disk",
        )  # fmt: skip


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the hub's library from printing, but for its bars on a terminal; what is set for that is set back."""
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    with ExitStack() as undo:
        logger = logging.getLogger("huggingface_hub")
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)
        if not sys.stderr.isatty() and not utils.are_progress_bars_disabled():
            undo.callback(utils.enable_progress_bars)
            utils.disable_progress_bars()
        yield
