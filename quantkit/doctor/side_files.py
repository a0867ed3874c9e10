"""The files next to the weights of a model: which are there, and whether each of them is a file at
all.

The doctor checks any folder with them; jobs check their source with the same rules before they
begin.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import read_json, require_json, require_plain_file
from quantkit.doctor.findings import Finding, describe, finding
from quantkit.errors import CheckpointError
from quantkit.files.links import find_outside_target
from quantkit.formats.folder import LICENSES, SIDE_FILES, SIDE_SUFFIXES
from quantkit.text.chat_template import ADDITIONAL_TEMPLATES, ChatTemplate
from quantkit.text.sentencepiece_file import read_sentencepiece
from quantkit.text.tiktoken_file import is_tiktoken, read_tiktoken

CONFIG = "config.json"
PARAMS = "params.json"
README = "README.md"
_SETTINGS = (
    CONFIG,
    PARAMS,
    "quantize_config.json",
    "quant_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
_OTHER_TOKENIZERS = ("vocab.txt", "spiece.model", "tekken.json")
_KNOWN = (*_SETTINGS, *sorted(SIDE_FILES), *_OTHER_TOKENIZERS, *LICENSES)
"""Files next to the weights that readers look for."""
_VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "merges.txt", *_OTHER_TOKENIZERS)
_READ_ELSEWHERE = {
    *_SETTINGS,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
}
"""Files whose readers report an empty file or a placeholder, with other rules."""


class SideFiles:
    """The files next to the weights at a path; the weights are not read.

    Attributes:
        path: as the user names it.
        root: the folder with the files.
        kind: of the weights, as for `Folder`.
        config: config.json; empty if it is missing or damaged.
        names: of all files and folders in `root`, in order.
        dead: known files that are broken links, pipes or folders.
    """

    def __init__(
        self, path: Path, root: Path, names: list[str], *, kind: str, config: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.root = root
        self.kind = kind
        self.config = config
        self.names = names
        self.dead = [name for name in names if self._is_dead(name)]

    def side_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file next to the weights; None if there is none.

        A damaged one is a `CheckpointError`.
        """
        path = self.root / name
        if name in self.names and path.is_file():
            return read_json(path)
        return None

    def _is_dead(self, name: str) -> bool:
        """Return whether a name is that of a side file, and there is no file of that name."""
        path = self.root / name
        if path.is_file():
            return False
        if name in _KNOWN:
            return True
        # Nobody links to a file that is not there on purpose: the hub's cache was cleared. A folder
        # or a pipe with an unknown name is somebody's own.
        return is_side_file(name) and path.is_symlink() and not path.exists()


def is_side_file(name: str) -> bool:
    """Return whether a name is that of a file next to the weights that readers may read, or jobs
    copy.
    """
    if name.startswith("."):
        return False
    return name in _KNOWN or os.path.splitext(name)[1] in SIDE_SUFFIXES


def check_dead(side: SideFiles) -> Iterator[Finding]:
    """Find known files that are no files."""
    for name in side.dead:
        yield finding("not-a-file", name, file_kind(side.root / name))


def check_contents(side: SideFiles, carried: Collection[str] = ()) -> Iterator[Finding]:
    """Find side files that are damaged, empty or git-lfs pointers, and that no other rule reads.

    Args:
        carried: names of files that are checked too although their purpose is not known, because a
            job copies them.
    """
    for name in side.names:
        path = side.root / name
        if name in _READ_ELSEWHERE or not path.is_file():
            continue
        # Any other file is somebody's own, and may contain anything.
        if name not in _KNOWN and name not in carried:
            continue
        if name in _VOCABULARY_FILES:
            rule = "damaged-tokenizer"
        else:
            rule = "damaged-side-file"
        try:
            _read_side_file(path)
        except CheckpointError as error:
            yield finding(rule, name, describe(error))
        except OSError as error:
            yield finding(rule, name, f"cannot be read: {error.strerror}")


def _read_side_file(path: Path) -> None:
    """Read a file as its name says that readers will. Raises `CheckpointError` if it is damaged."""
    require_plain_file(path)
    # A license may be empty, since no reader parses it.
    if path.stat().st_size == 0 and path.name not in LICENSES:
        raise CheckpointError("the file is empty", path=path)
    if path.suffix == ".json":
        require_json(path)
    elif path.suffix == ".jinja":
        ChatTemplate(path.read_text(encoding="utf-8", errors="replace"), path=path)
    elif path.name == "tokenizer.model":
        if is_tiktoken(path):
            read_tiktoken(path)
        else:
            read_sentencepiece(path)


def check_links(side: SideFiles) -> Iterator[Finding]:
    """Find links that lead out of the folder, which jobs do not follow."""
    for path in list_copyable_files(side):
        target = find_outside_target(path, side.root)
        if target is not None:
            yield finding(
                "link-outside", path.relative_to(side.root).as_posix(), f"leads to {target}"
            )


def list_copyable_files(side: SideFiles) -> list[Path]:
    """List the files that jobs may read or copy, and that must not be links out of the folder."""
    paths = []
    for name in side.names:
        if is_side_file(name) or name == README or name.endswith(".py"):
            paths.append(side.root / name)
    templates = side.root / ADDITIONAL_TEMPLATES
    if templates.is_dir():
        paths += sorted(templates.iterdir())
    # Broken links and folders are reported as files that are no files.
    return [path for path in paths if path.is_file()]


def file_kind(path: Path) -> str:
    """Say in a few words what is there in place of a file."""
    if path.is_symlink() and not path.exists():
        return "a link that leads nowhere"
    if path.is_dir():
        return "a folder"
    return "no regular file"
