"""Chat completions: requests with messages, and choices of their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.answers.form import Parts
from quantkit.base.arguments import as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.openai.fields import is_same_json, parse_shared_fields
from quantkit.openai.logprobs import TokenNames, build_chat_logprobs
from quantkit.openai.request import CHAT, ApiRequest
from quantkit.openai.tools import (
    build_tool_call,
    create_call_namer,
    parse_call_arguments,
    parse_tools,
)
from quantkit.prompts.errors import name_argument_in_errors, restate_errors
from quantkit.prompts.prompt import Prompt, PromptFields
from quantkit.runtime.request import Completion

_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
# Variables of the chat template that have a place of their own in OpenAI's and vLLM's API.
_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
_TEMPLATE_DEFAULTS = {"add_generation_prompt": True, "continue_final_message": False}
_FIELDS = {
    "messages",
    "logprobs",
    "top_logprobs",
    "chat_template_kwargs",
    *_TEMPLATE_FIELDS,
    *_TOOL_FIELDS,
}


def parse_chat(body: Mapping[str, Any]) -> ApiRequest:
    """Parse a request of the chat completions API.

    Raises:
        RequestError: for a field of the wrong type, one that is not supported, and fields that
            contradict each other.
    """
    fields = parse_shared_fields(body, CHAT, "messages", _FIELDS)
    values = fields.values
    options = dict(fields.options)
    num_logprobs = _parse_logprobs(values)
    if num_logprobs is not None:
        options["logprobs"] = num_logprobs
    messages = parse_call_arguments(values["messages"])
    variables = _parse_template_variables(values)
    with restate_errors(), name_argument_in_errors("tools"):
        tools = parse_tools(*[values.get(key) for key in _TOOL_FIELDS])
    if fields.grammar is not None and tools is not None:
        raise RequestError(
            "'response_format' and 'tools' cannot be combined",
            hint='leave one of them out, or use "tool_choice": "none"',
            argument="response_format",
        )
    # With "tool_choice": "none" there are no tools, and the template must not show them.
    definitions = None if tools is None else tools.definitions
    prompt = PromptFields(
        kind="messages",
        value=messages,
        options=options,
        definitions=definitions,
        variables=variables,
        grammar=fields.grammar,
        is_split=True,
        tools=tools,
    )
    # The option `logprobs` is a number, which is another field here.
    return ApiRequest(
        path=CHAT,
        model=fields.model,
        prompts=[prompt],
        names={**fields.names, "logprobs": "top_logprobs"},
        tokens_as_ids=fields.tokens_as_ids,
    )


def _parse_logprobs(values: Mapping[str, Any]) -> object:
    """Return the number of log-probabilities; None if they are not requested."""
    # Chat completions have a flag and a number; elsewhere `logprobs` is the number.
    is_requested = values.get("logprobs", False)
    top_logprobs = values.get("top_logprobs", 0)
    require_flags(logprobs=is_requested)
    if top_logprobs and not is_requested:
        raise RequestError(
            "'top_logprobs' requires 'logprobs'",
            expected='"logprobs": true',
            argument="top_logprobs",
        )
    if is_requested:
        return top_logprobs
    return None


def _parse_template_variables(values: Mapping[str, Any]) -> object:
    """Return the variables of the chat template, among them the fields that are variables, except
    values that change nothing.

    Raises:
        RequestError: for a value of the wrong type, and for fields that contradict each other.
    """
    variables = values.get("chat_template_kwargs", {})
    fields = {key: values[key] for key in _TEMPLATE_FIELDS if key in values}
    # Variables of a wrong type are reported where they are used.
    if not fields or not isinstance(variables, Mapping):
        return variables
    for key, value in fields.items():
        if key == "reasoning_effort":
            as_string(key, value)
        else:
            require_flags(**{key: value})
        if key in variables and not is_same_json(variables[key], value):
            raise RequestError(
                f"'{key}' differs from the one in 'chat_template_kwargs'",
                found=f"{format_value(value)} and {format_value(variables[key])}",
                argument=key,
            )
    if fields.get("continue_final_message") and fields.get("add_generation_prompt"):
        problem = "'continue_final_message' and 'add_generation_prompt' are mutually exclusive"
        raise RequestError(problem, hint="leave one of them out", argument="continue_final_message")
    # Without its default, a request needs no template that knows the variable.
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        if value != _TEMPLATE_DEFAULTS.get(key):
            changed[key] = value
    return {**variables, **changed}


def build_chat_choice(
    index: int, prompt: Prompt, completion: Completion, names: TokenNames, request_id: str
) -> dict[str, Any]:
    """Build a choice of a chat completion.

    Args:
        index: of the choice.
        names: of tokens in log-probabilities.
        request_id: from which the identifiers of calls are made.
    """
    text = prompt.read_text(completion, names.texts.tokenizer)
    logprobs = None
    if completion.logprobs is not None:
        logprobs = build_chat_logprobs(completion.token_ids, completion.logprobs, names)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    has_calls = False
    if prompt.form is not None:
        parts = Parts()
        # The parser of streams is used here too, so that both ways give the same answer.
        parser = prompt.form.create_parser()
        parts.add([*parser.feed(text), *parser.close()])
        has_calls = bool(parts.calls)
        name_call = create_call_namer(prompt.form, request_id, completion.sample)
        message = _build_message(parts, name_call)
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": find_finish_reason(completion, has_calls=has_calls),
    }


def find_finish_reason(completion: Completion, *, has_calls: bool) -> str:
    """Find why an answer ended, with the API's reason for one that calls tools."""
    if has_calls and completion.finish_reason == "stop":
        return "tool_calls"
    return completion.finish_reason


def _build_message(parts: Parts, name_call: Callable[[int], str]) -> dict[str, Any]:
    """Convert an answer to a message; `name_call` makes the identifier of each call."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.calls:
        # As in OpenAI's API, content is null where a message has calls only.
        message["content"] = parts.content or None
        tool_calls: list[dict[str, Any]] = []
        for number, call in enumerate(parts.calls):
            tool_calls.append(build_tool_call(call, name_call(number)))
        message["tool_calls"] = tool_calls
    return message
