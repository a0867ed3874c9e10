"""The steps of a tokenizer.json that cut a text, equal where they do the same, however they are spelled."""

from __future__ import annotations

from typing import Any

from quantkit.text.pre_tokenizers import patterns_of

SPACE = "\u2581"
REPLACE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND_SPACE = {"type": "Prepend", "prepend": SPACE}
CUT_AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_SPACES_BACK = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
_DECODED = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip"}
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")


def canonical_steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, a pre-tokenizer or a decoder, one after the other; none where there is no part."""
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        return [step for key in _SEQUENCES for one in part.get(key, []) for step in canonical_steps(one)]
    without = "trim_offsets"  # of offsets, which are no tokens
    return [{key: value for key, value in part.items() if key != without}]


def decoder_settings(decoder: Any) -> dict[str, object]:
    """What a decoder does.

    Returns:
        `decoder`: its steps, with the settings that they use; `decoder beyond bytes`: those that do more than to put
        bytes and spaces for tokens, which is all that formats without such a list of steps do.
    """
    steps = [{"type": "ByteLevel"} if one.get("type") == "ByteLevel" else one for one in canonical_steps(decoder)]
    more = [one for one in steps if one != _SPACES_BACK and one.get("type") not in _DECODED]
    return {"decoder": steps, "decoder beyond bytes": more}


def cutting_settings(normalizer: Any, pre_tokenizer: Any) -> dict[str, object]:
    """What a normalizer and a pre-tokenizer do to a text.

    Returns:
        `normalizer` and `pre_tokenizer`: their steps, without those that put U+2581 for spaces; those of byte-level
        tokenizers are their patterns. Of a tokenizer with U+2581, `space prefix`: whether a text gets a space before
        it, and `prepend_scheme`: `each` for all pieces between special tokens, else as Metaspace has it.
    """
    before, cuts = canonical_steps(normalizer), canonical_steps(pre_tokenizer)
    scheme = None
    if before[-1:] == [REPLACE_SPACES]:
        before.pop()
        scheme = "never"
        if before[-1:] == [PREPEND_SPACE]:
            before.pop()
            scheme = "each"
        if cuts[:1] == [CUT_AT_SPACES]:  # none is left to cut at
            del cuts[0]
    if cuts and cuts[0].get("type") == "Metaspace" and cuts[0].get("replacement") == SPACE:
        if scheme != "each":
            scheme = cuts[0].get("prepend_scheme", "always")
        cuts[:1] = [{"type": "Metaspace", "split": True}] if cuts[0].get("split", True) else []
    patterns = patterns_of(pre_tokenizer)
    found: dict[str, object] = {
        "normalizer": before, "pre_tokenizer": cuts if patterns is None else list(patterns)
    }  # fmt: skip
    return found if scheme is None else {**found, "space prefix": scheme != "never", "prepend_scheme": scheme}
