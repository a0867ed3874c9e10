"""OpenAI's batch format in files of prompts: a request of its chat completions or completions API
on each line, and answers in the form of its responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.answers.form import Parts
from quantkit.answers.pieces import Call
from quantkit.base.arguments import as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.jobs.inference.json_lines import EXPECTED, parse_strict_object
from quantkit.runtime.sampling_params import SamplingOptions

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_KEYS = {"custom_id", "method", "url", "body"}
OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
OF_TEMPLATE = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
"""Variables of the chat template that have a place of their own in OpenAI's and vLLM's API."""
# Named as in vLLM.
_AS_IDS = "return_tokens_as_token_ids"
_PASSED = {"n", "stop", "draft_tokens", "response_format", *SamplingOptions.__annotations__}
_OF_URL = {
    _CHAT: {
        "messages",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
        *OF_TEMPLATE,
        *OF_TOOLS,
    },
    _COMPLETIONS: {"prompt", "logprobs", "echo"},
}
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
_DEFAULTS_OF_TEMPLATE = {"add_generation_prompt": True, "continue_final_message": False}
_CALL = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}'
_MAX_TOKENS = ("max_tokens", "max_completion_tokens")
MAX_PROMPTS = 1024
"""The maximum number of prompts in one request; OpenAI's API and vLLM state none."""


@dataclass(frozen=True)
class BatchRequest:
    """What the answer to a line repeats, and the `model` that the line names.

    Attributes:
        chat: whether messages are answered; otherwise a prompt is continued.
        answered_by: the name of the model that is used.
        names: how the line calls keys of a line of prompts, where its own differ.
        tokens_as_ids: whether log-probabilities name each token by its id.
    """

    custom_id: str
    chat: bool
    model: str | None
    answered_by: str
    names: Mapping[str, str]
    tokens_as_ids: bool = False


def is_batch_line(values: Mapping[str, Any]) -> bool:
    """Return whether a line is in this format, even if its body is missing."""
    return "body" in values or {"custom_id", "url"} <= values.keys()


