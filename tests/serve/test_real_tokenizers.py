"""Models with the tokenizers of published ones, served: prompts, counts and answers are those of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from openai import OpenAI
from real_shapes import SHAPES
from served import started
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

NEW = 12
MESSAGES: list[Any] = [
    {"role": "user", "content": "Some  <b>words</b>, \u00e9 <unused3>\n\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": " and <table></s>?"},
]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
]


@dataclass
class Served:
    """A folder, its model and tokenizer in transformers, and a client of a server of it."""

    folder: Path
    client: OpenAI

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(self.folder))
        self.model = oracle.load(self.folder)
        # transformers replaces a whole run of byte tokens if it is not valid UTF-8, but random
        # models write such runs.
        self.bytes = []
        for token in range(len(self.tokenizer)):
            is_byte = self.tokenizer.convert_ids_to_tokens(token).startswith("<0x")
            if is_byte or "\ufffd" in self.tokenizer.decode([token]):
                self.bytes.append(token)
        self.settings: dict[str, Any] = {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": NEW,
            "logit_bias": {str(token): -100 for token in self.bytes},
        }

    def continue_greedily(self, ids: list[int]) -> str:
        """Return the text that transformers generates after token ids, without tokens of single
        bytes.
        """
        output = self.model.generate(
            torch.tensor([ids]),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=self.bytes,
        )
        # A space at the beginning is only kept after other text.
        before: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        after: str = self.tokenizer.decode(output[0], skip_special_tokens=True)
        return after.removeprefix(before)


@pytest.fixture(scope="module", params=SHAPES)
def served(request: pytest.FixtureRequest, real_shape: Callable[[str], Path]) -> Iterator[Served]:
    folder = real_shape(request.param)
    options = ["--name", "tiny", "--context", "256", "--dtype", "fp32"]
    with (
        started(folder, *options) as (_, address),
        OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        yield Served(folder, client)


def render(tokenizer: Any, tools: Any) -> list[int]:
    """Return the tokens of the conversation's prompt."""
    prompt = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.slow
def test_a_chat_is_the_template_and_the_greedy_text(served: Served) -> None:
    ids = render(served.tokenizer, None)
    answer = served.client.chat.completions.create(messages=MESSAGES, **served.settings)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    content = answer.choices[0].message.content or ""
    # Llama 2's pieces begin with a space, which is no part of an answer.
    assert content.lstrip(" ") == served.continue_greedily(ids).lstrip(" ")
    parts = []
    for event in served.client.chat.completions.create(
        messages=MESSAGES, stream=True, **served.settings
    ):
        parts.append(event.choices[0].delta.content or "")
    assert "".join(parts) == content


@pytest.mark.slow
def test_a_completion_begins_as_the_tokenizer_begins(served: Served) -> None:
    prompt = "Once  upon a <p>time</p>,\n\n"
    ids = served.tokenizer(prompt)["input_ids"]
    answer = served.client.completions.create(prompt=prompt, **served.settings)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].text == served.continue_greedily(ids)


def test_tools_are_in_the_prompt_if_the_template_has_them(served: Served) -> None:
    if "tools" not in served.tokenizer.chat_template:
        pytest.skip("the template has no tools")
    ids = render(served.tokenizer, TOOLS)
    answer = served.client.chat.completions.create(
        messages=MESSAGES, tools=TOOLS, **served.settings
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


def score_next_tokens(served: Served, ids: list[int]) -> torch.Tensor:
    """Return transformers' log-probabilities of the token after some ids, [V]."""
    with torch.inference_mode():
        logits = served.model(torch.tensor([ids])).logits[0, -1].float()
    return torch.log_softmax(logits, dim=-1)


def partial_characters(served: Served) -> dict[int, bytes]:
    """Return tokens that are a byte of a longer character, with that byte."""
    found = {}
    letters = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}
    for token in served.bytes:
        spelling = served.tokenizer.convert_ids_to_tokens(token)
        byte = (
            bytes([int(spelling[3:5], 16)]) if spelling.startswith("<0x") else letters.get(spelling)
        )
        if byte is not None and byte[0] >= 0xC0:
            found[token] = byte
    return found


