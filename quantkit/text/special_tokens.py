"""Read the special and added tokens that the files next to a tokenizer state.

A Hugging Face folder spells its special tokens in tokenizer_config.json or in an older file; in
neither if the class of its tokenizer has defaults; or config.json has their ids alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, format_value, read_json
from quantkit.errors import CheckpointError

TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Their names in transformers and in chat templates."""

_CONFIG = "tokenizer_config.json"
_OLD_FILE = "special_tokens_map.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
# The defaults of transformers' classes, for folders that spell no special tokens.
_CLASSES: dict[str, dict[str, str | None]] = {
    "LlamaTokenizer": {**_LLAMA},
    "CodeLlamaTokenizer": {**_LLAMA},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {**_GPT2, "pad_token": "<|endoftext|>", "bos_token": None},
    "GPT2Tokenizer": {**_GPT2},
}
_CLASS_OF_FAMILY = {"qwen": "Qwen2Tokenizer", "gemma": "GemmaTokenizer"}
# transformers' conditions for `fix_mistral_regex`.
_MISTRAL_TOKENS = 100_000
_MISTRAL_FAMILIES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
# Many of its folders name a class that transformers replaces.
_FAMILY_OVER_CLASS = "qwen2"


def read_tokenizer_config(folder: Path) -> Settings:
    """Read a folder's tokenizer_config.json; without the file there are no settings. Raises
    `CheckpointError` if it is damaged.
    """
    return _read_settings(folder / _CONFIG)


def _read_settings(path: Path) -> Settings:
    """Read a JSON file; without the file there are no settings."""
    if path.is_file():
        return Settings(read_json(path), path)
    return Settings({}, path)


def fixes_mistral_regex(folder: Path, tokens: int) -> bool:
    """Read whether transformers replaces the first split of a folder's tokenizer.json by Mistral's.

    It does so if tokenizer_config.json says ``fix_mistral_regex``, for tokenizers of more than
    100,000 tokens of a model of Mistral's that a transformers before 5.0.0 saved
    (``_patch_mistral_regex`` in transformers 5.23).

    Args:
        folder: with the tokenizer's files.
        tokens: the number of tokens in the vocabulary.

    Raises:
        CheckpointError: if a file is damaged.
    """
    if tokens <= _MISTRAL_TOKENS:
        return False
    if read_tokenizer_config(folder).values.get("fix_mistral_regex") is not True:
        return False
    path = folder / "config.json"
    if not path.is_file():
        return False
    config = read_json(path)
    version = config.get("transformers_version")
    family = config.get("model_type")
    if isinstance(version, str):
        major = version.split(".")[0]
        if major.isdecimal() and int(major) >= 5:
            return False
    return family is None or family in _MISTRAL_FAMILIES


def special_tokens(
    folder: Path, vocabulary: Mapping[str, int], names: Collection[str] = TOKEN_NAMES
) -> dict[str, str | None]:
    """Find the spellings of special tokens by name, as transformers has them; without spellings, by
    the ids in config.json.

    Args:
        vocabulary: ids by spelling; a default must be one of its tokens.

    Returns:
        The spellings found; None for a token that the model is known not to have.

    Raises:
        CheckpointError: if a file is damaged, or holds something other than a spelling.
    """
    tokenizer_config = _read_settings(folder / _CONFIG)
    config = _read_settings(folder / "config.json")
    older = _read_settings(folder / _OLD_FILE)
    # transformers ignores the older file next to a tokenizer_config.json that lists all tokens;
    # otherwise the older file wins.
    if "added_tokens_decoder" in tokenizer_config.values:
        sources = [tokenizer_config]
    else:
        sources = [older, tokenizer_config]
    defaults = _defaults(tokenizer_config, config)
    spellings: dict[str, str | None] = {}
    for name in names:
        source = _find_source(sources, name)
        number = config.values.get(f"{name}_id")
        if source is not None:
            spellings[name] = _read_spelling(source, name)
        elif name in defaults and (defaults[name] is None or defaults[name] in vocabulary):
            spellings[name] = defaults[name]
        elif type(number) is int:
            for spelling, token_id in vocabulary.items():
                if token_id == number:
                    spellings[name] = spelling
                    break
    return spellings


def _find_source(sources: Sequence[Settings], name: str) -> Settings | None:
    """Find the first file that has a key, also with the value null."""
    for source in sources:
        if name in source.values:
            return source
    return None


def _read_spelling(source: Settings, name: str) -> str | None:
    """Read the spelling of a special token: a string, or the content of an object; null for a token
    that the model does not have.
    """
    if not source.has(name):
        return None
    if isinstance(source.values[name], dict):
        return source.inside(name).string("content")
    return source.string(name)


