"""Convert a folder's tokenizer, of any kind, to the vocabulary that llama.cpp reads from GGUF's
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

# In letters. All substrings of a token are tried, whose number grows with the square of its length.
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
    """Read the tokenizer that `load_tokenizer` loads from a folder. Raises `CheckpointError` if a
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
            reason = "that changes text"
        else:
            reason = "of another algorithm"
        _refuse(path, f"a sentencepiece model {reason}")
    _require_bytes({spelling for spelling, _, _ in model.pieces}, path)
    return read_sentencepiece_vocabulary(model, read_added_tokens(folder))


def read_tiktoken_vocabulary(path: Path) -> FoundTokenizer:
    """Read the tokenizer of a tiktoken file; raises `CheckpointError` if the file is damaged."""
    ranks = {spell_bytes(token): rank for token, rank in read_tiktoken(path).items()}
    specials = llama3_specials(len(ranks))
    tokens = [*sorted(ranks, key=lambda token: ranks[token]), *specials]
    types = [PieceType.NORMAL] * len(ranks) + [PieceType.CONTROL] * len(specials)
    pre = pipeline.names_of((LLAMA3_PATTERN,), has_bos=True)[True]
    vocabulary = Vocabulary(
        model=keys.BPE,
        tokens=tokens,
        types=types,
        scores=[],
        merges=merges_by_rank(ranks, ranks),
        pre=pre,
        space_prefix=False,
    )
    ids = {"bos_token": specials["<|begin_of_text|>"], "eos_token": specials["<|end_of_text|>"]}
    return FoundTokenizer(vocabulary, ids)


def read_sentencepiece_vocabulary(
    model: SentencePieceFile, added: Collection[tuple[int, str, bool]] = ()
) -> FoundTokenizer:
    """Convert a sentencepiece model that merges pairs, with the tokens that files next to it add,
    see `read_added_tokens`.
    """
    tokens: list[str] = []
    scores: list[float] = []
    types: list[PieceType] = []
    for spelling, score, kind in model.pieces:
        if kind is PieceType.USER_DEFINED:
            spelling = _as_in_text(spelling)
        tokens.append(spelling)
        scores.append(score)
        types.append(kind)
    for number, spelling, special in added:
        # A listed token with the id of a piece is that piece.
        if number < len(tokens):
            continue
        # Ids in GGUF are places in the list: fillers keep the place of ids that have no token.
        for row in range(len(tokens), number):
            tokens.append(keys.filler(row))
            scores.append(UNREACHED)
            types.append(PieceType.UNUSED)
        tokens.append(spelling)
        scores.append(UNREACHED)
        types.append(PieceType.CONTROL if special else PieceType.USER_DEFINED)
    ids: dict[str, int] = {}
    for name, number in model.ids.items():
        if number >= 0:
            ids[f"{name}_token"] = number
    return FoundTokenizer(
        Vocabulary(
            model=keys.SPM,
            tokens=tokens,
            types=types,
            scores=scores,
            merges=[],
            pre="",
            space_prefix=model.space_prefix,
        ),
        ids,
    )


def exportable_vocabulary(path: Path) -> FoundTokenizer | None:
    """Read the vocabulary of a file, unless it is a sentencepiece model of a kind that is not
    exported.
    """
    if is_tiktoken(path):
        return read_tiktoken_vocabulary(path)
    model = read_sentencepiece(path)
    has_added = any(kind is PieceType.USER_DEFINED for _, _, kind in model.pieces)
    if model.byte_pair and model.plain and model.space_prefix and not has_added:
        return read_sentencepiece_vocabulary(model)
    return None


