"""Byte-pair encoding by a list of pairs, or by a score for each merged piece: conversion and
comparison.

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
    """Return the pairs that build each piece, best pieces first.

    Every split into two known pieces is listed: byte-pair encoding uses the one that it reaches
    first.
    """
    merges: list[Pair] = []
    for piece in sorted(order, key=lambda p: order[p]):
        known = [(vocabulary[a], vocabulary[b], a, b) for a, b in splits(piece, vocabulary)]
        merges += [(a, b) for _, _, a, b in sorted(known)]
    return merges


def ranks_of_merges(
    merges: Sequence[Pair], vocabulary: Mapping[str, int], apart: Collection[str] = ()
) -> dict[str, int] | None:
    """Return the rank of each merged piece, from 0; None if scores are not equivalent to the list,
    as the pairs of a piece are not consecutive or some are missing. The pieces in `apart` are found
    in text before pairs are merged.
    """
    ranks: dict[str, int] = {}
    last = ""
    for pair in merges:
        piece = "".join(pair)
        if piece in apart or piece == last:
            continue
        if piece in ranks:
            return None
        ranks[piece] = len(ranks)
        last = piece
    listed = set(merges)
    for piece in vocabulary:
        if piece not in apart:
            missing = (pair for pair in splits(piece, vocabulary) if pair not in listed)
            if not all(pair[0] in apart or pair[1] in apart for pair in missing):
                return None
    return ranks


def scores_are_ranks(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> bool:
    """Return whether a list of pairs is equivalent to the scores of pieces.

    It is not if several merged pieces have the same score, or a piece contains a letter that is not
    a piece.
    """
    long = [piece for piece in scores if len(piece) > 1]
    counts = Counter(scores[piece] for piece in long)
    merged = []
    for piece in long:
        if counts[scores[piece]] > 1 and any(splits(piece, vocabulary)):
            merged.append(scores[piece])
    if len(set(merged)) < len(merged):
        return False
    return not any(
        part not in vocabulary and len(part) == 1 and (len(other) == 1 or other in vocabulary)
        for piece in long
        for part, other in ((piece[0], piece[1:]), (piece[-1], piece[:-1]))
    )


def merges_make_all(
    pieces: Iterable[str], vocabulary: Mapping[str, int], merges: Sequence[Pair]
) -> bool:
    """Return whether merging the letters of each piece results in the piece, so that
    `ignore_merges` has no effect.
    """
    from tokenizers import models

    pairs = models.BPE(vocab=dict(vocabulary), merges=list(merges))
    return all(len(pairs.tokenize(piece)) == 1 for piece in pieces)


def pairs_of(merges: Iterable[Any]) -> list[Pair]:
    """Return the merges of a tokenizer.json, which lists each pair as one string or as two."""
    pairs: list[Pair] = []
    for first, second in (
        merge.split(" ") if isinstance(merge, str) else merge for merge in merges
    ):
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
    """Return the first difference between two lists of pairs; None if they are equivalent, except
    for what `order_probes` may show. The tokens in `ignored` are found in text before pairs are
    merged.
    """
    if first == second:
        return None
    for (piece, pairs), (other, other_pairs) in itertools.zip_longest(
        _groups(first, ignored), _groups(second, ignored), fillvalue=("", [])
    ):
        if piece != other or {*pairs} != {*other_pairs}:
            return f"merges: {_format_pairs(pairs)} against {_format_pairs(other_pairs)}"
    return None


def order_probes(first: Sequence[Pair], second: Sequence[Pair]) -> Iterator[tuple[str, str, str]]:
    """Consecutive tokens that may show a different order of a piece's pairs: both the first two
    tokens and the last two make up the piece.
    """
    if first == second:
        return
    ranks = {pair: rank for rank, pair in enumerate(second)}
    for _, pairs in _groups(first, ()):
        for pair, later in itertools.combinations(pairs, 2):
            if ranks.get(pair, 0) > ranks.get(later, 0):
                for one, other in ((pair, later), (later, pair)):
                    if one[1] == other[0]:
                        yield one[0], one[1], other[1]


def scores_difference(merges: Sequence[Pair], scores: Mapping[str, float]) -> str | None:
    """Return the first difference between a list of pairs and the scores of pieces; None if they
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
        found = listed.get(piece, set())
        expected = list(splits(piece, scores))
        if len(found) != len(expected):
            first = _format_pairs(sorted(found))
            second = _format_pairs(sorted(expected))
            return f"merges: {first} against {second} for {piece!r}"
    return None


def _groups(merges: Sequence[Pair], ignored: Collection[str]) -> list[tuple[str, list[Pair]]]:
    """Consecutive pairs that make up the same piece, with the piece."""
    kept = merges
    if ignored:
        kept = []
        for a, b in merges:
            if a not in ignored and b not in ignored and a + b not in ignored:
                kept.append((a, b))
    return [(piece, list(pairs)) for piece, pairs in itertools.groupby(kept, "".join)]


def _format_pairs(pairs: Sequence[Pair]) -> str:
    return (
        ", ".join(f"{first!r} + {second!r}" for first, second in pairs[:2])
        + (", ..." * (len(pairs) > 2))
        or "none"
    )
