"""Requests of OpenAI's API become prompts, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import RequestError
from quantkit.openai.batch import (
    build_batch_line,
    is_batch_response,
    parse_batch_line,
    read_batch_number,
)
from quantkit.openai.completions import MAX_PROMPTS
from quantkit.openai.parse import parse_request
from quantkit.openai.request import CHAT, COMPLETIONS
from quantkit.openai.stream_options import StreamOptions, pop_stream_options
from quantkit.runtime.sampling_params import SamplingOptions

MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "look"}}


def test_messages_become_one_prompt() -> None:
    body = {
        "model": "any",
        "messages": MESSAGES,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": None,
        "reasoning_effort": "low",
        "add_generation_prompt": True,
        "tools": [TOOL],
        "user": "me",
    }
    request = parse_request(CHAT, body)
    assert request.is_chat
    assert request.model == "any"
    assert request.names == {
        "max_new_tokens": "max_completion_tokens",
        "logprobs": "top_logprobs",
    }
    (prompt,) = request.prompts
    assert (prompt.kind, prompt.value, prompt.place) == ("messages", MESSAGES, None)
    assert prompt.options == {"max_new_tokens": 5, "logprobs": 2}
    # The generation prompt is the default, which templates need not know.
    assert prompt.variables == {"reasoning_effort": "low"}
    assert prompt.definitions == [TOOL]
    assert prompt.is_split
    assert prompt.tools is not None
    assert list(prompt.tools.parameters) == ["look"]


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"}
    (prompt,) = parse_request(CHAT, body).prompts
    assert prompt.definitions is None
    assert prompt.tools is None


@pytest.mark.parametrize(
    ("value", "kinds", "places"),
    [
        ("a", ["prompt"], [None]),
        ([1, 2], ["token_ids"], [None]),
        (["a"], ["prompt"], [None]),
        (["a", [1, 2]], ["prompt", "token_ids"], [0, 1]),
        # Not token ids, but three prompts of a wrong type, which the builder refuses.
        ([True, 1, 2], ["prompt"] * 3, [0, 1, 2]),
    ],
)
def test_a_completion_has_a_prompt_of_each_text(
    value: Any, kinds: list[str], places: list[int | None]
) -> None:
    request = parse_request(COMPLETIONS, {"prompt": value, "echo": True, "logprobs": 1})
    assert not request.is_chat
    assert [prompt.kind for prompt in request.prompts] == kinds
    assert [prompt.place for prompt in request.prompts] == places
    for prompt in request.prompts:
        assert prompt.options == {"echo": True, "logprobs": 1}
        assert not prompt.is_split
    assert request.names == {"max_new_tokens": "max_tokens", "token_ids": "prompt"}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_every_sampling_option_is_a_field_of_all_apis(url: str) -> None:
    options = dict.fromkeys(SamplingOptions.__annotations__, 1)
    body = {"messages": MESSAGES} if url == CHAT else {"prompt": "a"}
    (prompt,) = parse_request(url, {**body, **options}).prompts
    assert prompt.options == options


@pytest.mark.parametrize(
    ("url", "body", "argument"),
    [
        (CHAT, {"prompt": "a"}, "messages"),
        (CHAT, {"messages": MESSAGES, "prompt": "a"}, "prompt"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "suffix": "a"}, "suffix"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL, TOOL]}, "tools"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "x"}}, "response_format"),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": SCHEMA, "tools": [TOOL]},
            "response_format",
        ),
        (COMPLETIONS, {"messages": MESSAGES}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "tools": [TOOL]}, "tools"),
        (COMPLETIONS, {"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    ],
)
def test_errors_name_the_field_of_the_request(url: str, body: Any, argument: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_request(url, body)
    assert error.value.argument == argument


def test_a_batch_line_has_the_request_of_its_body() -> None:
    body = {"prompt": "a", "max_tokens": 3}
    line = parse_batch_line({"custom_id": "x", "url": COMPLETIONS, "body": body})
    assert line.custom_id == "x"
    assert line.request == parse_request(COMPLETIONS, body)


def test_the_number_of_a_request_is_read_from_its_response() -> None:
    line = build_batch_line(17, "x_3", {})
    assert is_batch_response(line)
    assert read_batch_number(line) == 17


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"stream": None, "stream_options": None}, None),
        ({"stream": False, "stream_options": {}}, None),
        ({"stream": True}, StreamOptions(include_usage=False)),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            StreamOptions(include_usage=True),
        ),
    ],
)
def test_options_of_streams_are_removed(fields: Any, expected: StreamOptions | None) -> None:
    body = {"prompt": "a", **fields}
    assert pop_stream_options(body) == expected
    assert body == {"prompt": "a"}


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_wrong_options_of_streams_are_errors(fields: Any, argument: str) -> None:
    with pytest.raises(RequestError) as error:
        pop_stream_options({"prompt": "a", **fields})
    assert error.value.argument == argument
