"""The divergence of a model from its source by the tokens' position in the context, and the
certificate on it.

Without torch: `position_divergence.py` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.base.messages import Message, Option
from quantkit.errors import QualityError
from quantkit.quality.figures import Estimate, read_record, round_figure, significant

FLOAT = "float"
CACHES = (FLOAT, "int8")
"""The types of KV caches."""


def select_caches(*configs: ModelConfig) -> tuple[str, ...]:
    """Select the types of KV caches with which models are measured: int8 rows only where quantkit's
    decoder runs all of them, since no other program has such a cache.
    """
    if all(config.runnable for config in configs):
        return CACHES
    return (FLOAT,)


SHORTEST = 128
"""Positions of the first bucket; each later one is as long as all before it."""
TOKENS = 32768
"""How many are measured if no number of windows is requested."""
# Standard errors from which a difference is clear.
_CLEAR = 2.0
# Of a bucket whose mean is compared as it is.
_MIN_TOKENS = 128


@dataclass(frozen=True)
class PositionDivergence:
    """How far a model's predictions are from a reference's at a range of positions.

    Attributes:
        start, stop: the range; `stop` is excluded.
        tokens: compared there, in all windows.
        kl: mean of KL(reference || model) per token, in nats.
        kl_error: its standard error; None for too few tokens.
        top1_agreement: share of tokens whose likeliest next token is the same.
    """

    start: int
    stop: int
    tokens: int
    kl: float
    kl_error: float | None
    top1_agreement: float

    @property
    def name(self) -> str:
        """Return the first and last position: ``128-255``."""
        return f"{self.start}-{self.stop - 1}"

    def round_values(self) -> PositionDivergence:
        """Round the figures to the digits that a manifest has."""
        if self.kl_error is None:
            error = None
        else:
            error = round_figure(self.kl_error)
        return replace(
            self,
            kl=round_figure(self.kl),
            kl_error=error,
            top1_agreement=round(self.top1_agreement, 5),
        )

    @property
    def estimate(self) -> Estimate:
        """Return the mean KL with its standard error."""
        return Estimate(self.kl, self.kl_error)

    def is_beyond(self, bound: float) -> bool:
        """Return whether the mean KL is NaN or exceeds a bound; for few tokens, by two standard
        errors if these are known.
        """
        # The mean of a few tokens exceeds a bound by chance. NaN must not pass, hence the `not`.
        if math.isnan(self.kl) or self.tokens >= _MIN_TOKENS:
            return not self.kl <= bound
        return self.kl - _CLEAR * (self.kl_error or 0.0) > bound


def position_edges(length: int, shortest: int = SHORTEST) -> list[int]:
    """Choose the edges of a context's buckets: 0, 128, 256, 512, ..., and its length. A last bucket
    of less than half the length is merged with the one before, so that no verdict rests on a few
    tokens.
    """
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, 2 * edges[-1] or shortest))
    if len(edges) > 2 and 2 * (length - edges[-2]) < edges[-2]:
        del edges[-2]
    return edges


def rise(buckets: Sequence[PositionDivergence]) -> Estimate | None:
    """Divide the KL of the last bucket by that of the first; None for a single bucket."""
    first = buckets[0]
    last = buckets[-1]
    if len(buckets) < 2 or not first.kl > 0:
        return None
    ratio = last.kl / first.kl
    if first.kl_error is None or last.kl_error is None:
        return Estimate(ratio)
    # The delta method: the error of a quotient of independent figures.
    error = math.hypot(last.kl_error / first.kl, ratio * first.kl_error / first.kl)
    return Estimate(ratio, error)


def rise_text(buckets: Sequence[PositionDivergence]) -> str:
    """Describe whether divergence rises with the position."""
    ratio = rise(buckets)
    if ratio is None:
        if len(buckets) < 2:
            return "no later positions to compare it with"
        return f"that at {buckets[0].name} is 0"
    text = f"{ratio} times that at {buckets[0].name}"
    if ratio.error is None:
        return text
    if abs(ratio.value - 1) <= _CLEAR * ratio.error:
        return f"{text}: no clear change"
    return f"{text}: it {'rises' if ratio.value > 1 else 'falls'}"


@dataclass(frozen=True)
class PositionCertificate:
    """The divergence of a quantized model by position, as its manifest has it.

    Attributes:
        text, sha256: the text's name, and the hash of its content.
        asked: the requested positions (the manifest's key); the text or the model's context may
            have had fewer.
        length: tokens of a window, BOS included.
        windows: their number.
        kl_bound: the largest KL of a bucket, with a float cache, that passes.
        caches: the buckets by type of the KV cache.
    """

    text: str
    sha256: str
    asked: int
    length: int
    windows: int
    kl_bound: float
    caches: dict[str, list[PositionDivergence]]

    def __post_init__(self) -> None:
        if not self.caches.get(FLOAT) or not all(self.caches.values()):
            raise ValueError("a cache has no measurements")

    def problem(self) -> tuple[str, str, str] | None:
        """Describe the problem, what was found and what was expected; None if the certificate is
        passed. NaN exceeds every bound. Whoever runs the model chooses an int8 cache: its figures
        are for information.
        """
        beyond = [bucket for bucket in self.caches[FLOAT] if bucket.is_beyond(self.kl_bound)]
        if not beyond:
            return None

        def kl_rank(bucket: PositionDivergence) -> float:
            # `max` cannot compare NaN.
            if math.isnan(bucket.kl):
                return math.inf
            return bucket.kl

        worst = max(beyond, key=kl_rank)
        problem = f"the result is too far from its source at positions {worst.name}"
        divergence = (
            f"a mean KL(source || result) of {significant(worst.kl, 5)} nats a token on"
            f" '{self.text}'"
        )
        return problem, divergence, f"at most {self.kl_bound:.3g}"

    def require_within(self, dst: Path) -> None:
        """Raise a `QualityError` if a bucket exceeds the bound."""
        problem = self.problem()
        if problem is not None:
            hint = Message(
                f"the last KL is {rise_text(self.caches[FLOAT])};"
                " choose a finer scheme, or keep it with ",
                Option("accept_quality_loss", value=True),
                " (and ",
                Option("resume", value=True),
                ")",
            )
            raise QualityError(
                problem[0], path=dst, found=problem[1], expected=problem[2], hint=hint
            )

    def lines(self) -> list[str]:
        """Format a line for each cache, and one if the model was kept though it did not pass."""
        lines = []
        for cache, buckets in self.caches.items():
            last = buckets[-1]
            figures = f"{last.estimate} at {last.name}, {rise_text(buckets)}"
            lines.append(f"KL by position, {cache} cache: {figures}")
        # All caches are measured on the same windows.
        lines[0] += f" ({self.windows} x {self.length} tokens of {self.text})"
        problem = self.problem()
        if problem is not None:
            lines.append(
                f"BEYOND ITS BOUND, and accepted: {problem[0]}: {problem[1]}, {problem[2]}"
            )
        return lines

    def to_json(self, *, accepted: bool = False) -> dict[str, Any]:
        """Return the manifest's form; `accepted` states whether the result is kept even if it does
        not pass.
        """
        return {"passed": self.problem() is None, "accepted": accepted, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, path: Path) -> PositionCertificate:
        """Read the result of `to_json` from the manifest at a path.

        Raises `CheckpointError` if it has another form.
        """
        return read_record(cls, value, path, "the divergence by position")
