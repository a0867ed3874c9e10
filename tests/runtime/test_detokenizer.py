"""The text of new tokens, whatever the prompt before them ends in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vocabularies import train, write_tiktoken

from quantkit.runtime.detokenizer import Detokenizer
from quantkit.text.export import export_json
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

KINDS = ["sentencepiece", "sentencepiece-json", "gemma-json", "tiktoken", "tiktoken-json"]
quick = settings(deadline=None, max_examples=120, derandomize=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    found = {
        "sentencepiece": train(root / "sentencepiece"),
        "tiktoken": write_tiktoken(root / "tiktoken"),
    }
    for kind in list(found):
        found[f"{kind}-json"] = root / f"{kind}-json"
        found[f"{kind}-json"].mkdir()
        assert export_json(found[kind] / "tokenizer.model", found[f"{kind}-json"]) is not None
    found["gemma-json"] = _redecoded(
        found["sentencepiece-json"], root / "gemma", lambda decoders: decoders[:-1]
    )
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    found["torn"] = _redecoded(
        found["tiktoken-json"], root / "torn", lambda decoders: [*decoders, strip]
    )
    found["words"] = _words(root / "words")
    return found


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


def _redecoded(source: Path, target: Path, change: Callable[[list[Any]], list[Any]]) -> Path:
    """The same tokenizer with another decoder."""
    target.mkdir()
    said = json.loads((source / "tokenizer.json").read_text())
    decoders = said["decoder"].get("decoders", [said["decoder"]])
    said["decoder"] = {"type": "Sequence", "decoders": change(decoders)}
    (target / "tokenizer.json").write_text(json.dumps(said))
    return target


def _words(folder: Path) -> Path:
    """A tokenizer whose tokens' texts depend on their neighbours."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Engine

    folder.mkdir()
    names = ["[UNK]", "the", "cat", "##s", "##ing", "run", ".", ",", "'"]
    engine = Engine(
        models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    engine.decoder = decoders.WordPiece()
    engine.add_special_tokens([AddedToken("[CLS]", special=True)])
    engine.save(str(folder / "tokenizer.json"))
    return folder


def _joined(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    text = Detokenizer(tokenizer, prompt)
    return "".join(map(text.add, new)) + text.close()


def _said_by_sentencepiece(
    model: Any, exported: bool, prompt: Sequence[int], new: Sequence[int]
) -> str:
    """Its own decoding of new tokens, after the rest of a character that the prompt's end
    begins.
    """
    if exported:  # specials are left out before anything is decoded
        prompt, new = ([one for one in ids if one > 2] for ids in (prompt, new))
    for before, after in itertools.product((1, 2, 3), repeat=2):
        torn = (
            [*prompt[len(prompt) - before :], *new[:after]]
            if before <= len(prompt) and after <= len(new)
            else [0]
        )
        if all(map(model.is_byte, torn)):
            character = model.decode(torn)
            if len(character) == 1 and (character != "\ufffd" or len(torn) == 3):
                return str(character + model.decode([*model.encode("a"), *new[after:]])[1:])
    return str(model.decode([*model.encode("a"), *new])[1:])


def _said_by_bytes(read: Callable[[int], bytes], prompt: Sequence[int], new: Sequence[int]) -> str:
    """As bytes are read, after the rest of a character that the prompt's end begins."""
    begins, rest = (b"".join(map(read, ids)) for ids in (prompt, new))
    for before, after in itertools.product((1, 2, 3), repeat=2):
        if before <= len(begins) and after <= len(rest):
            try:
                character = (begins[len(begins) - before :] + rest[:after]).decode()
            except UnicodeDecodeError:
                continue
            if len(character) == 1:
                return character + rest[after:].decode("utf-8", "replace")
    return rest.decode("utf-8", "replace")


def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Whole texts, bytes of characters cut anywhere, and any tokens."""
    characters = st.sampled_from(
        ["\n", "a", " ", "é", "語", "🚀", "\ufffd", " the", "\x00", "\ud7ff"]
    )
    whole = st.lists(characters, max_size=6).map(
        lambda found: tokenizer.encode("".join(found), bos=False)
    )
    cut = st.tuples(whole, st.integers(0, 3), st.integers(0, 3)).map(
        lambda one: one[0][one[1] : len(one[0]) - one[2]]
    )
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=5)
    torn = [
        token
        for value in (0xE4, 0xB8, 0xF0, 0x9F, 0x80, 0xFF, 0xED, 10, 32)
        for token in _byte(tokenizer, value)
    ]
    parts = st.one_of(whole, cut, anything, st.lists(st.sampled_from(torn), max_size=5))
    return st.lists(parts, max_size=4).map(lambda found: list(itertools.chain(*found)))


def _byte(tokenizer: Tokenizer, value: int) -> list[int]:
    known = tokenizer.token_bytes
    assert known is not None
    return [token for token in range(tokenizer.vocab_size) if known.of(token) == bytes([value])]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_read_as_by_themselves_wherever_a_prompt_is_cut(
    kind: str, folders: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    import tiktoken
    from sentencepiece import SentencePieceProcessor

    tokenizer = tokenizers[kind]
    said: Callable[[Sequence[int], Sequence[int]], str]
    if kind.startswith("tiktoken"):
        encoding: tiktoken.Encoding = tokenizers["tiktoken"]._encoding  # type: ignore[attr-defined]
        plain = tokenizer.vocab_size - 256
        read = lambda token: encoding.decode_single_token_bytes(token) if token < plain else b""  # noqa: E731
        said = lambda prompt, new: _said_by_bytes(read, prompt, new)  # noqa: E731
    else:
        model: Any = SentencePieceProcessor(
            model_file=str(folders["sentencepiece"] / "tokenizer.model")
        )
        said = partial(_said_by_sentencepiece, model, kind != "sentencepiece")
    begin = tokenizer.encode("a")

    @settings(quick, max_examples=250)
    @given(_ids(tokenizer), _ids(tokenizer), st.data())
    def hold(prompt: list[int], new: list[int], data: st.DataObject) -> None:
        prompt, new = (
            [one for one in ids if one < tokenizer.vocab_size] for ids in (begin + prompt, new)
        )
        text = _joined(tokenizer, prompt, new)
        assert text == said(prompt, new)
        if text:
            start = data.draw(st.integers(0, len(text) - 1))
            stop = text[start : start + data.draw(st.integers(1, 6))]
            ended = Detokenizer(tokenizer, prompt, [stop])
            assert "".join(map(ended.add, new)) + ended.close() == text[: text.find(stop)]
            assert ended.found_stop == stop

    hold()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_begins_as_its_decoding_does(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    """With the space that is dropped there, whether it is a letter's, or a byte's, or stands
    alone.
    """
    tokenizer = tokenizers[kind]
    words = [tokenizer.encode(word, bos=False) for word in (" ", "  ", " the", "the", "é", "\n")]
    pieces = [*words, _byte(tokenizer, 32)]
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    @quick
    @given(
        st.lists(st.sampled_from(pieces), max_size=4), st.lists(st.sampled_from(pieces), max_size=4)
    )
    def hold(before: list[list[int]], after: list[list[int]]) -> None:
        prompt, new = [*bos, *itertools.chain(*before)], list(itertools.chain(*after))
        assert tokenizer.decode(prompt) + _joined(tokenizer, prompt, new) == tokenizer.decode(
            prompt + new
        )

    hold()


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-json"])
def test_a_prompt_that_begins_within_a_character_leaves_lines_whole(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    prompt = [
        1,
        *(token for value in (0xB0, 0xE4, 0xB8, 0xAD) for token in _byte(tokenizer, value)),
    ]
    assert _joined(tokenizer, prompt, _byte(tokenizer, 10) * 3) == "\n\n\n"


@pytest.mark.parametrize("kind", KINDS)
def test_bad_bytes_come_at_once_and_good_ones_after_them(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    text = Detokenizer(tokenizer, tokenizer.encode("a"))
    values = [0xFF, 0xE4, 10, 0x80, 0x80, *"語".encode()]
    bad = "\ufffd"
    assert [text.add(*_byte(tokenizer, value)) for value in values] == [
        bad,
        "",
        f"{bad}\n",
        bad,
        bad,
        "",
        "",
        "語",
    ]


@pytest.mark.parametrize("kind", ["torn", "words"])
@example([1, 2, 3, 9, 9, 6], [4, 9, 5, 7, 2])
@settings(quick, max_examples=100)
@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
def test_where_tokens_depend_on_others_pieces_join_to_the_decoding_of_all(
    tokenizers: dict[str, Tokenizer], kind: str, prompt: list[int], new: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    if kind == "torn":
        pieces = [
            tokenizer.encode(one, bos=False)
            for one in ("é", "🚀", " the", " ", "a", "語", "b", " ", "\n", "x")
        ]
        prompt, new = ([token for one in ids for token in pieces[one]] for ids in (prompt, new))
    assert tokenizer.token_bytes is None
    whole = tokenizer.decode(prompt + new)
    if not (prompt and whole.startswith(tokenizer.decode(prompt))):
        prompt, whole = [], tokenizer.decode(new)
    assert tokenizer.decode(prompt) + _joined(tokenizer, prompt, new) == whole


@pytest.mark.parametrize("kind", [*KINDS, "words"])
def test_a_token_costs_the_same_anywhere(
    kind: str, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens come before, and whether they add a text or none."""
    tokenizer, decoded = tokenizers[kind], 0
    decode = tokenizer.decode

    def counted(ids: Sequence[int], **options: Any) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    none = tokenizer.vocab_size - 1 if kind == "words" or kind.startswith("tiktoken") else 1
    for token in (none, tokenizer.vocab_size // 2, 3):
        spent = []
        for length in (200, 2000):
            decoded = 0
            _joined(tokenizer, [3] * length, [token] * 500)
            spent.append(decoded)
        assert max(spent) <= 500 * 30, (token, spent)
        assert spent[1] <= spent[0] + 50, (token, spent)
