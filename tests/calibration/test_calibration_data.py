"""Calibration text from files, and how samples are drawn from it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from error_parts import raises
from paths import ROOT
from torch import Tensor

from quantkit.calibration import data
from quantkit.calibration.data import load_calibration
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import RequestError
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

DOCUMENTS = [part for part in excerpt().split("\n") if part]
TEXT = "\n\n".join(DOCUMENTS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def _naive(text: str, tokenizer: Tokenizer, samples: int, length: int, seed: int) -> Tensor:
    """The draw, one sample at a time."""
    ids = tokenizer.encode(text)
    lead = [i for i in ids[:1] if i == tokenizer.bos_id]
    size = length - len(lead)
    places = len(ids) - len(lead) - size + 1
    starts = torch.randint(
        places, (samples,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return torch.tensor([lead + ids[len(lead) :][start : start + size] for start in starts])


def _write_table(path: Path, **columns: list[object]) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path, row_group_size=100)
    return path


def _json_tokenizer(folder: Path, settings: dict[str, object], **sections: object) -> Tokenizer:
    """A tokenizer of words, with `sections` in its ``tokenizer.json`` beside the vocabulary."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Engine

    words = {
        word: number for number, word in enumerate(["<s>", "<pad>", *sorted(set(TEXT.split()))])
    }
    engine = Engine(models.WordLevel(words, unk_token="<s>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<pad>", special=True)])
    (folder / "tokenizer.json").write_text(json.dumps({**json.loads(engine.to_str()), **sections}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def test_samples_begin_with_bos_and_are_windows_of_the_text(
    text: Path, tokenizer: Tokenizer
) -> None:
    found = load_calibration(text, tokenizer, samples=10, length=64, seed=1)
    assert torch.equal(found.tokens, _naive(TEXT, tokenizer, 10, 64, 1))
    assert found.to_json() == {
        "sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        "samples": 10,
        "length": 64,
        "seed": 1,
    }


def test_the_seed_decides_and_the_callers_random_numbers_stay(
    text: Path, tokenizer: Tokenizer
) -> None:
    state = torch.get_rng_state()
    first, again, other = (
        load_calibration(text, tokenizer, samples=8, length=32, seed=s).tokens for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_may_be_the_whole_text(text: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    found = load_calibration(str(text), tokenizer, samples=2, length=len(ids), seed=0)
    assert found.tokens.tolist() == [ids, ids]


@pytest.mark.parametrize("leads", [True, False])
def test_bos_leads_only_where_the_tokenizer_puts_it(
    leads: bool, text: Path, tmp_path: Path
) -> None:
    tokenizer = _json_tokenizer(tmp_path, {"bos_token": "<s>", "add_bos_token": leads})
    tokens = load_calibration(text, tokenizer, samples=20, length=16, seed=0).tokens
    assert tokenizer.bos_id == 0
    assert (tokens[:, 0] == tokenizer.bos_id).all() == leads
    assert torch.equal(tokens, _naive(TEXT, tokenizer, 20, 16, 0))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_lines_give_what_their_text_gives(
    suffix: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_text(
        "\n".join(json.dumps({"id": 7, "text": document}) + "\n" for document in DOCUMENTS)
    )
    found = load_calibration(path, tokenizer, samples=4, length=100, seed=0)
    assert torch.equal(found.tokens, _naive(TEXT, tokenizer, 4, 100, 0))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_parquet_gives_what_its_text_gives(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write_table(tmp_path / "a [1] *.parquet", n=[1] * len(DOCUMENTS), text=list(DOCUMENTS))
    found = load_calibration(path, tokenizer, samples=4, length=100, seed=0)
    assert torch.equal(found.tokens, _naive(TEXT, tokenizer, 4, 100, 0))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_pipe_is_read(tokenizer: Tokenizer) -> None:
    readable, writable = os.pipe()
    os.write(writable, TEXT.encode())
    os.close(writable)
    found = load_calibration(f"/dev/fd/{readable}", tokenizer, samples=4, length=100, seed=0)
    os.close(readable)
    assert torch.equal(found.tokens, _naive(TEXT, tokenizer, 4, 100, 0))
    assert found.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_of_a_long_text_only_the_first_part_is_read(
    suffix: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, part = tmp_path / f"text{suffix}", "Größe und Maß. " * 20
    whole = "\n\n".join([part] * 60)
    if suffix == ".txt":
        path.write_text(whole)
    elif suffix == ".jsonl":
        path.write_text((json.dumps({"text": part}) + "\n") * 60 + "no JSON, and not looked at")
    else:
        _write_table(path, text=[part] * 60)
    letter = whole.encode().index("ß".encode(), 1000)
    monkeypatch.setattr(data, "MIN_BYTES", letter + 1)  # half of it
    for samples, end in ((2, letter), (12, 16 * 12 * 10)):
        found = load_calibration(path, tokenizer, samples=samples, length=10, seed=0)
        expected = whole.encode()[:end].decode(errors="ignore")
        assert torch.equal(found.tokens, _naive(expected, tokenizer, samples, 10, 0))
        assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_of_a_long_text_only_the_samples_are_tokenized(
    text: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_WHOLE_LENGTH", 1000)
    taken, encode = [], type(tokenizer).encode

    def watched(self: Tokenizer, piece: str, **given: bool) -> list[int]:
        taken.append(piece)
        return encode(self, piece, **given)

    monkeypatch.setattr(type(tokenizer), "encode", watched)
    first, again = (
        load_calibration(text, tokenizer, samples=6, length=50, seed=3).tokens for _ in range(2)
    )
    assert torch.equal(first, again)
    assert first.shape == (6, 50)
    assert (first[:, 0] == tokenizer.bos_id).all()
    assert (first[:, 1:] != tokenizer.bos_id).all()
    assert (
        len([piece for piece in taken if len(piece) > 1]) == 12
    )  # "a" shows what a prompt begins with
    assert max(map(len, taken)) <= 8 * 50
    for row in first.tolist():
        words = tokenizer.decode(row).split()
        assert " ".join(words[:-1]) in " ".join(TEXT.split())
        assert words[0] in TEXT.split()  # whole words only


def test_pieces_of_too_few_tokens_mean_the_whole_text_is_tokenized(
    text: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_WHOLE_LENGTH", 100)
    monkeypatch.setattr(data, "CHARACTERS_PER_TOKEN", 1)
    assert load_calibration(text, tokenizer, samples=3, length=60, seed=0).tokens.shape == (3, 60)


@pytest.mark.slow
def test_a_large_text_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(TEXT.encode() * (2**20 // len(TEXT)))
    code = (
        "import re\n"
        "from pathlib import Path\n"
        "from quantkit.calibration.data import load_calibration\n"
        "from quantkit.text.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(DEMO_MODEL)!r})\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)',"
        " Path('/proc/self/status').read_text())[1])\n"
        "before = peak()\n"
        f"load_calibration({str(path)!r}, tokenizer, samples=4, length=100, seed=0)\n"
        "assert peak() - before < 350 * 2**10\n"  # KiB
    )
    subprocess.run([sys.executable, "-c", code], check=True)


UNUSABLE_TEXTS: list[tuple[str, bytes | None, list[str]]] = [
    ("text.txt", None, ["No such file"]),
    ("folder", b"", ["folder", "Dataset.save_to_disk"]),
    ("text.txt", b"", ["empty"]),
    ("text.txt", b" \n\n ", ["empty"]),
    ("text.jsonl", b"\n", ["empty"]),
    ("text.txt", b"too short", ["expected 99"]),
    ("text.txt", b"\xff\xfe\x00", ["expected UTF-8"]),
    ("text.txt", b"cut off \xc3", ["expected UTF-8"]),
    ("text.json", b'{"text": "a"}\n[{"text": "b"}]', ["line 2", "expected JSON lines"]),
    ("text.json", b'{"text": "a"}\n\n{"text": ', ["line 3", "expected JSON lines"]),
    ("text.json", b'[\n{"text": "a"}\n]', ["jq -c '.[]'"]),
    ("text.jsonl", b'{"text": ' + b"[" * 100_000, ["line 1"]),
    ("text.jsonl", b'{"text": "\xff"}', ["line 1"]),
    ("text.jsonl", b'{"text": "\\ud800"}', ["surrogates"]),
    ("text.jsonl", b'{"text": "a"}\n{"text": 3}', ["line 2", "type int"]),
    ("text.jsonl", b'{"title": "a", "body": "b"}', ["found title, body, expected text"]),
    ("text.jsonl", b"{}", ["found nothing, expected text"]),
    ("text.parquet", b"<!doctype html>", ["expected Parquet"]),
    ("text.parquet", b"PAR1 and nothing more PAR1", ["expected Parquet"]),
]
"""The name of a file, its content, and what the error names."""


def test_unusable_text_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for number, (name, content, names) in enumerate(UNUSABLE_TEXTS):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        if name == "folder":
            path.mkdir()
        elif content is not None:
            path.write_bytes(content)
        with raises(RequestError, *names, path=path):
            load_calibration(str(path), tokenizer, samples=4, length=100, seed=0)


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"title": ["a"], "body": ["b"]}, ["found title, body, expected text"]),
        ({"text": [1, 2]}, ["row 1", "type int"]),
        ({"text": [["a"]]}, ["row 1", "type list"]),
        ({"text": [None]}, ["empty"]),
    ],
)
def test_a_table_without_text_is_named(
    columns: dict[str, list[object]], names: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = _write_table(tmp_path / "text.parquet", **columns)
    with raises(RequestError, *names, path=path):
        load_calibration(path, tokenizer, samples=4, length=100, seed=0)


@pytest.mark.parametrize(("samples", "length"), [(0, 100), (4, 1)])
def test_no_samples_make_no_sense(
    samples: int, length: int, text: Path, tokenizer: Tokenizer
) -> None:
    with raises(RequestError, found=f"{samples} of {length}"):
        load_calibration(text, tokenizer, samples=samples, length=length, seed=0)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_more_samples_than_the_text_can_give_are_refused_at_once(
    suffix: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_text('{"text": "a few words of text"}\n')
    with raises(RequestError, path=path, found="1000000 samples", options=["samples"]):
        load_calibration(path, tokenizer, samples=10**6, length=4, seed=0)


def test_what_cannot_be_drawn_is_refused_without_drawing(
    text: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    data.require_calibration(text, tokenizer, samples=3, length=8, seed=0)
    few = tmp_path / "few.txt"
    few.write_text("a few words of text")
    with raises(RequestError, path=few, expected=799):
        data.require_calibration(few, tokenizer, samples=3, length=800, seed=0)


@pytest.mark.slow
def test_local_text_needs_none_of_the_hubs_libraries(text: Path) -> None:
    code = (
        "import sys\nfrom quantkit.calibration.data import load_calibration\nfrom"
        f" quantkit.text.tokenizer import load_tokenizer\nload_calibration({str(text)!r},"
        f" load_tokenizer({str(DEMO_MODEL)!r}), samples=1, length=9, seed=0)\nassert not"
        " {'datasets', 'huggingface_hub', 'pyarrow', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bounds_in_the_docs_are_those_of_the_code() -> None:
    page = (ROOT / "docs/calibration.md").read_text()
    assert f"{data.BYTES_PER_TOKEN} bytes for every token" in page
    assert f"{data.MIN_BYTES // 2**20} MiB" in page


@pytest.mark.parametrize("check", [load_calibration, data.require_calibration])
@pytest.mark.parametrize(("samples", "length"), [(128, 128), (128, 8), (5, 128)])
def test_a_text_that_is_too_short_for_the_samples_is_an_error(
    check: Any, samples: int, length: int
) -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    text = excerpt()[:2000]
    ids = tokenizer.encode(text, bos=False)
    text = tokenizer.decode(ids[:130])
    num_tokens = len(tokenizer.encode(text, bos=False))
    with pytest.raises(RequestError) as caught:
        check([text], tokenizer, samples=samples, length=length, seed=0)
    assert f"{num_tokens} tokens" in str(caught.value.found)
    assert f"{-(-samples * length // 4)} tokens" in str(caught.value.expected)
    (fitting,) = re.findall(r"`samples=(\d+)`", str(caught.value.hint))
    check([text], tokenizer, samples=int(fitting), length=length, seed=0)


def test_a_long_text_is_too_short_for_more_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_WHOLE_LENGTH", 4000)
    tokenizer = load_tokenizer(DEMO_MODEL)
    for check in (load_calibration, data.require_calibration):
        check([excerpt()], tokenizer, samples=8, length=64, seed=0)
        with raises(RequestError, options=["samples"]) as caught:
            check([excerpt()], tokenizer, samples=4000, length=64, seed=0)
        assert "64000 tokens" in str(caught.value.expected)
