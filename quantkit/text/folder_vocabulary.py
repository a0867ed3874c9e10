"""A folder's tokenizer, of any kind, as the vocabulary that llama.cpp reads from GGUF's
metadata.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from quantkit.base.json_values import Settings, format_value, read_json
from quantkit.errors import UnsupportedError
from quantkit.text import gguf_vocabulary as keys
from quantkit.text import pipeline
from quantkit.text.gguf_tokenizer import PIPELINE_PARTS, TOKEN_FLAGS, run_merges
from quantkit.text.gguf_vocabulary import Vocabulary
from quantkit.text.merges import merges_by_rank, merges_make_all, pairs_of, ranks_of_merges
from quantkit.text.sentencepiece_file import PieceType, SentencePieceFile, read_sentencepiece
from quantkit.text.special_tokens import (
    fixes_mistral_regex,
    read_added_tokens,
    read_tokenizer_config,
    special_tokens,
)
from quantkit.text.stated_tokens import missing_added_tokens
from quantkit.text.tiktoken_file import LLAMA3_PATTERN, is_tiktoken, llama3_specials, read_tiktoken
from quantkit.text.token_bytes import spell_bytes

UNREACHED = -1000.0
"""The score of tokens that merges do not result in, as llama.cpp's converter writes it."""

# Letters; all substrings of a token are tried.
_LONGEST_COMPARED = 128


