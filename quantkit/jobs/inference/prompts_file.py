"""Prompts in a file of JSON lines, read and checked before a model is loaded, without torch.

Each line is an object with one of

    prompt       a string, which is continued
    messages     a conversation, which is answered: objects with a role and a content, as chat
                 templates take them
    token_ids    the prompt as a list of token ids

and may have

    id           any JSON, which comes with the result
    max_new_tokens, stop, n, logprobs, echo, temperature, top_p, top_k, min_p, repetition_penalty,
    presence_penalty, frequency_penalty, logit_bias, seed
                 how it is continued, in place of the options for all lines
    draft_tokens how many tokens are proposed at a time at most; 0 to 15
    response_format
                 the form of the answer, as in OpenAI's API: {"type": "json_schema", "json_schema":
                 {"name": "...", "schema": {...}}}, or {"type": "json_object"}
    specials     true: spellings of special tokens in the prompt, such as <|eot_id|>, mean those
                 tokens
    tools        that may be called in an answer to messages, as JSON schemas
    chat_template_kwargs
                 variables for the chat template

A line with ``body`` is a request in OpenAI's batch format; see
`quantkit.openai.batch`.

Null is as good as absent. Other keys are refused, and so are keys that are there twice and numbers
that would not come back as they are: of no value in 64 bits, and in an ``id`` of more digits than
those hold.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from quantkit.base.json_values import LINES_OF_ARRAY, collect_values, format_value
from quantkit.base.strict_json import parse_strict_object
from quantkit.errors import RequestError
from quantkit.openai.batch import BatchRequest, is_batch_line, parse_batch_line
from quantkit.openai.response_format import parse_response_format
from quantkit.prompts.builder import PromptBuilder
from quantkit.prompts.errors import name_argument_in_errors, restate_errors
from quantkit.prompts.options import OPTIONS
from quantkit.prompts.prompt import Prompt, PromptFields, PromptKind
from quantkit.runtime.request import BEAM_SEARCH, create_beam_search_error

_log = logging.getLogger(__name__)

_EXPECTED = '{"prompt": "..."} or {"messages": [...]}'
_KINDS: tuple[PromptKind, ...] = ("prompt", "messages", "token_ids")
# The keys that go with one kind of prompt only.
_KIND_OF_KEY: Mapping[str, PromptKind] = {
    "specials": "prompt",
    "tools": "messages",
    "chat_template_kwargs": "messages",
}
_KEYS = {*_KINDS, *_KIND_OF_KEY, *OPTIONS, "id", "response_format"}
# Names of the same options in other programs, for hints.
_ELSEWHERE = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "text": "prompt",
    "input": "prompt",
    "conversation": "messages",
    "conversations": "messages",
    "custom_id": "id",
    "prompt_token_ids": "token_ids",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
}


@dataclass(frozen=True)
class PromptLine:
    """A line of a file that was read and checked.

    Attributes:
        prompts: one, or those of a request in OpenAI's format.
        known_by: the ``id`` of the line, if it has one.
        batch: the line's request, if it is in OpenAI's batch format.
    """

    prompts: list[Prompt]
    known_by: dict[str, Any] = field(default_factory=dict)
    batch: BatchRequest | None = None


def read_prompts(content: bytes, name: str, builder: PromptBuilder, model: str) -> list[PromptLine]:
    """Read the prompts of each line of a file.

    Args:
        name: of the file, for messages.
        builder: encodes the prompts.
        model: the name of the model that answers.

    Raises:
        RequestError: for a file of another kind, or an invalid line, with its number.
        CheckpointError: if the model's chat template or generation_config.json is damaged.
    """
    lines: list[PromptLine] = []
    line_numbers: dict[str, int] = {}
    other_models = set[str]()
    for number, values in _parse_lines(content, name):
        place = f"{name}:{number}"
        if not is_batch_line(values):
            lines.append(_read_line(values, place, builder))
            continue
        with restate_errors(place):
            batch = parse_batch_line(values)
            # Callers find an answer by its `custom_id`.
            first_number = line_numbers.setdefault(batch.custom_id, number)
            if first_number != number:
                raise RequestError(
                    f"'custom_id' is the same as in line {first_number}",
                    found=format_value(batch.custom_id),
                )
        if batch.request.model not in (None, model):
            other_models.add(str(batch.request.model))
        prompts = batch.request.build_prompts(builder, place)
        lines.append(PromptLine(prompts, batch=batch))
    # No error: files made for another name of the same model can be used as they are.
    if other_models:
        _log.warning(
            "%s: the requests name %s; %s answers them",
            name,
            ", ".join(sorted(other_models)),
            model,
        )
    return lines


def _read_line(values: Mapping[str, Any], place: str, builder: PromptBuilder) -> PromptLine:
    """Read a line that is not in OpenAI's format; `place` is the file and the line."""
    # Null is the same as absent, but the key has to be a known one.
    line_values = {key: value for key, value in values.items() if value is not None}
    with restate_errors(place):
        _require_known(values)
        kind = _find_kind(line_values)
    if kind == "messages":
        builder.load_chat_format()
    with restate_errors(place):
        prompt = builder.build(_parse_fields(kind, line_values))
    # An id may be null, and is then written as such.
    known_by = {key: values[key] for key in ("id",) if key in values}
    return PromptLine([prompt], known_by)


