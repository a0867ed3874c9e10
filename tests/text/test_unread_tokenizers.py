"""Tokenizers in files that are not read: refused by name, with a command that makes a
tokenizer.json.
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
from command import Capture, run
from error_parts import raises
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import quantkit
from quantkit.data.files import excerpt
from quantkit.errors import UnsupportedError
from quantkit.text.tokenizer import load_tokenizer

TEXT = "Fellow citizens, 1234 years ago.  It's GREAT\n"


def _write_vocab_and_merges(folder: Path) -> None:
    """Write a small byte-level tokenizer of Qwen's class as vocab.json and merges.txt."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator([excerpt()[:20000]], trainer)
    model = json.loads(engine.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_tekken(folder: Path) -> None:
    """Write a small tokenizer of Mistral's format."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll"]
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + len(specials),
        "default_num_special_tokens": len(specials),
        "version": "v3",
    }
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    controls = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(specials)
    ]
    raw = {"config": config, "vocab": vocabulary, "special_tokens": controls}
    (folder / "tekken.json").write_text(json.dumps(raw))


def _run_advised_command(error: UnsupportedError) -> None:
    """Run the command of the error's hint with this Python."""
    assert error.hint is not None
    words = shlex.split(error.hint[error.hint.index("python -c") :])
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)


@pytest.mark.slow
def test_the_advised_command_makes_the_tokenizer_that_transformers_has(tmp_path: Path) -> None:
    _write_vocab_and_merges(tmp_path)
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    with raises(UnsupportedError, "vocab.json", path=tmp_path) as caught:
        load_tokenizer(tmp_path)
    _run_advised_command(caught.value)
    assert (
        load_tokenizer(tmp_path).encode(TEXT, bos=False)
        == reference(TEXT, add_special_tokens=False)["input_ids"]
    )


@pytest.mark.slow
def test_the_advised_command_reads_tekken(tmp_path: Path) -> None:
    _write_tekken(tmp_path)
    with raises(UnsupportedError, path=tmp_path, found="tekken.json") as caught:
        load_tokenizer(tmp_path)
    _run_advised_command(caught.value)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT, bos=False)) == TEXT


@pytest.mark.parametrize("job", ["convert", "quantize", "inspect"])
def test_jobs_refuse_a_tokenizer_that_is_not_read(job: str, tmp_path: Path, capfd: Capture) -> None:
    source = tmp_path / "model"
    oracle.save(oracle.make("qwen2", vocab_size=512), source)
    _write_vocab_and_merges(source)
    output = [] if job == "inspect" else [tmp_path / "out"]
    scheme = ["--scheme", "int8"] if job == "quantize" else []
    code, _, err = run(capfd, job, source, *output, *scheme)
    assert code == UnsupportedError.exit_code
    assert str(source) in err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_any_tokenizer_is_converted_with_a_note(tmp_path: Path) -> None:
    source = tmp_path / "model"
    oracle.save(oracle.make("qwen2", vocab_size=512), source)
    converted = quantkit.convert(source, tmp_path / "out")
    assert any("tokenizer" in note for note in converted.notes)
