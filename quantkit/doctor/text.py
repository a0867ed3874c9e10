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
_MIN_SHARE = 0.75  # of the embedding's rows, which are padded, that have a token


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
        vocabulary = _vocabulary(folder)
        if any((folder.root / name).is_file() for name in _READ):
            # The library may see fewer.
            listed = max((vocabulary or {}).values(), default=-1) + 1
            count = max(load_tokenizer(folder.root).vocab_size, listed)
        require_loadable_settings(folder.root)
    except (QuantkitError, OSError) as error:
        if _place(error) != CONFIG:  # reported by other rules
            yield finding("damaged-tokenizer", _place(error), describe(error))
    stated = folder.config.get("vocab_size")
    if (
        rows is not None
        and type(stated) is int
        and stated > 0
        and stated != rows
        and folder.kind != "meta"
    ):
        yield finding("vocabulary", CONFIG, f"vocab_size {stated}, and {rows} rows")
    if rows is not None and count is not None and not _MIN_SHARE * rows <= count <= rows:
        if count > rows:
            rule = "tokenizer-too-large"
        else:
            rule = "tokenizer-too-small"
        yield finding(rule, "tokenizer", f"{count} tokens, {rows} rows")
    yield from _generation(folder)
    yield from _special(folder, rows, vocabulary)
    yield from _templates(folder)


def _is_instruct(folder: SideFiles) -> bool:
    """Return whether a model's names say that it is an instruct model."""
    names = [folder.config.get("_name_or_path"), folder.path.resolve().name]
    if "README.md" in folder.names:
        head = _begins(folder.root / "README.md").decode("utf-8", "replace")
        names += _find_base_models(head)
    return any(isinstance(name, str) and INSTRUCT.search(name.rpartition("/")[2]) for name in names)


def _find_base_models(readme: str) -> list[str]:
    """Return the names of models at the beginning of a README, after ``base_model:`` or alone in
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


def _vocabulary(folder: SideFiles) -> dict[str, int] | None:
    """Return the ids of the tokens in tokenizer.json; None if there is no such file."""
    found = folder.side_json("tokenizer.json")
    folder.side_json("tokenizer_config.json")
    if found is None:
        return None
    model = found.get("model")
    path = folder.root / "tokenizer.json"
    if isinstance(model, dict):
        vocabulary = model.get("vocab")
    else:
        vocabulary = None
    if isinstance(vocabulary, list):  # in unigram models: pieces with their scores
        vocabulary = {
            str(one[0]): index
            for index, one in enumerate(vocabulary)
            if isinstance(one, list) and one
        }
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise CheckpointError("has no vocabulary", path=path)
    added = found.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise CheckpointError("has added tokens that are not objects", path=path)
    ids: dict[str, Any] = {str(one.get("content")): one.get("id") for one in added}
    for what, tokens in (("tokens", vocabulary), ("added tokens", ids)):
        if not all(type(token) is int and token >= 0 for token in tokens.values()):
            raise CheckpointError(f"has {what} without ids", path=path)
    return {**vocabulary, **ids}


def _begins(path: Path) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _generation(folder: SideFiles) -> Iterator[Finding]:
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


def _special(
    folder: SideFiles, rows: int | None, vocabulary: Mapping[str, int] | None
) -> Iterator[Finding]:
    text = folder.config.get("text_config")
    config = {**(text if isinstance(text, dict) else {}), **folder.config}
    ends: set[int] = set()
    for file, settings in ((CONFIG, config), (GENERATION, _lenient(folder, GENERATION))):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = settings.get(key)
            for one in ids if isinstance(ids, list) else [ids]:
                if one is None or (key == "pad_token_id" and one == -1):
                    continue
                if type(one) is not int or one < 0 or (rows is not None and one >= rows):
                    if rows is not None:
                        expected = f"below {rows}"
                    else:
                        expected = "a token's id"
                    yield finding(
                        "token-out-of-range",
                        file,
                        f"{key} {format_value(one)}, expected {expected}",
                    )
                elif key == "eos_token_id":
                    ends.add(one)
    if vocabulary is None:
        return
    try:
        spellings = special_tokens(folder.root, vocabulary)
    except CheckpointError:
        return  # reported by another rule
    for name, one in spellings.items():
        if one is not None and one not in vocabulary and one not in _read_added_tokens(folder):
            yield finding("unknown-token", "tokenizer_config.json", f"{name} {format_value(one)}")
    for key, stated in tokens_of_config_alone(folder.root).items():
        yield finding(
            "tokenizer-conflict", "tokenizer_config.json", f"{key}: {format_value(stated)}"
        )
    spelled = spellings.get("eos_token")
    if ends and spelled is not None and spelled in vocabulary and vocabulary[spelled] not in ends:
        what = (
            f"{format_value(spelled)} is {vocabulary[spelled]}, the model's are"
            f" {', '.join(map(str, sorted(ends)))}"
        )
        yield finding("end-tokens", "tokenizer_config.json", what)


def _templates(folder: SideFiles) -> Iterator[Finding]:
    try:
        templates = ChatTemplates(folder.root)
        for name in templates.sources:
            templates.choose(name)
    except (QuantkitError, OSError) as error:
        if "tokenizer_config" not in _place(error) or _lenient(folder, "tokenizer_config.json"):
            yield finding("damaged-template", _place(error), describe(error))
        # Damaged JSON is reported by the tokenizer's rule.
        return
    has_tokenizer = any(name in folder.names for name in _FILES)
    # Meta's need no template.
    if not templates and folder.kind != "meta" and _is_instruct(folder) and has_tokenizer:
        yield finding("no-chat-template", folder.path.name, "by its name it is an instruct model")


def _read_added_tokens(folder: SideFiles) -> set[str]:
    """Return the tokens that tokenizer_config.json or added_tokens.json add to those of
    tokenizer.json.
    """
    decoder = _lenient(folder, "tokenizer_config.json").get("added_tokens_decoder")
    listed = decoder.values() if isinstance(decoder, dict) else ()
    spelled = (one.get("content") for one in listed if isinstance(one, dict))
    return {one for one in spelled if isinstance(one, str)} | set(
        _lenient(folder, "added_tokens.json")
    )


def _lenient(folder: SideFiles, name: str) -> dict[str, Any]:
    """Return a JSON file; empty if it is damaged, which other rules report."""
    try:
        return folder.side_json(name) or {}
    except (CheckpointError, OSError):
        return {}


def _place(error: Exception) -> str:
    path = getattr(error, "path", None)
    return "tokenizer" if path is None else path.name
