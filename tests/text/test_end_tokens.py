"""The tokens at which a model ends, and those that a prompt begins with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vocabularies import train, train_gemma, write_byte_level

from quantkit.text.chat import template_chat
from quantkit.text.end_tokens import find_answer_end, list_end_tokens, tokenizer_eos
from quantkit.text.export import tokenizer_metadata
from quantkit.text.gguf_tokenizer import build_folder_files
from quantkit.text.pipeline import patterns_by_name, pre_tokenizer
from quantkit.text.special_tokens import read_tokenizer_config
from quantkit.text.tokenizer import ids_around_text, load_tokenizer, prompt_start

TURNS_TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers") / "qwen2"
    return write_byte_level(folder, pre_tokenizer((patterns_by_name("qwen2") or ((), False))[0]))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizers") / "sentencepiece")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _with_html_tag(folder: Path, target: Path) -> int:
    """Copy a byte-level tokenizer, and make an ordinary token ``</s>`` in it; returns its id."""
    shutil.copytree(folder, target)
    raw = json.loads((target / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    for first, second in (("<", "/"), ("s", ">"), ("</", "s>")):
        vocab[first + second] = len(vocab)
        raw["model"]["merges"].append([first, second])
    for token in raw["added_tokens"]:  # they follow the vocabulary
        token["id"] += 3
    _write(target / "tokenizer.json", raw)
    return int(vocab["</s>"])


def test_all_files_that_name_an_end_token_count(byte_level: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
    eos = load_tokenizer(folder).eos_ids
    assert tokenizer_eos(folder) == eos[0]
    _write(folder / "config.json", {"eos_token_id": [7, 8]})
    _write(folder / "generation_config.json", {"eos_token_id": 8})
    assert list_end_tokens(folder) == [7, 8, *eos]


def test_an_end_token_that_only_the_tokenizer_names_is_one(
    byte_level: Path, sentencepiece: Path
) -> None:
    for folder in (byte_level, sentencepiece):
        assert list_end_tokens(folder) == list(load_tokenizer(folder).eos_ids)


def test_an_id_that_the_library_ignores_is_no_end_token(byte_level: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
    settings = read_tokenizer_config(folder).values
    (eos,) = load_tokenizer(folder).eos_ids
    stale = {str(eos - 1): {"content": settings["eos_token"], "special": True}}
    _write(folder / "tokenizer_config.json", {**settings, "added_tokens_decoder": stale})
    assert load_tokenizer(folder).eos_ids == (eos,)
    assert list_end_tokens(folder) == [eos]


def test_a_token_that_is_spelled_like_an_end_token_is_none(
    byte_level: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tag = _with_html_tag(byte_level, folder)
    tokenizer = load_tokenizer(folder)
    text = "x</s> </s>"
    assert tag not in tokenizer.eos_ids
    metadata, notes = tokenizer_metadata(folder, tokenizer.vocab_size)
    assert any("</s>" in note for note in notes)
    for key in (
        "quantkit.eos_token_ids",
        "quantkit.tokenizer_json",
    ):  # as other converters write the file
        metadata.pop(key, None)
    files = build_folder_files(metadata, folder)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == list(tokenizer.eos_ids)
    (tmp_path / "written").mkdir()
    for name, content in files.items():
        (tmp_path / "written" / name).write_bytes(content)
    written = load_tokenizer(tmp_path / "written")
    assert written.encode(text, specials=True) == tokenizer.encode(text, specials=True)


@pytest.mark.parametrize(
    ("template", "ends", "expected"),
    [
        (TURNS_TEMPLATE, [1], 6),
        (TURNS_TEMPLATE, [1, 6], None),  # the model ends there anyway
        (TURNS_TEMPLATE.replace("<end_of_turn>", "{{ eos_token }}"), [1], None),
        (TURNS_TEMPLATE.replace("<end_of_turn>", ""), [1], None),
        ("{{ raise_exception('no') }}<end_of_turn>", [1], None),
        ("<start_of_turn> always the same", [1], None),
    ],
)
def test_the_token_with_which_a_template_ends_an_answer(
    template: str, ends: list[int], expected: int | None
) -> None:
    specials = {"<eos>": 1, "<start_of_turn>": 5, "<end_of_turn>": 6, "<end>": 7}
    assert (
        find_answer_end(template, names={"eos_token": "<eos>"}, specials=specials, ends=ends)
        == expected
    )


def test_a_conversation_ends_where_the_template_ends_an_answer(tmp_path: Path) -> None:
    """Files of Gemma do not name the token, as llama.cpp takes it by its spelling."""
    folder = train_gemma(tmp_path / "gemma")
    metadata, _ = tokenizer_metadata(
        folder, load_tokenizer(folder).vocab_size, {"default": TURNS_TEMPLATE}
    )
    del metadata["quantkit.eos_token_ids"]
    end = metadata["tokenizer.ggml.tokens"].index("<end_of_turn>")
    metadata["tokenizer.ggml.token_type"][end] = 3  # a control token
    written = tmp_path / "written"
    written.mkdir()
    for name, content in build_folder_files(metadata, folder).items():
        (written / name).write_bytes(content)
    assert json.loads((written / "generation_config.json").read_text())["eos_token_id"] == [1, end]
    assert template_chat(written, load_tokenizer(written)).end_ids == (end,)


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        (None, [1], []),
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_what_a_sentencepiece_model_puts_around_text(
    settings: dict[str, Any] | None,
    before: list[int],
    after: list[int],
    sentencepiece: Path,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(sentencepiece, tmp_path / "model"))
    if settings is not None:
        _write(folder / "tokenizer_config.json", settings)
    tokenizer = load_tokenizer(folder)
    assert ids_around_text(tokenizer) == (before, after)
    assert prompt_start(tokenizer) == before
    metadata, _ = tokenizer_metadata(folder, tokenizer.vocab_size)
    stated = metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.add_eos_token"]
    assert stated == (bool(before), bool(after))


def test_an_added_token_that_the_config_names_is_the_end_token(
    sentencepiece: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sentencepiece, tmp_path / "model"))
    rows = load_tokenizer(folder).vocab_size
    _write(folder / "added_tokens.json", {"<|im_start|>": rows, "<|im_end|>": rows + 1})
    _write(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert tokenizer_eos(folder) == rows + 1
    assert load_tokenizer(folder).eos_ids == (rows + 1,)
    metadata, _ = tokenizer_metadata(folder, rows + 2)
    assert metadata["tokenizer.ggml.eos_token_id"] == rows + 1
    assert metadata["quantkit.eos_token_ids"] == [rows + 1]


def test_a_bos_that_is_never_added_is_not_what_a_prompt_begins_with(
    byte_level: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
    settings = read_tokenizer_config(folder).values
    _write(
        folder / "tokenizer_config.json",
        {**settings, "bos_token": "<|im_end|>", "add_bos_token": False},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id is not None
    assert prompt_start(tokenizer) == []


@pytest.mark.parametrize("role", ["pad_token", "eos_token"])
def test_an_added_token_with_a_role_stays_what_the_folder_says(
    role: str, byte_level: Path, tmp_path: Path
) -> None:
    """Gemma's ``<mask>`` is an added token that is not special."""
    folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
    settings = read_tokenizer_config(folder).values
    _write(folder / "tokenizer_config.json", {**settings, role: "<tool>"})
    metadata, _ = tokenizer_metadata(folder, load_tokenizer(folder).vocab_size)
    added = json.loads(build_folder_files(metadata, folder)["tokenizer.json"])["added_tokens"]
    assert {token["content"]: token["special"] for token in added}["<tool>"] is False


