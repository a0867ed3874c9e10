"""Rules about files: whether those that belong to the model are there, whole, and as the index says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.doctor.findings import Finding, Rule
from quantkit.doctor.folder import CONFIG, Folder, Problem, may_hold_weights
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.json_values import shown

_AGAIN = "download or copy the file again"
_FORMAT = "safetensors format"
_ALONE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}

NO_WEIGHTS = Rule(
    "no-weights", "error", "the folder holds no weights", "point at the folder that holds them", "Hugging Face folders"
)
ADAPTER = Rule(
    "adapter", "error", "it is a LoRA adapter, not a model", "merge it into its base model first", "PEFT's format"
)
PLACEHOLDER = Rule(
    "placeholder", "error", "a git-lfs pointer or a server's page lies where weights should be",
    "run 'git lfs pull', or log in and download again", "git-lfs, downloads that failed",
)  # fmt: skip
EMPTY_FILE = Rule("empty-file", "error", "a file of weights has no bytes", _AGAIN, _FORMAT)
TRUNCATED_FILE = Rule("truncated-file", "error", "a file is shorter than its header says", _AGAIN, _FORMAT)
DAMAGED_FILE = Rule("damaged-file", "error", "a file's header makes no sense, or it would run code", _AGAIN, _FORMAT)
MISSING_FILE = Rule(
    "missing-file", "error", "a file that the index names, or a part of a set, is not there", _AGAIN,
    "Hugging Face's index",
)  # fmt: skip
NOT_A_FILE = Rule(
    "not-a-file", "error", "where a file of the model should be lies a link that leads nowhere, a pipe or a folder",
    _AGAIN, "caches of the hub that were cleared",
)  # fmt: skip
DAMAGED_INDEX = Rule(
    "damaged-index", "error", "the index is no index, or names what is no file of weights in the folder",
    "download the index again", "Hugging Face's index",
)  # fmt: skip
STALE_INDEX = Rule(
    "stale-index", "error", "index and files tell different tensors",
    "download index and files of one version, or write the model again", "vllm#53537",
)  # fmt: skip
TWICE = Rule(
    "tensor-twice", "error", "a tensor lies in two files, and no index says which counts",
    "move the file away that is no part of the model", "vllm#53537",
)  # fmt: skip
STRAY_FILE = Rule(
    "stray-file", "warning", "weights lie beside those that the index lists: some readers load every file",
    "move the file away", "vllm#53537",
)  # fmt: skip
NO_INDEX = Rule(
    "no-index", "warning", "weights lie in several files without an index, or under names that some do not look for",
    "write them again with an index, or under the name that is looked for", "seen in transformers 5.23",
    ("transformers",),
)  # fmt: skip
NO_CONFIG = Rule(
    "no-config", "error", "config.json is missing", "copy it from the model's source", "Hugging Face folders"
)
DAMAGED_JSON = Rule(
    "damaged-json", "error", "config.json or a file of settings beside it is not JSON as it should be",
    "download or copy it again", "Hugging Face folders",
)  # fmt: skip
REFUSED = Rule(
    "refused", "error", "quantkit's own reader, which holds every tensor against the config, refuses it",
    "see what it says", "strict reading: `quantkit inspect`",
)  # fmt: skip

RULES = (
    NO_WEIGHTS, ADAPTER, PLACEHOLDER, EMPTY_FILE, TRUNCATED_FILE, DAMAGED_FILE, MISSING_FILE, NOT_A_FILE,
    DAMAGED_INDEX, STALE_INDEX, TWICE, STRAY_FILE, NO_INDEX, NO_CONFIG, DAMAGED_JSON, REFUSED,
)  # fmt: skip


def check(folder: Folder) -> Iterator[Finding]:
    """What is wrong with the files of a folder."""
    if folder.is_adapter:
        yield Finding(ADAPTER, folder.path.name, "adapter_config.json, and no weights of a model")
    elif not folder.kind:
        kinds = "*.safetensors, pytorch_model*.bin, consolidated.*.pth or *.gguf"
        yield Finding(NO_WEIGHTS, folder.path.name, f"no {kinds}")
    for name in folder.dead if folder.kind != "gguf" else ():
        yield Finding(NOT_A_FILE, name, _lies_there(folder.root / name))
    for problem in folder.problems:
        yield _told(folder, problem)
    if folder.kind in ("safetensors", "bin") and CONFIG not in folder.names:
        yield Finding(NO_CONFIG, CONFIG, "nothing says what the model is")
    if folder.index is not None:
        yield from _index(folder)
    else:
        for name, (first, second) in folder.twice.items():
            yield Finding(TWICE, name, f"in {first} and in {second}")
        if _is_unlisted(folder):
            first = folder.listed[0].name
            yield Finding(
                NO_INDEX,
                first,
                f"and {len(folder.listed) - 1} more, and no index"
                if folder.listed[1:]
                else f"alone, expected {_ALONE[folder.kind]}",
            )
    for path in folder.stray:
        yield Finding(STRAY_FILE, path.name, "is not in the index")


def _is_unlisted(folder: Folder) -> bool:
    """Whether whole files of weights are no single one with the name that is looked for, nor told by an index."""
    if folder.kind not in _ALONE or not folder.complete or folder.problems or folder.dead or folder.twice:
        return False
    return [one.name for one in folder.listed] != [_ALONE[folder.kind]]


def check_opened(folder: Folder) -> Iterator[Finding]:
    """What a strict reader has against a folder or file in which nothing else was found."""
    try:
        open_checkpoint(folder.listed[0] if folder.kind == "gguf" else folder.root)
    except UnsupportedError:
        return  # sound, as far as that is known
    except CheckpointError as error:
        yield Finding(REFUSED, folder.path.name, str(error))


def _told(folder: Folder, problem: Problem) -> Finding:
    """A file that could not be read."""
    error, name = problem.error, problem.path.name
    if not folder.is_listed(problem.path):
        return Finding(DAMAGED_INDEX if name.endswith(".index.json") else DAMAGED_JSON, name, _facts(problem))
    text = error.problem
    if problem.path.name in folder.names and not problem.path.is_file():
        return Finding(NOT_A_FILE, name, _lies_there(problem.path))
    if not problem.path.exists():
        known = folder.index is not None
        return Finding(MISSING_FILE, name, "the index names it" if known else "its set has more parts than are there")
    if "empty" in text:
        return Finding(EMPTY_FILE, name, "0 bytes")
    if any(one in text for one in ("git-lfs", "HTML", "error message")):
        return Finding(PLACEHOLDER, name, _facts(problem))
    return Finding(TRUNCATED_FILE if "truncated" in text else DAMAGED_FILE, name, _facts(problem))


def _lies_there(path: Path) -> str:
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
            yield Finding(DAMAGED_INDEX, name, f"the index sends it to no file of weights here: {shown(file)}")
        elif file in folder.files and name not in folder.files[file].tensors:
            yield Finding(STALE_INDEX, name, f"the index has it in {file}, which lacks it")
    for file, opened in folder.files.items():
        for name in opened.tensors:
            if folder.index.get(name) != file:
                told = folder.index.get(name)
                where = f"in {told} by the index" if told else "not in the index"
                yield Finding(STALE_INDEX, name, f"lies in {file}, and is {where}")
