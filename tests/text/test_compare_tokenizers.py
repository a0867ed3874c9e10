"""Two tokenizers, compared token by token: what is the same in every format, and what single
change makes different.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file
from vocabularies import train, train_gemma, write_byte_level, write_gemma_json, write_tiktoken

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.gguf_io import build_header
from quantkit.text.canonical_vocabulary import Kind
from quantkit.text.compare import first_difference
from quantkit.text.export import export_json, tokenizer_metadata
from quantkit.text.merges import merge_difference, order_probes
from quantkit.text.pipeline import patterns_by_name, pre_tokenizer
from quantkit.text.sentencepiece_file import (
    PieceType,
    SentencePieceFile,
    read_sentencepiece,
    sentencepiece_bytes,
)
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

Edit = Callable[[dict[str, Any]], object]
OTHER_STEP = {"type": "Replace", "pattern": {"String": "foo"}, "content": "bar"}
MANY = 40_000


def _exported(folder: Path) -> Path:
    target = folder.with_name(f"{folder.name}-json")
    target.mkdir()
    assert export_json(folder / "tokenizer.model", target)
    return target


def _gguf(folder: Path, path: Path, *, by_quantkit: bool) -> Path:
    """A GGUF file of a folder's tokenizer, as quantkit writes it or as llama.cpp's converter
    does.
    """
    metadata, _ = tokenizer_metadata(folder, load_tokenizer(folder).vocab_size + 3)
    kept = {
        key: value
        for key, value in metadata.items()
        if by_quantkit or not key.startswith("quantkit.")
    }
    path.write_bytes(build_header(kept, []))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {
        "sentencepiece": train(root / "sentencepiece"),
        "tiktoken": write_tiktoken(root / "tiktoken"),
    }
    folders |= {f"{kind}-json": _exported(folder) for kind, folder in folders.items()}
    folders["gemma"] = train_gemma(root / "gemma")
    folders["gemma-json"] = write_gemma_json(folders["gemma"], root / "gemma-json")
    folders["smollm"] = write_byte_level(
        root / "smollm", pre_tokenizer((patterns_by_name("smollm") or ((), False))[0])
    )
    for kind, folder in list(folders.items()):
        folders[f"{kind}.gguf"] = _gguf(folder, root / f"{kind}.gguf", by_quantkit=True)
        folders[f"{kind}.converted"] = _gguf(
            folder, root / f"{kind}-converted.gguf", by_quantkit=False
        )
    return folders


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


def _edited(source: Path, target: Path, edit: Edit, name: str = "tokenizer.json") -> Tokenizer:
    shutil.copytree(source, target)
    raw = json.loads((target / name).read_text())
    edit(raw)
    (target / name).write_text(json.dumps(raw))
    return load_tokenizer(target)


def _difference(first: Tokenizer, second: Tokenizer) -> str | None:
    """The same in either order, but for which comes first."""
    difference = first_difference(first, second, ())
    reverse = first_difference(second, first, ())
    assert (difference is None) == (reverse is None), (difference, reverse)
    return difference


SAME = [
    *itertools.combinations(
        [
            "sentencepiece",
            "sentencepiece-json",
            "sentencepiece.gguf",
            "sentencepiece.converted",
            "sentencepiece-json.gguf",
            "sentencepiece-json.converted",
        ],
        2,
    ),
    *itertools.combinations(
        [
            "tiktoken",
            "tiktoken-json",
            "tiktoken.gguf",
            "tiktoken.converted",
            "tiktoken-json.gguf",
            "tiktoken-json.converted",
        ],
        2,
    ),
    *itertools.combinations(["gemma", "gemma.gguf", "gemma.converted"], 2),
    *itertools.combinations(["gemma-json", "gemma-json.gguf", "gemma-json.converted"], 2),
    *itertools.combinations(["smollm", "smollm.gguf", "smollm.converted"], 2),
]


def test_one_tokenizer_is_the_same_in_all_formats(tokenizers: dict[str, Tokenizer]) -> None:
    for first, second in SAME:
        difference = _difference(tokenizers[first], tokenizers[second])
        assert difference is None, (first, second)


def _swap_ids(first: int, second: int) -> Edit:
    def edit(raw: dict[str, Any]) -> None:
        vocabulary = raw["model"]["vocab"]
        spelled = {number: piece for piece, number in vocabulary.items()}
        vocabulary[spelled[first]], vocabulary[spelled[second]] = second, first

    return edit


def _swap_merges(raw: dict[str, Any]) -> None:
    merges = raw["model"]["merges"]
    merges[2], merges[3] = merges[3], merges[2]


def _two_tokens_with_one_id(raw: dict[str, Any]) -> None:
    raw["model"]["vocab"]["zzqq"] = 261


def _other_pattern(raw: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": "foo"}, "behavior": "Isolated", "invert": False}
    before = [raw["pre_tokenizer"]] if raw["pre_tokenizer"] else []
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *before]}


def _other_normalizer(raw: dict[str, Any]) -> None:
    before = [raw["normalizer"]] if raw["normalizer"] else []
    raw["normalizer"] = {"type": "Sequence", "normalizers": [OTHER_STEP, *before]}


def _other_prefix(raw: dict[str, Any]) -> None:
    if raw["pre_tokenizer"] is None:
        raw["normalizer"]["normalizers"].pop(0)
    else:
        raw["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


def _other_decoder(raw: dict[str, Any]) -> None:
    raw["decoder"] = {"type": "Sequence", "decoders": [raw["decoder"], OTHER_STEP]}


def _added(**change: Any) -> Edit:
    return lambda raw: raw["added_tokens"][-1].update(change)


CHANGES: dict[str, tuple[Edit, str]] = {
    "two ids": (_swap_ids(261, 262), r"\b2 of .* 261: b'"),
    "two bytes": (_swap_ids(199, 200), r"\b2 of .* 199: .*b'"),
    "two merges": (_swap_merges, "merges: "),
    "a merge less": (lambda raw: raw["model"]["merges"].pop(2), "merges: "),
    "one id for two tokens": (_two_tokens_with_one_id, "zzqq"),
    "an added token's content": (_added(content="<other>"), "<other>|</s>"),
    "an added token's id": (_added(id=7), ": id "),
    "an added token less": (lambda raw: raw["added_tokens"].pop(), r"\b1 of "),
    "special": (
        lambda raw: _added(special=not raw["added_tokens"][-1]["special"])(raw),
        "added",
    ),
    "normalizer": (_other_normalizer, "normalizer: "),
    "pattern": (_other_pattern, "pre_tokenizer: "),
    "prefix": (_other_prefix, "space prefix: true against false|pre_tokenizer: "),
    "decoder": (_other_decoder, "decoder"),
}
OWN_CHANGES: dict[str, tuple[Edit, str]] = {
    **{
        flag: (_added(**{flag: True}), f"{flag} false against true")
        for flag in ("lstrip", "rstrip", "single_word")
    },
    "normalized": (_added(normalized=True), "normalized false against true"),
    "ignore_merges": (
        lambda raw: raw["model"].update(ignore_merges=not raw["model"].get("ignore_merges")),
        "ignore_m",
    ),
    "byte_fallback": (
        lambda raw: raw["model"].update(byte_fallback=not raw["model"].get("byte_fallback")),
        "byte",
    ),
}
"""Of what only tokenizer.json holds, or only it says apart from other things."""
OTHERS = {
    "sentencepiece-json": [
        "sentencepiece",
        "sentencepiece-json.gguf",
        "sentencepiece-json.converted",
    ],
    "tiktoken-json": ["tiktoken", "tiktoken-json.gguf"],
    "smollm": ["smollm.gguf", "smollm.converted"],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_single_change_is_seen_from_every_format(
    kind: str,
    change: str,
    folders: dict[str, Path],
    tokenizers: dict[str, Tokenizer],
    tmp_path: Path,
) -> None:
    edit, message = CHANGES[change]
    changed = _edited(folders[kind], tmp_path / "changed", edit)
    for other in (kind, *OTHERS[kind]):
        difference = _difference(tokenizers[other], changed)
        assert difference is not None, other
        assert re.search(message, difference), (other, difference)


@pytest.mark.parametrize("change", OWN_CHANGES)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_single_change_is_seen_between_two_of_tokenizers(
    kind: str,
    change: str,
    folders: dict[str, Path],
    tokenizers: dict[str, Tokenizer],
    tmp_path: Path,
) -> None:
    edit, message = OWN_CHANGES[change]
    changed = _edited(folders[kind], tmp_path / "changed", edit)
    difference = _difference(tokenizers[kind], changed)
    assert difference is not None
    assert message in difference
    if change in (
        "lstrip",
        "rstrip",
        "single_word",
        "normalized",
    ):  # which quantkit keeps in a GGUF file
        assert message in str(_difference(tokenizers[f"{kind}.gguf"], changed))


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_tokens_that_begin_and_end_a_text_are_seen(
    kind: str, name: str, folders: dict[str, Path], tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    other = {
        "tiktoken-json": "<|python_tag|>",
        "smollm": {"bos_token": "<|im_end|>", "eos_token": "<s>"}.get(name),
    }
    token = other.get(kind) or {"bos_token": "</s>", "eos_token": "<s>"}[name]
    changed = _edited(
        folders[kind],
        tmp_path / "c",
        lambda raw: raw.update({name: token}),
        "tokenizer_config.json",
    )
    for original in (kind, *OTHERS[kind]):
        difference = str(_difference(tokenizers[original], changed))
        assert difference.startswith(f"{name[:3].upper()}: "), original


def test_another_score_is_seen_in_a_sentencepiece_model(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    model = read_sentencepiece(folders["sentencepiece"] / "tokenizer.model")
    pieces = [
        (piece, score + 1.5 if number == 265 else score, kind)
        for number, (piece, score, kind) in enumerate(model.pieces)
    ]
    (tmp_path / "tokenizer.model").write_bytes(
        sentencepiece_bytes(
            SentencePieceFile(
                pieces=pieces, byte_pair=True, space_prefix=True, plain=True, ids=model.ids
            )
        )
    )
    changed = load_tokenizer(tmp_path)
    assert "score" in str(_difference(tokenizers["sentencepiece"], changed))
    for other in OTHERS["sentencepiece-json"][1:]:
        assert "score" in str(_difference(tokenizers[other], changed))


@pytest.mark.parametrize("place", [0, 5])
def test_an_unused_piece_that_merges_make_is_seen_and_not_exported(
    place: int, folders: dict[str, Path], tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    """sentencepiece goes on from it, and cuts it again where it is left over; no other format
    does.
    """
    model = read_sentencepiece(folders["sentencepiece"] / "tokenizer.model")
    merged = [
        piece for piece, _, kind in model.pieces if kind is PieceType.NORMAL and len(piece) > 1
    ][place]
    pieces = [
        (piece, score, PieceType.UNUSED if piece == merged else kind)
        for piece, score, kind in model.pieces
    ]
    (tmp_path / "tokenizer.model").write_bytes(
        sentencepiece_bytes(
            SentencePieceFile(
                pieces=pieces, byte_pair=True, space_prefix=True, plain=True, ids=model.ids
            )
        )
    )
    changed = load_tokenizer(tmp_path)
    for other in ("sentencepiece", *OTHERS["sentencepiece-json"]):
        assert "unused" in str(_difference(tokenizers[other], changed)), other
    (tmp_path / "json").mkdir()
    assert not export_json(tmp_path / "tokenizer.model", tmp_path / "json")
    with pytest.raises(UnsupportedError):
        tokenizer_metadata(tmp_path, changed.vocab_size)


def test_merges_of_an_added_token_that_is_found_as_a_word_alone_are_compared(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Within other words pairs make it."""
    raw = json.loads((folders["smollm"] / "tokenizer.json").read_text())
    operands = [operand for pair in raw["model"]["merges"] for operand in pair]
    piece = next(
        a + b for a, b in raw["model"]["merges"] if (a + b).isalpha() and a + b in operands
    )

    def add(raw: dict[str, Any], *, kept: bool) -> None:
        token = {
            "id": raw["model"]["vocab"][piece],
            "content": piece,
            "single_word": True,
            "lstrip": False,
        }
        raw["added_tokens"].append(
            {**token, "rstrip": False, "normalized": False, "special": False}
        )
        if not kept:
            raw["model"]["merges"] = [pair for pair in raw["model"]["merges"] if piece not in pair]

    with_merges, without_merges = (
        _edited(folders["smollm"], tmp_path / str(kept), functools.partial(add, kept=kept))
        for kept in (True, False)
    )
    assert "merges" in str(_difference(with_merges, without_merges))


