"""Compare the steps of a tokenizer.json that normalize and split text: canonical forms, and
llama.cpp's names for them.

A name of llama.cpp stands for patterns and for `ignore_merges`. Patterns are applied one after the
other, each to the matches of the one before and to what is between them. The patterns are those of
the models' own tokenizers; where llama.cpp's are simpler, llama.cpp tokenizes differently than the
model was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantkit.text.tiktoken_file import LLAMA3_PATTERN

Patterns = tuple[str, ...]

SPACE = "\u2581"
REPLACE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND_SPACE = {"type": "Prepend", "prepend": SPACE}
RESTORE_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
SPLIT_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
# The types of decoder steps that only restore bytes and spaces.
_DECODED = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip"}
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Parts of patterns. Qwen splits numbers into digits, Llama 3 into groups of three.
_DIGIT = r"\p{N}"
_QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", _DIGIT)
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CLITIC = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CLITIC}|{_BEFORE}{_UPPER}+{_LOWER}*{_CLITIC}"
    rf"|\p{{N}}{{1,3}}{_REST}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Patterns, `ignore_merges`, and llama.cpp's names for them; the first name is the one that is
# written.
# Patterns, `ignore_merges`, and llama.cpp's names for them; the first of the names is written.
_KINDS: list[tuple[Patterns, bool, list[str]]] = [
    (patterns, ignore_merges, names.split())
    for patterns, ignore_merges, names in (
        (
            (LLAMA3_PATTERN,),
            True,
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0",
        ),
        ((LLAMA3_PATTERN,), False, "dbrx smaug-bpe glm4 chatglm-bpe"),
        (
            (_QWEN2,),
            False,
            "qwen2 stablelm2 deepseek-r1-qwen hunyuan megrez kormo solar-open grok-2 f2llmv2",
        ),
        ((_QWEN35,), False, "qwen35"),
        (
            (GPT2_PATTERN,),
            False,
            "gpt-2 phi-2 mpt olmo jais trillion exaone4 granite-docling gigachat a.x-4.0 mellum",
        ),
        (
            (_DIGIT, GPT2_PATTERN),
            False,
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        ),
        ((_TEKKEN,), True, "tekken"),
        ((_GPT4O,), False, "gpt-4o llama4 kanana2 minimax-m2"),
        (_DEEPSEEK3, False, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    )
]
_BY_NAME = {
    name: (patterns, ignore_merges) for patterns, ignore_merges, names in _KINDS for name in names
}
NAMES = tuple(names[0] for _, _, names in _KINDS)
"""One name for each combination of patterns and `ignore_merges`."""
SIMPLER = {"tekken", "gpt-4o"}
"""Names for which llama.cpp's own pattern is simpler than that of the models."""
ADDS_BOS = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "lfm2",
    "midm-2.0",
    "tekken",
}
"""Names for which llama.cpp adds BOS unless the file says otherwise."""
# The only one of its names for which llama.cpp accepts a model without BOS.
_WITHOUT_BOS = "glm4"
_NORMALIZED_TO_NFC = {"qwen2", "qwen35"}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def patterns_by_name(name: str) -> tuple[Patterns, bool] | None:
    """Look up the patterns and `ignore_merges` of llama.cpp's name; None for an unknown name."""
    return _BY_NAME.get(name)


def normalizer_of(name: str) -> dict[str, Any] | None:
    """Build the normalizer of the models that llama.cpp's name stands for; llama.cpp itself
    does not normalize.
    """
    if name in _NORMALIZED_TO_NFC:
        return {"type": "NFC"}
    return None


def pre_tokenizer_of(steps: Mapping[str, Any]) -> Any:
    """Build the tokenizers library's object for a ``pre_tokenizer`` of a tokenizer.json."""
    from tokenizers import Tokenizer, models

    # The library parses a pre-tokenizer only as a part of a tokenizer.
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": steps})).pre_tokenizer


def with_mistral_regex(pre_tokenizer: Any) -> dict[str, Any]:
    """Replace the first split of a pre_tokenizer by Mistral's, as transformers does for
    ``fix_mistral_regex``.
    """
    split = {
        "type": "Split",
        "pattern": {"Regex": _TEKKEN},
        "behavior": "Isolated",
        "invert": False,
    }
    if isinstance(pre_tokenizer, dict):
        steps = pre_tokenizer
    else:
        steps = {}
    if steps.get("type") == "Sequence":
        return {**steps, "pretokenizers": [split, *steps["pretokenizers"][1:]]}
    # transformers replaces Metaspace by the byte level.
    if steps.get("type") == "Metaspace":
        last_step = _BYTE_LEVEL
    else:
        last_step = steps
    return {"type": "Sequence", "pretokenizers": [split, last_step]}


def names_of(patterns: Patterns, *, has_bos: bool) -> dict[bool, str]:
    """Find the names for some patterns, by `ignore_merges`; none if llama.cpp does not have the
    patterns.
    """
    names_by_setting: dict[bool, str] = {}
    for kind_patterns, ignore_merges, names in _KINDS:
        if kind_patterns != patterns:
            continue
        if _WITHOUT_BOS in names and not has_bos:
            names_by_setting[ignore_merges] = _WITHOUT_BOS
        else:
            names_by_setting[ignore_merges] = names[0]
    return names_by_setting


