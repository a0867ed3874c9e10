"""Folders with tiny tokenizers, for tests."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from quantkit.data.files import excerpt

TURNS = ("<start_of_turn>", "<end_of_turn>")


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


def train_gemma(folder: Path) -> Path:
    """A folder with a tiny sentencepiece model of Gemma's kind: no space before the text, marks of turns as pieces."""
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    pieces = {"bos_piece": "<bos>", "eos_piece": "<eos>", "user_defined_symbols": [*TURNS]}
    return train(folder, add_dummy_prefix=False, vocab_size=420, **ids, **pieces)


def write_gemma_json(original: Path, folder: Path) -> Path:
    """A folder with the tokenizer.json of the same vocabulary, as transformers writes it for Gemma."""
    from sentencepiece import SentencePieceProcessor
    from transformers import GemmaTokenizer

    folder.mkdir()
    model = SentencePieceProcessor(model_file=str(original / "tokenizer.model"))
    pieces = {model.id_to_piece(index): index for index in range(model.get_piece_size())}
    first = max(index for index in pieces.values() if model.is_byte(index)) + 1
    merges = [
        (piece[:cut], piece[cut:])
        for piece, index in pieces.items()
        if index >= first
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = GemmaTokenizer(vocab=pieces, merges=merges, add_bos_token=True, additional_special_tokens=[*TURNS])
    tokenizer.save_pretrained(folder)
    return folder


def write_tiktoken(folder: Path) -> Path:
    """A folder with a tiny tiktoken file of Llama 3's kind."""
    folder.mkdir()
    merged = [b"th", b"he", b" t", b"in", b"er", b"the", b" the", b"an", b"  ", b"\n\n", "é".encode(), b"\xe6\x97"]
    tokens = [bytes([byte]) for byte in range(256)] + merged
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    return folder
