"""Models on the Hugging Face hub, ``hf:owner/name``: what of one is needed is downloaded into the hub's own cache."""

from __future__ import annotations

import glob
import logging
import os
import queue
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import CheckpointError, NoSpaceError, RequestError, UnreachableError
from quantkit.json_values import shown

PREFIX = "hf:"
SPELLING = "hf:owner/name, hf:owner/name@revision or hf:owner/name/FILE.gguf"
"""What a model on the hub is called, for messages and help."""


class UnknownError(RequestError):
    """The hub knows no such repository."""


_Answer = TypeVar("_Answer")
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"{PREFIX}({_PART}/{_PART})(?:/([^@]+\.gguf))?(?:@([\w./-]+))?", re.ASCII)
_SNAPSHOT = re.compile(rf"models--({_PART}?)--({_PART})/snapshots/([^/]+)", re.ASCII)
SECONDS = 8.0
"""How long an answer of the hub is waited for."""
_NOT_NOW = (408, 429, *range(500, 600))  # statuses after which another try may succeed
_SPARE_BYTES = 16 << 20

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
    if found is None:
        raise RequestError("is no name of a model on the hub", found=shown(path), expected=SPELLING)
    return HubModel(found[1], found[2], found[3])


def origin(path: Path) -> dict[str, str] | None:
    """The name and the commit of a model that lies in the hub's cache; None elsewhere."""
    found = _SNAPSHOT.search(path.absolute().as_posix())
    return None if found is None else {"name": f"{found[1]}/{found[2]}", "commit": found[3]}


def download(model: HubModel) -> Path:
    """The folder, or the file, of a model in the hub's cache, with all that is needed and no more. Where the hub
    cannot be reached, what the cache holds.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds, or breaks off.
        RequestError: if it does not know the model, does not give it to us, or it has no weights that are read.
        NoSpaceError: if the disk of the cache has too little space.
        CheckpointError: if what came is not what the hub announced.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE

    with _quietly():
        try:
            info: Any = asked_in_time(
                lambda: HfApi().model_info(model.name, revision=model.revision, files_metadata=True),
                str(model),
                "model",
            )
        except RequestError as error:
            if not isinstance(error, UnreachableError) and not HF_HUB_OFFLINE:
                raise
            return _cached(model, error)
        sizes = {one.rfilename: int(one.size or 0) for one in info.siblings or ()}
        wanted = needed_files(sizes, model)
        missing = [
            name for name in wanted
            if not isinstance(try_to_load_from_cache(model.name, name, revision=info.sha), str)
        ]  # fmt: skip
        _require_space(sum(sizes[name] for name in missing), model)
        try:
            folder = Path(
                snapshot_download(  # by its branch, so that the cache knows that too
                    model.name, revision=model.revision, allow_patterns=[glob.escape(one) for one in wanted]
                )
            )
        except Exception as error:  # of the hub's library and the HTTP client alike
            raise _failure(error, str(model), "model") from error
    for name in wanted:
        there = (folder / name).stat().st_size if (folder / name).is_file() else None
        if there != sizes[name]:
            raise CheckpointError(
                "is not what the hub announced", path=folder / name,
                found="nothing" if there is None else f"{there} bytes", expected=f"{sizes[name]} bytes",
                hint="delete it from the cache, and try again",
            )  # fmt: skip
    return folder if model.file is None else folder / model.file


def needed_files(sizes: Mapping[str, int], model: HubModel) -> list[str]:
    """What of a repository is downloaded: configs, tokenizer, templates, licences, and one set of weights.

    Raises:
        RequestError: if it has no weights that are read, or several of GGUF.
    """
    beside = [name for name in sizes if _BESIDE.fullmatch(name) and not name.endswith(_INDEX)]
    if model.file is not None:
        if model.file not in sizes:
            raise RequestError("the repository has no such file", path=str(model), found=shown(model.file))
        return _parts(model.file, sizes)
    for kind in _WEIGHTS:
        found = [name for name in sizes if kind.fullmatch(name)]
        if not all(name.endswith(_INDEX) for name in found):
            return sorted({*beside, *found})
    first = sorted({_parts(name, sizes)[0] for name in sizes if name.endswith(".gguf")})
    if len(first) > 1:
        raise RequestError(
            "the repository has several GGUF models", path=str(model), found=f"{len(first)}, such as {first[0]}",
            expected=f"one of them: {PREFIX}{model.name}/{first[0]}",
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
    if isinstance(error, OSError) and error.errno == 28:
        return NoSpaceError("the disk of the hub's cache is full", path=path)
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    kind = UnreachableError if status is None or status in _NOT_NOW else RequestError
    reason = short(error) if status is None else f"status {status}"
    return kind(f"the hub cannot be reached for a {what}: {reason}", path=path, hint="try again, or give a path")


def _cached(model: HubModel, unreachable: RequestError) -> Path:
    """What the cache holds of a model.

    Raises:
        RequestError: the one that is given, if it holds nothing.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    # Not through the library: it calls a snapshot of which only some files were asked for incomplete.
    cache = Path(HF_HUB_CACHE, f"models--{model.name.replace('/', '--')}")
    revision = model.revision or "main"
    branch = cache / "refs" / revision
    folder = cache / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)
    found = folder if model.file is None else folder / model.file
    if not found.exists():
        raise unreachable
    return found


def _parts(file: str, names: Mapping[str, int]) -> list[str]:
    """The files that a GGUF model is split into, of which one is named."""
    stem = _SPLIT.sub("", file)
    if stem == file:
        return [file]
    return sorted(name for name in names if _SPLIT.search(name) and _SPLIT.sub("", name) == stem)


def _require_space(size: int, model: HubModel) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    from quantkit.memory import size_text

    cache = Path(HF_HUB_CACHE).absolute()
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
