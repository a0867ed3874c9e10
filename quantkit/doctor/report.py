"""What `quantkit.diagnose` returns, and how it is printed."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.doctor.findings import SEVERITIES, Finding, Runtime, ordered

_WIDTH = 100
_INDENT = " " * 4


@dataclass(frozen=True)
class LayerError:
    """The error of a linear compared with its float source.

    Attributes:
        module: its name.
        error: relative to the source (Frobenius norms).
        bound: the error that rounding in its scheme explains.
    """

    module: str
    error: float
    bound: float


@dataclass(frozen=True)
class Diagnosis:
    """What `quantkit.diagnose` finds.

    Attributes:
        path: the folder or file.
        kind: of model, in a few words.
        runtime: the requested one; None for all.
        findings: the worst first.
        looked_at: what was read.
        left_out: what was not checked, and why.
        layers: the error of each linear compared with its float source, the largest first; empty without a source.
    """

    path: str
    kind: str
    runtime: Runtime | None
    findings: Sequence[Finding]
    looked_at: Sequence[str]
    left_out: Sequence[str]
    layers: Sequence[LayerError] = field(default_factory=tuple)

    @property
    def broken(self) -> bool:
        """Whether something breaks: wherever it is loaded, or in the requested runtime."""
        return any(self.severity(finding) == "error" for finding in self.findings)

    def severity(self, finding: Finding) -> str:
        """How bad a finding is here."""
        return finding.rule.severity_for(self.runtime)

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "path": self.path,
            "kind": self.kind,
            "runtime": self.runtime,
            "broken": self.broken,
            "findings": [finding.to_json(self.runtime) for finding in self.findings],
            "looked_at": list(self.looked_at),
            "left_out": list(self.left_out),
            "layers": [vars(layer) for layer in self.layers],
        }

    def lines(self, width: int = _WIDTH) -> list[str]:
        """A table for people: one entry for each rule that found something."""
        lines = _wrapped(f"{self.path}: {self.kind}", "", width)
        for group in _by_rule(ordered(self.findings, self.runtime)):
            lines += self._entry(group, width)
        lines += _layer_lines(self.layers)
        lines += _wrapped(self._sum(), "", width)
        lines += _wrapped(f"looked at: {'; '.join(self.looked_at)}", "", width) if self.looked_at else []
        lines += _wrapped(f"not looked at: {'; '.join(self.left_out)}", "", width) if self.left_out else []
        return [_printable(line) for line in lines]

    def _entry(self, group: Sequence[Finding], width: int) -> list[str]:
        """What one rule found: where the first is, and how many more there are."""
        first, rule = group[0], group[0].rule
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        head = f"  {self.severity(first):<8} {rule.name:<20} "
        where = _shortened(first.where, width - len(head) - len(more)) + more
        breaks = f"; breaks {', '.join(rule.breaks)}" if rule.breaks else ""
        return [
            head + where,
            *_wrapped(first.what + breaks, _INDENT, width),
            *_wrapped(f"-> {rule.remedy} [{rule.source}]", _INDENT, width),
        ]

    def _sum(self) -> str:
        counts = Counter(self.severity(group[0]) for group in _by_rule(self.findings))
        words = [f"{counts[one]} {one}{'s' if counts[one] > 1 else ''}" for one in SEVERITIES if counts[one]]
        who = f" for {self.runtime}" if self.runtime else ""
        return f"{', '.join(words)}{who}" if words else f"nothing found{who}"


def _by_rule(findings: Sequence[Finding]) -> list[list[Finding]]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.rule.name, []).append(finding)
    return list(groups.values())


def _layer_lines(layers: Sequence[LayerError]) -> list[str]:
    if not layers:
        return []
    errors = [layer.error for layer in layers]
    head = f"  from the source: {len(layers)} linears, relative error {min(errors):.3g} to {max(errors):.3g}; farthest:"
    return [head, *(f"    {layer.error:.4f}  {_shortened(layer.module, 80)}" for layer in layers[:3])]


def _shortened(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = (length - 3) // 2
    return f"{text[:half]}...{text[len(text) - half :]}"


def _printable(line: str) -> str:
    """A line with escapes for characters that no terminal shows."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent or _INDENT, break_long_words=True,
        break_on_hyphens=False,
    )  # fmt: skip