def find_bos_eos_ids(folder: Path, pieces: Mapping[str, int]) -> dict[str, int]:
    """Find the ids of BOS and EOS where tokenizer_config.json names them, for a folder with a
    sentencepiece model.

    They may be tokens that the files next to the model add, as in ChatML models.

    Args:
        folder: with the tokenizer's files.
        pieces: ids of the model's pieces by spelling.
    """
    settings = read_tokenizer_config(folder)
    ids = {spelling: number for number, spelling, _ in read_added_tokens(folder)}
    # The model's own pieces win over tokens of the same spelling.
    ids |= pieces
    spellings = special_tokens(folder, ids, ("bos_token", "eos_token"))
    bos_eos_ids: dict[str, int] = {}
    for name, spelling in spellings.items():
        if settings.has(name) and spelling is not None and spelling in ids:
            bos_eos_ids[name] = ids[spelling]
    return bos_eos_ids


def read_added_tokens(folder: Path) -> list[tuple[int, str, bool]]:
    """Read the tokens that files next to a sentencepiece model add to it: id, spelling, and whether
    it is a special one. Raises `CheckpointError` if a file is damaged.
    """
    tokens: dict[int, tuple[str, bool]] = {}
    older = _read_settings(folder / "added_tokens.json")
    for spelling in older.values:
        tokens[older.integer(spelling, 0, 2**31)] = spelling, False
    # tokenizer_config.json wins over the older file, which does not say which tokens are special.
    path = folder / _CONFIG
    config = _read_settings(path)
    if config.has("added_tokens_decoder"):
        decoder = config.inside("added_tokens_decoder")
        for number in decoder.values:
            token = decoder.inside(number)
            if not number.isdecimal():
                raise CheckpointError(
                    "lists a token by something other than its id",
                    path=path,
                    found=format_value(number),
                )
            tokens[int(number)] = token.string("content"), token.flag("special", False)
    return [(number, *tokens[number]) for number in sorted(tokens)]


def tokens_of_config_alone(folder: Path) -> dict[str, object]:
    """Find the tokens and flags that tokenizer_config.json states and tokenizer.json does not, by
    their place: transformers uses them, other readers do not. Empty for a folder without a
    tokenizer.json, and for damaged files.
    """
    try:
        added = read_json(folder / "tokenizer.json").get("added_tokens")
        config = read_json(folder / _CONFIG)
    except CheckpointError:
        # Reported by the reader of the file.
        return {}
    if not isinstance(added, list):
        return {}
    tokens_of_json: dict[str, dict[str, Any]] = {}
    for token in added:
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            tokens_of_json[token["content"]] = token
    differences: dict[str, object] = {}
    decoder = config.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if not isinstance(token, dict):
            continue
        content = token.get("content")
        if not isinstance(content, str):
            continue
        token_of_json = tokens_of_json.get(content, {})
        differing_flags: dict[str, object] = {}
        for flag in _FLAGS:
            if flag in token and token_of_json.get(flag, False) != token[flag]:
                differing_flags[flag] = token[flag]
        if content not in tokens_of_json or str(token_of_json.get("id")) != str(number):
            differences[f"added_tokens_decoder.{number}"] = content
        elif differing_flags:
            differences[f"added_tokens_decoder.{number}"] = {"content": content, **differing_flags}
    for key in _LISTS:
        spellings: set[str] = set()
        for spelling in _list_spellings(config.get(key)):
            if not tokens_of_json.get(spelling, {}).get("special"):
                spellings.add(spelling)
        if spellings:
            differences[key] = sorted(spellings)
    if config.get("split_special_tokens") is True:
        differences["split_special_tokens"] = True
    return differences


def _list_spellings(tokens: object) -> list[str]:
    """List the spellings of tokens in a list, or in the values of an object."""
    if isinstance(tokens, dict):
        values = list(tokens.values())
    elif isinstance(tokens, list):
        values = tokens
    else:
        values = []
    spellings: list[str] = []
    for value in values:
        # A token is an object with its flags, or only its text.
        spelling = value.get("content") if isinstance(value, dict) else value
        if isinstance(spelling, str):
            spellings.append(spelling)
    return spellings


def _defaults(tokenizer_config: Settings, config: Settings) -> Mapping[str, str | None]:
    """Look up the defaults of the class that transformers uses for the tokenizer."""
    tokenizer_class = None
    for settings in (tokenizer_config, config):
        if settings.has("tokenizer_class"):
            tokenizer_class = settings.values["tokenizer_class"]
            break
    family = config.values.get("model_type")
    family_class = None
    for prefix, class_name in _CLASS_OF_FAMILY.items():
        if str(family).startswith(prefix):
            family_class = class_name
            break
    if tokenizer_class is None or family == _FAMILY_OVER_CLASS:
        chosen = family_class
    else:
        chosen = tokenizer_class
    # The class in Rust has the same defaults as the one in Python.
    return _CLASSES.get(str(chosen).removesuffix("Fast"), {})
