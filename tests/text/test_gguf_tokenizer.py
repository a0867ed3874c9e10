"""Tokenizers in and out of GGUF's metadata.

What llama.cpp makes of them: scripts/peers/peer_gguf_tokenizer.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from case_names import case
from error_parts import raises
from vocabularies import (
    TURNS,
    train,
    train_gemma,
    write_byte_level,
    write_gemma_json,
    write_tiktoken,
)

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.gguf_io import build_header
from quantkit.text.compare import first_difference
from quantkit.text.export import export_json, tokenizer_metadata
from quantkit.text.gguf_tokenizer import build_folder_files
from quantkit.text.pipeline import NAMES, patterns_by_name, patterns_of, pre_tokenizer
from quantkit.text.sentencepiece_file import PieceType, read_sentencepiece
from quantkit.text.text_folder import locate_or_extract_text_folder
from quantkit.text.tiktoken_file import LLAMA3_PATTERN
from quantkit.text.tokenizer import SentencePieceTokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "  two  spaces,   three ",
    "The cat's whiskers aren't 12345.67!\r\n\n\tx",
    "Größe e\u0301 \u00e9 \u2167",
    "Москва, 日本語のテキスト, عربى, हिन्दी",
    "👩‍🚀🚀🇩🇪" * 3,
    "\x00\x01\x7f a\u2581b",
    "x" * 90,
    "a <s> b </s> <0x41>[PAD7]",
]
KINDS = [
    "sentencepiece",
    "sentencepiece-json",
    "tiktoken",
    "gemma",
    "gemma-json",
    "gemma-runs",
    "first-space",
    "qwen2",
    "smollm",
]
RUNS = ["\u2581" * count for count in range(2, 5)]
END, TOOL = "<|im_end|>", "<tool>"


def _edited(source: Path, target: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(source, target)
    raw = json.loads((target / "tokenizer.json").read_text())
    edit(raw)
    (target / "tokenizer.json").write_text(json.dumps(raw))
    return target


def _with_runs_of_spaces(folder: Path) -> Path:
    """Gemma's kind with tokens for several spaces and new lines, whose pairs lie among each
    other in the list.
    """
    symbols = [*TURNS, "\n\n", *RUNS]
    original = train(
        folder.with_name("runs"),
        user_defined_symbols=symbols,
        add_dummy_prefix=False,
        vocab_size=430,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
    )
    one, two, three, _ = ("\u2581" * count for count in range(1, 5))
    runs = [(three, one), (two, two), (two, one), (one, three), (one, two), (one, one)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)

    def edit(raw: dict[str, Any]) -> None:
        raw["model"]["merges"][:0] = runs
        vocabulary = raw["model"]["vocab"]
        raw["added_tokens"] += [
            {"id": vocabulary[one], "content": one, **plain} for one in symbols[2:]
        ]

    return _edited(write_gemma_json(original, folder.with_name("no-runs")), folder, edit)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    found = {
        "sentencepiece": train(root / "sentencepiece"),
        "tiktoken": write_tiktoken(root / "tiktoken"),
    }
    found["sentencepiece-json"] = root / "sentencepiece-json"
    found["sentencepiece-json"].mkdir()
    assert export_json(found["sentencepiece"] / "tokenizer.model", found["sentencepiece-json"])
    found["gemma"] = train_gemma(root / "gemma")
    found["gemma-json"] = write_gemma_json(found["gemma"], root / "gemma-json")
    found["gemma-runs"] = _with_runs_of_spaces(root / "gemma-runs")
    space = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    found["first-space"] = _edited(
        found["sentencepiece-json"],
        root / "first",
        lambda raw: raw.update(normalizer=None, pre_tokenizer=space),
    )
    for name in ("qwen2", "smollm", "llama-bpe"):
        normalizer = {"type": "NFC"} if name == "qwen2" else None
        found[name] = write_byte_level(
            root / name, pre_tokenizer((patterns_by_name(name) or ((), False))[0]), normalizer
        )
    return found


def _metadata(folder: Path, more: int = 3) -> dict[str, Any]:
    return tokenizer_metadata(folder, load_tokenizer(folder).vocab_size + more)[0]


def _folder(metadata: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    for name, content in build_folder_files(metadata, Path("model.gguf")).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_comes_back_the_same_way(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    original = load_tokenizer(folders[kind])
    read = load_tokenizer(_folder(_metadata(folders[kind]), tmp_path / "read"))
    assert (read.vocab_size, read.bos_id) == (original.vocab_size, original.bos_id)
    assert (read.eos_ids[0], read.byte_level) == (original.eos_ids[0], original.byte_level)
    for text in TEXTS:
        ids = original.encode(text)
        assert read.encode(text) == ids
        assert read.encode(text, bos=False) == original.encode(text, bos=False)
        assert read.decode(ids) == original.decode(ids)
        if original.special_tokens is not None:
            assert first_difference(read, original, []) is None
            marked = "".join(f"{text} {token}" for token in list(original.special_tokens)[:5])
            assert read.encode(marked, specials=True) == original.encode(marked, specials=True)


@pytest.mark.parametrize("kind", ["gemma-json", "gemma-runs"])
def test_a_list_of_merges_counts_in_files_of_gemma_4(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """llama.cpp's converter writes the same score for all tokens."""
    raw = json.loads((folders[kind] / "tokenizer.json").read_text())
    metadata = _metadata(folders[kind])
    metadata.pop("quantkit.tokenizer_json", None)
    metadata |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.scores": [-1000.0] * len(metadata["tokenizer.ggml.tokens"]),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in raw["model"]["merges"]],
    }
    tokens = list(raw["model"]["vocab"])
    metadata["tokenizer.ggml.tokens"][: len(tokens)] = tokens
    folder = _folder(metadata, tmp_path / "read")
    assert not (folder / "tokenizer.model").exists()
    original, read = load_tokenizer(folders[kind]), load_tokenizer(folder)
    for text in TEXTS:
        ids = original.encode(text)
        assert read.encode(text) == ids
        assert read.decode(ids) == original.decode(ids)
    without = {key: value for key, value in metadata.items() if not key.endswith("merges")}
    with raises(CheckpointError, "merges"):
        build_folder_files(without, Path("model.gguf"))


