"""Folders with tiny tokenizers, for tests."""

from __future__ import annotations

import base64
import json
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
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "minloglevel": 2,
        "num_threads": 1,
    }
    SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), **{**options, **changes}
    )
    return folder


def train_gemma(folder: Path) -> Path:
    """A folder with a tiny sentencepiece model of Gemma's kind: no space before the text, marks
    of turns as pieces.
    """
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    pieces = {"bos_piece": "<bos>", "eos_piece": "<eos>", "user_defined_symbols": [*TURNS]}
    return train(folder, add_dummy_prefix=False, vocab_size=420, **ids, **pieces)


def write_gemma_json(original: Path, folder: Path) -> Path:
    """A folder with the tokenizer.json of the same vocabulary, as transformers writes it for
    Gemma.
    """
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
    tokenizer = GemmaTokenizer(
        vocab=pieces, merges=merges, add_bos_token=True, additional_special_tokens=[*TURNS]
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_tiktoken(folder: Path) -> Path:
    """A folder with a tiny tiktoken file of Llama 3's kind."""
    folder.mkdir()
    merged = [
        b"th",
        b"he",
        b" t",
        b"in",
        b"er",
        b"the",
        b" the",
        b"an",
        b"  ",
        b"\n\n",
        "é".encode(),
        b"\xe6\x97",
    ]
    tokens = [bytes([byte]) for byte in range(256)] + merged
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def write_byte_level(
    folder: Path,
    pre_tokenizer: dict[str, Any],
    normalizer: dict[str, Any] | None = None,
    *,
    more: dict[str, bool] | None = None,
) -> Path:
    """A folder with a tiny tokenizer.json that merges bytes, with a special token and one that any
    text may hold; `more` are further tokens, each with whether it is special.
    """
    from quantkit.text.token_bytes import BYTE_LETTERS

    folder.mkdir()
    merges = [
        ["t", "h"],
        ["th", "e"],
        ["i", "n"],
        ["in", "g"],
        ["\u0120", "the"],
        ["1", "2"],
        ["\u010a", "\u010a"],
    ]
    pieces = [*BYTE_LETTERS.values(), *("".join(pair) for pair in merges)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [("<s>", True), ("<|im_end|>", True), ("<tool>", False), *(more or {}).items()]
    raw = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": normalizer,
        "added_tokens": [
            {"id": len(pieces) + n, "content": token, "special": special, **plain}
            for n, (token, special) in enumerate(added)
        ],
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {piece: n for n, piece in enumerate(pieces)},
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    settings = {"bos_token": "<s>" if normalizer is None else None, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
