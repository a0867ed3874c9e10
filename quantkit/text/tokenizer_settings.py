"""Check the JSON files next to a tokenizer for values that transformers refuses.

`JsonTokenizer` and `special_tokens` read only the keys that they need. transformers reads all of
these files whenever it loads the tokenizer, so a wrong value in another key breaks a folder that
quantkit can still run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, format_value, read_json
from quantkit.errors import CheckpointError
from quantkit.text.special_tokens import TOKEN_NAMES

CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
_SIDES = ("left", "right")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_NAMED_TOKENS = "model_specific_special_tokens"
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
_MAX_ID = 2**31


def require_loadable_settings(folder: Path) -> None:
    """Raise `CheckpointError` if transformers would not load a tokenizer with the JSON files of
    this folder.

    tokenizer.json itself is checked by `load_tokenizer`, chat templates by `ChatTemplates`.
    """
    path = folder / CONFIG_FILE
    if path.is_file():
        _require_config(Settings(read_json(path), path))
    path = folder / TOKENS_FILE
    if path.is_file():
        # transformers' save_pretrained wrote objects without "__type" into this file.
        _require_tokens(Settings(read_json(path), path), typed=False)
    path = folder / ADDED_FILE
    if path.is_file():
        added = Settings(read_json(path), path)
        for spelling in added.values:
            added.integer(spelling, 0, _MAX_ID)


def _require_config(config: Settings) -> None:
    """Check tokenizer_config.json."""
    _require_tokens(config, typed=True)
    _require_added_tokens(config)
    for side in ("padding_side", "truncation_side"):
        # transformers refuses null here too, so `Settings.has` is no test for absence.
        if side in config.values and config.values[side] not in _SIDES:
            config.wrong_type(side, " or ".join(_SIDES))
    if config.has("model_max_length"):
        limit = config.values["model_max_length"]
        # A boolean is an `int` for `isinstance`.
        if type(limit) not in (int, float):
            config.wrong_type("model_max_length", "a number")
    if config.has("tokenizer_class"):
        config.string("tokenizer_class")
    # Null is refused for these keys too.
    splits_specials = config.values.get("split_special_tokens", False)
    if not isinstance(splits_specials, bool):
        config.wrong_type("split_special_tokens", "true or false")
    input_names = config.values.get("model_input_names", [])
    if not isinstance(input_names, list | str):
        config.wrong_type("model_input_names", "a list of strings")
    if config.has("auto_map") and not isinstance(config.values["auto_map"], dict | list):
        config.wrong_type("auto_map", "an object")


def _require_tokens(settings: Settings, *, typed: bool) -> None:
    """Check the special tokens that a file names; `typed` as for `_is_token`."""
    for name in TOKEN_NAMES:
        if settings.has(name) and not _is_token(settings.values[name], typed=typed):
            settings.wrong_type(name, "a token's text")
    for key in _LISTS:
        if not settings.has(key):
            continue
        tokens = settings.values[key]
        if isinstance(tokens, Mapping):
            tokens = list(tokens.values())
        if not _are_tokens(tokens, typed=typed):
            settings.wrong_type(key, "a list of tokens, or an object of them")
    if settings.has(_NAMED_TOKENS):
        tokens_by_name = settings.inside(_NAMED_TOKENS)
        for name, token in tokens_by_name.values.items():
            if not _is_token(token, typed=typed):
                tokens_by_name.wrong_type(name, "a token's text")


def _require_added_tokens(config: Settings) -> None:
    """Check the tokens that tokenizer_config.json lists by their ids."""
    if not config.has("added_tokens_decoder"):
        return
    listed = config.inside("added_tokens_decoder")
    for number in listed.values:
        if not number.isdecimal():
            raise CheckpointError(
                "lists a token by something other than its id",
                path=config.path,
                found=format_value(number),
            )
        token = listed.inside(number)
        token.string("content")
        for flag in _FLAGS:
            token.flag(flag, False)


def _are_tokens(values: Any, *, typed: bool) -> bool:
    return isinstance(values, list) and all(_is_token(value, typed=typed) for value in values)


def _is_token(value: Any, *, typed: bool) -> bool:
    """Return whether transformers accepts a value as a special token.

    Args:
        typed: whether an object must say that it is an AddedToken, as transformers expects in
            tokenizer_config.json.
    """
    if isinstance(value, str):
        return True
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return False
    return not typed or value.get("__type") == "AddedToken"
