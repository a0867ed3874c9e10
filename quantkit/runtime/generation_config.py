"""Read end tokens and default sampling options from a folder's generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import as_path
from quantkit.base.json_values import Settings, read_settings
from quantkit.base.late import LateModule
from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.text.text_folder import locate_or_extract_text_folder

if TYPE_CHECKING:
    from quantkit.text import end_tokens as tokenizer_end
    from quantkit.text import generation_settings
else:
    generation_settings = LateModule("quantkit.text.generation_settings")
    tokenizer_end = LateModule("quantkit.text.end_tokens")

_log = logging.getLogger(__name__)

NAME = "generation_config.json"
# The files state no upper bounds; this is above any value in use.
_MAX = 1e9
# transformers takes 0 for the likeliest token alone, which this value selects too.
_MIN_TOP_P = 1e-9
_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "length_penalty",
    "diversity_penalty",
    "guidance_scale",
    "max_length",
    "min_length",
    "max_new_tokens",
    "min_new_tokens",
    "max_time",
    "num_beams",
    "num_return_sequences",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "assistant_ensemble_weight",
)
"""The keys of transformers' GenerationConfig with a number, whether or not the other keys let it
be used.
"""
# Some files write this for a vocabulary without a padding token.
_NO_PADDING = -1


def sampling_defaults(folder: str | Path) -> SamplingOptions:
    """Read the sampling options of a folder's generation_config.json, for conversations.

    `quantkit.generate` is greedy by default.

    Args:
        folder: of the model.

    Returns:
        Arguments for functions that generate: those of `temperature`, `top_k`, `top_p`, `min_p`
        and `repetition_penalty` that the file contains; only `repetition_penalty` if the file does
        not set ``do_sample``.

    Raises:
        CheckpointError: if a value is of the wrong type or out of its range.

    Example:
        >>> options = quantkit.sampling_defaults("model")
        >>> session = quantkit.ChatSession(model, tokenizer, chat, **options)
    """
    settings = _settings(as_path("folder", folder))
    options: SamplingOptions = {}
    # transformers applies the penalty to greedy search too.
    if settings.has("repetition_penalty"):
        options["repetition_penalty"] = settings.number("repetition_penalty", 0, _MAX)
    if settings.flag("do_sample", False):
        if settings.has("temperature"):
            options["temperature"] = settings.number("temperature", 0, _MAX)
        # quantkit's own default is greedy; `do_sample` alone means temperature 1.
        else:
            options["temperature"] = 1.0
        if settings.has("top_k"):
            options["top_k"] = _top_k(settings)
        if settings.has("top_p"):
            options["top_p"] = max(settings.number("top_p", 0, 1), _MIN_TOP_P)
        if settings.has("min_p"):
            options["min_p"] = settings.number("min_p", 0, 1)
    # The ranges of quantkit's options are narrower than those above.
    try:
        SamplingParams(**options)
    except RequestError as error:
        raise CheckpointError(error.problem, path=settings.path, found=error.found) from error
    if settings.has("num_beams") and settings.integer("num_beams", 1, 2**31) > 1:
        _log.info(
            "%s: requests beam search, which is not supported; tokens are drawn one by one",
            settings.path,
        )
    unapplied = generation_settings.list_unapplied(settings.values)
    if unapplied:
        _log.info("%s: quantkit does not apply %s", settings.path, ", ".join(unapplied))
    return options


def require_valid(folder: Path) -> None:
    """Raise `CheckpointError` if a folder's generation_config.json has a value that quantkit or
    transformers refuses.

    `sampling_defaults` reads only what applies to sampling here. transformers validates all keys
    when it loads the file, and fails on some others only when it generates.
    """
    settings = _settings(folder)
    sampling_defaults(folder)
    for key in _NUMBERS:
        # The exact type: a bool is an int in Python.
        if settings.has(key) and type(settings.values[key]) not in (int, float):
            settings.wrong_type(key, "a number")
    settings.flag("do_sample", False)
    settings.ids("eos_token_id")
    if settings.has("bos_token_id"):
        settings.integer("bos_token_id", 0, 2**31)
    if settings.has("pad_token_id"):
        settings.integer("pad_token_id", _NO_PADDING, 2**31)
    if settings.has("max_new_tokens"):
        settings.number("max_new_tokens", 1, _MAX)
    if settings.has("assistant_ensemble_weight"):
        settings.number("assistant_ensemble_weight", 1e-9, 1 - 1e-9)
    if settings.has("early_stopping"):
        early_stopping = settings.values["early_stopping"]
        if early_stopping not in (True, False, "never"):
            settings.wrong_type("early_stopping", "true, false or 'never'")
    if settings.has("cache_implementation"):
        settings.string("cache_implementation")
    if settings.has("watermarking_config"):
        settings.inside("watermarking_config")
    if settings.has("compile_config"):
        # transformers expects a Python object, which JSON cannot express: every value fails.
        settings.wrong_type("compile_config", "null")
    _require_sequences(settings)


def _require_sequences(settings: Settings) -> None:
    """Check that greedy search has one answer, and beam search no more answers than beams, as
    transformers requires.
    """
    if not settings.has("num_return_sequences"):
        return
    sequences = settings.number("num_return_sequences", 1, _MAX)
    if settings.has("num_beams"):
        beams = settings.number("num_beams", 1, _MAX)
    else:
        beams = 1
    # Sampling draws any number of sequences.
    if beams == 1 and settings.flag("do_sample", False):
        return
    if sequences > beams:
        raise CheckpointError(
            "'num_return_sequences' exceeds the number of beams",
            path=settings.path,
            found=settings.values["num_return_sequences"],
            expected=f"at most {beams:g}",
        )


def _top_k(settings: Settings) -> int:
    """Read `top_k`, of which 0 keeps all tokens."""
    value = settings.values["top_k"]
    # Files that a program has written may contain 50.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    top_k = Settings({"top_k": value}, settings.path).integer("top_k", -1, 2**31)
    # -1 keeps all tokens too, as in vLLM.
    return max(top_k, 0)


def end_tokens(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Collect the end tokens of a model: its config's, and those that its folder names, see
    `text.end_tokens`.

    Raises:
        CheckpointError: if generation_config.json lists anything other than tokens of the
            vocabulary, or a file of the tokenizer is damaged.
    """
    settings = _settings(folder)
    generation_ends = settings.ids("eos_token_id")
    largest = max(generation_ends, default=-1)
    if largest >= config.vocab_size:
        raise CheckpointError(
            "'eos_token_id' is not in the vocabulary",
            path=settings.path,
            found=largest,
            expected=f"at most {config.vocab_size - 1}",
        )
    tokens = [*config.eos_token_ids, *generation_ends]
    eos = tokenizer_end.tokenizer_eos(locate_or_extract_text_folder(folder))
    # The reader of the tokenizer reports one of another model.
    if eos is not None and eos < config.vocab_size:
        tokens.append(eos)
    # Without duplicates, in order.
    return tuple(dict.fromkeys(tokens))


def _settings(folder: Path) -> Settings:
    """Read a folder's generation_config.json; no settings if there is none."""
    path = locate_or_extract_text_folder(folder) / NAME
    return Settings(read_settings(path) if path.is_file() else {}, path)
