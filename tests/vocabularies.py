"""Folders with tiny tokenizers, for tests."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from quantkit.data.files import excerpt


def train(folder: Path, text: str | None = None, **changes: Any) -> Path:
    """A folder with a tiny byte-pair sentencepiece model of Llama 2's kind."""
    from sentencepiece import SentencePieceTrainer

    folder.mkdir()
    corpus = folder / "corpus.txt"
    corpus.write_text(text or excerpt(), encoding="utf-8")
    options = {
        "model_type": "bpe", "vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "unk_id": 0, "bos_id": 1, "eos_id": 2, "minloglevel": 2, "num_threads": 1,
    }  # fmt: skip
    SentencePieceTrainer.train(input=str(corpus), model_prefix=str(folder / "tokenizer"), **{**options, **changes})
    return folder


def write_tiktoken(folder: Path) -> Path:
    """A folder with a tiny tiktoken file of Llama 3's kind."""
    folder.mkdir()
    merged = [b"th", b"he", b" t", b"in", b"er", b"the", b" the", b"an", b"  ", b"\n\n", "é".encode(), b"\xe6\x97"]
    tokens = [bytes([byte]) for byte in range(256)] + merged
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    return folder
