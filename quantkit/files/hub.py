"""Download the files that are needed of a model on the Hugging Face hub, ``hf:owner/name``, into
the hub's cache.

`hf_hub_download` does the work, file by file. This module adds what it does not do: daemon threads,
since `snapshot_download` waits for its threads and so delays Ctrl-C; one limit of time that
includes name resolution; a check of the disk's space before a download, of which the library only
warns; the choice of one set of weights; and, in `hub_answers` and `hub_cache`, a check of what the
hub answers and sends, which the library uses unchecked.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quantkit.base.json_values import format_value
from quantkit.errors import NoSpaceError, QuantkitError, RequestError, UnreachableError
from quantkit.files.gguf_types import parse_part_stem
from quantkit.files.hub_answers import (
    COMMIT,
    HubFile,
    files_by_name,
    limit_download,
    parse_hub_file,
    validate_commit,
    validate_hub_answers,
)
from quantkit.files.hub_cache import CachedModel
from quantkit.files.hub_failures import translate_read_error
from quantkit.files.hub_names import HubModel
from quantkit.files.hub_threads import result_in_time, run_in_threads

_Answer = TypeVar("_Answer")
SECONDS = 8.0
"""Time limit for an answer of the hub."""
_SPARE_BYTES = 16 << 20
_NUM_THREADS = 4
_log = logging.getLogger(__name__)

_SIDE_FILES = re.compile(
    r"[^/]*\.(json|jinja|model|txt|tiktoken)|(LICENSE|NOTICE|README|USE_POLICY)[^/]*|"
    r"additional_chat_templates/[^/]*\.jinja"
)
_INDEX = ".index.json"
# The first kind that a folder has is read.
_WEIGHTS = (
    re.compile(r"(?!consolidated|adapter_)[^/]*\.safetensors(\.index\.json)?"),
    re.compile(r"pytorch_model[^/]*\.bin(\.index\.json)?"),
    re.compile(r"consolidated\.\d+\.pth"),
)


def download(model: HubModel) -> Path:
    """Download the files of a model that are needed, and return its folder, or its GGUF file, in
    the hub's cache.

    If the hub cannot be reached, use a complete model in the cache.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds, or a download breaks off.
        RequestError: if the hub does not know the model, access is denied, or it has no weights
            that quantkit reads.
        NoSpaceError: if the disk of the cache has too little space.
        CheckpointError: if the hub's answer is invalid, or a file is not what the hub announced.
    """
    # The library takes long to import, and models on this machine do not need it.
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    cached = CachedModel(model.name, model.file)
    with silence_library(with_bars=True):
        try:
            request = partial(
                HfApi().model_info, model.name, revision=model.revision, files_metadata=True
            )
            info = call_in_time(request, str(model), "model")
        except RequestError as error:
            # A hub that answers decides: an unknown model or revision is an error, cached or not.
            if not isinstance(error, UnreachableError) and not HF_HUB_OFFLINE:
                raise
            cached_path = _find_complete(cached, model)
            if cached_path is None:
                raise
            if not HF_HUB_OFFLINE:
                _log.warning("%s: the hub cannot be reached; the cached model is used", model)
            return cached_path
        # The hub resolves a branch or a tag; a commit must come back unchanged.
        if COMMIT.fullmatch(model.revision or ""):
            expected = model.revision
        else:
            expected = None
        commit = validate_commit(info.sha, str(model), expected)
        siblings = files_by_name(info, str(model))
        names = select_download_files(siblings, model)
        files: list[HubFile] = []
        missing: list[HubFile] = []
        for name in names:
            file = parse_hub_file(siblings[name], str(model))
            files.append(file)
            if not (cached.snapshot(commit) / name).is_file():
                missing.append(file)
        _require_space(sum(file.size for file in missing), model)
        # A missing file is hashed after its download, whatever the record says.
        _fetch(model, commit, files, cached.read_record(commit).difference(missing))
    # After all downloads: a record names only files that were checked.
    cached.record(commit, files)
    return _choose_model_path(cached.snapshot(commit), model, names)


def _find_complete(cached: CachedModel, model: HubModel) -> Path | None:
    """Find the path of a model in the cache; None if a file that is needed is not complete."""
    folder = cached.find_snapshot(model.revision)
    if folder is None:
        return None
    sizes = cached.list_files(folder.name)
    if not sizes:
        return None
    names = select_download_files(sizes, model)
    for name in names:
        path = folder / name
        if not path.is_file() or path.stat().st_size != sizes[name]:
            return None
    return _choose_model_path(folder, model, names)


def select_download_files(names: Collection[str], model: HubModel) -> list[str]:
    """Select the files to download: configs, tokenizer, templates, licences, and one set of
    weights.

    Raises:
        RequestError: if the repository has no weights that quantkit reads, or several GGUF models.
    """
    side_files: list[str] = []
    for name in names:
        # An index belongs to a set of weights, of which only one is selected.
        if _SIDE_FILES.fullmatch(name) and not name.endswith(_INDEX):
            side_files.append(name)
    # Files of GGUF models; the parts of a split model together.
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf"):
            models.setdefault(parse_part_stem(name) or name, []).append(name)
    # A GGUF file holds config and tokenizer, so no side files are needed.
    if model.file is not None:
        if model.file not in names:
            raise RequestError(
                "the repository has no such file", path=str(model), found=format_value(model.file)
            )
        return models[parse_part_stem(model.file) or model.file]
    for kind in _WEIGHTS:
        weights = [name for name in names if kind.fullmatch(name)]
        # An index without weights does not count.
        if not all(name.endswith(_INDEX) for name in weights):
            return sorted({*side_files, *weights})
    if len(models) > 1:
        first = min(parts[0] for parts in models.values())
        several = f"{len(models)}, such as {first}"
        expected = f"one of them: {replace(model, file=first)}"
        raise RequestError(
            "the repository has several GGUF models",
            path=str(model),
            found=several,
            expected=expected,
        )
    if models:
        return sorted({*side_files, *next(iter(models.values()))})
    if "adapter_config.json" in names:
        # Opening it reports what is missing.
        return side_files
    raise RequestError("the repository has no weights in a supported format", path=str(model))


def call_in_time(request: Callable[[], _Answer], path: str, repository_kind: str) -> _Answer:
    """Make one request to the hub, without the library's retries.

    Args:
        path: for errors.
        repository_kind: for errors, such as ``model``.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds, or is overloaded.
        RequestError: if it knows no such repository, or HF_HUB_OFFLINE forbids the request.
        CheckpointError: if the answer is malformed.
    """
    try:
        return result_in_time(request, SECONDS)
    # Of the hub's library, its HTTP client, or Python, if an answer has an unexpected structure.
    except Exception as error:
        raise translate_read_error(error, path, repository_kind) from error


def _fetch(
    model: HubModel, commit: str, files: Sequence[HubFile], checked: Collection[HubFile]
) -> None:
    """Download files into the cache in parallel, and compare each, or the size if it is `checked`,
    with what the hub announced; the errors are those of `download`.
    """
    from huggingface_hub import hf_hub_download

    cached = CachedModel(model.name, model.file)

    def fetch(file: HubFile) -> None:
        with validate_hub_answers(str(model), commit, file):
            # By branch, not by commit: the library then records the branch's commit in the cache,
            # where it is found without network.
            hf_hub_download(
                model.name,
                file.name,
                revision=model.revision,
                tqdm_class=limit_download(file, str(model)),
            )
        cached.require_announced(commit, file, file in checked)

    tasks: list[Callable[[], None]] = []
    for file in files:
        tasks.append(partial(fetch, file))
    try:
        # By commit, the library would read ETags from its list of files, not ask the hub.
        if model.revision == commit and len(checked) < len(files):
            cached.forget_listing(commit)
        run_in_threads(tasks, _NUM_THREADS)
    except QuantkitError:
        raise
    # Of the hub's library or the HTTP client.
    except Exception as error:
        raise translate_read_error(error, str(model), "model") from error


def _choose_model_path(folder: Path, model: HubModel, file_names: Sequence[str]) -> Path:
    """Choose the path to open: the folder of a snapshot, or a GGUF file in it."""
    if model.file is not None:
        return folder / model.file
    for name in file_names:
        if name.lower().endswith(".gguf"):
            return folder / name
    return folder


def _require_space(size: int, model: HubModel) -> None:
    from quantkit.base.memory import size_text

    if not size:
        return
    cache = CachedModel(model.name, model.file).folder.parent.absolute()
    # The cache may not exist before the first download.
    existing = cache
    while not existing.is_dir():
        existing = existing.parent
    needed = size + _SPARE_BYTES
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise NoSpaceError(
            f"the disk of the hub's cache has too little space for {model}",
            path=cache,
            found=f"{size_text(free)} free",
            expected=size_text(needed),
            hint="set HF_HOME to a folder on another disk",
        )


@contextmanager
def silence_library(*, with_bars: bool = False) -> Iterator[None]:
    """Silence the hub's library for a while, except for progress bars on a terminal if they are
    wanted.
    """
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    logger = logging.getLogger("huggingface_hub")
    # Progress bars write control characters, which are of no use in a file.
    shows_bars = with_bars and sys.stderr.isatty()
    with warnings.catch_warnings(), ExitStack() as undo:
        warnings.simplefilter("ignore")
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)
        if not shows_bars and not utils.are_progress_bars_disabled():
            undo.callback(utils.enable_progress_bars)
            utils.disable_progress_bars()
        yield
