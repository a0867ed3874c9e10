"""The side files of any checkpoint: tokenizer, generation settings, licences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.arguments import as_string
from quantkit.base.json_values import MAX_BYTES, format_value, read_json
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.source import SourceFile
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.table import SETTINGS_FILES
from quantkit.text.chat_template import (
    META_FORMATS,
    OLD_TEMPLATE_FILE,
    TEMPLATE_FILE,
    ChatTemplates,
    read_named_template,
    template_paths,
)
from quantkit.text.text_folder import locate_or_extract_text_folder
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

# Only some side files need these.
if TYPE_CHECKING:
    from quantkit.files import links
    from quantkit.text import chat, unread_tokenizers
else:
    links = LateModule("quantkit.files.links")
    chat = LateModule("quantkit.text.chat")
    unread_tokenizers = LateModule("quantkit.text.unread_tokenizers")

TOKENIZER_SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    TOKENIZER_SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
    OLD_TEMPLATE_FILE,
)
SIDE_FILES = {"generation_config.json", *TOKENIZER_FILES}
"""Files that influence what a model generates, besides weights and config."""
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md", "NOTICE")
OTHER_FILES = ("generation_config.json", *LICENSES)

_CODE = ".py"
SIDE_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".bpe", ".vocab"}
QUANTIZED_ELSEWHERE = tuple(SETTINGS_FILES)
"""Files that hold settings of a quantization next to a config.json without any."""
_NOT_TAKEN = {
    "config.json",
    "quantkit.json",
    "params.json",
    "adapter_config.json",
    *QUANTIZED_ELSEWHERE,
}


def load_checked_tokenizer(source: Checkpoint) -> tuple[Tokenizer | None, list[str]]:
    """Load the tokenizer of a checkpoint, compare it with the embedding, and write notes on it;
    none for a model that is known by its tensors only.

    Raises:
        CheckpointError: if it is damaged, or knows more tokens than the embedding.
        UnsupportedError: if it is in files that are not read, such as vocab.json.
    """
    if not source.config.measurable:
        # Its files are copied without being read.
        return None, []
    folder = locate_or_extract_text_folder(source.path)
    if not find_copyable_files(folder, TOKENIZER_FILES[:2]):
        unread_tokenizers.require_no_unread_tokenizer(folder)
        return None, [f"{source.path}: has no tokenizer; the output will have none"]
    tokenizer = load_tokenizer(source.path)
    rows = source.config.vocab_size
    require_rows(tokenizer, rows, source.path)
    # Fewer tokens than rows are common: training frameworks pad the embedding.
    if tokenizer.vocab_size < rows:
        return tokenizer, [
            f"{source.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {rows}"
            " rows"
        ]
    return tokenizer, []


def require_rows(tokenizer: Tokenizer, rows: int, path: Path | None = None) -> None:
    """Raise `CheckpointError` if an embedding has fewer rows than a tokenizer has tokens."""
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            "the tokenizer has more tokens than the embedding has rows",
            path=path,
            found=f"{tokenizer.vocab_size} tokens",
            expected=f"at most {rows}",
            hint="the tokenizer belongs to another model",
        )


def side_names(source: Checkpoint) -> tuple[str, ...]:
    """List the side files that are copied to an output; for a model that is known by its tensors
    only, all except weights, settings of a quantization, and code that is not run.
    """
    if source.config.runnable:
        return TOKENIZER_FILES + OTHER_FILES
    suffixes = set(SIDE_SUFFIXES)
    if source.config.code is not None:
        suffixes.add(_CODE)
    names = []
    for path in sorted(source.path.iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        if path.suffix not in suffixes and path.name not in OTHER_FILES:
            continue
        # These are written anew, or describe files that are not copied.
        if path.name in _NOT_TAKEN or path.name.endswith(".index.json"):
            continue
        # Readers of settings refuse larger files.
        if path.stat().st_size <= MAX_BYTES:
            names.append(path.name)
    return tuple(names)


def code_files(source: Checkpoint) -> list[SourceFile]:
    """Open the code of a model's folder; none if it is not run."""
    code = source.config.code
    if code is None:
        return []
    files = []
    for path in sorted(code.glob(f"*{_CODE}")):
        if path.is_file():
            files.append(SourceFile(path))
    return files


