"""Completions of several prompts in one request: each choice is that of a request with its
prompt alone.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

import quantkit
from quantkit.serve.client_errors import server_message

TEXTS = ["My fellow citizens", "War", "The people of"]
SETTINGS: dict[str, Any] = {"model": "demo", "max_tokens": 6, "temperature": 0}


def ask_alone(client: OpenAI, prompts: list[Any], **options: Any) -> list[Any]:
    """Return the answers to prompts that are sent one after the other."""
    return [client.completions.create(prompt=prompt, **SETTINGS | options) for prompt in prompts]


@pytest.fixture(scope="module")
def ids(model: Any) -> list[list[int]]:
    tokenizer = quantkit.load(model, backend="cpu-exact")[1]
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("count", [1, 3])
def test_each_prompt_has_its_choices_in_order(
    client: OpenAI, ids: list[list[int]], count: int
) -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 3, "logprobs": 1}
    for prompts in (TEXTS[:count], ids[:count]):
        alone = ask_alone(client, prompts, **options)
        together = client.completions.create(prompt=prompts, **SETTINGS | options)
        expected = [choice for answer in alone for choice in answer.choices]
        assert [choice.index for choice in together.choices] == list(range(2 * count))
        assert [choice.text for choice in together.choices] == [choice.text for choice in expected]
        assert [choice.logprobs for choice in together.choices] == [
            choice.logprobs for choice in expected
        ]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(together.usage, key) == sum(
                getattr(answer.usage, key) for answer in alone
            )


def test_prompts_of_both_kinds_may_be_in_one_list(client: OpenAI, ids: list[list[int]]) -> None:
    mixed: Any = [TEXTS[0], ids[1]]
    answer = client.completions.create(prompt=mixed, **SETTINGS)
    expected = [one.choices[0].text for one in ask_alone(client, mixed)]
    assert [choice.text for choice in answer.choices] == expected


@pytest.mark.parametrize(
    "options", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 2, "stop": "e"}]
)
def test_pieces_of_each_choice_are_the_whole(client: OpenAI, options: dict[str, Any]) -> None:
    whole = client.completions.create(prompt=TEXTS, n=2, **SETTINGS | options)
    stream = client.completions.create(
        prompt=TEXTS, n=2, stream=True, stream_options={"include_usage": True}, **SETTINGS | options
    )
    texts, reasons = dict.fromkeys(range(6), ""), {}
    tokens = {choice: list[Any]() for choice in texts}
    for piece in stream:
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                parts = (
                    choice.logprobs.tokens,
                    choice.logprobs.token_logprobs,
                    choice.logprobs.text_offset,
                )
                tokens[choice.index] += zip(*parts, strict=True)
        usage = piece.usage
    assert usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
        if choice.logprobs is not None:
            streamed = [entry[:2] for entry in tokens[choice.index]]
            values = zip(
                choice.logprobs.tokens or [], choice.logprobs.token_logprobs or [], strict=True
            )
            assert streamed == list(values)
            if "stop" not in options:
                assert [entry[2] for entry in tokens[choice.index]] == choice.logprobs.text_offset


def test_prompts_are_scored_with_echo(client: OpenAI, ids: list[list[int]], model: Any) -> None:
    """What lm-eval sends; the last entry is that of the one new token."""
    answer = client.completions.create(
        prompt=ids, echo=True, logprobs=1, **SETTINGS | {"max_tokens": 1}
    )
    decoder, tokenizer = quantkit.load(model, backend="cpu-exact")
    scored = quantkit.generate_batch(
        decoder, ids, tokenizer=tokenizer, max_new_tokens=0, echo=True, logprobs=1
    )
    for choice, expected in zip(answer.choices, scored, strict=True):
        assert choice.logprobs is not None
        assert expected.logprobs is not None
        assert (choice.logprobs.token_logprobs or [])[:-1] == expected.logprobs.tokens


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", ""], "prompt 1: is empty"),
        ([[1], []], "prompt 1: is empty"),
        ([[1], [2, 10**6]], "prompt 1: contains token ids outside the vocabulary"),
        (["a", "b", 5], "prompt 2: 'prompt' is of the wrong type"),
        (["a", ["b"]], "prompt 1: 'prompt' is of the wrong type"),
        ([True], "'prompt' is of the wrong type"),
        (["a", "x " * 600], "prompt 1: prompt and new tokens exceed the length of a"),
        (["a"] * 1025, "'prompt' has too many prompts (found 1025, expected at most 1024)"),
        ([], "the prompt is empty"),
    ],
)
def test_a_bad_prompt_is_named(client: OpenAI, prompt: Any, message: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(prompt=prompt, **SETTINGS)
    assert server_message(refused.value.response.content)[0].startswith(message)
    assert refused.value.param == "prompt"
    assert refused.value.code == ("context_length_exceeded" if "exceed" in message else None)


def test_what_concerns_all_prompts_is_said_of_none(client: OpenAI) -> None:
    for options in (
        {"temperature": -1},
        {"logit_bias": {"100000": 1}},
        {"n": 128, "prompt": ["a"] * 9},
    ):
        with pytest.raises(BadRequestError) as refused:
            client.completions.create(**{"prompt": TEXTS, **SETTINGS, **options})
        assert refused.value.param == next(iter(options))
        assert "prompt 0" not in str(refused.value)


def test_formats_bound_the_answers_of_all_prompts(client: OpenAI) -> None:
    formatted: dict[str, Any] = {
        **SETTINGS,
        "extra_body": {"response_format": {"type": "json_object"}},
    }
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(prompt=TEXTS, n=50, **formatted)
    assert "found 150, expected at most 128" in str(refused.value)
    answer = client.completions.create(prompt=TEXTS, **formatted)
    assert all(choice.text.lstrip().startswith("{") for choice in answer.choices)
