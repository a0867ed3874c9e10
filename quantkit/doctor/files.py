"""Rules about files: whether those that belong to the model are there, whole, and as the index says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import CONFIG, Folder, Problem, may_hold_weights
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.json_values import shown

_ALONE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}


def check(folder: Folder) -> Iterator[Finding]:
    """What is wrong with the files of a folder."""
    if folder.is_adapter:
        yield finding("adapter", folder.path.name, "adapter_config.json, and no weights of a model")
    elif not folder.kind:
        kinds = "*.safetensors, pytorch_model*.bin, consolidated.*.pth or *.gguf"
        yield finding("no-weights", folder.path.name, f"no {kinds}")
    for name in folder.dead if folder.kind != "gguf" else ():
        yield finding("not-a-file", name, _file_kind(folder.root / name))
    for problem in folder.problems:
        yield _unreadable(folder, problem)
    if folder.kind in ("safetensors", "bin") and CONFIG not in folder.names:
        yield finding("no-config", CONFIG, "nothing says what the model is")
    if folder.index is not None:
        yield from _index(folder)
    else:
        for name, (first, second) in folder.twice.items():
            yield finding("tensor-twice", name, f"in {first} and in {second}")
        if _is_unlisted(folder):
            first = folder.listed[0].name
            more = len(folder.listed) - 1
            what = f"and {more} more, and no index" if more else f"alone, expected {_ALONE[folder.kind]}"
            yield finding("no-index", first, what)
    for path in folder.stray:
        yield finding("stray-file", path.name, "is not in the index")


def _is_unlisted(folder: Folder) -> bool:
    """Whether the files of weights are complete, yet neither listed in an index nor one file with the usual name."""
    if folder.kind not in _ALONE or not folder.complete or folder.problems or folder.dead or folder.twice:
        return False
    return [one.name for one in folder.listed] != [_ALONE[folder.kind]]


def check_opened(folder: Folder) -> Iterator[Finding]:
    """Why quantkit refuses to open a folder or file in which nothing else was found."""
    try:
        open_checkpoint(folder.listed[0] if folder.kind == "gguf" else folder.root)
    except UnsupportedError:
        return  # sound, as far as that is known
    except CheckpointError as error:
        yield finding("refused", folder.path.name, str(error))


def _unreadable(folder: Folder, problem: Problem) -> Finding:
    error, name = problem.error, problem.path.name
    if not folder.is_listed(problem.path):
        return finding("damaged-index" if name.endswith(".index.json") else "damaged-json", name, _facts(problem))
    text = error.problem
    if problem.path.name in folder.names and not problem.path.is_file():
        return finding("not-a-file", name, _file_kind(problem.path))
    if not problem.path.exists():
        known = folder.index is not None
        return finding("missing-file", name, "the index names it" if known else "its set has more parts than are there")
    if "empty" in text:
        return finding("empty-file", name, "0 bytes")
    if any(one in text for one in ("git-lfs", "HTML", "error message")):
        return finding("placeholder", name, _facts(problem))
    return finding("truncated-file" if "truncated" in text else "damaged-file", name, _facts(problem))


def _file_kind(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return "a link that leads nowhere"
    return "a folder" if path.is_dir() else "no regular file"


def _facts(problem: Problem) -> str:
    error = problem.error
    facts = [
        f"{label} {value}" for label, value in (("found", error.found), ("expected", error.expected)) if value
    ]  # fmt: skip
    return error.problem + (f" ({', '.join(facts)})" if facts else "")


def _index(folder: Folder) -> Iterator[Finding]:
    assert folder.index is not None
    for name, file in folder.index.items():
        if not isinstance(file, str) or not may_hold_weights(file):
            yield finding("damaged-index", name, f"the index names no file of weights here: {shown(file)}")
        elif file in folder.files and name not in folder.files[file].tensors:
            yield finding("stale-index", name, f"the index has it in {file}, which lacks it")
    for file, opened in folder.files.items():
        for name in opened.tensors:
            if folder.index.get(name) != file:
                stated = folder.index.get(name)
                where = f"in {stated} by the index" if stated else "not in the index"
                yield finding("stale-index", name, f"is in {file}, and {where}")
