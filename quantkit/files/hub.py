"""Models on the Hugging Face hub, ``hf:owner/name``: what of one is needed is downloaded into the hub's own cache."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import CheckpointError, NoSpaceError, RequestError, UnreachableError
from quantkit.json_values import shown

PREFIX = "hf:"
SPELLING = "hf:owner/name, hf:owner/name/FILE.gguf, or either with @revision"
"""What a model on the hub is called, for messages and help."""


class UnknownError(RequestError):
    """The hub knows no such repository."""


_Answer = TypeVar("_Answer")
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"{PREFIX}({_PART}/{_PART})(?:/([^@]+\.(?i:gguf)))?(?:@([\w./-]+))?", re.ASCII)
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
_NO_FILE = re.compile(r"[\\\x00-\x1f\x7f]")
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
        CheckpointError: if what came is not what the hub announced.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE

    with _quietly():
        try:
            info: Any = asked_in_time(
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
        sizes = {one.rfilename: int(one.size or 0) for one in info.siblings or ()}
        wanted = needed_files(sizes, model)
        missing = [
            name for name in wanted
            if not isinstance(try_to_load_from_cache(model.name, name, revision=info.sha), str)
        ]  # fmt: skip
        _require_space(sum(sizes[name] for name in missing), model)
        _fetch(model, wanted)
    folder = _cache(model) / "snapshots" / info.sha
    for name in wanted:
        there = (folder / name).stat().st_size if (folder / name).is_file() else None
        if there != sizes[name]:
            raise CheckpointError(
                "is not what the hub announced", path=folder / name,
                found="nothing" if there is None else f"{there} bytes", expected=f"{sizes[name]} bytes",
                hint="delete it from the cache, and try again",
            )  # fmt: skip
    _record_complete(model, info.sha, {name: sizes[name] for name in wanted})
    return _opened(folder, model, wanted)


def needed_files(sizes: Mapping[str, int], model: HubModel) -> list[str]:
    """What of a repository is downloaded: configs, tokenizer, templates, licences, and one set of weights.

    Raises:
        RequestError: if it has no weights that are read, several of GGUF, or a name that is none of a file.
    """
    for name in sizes:
        if _NO_FILE.search(name) or any(part in ("", ".", "..") for part in name.split("/")):
            raise RequestError("the repository has a file whose name is none", path=str(model), found=shown(name))
    beside = [name for name in sizes if _BESIDE.fullmatch(name) and not name.endswith(_INDEX)]
    if model.file is not None:
        if model.file not in sizes:
            raise RequestError("the repository has no such file", path=str(model), found=shown(model.file))
        return _parts(model.file, sizes)
    for kind in _WEIGHTS:
        found = [name for name in sizes if kind.fullmatch(name)]
        if not all(name.endswith(_INDEX) for name in found):
            return sorted({*beside, *found})
    first = sorted({_parts(name, sizes)[0] for name in sizes if name.lower().endswith(".gguf")})
    if len(first) > 1:
        raise RequestError(
            "the repository has several GGUF models", path=str(model), found=f"{len(first)}, such as {first[0]}",
            expected=f"one of them: {HubModel(model.name, first[0], model.revision)}",
        )  # fmt: skip
    if first:
        return sorted({*beside, *_parts(first[0], sizes)})
    if "adapter_config.json" in sizes:
        return beside  # whoever opens it says what it is
    raise RequestError("the repository has no weights that are read", path=str(model))


def asked_in_time(ask: Callable[[], _Answer], path: str, what: str) -> _Answer:
    """One question to the hub: no retries are waited for where there is no network.

    Args:
        path: what errors name.
        what: kind of repository.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds, or not now.
        RequestError: if it knows no such repository, or must not be asked.
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
    if error is not None:
        raise _failure(error, path, what) from error
    return answer  # type: ignore[return-value]


def short(error: Exception) -> str:
    """What a library says of an error, in a line."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def _failure(error: Exception, path: str, what: str) -> Exception:
    """One of our errors for one of the hub's library."""
    from huggingface_hub import errors

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


def _fetch(model: HubModel, wanted: Sequence[str]) -> None:
    """Download files into the cache, some at a time.

    In threads that end with the process: those of the hub's library are waited for, so that Ctrl-C would not end it.

    Raises:
        UnreachableError, RequestError, NoSpaceError: see `download`.
    """
    from huggingface_hub import hf_hub_download

    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    for name in wanted:
        waiting.put(name)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = waiting.get_nowait()
                try:
                    hf_hub_download(model.name, name, revision=model.revision)  # by its branch: the cache notes that
                except Exception as error:  # of the hub's library and the HTTP client alike
                    answers.put(error)
                else:
                    answers.put(None)

    for _ in range(min(_AT_ONCE, len(wanted))):
        threading.Thread(target=run, name="quantkit-hub", daemon=True).start()
    for _ in wanted:
        if (error := answers.get()) is not None:
            raise _failure(error, str(model), "model") from error


def _cache(model: HubModel) -> Path:
    """What the hub's cache calls a model's folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, f"models--{model.name.replace('/', '--')}")


def _record(model: HubModel, commit: str) -> Path:
    """Where is noted what was needed of a model, once all of it was there."""
    asked = "" if model.file is None else f"-{sha256(model.file.encode()).hexdigest()[:16]}"
    return _cache(model) / "quantkit" / f"{commit}{asked}.json"


def _record_complete(model: HubModel, commit: str, sizes: Mapping[str, int]) -> None:
    path = _record(model, commit)
    with contextlib.suppress(OSError):  # of a cache that others own: it is asked for again
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(sizes))


def _cached(model: HubModel, unreachable: RequestError) -> Path:
    """What the cache holds of a model: all that was needed of it, or all of it.

    Raises:
        RequestError: the one that is given, if it holds nothing, or perhaps not everything.
    """
    cache, revision = _cache(model), model.revision or "main"
    branch = cache / "refs" / revision
    commit = branch.read_text().strip() if branch.is_file() else revision
    folder, record = cache / "snapshots" / commit, _record(model, commit)
    try:
        sizes: dict[str, int] = json.loads(record.read_text())
        complete = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        sizes, complete = {}, False
    if not complete:
        sizes = _whole(model, folder)
    if not sizes:
        raise unreachable
    return _opened(folder, model, needed_files(sizes, model))


def _whole(model: HubModel, folder: Path) -> dict[str, int]:
    """The files of a snapshot that the hub's library knows to be complete; none of another."""
    from huggingface_hub import errors, snapshot_download

    listed = _cache(model) / "trees" / f"{folder.name}.json"  # without it, and before 1.0, it takes what is there
    if not listed.is_file() or not hasattr(errors, "IncompleteSnapshotError"):
        return {}
    try:
        snapshot_download(model.name, revision=model.revision, local_files_only=True)
    except Exception:
        return {}
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _opened(folder: Path, model: HubModel, wanted: Sequence[str]) -> Path:
    """What is opened of a snapshot: the folder, or a GGUF file."""
    if model.file is not None:
        return folder / model.file
    gguf = [name for name in wanted if name.lower().endswith(".gguf")]
    return folder / gguf[0] if gguf else folder


def _parts(file: str, names: Mapping[str, int]) -> list[str]:
    """The files that a GGUF model is split into, of which one is named."""
    stem = _SPLIT.sub("", file)
    if stem == file:
        return [file]
    return sorted(name for name in names if _SPLIT.search(name) and _SPLIT.sub("", name) == stem)


def _require_space(size: int, model: HubModel) -> None:
    from quantkit.memory import size_text

    cache = _cache(model).parent.absolute()
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
