"""Tokens that the files next to a tokenizer.json add to it, as transformers adds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from vocabularies import write_byte_level

from quantkit.text.export import tokenizer_metadata
from quantkit.text.gguf_tokenizer import build_folder_files
from quantkit.text.pipeline import patterns_by_name, pre_tokenizer
from quantkit.text.tokenizer import load_tokenizer

TEXTS = [
    "a<extra>b",
    "the <extra>  ing",
    "<extra> <extra>\n",
    "<extra><|im_end|> the",
    "<tool> 12",
    " <|im_end|> the",
]
PLAIN = {
    "content": "<extra>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers") / "llama-bpe"
    return write_byte_level(
        folder, pre_tokenizer((patterns_by_name("llama-bpe") or ((), False))[0])
    )


def _with_files(
    byte_level: Path, target: Path, settings: dict[str, Any], older: dict[str, int] | None = None
) -> Path:
    """Copy a tokenizer, and add to the files next to its tokenizer.json."""
    folder = Path(shutil.copytree(byte_level, target))
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **json.loads(path.read_text()),
                **settings,
            }
        )
    )
    if older is not None:
        (folder / "added_tokens.json").write_text(json.dumps(older))
    return folder


def _encode_by_transformers(folder: Path) -> list[list[int]]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize(
    ("settings", "older"),
    [
        ({"added_tokens_decoder": {"900": {**PLAIN, "special": True}}}, None),
        (
            {
                "added_tokens_decoder": {
                    "900": {**PLAIN, "special": False, "lstrip": True, "rstrip": True}
                }
            },
            None,
        ),
        ({"added_tokens_decoder": {"900": {**PLAIN, "special": False, "single_word": True}}}, None),
        (
            {
                "added_tokens_decoder": {
                    "264": {**PLAIN, "content": "<|im_end|>", "rstrip": True, "special": True}
                }
            },
            None,
        ),
        ({"added_tokens_decoder": {"900": {**PLAIN, "special": True}}}, {"<tool>x": 901}),
        ({}, {"<extra>": 900}),
        ({"pad_token": "<extra>"}, {"<extra>": 900}),
    ],
)
def test_tokens_that_other_files_state(
    settings: dict[str, Any], older: dict[str, int] | None, byte_level: Path, tmp_path: Path
) -> None:
    folder = _with_files(byte_level, tmp_path / "model", settings, older)
    tokenizer = load_tokenizer(folder)
    expected = _encode_by_transformers(folder)
    assert [tokenizer.encode(text, specials=True) for text in TEXTS] == expected
    plain = load_tokenizer(byte_level)
    assert [plain.encode(text, specials=True) for text in TEXTS] != expected

    metadata, _ = tokenizer_metadata(folder, tokenizer.vocab_size)
    written = tmp_path / "written"
    written.mkdir()
    for name, content in build_folder_files(metadata, folder).items():
        (written / name).write_bytes(content)
    assert _encode_by_transformers(written) == expected


def test_a_token_without_a_row_in_the_embedding_is_left_out(
    byte_level: Path, tmp_path: Path
) -> None:
    """The first folders of Llama 2 list such a <pad>; their models are sound."""
    rows = load_tokenizer(byte_level).vocab_size
    folder = _with_files(byte_level, tmp_path / "model", {}, {"<extra>": rows})
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))
    assert load_tokenizer(folder).vocab_size == rows
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows + 1}))
    assert load_tokenizer(folder).vocab_size == rows + 1


def test_a_note_names_tokens_that_are_whole_words(byte_level: Path, tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": {"900": {**PLAIN, "special": False, "single_word": True}}}
    folder = _with_files(byte_level, tmp_path / "model", settings)
    _, notes = tokenizer_metadata(folder, load_tokenizer(folder).vocab_size)
    assert [note for note in notes if "inside words" in note]
    assert not [note for note in notes if "whitespace" in note]