def _from_json(folder: Path) -> FoundTokenizer:
    path = folder / "tokenizer.json"
    raw = read_json(path)
    model = Settings(raw, path).inside("model")
    # llama.cpp has no settings for these.
    unsupported: list[str] = []
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.values.get(name):
            unsupported.append(name)
    if model.values.get("type") != "BPE" or unsupported:
        feature = f"a tokenizer of type {format_value(model.values.get('type'))}"
        if unsupported:
            feature += f" with {unsupported[0]}"
        _refuse(path, feature)
    vocabulary: dict[str, int] = dict(model.inside("vocab").values)
    listed: list[dict[str, Any]] = raw.get("added_tokens") or []
    missing = missing_added_tokens(folder, listed, lambda: vocabulary)
    replaced_ids = {token["id"] for token in missing}
    added: list[dict[str, Any]] = []
    for token in listed:
        if token["id"] not in replaced_ids:
            added.append(token)
    added += missing
    # An added token wins over a token of the vocabulary with the same id.
    spellings: dict[int, str] = {}
    for spelling, number in vocabulary.items():
        spellings[number] = spelling
    for token in added:
        spellings[token["id"]] = token["content"]
    # Ids in GGUF are places in the list: fillers keep the place of ids that have no token.
    tokens: list[str] = []
    types: list[PieceType] = []
    for number in range(max(spellings, default=-1) + 1):
        if number in spellings:
            tokens.append(spellings[number])
            types.append(PieceType.NORMAL)
        else:
            tokens.append(keys.filler(number))
            types.append(PieceType.UNUSED)
    for token in added:
        types[token["id"]] = PieceType.CONTROL if token["special"] else PieceType.USER_DEFINED
    merges = pairs_of(model.values.get("merges", []))
    parts: dict[str, Any] = {part: raw.get(part) for part in PIPELINE_PARTS}
    if fixes_mistral_regex(folder, len(spellings)):
        parts["pre_tokenizer"] = pipeline.with_mistral_regex(parts["pre_tokenizer"])
    flags = _list_flags(added)
    tokenizer = FoundTokenizer(
        Vocabulary(
            model=keys.BPE,
            tokens=tokens,
            types=types,
            scores=[],
            merges=merges,
            pre="",
            space_prefix=False,
        ),
        pipeline={**parts},
    )
    if flags:
        tokenizer.pipeline["added_tokens"] = flags
    flag_names = set[str]().union(*flags.values())
    if "lstrip" in flag_names or "rstrip" in flag_names:
        tokenizer.notes.append(
            "llama.cpp keeps whitespace next to special tokens that the tokenizer drops"
        )
    if "single_word" in flag_names:
        tokenizer.notes.append(
            "llama.cpp finds added tokens inside words, where the tokenizer does not"
        )
    if _has_hidden_tokens(added):
        tokenizer.notes.append(
            "llama.cpp finds an added token that contains another, where the tokenizer finds the"
            " contained one"
        )
    if read_tokenizer_config(folder).flag("split_special_tokens", False):
        tokenizer.notes.append(
            "llama.cpp finds special tokens in text, which the tokenizer splits"
            " (split_special_tokens)"
        )
    changing_steps = pipeline.text_changing_steps(parts["decoder"])
    if changing_steps:
        tokenizer.notes.append(
            "llama.cpp restores text without these steps of the tokenizer's decoder:"
            f" {', '.join(changing_steps)}"
        )
    tokenizer.ignore_merges = model.flag("ignore_merges", False)
    # Only tokenizers that came from sentencepiece have tokens such as <0xE4> for bytes.
    if model.flag("byte_fallback", False):
        return _to_scored(tokenizer, model.values.get("unk_token"), vocabulary, path)
    return _to_byte_level(tokenizer, vocabulary, folder)


def _list_flags(added: Collection[Mapping[str, Any]]) -> dict[str, dict[str, bool]]:
    """List the flags of added tokens that are set, by the id as JSON spells it."""
    flags: dict[str, dict[str, bool]] = {}
    for token in added:
        token_flags: dict[str, bool] = {}
        for flag in TOKEN_FLAGS:
            if token.get(flag):
                token_flags[flag] = True
        if token_flags:
            flags[str(token["id"])] = token_flags
    return flags


def _has_hidden_tokens(added: Collection[Mapping[str, Any]]) -> bool:
    """Return whether an added token of normalized text contains one of text as it is.

    The tokenizers library looks for the latter first, so it never finds the former. llama.cpp looks
    for longer tokens first.
    """
    plain: set[str] = set()
    for token in added:
        if token["content"] and not token.get("normalized", True):
            plain.add(token["content"])
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
    """Give a byte-level tokenizer llama.cpp's name for its patterns."""
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
        # If merges result in every token, `ignore_merges` has no effect, and the name for the other
        # setting is as good.
        normal_ids = tokenizer.vocabulary.tokens_of(PieceType.NORMAL)
        normal_tokens = (tokenizer.vocabulary.tokens[number] for number in normal_ids)
        if merges_make_all(normal_tokens, vocabulary, tokenizer.vocabulary.merges):
            (name,) = names.values()
    if name is None:
        if names:
            setting = str(tokenizer.ignore_merges).lower()
            feature = f"ignore_merges {setting} with its pre_tokenizer"
        else:
            feature = "a pre_tokenizer"
        _refuse(path, feature)
    if name in pipeline.SIMPLER:
        tokenizer.notes.append(
            "llama.cpp splits words with non-ASCII capitals or marks differently"
        )
    tokenizer.vocabulary = replace(tokenizer.vocabulary, pre=name)
    return tokenizer


