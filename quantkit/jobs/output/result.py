"""Results of the jobs that write a model: what was written, and its quality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.memory import size_text
from quantkit.jobs.output.sizes import WeightSizes
from quantkit.quality.figures import Estimate, average_estimates
from quantkit.quality.gate_result import Gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly

if TYPE_CHECKING:
    from quantkit.bit_allocation.allocation import Allocation
    from quantkit.quality.transcoded import Exact


@dataclass(frozen=True)
class ConvertResult:
    """What `quantkit.convert` wrote.

    Attributes:
        path: the new folder or GGUF file.
        weight_bytes: what the tensors occupy on disk.
        bits_per_weight: their average over all parameters.
        exact: what was read back and found equal to the source, or equal once cast; tensors that
            were rounded anew are not counted.
        rounded: how many quantized tensors were rounded anew, as `requantize` allows.
        quality: what the gate measured of them, and of those whose scales were cast; None where
            there are none.
        seconds: what it took; a resumed run counts its own time.
        notes: what one should know though it is no error.
        manifest: what ``quantkit.json`` holds.
        skipped: whether `path` existed and was accepted, with `if_exists="skip"`.
    """

    path: Path
    weight_bytes: int
    bits_per_weight: float
    exact: Exact
    rounded: int
    quality: Gate | None
    seconds: float
    notes: list[str]
    manifest: dict[str, Any]
    skipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Convert all of it to plain values."""
        if self.quality is None:
            quality = None
        else:
            quality = self.quality.to_json()
        return {**asdict(self), "path": str(self.path), "quality": quality}

    def lines(self) -> list[str]:
        """Write the report for people: one line."""
        facts = [size_text(self.weight_bytes), _bits(self.bits_per_weight)]
        # Where all weights were rounded anew, the count of equal ones is 0 and says nothing.
        all_rounded = self.rounded and not self.exact.tensors
        if not all_rounded:
            facts.append(self.exact.line())
        if self.quality is not None:
            if self.rounded:
                facts.append(f"{self.rounded} rounded anew")
            facts += quality_texts(self.quality)
        facts.append(time_text(self.seconds))
        return [f"{_outcome(self)}: {', '.join(facts)}"]


