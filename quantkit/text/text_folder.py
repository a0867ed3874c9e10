"""Where the files lie that say how a model tokenizes, is told conversations, and draws tokens."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from quantkit.errors import name_as
from quantkit.files.gguf_parts import gguf_file, read_parts
from quantkit.files.located import located
from quantkit.text.gguf_tokenizer import folder_files
from quantkit.text.gguf_unstated import GgufUnstated, gguf_unstated

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_made: dict[tuple[Path, int, int], Path] = {}
_unstated: dict[Path, GgufUnstated] = {}


def text_folder(path: str | Path) -> Path:
    """The folder that holds a model's tokenizer, chat templates and settings of generation: of a GGUF file, or a folder
    with no tokenizer but in such a file, one that is made of its metadata, for as long as the process runs.

    Raises:
        CheckpointError: if such a file is damaged, or its tokenizer is.
        UnsupportedError: if its tokenizer cannot be rebuilt exactly.
    """
    found = located(path)
    file = None if any((found / name).is_file() for name in _TOKENIZERS) else gguf_file(found)
    if file is None:
        return found
    state = file.stat()
    version = (file.resolve(), state.st_size, state.st_mtime_ns)
    if version not in _made or not _made[version].is_dir():
        metadata = read_parts(file)[0].metadata
        files, unstated = folder_files(metadata, file), gguf_unstated(metadata, file)
        _made[version] = folder = Path(tempfile.mkdtemp(prefix="quantkit-"))
        if unstated is not None:
            _unstated[folder] = unstated
        name_as(folder, file)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return _made[version]


def unstated_in(folder: Path) -> GgufUnstated | None:
    """What the GGUF file leaves open that a folder of `text_folder` is made of; None of any other folder."""
    return _unstated.get(folder)
