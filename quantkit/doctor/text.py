"""Rules about text: whether tokenizer, special tokens, chat template and generation settings fit
the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import format_value
from quantkit.doctor.findings import Finding, describe, finding
from quantkit.doctor.side_files import CONFIG, SideFiles, check_contents
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.runtime.generation_config import NAME as GENERATION
from quantkit.runtime.generation_config import require_valid
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.special_tokens import special_tokens, tokens_of_config_alone
from quantkit.text.tokenizer import load_tokenizer
from quantkit.text.tokenizer_settings import require_loadable_settings

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "spiece.model",
    "vocab.txt",
)
_READ = ("tokenizer.json", "tokenizer.model")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
INSTRUCT = re.compile(r"(?i)(^|[-_./ ])(instruct|chat|it|sft|dpo|rlhf)([-_./ ]|$)")
# Of the embedding's rows, which are padded, that have a token.
_MIN_SHARE = 0.75


def check(folder: SideFiles, rows: int | None, carried: Collection[str] = ()) -> Iterator[Finding]:
    """Check what a model needs to read and write text.

    Args:
        rows: of the embedding, None if not known.
        carried: see `check_contents`.
    """
    if not any(name in folder.names for name in _FILES):
        yield finding(
            "no-tokenizer", folder.path.name, "none of tokenizer.json, tokenizer.model, vocab.json"
        )
    vocabulary: Mapping[str, int] | None = None
    yield from check_contents(folder, carried)
    count = None
    try:
        vocabulary = _read_vocabulary(folder)
        if any((folder.root / name).is_file() for name in _READ):
            # The library may count fewer tokens than the ids that the file lists.
            listed_count = max((vocabulary or {}).values(), default=-1) + 1
            count = max(load_tokenizer(folder.root).vocab_size, listed_count)
        require_loadable_settings(folder.root)
        yield from _check_dropout(folder)
    except (QuantkitError, OSError) as error:
        # Rules about tensors report a damaged config.
        if _place(error) != CONFIG:
            yield finding("damaged-tokenizer", _place(error), describe(error))
    vocab_size = folder.config.get("vocab_size")
    states_size = type(vocab_size) is int and vocab_size > 0
    if rows is not None and states_size and vocab_size != rows and folder.kind != "meta":
        yield finding("vocabulary", CONFIG, f"vocab_size {vocab_size}, and {rows} rows")
    if rows is not None and count is not None and not _MIN_SHARE * rows <= count <= rows:
        if count > rows:
            rule = "tokenizer-too-large"
        else:
            rule = "tokenizer-too-small"
        yield finding(rule, "tokenizer", f"{count} tokens, {rows} rows")
    yield from _check_generation(folder)
    yield from _check_special(folder, rows, vocabulary)
    yield from _check_templates(folder)


def _check_dropout(folder: SideFiles) -> Iterator[Finding]:
    content = folder.side_json("tokenizer.json") or {}
    model = content.get("model")
    # Models that merge nothing ignore it.
    if not isinstance(model, dict) or "merges" not in model:
        return
    dropout = model.get("dropout")
    if dropout:
        yield finding("random-tokens", "tokenizer.json", f"dropout {format_value(dropout)}")


def _is_instruct(folder: SideFiles) -> bool:
    """Return whether a model's names say that it is an instruct model."""
    names = [folder.config.get("_name_or_path"), folder.path.resolve().name]
    if "README.md" in folder.names:
        head = _read_beginning(folder.root / "README.md").decode("utf-8", "replace")
        names += _find_base_models(head)
    # The name of an owner, before the slash, says nothing of the model.
    model_names = [name.rpartition("/")[2] for name in names if isinstance(name, str)]
    return any(INSTRUCT.search(name) for name in model_names)


def _find_base_models(readme: str) -> list[str]:
    """Find the names of models at the beginning of a README, after ``base_model:`` or alone in
    a line.
    """
    names = []
    # One expression for whole lines would take time of the fourth power of the number of blanks.
    for line in readme.splitlines():
        item = line.strip().removeprefix("-").strip()
        name = item.removeprefix("base_model").removeprefix(":").strip()
        if name and (item.startswith("base_model:") or _HUB_NAME.fullmatch(name)):
            names.append(name.split()[0])
    return names


def _read_vocabulary(folder: SideFiles) -> dict[str, int] | None:
    """Read the ids of the tokens in tokenizer.json; None if there is no such file."""
    content = folder.side_json("tokenizer.json")
    # Only to find it damaged, which is reported as a fault of the tokenizer.
    folder.side_json("tokenizer_config.json")
    if content is None:
        return None
    model = content.get("model")
    path = folder.root / "tokenizer.json"
    if isinstance(model, dict):
        vocabulary = model.get("vocab")
    else:
        vocabulary = None
    # Unigram models list pieces with their scores: an id is the position of a piece.
    if isinstance(vocabulary, list):
        piece_ids: dict[str, int] = {}
        for index, piece in enumerate(vocabulary):
            if isinstance(piece, list) and piece:
                piece_ids[str(piece[0])] = index
        vocabulary = piece_ids
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise CheckpointError("has no vocabulary", path=path)
    added_tokens = content.get("added_tokens") or []
    problem = "has added tokens that are not objects"
    if not isinstance(added_tokens, list):
        raise CheckpointError(problem, path=path)
    added_ids: dict[str, Any] = {}
    for token in added_tokens:
        if not isinstance(token, dict):
            raise CheckpointError(problem, path=path)
        added_ids[str(token.get("content"))] = token.get("id")
    for kind, ids in (("tokens", vocabulary), ("added tokens", added_ids)):
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids.values()):
            raise CheckpointError(f"has {kind} without ids", path=path)
    return {**vocabulary, **added_ids}