@dataclass
class FoundTokenizer:
    """A folder's tokenizer.

    Attributes:
        ids: of special tokens that only the tokenizer's own file states, by transformers' names.
        pipeline: the parts of a tokenizer.json; empty without such a file.
        ignore_merges: its setting of that name.
        run_merges: its merges that result in runs of U+2581, which GGUF spells with spaces, see
            `run_merges`.
        notes: what llama.cpp does differently.
    """

    vocabulary: Vocabulary
    ids: dict[str, int] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    ignore_merges: bool = False
    run_merges: list[list[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_folder_vocabulary(folder: Path) -> FoundTokenizer:
    """Return the tokenizer that `load_tokenizer` loads from a folder. Raises `CheckpointError` if a
    file is damaged, `UnsupportedError` for a tokenizer that llama.cpp does not have.
    """
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder)
    path = folder / "tokenizer.model"
    if is_tiktoken(path):
        return read_tiktoken_vocabulary(path)
    model = read_sentencepiece(path)
    if not model.byte_pair or not model.plain:
        if model.byte_pair:
            what = "that changes text"
        else:
            what = "of another algorithm"
        _refuse(path, f"a sentencepiece model {what}")
    _require_bytes({spelling for spelling, _, _ in model.pieces}, path)
    return read_sentencepiece_vocabulary(model, read_added_tokens(folder))


def read_tiktoken_vocabulary(path: Path) -> FoundTokenizer:
    """Return the tokenizer of a tiktoken file; raises `CheckpointError` if the file is damaged."""
    ranks = {spell_bytes(token): rank for token, rank in read_tiktoken(path).items()}
    specials = llama3_specials(len(ranks))
    tokens = [*sorted(ranks, key=lambda token: ranks[token]), *specials]
    types = [PieceType.NORMAL] * len(ranks) + [PieceType.CONTROL] * len(specials)
    pre = pipeline.names_of((LLAMA3_PATTERN,), has_bos=True)[True]
    vocabulary = Vocabulary(keys.BPE, tokens, types, [], merges_by_rank(ranks, ranks), pre, False)
    ids = {"bos_token": specials["<|begin_of_text|>"], "eos_token": specials["<|end_of_text|>"]}
    return FoundTokenizer(vocabulary, ids)


def read_sentencepiece_vocabulary(
    model: SentencePieceFile, added: Collection[tuple[int, str, bool]] = ()
) -> FoundTokenizer:
    """Return the tokenizer of a sentencepiece model that merges pairs, with `added_tokens`."""
    pieces = [
        (_as_in_text(spelling) if kind is PieceType.USER_DEFINED else spelling, score, kind)
        for spelling, score, kind in model.pieces
    ]
    for number, spelling, special in added:
        if number < len(pieces):
            continue
        pieces += [
            (keys.filler(row), UNREACHED, PieceType.UNUSED) for row in range(len(pieces), number)
        ]
        pieces.append(
            (spelling, UNREACHED, PieceType.CONTROL if special else PieceType.USER_DEFINED)
        )
    tokens, scores, types = zip(*pieces, strict=True)
    ids = {f"{name}_token": number for name, number in model.ids.items() if number >= 0}
    return FoundTokenizer(
        Vocabulary(keys.SPM, tokens, types, scores, [], "", model.space_prefix), ids
    )


def exportable_vocabulary(path: Path) -> FoundTokenizer | None:
    """Return the vocabulary of a file, unless it is a sentencepiece model of a kind that is not
    exported.
    """
    if is_tiktoken(path):
        return read_tiktoken_vocabulary(path)
    model = read_sentencepiece(path)
    added = any(kind is PieceType.USER_DEFINED for _, _, kind in model.pieces)
    usual = model.byte_pair and model.plain and model.space_prefix and not added
    if usual:
        return read_sentencepiece_vocabulary(model)
    return None


def _from_json(folder: Path) -> FoundTokenizer:
    path = folder / "tokenizer.json"
    raw = read_json(path)
    model = Settings(raw, path).inside("model")
    other = []
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.values.get(name):
            other.append(name)
    if model.values.get("type") != "BPE" or other:
        _refuse(
            path,
            f"a tokenizer of type {format_value(model.values.get('type'))}"
            + (f" with {other[0]}" if other else ""),
        )
    vocabulary: dict[str, int] = dict(model.inside("vocab").values)
    listed: list[dict[str, Any]] = raw.get("added_tokens") or []
    missing = missing_added_tokens(folder, listed, lambda: vocabulary)
    replaced = {token["id"] for token in missing}
    added = [token for token in listed if token["id"] not in replaced] + missing
    by_number = {number: token for token, number in vocabulary.items()} | {
        one["id"]: one["content"] for one in added
    }
    tokens = []
    for number in range(max(by_number, default=-1) + 1):
        tokens.append(by_number.get(number, keys.filler(number)))
    merges = pairs_of(model.values.get("merges", []))
    types = []
    for number in range(len(tokens)):
        types.append(PieceType.NORMAL if number in by_number else PieceType.UNUSED)
    for one in added:
        types[one["id"]] = PieceType.CONTROL if one["special"] else PieceType.USER_DEFINED
    parts = {part: raw.get(part) for part in PIPELINE_PARTS}
    if fixes_mistral_regex(folder, len(by_number)):
        parts["pre_tokenizer"] = pipeline.with_mistral_regex(parts["pre_tokenizer"])
    flags = {
        str(one["id"]): {flag: True for flag in TOKEN_FLAGS if one.get(flag)}
        for one in added
        if any(one.get(flag) for flag in TOKEN_FLAGS)
    }
    found = FoundTokenizer(
        Vocabulary(keys.BPE, tokens, types, [], merges, "", False), pipeline={**parts}
    )
    if flags:
        found.pipeline["added_tokens"] = flags
    if any({"lstrip", "rstrip"} & set(flag) for flag in flags.values()):
        found.notes.append(
            "llama.cpp keeps whitespace next to special tokens that the tokenizer drops"
        )
    if any("single_word" in flag for flag in flags.values()):
        found.notes.append(
            "llama.cpp finds added tokens inside words, where the tokenizer does not"
        )
    if _has_hidden_tokens(added):
        found.notes.append(
            "llama.cpp finds an added token that contains another, where the tokenizer finds the"
            " contained one"
        )
    if read_tokenizer_config(folder).flag("split_special_tokens", False):
        found.notes.append(
            "llama.cpp finds special tokens in text, which the tokenizer splits"
            " (split_special_tokens)"
        )
    if kinds := pipeline.text_changing_steps(parts["decoder"]):
        found.notes.append(
            "llama.cpp restores text without these steps of the tokenizer's decoder:"
            f" {', '.join(kinds)}"
        )
    found.ignore_merges = model.flag("ignore_merges", False)
    if model.flag("byte_fallback", False):
        return _to_scored(found, model.values.get("unk_token"), vocabulary, path)
    return _to_byte_level(found, vocabulary, folder)


def _has_hidden_tokens(added: Collection[Mapping[str, Any]]) -> bool:
    """Return whether an added token of normalized text contains one of text as it is.

    The tokenizers library looks for the latter first, so it never finds the former. llama.cpp looks
    for longer tokens first.
    """
    plain = {token["content"] for token in added if not token.get("normalized", True)} - {""}
    for token in added:
        spelling = token["content"]
        if not token.get("normalized", True) or len(spelling) > _LONGEST_COMPARED:
            continue
        for start in range(len(spelling)):
            for stop in range(start + 1, len(spelling) + 1):
                if spelling[start:stop] in plain and stop - start < len(spelling):
                    return True
    return False


def _to_byte_level(
    tokenizer: FoundTokenizer, vocabulary: Mapping[str, int], folder: Path
) -> FoundTokenizer:
    """Return a byte-level tokenizer, with llama.cpp's name for its patterns."""
    path = folder / "tokenizer.json"
    normalizer = tokenizer.pipeline["normalizer"]
    if isinstance(normalizer, dict):
        steps = normalizer.get("normalizers", [normalizer])
    else:
        steps = []
    if any(step.get("type") != "NFC" for step in steps):
        _refuse(path, f"a normalizer of type {format_value(normalizer.get('type'))}")
    if steps:
        tokenizer.notes.append("llama.cpp does not normalize text to NFC as the tokenizer does")
    patterns = pipeline.patterns_of(tokenizer.pipeline["pre_tokenizer"])
    has_bos = special_tokens(folder, vocabulary, ("bos_token",)).get("bos_token") is not None
    if patterns is not None:
        names = pipeline.names_of(patterns, has_bos=has_bos)
    else:
        names = {}
    name = names.get(tokenizer.ignore_merges)
    if name is None and names:
        normal = (
            tokenizer.vocabulary.tokens[number]
            for number in tokenizer.vocabulary.tokens_of(PieceType.NORMAL)
        )
        if merges_make_all(normal, vocabulary, tokenizer.vocabulary.merges):
            (name,) = names.values()
    if name is None:
        what = f"ignore_merges {str(tokenizer.ignore_merges).lower()} with its pre_tokenizer"
        _refuse(path, what if names else "a pre_tokenizer")
    if name in pipeline.SIMPLER:
        tokenizer.notes.append(
            "llama.cpp splits words with non-ASCII capitals or marks differently"
        )
    tokenizer.vocabulary = replace(tokenizer.vocabulary, pre=name)
    return tokenizer


def _to_scored(
    tokenizer: FoundTokenizer, unknown: Any, vocabulary: Mapping[str, int], path: Path
) -> FoundTokenizer:
    """Return a tokenizer like sentencepiece's, whose list of pairs becomes scores."""
    _require_bytes(vocabulary, path)
    splitter = tokenizer.pipeline["pre_tokenizer"]
    normalizer = tokenizer.pipeline["normalizer"]
    if isinstance(splitter, dict) and splitter.get("type") == "Metaspace":
        scheme = splitter.get("prepend_scheme", "always")
        known = splitter.get("replacement") == pipeline.SPACE and splitter.get("split") is False
        known = known and normalizer in (None, pipeline.REPLACE_SPACES)
        prefix = scheme != "never"
        if prefix:
            if scheme == "first":
                where = "all of it"
            else:
                where = "pieces that do not begin with one"
            tokenizer.notes.append(
                "llama.cpp adds a space before each piece of text between special tokens, the"
                f" tokenizer before {where}"
            )
    else:
        prefix = normalizer == {
            "type": "Sequence",
            "normalizers": [pipeline.PREPEND_SPACE, pipeline.REPLACE_SPACES],
        }
        known = (prefix or normalizer == pipeline.REPLACE_SPACES) and splitter in (
            None,
            pipeline.SPLIT_AT_SPACES,
        )
    if not known:
        _refuse(path, "a tokenizer like sentencepiece's with another normalizer or pre_tokenizer")
    old = tokenizer.vocabulary
    apart = {
        token
        for token, kind in zip(old.tokens, old.types, strict=True)
        if kind is not PieceType.NORMAL
    }
    ranks = ranks_of_merges(old.merges, vocabulary, apart)
    if ranks is None:
        _refuse(path, "a tokenizer whose merges have no equivalent scores")
    tokens = list(old.tokens)
    types = list(old.types)
    scores = []
    for number, (token, kind) in enumerate(zip(old.tokens, old.types, strict=True)):
        if token == unknown:
            types[number] = PieceType.UNKNOWN
        elif kind is PieceType.NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[number] = PieceType.BYTE
        score = 0.0
        if types[number] is PieceType.USER_DEFINED:
            tokens[number], score = _as_in_text(token), UNREACHED
        elif types[number] is PieceType.NORMAL:
            score = float(-ranks.get(token, len(ranks) + number))
        scores.append(score)
    scores = _original_scores(path.with_name("tokenizer.model"), old.tokens, ranks) or scores
    if any(
        kind is PieceType.USER_DEFINED and not token.strip(" ")
        for token, kind in zip(tokens, types, strict=True)
    ):
        tokenizer.run_merges = run_merges(
            old.merges, {token for token in apart if token.strip(pipeline.SPACE)}
        )
    tokenizer.vocabulary = Vocabulary(keys.SPM, tokens, types, scores, [], "", prefix)
    return tokenizer


def _as_in_text(token: str) -> str:
    """Return an added token as llama.cpp looks for it: before it replaces spaces by U+2581."""
    return token.replace(pipeline.SPACE, " ")


def _original_scores(
    path: Path, tokens: Sequence[str], ranks: Mapping[str, int]
) -> list[float] | None:
    """Return the scores of the sentencepiece model that a tokenizer.json was made from, if it is
    next to it.
    """
    if not path.is_file() or is_tiktoken(path):
        return None
    pieces = read_sentencepiece(path).pieces
    if [spelling for spelling, _, _ in pieces] != list(tokens[: len(pieces)]):
        return None
    scores = {spelling: score for spelling, score, _ in pieces}
    merged = [scores.get(piece, UNREACHED) for piece in ranks]
    if any(first <= second for first, second in itertools.pairwise(merged)):
        return None
    return [scores.get(token, UNREACHED) for token in tokens]


def _require_bytes(tokens: Collection[str], path: Path) -> None:
    if any(f"<0x{byte:02X}>" not in tokens for byte in range(256)):
        _refuse(path, "a tokenizer like sentencepiece's without tokens for all bytes")


def _refuse(path: Path, feature: str) -> NoReturn:
    raise UnsupportedError(
        f"llama.cpp does not have {feature}", path=path, hint="write another format"
    )