def from_batch_line(
    values: Mapping[str, Any], answered_by: str
) -> tuple[BatchRequest, dict[str, Any]]:
    """Parse a line in OpenAI's format, and convert its request to the keys of a line of prompts.

    Raises:
        RequestError: for another method or URL, or for a parameter that has no equivalent here, by
            its name.
    """
    body = values.get("body")
    if body is None:
        raise RequestError(
            "'body' is missing", found=", ".join(values), expected="an object with the request"
        )
    unknown_keys = values.keys() - _KEYS
    if unknown_keys:
        raise RequestError(
            f"unknown key {format_value(min(unknown_keys))} next to 'body'",
            expected=", ".join(sorted(_KEYS)),
        )
    custom_id = as_string("custom_id", values.get("custom_id"))
    url = values.get("url")
    if not custom_id:
        raise RequestError("'custom_id' is empty")
    if values.get("method", "POST") != "POST":
        raise RequestError(
            "'method' is not known", found=format_value(values["method"]), expected="POST"
        )
    if not isinstance(url, str) or url not in _OF_URL:
        raise RequestError(
            "'url' is not known", found=format_value(url), expected=" or ".join(_OF_URL)
        )
    if not isinstance(body, Mapping):
        raise RequestError(
            "'body' is of the wrong type", found=format_value(body), expected="an object"
        )
    # Null is the same as absent in OpenAI's API; clients send it for parameters that are not set.
    parameters = {key: value for key, value in body.items() if value is not None}
    model = parameters.pop("model", None)
    if model is not None:
        as_string("model", model)
    prompt_key = "messages" if url == _CHAT else "prompt"
    if prompt_key not in parameters:
        keys = ", ".join(parameters) or "no keys"
        raise RequestError(f"'{prompt_key}' is missing in 'body'", found=keys, argument=prompt_key)
    tokens_as_ids = parameters.pop(_AS_IDS, False)
    require_flags(**{_AS_IDS: tokens_as_ids})
    passed_keys = (_PASSED | _OF_URL[url]) & parameters.keys()
    line = {key: parameters.pop(key) for key in passed_keys}
    lengths = {key: parameters.pop(key) for key in _MAX_TOKENS if key in parameters}
    # What remains is not supported. It may stay if it asks for what is done anyway.
    for key, value in parameters.items():
        if key in _WITHOUT_EFFECT:
            continue
        defaults = _defaults(key, url, samples=line.get("n", 1))
        if any(_is_same_json(value, default) for default in defaults):
            continue
        hint = "leave it out"
        if defaults:
            hint += f", or use its default {format_value(defaults[0])}"
        problem = f"'{key}' in 'body' is not supported for {url}"
        raise RequestError(problem, found=format_value(value), hint=hint, argument=key)
    # The two names of one parameter: the older one is deprecated in OpenAI's chat API.
    length_texts = list(map(format_value, lengths.values()))
    if len(set(length_texts)) > 1:
        texts = " and ".join(length_texts)
        raise RequestError(f"{' and '.join(lengths)} differ", found=texts, argument=_MAX_TOKENS[0])
    names = {"max_new_tokens": next(iter(lengths), _MAX_TOKENS[0])}
    if lengths:
        line["max_new_tokens"] = next(iter(lengths.values()))
    if url == _CHAT:
        # Chat completions have a flag and a number; elsewhere `logprobs` is the number.
        with_logprobs = line.pop("logprobs", False)
        top = line.pop("top_logprobs", 0)
        require_flags(logprobs=with_logprobs)
        if top and not with_logprobs:
            expected = '"logprobs": true'
            raise RequestError(
                "'top_logprobs' requires 'logprobs'", expected=expected, argument="top_logprobs"
            )
        if with_logprobs:
            line["logprobs"] = top
        names["logprobs"] = "top_logprobs"
        line["messages"] = parse_call_arguments(line["messages"])
        _move_to_template_variables(line)
    else:
        names["token_ids"] = "prompt"
    batch = BatchRequest(
        custom_id=custom_id,
        chat=url == _CHAT,
        model=model,
        answered_by=answered_by,
        names=names,
        tokens_as_ids=tokens_as_ids,
    )
    return batch, line


def _defaults(key: str, url: str, *, samples: object) -> tuple[object, ...]:
    """Find the values of a parameter that change nothing for a request with so many samples."""
    # As many samples as are returned: none is left out.
    if key == "best_of":
        return (*_DEFAULTS[key], samples)
    # Texts get special tokens here. In messages the chat template has printed them already.
    if key == "add_special_tokens" and url == _COMPLETIONS:
        return (True,)
    return _DEFAULTS.get(key, ())


