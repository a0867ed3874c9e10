"""Clients that people use with OpenAI's API, run against the server: LangChain, and lm-eval's
models of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from langchain_openai import ChatOpenAI
from langchain_openai import OpenAI as LangChainOpenAI
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from openai import OpenAI
from served import started
from transformers import AutoTokenizer

TEXTS = ["My fellow citizens", "War", "The people of", "On this day"]
NEW = 6


@pytest.fixture(scope="module")
def chat(address: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{address}/v1", api_key="none", model="demo", max_tokens=NEW, temperature=0
    )


def answer_chat(client: OpenAI, text: str) -> str:
    """Return the answer that OpenAI's client gets to a message."""
    messages: Any = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=NEW, temperature=0
    )
    return answer.choices[0].message.content or ""


def continue_text(client: OpenAI, prompt: Any, **options: Any) -> str:
    """Return the continuation that OpenAI's client gets."""
    settings = {"model": "demo", "max_tokens": NEW, "temperature": 0, **options}
    return str(client.completions.create(prompt=prompt, **settings).choices[0].text)


def test_langchains_chats_are_answered(chat: ChatOpenAI, client: OpenAI) -> None:
    expected = [answer_chat(client, text) for text in TEXTS]
    whole = chat.invoke(TEXTS[0])
    assert whole.content == expected[0]
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == NEW
    assert [answer.content for answer in chat.batch(list(TEXTS))] == expected
    assert "".join(str(piece.content) for piece in chat.stream(TEXTS[0])) == expected[0]
    assert asyncio.run(chat.ainvoke(TEXTS[1])).content == expected[1]


def test_langchains_chats_have_log_probabilities(chat: ChatOpenAI) -> None:
    found = chat.bind(logprobs=True, top_logprobs=2).invoke(TEXTS[0])
    assert len(found.response_metadata["logprobs"]["content"]) == NEW


@pytest.mark.slow
def test_langchains_completions_are_continued(address: str, client: OpenAI) -> None:
    settings: dict[str, Any] = {
        "base_url": f"{address}/v1",
        "api_key": "none",
        "model": "demo",
        "max_tokens": NEW,
    }
    greedy = LangChainOpenAI(temperature=0, batch_size=3, **settings)
    expected = [continue_text(client, text) for text in TEXTS]
    assert greedy.invoke(TEXTS[0]) == expected[0]
    assert [answers[0].text for answers in greedy.generate(TEXTS).generations] == expected
    assert "".join(greedy.stream(TEXTS[0])) == expected[0]
    drawn = LangChainOpenAI(temperature=1, seed=3, n=2, best_of=1, batch_size=3, **settings)
    result = drawn.generate(TEXTS)
    for text, answers in zip(TEXTS, result.generations, strict=True):
        choices = client.completions.create(
            model="demo", prompt=text, max_tokens=NEW, temperature=1, seed=3, n=2
        ).choices
        assert [answer.text for answer in answers] == [choice.text for choice in choices]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 2 * NEW * len(TEXTS)


@pytest.fixture(scope="module", params=["smollm", "llama2"])
def folder(request: pytest.FixtureRequest, real_shape: Any) -> Path:
    return Path(real_shape(request.param))


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> Iterator[str]:
    """The address of a server of a model that transformers loads too."""
    with started(folder, "--name", "tiny", "--context", "256", "--dtype", "fp32") as (_, found):
        yield found


def greedy_text(model: Any, tokenizer: Any, context: str) -> str:
    """Return the likeliest two tokens after a text as text."""
    ids = tokenizer(context, add_special_tokens=False)["input_ids"]
    output = model.generate(torch.tensor([ids]), max_new_tokens=2, do_sample=False, pad_token_id=0)[
        0
    ]
    after: str = tokenizer.decode(output).removeprefix(tokenizer.decode(ids))
    return after


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1},
        {"batch_size": 3},
        {"batch_size": 2, "num_concurrent": 2},
        {"batch_size": 3, "tokenized_requests": False},
    ],
    ids=["one by one", "lists", "lists at once", "texts"],
)
def test_lm_evals_scores_are_those_of_transformers(
    options: dict[str, Any], folder: Path, evaluated: str
) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(str(folder)), oracle.load(folder)
    is_tokenized = options.get("tokenized_requests", True)
    if (
        not is_tokenized
        and tokenizer("a")["input_ids"] != tokenizer("a", add_special_tokens=False)["input_ids"]
    ):
        pytest.skip("lm-eval does not count the BOS that the server puts before a text")
    lm = LocalCompletionsAPI(
        base_url=f"{evaluated}/v1/completions",
        model="tiny",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_length=256,
        **options,
    )
    pairs = [
        ("The people of", " the United"),
        ("My fellow", " citizens, friends"),
        ("War", " and"),
        ("A", " b c d"),
    ]
    if is_tokenized:  # else the likeliest tokens may be others once they are text
        pairs.append(("War and", greedy_text(model, tokenizer, "War and")))
    instances = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(pairs)
    ]
    for (context, continuation), (score, is_greedy) in zip(
        pairs, lm.loglikelihood(instances), strict=True
    ):
        before, after = lm._encode_pair(context, continuation)
        ids = [*before, *after]
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
        places = range(len(before) - 1, len(ids) - 1)
        assert score == pytest.approx(
            sum(float(logprobs[place, ids[place + 1]]) for place in places), abs=1e-2
        )
        assert is_greedy == all(int(logprobs[place].argmax()) == ids[place + 1] for place in places)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_generates_what_the_client_gets(
    batch_size: int, folder: Path, evaluated: str
) -> None:
    lm = LocalCompletionsAPI(
        base_url=f"{evaluated}/v1/completions",
        model="tiny",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_length=256,
        batch_size=batch_size,
    )
    settings = {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False}
    instances = [
        Instance(request_type="generate_until", doc={}, arguments=(text, settings), idx=index)
        for index, text in enumerate(TEXTS)
    ]
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    with OpenAI(base_url=f"{evaluated}/v1", api_key="none") as client:
        expected = [
            continue_text(
                client,
                tokenizer(text, add_special_tokens=False)["input_ids"],
                model="tiny",
                stop=["\n", tokenizer.eos_token],
            )
            for text in TEXTS
        ]
    assert lm.generate_until(instances) == expected


def test_lm_eval_chats_as_the_client_does(folder: Path, evaluated: str) -> None:
    lm = LocalChatCompletion(base_url=f"{evaluated}/v1/chat/completions", model="tiny")
    settings = {"until": ["\n\n"], "max_gen_toks": NEW, "do_sample": False}
    conversations: list[Any] = [[{"role": "user", "content": text}] for text in TEXTS]
    instances = [
        Instance(
            request_type="generate_until",
            doc={},
            arguments=(lm.apply_chat_template(messages), settings),
            idx=index,
        )
        for index, messages in enumerate(conversations)
    ]
    with OpenAI(base_url=f"{evaluated}/v1", api_key="none") as client:
        answers = [
            client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=NEW, temperature=0, stop=["\n\n"]
            )
            for messages in conversations
        ]
    assert lm.generate_until(instances) == [answer.choices[0].message.content for answer in answers]