def find_copyable_files(folder: Path, names: tuple[str, ...]) -> dict[str, bytes | Path]:
    """Find the files of a folder that exist and may be copied, by name; see
    `is_private_license`.
    """
    files: dict[str, bytes | Path] = {}
    for name in names:
        path = folder / name
        if path.is_file() and not is_private_license(path):
            files[name] = path
    return files


def is_private_license(path: Path) -> bool:
    """Check whether a path is a licence that links out of its folder, and is therefore not copied.

    Jobs refuse such links in place of files that a model needs. A model works without its licence,
    and folders in a repository of several models link to one for all of them.
    """
    return path.name in LICENSES and links.find_outside_target(path, path.parent) is not None


def select_templates(
    source: Checkpoint, tokenizer: Tokenizer | None, requested: str | None = None
) -> dict[str, str]:
    """Select the chat templates of an output, by name: the source's, or the requested one.

    Args:
        requested: ``llama2``, ``llama3``, or a file ``*.jinja``.

    Raises:
        RequestError: if there is no template of that name, or it does not fit the source's
            tokenizer.
        CheckpointError: if a template is damaged.
    """
    if not source.config.runnable:
        if requested is not None:
            raise RequestError(
                Message(
                    Option("template"),
                    " and ",
                    Option("tensors_only", value=True),
                    " exclude each other",
                ),
                found=format_value(requested),
            )
        # Its files are copied as they are.
        return {}
    if requested is None:
        return ChatTemplates(source.path).sources
    if tokenizer is None:
        raise RequestError(
            "a chat template needs a tokenizer, and the source has none", path=source.path
        )
    if as_string("template", requested) in META_FORMATS:
        # Raises for another model's tokenizer.
        chat.chat_format(source.path, tokenizer, requested)
    return {"default": read_named_template(requested)}


def with_templates(
    files: Mapping[str, bytes | Path], templates: Mapping[str, str], *, in_settings: bool
) -> dict[str, bytes | Path]:
    """Add chat templates to side files where readers expect them.

    One template is written to a file, and to tokenizer_config.json too. Several are written only
    there, because the file would hide the others.

    Args:
        in_settings: whether a single template is written to tokenizer_config.json too.

    Raises:
        CheckpointError: if the tokenizer_config.json is damaged.
    """
    if not templates:
        return dict(files)
    output_files = {}
    for name, content in files.items():
        if name not in (TEMPLATE_FILE, OLD_TEMPLATE_FILE):
            output_files[name] = content
    # A single template with another name than the default is written as a list, which has names.
    single_template = templates.get("default") if len(templates) == 1 else None
    if single_template is not None:
        output_files[TEMPLATE_FILE] = single_template.encode()
    if single_template is None or in_settings:
        settings_file = output_files.get(TOKENIZER_SETTINGS, b"{}")
        if isinstance(settings_file, Path):
            settings = read_json(settings_file)
        else:
            settings = json.loads(settings_file)
        value: str | list[dict[str, str]]
        if single_template is not None:
            value = single_template
        else:
            value = [{"name": name, "template": text} for name, text in templates.items()]
        # A file that already has the templates is copied byte by byte.
        if settings.get("chat_template") != value:
            output_files[TOKENIZER_SETTINGS] = json_bytes({**settings, "chat_template": value})
    return output_files


def tokenizer_files(folder: Path) -> list[SourceFile]:
    """Open the tokenizer's files and chat templates of a folder; see `SourceFile` for errors."""
    tokenizer_paths = [folder / name for name in find_copyable_files(folder, TOKENIZER_FILES)]
    # Each once: some templates are among the tokenizer's files.
    paths = dict.fromkeys([*tokenizer_paths, *template_paths(folder)])
    return [SourceFile(path) for path in paths]


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Encode a small file of JSON."""
    return json.dumps(value, indent=2).encode() + b"\n"
