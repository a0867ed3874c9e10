"""What a folder's generation_config.json says: end tokens, and default sampling options."""

from __future__ import annotations

import logging
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import as_path
from quantkit.base.json_values import Settings, read_settings
from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.text.end_tokens import tokenizer_eos
from quantkit.text.generation_settings import list_unapplied
from quantkit.text.gguf_tokenizer import text_folder

_log = logging.getLogger(__name__)

NAME = "generation_config.json"
_MAX = 1e9
# The likeliest token alone, which is what 0 means.
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
_NO_PADDING = -1


def sampling_defaults(folder: str | Path) -> SamplingOptions:
    """Return the sampling options of a folder's generation_config.json, for conversations;
    `quantkit.generate` is greedy by default.

    Args:
        folder: of the model.

    Returns:
        Arguments for functions that generate: of `temperature`, `top_k`, `top_p`, `min_p` and
        `repetition_penalty` those that are stated; only the last where the file does not say
        ``do_sample``.

    Raises:
        CheckpointError: if a value is of the wrong type or out of its range.

    Example:
        >>> session = quantkit.ChatSession(model, tokenizer, chat,
        **quantkit.sampling_defaults("model"))
    """
    settings = _settings(as_path("folder", folder))
    result: SamplingOptions = {}
    if settings.has("repetition_penalty"):
        result["repetition_penalty"] = settings.number("repetition_penalty", 0, _MAX)
    if settings.flag("do_sample", False):
        result["temperature"] = (
            settings.number("temperature", 0, _MAX) if settings.has("temperature") else 1.0
        )
        if settings.has("top_k"):
            result["top_k"] = _top_k(settings)
        if settings.has("top_p"):
            result["top_p"] = max(settings.number("top_p", 0, 1), _MIN_TOP_P)
        if settings.has("min_p"):
            result["min_p"] = settings.number("min_p", 0, 1)
    try:
        SamplingParams(**result)
    except RequestError as error:
        raise CheckpointError(error.problem, path=settings.path, found=error.found) from error
    if settings.has("num_beams") and settings.integer("num_beams", 1, 2**31) > 1:
        _log.info(
            "%s: requests beam search, which is not supported; tokens are drawn one by one",
            settings.path,
        )
    if unapplied := list_unapplied(settings.values):
        _log.info("%s: quantkit does not apply %s", settings.path, ", ".join(unapplied))
    return result


def require_valid(folder: Path) -> None:
    """Raise `CheckpointError` if a folder's generation_config.json has a value that quantkit or
    transformers refuses.

    `sampling_defaults` reads only what applies to sampling here. transformers validates all keys
    when it loads the file, and fails on some others only when it generates.
    """
    settings = _settings(folder)
    sampling_defaults(folder)
    for key in _NUMBERS:
        if settings.has(key) and type(settings.values[key]) not in (int, float):
            settings.wrong_type(key, "a number")
    settings.flag("do_sample", False)
    settings.ids("eos_token_id")
    for key in ("bos_token_id", "pad_token_id"):
        if settings.has(key):
            settings.integer(key, _NO_PADDING if key == "pad_token_id" else 0, 2**31)
    if settings.has("max_new_tokens"):
        settings.number("max_new_tokens", 1, _MAX)
    if settings.has("assistant_ensemble_weight"):
        settings.number("assistant_ensemble_weight", 1e-9, 1 - 1e-9)
    if settings.has("early_stopping") and settings.values["early_stopping"] not in (
        True,
        False,
        "never",
    ):
        settings.wrong_type("early_stopping", "true, false or 'never'")
    if settings.has("cache_implementation"):
        settings.string("cache_implementation")
    if settings.has("watermarking_config"):
        settings.inside("watermarking_config")
    if settings.has("compile_config"):
        # It is a Python object in transformers, which JSON cannot hold: every value is refused.
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
    if beams == 1 and settings.flag("do_sample", False):
        return
    if sequences > beams:
        raise CheckpointError(
            "'num_return_sequences' is more than the search has",
            path=settings.path,
            found=settings.values["num_return_sequences"],
            expected=f"at most {beams:g}",
        )


def _top_k(settings: Settings) -> int:
    """0 is all, and so is -1, as vLLM has it; files that a program has written may say 50.0."""
    value = settings.values["top_k"]
    if isinstance(value, float) and value.is_integer():
        stated = int(value)
    else:
        stated = value
    return max(Settings({"top_k": stated}, settings.path).integer("top_k", -1, 2**31), 0)


def end_tokens(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the end tokens of a model: its config's, and those that its folder names, see
    `text.end_tokens`.

    Raises:
        CheckpointError: if generation_config.json lists anything other than tokens of the
            vocabulary, or a file of the tokenizer is damaged.
    """
    settings = _settings(folder)
    stated = settings.ids("eos_token_id")
    if stated and (largest := max(stated)) >= config.vocab_size:
        raise CheckpointError(
            "'eos_token_id' is not in the vocabulary",
            path=settings.path,
            found=largest,
            expected=f"at most {config.vocab_size - 1}",
        )
    listed = [*config.eos_token_ids, *stated]
    eos = tokenizer_eos(text_folder(folder))
    # A tokenizer of another model is reported by its reader.
    if eos is not None and eos < config.vocab_size:
        listed.append(eos)
    return tuple(dict.fromkeys(listed))


def _settings(folder: Path) -> Settings:
    path = text_folder(folder) / NAME
    return Settings(read_settings(path) if path.is_file() else {}, path)
