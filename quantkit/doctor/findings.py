"""What a rule is, and what it found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Runtime = Literal["vllm", "transformers", "llama.cpp", "mlx"]
RUNTIMES: tuple[Runtime, ...] = ("vllm", "transformers", "llama.cpp", "mlx")
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The worst first."""


@dataclass(frozen=True)
class Rule:
    """Something that can be wrong.

    Attributes:
        name: by which people and scripts know it.
        severity: an error breaks the model, or has it say something else, wherever it is loaded.
        checks: what is wrong where it is found, in a few words.
        remedy: what to do about it.
        source: where it comes from: a format's description, or threads of runtimes' issue trackers.
        breaks: the runtimes that it breaks though it is no error for all.
    """

    name: str
    severity: Severity
    checks: str
    remedy: str
    source: str
    breaks: tuple[Runtime, ...] = ()

    def severity_for(self, runtime: Runtime | None) -> Severity:
        """How bad it is: for one runtime, or for nobody in particular."""
        return "error" if runtime in self.breaks else self.severity


@dataclass(frozen=True)
class Finding:
    """What is wrong in one place.

    Attributes:
        where: a module, a tensor or a file.
        what: what was found, and what was expected.
    """

    rule: Rule
    where: str
    what: str

    def to_json(self, runtime: Runtime | None = None) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "severity": self.rule.severity_for(runtime),
            "rule": self.rule.name,
            "where": self.where,
            "what": self.what,
            "remedy": self.rule.remedy,
            "source": self.rule.source,
            "breaks": list(self.rule.breaks),
        }


def ordered(findings: Iterable[Finding], runtime: Runtime | None) -> list[Finding]:
    """The worst first, those of one rule together, as they were found; each once."""
    places: dict[str, int] = {}
    found = list(dict.fromkeys(findings))
    for finding in found:
        places.setdefault(finding.rule.name, len(places))
    return sorted(
        found, key=lambda one: (SEVERITIES.index(one.rule.severity_for(runtime)), places[one.rule.name])
    )  # fmt: skip