def test_an_added_token_with_a_space_is_another_than_with_the_sign_for_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with_space, with_sign = (
        _edited(folders["smollm"], tmp_path / str(ord(sign)), _added(content=f"{sign}zebra"))
        for sign in (" ", "\u2581")
    )
    assert "zebra'" in str(_difference(with_space, with_sign))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"split_special_tokens": True},
        {"additional_special_tokens": ["the"]},
        {"extra_special_tokens": {"word": "the"}},
        {"added_tokens_decoder": {"2": {"content": "</s>", "lstrip": True}}},
        {"added_tokens_decoder": {"9999": {"content": "quizz", "special": False}}},
    ],
)
def test_tokens_of_tokenizer_config_alone_are_compared(
    change: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    """transformers adds them to those of tokenizer.json."""
    quantkit.convert(demo_model, tmp_path / "one", to="hf")
    other = oracle.copy(tmp_path / "one", tmp_path / "other")
    assert (other / "tokenizer.json").is_file()
    assert quantkit.verify(tmp_path / "one", other).is_same
    oracle.edit_json(other / "tokenizer_config.json", **change)
    report = quantkit.verify(tmp_path / "one", other)
    assert not report.ok
    (line,) = [line for line in report.lines() if "tokenizer_config.json" in line]
    assert next(iter(change)) in line


def test_merges_of_one_piece_may_be_listed_in_any_order_that_shows_in_no_text(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    def reverse(raw: dict[str, Any]) -> None:
        groups = itertools.groupby(raw["model"]["merges"], "".join)
        raw["model"]["merges"] = [pair for _, pairs in groups for pair in reversed(list(pairs))]

    changed = _edited(folders["sentencepiece-json"], tmp_path / "changed", reverse)
    assert changed.canonical().merges != tokenizers["sentencepiece-json"].canonical().merges
    assert _difference(tokenizers["sentencepiece-json"], changed) is None


def test_an_order_within_a_piece_is_tried_on_the_tokens_that_it_may_show_in() -> None:
    first = [("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")]
    second = [*first[:2], *first[:1:-1]]
    assert merge_difference(first, second) is None
    assert (
        list(order_probes(first, second))
        == list(order_probes(second, first))
        == [("ab", "a", "ba")]
    )
    assert list(order_probes(first, first)) == []


def _list_added(raw: dict[str, Any], **more: int) -> None:
    """Put added tokens, and others, into the vocabulary, so that their ids may have any after
    them.
    """
    raw["model"]["vocab"] |= {one["content"]: one["id"] for one in raw["added_tokens"]} | more


def _many_tokens(folder: Path) -> Path:
    """A byte-level tokenizer of so many tokens that a sample would miss some."""
    write_byte_level(folder, pre_tokenizer((patterns_by_name("smollm") or ((), False))[0]))
    raw = json.loads((folder / "tokenizer.json").read_text())
    _list_added(raw)
    raw["model"]["vocab"] |= {
        f"t{number:x}q": number for number in range(len(raw["model"]["vocab"]), MANY)
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.slow
def test_every_id_of_a_large_vocabulary_is_compared(tmp_path: Path) -> None:
    source = _many_tokens(tmp_path / "source")
    original = load_tokenizer(source)
    for number in (MANY - 1, MANY - 2):
        changed = _edited(source, tmp_path / str(number), _swap_ids(number, 20_000 + number % 2))
        difference = _difference(original, changed)
        assert str(difference).startswith(
            f"2 of {MANY} token ids; the first is {20_000 + number % 2}: b't"
        ), difference

    def move_odd_ids(raw: dict[str, Any]) -> None:
        vocabulary = raw["model"]["vocab"]
        odd = [piece for piece, number in vocabulary.items() if number % 2 and number > 1000]
        vocabulary |= dict(
            zip(odd, [vocabulary[piece] for piece in odd[1:] + odd[:1]], strict=True)
        )

    changed = _edited(source, tmp_path / "odd", move_odd_ids)
    count = sum(1 for number in range(1001, MANY) if number % 2)
    assert str(_difference(original, changed)).startswith(
        f"{count} of {MANY} token ids; the first is 1001: "
    )


def test_ids_have_the_bytes_that_their_own_libraries_give(
    tokenizers: dict[str, Tokenizer], folders: dict[str, Path]
) -> None:
    import tokenizers as library
    from sentencepiece import SentencePieceProcessor

    canonical = tokenizers["tiktoken"].canonical()
    engine = tokenizers["tiktoken"]._encoding  # type: ignore[attr-defined]
    assert all(
        engine.decode_single_token_bytes(number) == content
        for number, content in canonical.contents.items()
    )
    model = SentencePieceProcessor(model_file=str(folders["sentencepiece"] / "tokenizer.model"))
    canonical = tokenizers["sentencepiece"].canonical()
    for number in range(model.get_piece_size()):
        assert (canonical.kinds.get(number) is Kind.BYTE) == model.is_byte(number)
        if not (model.is_byte(number) or model.is_control(number) or model.is_unknown(number)):
            assert (
                canonical.contents[number].decode()
                == model.decode([number, number])[-len(canonical.contents[number].decode()) :]
            )
        elif model.is_byte(number) and number < 3 + 128:
            assert canonical.contents[number].decode() == model.decode([number])
    theirs = library.Tokenizer.from_file(str(folders["smollm"] / "tokenizer.json"))
    canonical = tokenizers["smollm"].canonical()
    assert canonical.contents.keys() == set(theirs.get_vocab().values())
    for number, content in canonical.contents.items():
        assert content.decode("utf-8", "replace") == theirs.decode(
            [number], skip_special_tokens=False
        )


def test_ids_that_only_fill_the_embedding_are_no_difference(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    hole = _edited(folders["smollm"], tmp_path / "hole", lambda raw: _list_added(raw, zz=270))
    file = _gguf(tmp_path / "hole", tmp_path / "hole.gguf", by_quantkit=False)
    assert _difference(hole, load_tokenizer(file)) is None
    named_ = _edited(
        tmp_path / "hole", tmp_path / "real", lambda raw: raw["model"]["vocab"].update({"qq": 268})
    )
    assert str(_difference(named_, load_tokenizer(file))).startswith(
        "1 of 271 token ids; the first is 268: token b'qq' against unused"
    )


def test_tokens_that_files_add_to_a_sentencepiece_model_are_compared(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["sentencepiece"], tmp_path / "model")
    (tmp_path / "model" / "added_tokens.json").write_text(json.dumps({"<pad>": 400}))
    file = tmp_path / "model.gguf"
    file.write_bytes(build_header(tokenizer_metadata(tmp_path / "model", 401)[0], []))
    added = load_tokenizer(tmp_path / "model")
    assert _difference(added, load_tokenizer(file)) is None
    difference = _difference(load_tokenizer(folders["sentencepiece"]), added)
    assert difference is not None
    assert " 400: " in difference
    assert "b'<pad>'" in difference


def test_verify_names_the_first_id_that_differs(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    oracle.copy(tmp_path / "a", tmp_path / "b")
    _edited(tmp_path / "a", tmp_path / "edited", _swap_ids(40, 41))
    shutil.copy(tmp_path / "edited" / "tokenizer.json", tmp_path / "b")
    for first, words in (
        (tmp_path / "a", r"'%' against byte token b'&'"),
        (demo_model, r"'%' against byte token b'&'"),
    ):
        code, out, _ = run(capfd, "verify", first, tmp_path / "b")
        assert code == 11
        problem = next(
            line
            for line in out.splitlines()
            if line.startswith("problem: tokenizers differ on 2 of ")
        )
        assert problem.endswith(f"token ids; the first is 40: byte token b{words}")


@pytest.mark.slow
def test_a_token_that_tokenizer_model_lacks_is_not_lost_on_the_way_to_meta(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"].shape[0]
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    oracle.edit_json(tmp_path / "source" / "config.json", vocab_size=rows + 1)
    quantkit.convert(tmp_path / "source", tmp_path / "sound", to="meta")  # a row without a token
    raw = json.loads((tmp_path / "source" / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][-1], "id": rows, "content": "<|im_end|>"})
    (tmp_path / "source" / "tokenizer.json").write_text(json.dumps(raw))
    path = tmp_path / "source" / "tokenizer.model"
    with raises(CheckpointError, f" {rows}: ", "b'<|im_end|>'", path=path):
        quantkit.convert(tmp_path / "source", tmp_path / "meta", to="meta")
    (tmp_path / "source" / "tokenizer.model").unlink()
    quantkit.convert(tmp_path / "source", tmp_path / "meta", to="meta")
    assert quantkit.verify(tmp_path / "source", tmp_path / "meta").is_same
