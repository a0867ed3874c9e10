"""A tokenizer in one form for all file formats: the bytes and the kind of each token, the order of
merges, and the settings that decide how text is split.

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
# surrogates, which no spelling contains
_NO_BYTE = "\ud800"
_SEPARATOR = "\udfff"
_LETTER_BYTES = dict.fromkeys(range(256), _NO_BYTE) | {
    ord(letter): chr(value) for value, letter in BYTE_LETTERS.items()
}
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
_MERGED_UNUSED = "unused pieces that merges make"
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
        """Return the token of an id; None if there is none."""
        content = self.contents.get(number)
        if content is None:
            return None
        return Token(content, self.kinds.get(number, Kind.TEXT))


def of_tiktoken(ranks: Mapping[bytes, int], specials: Mapping[str, int]) -> CanonicalVocabulary:
    """Return the vocabulary of Llama 3's ranks, which are ids: the pair with the lowest id is
    merged first.
    """
    spellings = {spell_bytes(content): rank for content, rank in ranks.items()}
    settings: dict[str, object] = {
        "model": "BPE",
        "ignore_merges": True,
        "normalizer": [],
        "pre_tokenizer": [LLAMA3_PATTERN],
        "decoder beyond bytes": [],
        _MERGED_UNUSED: [],
    }
    return CanonicalVocabulary(
        contents={rank: content for content, rank in ranks.items()}
        | {number: name.encode() for name, number in specials.items()},
        kinds=dict.fromkeys(specials.values(), Kind.SPECIAL),
        spellings=spellings | dict(specials),
        merges=None,
        scores={spelling: float(-rank) for spelling, rank in spellings.items()},
        added={number: AddedToken(number, name) for name, number in specials.items()},
        settings=settings,
    )


def of_sentencepiece(
    model: SentencePieceFile, added: Collection[tuple[int, str, bool]]
) -> CanonicalVocabulary:
    """Return the vocabulary of a sentencepiece model, with the tokens that files next to it add,
    see `added_tokens`.
    """
    spellings = [spelling for spelling, _, _ in model.pieces]
    contents = dict(enumerate(_encode_spellings(spellings)))
    kinds = {}
    for number, (_, _, kind) in enumerate(model.pieces):
        if kind is not PieceType.NORMAL:
            kinds[number] = _PIECE_KINDS[kind]
    contents |= {
        number: _BYTE_TOKENS.get(spellings[number], b"")
        for number in kinds
        if kinds[number] is Kind.BYTE
    }
    beyond = [one for one in added if one[0] >= len(spellings)]
    contents |= {
        number: content
        for (number, _, _), content in zip(
            beyond, _encode_spellings(spelling for _, spelling, _ in beyond), strict=True
        )
    }
    kinds |= {number: Kind.SPECIAL if special else Kind.ADDED for number, _, special in beyond}
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
    if Kind.BYTE not in kinds.values():
        unknown = next(
            (spelling for spelling, _, kind in model.pieces if kind is PieceType.UNKNOWN), None
        )
        settings |= {"unk_token": unknown, "fuse_unk": True}
    return CanonicalVocabulary(
        contents=contents,
        kinds=kinds,
        spellings={spelling: number for number, spelling in enumerate(spellings)}
        | {spelling: number for number, spelling, _ in beyond},
        merges=None,
        scores={
            spelling: score for spelling, score, kind in model.pieces if kind is PieceType.NORMAL
        },
        added=None,
        settings=settings,
    )


def of_json(
    raw: Mapping[str, Any], added: Mapping[int, Any], parts: Mapping[str, Any], algorithm: str
) -> CanonicalVocabulary:
    """Return the vocabulary of a tokenizer.json that its library has loaded.

    Args:
        added: the library's added tokens by their ids.
        parts: `normalizer`, `pre_tokenizer` and `decoder` with all their settings.
        algorithm: the model's type.
    """
    model = raw["model"]
    listed = model["vocab"]
    merges = model.get("merges")
    if isinstance(listed, list):
        scores = dict(listed)
    else:
        scores = None
    if scores is None:
        ids = listed
    else:
        ids = {piece: number for number, (piece, _) in enumerate(listed)}
    letters = any(
        step.get("type") == "ByteLevel" for part in parts.values() for step in canonical_steps(part)
    )
    contents = _by_id(ids, _letters(ids) if letters else _encode_spellings(ids))
    kinds = {}
    for piece, number in ids.items():
        if piece[:4] == "[PAD" and piece == filler(number):
            kinds[number] = Kind.UNUSED
    if model.get("byte_fallback"):
        found = {}
        for piece, content in _BYTE_TOKENS.items():
            if piece in ids:
                found[ids[piece]] = content
        contents |= found
        kinds |= dict.fromkeys(found, Kind.BYTE)
    contents |= dict(
        zip(added, _encode_spellings(one.content for one in added.values()), strict=True)
    )
    kinds |= {number: Kind.SPECIAL if one.special else Kind.ADDED for number, one in added.items()}
    stated = {one["content"]: one["id"] for one in raw.get("added_tokens") or []}
    return CanonicalVocabulary(
        contents=contents,
        kinds=kinds,
        spellings=ids | {one.content: number for number, one in added.items()},
        merges=None if merges is None else pairs_of(merges),
        scores=scores,
        added={
            number: AddedToken(
                stated.get(one.content, number),
                one.content,
                one.single_word,
                one.lstrip,
                one.rstrip,
                one.normalized,
            )
            for number, one in added.items()
        },
        settings={
            "model": algorithm,
            _MERGED_UNUSED: [],
            **_model_settings(model, algorithm, ids, letters=letters),
            **splitting_settings(parts["normalizer"], parts["pre_tokenizer"]),
            **decoder_settings(parts["decoder"]),
        },
    )


def as_in_gguf(vocabulary: CanonicalVocabulary, unstated: GgufUnstated) -> CanonicalVocabulary:
    """Return the vocabulary of a folder made from a GGUF file's metadata, without what the file
    does not state.
    """
    kinds = {
        **vocabulary.kinds,
        **dict.fromkeys(unstated.unused & vocabulary.contents.keys(), Kind.UNUSED),
        **dict.fromkeys(unstated.set_apart & vocabulary.contents.keys(), Kind.SET_APART),
        **dict.fromkeys(unstated.space_runs & vocabulary.contents.keys(), Kind.RUN),
    }
    left_out = {"unk_token", "fuse_unk", "byte_fallback"}
    if not unstated.pipeline:
        left_out |= {"decoder", "prepend_scheme"}
    settings = {}
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
        return {
            "model settings": {
                key: value for key, value in model.items() if key not in ("vocab", "type")
            }
        }
    result = {name: model.get(name) or default for name, default in _BPE_DEFAULTS.items()}
    spelled = []
    for byte in _UTF8_BYTES:
        spelled.append(BYTE_LETTERS[byte] if letters else f"<0x{byte:02X}>")
    if (letters or result["byte_fallback"]) and all(one in vocabulary for one in spelled):
        del result["unk_token"], result["fuse_unk"]  # no character is unknown
    return result


def _find_merged_unused_pieces(model: SentencePieceFile) -> list[str]:
    """Return the unused pieces that merges result in, which sentencepiece splits again at the end.
    No other format has such tokens; other unused pieces have no effect.
    """
    unused = [spelling for spelling, _, kind in model.pieces if kind is PieceType.UNUSED]
    if not unused or not model.byte_pair:
        return []
    known = {*unused, *(spelling for spelling, _, kind in model.pieces if kind is PieceType.NORMAL)}
    return sorted(one for one in unused if len(one) == 1 or any(splits(one, known)))


def _by_id(ids: Mapping[str, int], contents: Iterable[bytes]) -> dict[int, bytes]:
    result: dict[int, bytes] = {}
    for number, content in zip(ids.values(), contents, strict=True):
        # Two tokens with the same id, of which the library uses either.
        if number in result:
            content = b" and ".join(sorted((result[number], content)))
        result[number] = content
    return result


def _encode_spellings(spellings: Iterable[str]) -> list[bytes]:
    """Return the bytes of spellings in which U+2581 is a space."""
    return [spelling.replace(SPACE, " ").encode() for spelling in spellings]


def _letters(spellings: Collection[str]) -> list[bytes]:
    """Return the bytes of spellings in GPT-2's letters; the UTF-8 bytes of a spelling with other
    letters.
    """
    # One call is faster.
    translated = _SEPARATOR.join(spellings).translate(_LETTER_BYTES).split(_SEPARATOR)
    letters: list[bytes] = []
    for spelling, one in zip(spellings, translated, strict=True):
        letters.append(
            spelling.encode()
            if _NO_BYTE in one or (not one.isascii() and max(one) > "\xff")
            else one.encode("latin-1")
        )
    return letters
