"""Check the files next to a source's weights before a job begins, and say which of them an output
will lack.

A job copies these files, or carries their content over. Damage in them would be found only when the
output is used, by quantkit's own `generate`, the doctor or transformers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quantkit.base.json_values import read_settings
from quantkit.doctor import text
from quantkit.doctor.findings import Finding
from quantkit.doctor.side_files import README, SideFiles, check_dead, list_copyable_files
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.links import require_inside
from quantkit.files.located import locate_model
from quantkit.formats import manifest
from quantkit.formats.codecs.table import SETTINGS_FILES
from quantkit.formats.container import Container, StoredCheckpoint
from quantkit.formats.folder import is_private_license, load_checked_tokenizer, side_names
from quantkit.formats.registry import CONTAINERS
from quantkit.text.text_folder import locate_or_extract_text_folder
from quantkit.text.tokenizer import Tokenizer

PICTURE = "bit-allocation.svg"
"""The picture of schemes chosen for a size, which `quantize` writes next to the model card."""
_CONFIG = "config.json"
_CACHE = "__pycache__"
_MODULES = "modules.json"
_INDEX = ".index.json"
_PART = re.compile(r"-\d+-of-(\d+)\.")
_TEMPLATE_RULE = "damaged-template"
_RULES = (
    "not-a-file",
    "damaged-side-file",
    "damaged-tokenizer",
    "bad-generation-config",
    "token-out-of-range",
    _TEMPLATE_RULE,
)
"""The doctor's rules about side files.

Those about config.json and weights have their own checks in readers.
"""


def require_causal_model(path: str | Path) -> None:
    """Raise `UnsupportedError` for the folder of an embedding model, before anything else is said
    about it.

    Such a folder says in modules.json how hidden states are pooled, in files that no format here
    carries: the output would be loaded with another pooling, and give other embeddings without a
    warning.
    """
    modules = locate_model(path) / _MODULES
    if modules.is_file():
        raise UnsupportedError(
            "is an embedding model of sentence-transformers, which is not supported",
            path=path,
            found=f"{_MODULES}, which says how hidden states are pooled",
            expected="a model that generates text",
            hint="use sentence-transformers' own quantization",
        )


def check_side_files(
    source: StoredCheckpoint, *, template: str | None = None
) -> tuple[Tokenizer | None, list[str]]:
    """Check all files of a source that an output takes over, by the doctor's rules.

    Args:
        template: the requested chat template, which replaces those of the source: they may be
            damaged.

    Returns:
        The tokenizer, compared with the embedding, and notes on it; see `load_checked_tokenizer`.

    Raises:
        CheckpointError: if a file is damaged, a placeholder or missing, or is a link out of the
            folder.
    """
    root = locate_or_extract_text_folder(source.path)
    names = sorted(path.name for path in root.iterdir())
    config_path = root / _CONFIG
    # A GGUF file has its settings in its header.
    config = read_settings(config_path) if config_path.is_file() else {}
    side = SideFiles(source.path, root, names, kind=source.format, config=config)
    for finding in check_dead(side):
        raise _refusal(finding, root)
    for path in list_copyable_files(side):
        # A license behind a link is left out with a note, instead of an error.
        if not is_private_license(path):
            require_inside(path, root)
    tokenizer, notes = load_checked_tokenizer(source)
    # The embedding of a model that is not run may be of other things than text tokens.
    if source.config.measurable:
        rows = source.config.vocab_size
    else:
        rows = None
    for finding in text.check(side, rows, side_names(source)):
        if finding.rule.name not in _RULES or finding.location == _CONFIG:
            continue
        if finding.rule.name == _TEMPLATE_RULE and template is not None:
            continue
        raise _refusal(finding, root)
    return tokenizer, notes


def note_left_behind(
    source: StoredCheckpoint, container: Container, dst: Path, *, has_card: bool
) -> list[str]:
    """Name the files and folders of a source that an output does not have, in one note.

    The note leaves out what a reader of the output cannot miss: the weights that are read, their
    index and settings, the manifest, the model card and the picture of quantkit's own folders, and
    hidden files and caches.

    Args:
        container: of the output, at `dst`.
        has_card: whether the output gets a model card.
    """
    if not source.path.is_dir():
        return []
    unmentioned = {
        CONTAINERS[source.format].config_file,
        manifest.NAME,
        PICTURE,
        _CACHE,
        *SETTINGS_FILES,
        *(file.path.name for file in source.files()),
        *container.list_carried_names(source, dst),
    }
    if (source.path / manifest.NAME).is_file():
        # The model card that quantkit wrote.
        unmentioned.add(README)
    # A dict keeps the order, and shards with the same pattern become one entry.
    names: dict[str, None] = {}
    for path in sorted(source.path.iterdir()):
        name = path.name
        if is_private_license(path):
            name += " (a link that leads out of the folder)"
        elif name in unmentioned or name.startswith(".") or name.endswith(_INDEX):
            continue
        if name == README and has_card:
            name += " (a model card takes its place)"
        if path.is_dir():
            name += "/"
        names[_PART.sub(r"-*-of-\1.", name)] = None
    if not names:
        return []
    return [f"{source.path}: not copied: {', '.join(names)}; copy what the model needs"]


def _refusal(finding: Finding, root: Path) -> CheckpointError:
    """Convert a finding of the doctor to an error."""
    path = root / finding.location
    # A missing file has no path to show.
    if not os.path.lexists(path):
        path = root
    return CheckpointError(finding.message, path=path, hint=finding.rule.remedy)