def _is_same_json(value: object, other: object) -> bool:
    """Compare values as in JSON, where ``false`` is not 0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _move_to_template_variables(line: dict[str, Any]) -> None:
    """Move the parameters of `OF_TEMPLATE` to ``chat_template_kwargs``, except values that change
    nothing.

    Raises:
        RequestError: for a value of the wrong type, and for parameters that contradict each other.
    """
    variables = line.get("chat_template_kwargs", {})
    parameters = {key: line.pop(key) for key in OF_TEMPLATE if key in line}
    # Variables of a wrong type are reported where they are read.
    if not parameters or not isinstance(variables, Mapping):
        return
    for key, value in parameters.items():
        if key == "reasoning_effort":
            as_string(key, value)
        else:
            require_flags(**{key: value})
        if key in variables and not _is_same_json(variables[key], value):
            values = f"{format_value(value)} and {format_value(variables[key])}"
            raise RequestError(
                f"'{key}' differs from the one in 'chat_template_kwargs'",
                found=values,
                argument=key,
            )
    if parameters.get("continue_final_message") and parameters.get("add_generation_prompt"):
        problem = "'continue_final_message' and 'add_generation_prompt' are mutually exclusive"
        raise RequestError(problem, hint="leave one of them out", argument="continue_final_message")
    # Without its default, a request needs no template that knows the variable.
    changed: dict[str, Any] = {}
    for key, value in parameters.items():
        if value != _DEFAULTS_OF_TEMPLATE.get(key):
            changed[key] = value
    if changed:
        line["chat_template_kwargs"] = {**variables, **changed}


def split_prompts(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make a line of prompts for each prompt of a request; a completion can have several, as texts
    or token ids.
    """
    prompt = line.get("prompt")
    if not isinstance(prompt, list):
        return [dict(line)]
    options = {key: value for key, value in line.items() if key != "prompt"}
    # `isinstance` would accept booleans.
    if all(type(part) is int for part in prompt):
        return [{**options, "token_ids": prompt}]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            "'prompt' has too many prompts",
            found=len(prompt),
            expected=f"at most {MAX_PROMPTS}",
            argument="prompt",
        )
    lines: list[dict[str, Any]] = []
    for part in prompt:
        if isinstance(part, list):
            kind = "token_ids"
        else:
            kind = "prompt"
        lines.append({**options, kind: part})
    return lines


