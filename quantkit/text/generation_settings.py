"""The keys of generation_config.json that change what transformers generates, beyond those that
quantkit samples by.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantkit.base.json_values import read_settings

FILE = "generation_config.json"
SUPPRESS_TOKENS = "suppress_tokens"
"""The key of tokens that are never drawn, which GGUF has too."""
# With transformers' own defaults. Keys that only change how it computes, such as `use_cache`, are
# left out, and so are those of helper models.
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
    SUPPRESS_TOKENS: None,
    "token_healing": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
# Limits of length, options of other search algorithms and repairs, which change no token that is
# drawn one by one.
_OF_LITTLE_EFFECT = {
    "diversity_penalty",
    "early_stopping",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_time",
    "num_beams",
    "num_return_sequences",
    "remove_invalid_values",
    "renormalize_logits",
}


def read_other_settings(folder: Path) -> dict[str, object]:
    """Read those of the keys that a folder's file states with another value than transformers'
    default.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    return select_other_settings(read_settings(path))


def select_other_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Select those of the keys in the contents of a file whose values are not transformers'
    defaults.
    """
    other_settings: dict[str, object] = {}
    for key, value in values.items():
        # Null counts as a key that is absent.
        if key in _OTHER_DEFAULTS and value is not None and value != _OTHER_DEFAULTS[key]:
            other_settings[key] = value
    return other_settings


def list_unapplied(values: Mapping[str, object]) -> list[str]:
    """List the keys in the contents of a file that change which tokens transformers draws, and
    no others.
    """
    return sorted(set(select_other_settings(values)) - _OF_LITTLE_EFFECT)