def test_log_probabilities_of_chats_have_the_bytes_of_tokens(served: Served) -> None:
    partial = partial_characters(served)
    expected = score_next_tokens(served, render(served.tokenizer, None))
    for token in list(partial)[:2]:
        settings = served.settings | {"max_tokens": 3, "logit_bias": {str(token): 100}}
        answer = served.client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=100, **settings
        )
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
        assert [bytes(entry.bytes or ()) for entry in entries] == [partial[token]] * 3
        assert entries[0].logprob == pytest.approx(float(expected[token]), abs=1e-3)
        likeliest = expected.topk(100).indices.tolist()
        bytes_of_top = [bytes(alternative.bytes or ()) for alternative in entries[0].top_logprobs]
        assert {partial[one] for one in likeliest if one in partial} <= set(bytes_of_top)


def test_tokens_of_the_same_text_do_not_hide_each_other(served: Served) -> None:
    tokens = list(partial_characters(served))[:2]
    settings = served.settings | {"max_tokens": 1}
    ids: list[int] = served.tokenizer("Once upon")["input_ids"]
    expected = score_next_tokens(served, ids)
    for token in tokens:
        settings["logit_bias"] = {str(token): 100}
        answer = served.client.completions.create(prompt="Once upon", logprobs=100, **settings)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.tokens == ["\ufffd"]
        assert logprobs.token_logprobs == pytest.approx([float(expected[token])], abs=1e-3)
        top = logprobs.top_logprobs[0]
        assert top["\ufffd"] == logprobs.token_logprobs[0]
        likeliest = expected.topk(100)
        values = dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        values[token] = float(expected[token])
        assert sorted(top.values()) == pytest.approx(sorted(values.values()), abs=1e-3)
        named = {key: value for key, value in top.items() if key.startswith("token_id:")}
        assert named == pytest.approx(
            {key: float(expected[int(key[9:])]) for key in named}, abs=1e-3
        )


def test_tokens_are_named_by_their_ids_on_request(served: Served) -> None:
    ids: list[int] = served.tokenizer("Once upon")["input_ids"]
    settings = served.settings | {
        "max_tokens": 1,
        "extra_body": {"return_tokens_as_token_ids": True},
    }
    text = (
        served.client.completions.create(prompt="Once upon", logprobs=2, echo=True, **settings)
        .choices[0]
        .logprobs
    )
    assert text is not None
    assert text.tokens is not None
    assert text.top_logprobs is not None
    assert text.tokens[:-1] == [f"token_id:{token}" for token in ids]
    best = {
        f"token_id:{token}"
        for token in score_next_tokens(served, ids[:-1]).topk(2).indices.tolist()
    }
    assert text.top_logprobs[len(ids) - 1].keys() == best | {f"token_id:{ids[-1]}"}
    chat = (
        served.client.chat.completions.create(messages=MESSAGES, logprobs=True, **settings)
        .choices[0]
        .logprobs
    )
    assert chat is not None
    expected = score_next_tokens(served, render(served.tokenizer, None))
    expected[served.bytes] = -torch.inf
    assert chat.content is not None
    assert [entry.token for entry in chat.content] == [f"token_id:{int(expected.argmax())}"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_a_text_has_a_log_probability(served: Served, stream: bool) -> None:
    """lm-eval drops the last entry of each prompt that it scores with one new token."""
    ids: list[int] = served.tokenizer("Once upon")["input_ids"]
    end = served.model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    settings = served.settings | {"max_tokens": 1, "logit_bias": {str(end): 100}}
    answer = served.client.completions.create(
        prompt="Once upon", logprobs=1, stream=stream, **settings
    )
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    assert choices[-1].finish_reason == "stop"
    values = [
        value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs
    ]
    assert values == pytest.approx([float(score_next_tokens(served, ids)[end])], abs=1e-3)
