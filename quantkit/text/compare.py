"""Whether two tokenizers encode text in the same way."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from ctypes import c_float

from quantkit.text.canonical_vocabulary import AddedToken, CanonicalVocabulary, Kind, Token
from quantkit.text.merges import merge_difference, merges_make_all, order_probes, scores_difference
from quantkit.text.tokenizer import Tokenizer

_SAMPLES = (
    "The quick brown fox, 1234567 jumps over $5.00 -- isn't it?",
    "  two leading spaces,\ttabs\tand\n\nnew lines  \n trailing ",
    "Größe, naïve café, Москва, 日本語のテキスト, عربى, 👩‍🚀🚀",
    "def f(x):\n    return {'a': x ** 2}  # comment\n",
    "<s> <unk> </s> <|begin_of_text|> <0x41>",
    "e\u0301 \u00e9 \ufb01 \u2167 \u00a0 \u200b \x00 \x7f",
)
_SAME_KINDS = (
    {Kind.TEXT, Kind.UNUSED},
    {Kind.SPECIAL, Kind.SET_APART},
    {Kind.ADDED, Kind.SET_APART},
    {Kind.TEXT, Kind.RUN},
    {Kind.ADDED, Kind.RUN},
    {Kind.SET_APART, Kind.RUN},
)
# Found before pairs are merged, at any position.
_ANYWHERE = AddedToken(0)
_MAX_PROBES = 1 << 12
_MAX_SHOWN = 60
_NUM_SHOWN_BEFORE = 20


def first_difference(first: Tokenizer, second: Tokenizer, texts: Iterable[str]) -> str | None:
    """Return the first difference between two tokenizers; None if there is none. Compared are

    - for every id, the bytes and the kind of its token;
    - the settings of added tokens, normalization and splitting, merges and scores, BOS and EOS, if
      both formats have them;
    - the tokens of `texts` and of built-in samples, and their decoding.

    Raises:
        CheckpointError: if a file is damaged.
    """
    own = first.canonical()
    others = second.canonical()
    # Whether both come from a tokenizer.json whose files state BOS and EOS.
    stated = all(
        one.added is not None and one.merges is not None and not one.converted
        for one in (own, others)
    )
    return (
        _find_token_difference(own, others)
        or _find_added_difference(own, others)
        or _find_settings_difference(own, others)
        or _find_order_difference(own, others)
        or _find_end_difference(first, second, both_stated=stated)
        or _find_text_difference(
            first, second, itertools.chain(_SAMPLES, texts, _probes(own, others)), own.kinds
        )
    )


def sample_difference(first: Tokenizer, second: Tokenizer) -> str | None:
    """Return the first of the built-in samples that two tokenizers encode in different ways; None
    if there is none.
    """
    return next(
        (
            f"the text {text[:40]!r}"
            for text in _SAMPLES
            if first.encode(text) != second.encode(text)
        ),
        None,
    )


def _find_token_difference(first: CanonicalVocabulary, second: CanonicalVocabulary) -> str | None:
    if first.contents == second.contents and first.kinds == second.kinds:
        return None
    numbers = first.contents.keys() | second.contents.keys()
    differing = []
    for number in numbers:
        if not _are_equivalent(first.token(number), second.token(number)):
            differing.append(number)
    if not differing:
        return None
    at = min(differing)
    one = first.token(at)
    other = second.token(at)
    kinds = one is not None and other is not None and one.kind is not other.kind
    shown = []
    for token in (one, other):
        if token is None:
            shown.append("no token")
        else:
            if kinds or token.kind is not Kind.TEXT:
                name = f"{token.kind.value} "
            else:
                name = ""
            shown.append(f"{name}{token.content[:_MAX_SHOWN]!r}")
    return (
        f"{len(differing)} of {len(numbers)} token ids; the first is {at}:"
        f" {' against '.join(shown)}"
    )


def _are_equivalent(first: Token | None, second: Token | None) -> bool:
    """Return whether two tokens of an id are equivalent; for an unused id, a format may have any
    token or none.
    """
    if first == second:
        return True
    used = []
    for token in (first, second):
        if token is not None and token.kind is not Kind.UNUSED:
            used.append(token)
    if first is None or second is None or not used:
        return not used
    return first.content == second.content and any(
        {first.kind, second.kind} <= kinds for kinds in _SAME_KINDS
    )


def _find_added_difference(first: CanonicalVocabulary, second: CanonicalVocabulary) -> str | None:
    """Return a difference in the settings of added tokens, if both formats have them; otherwise
    only in their ids.
    """
    for number in sorted((first.added or {}).keys() | (second.added or {}).keys()):
        one, other = ((side.added or {}).get(number) for side in (first, second))
        own = (one or AddedToken(number))._asdict()
        others = (other or AddedToken(number))._asdict()
        if one is not None and other is not None:
            names = list(own)
        else:
            names = ["id"]
        if "spelling" in names and "space prefix" in first.settings:
            # There a space and U+2581 are the same.
            names.remove("spelling")
        name = next((name for name in names if own[name] != others[name]), None)
        if name is not None:
            content = (first if one is not None else second).contents[number]
            pair = _format_pair(own[name], others[name])
            return f"added token {number} ({content!r}): {name} {pair}"
    return None


def _find_settings_difference(
    first: CanonicalVocabulary, second: CanonicalVocabulary
) -> str | None:
    for name, setting in first.settings.items():
        if name not in second.settings or setting == (others := second.settings[name]):
            continue
        converted = first.converted or second.converted
        if (
            name == "ignore_merges"
            and converted
            and _merges_make_all(first if first.merges is not None else second)
        ):
            # The setting has no effect.
            continue
        return f"{name}: {_format_pair(setting, others)}"
    return None


def _merges_make_all(vocabulary: CanonicalVocabulary) -> bool:
    """Return whether merging letters results in each token of text."""
    if vocabulary.merges is None:
        return False
    ordinary = (None, Kind.UNUSED)
    pieces = []
    for piece, number in vocabulary.spellings.items():
        if vocabulary.kinds.get(number) in ordinary:
            pieces.append(piece)
    return merges_make_all(pieces, vocabulary.spellings, vocabulary.merges)


def _format_pair(first: object, second: object) -> str:
    """Two values; long ones from shortly before their first difference."""
    texts = [json.dumps(value, ensure_ascii=False) for value in (first, second)]
    common = next(
        (at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0
    )
    start = max(common - _NUM_SHOWN_BEFORE, 0)
    shown = []
    for text in texts:
        shown.append(
            (
                "..." * (start > 0)
                + text[start : start + _MAX_SHOWN]
                + "..." * (len(text) > start + _MAX_SHOWN)
            )
            if len(text) > _MAX_SHOWN
            else text
        )
    return " against ".join(shown)


def _find_order_difference(first: CanonicalVocabulary, second: CanonicalVocabulary) -> str | None:
    if first.merges is not None and second.merges is not None:
        apart = {Kind.ADDED, Kind.SET_APART, Kind.RUN} | (
            {Kind.SPECIAL} if first.converted or second.converted else set()
        )
        ignored = {
            piece
            for one in (first, second)
            for piece, number in one.spellings.items()
            if one.kinds.get(number) in apart
            and not (one.added or {}).get(number, _ANYWHERE).single_word
        }
        return merge_difference(first.merges, second.merges, ignored)
    if first.scores is not None and second.scores is not None:
        for piece, score in first.scores.items():
            other = second.scores.get(piece, score)
            # Sentencepiece has single precision.
            if score != other and c_float(score).value != c_float(other).value:
                return f"the score of {piece!r}: {score:g} against {other:g}"
        return None
    for one, two in ((first, second), (second, first)):
        if one.merges is not None and two.scores is not None:
            return scores_difference(one.merges, two.scores)
    return None


def _find_end_difference(first: Tokenizer, second: Tokenizer, *, both_stated: bool) -> str | None:
    """Return a difference in BOS and EOS. Formats other than tokenizer.json may lack them, and
    Meta's tiktoken files have several EOS tokens.
    """
    begins = []
    for one in (first, second):
        begins.append(set[int]() if one.bos_id is None else {one.bos_id})
    ends = [set(one.eos_ids) for one in (first, second)]
    for name, (own, others) in (("BOS", begins), ("EOS", ends)):
        if own != others and (both_stated or not (own <= others or others <= own)):
            return f"{name}: {_format_pair(sorted(own), sorted(others))}"
    return None


def _find_text_difference(
    first: Tokenizer, second: Tokenizer, texts: Iterable[str], kinds: Mapping[int, Kind]
) -> str | None:
    for text in texts:
        ids = first.encode(text)
        if ids != second.encode(text):
            return f"the text {text[:40]!r}"
        # some formats decode <unk> to a symbol
        known = []
        for one in ids:
            if kinds.get(one) is not Kind.SPECIAL:
                known.append(one)
        if first.decode(known) != second.decode(known):
            return f"what the tokens of {text[:40]!r} are decoded to"
    return None


def _probes(first: CanonicalVocabulary, second: CanonicalVocabulary) -> Iterator[str]:
    if first.merges is not None and second.merges is not None:
        for pieces in itertools.islice(order_probes(first.merges, second.merges), _MAX_PROBES):
            content = b"".join(first.contents[first.spellings[piece]] for piece in pieces)
            with contextlib.suppress(UnicodeDecodeError):
                yield content.decode()