def test_two_end_tokens_fit_next_to_one_that_llama_cpp_knows(
    byte_level: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
    tokenizer = load_tokenizer(folder)
    _write(folder / "generation_config.json", {"eos_token_id": [7, 8, *tokenizer.eos_ids]})
    metadata, _ = tokenizer_metadata(folder, tokenizer.vocab_size)
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    written = [metadata[f"tokenizer.ggml.{name}"] for name in names]
    assert written == [tokenizer.eos_ids[0], 7, 8]


def test_a_key_that_was_changed_later_counts_more_than_quantkits_list(
    byte_level: Path, tmp_path: Path
) -> None:
    """Files are repaired with gguf_set_metadata.py, which does not know quantkit's key;
    llama.cpp reads its own.
    """
    tokenizer = load_tokenizer(byte_level)
    metadata, _ = tokenizer_metadata(byte_level, tokenizer.vocab_size)
    changed_eos, changed_turn_end = 7, 8
    metadata["tokenizer.ggml.eos_token_id"] = changed_eos
    metadata["tokenizer.ggml.eot_token_id"] = changed_turn_end
    written = tmp_path / "written"
    written.mkdir()
    for name, content in build_folder_files(metadata, byte_level).items():
        (written / name).write_bytes(content)
    assert list_end_tokens(written) == [changed_eos, changed_turn_end]
    assert load_tokenizer(written).eos_ids == (changed_eos,)


def test_an_end_token_that_only_the_config_lists_is_llama_cpps_eos(
    byte_level: Path, tmp_path: Path
) -> None:
    """Without the key llama.cpp has 11 for EOS, and ends at that token."""
    folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
    settings = read_tokenizer_config(folder).values
    _write(folder / "tokenizer_config.json", {**settings, "eos_token": None})
    _write(folder / "config.json", {"eos_token_id": [7, 8]})
    metadata, notes = tokenizer_metadata(folder, load_tokenizer(folder).vocab_size)
    assert metadata["tokenizer.ggml.eos_token_id"] == 7
    assert not [note for note in notes if "token 11" in note]
    written = tmp_path / "written"
    written.mkdir()
    for name, content in build_folder_files(metadata, folder).items():
        (written / name).write_bytes(content)
    assert load_tokenizer(written).eos_ids == ()
    assert list_end_tokens(written) == [7, 8]


def test_a_note_says_where_llama_cpp_ends_if_nothing_names_an_end_token(
    byte_level: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
    settings = read_tokenizer_config(folder).values
    _write(folder / "tokenizer_config.json", {**settings, "eos_token": None})
    tokenizer = load_tokenizer(folder)
    metadata, notes = tokenizer_metadata(folder, tokenizer.vocab_size)
    assert "tokenizer.ggml.eos_token_id" not in metadata
    spelled = metadata["tokenizer.ggml.tokens"][11]
    assert [note for note in notes if f"token 11, {spelled!r}" in note]
