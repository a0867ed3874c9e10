"""Do two tokenizers merge the same pairs, in the same order?

A list of pairs and scores of pieces say the same where the pairs of each piece stand together: see `merges_by_rank`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from quantkit.text.merges import Pair, splits

_Group = tuple[str, list[Pair]]


def merge_difference(first: Sequence[Pair], second: Sequence[Pair], ignored: Collection[str] = ()) -> str | None:
    """The first difference between two lists of pairs; None where they merge alike, but for what
    `order_probes` may show.

    Args:
        ignored: tokens that are found in a text before pairs are merged.
    """
    if first == second:
        return None
    own, others = _groups(first, ignored), _groups(second, ignored)
    for (piece, pairs), (other, other_pairs) in zip(own, others, strict=False):
        if piece != other or {*pairs} != {*other_pairs}:
            return f"merges: {_shown(pairs)} against {_shown(other_pairs)}"
    if len(own) == len(others):
        return None
    more, fewer = (own, others) if len(own) > len(others) else (others, own)
    sides = [_shown(more[len(fewer)][1]), "none"]
    return "merges: " + " against ".join(sides if more is own else sides[::-1])


def order_probes(first: Sequence[Pair], second: Sequence[Pair]) -> Iterator[tuple[str, str, str]]:
    """Tokens in a row that two lists may merge otherwise if they have the same pairs for each piece in another order:
    both the first two and the last two of them make the piece."""
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
    """The first difference between a list of pairs and scores of pieces; None where they merge alike, as far as
    pieces with equal scores allow.

    Args:
        scores: of the pieces that pairs make and are made of; pairs of others are not compared.
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
        found, cuts = listed.get(piece, set()), range(1, len(piece))
        if len(found) != sum(piece[:cut] in scores and piece[cut:] in scores for cut in cuts):
            expected = splits(piece, scores)
            return f"merges: {_shown(sorted(found))} against {_shown(sorted(expected))} for {piece!r}"
    return None


def _groups(merges: Sequence[Pair], ignored: Collection[str]) -> list[_Group]:
    """Pieces in the order in which they are merged, with the pairs that make them."""
    found: list[_Group] = []
    for pair in merges:
        piece = pair[0] + pair[1]
        if ignored and (piece in ignored or pair[0] in ignored or pair[1] in ignored):
            continue
        if found and found[-1][0] == piece:
            found[-1][1].append(pair)
        else:
            found.append((piece, [pair]))
    return found


def _shown(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{first!r} + {second!r}" for first, second in pairs[:2]) + (", ..." * (len(pairs) > 2)) or "none"
