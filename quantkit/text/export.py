"""Write a ``tokenizer.json`` for tokenizers that came as sentencepiece or tiktoken files.

transformers reads it without further packages. What is written is first compared with the original: every token, the
order of merges, and sample texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.text.compare import first_difference
from quantkit.text.merges import merges_by_rank
from quantkit.text.tiktoken_file import LLAMA3_PATTERN, is_tiktoken, llama3_specials, read_tiktoken
from quantkit.text.token_bytes import spelled_bytes
from quantkit.text.tokenizer import JsonTokenizer, SentencePieceTokenizer, TiktokenTokenizer, Tokenizer


def export_json(path: Path, scratch: Path) -> dict[str, bytes] | None:
    """``tokenizer.json`` and ``tokenizer_config.json`` for a ``tokenizer.model``.

    Args:
        path: a sentencepiece or tiktoken file.
        scratch: an empty folder to try the result in.

    Returns:
        File names with contents; None where the result would not tokenize alike.
    """
    original: Tokenizer
    if is_tiktoken(path):
        original = TiktokenTokenizer(path)
        engine, settings = _from_tiktoken(path)
    else:
        original = SentencePieceTokenizer(path)
        engine, settings = _from_sentencepiece(path)
    files = {
        "tokenizer.json": engine.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
    }
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    written = JsonTokenizer(scratch / "tokenizer.json")
    return files if first_difference(original, written, ()) is None else None


def _from_tiktoken(path: Path) -> tuple[Any, dict[str, Any]]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = read_tiktoken(path)
    spelled = {spelled_bytes(token): rank for token, rank in ranks.items()}
    engine = Tokenizer(models.BPE(vocab=spelled, merges=merges_by_rank(spelled, spelled), ignore_merges=True))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    specials = llama3_specials(len(ranks))
    engine.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return engine, _settings(engine, "<|begin_of_text|>", "<|end_of_text|>", specials)


def _from_sentencepiece(path: Path) -> tuple[Any, dict[str, Any]]:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    model: Any = SentencePieceProcessor(model_file=str(path))
    count: int = model.get_piece_size()
    vocabulary = {model.id_to_piece(i): i for i in range(count)}
    apart = [i for i in range(count) if model.is_control(i) or model.is_unknown(i)]
    order = {
        model.id_to_piece(i): -model.get_score(i)
        for i in range(count)
        if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i) or model.is_unused(i))
    }
    unknown = model.id_to_piece(model.unk_id())
    engine = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_by_rank(order, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens([AddedToken(model.id_to_piece(i), special=True, normalized=False) for i in apart])
    bos = model.id_to_piece(model.bos_id()) if model.bos_id() >= 0 else None
    eos = model.id_to_piece(model.eos_id()) if model.eos_id() >= 0 else None
    settings = _settings(engine, bos, eos, vocabulary)
    settings["unk_token"] = unknown
    return engine, settings


def _settings(engine: Any, bos: str | None, eos: str | None, ids: Mapping[str, int]) -> dict[str, Any]:
    """What transformers needs beside the engine; the BOS goes into the engine itself."""
    from tokenizers import processors

    if bos is not None:
        engine.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids[bos])]
        )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    settings.update({k: v for k, v in (("bos_token", bos), ("eos_token", eos)) if v is not None})
    return settings