def test_what_llama_cpp_reads(folders: dict[str, Path]) -> None:
    metadata = _metadata(folders["sentencepiece"])
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    assert (tokens[:4], tokens[-3:]) == (
        ["<unk>", "<s>", "</s>", "<0x00>"],
        ["[PAD400]", "[PAD401]", "[PAD402]"],
    )
    assert (types[:4], types[259], types[-3:]) == ([2, 3, 3, 6], 1, [5, 5, 5])
    assert len(tokens) == len(types) == len(scores) == 403
    assert all(type(score) is float for score in scores)
    rest = {key: value for key, value in metadata.items() if not isinstance(value, list)}
    assert rest == {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def test_what_llama_cpp_reads_of_byte_pairs(folders: dict[str, Path]) -> None:
    metadata, notes = tokenizer_metadata(folders["qwen2"], 300)
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    assert metadata["tokenizer.ggml.merges"][0] == "t h"
    by_token = dict(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    )
    assert [by_token[token] for token in ("th", END, TOOL, "[PAD299]")] == [1, 3, 4, 5]
    assert metadata["tokenizer.ggml.eot_token_id"] == metadata["tokenizer.ggml.eos_token_id"]
    assert (
        metadata["tokenizer.ggml.add_bos_token"],
        "tokenizer.ggml.bos_token_id" in metadata,
    ) == (False, False)
    assert len(notes) == 1
    assert "NFC" in notes[0]


def test_a_bos_that_only_the_config_has_is_for_llama_cpp_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["qwen2"], tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 263}))
    metadata = _metadata(folder)
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.add_bos_token"]) == (
        263,
        False,
    )
    assert load_tokenizer(_folder(metadata, tmp_path / "read")).bos_id is None
    del metadata["quantkit.tokenizer_json"]
    assert load_tokenizer(_folder(metadata, tmp_path / "theirs")).bos_id == 263


