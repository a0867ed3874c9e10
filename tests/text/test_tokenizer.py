"""Tokenizers: told apart, exported alike, decoded while they stream."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_parts import raises
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from vocabularies import TURNS, train, train_gemma, write_gemma_json, write_tiktoken

import quantkit
from quantkit.data.files import excerpt
from quantkit.errors import CheckpointError
from quantkit.runtime.generate import text_pieces
from quantkit.text.export import export_json
from quantkit.text.tokenizer import (
    JsonTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
)

KINDS = ["sentencepiece", "sentencepiece-json", "tiktoken", "tiktoken-json", "gemma", "gemma-json"]
PLAIN = [
    "",
    " ",
    "Hello",
    " Hello",
    "two  spaces,   three",
    "  lead\ttab\n\n\nlines \r\n",
    "The cat's whiskers aren't 12345.67!",
    "Größe naïve café",
    "e\u0301 \u00e9 \ufb01 \u2167 \u00a0 \u200b",
    "\x00\x01\x7f",
    "a\u2581b",
    "🚀" * 12,
    "é" * 30,
    "x" * 200,
]
BYTES_AFTER_BYTES = ["Москва, 日本語のテキスト, عربى, हिन्दी", "👩‍🚀🚀👨‍👩‍👧‍👦🇩🇪", "日本語" * 9]
TEXTS = PLAIN + BYTES_AFTER_BYTES
SPECIALS = ("<s>", "</s>", "<unk>", "<0x", "<|")
quick = settings(deadline=None, max_examples=80, derandomize=True)


def _export(folder: Path, target: Path) -> dict[str, bytes] | None:
    target.mkdir()
    return export_json(folder / "tokenizer.model", target)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind; the ``-json`` ones hold only what was exported."""
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {
        "sentencepiece": train(root / "sentencepiece"),
        "tiktoken": write_tiktoken(root / "tiktoken"),
    }
    for kind in list(folders):
        target = root / f"{kind}-json"
        assert _export(folders[kind], target) is not None
        folders[f"{kind}-json"] = target
    folders["gemma"] = train_gemma(root / "gemma")
    folders["gemma-json"] = write_gemma_json(folders["gemma"], root / "gemma-json")
    return folders


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


