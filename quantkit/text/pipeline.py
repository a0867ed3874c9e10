"""The steps of a tokenizer.json that normalize and split text: canonical forms, and llama.cpp's
names for them.

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
_DECODED = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip"}
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
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
    """Return the patterns and `ignore_merges` of llama.cpp's name; None for an unknown name."""
    return _BY_NAME.get(name)


def normalizer_of(name: str) -> dict[str, Any] | None:
    """Return the normalizer of the models that llama.cpp's name stands for; llama.cpp itself
    does not normalize.
    """
    if name in _NORMALIZED_TO_NFC:
        return {"type": "NFC"}
    return None


def pre_tokenizer_of(steps: Mapping[str, Any]) -> Any:
    """Return the tokenizers library's object for a ``pre_tokenizer`` of a tokenizer.json."""
    from tokenizers import Tokenizer, models

    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": steps})).pre_tokenizer


def with_mistral_regex(pre_tokenizer: Any) -> dict[str, Any]:
    """Return a pre_tokenizer whose first split is Mistral's, as transformers makes it for
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
    if steps.get("type") == "Metaspace":
        rest = _BYTE_LEVEL
    else:
        rest = steps
    return {"type": "Sequence", "pretokenizers": [split, rest]}


def names_of(patterns: Patterns, *, has_bos: bool) -> dict[bool, str]:
    """Return the names for some patterns, by `ignore_merges`; none if llama.cpp does not have the
    patterns.
    """
    found = {}
    for known, ignore_merges, names in _KINDS:
        if known == patterns:
            found[ignore_merges] = names
    result: dict[bool, str] = {}
    for ignore_merges, names in found.items():
        result[ignore_merges] = _WITHOUT_BOS if _WITHOUT_BOS in names and not has_bos else names[0]
    return result


def patterns_of(pre_tokenizer: Any) -> Patterns | None:
    """Return the patterns of a byte-level ``pre_tokenizer`` in tokenizer.json; None for one that
    does something else.
    """
    if isinstance(pre_tokenizer, dict):
        steps: Any = pre_tokenizer
    else:
        steps = {}
    if steps.get("type") == "Sequence":
        steps = steps.get("pretokenizers")
    else:
        steps = [steps]
    if (
        not isinstance(steps, list)
        or not steps
        or not all(isinstance(step, dict) for step in steps)
    ):
        return None
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    found = [_pattern(step) for step in steps[:-1]]
    patterns = tuple(one for one in found if one is not None)
    if len(patterns) < len(found):
        return None
    if last.get("use_regex", True):
        return (*patterns, GPT2_PATTERN)
    return patterns


def pre_tokenizer(patterns: Patterns) -> dict[str, Any]:
    """Return the ``pre_tokenizer`` of a tokenizer.json for some patterns, as the models that have
    them write it.
    """
    *before, last = patterns
    own = last == GPT2_PATTERN
    steps = []
    for pattern in before if own else patterns:
        steps.append(
            {"type": "Digits", "individual_digits": True}
            if pattern == _DIGIT
            else {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    bytes_last = {**_BYTE_LEVEL, "use_regex": own}
    if steps:
        return {"type": "Sequence", "pretokenizers": [*steps, bytes_last]}
    return bytes_last


def canonical_steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, a pre-tokenizer or a decoder, without sequences; none if
    there is no such part.
    """
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        result: list[dict[str, Any]] = []
        for key in _SEQUENCES:
            for one in part.get(key, []):
                for step in canonical_steps(one):
                    result.append(step)
        return result
    # Offsets are not compared.
    return [{key: value for key, value in part.items() if key != "trim_offsets"}]


def decoder_settings(decoder: Any) -> dict[str, object]:
    """Return the settings of a decoder in a form that can be compared.

    Returns:
        `decoder`: its steps, with the settings that they use; `decoder beyond bytes`: the steps
        that do more than to restore bytes and spaces, which is all that formats without such steps
        do.
    """
    steps = []
    for canonical_step in canonical_steps(decoder):
        steps.append(
            {"type": "ByteLevel"} if canonical_step.get("type") == "ByteLevel" else canonical_step
        )
    return {"decoder": steps, "decoder beyond bytes": _steps_beyond_bytes(steps)}


def text_changing_steps(decoder: Any) -> list[str]:
    """Return the types of a decoder's steps that do more than to restore bytes and spaces, which
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
    """Return the settings of a normalizer and a pre-tokenizer in a form that can be compared.

    Returns:
        `normalizer` and `pre_tokenizer`: their steps, without those that replace spaces by U+2581;
        of byte-level tokenizers the patterns. With U+2581 also `space prefix`, whether text gets a
        space before it, and `prepend_scheme`: `each` for all pieces between special tokens,
        otherwise that of Metaspace.
    """
    before = canonical_steps(normalizer)
    splits = canonical_steps(pre_tokenizer)
    scheme = None
    if before[-1:] == [REPLACE_SPACES]:
        before.pop()
        scheme = "never"
        if before[-1:] == [PREPEND_SPACE]:
            before.pop()
            scheme = "each"
        if splits[:1] == [SPLIT_AT_SPACES]:  # no space is left
            del splits[0]
    if splits and splits[0].get("type") == "Metaspace" and splits[0].get("replacement") == SPACE:
        if scheme != "each":
            scheme = splits[0].get("prepend_scheme", "always")
        splits[:1] = [{"type": "Metaspace", "split": True}] if splits[0].get("split", True) else []
    patterns = patterns_of(pre_tokenizer)
    result: dict[str, object] = {
        "normalizer": before,
        "pre_tokenizer": splits if patterns is None else list(patterns),
    }
    if scheme is None:
        return result
    return {**result, "space prefix": scheme != "never", "prepend_scheme": scheme}


def _pattern(step: Mapping[str, Any]) -> str | None:
    """Return the pattern of one step.

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
    matched = step.get("behavior") == "Isolated" or (
        step.get("behavior") == "Removed"
        and step.get("invert") is True
        and pattern.endswith(r"|\s+")
    )
    if matched:
        return pattern.replace("\r", r"\r").replace("\n", r"\n")
    return None
