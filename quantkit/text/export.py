"""Write a ``tokenizer.json`` for tokenizers that came as sentencepiece or tiktoken files.

transformers reads it without further packages. It is first compared with the original: every token, the order of
merges, and sample texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.text.compare import first_difference
from quantkit.text.folder_vocabulary import FoundTokenizer, sentencepiece_vocabulary, tiktoken_vocabulary
from quantkit.text.gguf_tokenizer import tokenizer_json
from quantkit.text.gguf_vocabulary import BPE
from quantkit.text.sentencepiece_file import PieceType, read_sentencepiece
from quantkit.text.tiktoken_file import is_tiktoken
from quantkit.text.tokenizer import JsonTokenizer, original_tokenizer


def export_json(path: Path, scratch: Path) -> dict[str, bytes] | None:
    """``tokenizer.json`` and ``tokenizer_config.json`` for a ``tokenizer.model``.

    Args:
        path: a sentencepiece or tiktoken file.
        scratch: an empty folder for the comparison.

    Returns:
        Contents by file name; None if the result would not tokenize in the same way.
    """
    from tokenizers import Tokenizer as Engine

    original = original_tokenizer(path)
    found = _exportable(path)
    if found is None:
        return None
    ids = {name: number for name, number in found.ids.items() if name != "pad_token"}
    raw = tokenizer_json(found.vocabulary, ids, (original.bos_id is not None, False))
    if found.vocabulary.model == BPE:  # special tokens follow the vocabulary
        for token in raw["added_tokens"]:
            del raw["model"]["vocab"][token["content"]]
    files = {
        "tokenizer.json": str(Engine.from_str(json.dumps(raw)).to_str()).encode(),
        "tokenizer_config.json": json.dumps(_settings(found, ids), indent=2).encode() + b"\n",
    }
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    written = JsonTokenizer(scratch / "tokenizer.json")
    return files if first_difference(original, written, ()) is None else None


def _exportable(path: Path) -> FoundTokenizer | None:
    """The vocabulary of a file, unless it is a sentencepiece model of a kind that is not exported."""
    if is_tiktoken(path):
        return tiktoken_vocabulary(path)
    model = read_sentencepiece(path)
    added = any(kind is PieceType.USER_DEFINED for _, _, kind in model.pieces)
    usual = model.byte_pair and model.plain and model.space_prefix and not added
    return sentencepiece_vocabulary(model) if usual else None


def _settings(found: FoundTokenizer, ids: dict[str, int]) -> dict[str, Any]:
    names = ("bos_token", "eos_token", "unk_token")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: found.vocabulary.tokens[ids[name]] for name in names if name in ids},
    }
