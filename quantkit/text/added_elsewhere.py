"""What tokenizer_config.json says of tokens and tokenizer.json does not: transformers uses it, other readers do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.json_values import read_json

_FLAGS = ("single_word", "lstrip", "rstrip", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def stated_elsewhere(folder: Path) -> dict[str, object]:
    """Tokens and flags that tokenizer_config.json alone has, by where they are there; nothing of a folder without a
    tokenizer.json. Files that are damaged are left to their readers."""
    added, config = _read(folder / "tokenizer.json").get("added_tokens"), _read(folder / "tokenizer_config.json")
    if not isinstance(added, list):
        return {}
    own = {one["content"]: one for one in added if isinstance(one, dict) and isinstance(one.get("content"), str)}
    found = dict(_decoder(config.get("added_tokens_decoder"), own))
    for key in _LISTS:
        listed = config.get(key)
        values = list(listed.values()) if isinstance(listed, dict) else listed if isinstance(listed, list) else []
        spelled = {
            one.get("content") if isinstance(one, dict) else one for one in values if isinstance(one, dict | str)
        }
        if more := sorted(one for one in spelled if isinstance(one, str) and not own.get(one, {}).get("special")):
            found[key] = more
    if config.get("split_special_tokens") is True:
        found["split_special_tokens"] = True
    return found


def _decoder(listed: object, own: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, object]]:
    for number, token in listed.items() if isinstance(listed, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str):
            continue
        other = own.get(content)
        flags = {flag: token[flag] for flag in _FLAGS if flag in token}
        if other is None or str(other.get("id")) != str(number):
            yield f"added_tokens_decoder.{number}", content
        elif differing := {flag: value for flag, value in flags.items() if other.get(flag, False) != value}:
            yield f"added_tokens_decoder.{number}", {"content": content, **differing}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except CheckpointError:
        return {}
