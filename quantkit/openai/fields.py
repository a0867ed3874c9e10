"""The fields that requests of all of OpenAI's APIs share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.base.arguments import as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.openai.request import COMPLETIONS
from quantkit.openai.response_format import parse_response_format
from quantkit.prompts.errors import name_argument_in_errors, restate_errors
from quantkit.prompts.options import SHARED_OPTIONS

# Named as in vLLM.
_TOKENS_AS_IDS = "return_tokens_as_token_ids"
_MAX_TOKENS = ("max_tokens", "max_completion_tokens")
# Any value of these changes nothing in an answer: they are for accounts, caches and scheduling.
_WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "cache_prompt",
    "prediction",
    "verbosity",
    "priority",
}
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "stream": (False,),
    "suffix": ("",),
    "tools": ([],),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Values of OpenAI's and vLLM's parameters that ask for what is done anyway, the default first."""


@dataclass(frozen=True)
class SharedFields:
    """The fields of a request, of which the shared ones are parsed.

    Attributes:
        model: the model that the request names.
        options: how prompts are continued, by the names of `quantkit.prompts.options.OPTIONS`.
        names: what the request calls these options, where its names differ.
        tokens_as_ids: whether log-probabilities name each token by its id.
        grammar: of the answers that the ``response_format`` allows; None allows any text.
        values: the remaining fields, by name.
    """

    model: str | None
    options: Mapping[str, Any]
    names: Mapping[str, str]
    tokens_as_ids: bool
    grammar: str | None
    values: Mapping[str, Any]


def parse_shared_fields(
    body: Mapping[str, Any], url: str, prompt_field: str, api_fields: Collection[str]
) -> SharedFields:
    """Parse the fields that all APIs share.

    Args:
        url: the path of the API.
        prompt_field: the name of the field with the prompt.
        api_fields: the names of the fields that the API parses itself.

    Raises:
        RequestError: for a field of the wrong type, and for a field that is not supported, unless
            its value changes nothing.
    """
    # Null is the same as absent in OpenAI's API; clients send it for parameters that are not set.
    fields = {key: value for key, value in body.items() if value is not None}
    model = fields.pop("model", None)
    if model is not None:
        as_string("model", model)
    if prompt_field not in fields:
        keys = ", ".join(fields) or "no keys"
        raise RequestError(
            f"'{prompt_field}' is missing in 'body'", found=keys, argument=prompt_field
        )
    tokens_as_ids = fields.pop(_TOKENS_AS_IDS, False)
    require_flags(**{_TOKENS_AS_IDS: tokens_as_ids})
    response_format = fields.pop("response_format", None)
    options = {key: fields.pop(key) for key in SHARED_OPTIONS & fields.keys()}
    values = {key: fields.pop(key) for key in set(api_fields) & fields.keys()}
    lengths = {key: fields.pop(key) for key in _MAX_TOKENS if key in fields}
    # What remains is not supported. It may stay if it asks for what is done anyway.
    for key, value in fields.items():
        if key not in _WITHOUT_EFFECT:
            _require_default(key, value, url, samples=options.get("n", 1))
    # The two names of one parameter: the older one is deprecated in OpenAI's chat API.
    length_texts = list(map(format_value, lengths.values()))
    if len(set(length_texts)) > 1:
        texts = " and ".join(length_texts)
        raise RequestError(f"{' and '.join(lengths)} differ", found=texts, argument=_MAX_TOKENS[0])
    names = {"max_new_tokens": next(iter(lengths), _MAX_TOKENS[0])}
    if lengths:
        options["max_new_tokens"] = next(iter(lengths.values()))
    grammar = None
    if response_format is not None:
        # Without a place: the caller adds that of the line, if there is one.
        with restate_errors(), name_argument_in_errors("response_format"):
            grammar = parse_response_format(response_format)
    return SharedFields(
        model=model,
        options=options,
        names=names,
        tokens_as_ids=tokens_as_ids,
        grammar=grammar,
        values=values,
    )


def _require_default(key: str, value: object, url: str, *, samples: object) -> None:
    """Raise a `RequestError` unless a field that is not supported asks for what is done anyway, for
    a request with so many samples.
    """
    defaults = _list_defaults(key, url, samples=samples)
    if any(is_same_json(value, default) for default in defaults):
        return
    hint = "leave it out"
    if defaults:
        hint += f", or use its default {format_value(defaults[0])}"
    problem = f"'{key}' in 'body' is not supported for {url}"
    raise RequestError(problem, found=format_value(value), hint=hint, argument=key)


def _list_defaults(key: str, url: str, *, samples: object) -> tuple[object, ...]:
    """List the values of a field that change nothing for a request with so many samples."""
    # As many samples as are returned: none is left out.
    if key == "best_of":
        return (*_DEFAULTS[key], samples)
    # Texts get special tokens here. In messages the chat template has printed them already.
    if key == "add_special_tokens" and url == COMPLETIONS:
        return (True,)
    return _DEFAULTS.get(key, ())


def require_keys(values: Mapping[str, Any], allowed_keys: Collection[str]) -> None:
    """Raise a `RequestError` that names the first unknown key, in alphabetical order."""
    unknown_keys = values.keys() - set(allowed_keys)
    if unknown_keys:
        key = min(unknown_keys)
        raise RequestError(
            f"unknown key {format_value(key)}",
            expected=", ".join(sorted(allowed_keys)),
            argument=key,
        )


def is_same_json(value: object, other: object) -> bool:
    """Compare values as in JSON, where ``false`` is not 0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