def _read_beginning(path: Path) -> bytes:
    """Read the first bytes of a file; none if it cannot be read."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _check_generation(folder: SideFiles) -> Iterator[Finding]:
    if GENERATION not in folder.names:
        if folder.kind != "meta" and _is_instruct(folder):
            yield finding(
                "no-generation-config", folder.path.name, "by its name it is an instruct model"
            )
        return
    try:
        require_valid(folder.root)
    except (QuantkitError, OSError) as error:
        yield finding("bad-generation-config", GENERATION, describe(error))


def _check_special(
    folder: SideFiles, rows: int | None, vocabulary: Mapping[str, int] | None
) -> Iterator[Finding]:
    # Multimodal models have ids of tokens in text_config or outside it; the outer ones win.
    text_config = folder.config.get("text_config")
    config = {**(text_config if isinstance(text_config, dict) else {}), **folder.config}
    ends: set[int] = set()
    for file, settings in ((CONFIG, config), (GENERATION, _read_or_empty(folder, GENERATION))):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = settings.get(key)
            if not isinstance(ids, list):
                ids = [ids]
            for token_id in ids:
                # Some of Llama's configs have -1 for no padding.
                if token_id is None or (key == "pad_token_id" and token_id == -1):
                    continue
                if (
                    type(token_id) is not int
                    or token_id < 0
                    or (rows is not None and token_id >= rows)
                ):
                    if rows is not None:
                        expected = f"below {rows}"
                    else:
                        expected = "a token's id"
                    yield finding(
                        "token-out-of-range",
                        file,
                        f"{key} {format_value(token_id)}, expected {expected}",
                    )
                elif key == "eos_token_id":
                    ends.add(token_id)
    if vocabulary is None:
        return
    try:
        spellings = special_tokens(folder.root, vocabulary)
    except CheckpointError:
        # `check` reports files of the tokenizer that are damaged.
        return
    for name, spelling in spellings.items():
        if spelling is None or spelling in vocabulary:
            continue
        if spelling not in _read_added_tokens(folder):
            yield finding(
                "unknown-token", "tokenizer_config.json", f"{name} {format_value(spelling)}"
            )
    for key, token in tokens_of_config_alone(folder.root).items():
        yield finding(
            "tokenizer-conflict", "tokenizer_config.json", f"{key}: {format_value(token)}"
        )
    # A chat template ends turns with the tokenizer's end token: generation stops only at the ids of
    # the model's settings.
    end_token = spellings.get("eos_token")
    if not ends or end_token is None or end_token not in vocabulary:
        return
    end_id = vocabulary[end_token]
    if end_id not in ends:
        message = (
            f"{format_value(end_token)} is {end_id}, the model's are"
            f" {', '.join(map(str, sorted(ends)))}"
        )
        yield finding("end-tokens", "tokenizer_config.json", message)


def _check_templates(folder: SideFiles) -> Iterator[Finding]:
    try:
        templates = ChatTemplates(folder.root)
        for name in templates.sources:
            templates.choose(name)
    except (QuantkitError, OSError) as error:
        # The tokenizer's rule reports a tokenizer_config.json that is damaged as JSON.
        if "tokenizer_config" not in _place(error) or _read_or_empty(
            folder, "tokenizer_config.json"
        ):
            yield finding("damaged-template", _place(error), describe(error))
        return
    has_tokenizer = any(name in folder.names for name in _FILES)
    # Meta's folders need no template.
    if not templates and folder.kind != "meta" and _is_instruct(folder) and has_tokenizer:
        yield finding("no-chat-template", folder.path.name, "by its name it is an instruct model")


def _read_added_tokens(folder: SideFiles) -> set[str]:
    """Read the tokens that tokenizer_config.json or added_tokens.json add to those of
    tokenizer.json.
    """
    # A mapping of tokens to ids.
    spellings = set(_read_or_empty(folder, "added_tokens.json"))
    decoder = _read_or_empty(folder, "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return spellings
    for token in decoder.values():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            spellings.add(token["content"])
    return spellings


def _read_or_empty(folder: SideFiles, name: str) -> dict[str, Any]:
    """Read a JSON file; empty if it is damaged, which other rules report."""
    try:
        return folder.side_json(name) or {}
    except (CheckpointError, OSError):
        return {}


def _place(error: Exception) -> str:
    path = getattr(error, "path", None)
    return "tokenizer" if path is None else path.name
