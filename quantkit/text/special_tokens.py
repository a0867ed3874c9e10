"""How a Hugging Face folder spells its special tokens: in two files of which one is older, in neither where the class
of its tokenizer has defaults, or by number alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.json_values import Settings, read_json, shown

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What transformers and its chat templates call them."""

_CONFIG, _OLD_FILE = "tokenizer_config.json", "special_tokens_map.json"
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_CLASSES: dict[str, dict[str, str | None]] = {
    "LlamaTokenizer": {**_LLAMA},
    "CodeLlamaTokenizer": {**_LLAMA},
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {**_GPT2, "pad_token": "<|endoftext|>", "bos_token": None},
    "GPT2Tokenizer": {**_GPT2},
}  # fmt: skip
_CLASS_OF_FAMILY = {"qwen": "Qwen2Tokenizer", "gemma": "GemmaTokenizer"}
_FAMILY_OVER_CLASS = "qwen2"  # of which many folders name a class that transformers does not take at its word


def special_tokens(
    folder: Path, known: Mapping[str, int], names: Collection[str] = TOKEN_NAMES
) -> dict[str, str | None]:
    """Spellings of special tokens by their names, as transformers has them; where it knows none, by the numbers in
    config.json.

    Args:
        folder: of the model.
        known: tokens of the vocabulary; a default that is none of them is not taken.
        names: of those that are looked for.

    Returns:
        Those that are found; None for one that the model is known not to have.

    Raises:
        CheckpointError: if a file is damaged, or holds something else than a spelling.
    """
    stated, config = _settings(folder / _CONFIG), _settings(folder / "config.json")
    older = _settings(folder / _OLD_FILE)
    sources = [stated] if "added_tokens_decoder" in stated.values else [older, stated]
    defaults = _defaults(stated, config)
    found: dict[str, str | None] = {}
    for name in names:
        source = next((one for one in sources if name in one.values), None)
        if source is not None:
            found[name] = _spelled(source, name)
        elif name in defaults and (defaults[name] is None or defaults[name] in known):
            found[name] = defaults[name]
        elif (spelling := _numbered(config, name, known)) is not None:
            found[name] = spelling
    return found


def added_tokens(folder: Path) -> list[tuple[int, str, bool]]:
    """Tokens that files next to a sentencepiece model add to it: id, spelling, and whether it is a special one.

    Raises:
        CheckpointError: if a file is damaged.
    """
    found: dict[int, tuple[str, bool]] = {}
    if (path := folder / "added_tokens.json").is_file():
        added = Settings(read_json(path), path)
        found |= {added.whole(spelling, 0, 2**31): (spelling, False) for spelling in added.values}
    if (path := folder / "tokenizer_config.json").is_file():
        config = Settings(read_json(path), path)
        decoder = config.inside("added_tokens_decoder") if config.has("added_tokens_decoder") else Settings({}, path)
        for number in decoder.values:
            token = decoder.inside(number)
            if not number.isdecimal():
                raise CheckpointError("lists a token by something else than its number", path=path, found=shown(number))
            found[int(number)] = token.text("content"), token.flag("special", False)
    return [(number, *found[number]) for number in sorted(found)]


def _defaults(stated: Settings, config: Settings) -> Mapping[str, str | None]:
    """Of the class that transformers would take for the tokenizer."""
    named = next((one.values["tokenizer_class"] for one in (stated, config) if one.has("tokenizer_class")), None)
    family = config.values.get("model_type")
    of_family = next((_CLASS_OF_FAMILY[one] for one in _CLASS_OF_FAMILY if str(family).startswith(one)), None)
    chosen = of_family if named is None or family == _FAMILY_OVER_CLASS else named
    return _CLASSES.get(str(chosen).removesuffix("Fast"), {})


def _spelled(source: Settings, name: str) -> str | None:
    """A spelling stands by itself or in an object with how it is taken from a text."""
    if not source.has(name):
        return None
    if isinstance(source.values[name], dict):
        return source.inside(name).text("content")
    return source.text(name)


def _numbered(config: Settings, name: str, known: Mapping[str, int]) -> str | None:
    number = config.values.get(f"{name}_id")
    return next((spelling for spelling, one in known.items() if one == number), None) if type(number) is int else None


def _settings(path: Path) -> Settings:
    return Settings(read_json(path) if path.is_file() else {}, path)
