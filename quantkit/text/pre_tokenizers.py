"""How a text is cut into words before pairs are merged: what llama.cpp names, by the patterns that models have.

A name stands for patterns that are put to a text one after the other, each to what the one before has left between
its matches and to these, and for whether a word of the vocabulary is taken as it is. The patterns are those of the
models' own tokenizers; where llama.cpp's are simpler, it is llama.cpp that tokenizes otherwise than the model was
trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.text.tiktoken_file import LLAMA3_PATTERN

Patterns = tuple[str, ...]

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", _DIGIT)
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CLITIC = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CLITIC}|{_BEFORE}{_UPPER}+{_LOWER}*{_CLITIC}|\p{{N}}{{1,3}}{_REST}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_KINDS: tuple[tuple[Patterns, bool, tuple[str, ...]], ...] = (
    ((LLAMA3_PATTERN,), True, (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0",
    )),
    ((LLAMA3_PATTERN,), False, ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    ((_QWEN2,), False, (
        "qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "kormo", "solar-open", "grok-2", "f2llmv2",
    )),
    ((_QWEN35,), False, ("qwen35",)),
    ((GPT2_PATTERN,), False, (
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling", "gigachat", "a.x-4.0",
        "mellum",
    )),
    ((_DIGIT, GPT2_PATTERN), False, (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    )),
    ((_TEKKEN,), True, ("tekken",)),
    ((_GPT4O,), False, ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (_DEEPSEEK3, False, ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
)  # fmt: skip
_BY_NAME = {name: (patterns, whole) for patterns, whole, names in _KINDS for name in names}
NAMES = tuple(names[0] for _, _, names in _KINDS)
"""One for each way to cut a text."""
SIMPLER = {"tekken", "gpt-4o"}
"""Names for which llama.cpp's own pattern is simpler than that of the models."""
ADDS_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "tekken"}
"""Names with which llama.cpp begins a text with BOS where the file does not say whether it shall."""
_WITHOUT_BOS = "glm4"  # the only one of those alike with which llama.cpp knows that there may be none
_BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def named(name: str) -> tuple[Patterns, bool] | None:
    """The patterns that llama.cpp's name stands for, and whether words of the vocabulary are taken whole; None for a
    name that is not known here."""
    return _BY_NAME.get(name)


def names_of(patterns: Patterns, *, has_bos: bool) -> dict[bool, str]:
    """The names that stand for some patterns, by whether words of the vocabulary are taken whole; none for patterns
    that llama.cpp does not have."""
    found = {whole: names for known, whole, names in _KINDS if known == patterns}
    return {
        whole: _WITHOUT_BOS if _WITHOUT_BOS in names and not has_bos else names[0] for whole, names in found.items()
    }


def patterns_of(pre_tokenizer: Mapping[str, Any] | None) -> Patterns | None:
    """The patterns of a ``pre_tokenizer`` in tokenizer.json, which ends in bytes as letters; None for one that does
    something else."""
    steps = _steps(pre_tokenizer)
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    found = []
    for step in steps[:-1]:
        if (pattern := _pattern(step)) is None:
            return None
        found.append(pattern)
    return (*found, GPT2_PATTERN) if steps[-1].get("use_regex", True) else tuple(found)


def pre_tokenizer(patterns: Patterns) -> dict[str, Any]:
    """What patterns are in a tokenizer.json, as the models that have them write it."""
    *before, last = patterns
    own = last == GPT2_PATTERN
    steps = [_split(one) for one in (before if own else patterns)]
    bytes_last = {**_BYTES_ONLY, "use_regex": own}
    return {"type": "Sequence", "pretokenizers": [*steps, bytes_last]} if steps else bytes_last


def _steps(pre_tokenizer: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(pre_tokenizer, dict):
        return []
    steps = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return steps if isinstance(steps, list) and all(isinstance(one, dict) for one in steps) else []


def _pattern(step: Mapping[str, Any]) -> str | None:
    """That of one step. What is cut out by a pattern that leaves nothing over is what is matched."""
    if step.get("type") == "Digits":
        return _DIGIT if step.get("individual_digits") is True else None
    if step.get("type") != "Split" or not isinstance(step.get("pattern"), dict):
        return None
    pattern = step["pattern"].get("Regex")
    if not isinstance(pattern, str):
        return None
    matched = step.get("behavior") == "Isolated" or (
        step.get("behavior") == "Removed" and step.get("invert") is True and pattern.endswith(r"|\s+")
    )
    return pattern.replace("\r", r"\r").replace("\n", r"\n") if matched else None


def _split(pattern: str) -> dict[str, Any]:
    if pattern == _DIGIT:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
