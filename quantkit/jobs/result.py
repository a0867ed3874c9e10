"""What the jobs that write a model give back: what was made, and how good it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.quality.gate import Gate


@dataclass(frozen=True)
class ConvertResult:
    """What `quantkit.convert` wrote.

    Attributes:
        path: the new folder.
        weight_bytes: what the tensors occupy on disk.
        bits_per_weight: their average over all parameters.
        seconds: what it took; a resumed run counts its own time.
        notes: what one should know though it is no error.
        manifest: what ``quantkit.json`` holds.
    """

    path: Path
    weight_bytes: int
    bits_per_weight: float
    seconds: float
    notes: list[str]
    manifest: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        """The report for people."""
        return [f"wrote {self.path}: {_size(self.weight_bytes, self.bits_per_weight)}, {_time(self.seconds)}"]


@dataclass(frozen=True)
class QuantizeResult:
    """What `quantkit.quantize` wrote.

    Attributes:
        path: the new folder.
        schemes: how many layers have each scheme, the most frequent first.
        weight_bytes: what the tensors occupy on disk.
        bits_per_weight: their average over all parameters, those that keep their floats included.
        method: ``rtn`` or ``gptq``.
        calibration: what GPTQ was calibrated on, as the manifest has it; None for rounding.
        quality: what the gate measured.
        accepted: whether the result was to be kept whatever the gate says.
        seconds: what it took; a resumed run counts its own time.
        notes: what one should know though it is no error.
        manifest: what ``quantkit.json`` holds.
    """

    path: Path
    schemes: dict[str, int]
    weight_bytes: int
    bits_per_weight: float
    method: str
    calibration: dict[str, Any] | None
    quality: Gate
    accepted: bool
    seconds: float
    notes: list[str]
    manifest: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "quality": self.quality.to_json(accepted=self.accepted)}

    def lines(self) -> list[str]:
        """The report for people: one line, with the divergence and the growth of perplexity over all texts of the
        gate together."""
        facts = [_schemes(self.schemes), _size(self.weight_bytes, self.bits_per_weight), *_lost(self.quality)]
        return [f"wrote {self.path}: {', '.join([*facts, _time(self.seconds)])}"]


def size_text(count: int) -> str:
    """A number of bytes for people."""
    for size, unit in ((10**9, "GB"), (10**6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1000:.3g} kB"


def _schemes(schemes: dict[str, int]) -> str:
    if len(schemes) == 1:
        return next(iter(schemes))
    return " and ".join(f"{scheme} ({count} layers)" for scheme, count in schemes.items())


def _size(weight_bytes: int, bits_per_weight: float) -> str:
    return f"{size_text(weight_bytes)}, {bits_per_weight:.2f} bits a weight"


def _lost(quality: Gate) -> list[str]:
    tokens = sum(one.tokens for one in quality.texts)
    kl = sum(one.kl * one.tokens for one in quality.texts) / tokens
    ratio = sum(one.perplexity / one.source_perplexity * one.tokens for one in quality.texts) / tokens
    return [f"KL {kl:.3g}", f"perplexity {100 * (ratio - 1):+.2g} %"]


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
