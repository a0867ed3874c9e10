"""How far a model is from its source by how far in a context a token lies: the figures, and what is certified by them.

Nothing here is measured, and no torch imported: see `position_divergence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, QualityError
from quantkit.quality.figures import Estimate, significant

FLOAT, INT8 = "float", "int8"
CACHES = (FLOAT, INT8)
"""What keys and values are kept in."""

SHORTEST = 128
"""Tokens of the first bucket; the ones that follow double the length."""
TOKENS = 32768
"""How many are measured, in as many windows as that gives, where no number of windows is asked for."""
_CLEAR = 2.0  # standard errors
_ENOUGH = 128  # tokens of a bucket, whose mean counts as it is


@dataclass(frozen=True)
class PositionDivergence:
    """How far a model's predictions are from a reference's at some positions of a context.

    Attributes:
        start, stop: the positions, from the first to before the last.
        tokens: compared there, in all windows.
        kl: mean of KL(reference || model) per token, in nats.
        kl_error: its standard error; None where there are too few tokens.
        top1_agreement: share of tokens whose likeliest next one is the same.
    """

    start: int
    stop: int
    tokens: int
    kl: float
    kl_error: float | None
    top1_agreement: float

    @property
    def name(self) -> str:
        """Its first and last position: ``128-255``."""
        return f"{self.start}-{self.stop - 1}"

    def rounded(self) -> PositionDivergence:
        """With as many digits as a manifest has."""
        error = None if self.kl_error is None else float(f"{self.kl_error:.5g}")
        return replace(self, kl=float(f"{self.kl:.5g}"), kl_error=error, top1_agreement=round(self.top1_agreement, 5))

    @property
    def estimate(self) -> Estimate:
        """The mean KL with its standard error."""
        return Estimate(self.kl, self.kl_error)

    def is_beyond(self, bound: float) -> bool:
        """Whether its mean KL is NaN or beyond a bound; of few tokens clearly so, by two standard errors, as far as
        these are known."""
        if math.isnan(self.kl) or self.tokens >= _ENOUGH:
            return not self.kl <= bound
        return self.kl - _CLEAR * (self.kl_error or 0.0) > bound


def position_edges(length: int, shortest: int = SHORTEST) -> list[int]:
    """Where the buckets of a context begin and end: 0, 128, 256, 512, ..., the last cut at its length; one that would
    be cut to less than half goes with the one before, so that no verdict is read off a few tokens."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, 2 * edges[-1] or shortest))
    if len(edges) > 2 and 2 * (length - edges[-2]) < edges[-2]:
        del edges[-2]
    return edges


def rise(buckets: Sequence[PositionDivergence]) -> Estimate | None:
    """The KL of the last bucket over that of the first, by the delta method; None where there are no two."""
    first, last = buckets[0], buckets[-1]
    if len(buckets) < 2 or not first.kl > 0:
        return None
    ratio = last.kl / first.kl
    if first.kl_error is None or last.kl_error is None:
        return Estimate(ratio)
    return Estimate(ratio, math.hypot(last.kl_error / first.kl, ratio * first.kl_error / first.kl))


def rise_text(buckets: Sequence[PositionDivergence]) -> str:
    """Whether divergence rises with the position, in words."""
    found = rise(buckets)
    if found is None:
        return "no later positions to hold it against" if len(buckets) < 2 else f"that at {buckets[0].name} is 0"
    told = f"{found} times that at {buckets[0].name}"
    if found.error is None:
        return told
    if abs(found.value - 1) <= _CLEAR * found.error:
        return f"{told}: no clear change"
    return f"{told}: it {'rises' if found.value > 1 else 'falls'}"


def cut_short(text: str, length: int, asked: int, context: int) -> str:
    """The note on windows of a text that have fewer tokens than were asked for.

    Args:
        context: the most that the models can take.
    """
    ends = "the model's context" if length == context else f"the text '{text}'"
    return f"KL by position goes to {length} tokens, not {asked}: {ends} has no more"


@dataclass(frozen=True)
class PositionCertificate:
    """What a quantized model lost by position, as its manifest has it.

    Attributes:
        text, sha256: of the text's name, and of its content.
        asked: the positions asked for; the text or the model's context may have had fewer.
        length: tokens of a window, BOS included.
        windows: how many there were.
        kl_bound: the most that a bucket's KL may be with a float cache.
        caches: the buckets, by what keys and values are kept in.
    """

    text: str
    sha256: str
    asked: int
    length: int
    windows: int
    kl_bound: float
    caches: dict[str, list[PositionDivergence]]

    def problem(self) -> tuple[str, str, str] | None:
        """What is wrong, found and expected, if anything is; NaN is beyond every bound. An int8 cache is for whoever
        runs the model to choose: its figures inform."""
        beyond = [one for one in self.caches[FLOAT] if one.is_beyond(self.kl_bound)]
        if not beyond:
            return None
        worst = max(beyond, key=lambda one: math.inf if math.isnan(one.kl) else one.kl)
        return (
            f"the result is too far from its source at positions {worst.name}",
            f"a mean KL(source || result) of {significant(worst.kl, 5)} nats a token on '{self.text}'",
            f"at most {self.kl_bound:.3g}",
        )

    def require_within(self, dst: Path) -> None:
        """Let a model through.

        Raises:
            QualityError: if a bucket is beyond the bound.
        """
        if (problem := self.problem()) is not None:
            raise QualityError(
                problem[0], path=dst, found=problem[1], expected=problem[2],
                hint=f"the last KL is {rise_text(self.caches[FLOAT])}; choose a finer scheme, or keep it with"
                " `accept_quality_loss=True` (and `resume=True`)",
            )  # fmt: skip

    def lines(self) -> list[str]:
        """For people: a line for each cache, and one where it was not passed: the model was kept all the same."""
        tokens = f"{self.windows} x {self.length} tokens of {self.text}"
        told = []
        for cache, buckets in self.caches.items():
            last = buckets[-1]
            told.append(f"KL by position, {cache} cache: {last.estimate} at {last.name}, {rise_text(buckets)}")
        problem = self.problem()
        beyond = (
            [] if problem is None else [f"BEYOND ITS BOUND, and accepted: {problem[0]}: {problem[1]}, {problem[2]}"]
        )
        return [f"{told[0]} ({tokens})", *told[1:], *beyond]

    def to_json(self, *, accepted: bool = False) -> dict[str, Any]:
        """The manifest's form.

        Args:
            accepted: whether the result was to be kept whatever this says.
        """
        return {"passed": self.problem() is None, "accepted": accepted, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, path: Path) -> PositionCertificate:
        """What `to_json` gave, read from the manifest at a path.

        Raises:
            CheckpointError: if it is of another form.
        """
        try:
            caches = {cache: [_bucket(one) for one in value["caches"][cache]] for cache in CACHES}
            found = cls(
                str(value["text"]), str(value["sha256"]), int(value["asked"]), int(value["length"]),
                int(value["windows"]), float(value["kl_bound"]), caches,
            )  # fmt: skip
            sound = all(caches.values())
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError("does not tell the divergence by position", path=path, hint="make it again")
        return found


def _bucket(value: Mapping[str, Any]) -> PositionDivergence:
    error = value["kl_error"]
    return PositionDivergence(
        int(value["start"]), int(value["stop"]), int(value["tokens"]), float(value["kl"]),
        None if error is None else float(error), float(value["top1_agreement"]),
    )  # fmt: skip
