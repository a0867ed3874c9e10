"""The result of refining a model: what was written, and the KL as it fell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.base.memory import size_text
from quantkit.jobs.output.result import quality_texts, time_text
from quantkit.quality.gate_result import Gate
from quantkit.training.training import Evaluation


@dataclass(frozen=True)
class RefineResult:
    """What `quantkit.refine` or `quantkit.apply_delta` wrote.

    Attributes:
        path: the new folder or file.
        weight_bytes: what the tensors occupy on disk; of a delta, its size.
        bits_per_weight: their average over all parameters; None for a delta.
        curve: the KL from the float model on text that was held back, as it fell; the first one is
            before training.
        changed: how many tensors differ from the model before.
        quality: what the gate measured; None for a delta, and for a model that a delta was applied
            to.
        seconds: what it took; a resumed run counts its own time.
        notes: what one should know though it is no error.
        manifest: what ``quantkit.json`` holds; of a delta, what its metadata state.
        is_delta: whether only the changed tensors were written.
    """

    path: Path
    weight_bytes: int
    bits_per_weight: float | None
    curve: Sequence[Evaluation]
    changed: int
    quality: Gate | None
    seconds: float
    notes: list[str]
    manifest: dict[str, Any]
    is_delta: bool = False

    @property
    def before(self) -> float:
        """Return the KL before training, on text that was held back."""
        return self.curve[0].held_back

    @property
    def after(self) -> float:
        """Return the KL of the result, on the same text."""
        # The result has the values of the evaluation with the lowest KL, not of the last one.
        return min(evaluation.held_back for evaluation in self.curve)

    def to_json(self) -> dict[str, Any]:
        """Convert the result to plain values."""
        if self.quality is None:
            quality = None
        else:
            quality = self.quality.to_json()
        return {**asdict(self), "path": str(self.path), "quality": quality}

    def lines(self) -> list[str]:
        """Write the report for people: the KL as it fell, and one line on what was written."""
        facts = [size_text(self.weight_bytes)]
        if self.bits_per_weight is not None:
            facts.append(f"{self.bits_per_weight:.2f} bits a weight")
        facts.append(f"{self.changed} tensors changed")
        lines = []
        if self.curve:
            later_kl = []
            for evaluation in self.curve[1:]:
                later_kl.append(f"{evaluation.held_back:.4g} after {evaluation.step} steps")
            lines.append(
                f"KL on text that was held back: {self.before:.4g} before, {', '.join(later_kl)}"
            )
            facts.append(f"KL on text that was held back {self.after / self.before - 1:+.1%}")
        if self.quality is not None:
            facts += quality_texts(self.quality)
        facts.append(time_text(self.seconds))
        lines.append(f"wrote {self.path}: {', '.join(facts)}")
        return lines
