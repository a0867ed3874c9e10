"""Models with the tokenizers of published ones, served: prompts, counts and answers are those of transformers."""

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

NEW = 12
MESSAGES: list[Any] = [
    {"role": "user", "content": "Some  <b>words</b>, \u00e9 <unused3>\n\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": " and <table></s>?"},
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]


@dataclass
class Served:
    """A folder, its model and tokenizer in transformers, and a client of a server of it."""

    folder: Path
    client: OpenAI

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(self.folder))
        self.model = oracle.load(self.folder)
        # transformers replaces a whole run of byte tokens if it is not valid UTF-8, but random models write such runs.
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
        """Return the text that transformers generates after token ids, without tokens of single bytes."""
        output = self.model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, suppress_tokens=self.bytes
        )
        # A space at the beginning is only kept after other text.
        before: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        after: str = self.tokenizer.decode(output[0], skip_special_tokens=True)
        return after.removeprefix(before)


@pytest.fixture(scope="module", params=SHAPES)
def served(request: pytest.FixtureRequest, real_shape: Callable[[str], Path]) -> Iterator[Served]:
    folder = real_shape(request.param)
    options = ["--name", "tiny", "--context", "256", "--dtype", "fp32"]
    with started(folder, *options) as (_, address), OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        yield Served(folder, client)


def render(tokenizer: Any, tools: Any) -> list[int]:
    """Return the tokens of the conversation's prompt."""
    prompt = tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids


def test_a_chat_is_the_template_and_the_greedy_text(served: Served) -> None:
    ids = render(served.tokenizer, None)
    answer = served.client.chat.completions.create(messages=MESSAGES, **served.settings)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    content = answer.choices[0].message.content or ""
    # Llama 2's pieces begin with a space, which is no part of an answer.
    assert content.lstrip(" ") == served.continue_greedily(ids).lstrip(" ")
    parts = []
    for event in served.client.chat.completions.create(messages=MESSAGES, stream=True, **served.settings):
        parts.append(event.choices[0].delta.content or "")
    assert "".join(parts) == content


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
    answer = served.client.chat.completions.create(messages=MESSAGES, tools=TOOLS, **served.settings)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