def build_batch_answer(
    number: int, request: BatchRequest, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Build the line that answers a request. Identifiers and the time are fixed, so that the same
    inputs give the same bytes.

    Args:
        number: of the request in its file, from 0.
        lines: its continuations, prompt by prompt, as a file of prompts gets them, with the
            `text_offset` of tokens that have log-probabilities.
    """
    if request.chat:
        id_prefix = "chatcmpl"
        object_name = "chat.completion"
    else:
        id_prefix = "cmpl"
        object_name = "text_completion"
    body = {
        "id": f"{id_prefix}-{number}",
        "object": object_name,
        "created": 0,
        "model": request.answered_by,
        "choices": build_choices(lines, chat=request.chat),
        "usage": count_usage(lines),
    }
    response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
    return {
        "id": f"batch_req_{number}",
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }


def line_number(line: Mapping[str, Any]) -> Any:
    """Read from a line of results which prompt it answers."""
    # OpenAI's format has no field for the number. `build_batch_answer` writes it into the
    # identifier.
    if "response" in line:
        return int(line["id"].rpartition("_")[2])
    return line["index"]


def build_choices(lines: Sequence[Mapping[str, Any]], *, chat: bool) -> list[dict[str, Any]]:
    """Convert all continuations to the form of the API's responses."""
    choose = _chat_choice if chat else _text_choice
    return [choose(index, line) for index, line in enumerate(lines)]


def count_usage(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the tokens of prompts, each once, and of their continuations."""
    prompt_tokens = 0
    new_tokens = 0
    reasoning_tokens = 0
    has_reasoning = False
    for line in lines:
        # All samples of a prompt share its tokens.
        if line["sample"] == 0:
            prompt_tokens += line["prompt_tokens"]
        new_tokens += line["completion_tokens"]
        if "reasoning_tokens" in line:
            has_reasoning = True
            reasoning_tokens += line["reasoning_tokens"]
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
    if has_reasoning:
        result["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return result


def chat_message(parts: Parts, call_id: Callable[[int], str]) -> dict[str, Any]:
    """Convert an answer to a message; `call_id` makes the identifier of each call."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.calls:
        # As in OpenAI's API, content is null where a message has calls only.
        message["content"] = parts.content or None
        tool_calls: list[dict[str, Any]] = []
        for place, call in enumerate(parts.calls):
            tool_calls.append(tool_call(call, call_id(place)))
        message["tool_calls"] = tool_calls
    return message


def tool_call(call: Call, identifier: str) -> dict[str, Any]:
    """Convert a call to the form of the API's messages."""
    return {
        "id": identifier,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def parse_call_arguments(messages: Any) -> Any:
    """Parse the arguments of calls in messages, which the API spells as JSON text and chat
    templates print as objects. Raises `RequestError` if they are no JSON object.
    """
    if not isinstance(messages, list):
        return messages
    parsed: list[Any] = []
    for message in messages:
        # Messages of a wrong type are reported by the chat format.
        if isinstance(message, Mapping) and message.get("tool_calls"):
            message = _parse_message_calls(message)
        parsed.append(message)
    return parsed


def _parse_message_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls: list[Mapping[str, Any]] = []
    tool_calls = message["tool_calls"]
    # Anything but a list is one call of the wrong type.
    for call in tool_calls if isinstance(tool_calls, list) else [None]:
        if isinstance(call, Mapping):
            function = call.get("function")
        else:
            function = None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise RequestError(
                "a message has a tool call of the wrong type",
                found=format_value(call),
                expected=_CALL,
                argument="messages",
            )
        # Some clients send objects already.
        if isinstance(function.get("arguments"), str):
            parsed = {**function, "arguments": _read_arguments(function)}
            call = {**call, "function": parsed}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _read_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call, whose JSON may be empty."""
    text = function["arguments"]
    if not text.strip():
        return {}
    try:
        return parse_strict_object(text, None)
    except RequestError as error:
        # The place is in the problem and not in the path, which a server keeps to itself.
        name = format_value(function.get("name"))
        problem = f"the arguments of a call of {name}: {error.problem}"
        # A line of prompts is no example of arguments.
        expected = '{"...": ...}' if error.expected == EXPECTED else error.expected
        raise error.restate(problem=problem, expected=expected, argument="messages") from error


def chat_logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert log-probabilities of an answer's tokens to the form of the chat API."""
    content: list[dict[str, Any]] = []
    for entry in entries:
        alternatives = [_entry(alternative) for alternative in entry["top_logprobs"]]
        content.append({**_entry(entry), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[Mapping[str, Any]], offsets: Sequence[int]) -> dict[str, Any]:
    """Convert log-probabilities of a text's tokens, and where each begins, to the form of the
    completions API.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for entry in entries:
        tokens.append(entry["token"])
        token_logprobs.append(entry["logprob"])
        top_logprobs.append(_top_by_text(entry))
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": list(offsets),
    }


def spell_token_id(token: int) -> str:
    """Spell a name of a token that no other token has, as vLLM does."""
    return f"token_id:{token}"


def _top_by_text(entry: Mapping[str, Any]) -> dict[str, float] | None:
    """Map the texts of a token and of the likeliest tokens in its place to their
    log-probabilities.

    Several tokens can have the same text: each part of a character is U+FFFD. The token itself
    keeps its text, so that clients find its value under it; others are then named by their ids.
    """
    # The first token of a prompt, which nothing predicts.
    if entry["logprob"] is None:
        return None
    values = {entry["token"]: entry["logprob"]}
    for alternative in entry["top_logprobs"]:
        if alternative["token_id"] == entry["token_id"]:
            continue
        text = alternative["token"]
        if text in values:
            key = spell_token_id(alternative["token_id"])
        else:
            key = text
        values[key] = alternative["logprob"]
    return values


def _chat_choice(index: int, line: Mapping[str, Any]) -> dict[str, Any]:
    if "logprobs" in line:
        logprobs = chat_logprobs(line["logprobs"])
    else:
        logprobs = None
    # Only an answer that is split into reasoning, content and calls has a message already.
    message = line.get("message") or {"role": "assistant", "content": line["text"], "refusal": None}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": line["finish_reason"],
    }


def _text_choice(index: int, line: Mapping[str, Any]) -> dict[str, Any]:
    if "logprobs" in line:
        logprobs = text_logprobs(line["logprobs"], line["text_offset"])
    else:
        logprobs = None
    return {
        "index": index,
        "text": line["text"],
        "logprobs": logprobs,
        "finish_reason": line["finish_reason"],
    }


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("token", "logprob", "bytes")}