def patterns_of(pre_tokenizer: Any) -> Patterns | None:
    """Read the patterns of a byte-level ``pre_tokenizer`` in tokenizer.json; None for one that does
    something else.
    """
    steps: Any = [pre_tokenizer]
    if isinstance(pre_tokenizer, dict) and pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer.get("pretokenizers")
    if not isinstance(steps, list) or not steps:
        return None
    if not all(isinstance(step, dict) for step in steps):
        return None
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    patterns: list[str] = []
    for step in steps[:-1]:
        pattern = _pattern(step)
        if pattern is None:
            return None
        patterns.append(pattern)
    # The byte level can split text itself, by GPT-2's pattern.
    if last.get("use_regex", True):
        patterns.append(GPT2_PATTERN)
    return tuple(patterns)


def pre_tokenizer(patterns: Patterns) -> dict[str, Any]:
    """Build the ``pre_tokenizer`` of a tokenizer.json for some patterns, as the models that have
    them write it.
    """
    # The byte level can split text itself, by GPT-2's pattern.
    ends_with_gpt2 = patterns[-1] == GPT2_PATTERN
    if ends_with_gpt2:
        separate_patterns = patterns[:-1]
    else:
        separate_patterns = patterns
    steps: list[dict[str, Any]] = []
    for pattern in separate_patterns:
        if pattern == _DIGIT:
            steps.append({"type": "Digits", "individual_digits": True})
            continue
        steps.append(
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    bytes_last = {**_BYTE_LEVEL, "use_regex": ends_with_gpt2}
    if steps:
        return {"type": "Sequence", "pretokenizers": [*steps, bytes_last]}
    return bytes_last


def canonical_steps(part: Any) -> list[dict[str, Any]]:
    """List the steps of a normalizer, a pre-tokenizer or a decoder, without sequences; none if
    there is no such part.
    """
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        steps: list[dict[str, Any]] = []
        for key in _SEQUENCES:
            for nested_part in part.get(key, []):
                steps += canonical_steps(nested_part)
        return steps
    # Offsets do not change the tokens.
    return [{key: value for key, value in part.items() if key != "trim_offsets"}]


def decoder_settings(decoder: Any) -> dict[str, object]:
    """Describe a decoder in a form that can be compared.

    Returns:
        `decoder`: its steps, with the settings that they use; `decoder beyond bytes`: the steps
        that do more than to restore bytes and spaces, which is all that formats without such steps
        do.
    """
    steps: list[dict[str, Any]] = []
    for step in canonical_steps(decoder):
        # The other settings of a byte level have an effect only in a pre-tokenizer.
        if step.get("type") == "ByteLevel":
            steps.append({"type": "ByteLevel"})
        else:
            steps.append(step)
    return {"decoder": steps, "decoder beyond bytes": _steps_beyond_bytes(steps)}


def text_changing_steps(decoder: Any) -> list[str]:
    """List the types of a decoder's steps that do more than to restore bytes and spaces, which
    llama.cpp lacks.
    """
    return [str(step.get("type")) for step in _steps_beyond_bytes(canonical_steps(decoder))]


def _steps_beyond_bytes(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps_beyond_bytes: list[dict[str, Any]] = []
    for step in steps:
        if step != RESTORE_SPACES and step.get("type") not in _DECODED:
            steps_beyond_bytes.append(step)
    return steps_beyond_bytes


def splitting_settings(normalizer: Any, pre_tokenizer: Any) -> dict[str, object]:
    """Describe a normalizer and a pre-tokenizer in a form that can be compared.

    Returns:
        `normalizer` and `pre_tokenizer`: their steps, without those that replace spaces by U+2581;
        of byte-level tokenizers the patterns. With U+2581 also `space prefix`, whether text gets a
        space before it, and `prepend_scheme`: `each` for all pieces between special tokens,
        otherwise that of Metaspace.
    """
    before = canonical_steps(normalizer)
    splits = canonical_steps(pre_tokenizer)
    scheme = None
    # A normalizer or Metaspace replaces spaces by U+2581: both become the same description.
    if before[-1:] == [REPLACE_SPACES]:
        before.pop()
        scheme = "never"
        if before[-1:] == [PREPEND_SPACE]:
            before.pop()
            scheme = "each"
        # No space is left to split at.
        if splits[:1] == [SPLIT_AT_SPACES]:
            del splits[0]
    if splits and splits[0].get("type") == "Metaspace" and splits[0].get("replacement") == SPACE:
        metaspace = splits.pop(0)
        if scheme != "each":
            scheme = metaspace.get("prepend_scheme", "always")
        if metaspace.get("split", True):
            splits.insert(0, {"type": "Metaspace", "split": True})
    patterns = patterns_of(pre_tokenizer)
    result: dict[str, object] = {
        "normalizer": before,
        "pre_tokenizer": splits if patterns is None else list(patterns),
    }
    if scheme is None:
        return result
    return {**result, "space prefix": scheme != "never", "prepend_scheme": scheme}


def _pattern(step: Mapping[str, Any]) -> str | None:
    """Read the pattern of one step.

    Removing all that does not match a pattern without gaps leaves the matches.
    """
    if step.get("type") == "Digits":
        if step.get("individual_digits") is True:
            return _DIGIT
        return None
    if step.get("type") != "Split" or not isinstance(step.get("pattern"), dict):
        return None
    pattern = step["pattern"].get("Regex")
    if not isinstance(pattern, str):
        return None
    behavior = step.get("behavior")
    # A pattern that ends with a match for spaces has no gaps.
    removes_gaps = (
        behavior == "Removed" and step.get("invert") is True and pattern.endswith(r"|\s+")
    )
    if behavior == "Isolated" or removes_gaps:
        # Files may have line breaks in place of their escapes.
        return pattern.replace("\r", r"\r").replace("\n", r"\n")
    return None
