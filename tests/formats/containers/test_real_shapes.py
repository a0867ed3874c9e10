"""Models with the widths and tokenizers of published ones, to GGUF and back: transformers judges
tokens and logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import oracle
import pytest
import torch
from real_shapes import HTML_END, PADDING, SHAPES, TEXTS
from transformers import AutoTokenizer

import quantkit
from quantkit.text.tokenizer import load_tokenizer

MESSAGES = [
    {"role": "user", "content": "Some  <b>words</b>, \u00e9"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": " and </s>?"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]


class RoundTrip:
    """A source folder, the GGUF file made of it, and the folder made of that."""

    def __init__(self, name: str, source: Path, work: Path) -> None:
        self.name = name
        self.source = source
        self.file = work / "model.gguf"
        self.back = work / "back"
        quantkit.convert(source, self.file, source_check=False)
        quantkit.convert(self.file, self.back, source_check=False)


@pytest.fixture(scope="module", params=SHAPES)
def round_trip(
    request: pytest.FixtureRequest,
    real_shape: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> RoundTrip:
    return RoundTrip(
        request.param, real_shape(request.param), tmp_path_factory.mktemp(request.param)
    )


def read_ends(folder: Path) -> set[int]:
    """Return the end tokens that transformers stops at."""
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return set(ends) if isinstance(ends, list) else {ends}


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_of_a_folder_are_those_of_transformers(
    name: str, real_shape: Callable[[str], Path]
) -> None:
    reference = AutoTokenizer.from_pretrained(str(real_shape(name)))
    tokenizer = load_tokenizer(real_shape(name))
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text, specials=True) == ids, text
        assert tokenizer.decode(ids, specials=True) == reference.decode(
            ids, clean_up_tokenization_spaces=False
        ), text


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_converted_to_a_folder_is_the_same(
    name: str, real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    source, copy = real_shape(name), tmp_path / "copy"
    quantkit.convert(source, copy, source_check=False)
    require_same_tokenizer(source, copy)
    require_same_logits(source, copy)
    assert read_ends(copy) == read_ends(source)


def test_tokens_come_back(round_trip: RoundTrip) -> None:
    require_same_tokenizer(round_trip.source, round_trip.back)


def test_tokens_of_the_file_are_those_of_the_folder(round_trip: RoundTrip) -> None:
    reference = AutoTokenizer.from_pretrained(str(round_trip.source))
    tokenizer = load_tokenizer(round_trip.file)
    for text in TEXTS:
        if HTML_END in text:
            continue  # llama.cpp takes any token that is spelled so for the end of a prompt
        assert tokenizer.encode(text, specials=True) == reference(text)["input_ids"], text


def test_end_tokens_come_back(round_trip: RoundTrip) -> None:
    assert read_ends(round_trip.back) == read_ends(round_trip.source)


def test_logits_come_back(round_trip: RoundTrip) -> None:
    require_same_logits(round_trip.source, round_trip.back)


def test_the_file_has_the_shapes_of_the_model(round_trip: RoundTrip) -> None:
    reader = gguf.GGUFReader(round_trip.file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    settings = SHAPES[round_trip.name].settings
    rows = len(AutoTokenizer.from_pretrained(str(round_trip.source))) + PADDING
    assert tensors["token_embd.weight"].shape.tolist() == [settings["hidden_size"], rows]
    assert tensors["blk.0.ffn_down.weight"].shape.tolist() == [
        settings["intermediate_size"],
        settings["hidden_size"],
    ]
    assert ("output.weight" in tensors) == (not settings["tie_word_embeddings"])
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == rows


def require_same_tokenizer(source: Path, copy: Path) -> None:
    """Require that transformers cuts strings, joins tokens and writes prompts the same way for
    two folders.
    """
    expected, actual = (AutoTokenizer.from_pretrained(str(folder)) for folder in (source, copy))
    for text in TEXTS:
        for specials in (False, True):
            ids = expected(text, add_special_tokens=specials)["input_ids"]
            assert actual(text, add_special_tokens=specials)["input_ids"] == ids, text
        assert decode(actual, ids) == decode(expected, ids), text
    for tools in (None, TOOLS):
        assert render(actual, tools) == render(expected, tools)
    assert actual.eos_token == expected.eos_token


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of tokens, control tokens included."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def render(tokenizer: Any, tools: Any) -> str:
    """Return the prompt of a conversation."""
    prompt: str = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return prompt


def require_same_logits(source: Path, copy: Path) -> None:
    """Require that transformers and quantkit compute the same logits for two folders."""
    tokens = torch.tensor([AutoTokenizer.from_pretrained(str(source))(TEXTS[3])["input_ids"]])
    expected = oracle.logits(oracle.load(source), tokens)
    torch.testing.assert_close(
        oracle.logits(oracle.load(copy), tokens), expected, rtol=1e-4, atol=1e-4
    )
    with torch.inference_mode():
        actual = oracle.ours(copy)(tokens, torch.arange(tokens.shape[1]))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