@dataclass(frozen=True)
class QuantizeResult:
    """What `quantkit.quantize` wrote.

    Attributes:
        path: the new folder or GGUF file.
        schemes: how many linear layers have each scheme, the most frequent first.
        weight_bytes: what the tensors occupy on disk.
        bits_per_weight: their average over all parameters, those that keep their floats included.
        method: ``rtn`` or ``gptq``.
        calibration: what GPTQ was calibrated on, as the manifest has it; None for rounding.
        quality: what the gate measured; of a model known by its tensors only, what became of them.
        accepted: whether the result was to be kept whatever the gate says.
        seconds: what it took; a resumed run counts its own time.
        notes: what one should know though it is no error.
        manifest: what ``quantkit.json`` holds.
        weights: the size of its files of weights and of the source's.
        embedding: its scheme; None where it keeps its floats.
        positions: what was lost by position; None if no certificate was requested.
        allocation: how the schemes were chosen for a size; None where they were given.
        skipped: as in `ConvertResult`.
        effort: of GPTQ; None for rounding.
        kv_cache: the type of the KV cache whose scales are written, such as ``fp8``; None for none.
        refined: with `refine`, the KL on samples that were held back, as it fell: evaluations with
            their ``step``.
        formats: the result in each format by name, if several were requested; empty for one. `path`
            is then the folder of all, `notes` and `seconds` are those of all, and the other fields
            those of the first.
    """

    path: Path
    schemes: dict[str, int]
    weight_bytes: int
    bits_per_weight: float
    method: str
    calibration: dict[str, Any] | None
    quality: Gate | WeightsOnly
    accepted: bool
    seconds: float
    notes: list[str]
    manifest: dict[str, Any]
    weights: WeightSizes
    embedding: str | None = None
    positions: PositionCertificate | None = None
    allocation: Allocation | None = None
    skipped: bool = False
    effort: str | None = None
    kv_cache: str | None = None
    refined: list[dict[str, Any]] | None = None
    formats: dict[str, QuantizeResult] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Convert all of it to plain values; ``quality`` and ``positions`` as the manifest has
        them.
        """
        if self.positions is None:
            positions = None
        else:
            positions = self.positions.to_json(accepted=self.accepted)
        values = {
            "path": str(self.path),
            "quality": self.quality.to_json(accepted=self.accepted),
            "positions": positions,
            "allocation": None if self.allocation is None else self.allocation.to_json(),
            "formats": {name: format_.to_json() for name, format_ in self.formats.items()},
        }
        # `asdict` would copy these two in vain: they have their own conversions.
        return asdict(replace(self, allocation=None, formats={})) | values

    def lines(self) -> list[str]:
        """Write the report for people: a table of the chosen schemes, if they were chosen for a
        size; then one line with the divergence and the growth of perplexity over all texts of the
        gate together; then the certificate; last, hints for a smaller model. Of several formats
        those of each, and last the size of all.
        """
        duration = time_text(self.seconds)
        if not self.formats:
            return self._lines(duration)
        # The formats are computed together, so only all of them have a time.
        lines: list[str] = []
        output_bytes = 0
        for format_ in self.formats.values():
            lines += format_._lines()
            output_bytes += format_.weights.output_bytes
        size = size_text(output_bytes)
        lines.append(f"{_outcome(self)}: {len(self.formats)} formats, {size}, {duration}")
        return lines

    def _lines(self, *extra_facts: str) -> list[str]:
        facts = [_schemes(self.schemes)]
        if self.embedding:
            facts.append(f"embedding {self.embedding}")
        if self.kv_cache:
            facts.append(f"KV cache {self.kv_cache}")
        facts += [
            self.weights.text(),
            _bits(self.bits_per_weight),
            *quality_texts(self.quality),
        ]
        if self.refined is not None:
            # Refining keeps the weights of its best evaluation, which need not be the last one.
            start = self.refined[0]["held_back"]
            best = min(evaluation["held_back"] for evaluation in self.refined)
            facts.append(f"refined: KL on text that was held back {best / start - 1:+.1%}")
        lines: list[str] = []
        if self.allocation is not None:
            lines += [*self.allocation.lines(), self.allocation.line()]
        lines.append(f"{_outcome(self)}: {', '.join([*facts, *extra_facts])}")
        if self.positions is not None:
            lines += self.positions.lines()
        return [*lines, *self.weights.hints()]


def join_results(
    results: Mapping[str, QuantizeResult], path: Path, seconds: float
) -> QuantizeResult:
    """Join the results in the folders of `path` into that of a run that took some seconds; the key
    of a single one is ``""``.
    """
    first = next(iter(results.values()))
    if "" in results:
        return replace(first, seconds=seconds)
    # Notes about the source are the same for all formats.
    notes: dict[str, None] = {}
    for result in results.values():
        notes |= dict.fromkeys(result.notes)
    return replace(first, path=path, seconds=seconds, notes=list(notes), formats=dict(results))


def growth_text(ratio: Estimate) -> str:
    """Write by how much a figure has grown, in percent."""
    growth = Estimate(ratio.value - 1, ratio.error).times(100)
    # A negative number has a sign already.
    sign = "" if growth.value < 0 else "+"
    return f"{sign}{growth} %".replace(" ±", " % ±")


def _outcome(result: ConvertResult | QuantizeResult) -> str:
    if result.skipped:
        return f"{result.path} exists already, from the same inputs and options"
    return f"wrote {result.path}"


def _schemes(schemes: dict[str, int]) -> str:
    if len(schemes) == 1:
        return next(iter(schemes))
    parts: list[str] = []
    for scheme, count in schemes.items():
        noun = "linears" if count > 1 else "linear"
        parts.append(f"{scheme} ({count} {noun})")
    return " and ".join(parts)


def _bits(bits_per_weight: float) -> str:
    return f"{bits_per_weight:.2f} bits a weight"


def quality_texts(quality: Gate | WeightsOnly) -> list[str]:
    """Write the mean KL, and by how much perplexity has grown, over all tokens of the gate's
    texts.
    """
    if isinstance(quality, WeightsOnly):
        return [quality.line()]
    # Each text counts by its number of tokens.
    tokens: list[int] = []
    kl_estimates: list[Estimate] = []
    ratios: list[Estimate] = []
    for text in quality.texts:
        tokens.append(text.tokens)
        kl_estimates.append(text.kl_estimate)
        ratios.append(text.perplexity_ratio)
    kl = average_estimates(kl_estimates, tokens)
    ratio = average_estimates(ratios, tokens)
    return [f"KL {kl}", f"perplexity {growth_text(ratio)}"]


def time_text(seconds: float) -> str:
    if seconds < 60:
        if seconds < 10:
            return f"{seconds:.2g} s"
        return f"{seconds:.0f} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    # Seconds do not matter beside hours.
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {remaining_seconds:02} s"
