"""Compare two tokenizers: do they encode text in the same way?"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from ctypes import c_float

from quantkit.text.canonical_vocabulary import AddedToken, CanonicalVocabulary, Kind, Token
from quantkit.text.merges import merge_difference, merges_make_all, order_probes, scores_difference
from quantkit.text.tokenizer import Tokenizer

# Each shows another difference: digits and clitics; spaces; scripts and joined emoji; code;
# spellings of special tokens; normalization and control characters.
_SAMPLES = (
    "The quick brown fox, 1234567 jumps over $5.00 -- isn't it?",
    "  two leading spaces,\ttabs\tand\n\nnew lines  \n trailing ",
    "Größe, naïve café, Москва, 日本語のテキスト, عربى, 👩‍🚀🚀",
    "def f(x):\n    return {'a': x ** 2}  # comment\n",
    "<s> <unk> </s> <|begin_of_text|> <0x41>",
    "e\u0301 \u00e9 \ufb01 \u2167 \u00a0 \u200b \x00 \x7f",
)
# Kinds that are the same if a format does not distinguish them.
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
    """Find the first difference between two tokenizers; None if there is none. Compared are

    - for every id, the bytes and the kind of its token;
    - the settings of added tokens, normalization and splitting, merges and scores, BOS and EOS, if
      both formats have them;
    - the tokens of `texts` and of built-in samples, and their decoding.

    Raises:
        CheckpointError: if a file is damaged.
    """
    first_vocabulary = first.canonical()
    second_vocabulary = second.canonical()
    both_stated = _states_ends(first_vocabulary) and _states_ends(second_vocabulary)
    probes = _make_order_probes(first_vocabulary, second_vocabulary)
    # The texts come last: encoding takes longest, and a difference in the vocabulary says more.
    return (
        _find_token_difference(first_vocabulary, second_vocabulary)
        or _find_added_difference(first_vocabulary, second_vocabulary)
        or _find_settings_difference(first_vocabulary, second_vocabulary)
        or _find_order_difference(first_vocabulary, second_vocabulary)
        or _find_end_difference(first, second, both_stated=both_stated)
        or _find_text_difference(
            first, second, itertools.chain(_SAMPLES, texts, probes), first_vocabulary.kinds
        )
    )


def _states_ends(vocabulary: CanonicalVocabulary) -> bool:
    """Return whether a vocabulary comes from a tokenizer.json whose files state BOS and EOS."""
    if vocabulary.added is None or vocabulary.merges is None:
        return False
    return not vocabulary.converted


def sample_difference(first: Tokenizer, second: Tokenizer) -> str | None:
    """Find the first of the built-in samples that two tokenizers encode in different ways; None if
    there is none.
    """
    for text in _SAMPLES:
        if first.encode(text) != second.encode(text):
            return f"the text {text[:40]!r}"
    return None


def _find_token_difference(first: CanonicalVocabulary, second: CanonicalVocabulary) -> str | None:
    # The usual case, without a loop over all tokens.
    if first.contents == second.contents and first.kinds == second.kinds:
        return None
    numbers = first.contents.keys() | second.contents.keys()
    differing: list[int] = []
    for number in numbers:
        if not _are_equivalent(first.token(number), second.token(number)):
            differing.append(number)
    if not differing:
        return None
    at = min(differing)
    first_token = first.token(at)
    second_token = second.token(at)
    kinds_differ = (
        first_token is not None
        and second_token is not None
        and first_token.kind is not second_token.kind
    )
    shown: list[str] = []
    for token in (first_token, second_token):
        if token is None:
            shown.append("no token")
            continue
        # The kind of an ordinary token says something only next to another kind.
        if kinds_differ or token.kind is not Kind.TEXT:
            kind = f"{token.kind.value} "
        else:
            kind = ""
        shown.append(f"{kind}{token.content[:_MAX_SHOWN]!r}")
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
    is_first_used = first is not None and first.kind is not Kind.UNUSED
    is_second_used = second is not None and second.kind is not Kind.UNUSED
    if not is_first_used and not is_second_used:
        return True
    if first is None or second is None or first.content != second.content:
        return False
    return any({first.kind, second.kind} <= kinds for kinds in _SAME_KINDS)


def _find_added_difference(first: CanonicalVocabulary, second: CanonicalVocabulary) -> str | None:
    """Find a difference in the settings of added tokens, if both formats have them; otherwise only
    in their ids.
    """
    first_added = first.added or {}
    second_added = second.added or {}
    for number in sorted(first_added.keys() | second_added.keys()):
        first_token = first_added.get(number)
        second_token = second_added.get(number)
        # A format without settings has the token under the id that it has in the vocabulary.
        first_values = (first_token or AddedToken(number))._asdict()
        second_values = (second_token or AddedToken(number))._asdict()
        if first_token is not None and second_token is not None:
            names = list(first_values)
        else:
            names = ["id"]
        if "spelling" in names and "space prefix" in first.settings:
            # There a space and U+2581 are the same.
            names.remove("spelling")
        for name in names:
            if first_values[name] == second_values[name]:
                continue
            if first_token is not None:
                content = first.contents[number]
            else:
                content = second.contents[number]
            pair = _format_pair(first_values[name], second_values[name])
            return f"added token {number} ({content!r}): {name} {pair}"
    return None


def _find_settings_difference(
    first: CanonicalVocabulary, second: CanonicalVocabulary
) -> str | None:
    for name, setting in first.settings.items():
        # A setting that a format does not state is not compared.
        if name not in second.settings or setting == second.settings[name]:
            continue
        # llama.cpp's name of a pre-tokenizer decides `ignore_merges` for all of its models, also
        # for those in which it has no effect.
        if name == "ignore_merges" and (first.converted or second.converted):
            with_merges = first if first.merges is not None else second
            if _merges_make_all(with_merges):
                continue
        return f"{name}: {_format_pair(setting, second.settings[name])}"
    return None


def _merges_make_all(vocabulary: CanonicalVocabulary) -> bool:
    """Find out whether merging letters results in each token of text."""
    if vocabulary.merges is None:
        return False
    # Ordinary tokens are not in `kinds`.
    ordinary = (None, Kind.UNUSED)
    pieces: list[str] = []
    for piece, number in vocabulary.spellings.items():
        if vocabulary.kinds.get(number) in ordinary:
            pieces.append(piece)
    return merges_make_all(pieces, vocabulary.spellings, vocabulary.merges)


def _format_pair(first: object, second: object) -> str:
    """Format two values; long ones from shortly before their first difference."""
    first_text = json.dumps(first, ensure_ascii=False)
    second_text = json.dumps(second, ensure_ascii=False)
    start = max(_find_differing_letter(first_text, second_text) - _NUM_SHOWN_BEFORE, 0)
    first_shown = _cut_text(first_text, start)
    second_shown = _cut_text(second_text, start)
    return f"{first_shown} against {second_shown}"


def _find_differing_letter(first: str, second: str) -> int:
    """Find the first place at which two texts have different letters; 0 if there is none."""
    for place, (first_letter, second_letter) in enumerate(zip(first, second, strict=False)):
        if first_letter != second_letter:
            return place
    return 0


def _cut_text(text: str, start: int) -> str:
    """Cut a long text to the part that begins at `start`, with dots where something is missing."""
    if len(text) <= _MAX_SHOWN:
        return text
    stop = start + _MAX_SHOWN
    before = "..." if start > 0 else ""
    after = "..." if len(text) > stop else ""
    return before + text[start:stop] + after


def _find_order_difference(first: CanonicalVocabulary, second: CanonicalVocabulary) -> str | None:
    if first.merges is not None and second.merges is not None:
        apart = {Kind.ADDED, Kind.SET_APART, Kind.RUN}
        if first.converted or second.converted:
            apart.add(Kind.SPECIAL)
        # Merges that result in a token that is found in text first have no effect.
        ignored = _list_found_pieces(first, apart) | _list_found_pieces(second, apart)
        return merge_difference(first.merges, second.merges, ignored)
    if first.scores is not None and second.scores is not None:
        for piece, score in first.scores.items():
            second_score = second.scores.get(piece, score)
            # Sentencepiece has single precision.
            if score != second_score and c_float(score).value != c_float(second_score).value:
                return f"the score of {piece!r}: {score:g} against {second_score:g}"
        return None
    if first.merges is not None and second.scores is not None:
        return scores_difference(first.merges, second.scores)
    if second.merges is not None and first.scores is not None:
        return scores_difference(second.merges, first.scores)
    return None


def _list_found_pieces(vocabulary: CanonicalVocabulary, kinds: Collection[Kind]) -> set[str]:
    """List the pieces of some kinds that are found in text before pairs are merged, at any
    position.
    """
    added = vocabulary.added or {}
    pieces: set[str] = set()
    for piece, number in vocabulary.spellings.items():
        if vocabulary.kinds.get(number) not in kinds:
            continue
        # A token that is only found as a whole word leaves other occurrences to merges.
        if not added.get(number, _ANYWHERE).single_word:
            pieces.add(piece)
    return pieces


def _find_end_difference(first: Tokenizer, second: Tokenizer, *, both_stated: bool) -> str | None:
    """Find a difference in BOS and EOS. Formats other than tokenizer.json may lack them, and Meta's
    tiktoken files have several EOS tokens.
    """
    ids_by_name = (
        ("BOS", _list_bos(first), _list_bos(second)),
        ("EOS", set(first.eos_ids), set(second.eos_ids)),
    )
    for name, first_ids, second_ids in ids_by_name:
        if first_ids == second_ids:
            continue
        # Where a format may lack tokens, fewer of them are no difference.
        if both_stated or not (first_ids <= second_ids or second_ids <= first_ids):
            return f"{name}: {_format_pair(sorted(first_ids), sorted(second_ids))}"
    return None


def _list_bos(tokenizer: Tokenizer) -> set[int]:
    if tokenizer.bos_id is None:
        return set()
    return {tokenizer.bos_id}


def _find_text_difference(
    first: Tokenizer, second: Tokenizer, texts: Iterable[str], kinds: Mapping[int, Kind]
) -> str | None:
    for text in texts:
        ids = first.encode(text)
        if ids != second.encode(text):
            return f"the text {text[:40]!r}"
        # Some formats decode <unk> to a symbol.
        printed_ids: list[int] = []
        for number in ids:
            if kinds.get(number) is not Kind.SPECIAL:
                printed_ids.append(number)
        if first.decode(printed_ids) != second.decode(printed_ids):
            return f"what the tokens of {text[:40]!r} are decoded to"
    return None


def _make_order_probes(first: CanonicalVocabulary, second: CanonicalVocabulary) -> Iterator[str]:
    if first.merges is not None and second.merges is not None:
        # Lists in another order have very many probes.
        for pieces in itertools.islice(order_probes(first.merges, second.merges), _MAX_PROBES):
            content = b"".join(first.contents[first.spellings[piece]] for piece in pieces)
            # Byte tokens may be parts of a character, which are no text.
            with contextlib.suppress(UnicodeDecodeError):
                yield content.decode()
