"""Convert and compare the rules of byte-pair encoding: a list of pairs, or a score for each merged
piece.

A list and scores are equivalent if the pairs of each piece are consecutive in the list: see
`merges_by_rank`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

Pair = tuple[str, str]


def merges_by_rank(order: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[Pair]:
    """List the pairs that build each piece, best pieces first.

    Every split into two known pieces is listed: byte-pair encoding uses the one that it reaches
    first.
    """
    merges: list[Pair] = []

    def ids_of_pair(pair: Pair) -> tuple[int, int]:
        return vocabulary[pair[0]], vocabulary[pair[1]]

    for piece in sorted(order, key=lambda p: order[p]):
        # The order of their ids, as transformers' converter lists the pairs of a piece.
        merges += sorted(splits(piece, vocabulary), key=ids_of_pair)
    return merges


def ranks_of_merges(
    merges: Sequence[Pair], vocabulary: Mapping[str, int], apart: Collection[str] = ()
) -> dict[str, int] | None:
    """Rank each merged piece, from 0; None if scores are not equivalent to the list,
    as the pairs of a piece are not consecutive or some are missing. The pieces in `apart` are found
    in text before pairs are merged.
    """
    ranks: dict[str, int] = {}
    last = ""
    for pair in merges:
        piece = "".join(pair)
        if piece in apart or piece == last:
            continue
        # The pairs of this piece are not consecutive.
        if piece in ranks:
            return None
        ranks[piece] = len(ranks)
        last = piece
    listed = set(merges)
    for piece in vocabulary:
        if piece in apart:
            continue
        # With scores, every split of a piece can be merged: each must be in the list, unless a part
        # of it never occurs when pairs are merged.
        for first, second in splits(piece, vocabulary):
            if (first, second) not in listed and first not in apart and second not in apart:
                return None
    return ranks


def scores_are_ranks(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> bool:
    """Return whether a list of pairs is equivalent to the scores of pieces.

    It is not if several merged pieces have the same score, or a piece contains a letter that is not
    a piece.
    """
    long = [piece for piece in scores if len(piece) > 1]
    counts = Counter(scores[piece] for piece in long)
    merged_scores: set[float] = set()
    for piece in long:
        score = scores[piece]
        # Splitting takes long, and a score that occurs once needs no comparison.
        if counts[score] == 1 or not any(splits(piece, vocabulary)):
            continue
        if score in merged_scores:
            return False
        merged_scores.add(score)
    # By scores a letter that is not a piece can be merged; a list has only pairs of pieces.
    for piece in long:
        for letter, other in ((piece[0], piece[1:]), (piece[-1], piece[:-1])):
            if letter not in vocabulary and (len(other) == 1 or other in vocabulary):
                return False
    return True


def merges_make_all(
    pieces: Iterable[str], vocabulary: Mapping[str, int], merges: Sequence[Pair]
) -> bool:
    """Merge the letters of each piece, and return whether this results in the piece, so that
    `ignore_merges` has no effect.
    """
    from tokenizers import models

    pairs = models.BPE(vocab=dict(vocabulary), merges=list(merges))
    return all(len(pairs.tokenize(piece)) == 1 for piece in pieces)


def pairs_of(merges: Iterable[Any]) -> list[Pair]:
    """Parse the merges of a tokenizer.json, which lists each pair as one string or as two."""
    pairs: list[Pair] = []
    for merge in merges:
        if isinstance(merge, str):
            first, second = merge.split(" ")
        else:
            first, second = merge
        pairs.append((first, second))
    return pairs


def splits(piece: str, vocabulary: Container[str]) -> Iterator[Pair]:
    """Yield the pairs of known pieces that make up a piece."""
    for cut in range(1, len(piece)):
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary:
            yield piece[:cut], piece[cut:]


def merge_difference(
    first: Sequence[Pair], second: Sequence[Pair], ignored: Collection[str] = ()
) -> str | None:
    """Find the first difference between two lists of pairs; None if they are equivalent, except
    for what `order_probes` may show. The tokens in `ignored` are found in text before pairs are
    merged.
    """
    if first == second:
        return None
    # The order of a piece's pairs rarely matters; `order_probes` finds where it may.
    for (piece, pairs), (other, other_pairs) in itertools.zip_longest(
        _group_pairs(first, ignored), _group_pairs(second, ignored), fillvalue=("", [])
    ):
        if piece != other or {*pairs} != {*other_pairs}:
            return f"merges: {_format_pairs(pairs)} against {_format_pairs(other_pairs)}"
    return None


def order_probes(first: Sequence[Pair], second: Sequence[Pair]) -> Iterator[tuple[str, str, str]]:
    """Yield consecutive tokens that may show a different order of a piece's pairs: both the first
    two tokens and the last two make up the piece.
    """
    if first == second:
        return
    ranks = {pair: rank for rank, pair in enumerate(second)}
    for _, pairs in _group_pairs(first, ()):
        for pair, later in itertools.combinations(pairs, 2):
            if ranks.get(pair, 0) > ranks.get(later, 0):
                # The end of one pair is the beginning of the other: in the three tokens, the
                # order decides which pair is merged.
                for left_pair, right_pair in ((pair, later), (later, pair)):
                    if left_pair[1] == right_pair[0]:
                        yield left_pair[0], left_pair[1], right_pair[1]


def scores_difference(merges: Sequence[Pair], scores: Mapping[str, float]) -> str | None:
    """Find the first difference between a list of pairs and the scores of pieces; None if they
    are equivalent, as far as pieces with equal scores allow. Pairs with pieces that have no score
    are not compared.
    """
    listed: dict[str, set[Pair]] = {}
    last: tuple[str, float] | None = None
    for pair in merges:
        piece = "".join(pair)
        if pair[0] not in scores or pair[1] not in scores or piece not in scores:
            continue
        if last is not None and scores[piece] > last[1]:
            return f"merges: {last[0]!r} comes before {piece!r}, whose score is higher"
        last = piece, scores[piece]
        listed.setdefault(piece, set()).add(pair)
    for piece in scores:
        pairs = listed.get(piece, set())
        expected = list(splits(piece, scores))
        # The listed pairs are splits of the piece, so that their number is enough to compare.
        if len(pairs) != len(expected):
            first = _format_pairs(sorted(pairs))
            second = _format_pairs(sorted(expected))
            return f"merges: {first} against {second} for {piece!r}"
    return None


def _group_pairs(merges: Sequence[Pair], ignored: Collection[str]) -> list[tuple[str, list[Pair]]]:
    """Group consecutive pairs that make up the same piece, with the piece."""
    compared = merges
    if ignored:
        compared = []
        for first, second in merges:
            if first in ignored or second in ignored or first + second in ignored:
                continue
            compared.append((first, second))
    groups: list[tuple[str, list[Pair]]] = []
    for piece, pairs in itertools.groupby(compared, "".join):
        groups.append((piece, list(pairs)))
    return groups


def _format_pairs(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return "none"
    text = ", ".join(f"{first!r} + {second!r}" for first, second in pairs[:2])
    if len(pairs) > 2:
        text += ", ..."
    return text