def _parse_fields(kind: PromptKind, line_values: Mapping[str, Any]) -> PromptFields:
    """Convert the keys of a line to the fields of a prompt."""
    grammar = None
    if "response_format" in line_values:
        with name_argument_in_errors("response_format"):
            grammar = parse_response_format(line_values["response_format"])
    return PromptFields(
        kind=kind,
        value=line_values[kind],
        options={key: line_values[key] for key in OPTIONS & line_values.keys()},
        specials=line_values.get("specials", False),
        definitions=line_values.get("tools"),
        variables=line_values.get("chat_template_kwargs", {}),
        grammar=grammar,
    )


def _find_kind(line_values: Mapping[str, Any]) -> PromptKind:
    """Find the kind of the prompt. Raises `RequestError` unless there is one prompt, and nothing
    that goes with another kind.
    """
    kinds = [kind for kind in _KINDS if kind in line_values]
    if not kinds:
        raise RequestError(
            "no prompt is given", found=", ".join(line_values) or "no keys", expected=_EXPECTED
        )
    if len(kinds) > 1:
        raise RequestError(
            "the prompt is given twice", found=" and ".join(kinds), expected="one of them"
        )
    for key, required_kind in _KIND_OF_KEY.items():
        if key in line_values and kinds != [required_kind]:
            raise RequestError(
                f"'{key}' requires '{required_kind}'", found=f"'{kinds[0]}'", argument=key
            )
    return kinds[0]


def _require_known(values: Collection[str]) -> None:
    """Raise a `RequestError` for an unknown key."""
    for key in values:
        # These are known and never supported, so a similar name would be no help.
        if key in BEAM_SEARCH:
            raise create_beam_search_error(key)
        if key not in _KEYS:
            if key in _ELSEWHERE:
                suggestions = [_ELSEWHERE[key]]
            else:
                suggestions = difflib.get_close_matches(key, _KEYS, 1)
            if suggestions:
                hint = f"did you mean '{suggestions[0]}'?"
            else:
                hint = None
            raise RequestError(f"unknown key {format_value(key)}", hint=hint, argument=key)


def _parse_lines(content: bytes, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse the objects of a file, and yield each with the number of its line, but for blank lines
    at the end. Raises `RequestError` if the file is empty, not text, or of another kind.
    """
    try:
        # Editors on Windows write a byte order mark.
        text = content.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise RequestError(
            "cannot be decoded", path=f"{name}:{number}", expected="UTF-8"
        ) from error
    if not text:
        raise RequestError("the file is empty", path=name, expected=f"on each line {_EXPECTED}")
    # Not `splitlines`, which also splits at U+2028 and others that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        with restate_errors(f"{name}:{number}"):
            values = _parse_line(line, is_first=number == 1)
        yield number, values


def _parse_line(line: str, *, is_first: bool) -> dict[str, Any]:
    """Parse the object of a line; the first line of a JSON array has an error of its own."""
    if not line.strip():
        raise RequestError("the line is empty", expected=_EXPECTED)
    if is_first and line.lstrip().startswith("["):
        raise RequestError(
            "contains a JSON array", expected=f"on each line {_EXPECTED}", hint=LINES_OF_ARRAY
        )
    values = parse_strict_object(line, _EXPECTED)
    # Only the id is written again. The line is parsed a second time only if its id has a float.
    if any(isinstance(item, float) for item in collect_values(values.get("id"))):
        _require_exact_id(line)
    return values


class _Spelled(str):
    """A number with a point or an exponent, as it stands in the file."""


def _require_exact_id(line: str) -> None:
    """Raise a `RequestError` if a number in the ``id`` of a line would be written differently."""
    spelled_id = json.loads(line, parse_float=_Spelled)["id"]
    for item in collect_values(spelled_id):
        if isinstance(item, _Spelled) and not _is_exact(item):
            raise RequestError(
                "'id': the number loses precision in JSON",
                found=format_value(str(item)),
                expected=f"{float(item)}, or a string",
            )


def _is_exact(text: str) -> bool:
    """Compare a finite number, read and written again, with its spelling."""
    try:
        return Decimal(repr(float(text))) == Decimal(text)
    except InvalidOperation:
        # `Decimal` refuses exponents beyond its bounds, which `float` reads as 0.
        return False
