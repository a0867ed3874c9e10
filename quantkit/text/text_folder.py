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

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_made: dict[tuple[Path, int, int], Path] = {}


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
        files = folder_files(read_parts(file)[0].metadata, file)
        _made[version] = folder = Path(tempfile.mkdtemp(prefix="quantkit-"))
        name_as(folder, file)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return _made[version]
