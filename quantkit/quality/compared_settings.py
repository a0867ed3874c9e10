"""Compare the settings that change what a model generates although its weights, config and
tokenizer are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantkit.base.json_values import format_value, read_json
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.formats.registry import CONTAINERS
from quantkit.runtime.generation_config import NAME as GENERATION
from quantkit.runtime.generation_config import sampling_defaults
from quantkit.text.generation_settings import SUPPRESS_TOKENS, read_other_settings
from quantkit.text.special_tokens import read_tokenizer_config
from quantkit.text.text_folder import locate_or_extract_text_folder
from quantkit.text.tokenizer import ids_around_text

# Values with which an option changes no probability, so that a file may state them or not.
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# Where a folder states no top_k, transformers samples from 50 tokens, vLLM and quantkit from all:
# of two folders, it is compared as it is stated.
_READERS_DIFFER = ("top_k",)
_CLEAN_UP = "clean_up_tokenization_spaces"
_CLEAN_UP_ANYWAY = f"{_CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output"


def find_setting_differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Describe where the sampling settings and the tokenizer's flags of two models differ.

    Compared are the sampling options that generation_config.json or GGUF's metadata request, the
    tokens that they suppress and, if both models are folders with such files, the other keys of
    generation_config.json that change what is generated, and ``add_bos_token``, ``add_eos_token``
    and ``clean_up_tokenization_spaces`` of tokenizer_config.json, where transformers heeds it.
    GGUF states the first two by its vocabulary, which is compared with the tokenizers, and cannot
    state the third. A Meta folder states none of them.

    Raises:
        CheckpointError: if a file is damaged.
    """
    if not (CONTAINERS[a.format].states_tokens and CONTAINERS[b.format].states_tokens):
        return []
    # The text files of a GGUF file are written to another folder from its metadata.
    are_folders = (
        locate_or_extract_text_folder(a.path) == a.path
        and locate_or_extract_text_folder(b.path) == b.path
    )
    neutral = dict(_NEUTRAL)
    if are_folders:
        for key in _READERS_DIFFER:
            del neutral[key]
    differences = _describe_differences(
        GENERATION, _read_sampling(a.path, neutral), _read_sampling(b.path, neutral)
    )
    differences += _describe_differences(
        GENERATION,
        _read_other_settings(a.path, in_gguf=not are_folders),
        _read_other_settings(b.path, in_gguf=not are_folders),
    )
    if are_folders:
        differences += _describe_differences(
            "tokenizer_config.json", _read_flags(a), _read_flags(b)
        )
    return differences


def _describe_differences(
    file: str, first: dict[str, object], second: dict[str, object]
) -> list[str]:
    differences = []
    for key in sorted({*first, *second}):
        if first.get(key) != second.get(key):
            differences.append(
                f"{file} differs: {key} {_describe(first, key)} against {_describe(second, key)}"
            )
    return differences


def _describe(values: dict[str, object], key: str) -> str:
    if key in values:
        return format_value(values[key])
    return "not set"


def _read_sampling(folder: Path, neutral: Mapping[str, float]) -> dict[str, object]:
    """Read the sampling options in effect, without those of neutral values; temperature 0
    where it is greedy.
    """
    options: dict[str, object] = {**sampling_defaults(folder)}
    # A greedy sampler ignores top_k, top_p and min_p, but applies the penalty.
    if not options.get("temperature"):
        penalty = options.get("repetition_penalty", 1.0)
        options = {"temperature": 0.0, "repetition_penalty": penalty}
    result: dict[str, object] = {}
    for name, value in options.items():
        if name not in neutral or value != neutral[name]:
            result[name] = value
    return result


def _read_other_settings(path: Path, *, in_gguf: bool) -> dict[str, object]:
    """Read the other keys of a model's generation_config.json, or those of them that GGUF has too;
    ids of tokens are sorted.
    """
    settings = read_other_settings(locate_or_extract_text_folder(path))
    if in_gguf:
        settings = {key: value for key, value in settings.items() if key == SUPPRESS_TOKENS}
    suppressed = settings.get(SUPPRESS_TOKENS)
    if isinstance(suppressed, list):
        settings[SUPPRESS_TOKENS] = sorted(set(suppressed))
    return settings


def _read_flags(checkpoint: Checkpoint) -> dict[str, object]:
    """Read the flags of tokenizer_config.json, with what applies where it states none: the
    tokenizer adds the tokens that its own file says, and transformers cleans nothing up.

    The tokenizer of a model that has no decoder here is not read, since it may be of any kind.
    """
    settings = read_tokenizer_config(checkpoint.path)
    adds_bos = False
    adds_eos = False
    if checkpoint.config.runnable:
        tokenizer = load_checked_tokenizer(checkpoint)[0]
        if tokenizer is not None:
            before, after = ids_around_text(tokenizer)
            adds_bos = bool(before)
            adds_eos = bool(after)
    return {
        "add_bos_token": settings.flag("add_bos_token", adds_bos),
        "add_eos_token": settings.flag("add_eos_token", adds_eos),
        _CLEAN_UP: settings.flag(_CLEAN_UP, False) and not _ignores_clean_up(checkpoint.path),
    }


def _ignores_clean_up(folder: Path) -> bool:
    """Return whether transformers leaves spaces as they are whatever the flag says: in text of a
    byte-pair encoding, of which it would take spaces that belong to it (seen in 5.23).
    """
    path = folder / "tokenizer.json"
    if not path.is_file() or read_tokenizer_config(folder).flag(_CLEAN_UP_ANYWAY, False):
        return False
    model = read_json(path).get("model")
    return isinstance(model, dict) and model.get("type") == "BPE"
