"""Find the tokens that the files next to a tokenizer.json add to it.

transformers adds them when it loads a folder, so text that spells such a token is one token for the
model. A reader of tokenizer.json alone would cut it into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, read_json
from quantkit.text.special_tokens import read_tokenizer_config, special_tokens

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OLD_FILE = "added_tokens.json"
_DECODER = "added_tokens_decoder"


def missing_added_tokens(
    folder: Path,
    added: Iterable[Mapping[str, Any]],
    read_vocabulary: Callable[[], Mapping[str, int]],
) -> list[dict[str, Any]]:
    """Find the tokens that transformers adds to a folder's tokenizer.json, or adds again with
    other flags.

    tokenizer_config.json lists them with their flags under ``added_tokens_decoder``. A folder
    without this key may have an older added_tokens.json, without flags (``_from_pretrained`` in
    transformers 5.23).

    Tokens without a row in the embedding are left out, such as the ``<pad>`` of the first Llama 2
    folders: the model has no input for them, and the rest of its tokenizer is sound.

    Args:
        folder: with the tokenizer's files.
        added: the tokens that tokenizer.json adds, in its form.
        read_vocabulary: returns the ids of all other tokens; called only if a token is missing.

    Returns:
        Tokens in the form of tokenizer.json, in the order in which they are added.

    Raises:
        CheckpointError: if a file is damaged.
    """
    listed = {token["content"]: token for token in added}
    differing: list[dict[str, Any]] = []
    for token in _read_listed_tokens(folder):
        if _flags_of(token) != _flags_of(listed.get(token["content"])):
            differing.append(token)
    # Most folders add nothing, and reading the vocabulary takes long.
    if not differing:
        return []
    vocabulary = read_vocabulary()
    rows = _embedding_rows(folder)
    # The library gives a new token the next id after all others.
    next_id = len(vocabulary)
    for listed_token in listed.values():
        next_id = max(next_id, listed_token["id"] + 1)
    missing: list[dict[str, Any]] = []
    for token in differing:
        content = token["content"]
        if content in listed:
            number = listed[content]["id"]
        elif content in vocabulary:
            number = vocabulary[content]
        elif rows is None or next_id < rows:
            # The library ignores the stated id, and so does transformers.
            number = next_id
            next_id += 1
        else:
            continue
        missing.append({"id": number, "content": content, **_flags_of(token)})
    return missing


def _read_listed_tokens(folder: Path) -> list[dict[str, Any]]:
    """Read the tokens that the files next to tokenizer.json list, in the order of their ids."""
    config = read_tokenizer_config(folder)
    # transformers makes tokens with a role special, also if their flag says otherwise.
    special_spellings: set[str] = set()
    for spelling in special_tokens(folder, {}).values():
        if spelling is not None:
            special_spellings.add(spelling)
    tokens: dict[int, dict[str, Any]] = {}
    if config.has(_DECODER):
        decoder = config.inside(_DECODER)
        for number in decoder.values:
            token = decoder.inside(number)
            content = token.string("content")
            special = token.flag("special", False)
            flags: dict[str, bool] = {}
            for flag in ("single_word", "lstrip", "rstrip"):
                flags[flag] = token.flag(flag, False)
            # The library's default: special tokens are found in text before it is normalized.
            flags["normalized"] = token.flag("normalized", not special)
            tokens[int(number)] = {
                "content": content,
                **flags,
                "special": special or content in special_spellings,
            }
    elif (path := folder / _OLD_FILE).is_file():
        older = Settings(read_json(path), path)
        for content in older.values:
            special = content in special_spellings
            tokens[older.integer(content, 0, 2**31)] = {
                "content": content,
                "normalized": not special,
                "special": special,
            }
    # An empty spelling is found nowhere in text.
    return [tokens[number] for number in sorted(tokens) if tokens[number]["content"]]


def _flags_of(token: Mapping[str, Any] | None) -> dict[str, bool]:
    """Read a token's flags; none for a token that does not exist."""
    if token is None:
        return {}
    return {flag: bool(token.get(flag, False)) for flag in FLAGS}


def _embedding_rows(folder: Path) -> int | None:
    """Read the number of rows that config.json states for the embedding."""
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
    else:
        config = {}
    # Multimodal models have the settings of their language model here.
    text_config = config.get("text_config")
    if "vocab_size" not in config and isinstance(text_config, dict):
        config = text_config
    rows = config.get("vocab_size")
    if type(rows) is int:
        return rows
    return None
