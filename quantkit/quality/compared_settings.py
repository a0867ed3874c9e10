"""Compare the settings that change what a model generates although its weights, config and tokenizer are equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.formats.registry import CONTAINERS
from quantkit.json_values import read_settings, shown
from quantkit.runtime.generation_config import NAME as GENERATION
from quantkit.runtime.generation_config import sampling_defaults
from quantkit.text.gguf_tokenizer import text_folder
from quantkit.text.special_tokens import read_tokenizer_config
from quantkit.text.tokenizer import ids_around_text

# Values with which an option changes no probability, so that a file may state them or not.
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# Where a folder states no top_k, transformers samples from 50 tokens, vLLM and quantkit from all: of two folders, it is
# compared as it is stated.
_READERS_DIFFER = ("top_k",)
# The other keys of generation_config.json that change what transformers generates, with its own defaults. Keys that
# only change how it computes, such as `use_cache`, are not compared, and neither are those of helper models.
_OTHER_DEFAULTS: dict[str, object] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "length_penalty": 1.0,
    "max_length": 20,
    "max_new_tokens": None,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "remove_invalid_values": False,
    "renormalize_logits": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
_CLEAN_UP = "clean_up_tokenization_spaces"


def find_setting_differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Describe where the sampling settings and the tokenizer's flags of two models differ.

    Compared are the sampling options that generation_config.json or GGUF's metadata request and, if both models are
    folders with such files, the other keys of generation_config.json that change what is generated, and
    ``add_bos_token``, ``add_eos_token`` and ``clean_up_tokenization_spaces`` of tokenizer_config.json. GGUF states the
    first two by its vocabulary, which is compared with the tokenizers, and cannot state the third. A Meta folder states
    none of them.

    Raises:
        CheckpointError: if a file is damaged.
    """
    if not all(CONTAINERS[checkpoint.format].states_tokens for checkpoint in (a, b)):
        return []
    are_folders = all(text_folder(checkpoint.path) == checkpoint.path for checkpoint in (a, b))
    neutral = dict(_NEUTRAL)
    if are_folders:
        for key in _READERS_DIFFER:
            del neutral[key]
    differences = _describe_differences(GENERATION, _read_sampling(a.path, neutral), _read_sampling(b.path, neutral))
    if are_folders:
        differences += _describe_differences(GENERATION, _read_other_keys(a.path), _read_other_keys(b.path))
        differences += _describe_differences("tokenizer_config.json", _read_flags(a), _read_flags(b))
    return differences


def _describe_differences(file: str, first: dict[str, object], second: dict[str, object]) -> list[str]:
    differences = []
    for key in sorted({*first, *second}):
        if first.get(key) != second.get(key):
            differences.append(f"{file} differs: {key} {_describe(first, key)} against {_describe(second, key)}")
    return differences


def _describe(values: dict[str, object], key: str) -> str:
    return shown(values[key]) if key in values else "not set"


def _read_sampling(folder: Path, neutral: Mapping[str, float]) -> dict[str, object]:
    """Return the sampling options in effect, without those of neutral values; temperature 0 where it is greedy."""
    options: dict[str, object] = {**sampling_defaults(folder)}
    if not options.get("temperature"):
        penalty = options.get("repetition_penalty", 1.0)
        options = {"temperature": 0.0, "repetition_penalty": penalty}
    return {name: value for name, value in options.items() if name not in neutral or value != neutral[name]}


def _read_other_keys(folder: Path) -> dict[str, object]:
    path = folder / GENERATION
    values = read_settings(path) if path.is_file() else {}
    stated = {key: value for key, value in values.items() if key in _OTHER_DEFAULTS and value is not None}
    return {key: value for key, value in stated.items() if value != _OTHER_DEFAULTS[key]}


def _read_flags(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the flags of tokenizer_config.json, with what applies where it states none: the tokenizer adds the tokens
    that its own file says, and transformers cleans nothing up.

    The tokenizer of a model that has no decoder here is not read, since it may be of any kind.
    """
    settings = read_tokenizer_config(checkpoint.path)
    adds_bos, adds_eos = False, False
    if checkpoint.config.runnable:
        tokenizer = checked_tokenizer(checkpoint)[0]
        if tokenizer is not None:
            before, after = ids_around_text(tokenizer)
            adds_bos, adds_eos = bool(before), bool(after)
    return {
        "add_bos_token": settings.flag("add_bos_token", adds_bos),
        "add_eos_token": settings.flag("add_eos_token", adds_eos),
        _CLEAN_UP: settings.flag(_CLEAN_UP, False),
    }
