"""Damaged tokenizers: one line and exit code 3, whatever their libraries do with them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from command import Capture, run
from error_parts import raises
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models

from quantkit.errors import CheckpointError, RequestError
from quantkit.text.contained import convert_library_errors, quiet_on_failure
from quantkit.text.tokenizer import JsonTokenizer, TiktokenTokenizer, load_tokenizer

Raw = dict[str, Any]
TEXT = "a b, 123 é"


def _engine() -> Raw:
    """A small sound tokenizer.json of byte pairs."""
    letters = ["<unk>", "<s>", "</s>", *"abcdefghij \u2581", "ab", "abc"]
    model = models.BPE(
        {letter: i for i, letter in enumerate(letters)},
        [("a", "b"), ("ab", "c")],
        unk_token="<unk>",
    )
    engine = Engine(model)
    engine.decoder = decoders.Fuse()
    engine.add_special_tokens(["<s>", "</s>"])
    raw: Raw = json.loads(engine.to_str())
    return raw


def _write(folder: Path, raw: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


def _template(**token: Any) -> Raw:
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    named = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"], **token}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": named}


# What makes the Rust library panic, at load or at the first use (found by mutation, tokenizers
# 0.23).
PANICS: dict[str, Callable[[Raw], object]] = {
    "charsmap": lambda raw: raw.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": ""}
    ),
    "chunks of nothing": lambda raw: raw.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a prefix longer than a token": lambda raw: raw["model"].update(
        continuing_subword_prefix="#####"
    ),
    "a merge of what is not there": lambda raw: raw["model"].update(
        merges=[["a", "b"]], vocab={"ab": 0, "a": 1, "b": 2}, continuing_subword_prefix="###"
    ),
}
OUTSIDE: dict[str, Callable[[Raw], object]] = {
    "by its template": lambda raw: raw.update(post_processor=_template(ids=[4000])),
    "by its frame": lambda raw: raw.update(
        post_processor={"type": "BertProcessing", "sep": ["</s>", 2**31], "cls": ["<s>", 1]}
    ),
}
DAMAGED: dict[str, Callable[[Raw], object]] = {
    "no vocabulary": lambda raw: (
        raw["model"].update(vocab={}, merges=[], unk_token=None),
        raw.update(added_tokens=[]),
    ),
    "a model of numbers": lambda raw: raw.update(model=5),
    "ids of text": lambda raw: raw["model"]["vocab"].update(a="5"),
    "an id beyond 32 bits": lambda raw: raw["model"]["vocab"].update(a=2**33),
    "an added id below 0": lambda raw: raw["added_tokens"][0].update(id=-1),
    "a pattern that is none": lambda raw: raw.update(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "("},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
}


@pytest.mark.parametrize("case", [*PANICS, *OUTSIDE, *DAMAGED])
def test_a_damaged_tokenizer_json_ends_in_one_line(
    case: str, tmp_path: Path, capfd: Capture
) -> None:
    raw = _engine()
    {**PANICS, **OUTSIDE, **DAMAGED}[case](raw)
    model = oracle.save(oracle.make("llama"), tmp_path / "model")
    code, out, err = run(capfd, "inspect", _write(model, raw))
    assert (code, out) == (3, "")
    assert err.startswith(f"quantkit: error: {model / 'tokenizer.json'}: ")
    assert err.count("\n") == 1
    assert len(err) < 500


def test_a_sound_tokenizer_that_does_not_know_a_letter_is_read(tmp_path: Path) -> None:
    raw = _engine()
    raw["model"].update(type="WordLevel", vocab={"a": 0, "<gone>": 1}, unk_token="<none>")
    for key in (
        "merges",
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
    ):
        raw["model"].pop(key, None)
    raw["model"].pop("ignore_merges", None)
    raw["added_tokens"] = []
    tokenizer = load_tokenizer(_write(tmp_path / "t", raw))
    assert tokenizer.encode("a") == [0]
    with raises(CheckpointError, path=tmp_path / "t" / "tokenizer.json"):
        tokenizer.encode("what is this")


@pytest.mark.parametrize(
    "settings",
    [
        "[]",
        "5",
        "{",
        '{"bos_token": ["<s>"]}',
        '{"bos_token": 1}',
        '{"eos_token": {"content": ["</s>"]}}',
        '{"eos_token": {}}',
        '{"add_bos_token": "false"}',
        '{"add_bos_token": 1}',
    ],
)
def test_settings_of_the_wrong_kind_name_their_file(settings: str, tmp_path: Path) -> None:
    _write(tmp_path / "t", _engine())
    (tmp_path / "t" / "tokenizer_config.json").write_text(settings)
    with raises(CheckpointError, path=tmp_path / "t" / "tokenizer_config.json"):
        load_tokenizer(tmp_path / "t")


@pytest.mark.parametrize(
    "value", ["null", '"<s>"', '{"content": "<s>", "lstrip": false}', '"<not there>"']
)
def test_settings_as_they_are_published_are_read(value: str, tmp_path: Path) -> None:
    _write(tmp_path / "t", _engine())
    (tmp_path / "t" / "tokenizer_config.json").write_text(
        f'{{"bos_token": {value}, "add_bos_token": null, "model_max_length": {10**30}}}'
    )
    assert load_tokenizer(tmp_path / "t").bos_id == (1 if "<s>" in value else None)


def test_a_panic_while_a_text_is_read_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "t", _engine()) / "tokenizer.json"
    tokenizer = JsonTokenizer(path)

    class PanicException(BaseException):
        """Named as pyo3's."""

    class Broken:
        encode_special_tokens = False

        def encode(self, text: str, **_: Any) -> Any:
            raise PanicException("index out of bounds")

        def decode(self, ids: list[int], **_: Any) -> str:
            raise PanicException("index out of bounds")

    monkeypatch.setattr(tokenizer, "_engine", Broken())
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with raises(CheckpointError, "index out of bounds", path=path):
            call()


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_write(tmp_path / "t", _engine()))
    with raises(RequestError, found=repr("\udcff")):
        tokenizer.encode("a\udcff")


