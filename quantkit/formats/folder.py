"""The side files of any checkpoint: tokenizer, generation settings, licences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.base.arguments import as_string
from quantkit.base.json_values import MAX_BYTES, format_value, read_json
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.links import outside_target
from quantkit.files.source import SourceFile
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.table import SETTINGS_FILES
from quantkit.text.chat import chat_format
from quantkit.text.chat_template import (
    META_FORMATS,
    OLD_TEMPLATE_FILE,
    TEMPLATE_FILE,
    ChatTemplates,
    read_named_template,
    template_paths,
)
from quantkit.text.gguf_tokenizer import text_folder
from quantkit.text.tokenizer import Tokenizer, load_tokenizer
from quantkit.text.unread_tokenizers import require_no_unread_tokenizer

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
    """Return the tokenizer of a checkpoint, compared with its embedding, and notes on it; none for
    a model that is known by its tensors only.

    Raises:
        CheckpointError: if it is damaged, or knows more tokens than the embedding.
        UnsupportedError: if it is in files that are not read, such as vocab.json.
    """
    if not source.config.measurable:
        # Its files are copied without being read.
        return None, []
    folder = text_folder(source.path)
    if not present(folder, TOKENIZER_FILES[:2]):
        require_no_unread_tokenizer(folder)
        return None, [f"{source.path}: has no tokenizer; the output will have none"]
    tokenizer = load_tokenizer(source.path)
    rows = source.config.vocab_size
    require_rows(tokenizer, rows, source.path)
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
            "the tokenizer knows more tokens than the embedding has rows",
            path=path,
            found=f"{tokenizer.vocab_size} tokens",
            expected=f"at most {rows}",
            hint="the tokenizer is another model's",
        )


def side_names(source: Checkpoint) -> tuple[str, ...]:
    """Return the side files that are copied to an output; for a model that is known by its tensors
    only, all except weights, settings of a quantization, and code that is not run.
    """
    if source.config.runnable:
        return TOKENIZER_FILES + OTHER_FILES
    files = (
        path
        for path in sorted(source.path.iterdir())
        if path.is_file() and not path.name.startswith(".")
    )
    suffixes = SIDE_SUFFIXES | ({_CODE} if source.config.code is not None else set())
    return tuple(
        path.name
        for path in files
        if (path.suffix in suffixes or path.name in OTHER_FILES)
        and not (path.name in _NOT_TAKEN or path.name.endswith(".index.json"))
        and path.stat().st_size <= MAX_BYTES
    )


def code_files(source: Checkpoint) -> list[SourceFile]:
    """Return the code of a model's folder, opened; none if it is not run."""
    code = source.config.code
    if code is None:
        return []
    return [SourceFile(path) for path in sorted(code.glob(f"*{_CODE}")) if path.is_file()]


def present(folder: Path, names: tuple[str, ...]) -> dict[str, bytes | Path]:
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
    """Return whether a path is a licence that links out of its folder, and is therefore not copied.

    Jobs refuse such links in place of files that a model needs. A model works without its licence,
    and folders in a repository of several models link to one for all of them.
    """
    return path.name in LICENSES and outside_target(path, path.parent) is not None


def select_templates(
    source: Checkpoint, tokenizer: Tokenizer | None, requested: str | None = None
) -> dict[str, str]:
    """Return the chat templates of an output, by name: the source's, or the requested one.

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
                "`template` and `tensors_only=True` exclude each other",
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
        chat_format(source.path, tokenizer, requested)
    return {"default": read_named_template(requested)}


def with_templates(
    files: Mapping[str, bytes | Path], templates: Mapping[str, str], *, in_settings: bool
) -> dict[str, bytes | Path]:
    """Side files, with chat templates where readers expect them.

    One template is written to a file, and to tokenizer_config.json too. Several are written only
    there, because the file would hide the others.

    Args:
        in_settings: whether a single template is written to tokenizer_config.json too.

    Raises:
        CheckpointError: if the tokenizer_config.json is damaged.
    """
    if not templates:
        return dict(files)
    result = {}
    for name, content in files.items():
        if name not in (TEMPLATE_FILE, OLD_TEMPLATE_FILE):
            result[name] = content
    if len(templates) == 1:
        alone = templates.get("default")
    else:
        alone = None
    if alone is not None:
        result[TEMPLATE_FILE] = alone.encode()
    if alone is None or in_settings:
        before = result.get(TOKENIZER_SETTINGS, b"{}")
        if isinstance(before, Path):
            settings = read_json(before)
        else:
            settings = json.loads(before)
        several = [{"name": name, "template": source} for name, source in templates.items()]
        value = several if alone is None else alone
        if settings.get("chat_template") != value:
            result[TOKENIZER_SETTINGS] = json_bytes({**settings, "chat_template": value})
    return result


def tokenizer_files(folder: Path) -> list[SourceFile]:
    """Return the tokenizer's files and chat templates of a folder, opened; see `SourceFile` for
    errors.
    """
    paths = dict.fromkeys(
        [*(folder / name for name in present(folder, TOKENIZER_FILES)), *template_paths(folder)]
    )
    return [SourceFile(path) for path in paths]


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return a small file of JSON."""
    return json.dumps(value, indent=2).encode() + b"\n"
