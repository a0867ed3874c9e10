"""Describe a tokenizer in one form for all file formats: the bytes and the kind of each token, the
order of merges, and the settings that decide how text is split.

What a format does not state is absent, so that two formats are compared on what both state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from quantkit.text.gguf_vocabulary import GgufUnstated, filler
from quantkit.text.merges import Pair, pairs_of, splits
from quantkit.text.pipeline import SPACE, canonical_steps, decoder_settings, splitting_settings
from quantkit.text.sentencepiece_file import PieceType, SentencePieceFile
from quantkit.text.tiktoken_file import LLAMA3_PATTERN
from quantkit.text.token_bytes import BYTE_LETTERS, spell_bytes

_BYTE_TOKENS = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}
# Surrogates, which no spelling contains: marks of a letter without a byte, and of the end of a
# spelling.
_NO_BYTE = "\ud800"
_SEPARATOR = "\udfff"
_LETTER_BYTES = dict.fromkeys(range(256), _NO_BYTE) | {
    ord(letter): chr(value) for value, letter in BYTE_LETTERS.items()
}
# Valid UTF-8 contains neither 0xC0 and 0xC1 (overlong forms) nor bytes above 0xF4.
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
# The name of a setting, as messages show it.
_MERGED_UNUSED = "unused pieces that merges make"
# A missing setting equals one that states the library's default.
_BPE_DEFAULTS = {
    "ignore_merges": False,
    "byte_fallback": False,
    "dropout": None,
    "unk_token": None,
    "fuse_unk": False,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
}


class Kind(Enum):
    """The kind of a token; the value is its name in messages."""

    TEXT = "token"
    BYTE = "byte token"
    SPECIAL = "special token"
    ADDED = "added token"
    SET_APART = "special or added token"
    """In a format that does not distinguish them."""
    RUN = "run of spaces"
    """In a format that does not say whether it is found in text, or made by merges."""
    UNUSED = "unused token"
    """A filler; a format may have no token with this id."""


_PIECE_KINDS = {
    PieceType.BYTE: Kind.BYTE,
    PieceType.UNUSED: Kind.UNUSED,
    PieceType.USER_DEFINED: Kind.SET_APART,
    PieceType.CONTROL: Kind.SPECIAL,
    PieceType.UNKNOWN: Kind.SPECIAL,
}


class Token(NamedTuple):
    """The token of an id. A U+2581 that represents a space is a space."""

    content: bytes
    kind: Kind


class AddedToken(NamedTuple):
    """An added token of a tokenizer.json, with the settings of its search.

    Attributes:
        id: in the list of added tokens.
        spelling: in text; a U+2581 in it is not a space.
    """

    id: int
    spelling: str = ""
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class CanonicalVocabulary:
    """A tokenizer as its file states it.

    Attributes:
        contents: the bytes of each token, by id.
        kinds: of the tokens that are not `Kind.TEXT`.
        spellings: ids by spelling, in the letters of `merges` and `scores`.
        merges: pairs, best first; None if scores decide, or the model does not merge pairs.
        scores: of merged pieces and letters, the highest merged first; in unigram models, log
            probabilities. None if a list of pairs decides.
        added: added tokens by id; None if the format does not state their settings.
        settings: by name, in a form that can be compared.
        converted: whether it comes from a GGUF file: `ignore_merges` follows from the name of a
            pre-tokenizer.
    """

    contents: Mapping[int, bytes]
    kinds: Mapping[int, Kind]
    spellings: Mapping[str, int]
    merges: Sequence[Pair] | None
    scores: Mapping[str, float] | None
    added: Mapping[int, AddedToken] | None
    settings: Mapping[str, object] = field(default_factory=dict)
    converted: bool = False

    def token(self, number: int) -> Token | None:
        """Look up the token of an id; None if there is none."""
        content = self.contents.get(number)
        if content is None:
            return None
        return Token(content, self.kinds.get(number, Kind.TEXT))


def describe_tiktoken(
    ranks: Mapping[bytes, int], specials: Mapping[str, int]
) -> CanonicalVocabulary:
    """Describe the vocabulary of Llama 3's ranks, which are ids: the pair with the lowest id is
    merged first.
    """
    contents = {rank: content for content, rank in ranks.items()}
    spellings: dict[str, int] = {}
    scores: dict[str, float] = {}
    for content, rank in ranks.items():
        spelling = spell_bytes(content)
        spellings[spelling] = rank
        # The highest score is merged first, and so is the lowest rank.
        scores[spelling] = float(-rank)
    added: dict[int, AddedToken] = {}
    for name, number in specials.items():
        contents[number] = name.encode()
        added[number] = AddedToken(number, name)
    settings: dict[str, object] = {
        "model": "BPE",
        "ignore_merges": True,
        "normalizer": [],
        "pre_tokenizer": [LLAMA3_PATTERN],
        "decoder beyond bytes": [],
        _MERGED_UNUSED: [],
    }
    return CanonicalVocabulary(
        contents=contents,
        kinds=dict.fromkeys(specials.values(), Kind.SPECIAL),
        spellings=spellings | dict(specials),
        merges=None,
        scores=scores,
        added=added,
        settings=settings,
    )


def describe_sentencepiece(
    model: SentencePieceFile, added: Collection[tuple[int, str, bool]]
) -> CanonicalVocabulary:
    """Describe the vocabulary of a sentencepiece model, with the tokens that files next to it add,
    see `read_added_tokens`.
    """
    contents: dict[int, bytes] = {}
    kinds: dict[int, Kind] = {}
    spellings: dict[str, int] = {}
    scores: dict[str, float] = {}
    for number, (spelling, score, kind) in enumerate(model.pieces):
        spellings[spelling] = number
        contents[number] = _encode_spelling(spelling)
        # Only merged pieces compete by their scores.
        if kind is PieceType.NORMAL:
            scores[spelling] = score
            continue
        kinds[number] = _PIECE_KINDS[kind]
        if kind is PieceType.BYTE:
            contents[number] = _BYTE_TOKENS.get(spelling, b"")
    for number, spelling, special in added:
        # A listed token with the id of a piece is that piece.
        if number < len(model.pieces):
            continue
        contents[number] = _encode_spelling(spelling)
        kinds[number] = Kind.SPECIAL if special else Kind.ADDED
        spellings[spelling] = number
    settings: dict[str, object] = {
        "model": "BPE" if model.byte_pair else "Unigram",
        "sentencepiece rules": model.rules,
        "ignore_merges": False,
        "space prefix": model.space_prefix,
        "pre_tokenizer": [],
        "decoder beyond bytes": [],
        _MERGED_UNUSED: _find_merged_unused_pieces(model),
    }
    if model.plain:
        settings["normalizer"] = []
    # Tokens for bytes spell any character. Without them characters can be unknown, and
    # sentencepiece makes one unknown token of a run of such characters.
    if Kind.BYTE not in kinds.values():
        settings |= {"unk_token": _find_unknown_piece(model), "fuse_unk": True}
    return CanonicalVocabulary(
        contents=contents,
        kinds=kinds,
        spellings=spellings,
        merges=None,
        scores=scores,
        added=None,
        settings=settings,
    )


def describe_json(
    raw: Mapping[str, Any], added: Mapping[int, Any], parts: Mapping[str, Any], algorithm: str
) -> CanonicalVocabulary:
    """Describe the vocabulary of a tokenizer.json that its library has loaded.

    Args:
        added: the library's added tokens by their ids.
        parts: `normalizer`, `pre_tokenizer` and `decoder` with all their settings.
        algorithm: the model's type.
    """
    model = raw["model"]
    listed = model["vocab"]
    merges = model.get("merges")
    scores: dict[str, float] | None = None
    ids: dict[str, int] = {}
    # A unigram model lists its pieces with scores in the order of their ids; other models map
    # pieces to ids.
    if isinstance(listed, list):
        scores = dict(listed)
        for number, (piece, _) in enumerate(listed):
            ids[piece] = number
    else:
        ids = listed
    letters = _has_byte_letters(parts)
    if letters:
        contents = _index_contents(ids, _decode_letters(ids))
    else:
        contents = _index_contents(ids, _encode_spellings(ids))
    kinds: dict[int, Kind] = {}
    for piece, number in ids.items():
        # The first letters are compared on their own, to build no filler for every token.
        if piece[:4] == "[PAD" and piece == filler(number):
            kinds[number] = Kind.UNUSED
    if model.get("byte_fallback"):
        for piece, content in _BYTE_TOKENS.items():
            if piece in ids:
                contents[ids[piece]] = content
                kinds[ids[piece]] = Kind.BYTE
    spellings = dict(ids)
    added_tokens: dict[int, AddedToken] = {}
    # The library ignores the ids that the file states, which other readers use.
    file_ids = {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    for number, token in added.items():
        contents[number] = _encode_spelling(token.content)
        kinds[number] = Kind.SPECIAL if token.special else Kind.ADDED
        spellings[token.content] = number
        added_tokens[number] = AddedToken(
            id=file_ids.get(token.content, number),
            spelling=token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
        )
    return CanonicalVocabulary(
        contents=contents,
        kinds=kinds,
        spellings=spellings,
        merges=None if merges is None else pairs_of(merges),
        scores=scores,
        added=added_tokens,
        settings={
            "model": algorithm,
            _MERGED_UNUSED: [],
            **_model_settings(model, algorithm, ids, letters=letters),
            **splitting_settings(parts["normalizer"], parts["pre_tokenizer"]),
            **decoder_settings(parts["decoder"]),
        },
    )


def as_in_gguf(vocabulary: CanonicalVocabulary, unstated: GgufUnstated) -> CanonicalVocabulary:
    """Remove what a GGUF file does not state from the vocabulary of the folder that was made from
    its metadata.
    """
    kinds = {
        **vocabulary.kinds,
        **dict.fromkeys(unstated.unused & vocabulary.contents.keys(), Kind.UNUSED),
        **dict.fromkeys(unstated.set_apart & vocabulary.contents.keys(), Kind.SET_APART),
        **dict.fromkeys(unstated.space_runs & vocabulary.contents.keys(), Kind.RUN),
    }
    # GGUF has no keys for these: whoever reads a file assumes them.
    left_out = {"unk_token", "fuse_unk", "byte_fallback"}
    if not unstated.pipeline:
        left_out |= {"decoder", "prepend_scheme"}
    settings: dict[str, object] = {}
    for name, value in vocabulary.settings.items():
        if name not in left_out:
            settings[name] = value
    if unstated.pipeline:
        added = vocabulary.added
    else:
        added = None
    return replace(vocabulary, kinds=kinds, added=added, settings=settings, converted=True)


def _model_settings(
    model: Mapping[str, Any], kind: str, vocabulary: Collection[str], *, letters: bool
) -> dict[str, object]:
    if kind != "BPE":
        other_settings: dict[str, object] = {}
        for key, value in model.items():
            if key not in ("vocab", "type"):
                other_settings[key] = value
        return {"model settings": other_settings}
    settings: dict[str, object] = {}
    for name, default in _BPE_DEFAULTS.items():
        settings[name] = model.get(name) or default
    # With tokens for all bytes no character is unknown, and these settings have no effect.
    if (letters or settings["byte_fallback"]) and _has_all_bytes(vocabulary, letters=letters):
        del settings["unk_token"], settings["fuse_unk"]
    return settings


def _has_all_bytes(vocabulary: Collection[str], *, letters: bool) -> bool:
    """Return whether a vocabulary has a token for each byte of UTF-8, spelled with GPT-2's letters
    or as ``<0xE4>``.
    """
    for byte in _UTF8_BYTES:
        if letters:
            spelling = BYTE_LETTERS[byte]
        else:
            spelling = f"<0x{byte:02X}>"
        if spelling not in vocabulary:
            return False
    return True


def _has_byte_letters(parts: Mapping[str, Any]) -> bool:
    """Return whether a step of a tokenizer spells bytes with GPT-2's letters."""
    for part in parts.values():
        for step in canonical_steps(part):
            if step.get("type") == "ByteLevel":
                return True
    return False


