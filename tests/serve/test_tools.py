"""Tools and reasoning in the server, with OpenAI's own client: a random model calls tools where
it must.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field
from random_schemas import judge
from served import started
from tool_models import TEMPLATES, write_tool_model

from quantkit.errors import RequestError
from quantkit.openai.chat import parse_chat
from quantkit.prompts.builder import PromptBuilder
from quantkit.text.tokenizer import load_tokenizer

DAY = {"type": "string", "enum": ["today", "tomorrow"]}
PARAMETERS = {
    "type": "object",
    "properties": {"day": DAY},
    "required": ["day"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "?", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "get_time"}},
]
SCHEMAS = {"get_weather": PARAMETERS, "get_time": {"type": "object", "maxProperties": 0}}
MESSAGES: list[Any] = [{"role": "user", "content": "Will it rain?"}]
GIVEN: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "max_tokens": 300,
    "seed": 2,
    "temperature": 1,
}
FAMILIES = ("hermes", "llama3", "mistral", "mistral_args")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(tmp_path_factory.mktemp("tools") / "tiny")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("templates")
    found = {name: parent / f"{name}.jinja" for name in TEMPLATES}
    for name, path in found.items():
        path.write_text(TEMPLATES[name])
    return found


@pytest.fixture(scope="module")
def clients(folder: Path, templates: dict[str, Path]) -> Iterator[dict[str, OpenAI]]:
    """A client of a server for each template, started when it is first needed."""
    with ExitStack() as stack:

        class Clients(dict[str, OpenAI]):
            def __missing__(self, name: str) -> OpenAI:
                _, address = stack.enter_context(
                    started(folder, "--template", templates[name], "--name", "tiny")
                )
                client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
                self[name] = stack.enter_context(client)
                return client

        yield Clients()


def streamed(client: OpenAI, **given: Any) -> tuple[str, str, dict[int, dict[str, str]], Any, Any]:
    """Content, reasoning, calls by their places, the reason of the end and the usage, of the
    first answer's pieces.
    """
    content, reasoning, calls, reason, usage = "", "", dict[int, dict[str, str]](), None, None
    for event in client.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                one = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                one["id"] += call.id or ""
                one["name"] += call.function.name or ""
                one["arguments"] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, reasoning, calls, reason, usage


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_are_required_are_made_whole_or_in_pieces(
    family: str, clients: dict[str, OpenAI]
) -> None:
    client = clients[family]
    for choice, names in (
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ):
        given: dict[str, Any] = {
            **GIVEN,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
        }
        found = client.chat.completions.create(**given).choices[0]
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)
        (call,) = found.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in names
        judge(SCHEMAS[call.function.name], call.function.arguments)
        assert re.fullmatch("[0-9a-f]{9}" if "mistral" in family else "call_[0-9a-f]{24}", call.id)
        content, _, calls, reason, _ = streamed(client, **given)
        assert (content, reason) == ("", "tool_calls")
        assert [(one["name"], one["arguments"]) for one in calls.values()] == [
            (call.function.name, call.function.arguments)
        ]


class Weather(BaseModel):
    day: Literal["today", "tomorrow"]
    hours: list[int] = Field(max_length=1)


@pytest.mark.slow
def test_the_client_parses_its_own_functions(clients: dict[str, OpenAI]) -> None:
    given: dict[str, Any] = {
        **GIVEN,
        "tools": [pydantic_function_tool(Weather)],
        "tool_choice": "required",
    }
    found = (
        clients["hermes"]
        .chat.completions.parse(**given, parallel_tool_calls=False)
        .choices[0]
        .message
    )
    (call,) = found.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with clients["hermes"].chat.completions.stream(**given, parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        (same,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert "tool_calls.function.arguments.done" in kinds
    assert same.function.parsed_arguments == call.function.parsed_arguments


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral_args"])
def test_several_calls_have_their_places_and_identifiers(
    family: str, clients: dict[str, OpenAI]
) -> None:
    given: dict[str, Any] = {**GIVEN, "tools": TOOLS[1:], "tool_choice": "required", "n": 8}
    answers = clients[family].chat.completions.create(**given).choices
    calls = [one.message.tool_calls or [] for one in answers]
    assert max(map(len, calls)) > 1
    identifiers = [call.id for one in calls for call in one]
    assert len(set(identifiers)) == len(identifiers)


def test_a_call_that_is_cut_off_stays_content(clients: dict[str, OpenAI]) -> None:
    given: dict[str, Any] = {**GIVEN, "tools": TOOLS, "tool_choice": "required", "max_tokens": 12}
    found = clients["hermes"].chat.completions.create(**given).choices[0]
    assert (found.finish_reason, found.message.tool_calls) == ("length", None)
    content = found.message.content or ""
    assert content
    assert '<tool_call>\n{"name": "get_'.startswith(content[:28])
    assert streamed(clients["hermes"], **given)[0] == found.message.content


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_need_the_answer_is_that_without_restriction(
    family: str, clients: dict[str, OpenAI]
) -> None:
    """And with strict functions, what begins a call goes on as one."""
    client = clients[family]
    shorter: dict[str, Any] = {**GIVEN, "max_tokens": 40}
    plain = client.chat.completions.create(**shorter, tools=TOOLS).choices[0]
    assert plain.message.tool_calls is None
    none = client.chat.completions.create(**shorter, tools=TOOLS, tool_choice="none").choices[0]
    assert (
        none.message.content == client.chat.completions.create(**shorter).choices[0].message.content
    )
    function = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
    begins = {"hermes": "<tool_call>", "llama3": "<|python_tag|>"}.get(family, "[TOOL_CALLS]")
    bias = {str(_token(client, begins)): 100}
    strict: dict[str, Any] = {
        **GIVEN,
        "tools": [{"type": "function", "function": function}],
        "logit_bias": bias,
    }
    found = client.chat.completions.create(**strict, parallel_tool_calls=False).choices[0].message
    (call,) = found.tool_calls or []
    assert call.type == "function"
    judge(PARAMETERS, call.function.arguments)


def test_calls_and_results_are_printed_by_the_template(
    folder: Path, templates: dict[str, Path]
) -> None:
    """As transformers does, to which arguments are objects."""
    from transformers import AutoTokenizer

    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"day": "today"}'},
    }
    talk: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Yes."},
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for family in FAMILIES:
        request = parse_chat({"messages": talk, "tools": TOOLS})
        prompt = request.build_prompts(_builder(folder, templates[family]))[0]
        as_objects = [{**one} for one in talk]
        as_objects[1]["tool_calls"] = [
            {**call, "function": {"name": "get_weather", "arguments": {"day": "today"}}}
        ]
        expected = tokenizer.apply_chat_template(
            as_objects, tools=TOOLS, chat_template=TEMPLATES[family], add_generation_prompt=True
        )["input_ids"]
        assert prompt.request.prompt == list(expected)


@pytest.mark.parametrize(
    ("template", "body", "message"),
    [
        ("plain", {"tools": TOOLS}, "the model's chat template does not print tools"),
        ("unknown", {"tools": TOOLS}, "the tool call format of this model is unknown"),
        ("hermes", {"tools": {}}, "'tools' is of the wrong type"),
        ("hermes", {"tools": [{"type": "custom"}]}, "a tool is of the wrong type"),
        (
            "hermes",
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "an invalid name",
        ),
        (
            "hermes",
            {"tools": [TOOLS[0], TOOLS[0]]},
            "two tools have the same name (found 'get_weather')",
        ),
        ("hermes", {"tools": TOOLS, "tool_choice": "maybe"}, "'tool_choice' is not known"),
        ("hermes", {"tool_choice": "required"}, "'tool_choice' requires 'tools'"),
        ("hermes", {"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (
            "hermes",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get"}}},
            "'tool_choice' names a function that is not among the tools",
        ),
        (
            "hermes",
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "cannot be combined",
        ),
        (
            "hermes",
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"not": {}}, "strict": True},
                    }
                ]
            },
            "keyword 'not', which is not supported",
        ),
        (
            "hermes",
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "the parameters of 'f' are of the wrong type (found 'array', expected object)",
        ),
        (
            "hermes",
            {
                "messages": [
                    *MESSAGES,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "f", "arguments": "{"},
                            }
                        ],
                    },
                ]
            },
            "the arguments of a call of 'f': is not a JSON object",
        ),
        (
            "hermes",
            {"messages": [{"role": "assistant", "tool_calls": [1]}]},
            "a tool call of the wrong type",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    template: str, body: Any, message: str, folder: Path, templates: dict[str, Path]
) -> None:
    builder = _builder(folder, templates[template])
    with pytest.raises(RequestError) as error:
        parse_chat({"messages": MESSAGES, **body}).build_prompts(builder)
    assert message in str(error.value)


@pytest.mark.slow
def test_reasoning_is_separate_whole_or_in_pieces(clients: dict[str, OpenAI]) -> None:
    """It begins in the prompt; a bias ends it soon."""
    client = clients["opened"]
    bias = {str(_token(client, "</think>")): 6}
    given: dict[str, Any] = {**GIVEN, "max_tokens": 60, "logit_bias": bias}
    whole = client.chat.completions.create(**given)
    message = whole.choices[0].message
    reasoning = message.reasoning_content  # type: ignore[attr-defined]
    assert reasoning
    assert "</think>" not in reasoning
    details = whole.usage.completion_tokens_details  # type: ignore[union-attr]
    assert details is not None
    assert 1 < (details.reasoning_tokens or 0) < 60
    content, streamed_reasoning, _, _, usage = streamed(client, **given)
    assert (content, streamed_reasoning) == (message.content, reasoning)
    assert usage.completion_tokens_details.reasoning_tokens == details.reasoning_tokens


@pytest.mark.slow
@pytest.mark.parametrize("template", ["opened", "plain", "closed"])
def test_a_format_begins_after_the_reasoning(template: str, clients: dict[str, OpenAI]) -> None:
    client = clients[template]
    form: Any = {"type": "json_schema", "json_schema": {"name": "day", "schema": PARAMETERS}}
    bias = {str(_token(client, "</think>")): 6, str(_token(client, "<think>")): 100}
    found = client.chat.completions.create(**GIVEN, response_format=form, logit_bias=bias)
    assert found.choices[0].finish_reason == "stop"
    judge(PARAMETERS, found.choices[0].message.content or "")
    details = found.usage.completion_tokens_details  # type: ignore[union-attr]
    assert (0 if details is None else details.reasoning_tokens or 0) >= {
        "opened": 1,
        "plain": 2,
        "closed": 0,
    }[template]


def test_a_prompt_that_closes_the_reasoning_has_none(clients: dict[str, OpenAI]) -> None:
    whole = clients["closed"].chat.completions.create(**{**GIVEN, "max_tokens": 20})
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is None


def test_errors_reach_the_client(clients: dict[str, OpenAI]) -> None:
    with pytest.raises(BadRequestError, match="the model's chat template does not print tools"):
        clients["plain"].chat.completions.create(**GIVEN, tools=TOOLS)


def _builder(folder: Path, template: Path) -> PromptBuilder:
    from quantkit.formats.detect import open_checkpoint
    from quantkit.grammar.grammars import Grammars

    config, tokenizer = open_checkpoint(folder).config, load_tokenizer(folder)
    grammars = Grammars(tokenizer, config.vocab_size, config.eos_token_ids)
    return PromptBuilder(
        folder, config, tokenizer, {}, max_tokens=2048, template=str(template), grammars=grammars
    )


def _token(client: OpenAI, text: str) -> int:
    """The id of a token of the tiny model."""
    from tool_models import TOKENS

    base = 256 + 7 + 3
    return base + list(TOKENS).index(text)
