"""The special and added tokens that the files next to a tokenizer state.

A Hugging Face folder spells its special tokens in tokenizer_config.json or in an older file; in
neither if the class of its tokenizer has defaults; or config.json has their ids alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
_MISTRAL_TOKENS = 100_000
_MISTRAL_FAMILIES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
# Many of its folders name a class that transformers replaces.
_FAMILY_OVER_CLASS = "qwen2"


def read_tokenizer_config(folder: Path) -> Settings:
    """Read a folder's tokenizer_config.json; without the file there are no settings. Raises
    `CheckpointError` if it is damaged.
    """
    path = folder / _CONFIG
    return Settings(read_json(path) if path.is_file() else {}, path)


def fixes_mistral_regex(folder: Path, tokens: int) -> bool:
    """Return whether transformers replaces the first split of a folder's tokenizer.json by
    Mistral's.

    It does so if tokenizer_config.json says ``fix_mistral_regex``, for tokenizers of more than
    100,000 tokens of a model of Mistral's that a transformers before 5.0.0 saved
    (``_patch_mistral_regex`` in transformers 5.23).

    Args:
        folder: with the tokenizer's files.
        tokens: the number of tokens in the vocabulary.

    Raises:
        CheckpointError: if a file is damaged.
    """
    if (
        tokens <= _MISTRAL_TOKENS
        or read_tokenizer_config(folder).values.get("fix_mistral_regex") is not True
    ):
        return False
    path = folder / "config.json"
    if not path.is_file():
        return False
    config = read_json(path)
    version = config.get("transformers_version")
    family = config.get("model_type")
    if (
        isinstance(version, str)
        and version.split(".")[0].isdecimal()
        and int(version.split(".")[0]) >= 5
    ):
        return False
    return family is None or family in _MISTRAL_FAMILIES


def special_tokens(
    folder: Path, vocabulary: Mapping[str, int], names: Collection[str] = TOKEN_NAMES
) -> dict[str, str | None]:
    """Spellings of special tokens by name, as transformers has them; without spellings, by the ids
    in config.json.

    Args:
        known: tokens of the vocabulary; a default must be one of them.

    Returns:
        The spellings found; None for a token that the model is known not to have.

    Raises:
        CheckpointError: if a file is damaged, or holds something other than a spelling.
    """
    stated, config, older = (
        Settings(read_json(path) if path.is_file() else {}, path)
        for path in (folder / _CONFIG, folder / "config.json", folder / _OLD_FILE)
    )
    if "added_tokens_decoder" in stated.values:
        sources = [stated]
    else:
        sources = [older, stated]
    defaults = _defaults(stated, config)
    result: dict[str, str | None] = {}
    for name in names:
        source = next((one for one in sources if name in one.values), None)
        number = config.values.get(f"{name}_id")
        if source is not None:
            is_object = isinstance(source.values[name], dict)
            if is_object:
                spelled = (source.inside(name), "content")
            else:
                spelled = (source, name)
            result[name] = spelled[0].string(spelled[1]) if source.has(name) else None
        elif name in defaults and (defaults[name] is None or defaults[name] in vocabulary):
            result[name] = defaults[name]
        elif type(number) is int and number in vocabulary.values():
            result[name] = next(spelling for spelling, one in vocabulary.items() if one == number)
    return result


def find_bos_eos_ids(folder: Path, pieces: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of BOS and EOS where tokenizer_config.json names them, for a folder with a
    sentencepiece model.

    They may be tokens that the files next to the model add, as in ChatML models.

    Args:
        folder: with the tokenizer's files.
        pieces: ids of the model's pieces by spelling.
    """
    settings = read_tokenizer_config(folder)
    ids = {spelling: number for number, spelling, _ in read_added_tokens(folder)} | dict(pieces)
    spellings = special_tokens(folder, ids, ("bos_token", "eos_token"))
    named: dict[str, int] = {}
    for name, spelling in spellings.items():
        if settings.has(name) and spelling is not None and spelling in ids:
            named[name] = ids[spelling]
    return named


def read_added_tokens(folder: Path) -> list[tuple[int, str, bool]]:
    """Tokens that files next to a sentencepiece model add to it: id, spelling, and whether it is a
    special one. Raises `CheckpointError` if a file is damaged.
    """
    found: dict[int, tuple[str, bool]] = {}
    if (path := folder / "added_tokens.json").is_file():
        added = Settings(read_json(path), path)
        found |= {added.integer(spelling, 0, 2**31): (spelling, False) for spelling in added.values}
    if (path := folder / _CONFIG).is_file():
        config = Settings(read_json(path), path)
        if config.has("added_tokens_decoder"):
            decoder = config.inside("added_tokens_decoder")
        else:
            decoder = Settings({}, path)
        for number in decoder.values:
            token = decoder.inside(number)
            if not number.isdecimal():
                raise CheckpointError(
                    "lists a token by something other than its id",
                    path=path,
                    found=format_value(number),
                )
            found[int(number)] = token.string("content"), token.flag("special", False)
    return [(number, *found[number]) for number in sorted(found)]


def tokens_of_config_alone(folder: Path) -> dict[str, object]:
    """Tokens and flags that tokenizer_config.json states and tokenizer.json does not, by their
    place: transformers uses them, other readers do not. Empty for a folder without a
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
    own = {}
    for one in added:
        if isinstance(one, dict) and isinstance(one.get("content"), str):
            own[one["content"]] = one
    result: dict[str, object] = {}
    decoder = config.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if not isinstance(token, dict) or not isinstance(content := token.get("content"), str):
            continue
        other = own.get(content, {})
        differing = {}
        for flag in _FLAGS:
            if flag in token and other.get(flag, False) != token[flag]:
                differing[flag] = token[flag]
        if content not in own or str(other.get("id")) != str(number):
            result[f"added_tokens_decoder.{number}"] = content
        elif differing:
            result[f"added_tokens_decoder.{number}"] = {"content": content, **differing}
    for key in _LISTS:
        listed = config.get(key)
        if isinstance(listed, dict):
            values = list(listed.values())
        elif isinstance(listed, list):
            values = listed
        else:
            values = []
        spelled: set[Any] = set()
        for one in values:
            if isinstance(one, dict | str):
                spelled.add(one.get("content") if isinstance(one, dict) else one)
        if more := sorted(
            one for one in spelled if isinstance(one, str) and not own.get(one, {}).get("special")
        ):
            result[key] = more
    if config.get("split_special_tokens") is True:
        result["split_special_tokens"] = True
    return result


def _defaults(tokenizer_config: Settings, config: Settings) -> Mapping[str, str | None]:
    """Return the defaults of the class that transformers uses for the tokenizer."""
    named = next(
        (
            one.values["tokenizer_class"]
            for one in (tokenizer_config, config)
            if one.has("tokenizer_class")
        ),
        None,
    )
    family = config.values.get("model_type")
    of_family = next(
        (_CLASS_OF_FAMILY[one] for one in _CLASS_OF_FAMILY if str(family).startswith(one)), None
    )
    if named is None or family == _FAMILY_OVER_CLASS:
        chosen = of_family
    else:
        chosen = named
    return _CLASSES.get(str(chosen).removesuffix("Fast"), {})
