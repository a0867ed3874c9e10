"""Byte-pair encoding by a list of pairs, and by the scores of what pairs make: one as the other, where they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

Pair = tuple[str, str]


def merges_by_rank(order: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[Pair]:
    """The pairs that build each piece, best pieces first.

    Every split into two known pieces is listed: byte-pair encoding takes whichever it
    reaches first.
    """
    merges: list[Pair] = []
    for piece in sorted(order, key=lambda p: order[p]):
        known = [(vocabulary[a], vocabulary[b], a, b) for a, b in splits(piece, vocabulary)]
        merges += [(a, b) for _, _, a, b in sorted(known)]
    return merges


def ranks_of_merges(
    merges: Sequence[Pair], vocabulary: Mapping[str, int], apart: Collection[str] = ()
) -> dict[str, int] | None:  # fmt: skip
    """The place of each piece that pairs make, from 0; None where scores would not say the same as the list: one
    piece's pairs lie apart in it, or not all pairs that make it are there.

    Args:
        apart: pieces that are found in a text before pairs are.
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
    """Whether a list of pairs, each with a place of its own, says the same as the scores of pieces.

    It cannot where several pieces that pairs make have one score, and where a piece is of a letter that is none
    itself.
    """
    long = [piece for piece in scores if len(piece) > 1]
    often = Counter(scores[piece] for piece in long)
    made = [scores[piece] for piece in long if often[scores[piece]] > 1 and any(splits(piece, vocabulary))]
    if len(set(made)) < len(made):
        return False
    return not any(
        part not in vocabulary and len(part) == 1 and (len(other) == 1 or other in vocabulary)
        for piece in long
        for part, other in ((piece[0], piece[1:]), (piece[-1], piece[:-1]))
    )


def merges_make_all(pieces: Iterable[str], vocabulary: Mapping[str, int], merges: Sequence[Pair]) -> bool:
    """Whether merges make each of some pieces out of its letters, so that it is the same to take it as it is."""
    from tokenizers import models

    pairs = models.BPE(vocab=dict(vocabulary), merges=list(merges))
    return all(len(pairs.tokenize(piece)) == 1 for piece in pieces)


def pairs_of(merges: Iterable[Any]) -> list[Pair]:
    """Pairs as tokenizer.json lists them: each in one text, or in two."""
    return [(first, second) for first, second in (one.split(" ") if isinstance(one, str) else one for one in merges)]


def splits(piece: str, vocabulary: Container[str]) -> Iterator[Pair]:
    """The ways to make a piece of two that are known."""
    for cut in range(1, len(piece)):
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary:
            yield piece[:cut], piece[cut:]