def _find_unknown_piece(model: SentencePieceFile) -> str | None:
    for spelling, _, kind in model.pieces:
        if kind is PieceType.UNKNOWN:
            return spelling
    return None


def _find_merged_unused_pieces(model: SentencePieceFile) -> list[str]:
    """List the unused pieces that merges result in, which sentencepiece splits again at the end.
    No other format has such tokens; other unused pieces have no effect.
    """
    unused: list[str] = []
    mergeable: set[str] = set()
    for spelling, _, kind in model.pieces:
        if kind is PieceType.UNUSED:
            unused.append(spelling)
        if kind in (PieceType.UNUSED, PieceType.NORMAL):
            mergeable.add(spelling)
    if not unused or not model.byte_pair:
        return []
    merged: list[str] = []
    for piece in unused:
        # A piece of one letter occurs without any merge.
        if len(piece) == 1 or any(splits(piece, mergeable)):
            merged.append(piece)
    return sorted(merged)


def _index_contents(ids: Mapping[str, int], contents: Iterable[bytes]) -> dict[int, bytes]:
    contents_by_id: dict[int, bytes] = {}
    for number, content in zip(ids.values(), contents, strict=True):
        # Two tokens with the same id, of which the library uses either.
        if number in contents_by_id:
            content = b" and ".join(sorted((contents_by_id[number], content)))
        contents_by_id[number] = content
    return contents_by_id


def _encode_spellings(spellings: Iterable[str]) -> list[bytes]:
    """Encode spellings in which U+2581 is a space."""
    return [_encode_spelling(spelling) for spelling in spellings]


def _encode_spelling(spelling: str) -> bytes:
    return spelling.replace(SPACE, " ").encode()


def _decode_letters(spellings: Collection[str]) -> list[bytes]:
    """Decode spellings in GPT-2's letters into bytes; encode a spelling with other letters in
    UTF-8.
    """
    # One call for all spellings is faster than one for each.
    translated = _SEPARATOR.join(spellings).translate(_LETTER_BYTES).split(_SEPARATOR)
    contents: list[bytes] = []
    for spelling, byte_text in zip(spellings, translated, strict=True):
        # Most tokens are ASCII, for which the letters need not be compared one by one.
        beyond_bytes = not byte_text.isascii() and max(byte_text) > "\xff"
        if _NO_BYTE in byte_text or beyond_bytes:
            contents.append(spelling.encode())
        else:
            contents.append(byte_text.encode("latin-1"))
    return contents