@pytest.mark.parametrize(
    ("kind", "expected", "byte_level"),
    [
        ("sentencepiece", SentencePieceTokenizer, False),
        ("sentencepiece-json", JsonTokenizer, False),
        ("tiktoken", TiktokenTokenizer, True),
        ("tiktoken-json", JsonTokenizer, True),
        ("gemma", SentencePieceTokenizer, False),
        ("gemma-json", JsonTokenizer, False),
    ],
)
def test_kinds_are_distinguished_by_content(
    kind: str, expected: type, byte_level: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    assert type(tokenizers[kind]) is expected
    assert tokenizers[kind].byte_level is byte_level


def test_tokenizer_json_wins_over_tokenizer_model(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["tiktoken-json"], tmp_path / "both")
    shutil.copy(folders["sentencepiece"] / "tokenizer.model", tmp_path / "both")
    assert load_tokenizer(tmp_path / "both").kind == "tokenizer.json"


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_an_exported_tokenizer_has_the_same_vocabulary_and_ends(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    original, exported = tokenizers[kind], tokenizers[f"{kind}-json"]
    assert exported.vocab_size == original.vocab_size
    assert exported.bos_id == original.bos_id
    assert exported.eos_ids[0] == original.eos_ids[0]


def test_sentencepiece_ids_are_those_of_the_model(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (400, 1, (2,))
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("🚀")[-4:] == [3 + byte for byte in "🚀".encode()]


def test_gemmas_tokenizers_put_no_space_before_a_text(tokenizers: dict[str, Tokenizer]) -> None:
    original, exported = tokenizers["gemma"], tokenizers["gemma-json"]
    assert original.bos_id == exported.bos_id == 2
    assert original.eos_ids == exported.eos_ids == (1,)
    for text in TEXTS:
        ids = original.encode(text)
        assert ids == exported.encode(text), text
        assert ids[0] == 2, text
        assert original.encode(text, bos=False) == ids[1:], text
        assert exported.encode(text, bos=False) == ids[1:], text
        if text[:1].isalpha():
            assert original.encode(f" {text}")[:2] != ids[:2], text
        expected = text.replace("\u2581", " ")
        assert original.decode(ids) == exported.decode(ids) == expected, text


def test_gemmas_marks_of_turns_are_tokens_where_they_are_meant(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer, (start, end) = tokenizers["gemma-json"], TURNS
    assert tokenizer.special_tokens is not None
    ids = tokenizer.encode(f"{start}user\nHi{end}\n", specials=True, bos=False)
    assert (ids[0], ids[-2]) == (tokenizer.special_tokens[start], tokenizer.special_tokens[end])
    assert not set(ids) & set(tokenizer.encode(start + end, bos=False))
    assert tokenizer.decode(ids) == "user\nHi\n"
    assert tokenizer.decode(ids, specials=True) == f"{start}user\nHi{end}\n"


def test_llama3s_special_tokens_follow_the_ranks(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, first = tokenizers["tiktoken"], 268
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.bos_id == first
    assert tokenizer.eos_ids == (first + 1, first + 8, first + 9)
    names = {
        "<|begin_of_text|>": 0,
        "<|end_of_text|>": 1,
        "<|finetune_right_pad_id|>": 4,
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "<|eom_id|>": 8,
        "<|eot_id|>": 9,
        "<|python_tag|>": 10,
        "<|reserved_special_token_2|>": 5,
        "<|reserved_special_token_3|>": 11,
        "<|reserved_special_token_247|>": 255,
    }
    for kind in ("tiktoken", "tiktoken-json"):
        for name, offset in names.items():
            assert tokenizers[kind].encode(name, specials=True) == [first, first + offset]
            assert tokenizers[kind].decode([104, first + offset, 105]) == "hi"


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_undoes_encoding(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    for text in TEXTS:
        expected = text
        if not kind.startswith("tiktoken"):
            expected = text.replace("\u2581", " ")
        assert tokenizer.decode(tokenizer.encode(text)) == expected, text


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_an_exported_tokenizer_encodes_the_same_way(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    for text in TEXTS:
        assert tokenizers[f"{kind}-json"].encode(text) == tokenizers[kind].encode(text), text


_words = st.sampled_from(
    ["the", " the", "  ", " ", "\n", "ing", "and", "日本", "🚀", "é", "'s", "12", "\u2581", "aa"]
)
_texts = st.lists(_words | st.text(max_size=6), max_size=15).map("".join)


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_an_exported_tokenizer_agrees_on_any_text(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    original, exported = tokenizers[kind], tokenizers[f"{kind}-json"]

    @quick
    @given(_texts.filter(lambda text: not any(special in text for special in SPECIALS)))
    def agree(text: str) -> None:
        ids = original.encode(text)
        assert exported.encode(text) == ids
        assert exported.decode(ids) == original.decode(ids)

    agree()


def test_repetitive_pieces_merge_in_the_same_order(tmp_path: Path) -> None:
    runs = "\n".join(f"{'a' * n} {'ab' * n}{'ba' * n}{' ' * n}x" for n in range(1, 30))
    folder = train(tmp_path / "model", runs, vocab_size=290, character_coverage=1.0)
    assert _export(folder, tmp_path / "json") is not None
    original, exported = load_tokenizer(folder), load_tokenizer(tmp_path / "json")

    @quick
    @given(st.text("ab x", max_size=40))
    def agree(text: str) -> None:
        assert exported.encode(text) == original.encode(text)

    agree()


@pytest.mark.parametrize(
    "changes",
    [
        {"add_dummy_prefix": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"model_type": "unigram"},
        {"user_defined_symbols": ["[X]"]},
        {"treat_whitespace_as_suffix": True},
        {"user_defined_symbols": ["<sep>"]},
    ],
    ids=str,
)
def test_a_model_that_would_tokenize_otherwise_is_not_exported(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    assert _export(train(tmp_path / "model", **changes), tmp_path / "json") is None


@pytest.mark.parametrize(
    "changes", [{"bos_id": -1}, {"eos_id": -1}, {"byte_fallback": False}], ids=str
)
def test_models_without_some_special_pieces_are_exported_the_same_way(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = train(tmp_path / "model", **changes, character_coverage=1.0)
    assert _export(folder, tmp_path / "json") is not None
    original, exported = load_tokenizer(folder), load_tokenizer(tmp_path / "json")
    assert (exported.bos_id, exported.eos_ids) == (original.bos_id, original.eos_ids)
    for text in TEXTS:
        assert exported.encode(text) == original.encode(text)


@pytest.fixture(scope="module")
def converted(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "model"
    quantkit.convert(demo_model, target)
    return target


def test_transformers_reads_the_tokenizer_of_a_converted_folder(
    demo_model: Path, converted: Path
) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(converted)
    ours = load_tokenizer(demo_model)
    assert theirs.bos_token_id == ours.bos_id
    assert theirs.eos_token_id == ours.eos_ids[0]
    for text in [*TEXTS, *excerpt()[:4000].split("\n\n")]:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert ids[0] == ours.bos_id
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_a_converted_folder_keeps_the_original_next_to_the_export(
    demo_model: Path, converted: Path
) -> None:
    assert (converted / "tokenizer.model").read_bytes() == (
        demo_model / "tokenizer.model"
    ).read_bytes()
    assert load_tokenizer(converted).kind == "tokenizer.json"
    text = excerpt()
    assert load_tokenizer(converted).encode(text) == load_tokenizer(demo_model).encode(text)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-3],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "sentencepiece-json"])
def test_damaged_files_are_refused_by_name(
    kind: str, damage: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    name = "tokenizer.json" if kind.endswith("json") else "tokenizer.model"
    (tmp_path / name).write_bytes(DAMAGE[damage]((folders[kind] / name).read_bytes()))
    with raises(CheckpointError, path=tmp_path / name):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (b"IQ== 0\nIg== 5\n", "ranks"),
        (b"IQ== 0\nIg== 0\n", "ranks"),
        (b"IQ== 0\nIQ== 1\n", "ranks"),
        (b"IQ== 0\nIg== x\n", "line 2"),
        (b"IQ== 0\n!! 1\n", "line 2"),
        (b"IQ== 0\nIg==\n", "line 2"),
        (b"IQ== 0\nIg== 1\n", "0x00"),
    ],
)
def test_tiktoken_files_that_are_no_vocabulary_are_refused(
    lines: bytes, name: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(lines)
    with raises(CheckpointError, name, path=tmp_path / "tokenizer.model"):
        load_tokenizer(tmp_path)


def test_a_dropout_is_not_applied_and_warned_of_once(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(folders["sentencepiece-json"], tmp_path / "t"))
    plain = load_tokenizer(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    text = excerpt()[:500]
    engine = Engine.from_file(str(folder / "tokenizer.json"))
    assert len({len(engine.encode(text).ids) for _ in range(8)}) > 1
    for _ in range(2):
        tokenizer = load_tokenizer(folder)
        assert all(tokenizer.encode(text) == plain.encode(text) for _ in range(8))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(folder / "tokenizer.json") in record.getMessage()


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    expected = "tokenizer.json or tokenizer.model"
    with raises(CheckpointError, path=tmp_path, expected=expected):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_bos_that_the_settings_ask_for_is_added_once(
    add_bos: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    raw = json.loads((folders["sentencepiece-json"] / "tokenizer.json").read_text())
    raw["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    settings_ = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": add_bos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    tokenizer = load_tokenizer(tmp_path)
    with_template = load_tokenizer(folders["sentencepiece-json"]).encode("the end")
    assert tokenizer.encode("the end") == (with_template if add_bos else with_template[1:])
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


def _stream(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    return list(text_pieces(tokenizer, prompt, iter(tokens)))


def _require_streamed(tokenizer: Tokenizer, text: str) -> None:
    start = tokenizer.encode("Once upon a time")
    tokens = tokenizer.encode("Once upon a time" + text)[len(start) :]
    for prompt in (start, start[:1]):
        whole = tokenizer.decode(prompt + tokens)
        pieces = _stream(tokenizer, prompt, tokens)
        assert tokenizer.decode(prompt) + "".join(pieces) == whole, text


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_pieces_join_to_the_whole_text(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    for text in PLAIN:
        _require_streamed(tokenizers[kind], text)


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_of_byte_tokens_stream_whole(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    for text in BYTES_AFTER_BYTES:
        _require_streamed(tokenizers[kind], text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_byte_tokens_leaves_the_stream_whole(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("日本語" * 9)
    tokens = tokenizer.encode("日本語" * 9 + "🚀 and 語")[len(prompt) :]
    assert "".join(_stream(tokenizer, prompt, tokens)) == "🚀 and 語"


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_character_comes_whole_with_its_last_token(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("The sign")
    tokens = tokenizer.encode("The sign🚀é日!")[len(prompt) :]
    assert len(tokens) > 6
    pieces = [piece for piece in _stream(tokenizer, prompt, tokens) if piece]
    assert pieces == ["🚀", "é", "日", "!"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_streamed_as_it_grows_not_at_the_end(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt, *_ = tokenizer.encode("x")
    tokens = tokenizer.encode("The end of the story")[1:]
    drawn: list[int] = []

    def source() -> Any:
        for token in tokens:
            drawn.append(token)
            yield token

    for count, _ in enumerate(text_pieces(tokenizer, [prompt], source()), 1):
        assert len(drawn) == count
    assert drawn == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_never_make_a_character_are_reported_in_the_end(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("The sign")
    torn = tokenizer.encode("The sign🚀")[len(prompt) : -1]
    pieces = _stream(tokenizer, prompt, torn)
    assert "".join(pieces)
    assert set("".join(pieces)) == {"\ufffd"}


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_stream_to_their_decoding_when_no_bytes_are_torn(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("A")

    @quick
    @given(
        st.lists(
            st.sampled_from(["the", " the", " ", "  ", "\n", "é", "🚀", "'s", "12", "aa"]),
            max_size=12,
        )
    )
    @example([" "] * 12)
    def join(words: list[str]) -> None:
        tokens = [i for word in words for i in tokenizer.encode(word)[1:]]
        expected = tokenizer.decode(prompt + tokens)
        assert tokenizer.decode(prompt) + "".join(_stream(tokenizer, prompt, tokens)) == expected

    join()


@pytest.mark.parametrize(
    "kind", ["sentencepiece", "sentencepiece-json", "tiktoken", "tiktoken-json"]
)
def test_spelled_out_special_tokens_are_text_unless_requested(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    text = "a <s> b <unk> c <|end_of_text|>"
    ids = tokenizers[kind].encode(text)
    assert tokenizers[kind].decode(ids).strip() == text
    assert not set(ids[1:]) & {tokenizers[kind].bos_id, *tokenizers[kind].eos_ids}


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece"])
@pytest.mark.parametrize("exported", [False, True])
def test_special_tokens_are_spelled_out_when_requested(
    kind: str, exported: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[f"{kind}-json" if exported else kind]
    ids = [*tokenizer.encode("hi"), tokenizer.eos_ids[0]]
    assert tokenizer.decode(ids) == "hi"
    spelled = {
        "tiktoken": "<|begin_of_text|>hi<|end_of_text|>",
        "sentencepiece": "<s> hi</s>" if exported else "hi",
    }
    assert tokenizer.decode(ids, specials=True) == spelled[kind]
