"""Rules about files: whether those that belong to the model are there, whole, and as the index says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import CONFIG, Folder, may_hold_weights
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.json_values import shown

_ALONE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}


def check(folder: Folder) -> Iterator[Finding]:
    """What is wrong with the files of a folder."""
    if not folder.listed and "adapter_config.json" in folder.names:
        yield finding("adapter", folder.path.name, "adapter_config.json, and no weights of a model")
    elif not folder.kind:
        kinds = "*.safetensors, pytorch_model*.bin, consolidated.*.pth or *.gguf"
        yield finding("no-weights", folder.path.name, f"no {kinds}")
    for name in folder.dead if folder.kind != "gguf" else ():
        yield finding("not-a-file", name, _file_kind(folder.root / name))
    listed = set(folder.listed)
    for path, error in folder.problems:
        yield _unreadable(folder, path, error, is_listed=path in listed)
    if folder.kind in ("safetensors", "bin") and CONFIG not in folder.names:
        yield finding("no-config", CONFIG, "nothing says what the model is")
    if folder.index is not None:
        yield from _index(folder)
    else:
        for name, (first, second) in folder.twice.items():
            yield finding("tensor-twice", name, f"in {first} and in {second}")
        usual, names = _ALONE.get(folder.kind), [one.name for one in folder.listed]
        sound = folder.complete and not (folder.problems or folder.dead or folder.twice)
        if usual is not None and sound and names != [usual]:
            more = len(names) - 1
            yield finding(
                "no-index", names[0], f"and {more} more, and no index" if more else f"alone, expected {usual}"
            )
    for path in folder.stray:
        yield finding("stray-file", path.name, "is not in the index")


def check_opened(folder: Folder) -> Iterator[Finding]:
    """Why quantkit refuses to open a folder or file in which nothing else was found."""
    try:
        open_checkpoint(folder.listed[0] if folder.kind == "gguf" else folder.root)
    except UnsupportedError:
        return  # sound, as far as that is known
    except CheckpointError as error:
        yield finding("refused", folder.path.name, str(error))


def _unreadable(folder: Folder, path: Path, error: QuantkitError, *, is_listed: bool) -> Finding:
    name, text = path.name, error.problem
    facts = ", ".join(f"{label} {one}" for label, one in (("found", error.found), ("expected", error.expected)) if one)
    what = text + (f" ({facts})" if facts else "")
    if not is_listed:
        return finding("damaged-index" if name.endswith(".index.json") else "damaged-json", name, what)
    if name in folder.names and not path.is_file():
        return finding("not-a-file", name, _file_kind(path))
    if not path.exists():
        known = folder.index is not None
        return finding("missing-file", name, "the index names it" if known else "its set has more parts than are there")
    if "empty" in text:
        return finding("empty-file", name, "0 bytes")
    if any(one in text for one in ("git-lfs", "HTML", "error message")):
        return finding("placeholder", name, what)
    return finding("truncated-file" if "truncated" in text else "damaged-file", name, what)


def _file_kind(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return "a link that leads nowhere"
    return "a folder" if path.is_dir() else "no regular file"


def _index(folder: Folder) -> Iterator[Finding]:
    assert folder.index is not None
    for name, file in folder.index.items():
        if not isinstance(file, str) or not may_hold_weights(file):
            yield finding("damaged-index", name, f"the index names no file of weights here: {shown(file)}")
        elif file in folder.files and name not in folder.files[file].tensors:
            yield finding("stale-index", name, f"the index has it in {file}, which lacks it")
    for file, opened in folder.files.items():
        for name in opened.tensors:
            if (stated := folder.index.get(name)) != file:
                where = f"in {stated} by the index" if stated else "not in the index"
                yield finding("stale-index", name, f"is in {file}, and {where}")