def test_gemmas_marks_of_turns(folders: dict[str, Path], tmp_path: Path) -> None:
    metadata = _metadata(folders["gemma-json"])
    start, end = (metadata["tokenizer.ggml.tokens"].index(turn) for turn in TURNS)
    assert [metadata["tokenizer.ggml.token_type"][number] for number in (start, end)] == [3, 3]
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    metadata, notes = tokenizer_metadata(folders["gemma"], 420)
    assert "<end_of_turn>" in notes[0]
    file = tmp_path / "model.gguf"
    file.write_bytes(build_header({"general.architecture": "gemma", **metadata}, []))
    _, notes = tokenizer_metadata(file, 420)
    assert [note.partition(":")[0] for note in notes] == [str(file)] * len(
        notes
    )  # not the temporary folder
    assert notes


def test_runs_of_spaces_are_found_before_pairs(folders: dict[str, Path]) -> None:
    metadata = _metadata(folders["gemma-runs"])
    runs = [metadata["tokenizer.ggml.tokens"].index(" " * len(run)) for run in RUNS]
    assert [metadata["tokenizer.ggml.token_type"][number] for number in runs] == [4, 4, 4]
    assert not set(RUNS) & set(metadata["tokenizer.ggml.tokens"])


def test_a_folder_made_of_a_published_file_has_its_runs_of_spaces(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    metadata = {
        key: value
        for key, value in _metadata(folders["gemma-runs"]).items()
        if "quantkit" not in key
    }
    path = tmp_path / "published.gguf"
    path.write_bytes(build_header({"general.architecture": "gemma", **metadata}, []))
    file = load_tokenizer(path)
    for folder in (_folder(metadata, tmp_path / "converted"), folders["gemma-runs"]):
        assert first_difference(file, load_tokenizer(folder), []) is None
        assert first_difference(load_tokenizer(folder), file, []) is None


def test_marks_of_phi_3_take_blanks(folders: dict[str, Path], tmp_path: Path) -> None:
    metadata = _metadata(folders["sentencepiece"])
    read = load_tokenizer(_folder({**metadata, "general.name": "My Phi-3 mini"}, tmp_path / "read"))
    plain = load_tokenizer(_folder(metadata, tmp_path / "plain"))
    assert read.encode("</s> the", specials=True) == plain.encode("</s>the", specials=True)
    assert read.encode("<s> the", specials=True) == plain.encode("<s> the", specials=True)


def test_ends_templates_and_settings_go_there_and_back(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llama-bpe"], tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens is not None
    end, tool = tokenizer.special_tokens[END], tokenizer.special_tokens[TOOL]
    settings = {
        "eos_token_id": [end, tool],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    templates = {"default": "{{ bos_token }}{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    metadata, _ = tokenizer_metadata(folder, tokenizer.vocab_size, templates)
    assert metadata["tokenizer.chat_template.tool_use"] == "{{ tools }}"
    assert (metadata["tokenizer.ggml.eot_token_id"], metadata["tokenizer.ggml.eom_token_id"]) == (
        end,
        tool,
    )
    read = _folder(metadata, tmp_path / "read")
    assert quantkit.sampling_defaults(read) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert json.loads((read / "generation_config.json").read_text())["eos_token_id"] == [end, tool]
    chat = quantkit.chat_format(read, load_tokenizer(read))
    message = {"role": "user", "content": f"the thing{END}"}
    assert chat.encode([message]) == tokenizer.encode(
        f"<s>the thing{END}", specials=True, bos=False
    )
    assert (
        json.loads((read / "tokenizer_config.json").read_text())["chat_template"][1]["name"]
        == "tool_use"
    )


def test_what_llama_cpp_ends_at_by_its_spelling_is_no_end_of_the_model(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llama-bpe"], tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    other = next(
        number for number in range(tokenizer.vocab_size) if number not in tokenizer.eos_ids
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": other}))
    metadata, notes = tokenizer_metadata(folder, tokenizer.vocab_size)
    read = json.loads(build_folder_files(metadata, folder)["generation_config.json"])
    assert read["eos_token_id"] == [other, *tokenizer.eos_ids]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": None})
    )
    metadata, notes = tokenizer_metadata(folder, tokenizer.vocab_size)
    read = json.loads(build_folder_files(metadata, folder)["generation_config.json"])
    assert read["eos_token_id"] == [other]
    assert len([note for note in notes if END in note]) == 1
    with raises(CheckpointError, "quantkit.eos_token_ids", found="99999"):
        build_folder_files({**metadata, "quantkit.eos_token_ids": [99999]}, folder)


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        (
            {"temp": 0.0, "top_k": 20, "penalty_repeat": 1.5},
            {"do_sample": False, "repetition_penalty": 1.5},
        ),
        ({"top_k": -1, "top_p": 0.5}, {"do_sample": True, "top_k": 0, "top_p": 0.5}),
        ({"top_p": 1.5}, None),
        ({"min_p": -0.5}, None),
        ({"penalty_repeat": 0.0}, None),
    ],
)
def test_settings_of_generation_that_transformers_takes(
    stated: dict[str, Any], read: dict[str, Any] | None, folders: dict[str, Path]
) -> None:
    metadata = _metadata(folders["smollm"]) | {
        f"general.sampling.{key}": value for key, value in stated.items()
    }
    if read is None:
        with raises(CheckpointError, path=folders["smollm"]):
            build_folder_files(metadata, folders["smollm"])
        return
    settings = json.loads(build_folder_files(metadata, folders["smollm"])["generation_config.json"])
    assert {key: value for key, value in settings.items() if "token" not in key} == read


@pytest.mark.parametrize(
    "entry",
    [
        5,
        ["x", "a", "b"],
        [0, "a"],
        [0, ["a"], "b"],
        [0, "not", "known"],
        [99999, "\u2581", "\u2581"],
    ],
)
def test_damaged_merges_of_runs_are_refused(entry: Any, folders: dict[str, Path]) -> None:
    metadata = _metadata(folders["gemma-runs"])
    own = json.loads(metadata["quantkit.tokenizer_json"])
    assert own["run_merges"]
    for damaged in ([entry], entry):
        changed = {
            **metadata,
            "quantkit.tokenizer_json": json.dumps({**own, "run_merges": damaged}),
        }
        with pytest.raises(CheckpointError):
            build_folder_files(changed, folders["gemma-runs"])


def test_a_gguf_file_is_taken_where_a_folder_is(folders: dict[str, Path], tmp_path: Path) -> None:
    metadata, _ = tokenizer_metadata(
        folders["smollm"], 300, {"default": "{{ messages[0].content }}"}
    )
    path = tmp_path / "model.gguf"
    path.write_bytes(build_header(metadata, []))
    tokenizer = load_tokenizer(path)
    assert (
        locate_or_extract_text_folder(path)
        == locate_or_extract_text_folder(str(path))
        == locate_or_extract_text_folder(tmp_path)
    )
    assert tokenizer.encode("the 12 things") == load_tokenizer(folders["smollm"]).encode(
        "the 12 things"
    )
    assert quantkit.chat_format(path, tokenizer).encode(
        [{"role": "user", "content": "x"}]
    ) == tokenizer.encode("x")
    again, _ = tokenizer_metadata(path, 300)
    assert again == metadata
    path.write_bytes(build_header({**metadata, "tokenizer.ggml.model": "none"}, []))
    with raises(CheckpointError, path=path):
        load_tokenizer(path)


@pytest.mark.parametrize("kind", ["sentencepiece", "qwen2"])
def test_transformers_reads_the_folder(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(
        _folder(_metadata(folders[kind]), tmp_path / "read")
    )
    ours = load_tokenizer(folders[kind])
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_ids[0])
    for text in TEXTS[:-1]:  # whose spellings transformers always takes for tokens
        assert theirs(text)["input_ids"] == ours.encode(text)


def test_a_sentencepiece_model_is_read_and_written(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from sentencepiece import SentencePieceProcessor

    for kind, prefix in (("sentencepiece", True), ("gemma", False)):
        path = folders[kind] / "tokenizer.model"
        model, theirs = read_sentencepiece(path), SentencePieceProcessor(model_file=str(path))
        assert (model.byte_pair, model.plain, model.space_prefix) == (True, True, prefix)
        assert [piece for piece, _, _ in model.pieces] == [
            theirs.id_to_piece(n) for n in range(len(model.pieces))
        ]
        assert [score for _, score, _ in model.pieces] == [
            theirs.get_score(n) for n in range(len(model.pieces))
        ]
        assert model.ids == {
            "unk": theirs.unk_id(),
            "bos": theirs.bos_id(),
            "eos": theirs.eos_id(),
            "pad": theirs.pad_id(),
        }
        read = _folder(_metadata(folders[kind]), tmp_path / kind)
        written, original = (
            SentencePieceTokenizer(read / "tokenizer.model"),
            SentencePieceTokenizer(path),
        )
        for text in TEXTS:
            assert written.encode(text) == original.encode(text)
    (tmp_path / "tokenizer.model").write_bytes(
        (folders["gemma"] / "tokenizer.model").read_bytes()[:-7]
    )
    with raises(CheckpointError, path=tmp_path / "tokenizer.model"):
        read_sentencepiece(tmp_path / "tokenizer.model")


def test_equal_scores_leave_only_a_sentencepiece_model(folders: dict[str, Path]) -> None:
    metadata = _metadata(folders["sentencepiece"])
    scores = [-1000.0] * len(metadata["tokenizer.ggml.scores"])
    files = build_folder_files({**metadata, "tokenizer.ggml.scores": scores}, Path("model.gguf"))
    assert ("tokenizer.model" in files, "tokenizer.json" in files) == (True, False)


@pytest.mark.parametrize("name", NAMES)
def test_ways_to_cut_texts_are_known_by_what_they_do(name: str) -> None:
    patterns, _ = patterns_by_name(name) or ((), False)
    assert patterns_of(pre_tokenizer(patterns)) == patterns


def test_a_pattern_may_be_spelled_in_other_ways() -> None:
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN.replace(r"\r\n", "\r\n")}}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for way in ({"behavior": "Removed", "invert": True}, {"behavior": "Isolated", "invert": False}):
        steps = {"type": "Sequence", "pretokenizers": [{**split, **way}, letters]}
        assert patterns_of(steps) == (LLAMA3_PATTERN,)
    other = {
        "type": "Sequence",
        "pretokenizers": [{**split, "behavior": "MergedWithNext", "invert": False}, letters],
    }
    assert patterns_of(other) is None


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        (
            "qwen2",
            lambda raw: raw["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
            "pre_tokenizer",
        ),
        (
            "qwen2",
            lambda raw: raw["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="x"),
            "pre_tokenizer",
        ),
        ("qwen2", lambda raw: raw.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        ("qwen2", lambda raw: raw["model"].update(dropout=0.1), "dropout"),
        (
            "sentencepiece-json",
            lambda raw: raw["model"]["merges"].append(["t", "h"]),
            "merges",
        ),
        ("sentencepiece-json", lambda raw: raw["model"]["merges"].pop(), "merges"),
        ("sentencepiece-json", lambda raw: raw.update(normalizer=None), "normalizer"),
    ],
)
def test_what_llama_cpp_does_not_have_is_refused(
    kind: str,
    change: Callable[[dict[str, Any]], object],
    name: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = _edited(folders[kind], tmp_path / "model", change)
    with raises(UnsupportedError, name, path=folder / "tokenizer.json"):
        _metadata(folder)


def test_decoder_steps_that_llama_cpp_lacks_are_a_note(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Lucie's decoder drops the space that its tokenizer puts after each line break; llama.cpp
    keeps it.
    """
    assert not [
        note
        for note in tokenizer_metadata(
            folders["qwen2"], load_tokenizer(folders["qwen2"]).vocab_size
        )[1]
        if "decoder" in note
    ]

    def add_step(raw: dict[str, Any]) -> None:
        replace = {"type": "Replace", "pattern": {"String": "\n "}, "content": "\n"}
        raw["decoder"] = {"type": "Sequence", "decoders": [raw["decoder"], replace]}

    folder = _edited(folders["qwen2"], tmp_path / "model", add_step)
    rows = load_tokenizer(folder).vocab_size
    notes = [note for note in tokenizer_metadata(folder, rows)[1] if "tokenizer's decoder" in note]
    assert len(notes) == 1
    assert notes[0].endswith(": Replace")


def test_tokens_around_text_that_llama_cpp_does_not_add_are_a_note(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """GLM-4 puts two tokens before a text."""

    def add_two(raw: dict[str, Any]) -> None:
        first, second, *_ = raw["added_tokens"]
        pieces = [
            {"SpecialToken": {"id": token["content"], "type_id": 0}} for token in (first, second)
        ]
        single = [*pieces, {"Sequence": {"id": "A", "type_id": 0}}]
        named = {
            token["content"]: {
                "id": token["content"],
                "ids": [token["id"]],
                "tokens": [token["content"]],
            }
            for token in (first, second)
        }
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": named,
        }

    folder = _edited(folders["qwen2"], tmp_path / "model", add_two)
    original = load_tokenizer(folder)
    metadata, notes = tokenizer_metadata(folder, original.vocab_size)
    (note,) = [note for note in notes if "does not add" in note]
    assert END in note
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    read = load_tokenizer(_folder(metadata, tmp_path / "read"))
    assert read.encode("one text") == original.encode("one text")
    assert len(read.encode("one text")) == 2 + len(read.encode("one text", bos=False))


@pytest.mark.parametrize("side", ["before, with a BOS", "after"])
def test_other_tokens_that_llama_cpp_does_not_add_are_refused(
    side: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    def add(raw: dict[str, Any]) -> None:
        first, second, *_ = raw["added_tokens"]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        pieces: list[Any] = [
            {"SpecialToken": {"id": token["content"], "type_id": 0}} for token in (first, second)
        ]
        named = {
            token["content"]: {
                "id": token["content"],
                "ids": [token["id"]],
                "tokens": [token["content"]],
            }
            for token in (first, second)
        }
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [text, *pieces] if side == "after" else [*pieces, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": named,
        }

    folder = _edited(folders["qwen2"], tmp_path / "model", add)
    if side != "after":
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        oracle.edit_json(folder / "tokenizer_config.json", bos_token=added[0]["content"])
    with raises(UnsupportedError, path=folder):
        tokenizer_metadata(folder, load_tokenizer(folder).vocab_size)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_added_tokens_that_hide_others_are_a_note(
    is_normalized: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Only tokens of normalized text are looked for after the others, whatever their length."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}

    def add_tokens(raw: dict[str, Any]) -> None:
        first = 1 + max(token["id"] for token in raw["added_tokens"])
        inner = {"id": first, "content": "<x>", "normalized": False, **flags}
        outer = {"id": first + 1, "content": "a<x>", "normalized": is_normalized, **flags}
        raw["added_tokens"] += [inner, outer]

    folder = _edited(folders["qwen2"], tmp_path / "model", add_tokens)
    tokenizer = load_tokenizer(folder)
    finds_outer = len(tokenizer.encode("a<x>", specials=True)) == 1
    _, notes = tokenizer_metadata(folder, tokenizer.vocab_size)
    assert finds_outer is not is_normalized
    assert bool([note for note in notes if "contains" in note]) is is_normalized


def test_generation_settings_without_a_key_are_a_note(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["qwen2"], tmp_path / "model"))
    (folder / "generation_config.json").write_text(
        json.dumps({"bad_words_ids": [[5]], "suppress_tokens": [5], "repetition_penalty": 1.1})
    )
    _, notes = tokenizer_metadata(folder, load_tokenizer(folder).vocab_size)
    (note,) = [note for note in notes if "generation_config.json" in note]
    assert note.endswith(": bad_words_ids")


def test_tokens_that_are_never_drawn_have_a_key(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["qwen2"], tmp_path / "model"))
    rows = load_tokenizer(folder).vocab_size
    path = folder / "generation_config.json"
    # transformers ignores ids that are not in the vocabulary.
    path.write_text(json.dumps({"suppress_tokens": [7, 5, 7, rows + 3]}))
    metadata, notes = tokenizer_metadata(folder, rows)
    assert metadata["tokenizer.ggml.suppress_tokens"] == [7, 5]
    assert not [note for note in notes if "suppress_tokens" in note]
    read = json.loads(build_folder_files(metadata, folder)["generation_config.json"])
    assert read["suppress_tokens"] == [7, 5]
    for wrong in ([rows], [-1], ["a"], 0.5):
        with raises(CheckpointError, "tokenizer.ggml.suppress_tokens", path=folder):
            build_folder_files({**metadata, "tokenizer.ggml.suppress_tokens": wrong}, folder)
    path.write_text(json.dumps({"suppress_tokens": []}))
    assert "tokenizer.ggml.suppress_tokens" not in tokenizer_metadata(folder, rows)[0]


def test_a_tokenizer_that_splits_special_tokens_is_a_note(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["qwen2"], tmp_path / "model"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "split_special_tokens": True}))
    rows = load_tokenizer(folder).vocab_size
    assert [note for note in tokenizer_metadata(folder, rows)[1] if "split_special_tokens" in note]


@pytest.mark.parametrize(
    "changes", [{"model_type": "unigram"}, {"normalization_rule_name": "nmt_nfkc"}], ids=str
)
def test_sentencepiece_models_of_other_kinds_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with raises(UnsupportedError, path=tmp_path / "model" / "tokenizer.model"):
        _metadata(train(tmp_path / "model", **changes))


def test_more_tokens_than_rows_are_refused(folders: dict[str, Path]) -> None:
    with raises(CheckpointError, path=folders["sentencepiece"], found="400 tokens"):
        tokenizer_metadata(folders["sentencepiece"], 399)


G = "tokenizer.ggml."


# A kind of tokenizer, a key of its metadata, how its value is changed, and what the error names.
CONTRADICTIONS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("sentencepiece", G + "model", lambda _: "bert", "'bert'"),
    ("sentencepiece", G + "model", lambda _: 7, "tokenizer.ggml.model"),
    ("sentencepiece", G + "tokens", lambda value: [*value[:-1], value[5]], "'<0x02>'"),
    ("sentencepiece", G + "tokens", lambda value: value[:-1], "tokenizer.ggml.tokens"),
    ("sentencepiece", G + "tokens", lambda value: [*value[:-1], "x" * 5000], "5000"),
    ("sentencepiece", G + "tokens", lambda value: [*value[:9], "?", *value[10:]], "bytes"),
    ("sentencepiece", G + "tokens", lambda _: [], "tokenizer.ggml.tokens"),
    (
        "sentencepiece",
        G + "token_type",
        lambda value: [*value[:-1], 9],
        "tokenizer.ggml.token_type",
    ),
    ("sentencepiece", G + "scores", lambda value: [*value, 0.0], "tokenizer.ggml.scores"),
    ("sentencepiece", G + "scores", lambda value: [*value[:-1], float("nan")], "finite"),
    ("sentencepiece", G + "scores", lambda _: None, "tokenizer.ggml.scores"),
    ("sentencepiece", G + "eos_token_id", lambda _: 403, "tokenizer.ggml.eos_token_id"),
    ("sentencepiece", G + "add_bos_token", lambda _: 1, "tokenizer.ggml.add_bos_token"),
    ("qwen2", G + "pre", lambda _: "falcon-x", "'falcon-x'"),
    ("qwen2", G + "pre", lambda _: None, "tokenizer.ggml.pre"),
    ("qwen2", G + "merges", lambda value: [*value, "q zz"], "q zz"),
    ("qwen2", G + "merges", lambda value: [*value, "qq"], "qq"),
    ("qwen2", G + "add_bos_token", lambda _: True, "tokenizer.ggml.bos_token_id"),
    ("qwen2", "quantkit.tokenizer_json", lambda _: "[]", "list"),
    ("qwen2", "quantkit.tokenizer_json", lambda _: '{"model": 1}', "'model'"),
    ("qwen2", "quantkit.tokenizer_json", lambda _: '{"added_tokens": {"263": 1}}', "263"),
    ("qwen2", "tokenizer.chat_templates", lambda _: ["../x"], "../x"),
]


def test_metadata_that_contradicts_itself_is_refused(folders: dict[str, Path]) -> None:
    metadata = {kind: _metadata(folders[kind]) for kind in ("sentencepiece", "qwen2")}
    for kind, key, change, name in CONTRADICTIONS:
        changed = {**metadata[kind], key: change(metadata[kind].get(key))}
        with case(kind, key, name):
            with raises((CheckpointError, UnsupportedError), name) as caught:
                build_folder_files(changed, Path("model.gguf"))
            assert str(caught.value.path).startswith("model.gguf")


def test_types_of_pieces_have_ggufs_numbers() -> None:
    names = ["NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE"]
    assert [(kind.name, int(kind)) for kind in PieceType] == [
        (name, n) for n, name in enumerate(names, 1)
    ]
