"""The folder with a model's tokenizer: its own, or one made from the metadata of a GGUF file."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.late import LateModule
from quantkit.errors import name_as
from quantkit.files.located import gguf_file, locate_model, read_part_headers

# A model that is no GGUF file has its own folder.
if TYPE_CHECKING:
    from quantkit.text import gguf_tokenizer, gguf_vocabulary
else:
    gguf_tokenizer = LateModule("quantkit.text.gguf_tokenizer")
    gguf_vocabulary = LateModule("quantkit.text.gguf_vocabulary")

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_folders: dict[tuple[Path, int, int], Path] = {}
_unstated: dict[Path, gguf_vocabulary.GgufUnstated] = {}


def locate_or_extract_text_folder(path: str | Path) -> Path:
    """Find the folder with a model's tokenizer, chat templates and generation settings. For a GGUF
    file, or a folder whose only tokenizer is in one, it is made from the metadata, and exists
    until the process ends.

    Raises:
        CheckpointError: if the file is damaged, or its tokenizer is.
        UnsupportedError: if its tokenizer cannot be rebuilt exactly.
    """
    model = locate_model(path)
    # A tokenizer in its own file wins over that of a GGUF file next to it.
    if any((model / name).is_file() for name in _TOKENIZERS):
        return model
    file = gguf_file(model)
    if file is None:
        return model
    # A file that was replaced gets another folder.
    state = file.stat()
    version = (file.resolve(), state.st_size, state.st_mtime_ns)
    if version not in _folders or not _folders[version].is_dir():
        folder = write_folder(read_part_headers(file)[0].metadata, file)
        _folders[version] = folder
        # Errors name the file that the user knows.
        name_as(folder, file)
    return _folders[version]


def write_folder(metadata: Mapping[str, Any], path: Path) -> Path:
    """Write the files of `gguf_tokenizer.build_folder_files` to a temporary folder, which exists
    at most until the process ends.
    """
    files = gguf_tokenizer.build_folder_files(metadata, path)
    unstated = gguf_vocabulary.gguf_unstated(metadata, path)
    folder = Path(tempfile.mkdtemp(prefix="quantkit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if unstated is not None:
        _unstated[folder] = unstated
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def find_unstated(folder: Path) -> gguf_vocabulary.GgufUnstated | None:
    """Look up what the GGUF metadata of a folder from `write_folder` does not state; None for any
    other folder.
    """
    return _unstated.get(folder)
