"""What a folder's generation_config.json says: end tokens, and default sampling options."""

from __future__ import annotations

import logging
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.arguments import as_path
from quantkit.errors import CheckpointError, RequestError
from quantkit.json_values import Settings, read_settings
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.text.end_tokens import tokenizer_eos
from quantkit.text.gguf_tokenizer import text_folder

_log = logging.getLogger(__name__)

NAME = "generation_config.json"
_MAX = 1e9
_MIN_TOP_P = 1e-9  # the likeliest token alone, which is what 0 means


def sampling_defaults(folder: str | Path) -> SamplingOptions:
    """The sampling options of a folder's generation_config.json, for conversations; `quantkit.generate` is greedy by
    default.

    Args:
        folder: of the model.

    Returns:
        Arguments for functions that generate: of `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty`
        those that are stated; only the last where the file does not say ``do_sample``.

    Raises:
        CheckpointError: if a value is of the wrong type or out of its range.

    Example:
        >>> session = quantkit.ChatSession(model, tokenizer, chat, **quantkit.sampling_defaults("model"))
    """
    settings = _settings(as_path("folder", folder))
    found: SamplingOptions = {}
    if settings.has("repetition_penalty"):
        found["repetition_penalty"] = settings.number("repetition_penalty", 0, _MAX)
    if settings.flag("do_sample", False):
        found["temperature"] = settings.number("temperature", 0, _MAX) if settings.has("temperature") else 1.0
        if settings.has("top_k"):
            found["top_k"] = _top_k(settings)
        if settings.has("top_p"):
            found["top_p"] = max(settings.number("top_p", 0, 1), _MIN_TOP_P)
        if settings.has("min_p"):
            found["min_p"] = settings.number("min_p", 0, 1)
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise CheckpointError(error.problem, path=settings.path, found=error.found) from error
    if settings.has("num_beams") and settings.integer("num_beams", 1, 2**31) > 1:
        _log.info("%s: requests beam search, which is not supported; tokens are drawn one by one", settings.path)
    return found


def _top_k(settings: Settings) -> int:
    """0 is all, and so is -1, as vLLM has it; files that a program has written may say 50.0."""
    value = settings.values["top_k"]
    stated = int(value) if isinstance(value, float) and value.is_integer() else value
    return max(Settings({"top_k": stated}, settings.path).integer("top_k", -1, 2**31), 0)


def end_tokens(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the end tokens of a model: its config's, and those that its folder names, see `text.end_tokens`.

    Raises:
        CheckpointError: if generation_config.json lists anything other than tokens of the vocabulary, or a file of the
            tokenizer is damaged.
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
    if eos is not None and eos < config.vocab_size:  # a tokenizer of another model is reported by its reader
        listed.append(eos)
    return tuple(dict.fromkeys(listed))


def _settings(folder: Path) -> Settings:
    path = text_folder(folder) / NAME
    return Settings(read_settings(path) if path.is_file() else {}, path)