def _to_scored(
    tokenizer: FoundTokenizer, unknown: Any, vocabulary: Mapping[str, int], path: Path
) -> FoundTokenizer:
    """Convert a tokenizer like sentencepiece's, whose list of pairs becomes scores."""
    _require_bytes(vocabulary, path)
    splitter = tokenizer.pipeline["pre_tokenizer"]
    normalizer = tokenizer.pipeline["normalizer"]
    # Two spellings of sentencepiece's rule: newer files have Metaspace, older ones a normalizer.
    if isinstance(splitter, dict) and splitter.get("type") == "Metaspace":
        scheme = splitter.get("prepend_scheme", "always")
        is_supported = (
            splitter.get("replacement") == pipeline.SPACE
            and splitter.get("split") is False
            and normalizer in (None, pipeline.REPLACE_SPACES)
        )
        prefix = scheme != "never"
        if prefix:
            if scheme == "first":
                prefixed_text = "all of it"
            else:
                prefixed_text = "pieces that do not begin with one"
            tokenizer.notes.append(
                "llama.cpp adds a space before each piece of text between special tokens, the"
                f" tokenizer before {prefixed_text}"
            )
    else:
        prefix = normalizer == {
            "type": "Sequence",
            "normalizers": [pipeline.PREPEND_SPACE, pipeline.REPLACE_SPACES],
        }
        replaces_spaces = prefix or normalizer == pipeline.REPLACE_SPACES
        # Splitting at spaces has no effect after they were replaced.
        is_supported = replaces_spaces and splitter in (None, pipeline.SPLIT_AT_SPACES)
    if not is_supported:
        _refuse(path, "a tokenizer like sentencepiece's with another normalizer or pre_tokenizer")
    old = tokenizer.vocabulary
    apart: set[str] = set()
    for token, kind in zip(old.tokens, old.types, strict=True):
        if kind is not PieceType.NORMAL:
            apart.add(token)
    ranks = ranks_of_merges(old.merges, vocabulary, apart)
    if ranks is None:
        _refuse(path, "a tokenizer whose merges have no equivalent scores")
    tokens = list(old.tokens)
    types = list(old.types)
    scores: list[float] = []
    for number, (token, kind) in enumerate(zip(old.tokens, old.types, strict=True)):
        if token == unknown:
            types[number] = PieceType.UNKNOWN
        # tokenizer.json does not mark tokens for bytes, such as <0xE4>.
        elif kind is PieceType.NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[number] = PieceType.BYTE
        score = 0.0
        if types[number] is PieceType.USER_DEFINED:
            tokens[number] = _as_in_text(token)
            score = UNREACHED
        elif types[number] is PieceType.NORMAL:
            # Letters, which merges do not result in, come after all merged pieces.
            score = float(-ranks.get(token, len(ranks) + number))
        scores.append(score)
    # The published file has the original scores, which are equivalent to ranks.
    scores = _original_scores(path.with_name("tokenizer.model"), old.tokens, ranks) or scores
    if _has_space_runs(tokens, types):
        other_tokens = {token for token in apart if token.strip(pipeline.SPACE)}
        tokenizer.run_merges = run_merges(old.merges, other_tokens)
    tokenizer.vocabulary = Vocabulary(
        model=keys.SPM,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=[],
        pre="",
        space_prefix=prefix,
    )
    return tokenizer


def _has_space_runs(tokens: Sequence[str], types: Sequence[PieceType]) -> bool:
    """Return whether an added token is a run of spaces."""
    for token, kind in zip(tokens, types, strict=True):
        if kind is PieceType.USER_DEFINED and not token.strip(" "):
            return True
    return False


def _as_in_text(token: str) -> str:
    """Spell an added token as llama.cpp looks for it: before it replaces spaces by U+2581."""
    return token.replace(pipeline.SPACE, " ")


def _original_scores(
    path: Path, tokens: Sequence[str], ranks: Mapping[str, int]
) -> list[float] | None:
    """Read the scores of the sentencepiece model that a tokenizer.json was made from, if it is next
    to it.
    """
    if not path.is_file() or is_tiktoken(path):
        return None
    pieces = read_sentencepiece(path).pieces
    if [spelling for spelling, _, _ in pieces] != list(tokens[: len(pieces)]):
        return None
    scores = {spelling: score for spelling, score, _ in pieces}
    merged_scores = [scores.get(piece, UNREACHED) for piece in ranks]
    # The scores must order all merged pieces as the list of merges does.
    for score, next_score in itertools.pairwise(merged_scores):
        if score <= next_score:
            return None
    return [scores.get(token, UNREACHED) for token in tokens]


def _require_bytes(tokens: Collection[str], path: Path) -> None:
    # llama.cpp fails on unknown characters without them.
    for byte in range(256):
        if f"<0x{byte:02X}>" not in tokens:
            _refuse(path, "a tokenizer like sentencepiece's without tokens for all bytes")


def _refuse(path: Path, feature: str) -> NoReturn:
    raise UnsupportedError(
        f"llama.cpp does not support {feature}", path=path, hint="write another format"
    )
