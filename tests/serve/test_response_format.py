"""Answers in a requested format, with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import BadRequestError, InternalServerError, LengthFinishReasonError, OpenAI
from pydantic import BaseModel, Field
from random_schemas import judge

SCHEMA = {
    "type": "object",
    "required": ["kind", "age"],
    "additionalProperties": False,
    "properties": {
        "kind": {"enum": ["person", "place"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
}
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}
MESSAGES: list[Any] = [{"role": "user", "content": "Who?"}]
GIVEN: dict[str, Any] = {
    "model": "demo",
    "messages": MESSAGES,
    "max_tokens": 200,
    "seed": 3,
    "temperature": 0.9,
}


class Thing(BaseModel):
    kind: Literal["person", "place"]
    ages: list[int] = Field(max_length=2)


@pytest.mark.slow
def test_each_answer_satisfies_the_schema_whole_or_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(**GIVEN, n=4, response_format=FORMAT)
    texts = [one.message.content or "" for one in whole.choices]
    assert {one.finish_reason for one in whole.choices} == {"stop"}
    assert len(set(texts)) > 1
    for text in texts:
        judge(SCHEMA, text)
    pieces = ["", "", "", ""]
    for event in client.chat.completions.create(**GIVEN, n=4, response_format=FORMAT, stream=True):
        for choice in event.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts


def test_the_client_parses_its_own_classes(client: OpenAI) -> None:
    found = client.chat.completions.parse(**GIVEN, response_format=Thing)
    assert isinstance(found.choices[0].message.parsed, Thing)
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(**{**GIVEN, "max_tokens": 3}, response_format=Thing)


def test_other_options_go_with_it(client: OpenAI, loaded_tokens: dict[str, int]) -> None:
    greedy: dict[str, Any] = {
        **GIVEN,
        "temperature": 0,
        "response_format": FORMAT,
        "logprobs": True,
        "top_logprobs": 1,
    }
    found = client.chat.completions.create(**greedy).choices[0]
    assert found.message.content is not None
    assert found.logprobs is not None
    judge(SCHEMA, found.message.content)
    first = (found.logprobs.content or [])[0]
    assert (
        first.top_logprobs[0].logprob > first.logprob
    )  # those of the model, which knows of no format
    kind = json.loads(found.message.content)["kind"]
    cut = client.chat.completions.create(**greedy, stop=[kind]).choices[0]
    assert (cut.finish_reason, cut.message.content) == (
        "stop",
        found.message.content.partition(kind)[0],
    )
    biased = client.chat.completions.create(
        **greedy, logit_bias={str(loaded_tokens["}"]): -100}
    ).choices[0]
    judge(SCHEMA, biased.message.content or "")  # there is no other way to end it


@pytest.mark.slow
def test_texts_and_any_object(client: OpenAI) -> None:
    found = client.completions.create(
        model="demo",
        prompt="War",
        max_tokens=40,
        temperature=0,
        extra_body={
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"const": [1]}},
            }
        },
    )
    assert json.loads(found.choices[0].text) == [1]
    cut = client.chat.completions.create(
        **{**GIVEN, "max_tokens": 4}, response_format={"type": "json_object"}
    )
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.content or "").startswith("{")
    plain = (
        client.chat.completions.create(**GIVEN, response_format={"type": "text"})
        .choices[0]
        .message.content
    )
    assert plain == client.chat.completions.create(**GIVEN).choices[0].message.content


@pytest.mark.parametrize(
    ("schema", "more", "message"),
    [
        ({"type": "object", "not": {}}, {}, "keyword 'not', which is not supported"),
        ({"type": "string", "pattern": "(?=a)"}, {}, "look-around"),
        (
            {"type": "string"},
            {"n": 200},
            "n is out of range (found 200, expected at most 128 with a response_format)",
        ),
    ],
)
def test_what_is_not_supported_is_refused(
    schema: Any, more: Any, message: str, client: OpenAI
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(**GIVEN, **more, response_format=form)
    assert message in str(error.value)


def test_a_request_that_fails_leaves_the_others_alone(
    client: OpenAI, loaded_tokens: dict[str, int]
) -> None:
    """A pattern that has too many states for a text of a few letters."""
    states: Any = {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": states}}
    longer = {str(token): -100 for text, token in loaded_tokens.items() if text == '"'}
    long: dict[str, Any] = {
        "model": "demo",
        "prompt": "War",
        "max_tokens": 60,
        "logit_bias": {"2": -100},
    }
    other = client.completions.create(**long, stream=True)
    with pytest.raises(InternalServerError) as error:
        client.chat.completions.create(**GIVEN, n=2, response_format=form, logit_bias=longer)
    assert "no token can follow in the requested format" in str(error.value)
    assert [one.choices[0].finish_reason for one in other][-1] == "length"
    assert (
        client.completions.create(model="demo", prompt="War", max_tokens=2).choices[0].finish_reason
        == "length"
    )