def _sentencepiece(folder: Path) -> Path:
    from vocabularies import train

    return train(folder) / "tokenizer.model"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _sentencepiece(tmp_path_factory.mktemp("pieces") / "t").read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw.replace(b"<s>", b"\xff\xfe>", 1),
        lambda raw: raw.replace("\u2581the".encode(), b"\xff" * 6, 1),
        lambda raw: b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01" + raw,
        lambda raw: os.urandom(4096),
        lambda raw: b"\x0a" * 100_000,
    ],
    ids=["cut", "a broken control piece", "a broken piece", "an endless varint", "noise", "deep"],
)
def test_a_damaged_sentencepiece_model_is_refused(
    damage: Callable[[bytes], bytes], pieces: bytes, tmp_path: Path, capfd: Capture
) -> None:
    assert damage(pieces) != pieces
    (tmp_path / "tokenizer.model").write_bytes(damage(pieces))
    capfd.readouterr()
    with raises(CheckpointError, path=tmp_path / "tokenizer.model"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""


def test_a_bit_anywhere_in_a_sentencepiece_model_gives_one_error_or_a_tokenizer(
    pieces: bytes, tmp_path: Path
) -> None:
    for place in [*range(0, 400, 7), *range(len(pieces) - 120, len(pieces), 5)]:
        raw = bytearray(pieces)
        raw[place] ^= 0x80
        (tmp_path / "tokenizer.model").write_bytes(raw)
        try:
            tokenizer = load_tokenizer(tmp_path)
            assert max(tokenizer.encode(TEXT)) < tokenizer.vocab_size
        except CheckpointError:
            pass


def _ranks(*extra: bytes) -> bytes:
    lines = [base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)]
    return b"".join(lines) + b"".join(extra)


@pytest.mark.parametrize(
    "content",
    [
        _ranks(base64.b64encode(b"x" * 5000) + b" 256\n"),
        _ranks(b"dGg= 300\n"),
        _ranks(b"dGg= 255\n"),
        _ranks(b"dGg= -1\n"),
        _ranks(b"dGg= " + b"9" * 5000 + b"\n"),
        _ranks(b"dGg= 4294967296\n"),
        _ranks(b"dGg=\n"),
        _ranks(b"dGg 256\n"),
        _ranks().replace(b"QQ== 65\n", b""),
    ],
    ids=[
        "a long token",
        "a gap",
        "a double",
        "below 0",
        "a huge rank",
        "beyond 32 bits",
        "no rank",
        "no base64",
        "no A",
    ],
)
def test_a_damaged_tiktoken_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with raises(CheckpointError, path=tmp_path / "tokenizer.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_of_a_terabyte_is_not_read(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)
    with raises(CheckpointError, path=tmp_path / name, found=f"{2**40} bytes"):
        load_tokenizer(tmp_path)


def test_a_sound_tiktoken_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(_ranks(b"dGg= 256\n"))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.encode("th")[1:] == [256]


def test_an_evaluation_holds_the_tokenizer_against_the_embedding(
    tmp_path: Path, capfd: Capture
) -> None:
    model = oracle.save(oracle.make("llama", vocab_size=4, eos_token_id=2), tmp_path / "model")
    code, _, err = run(capfd, "eval", _write(model, _engine()))
    assert code == 3
    assert err.startswith(f"quantkit: error: {model}")
    assert "at most 4" in err


def _fails_noisily(path: Path) -> None:
    with quiet_on_failure(), convert_library_errors(path, "broken"):
        os.write(2, b"noise\n")
        raise ValueError(5)


def test_what_is_said_on_stderr_is_kept_unless_it_fails(capfd: Capture, tmp_path: Path) -> None:
    with quiet_on_failure():
        os.write(2, b"one\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "one\n"
    with raises(CheckpointError, "broken: 5", path=tmp_path / "x"):
        _fails_noisily(tmp_path / "x")
    os.write(2, b"two\n")
    assert capfd.readouterr().err == "two\n"
