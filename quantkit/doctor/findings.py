"""Rules, which rules.toml lists, what they find, and the report that `quantkit.diagnose`
returns.
"""

from __future__ import annotations

import functools
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from quantkit.errors import QuantkitError
from quantkit.formats.codecs.codec import Runtime as Runtime

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""
_WIDTH = 100
_INDENT = " " * 4


@dataclass(frozen=True)
class Rule:
    """Something that can be wrong.

    Attributes:
        severity: an error breaks the model, or changes what it predicts, wherever it is loaded.
        checks: what is wrong, in a few words.
        remedy: what to do about it.
        source: a format's description, or threads of runtimes' issue trackers.
        breaks: the runtimes that it breaks although it is not an error for all.
    """

    name: str
    severity: Severity
    checks: str
    remedy: str
    source: str
    breaks: tuple[Runtime, ...] = ()

    def severity_for(self, runtime: Runtime | None) -> Severity:
        """Return its severity for one runtime, or in general."""
        if runtime in self.breaks:
            return "error"
        return self.severity


@dataclass(frozen=True)
class Finding:
    """What is wrong in one place, `where`: a module, a tensor or a file. `what` says what was
    found and expected.
    """

    rule: Rule
    location: str
    message: str

    def to_json(self, runtime: Runtime | None = None) -> dict[str, Any]:
        """Return the finding as plain values."""
        rule = self.rule
        return {
            "severity": rule.severity_for(runtime),
            "rule": rule.name,
            "where": self.location,
            "what": self.message,
            "remedy": rule.remedy,
            "source": rule.source,
            "breaks": list(rule.breaks),
        }


@functools.cache
def rules() -> Mapping[str, tuple[Rule, ...]]:
    """Return all rules, by theme."""
    listed = tomllib.loads(files(__package__).joinpath("rules.toml").read_text("utf-8"))
    result: dict[str, tuple[Rule, ...]] = {}
    for theme, named in listed.items():
        result[theme] = tuple(
            Rule(name, **{**rule, "breaks": tuple(rule.get("breaks", ()))})
            for name, rule in named.items()
        )
    return result


@functools.cache
def _by_name() -> Mapping[str, Rule]:
    result: dict[str, Rule] = {}
    for theme in rules().values():
        for rule in theme:
            result[rule.name] = rule
    return result


def finding(rule: str, location: str, message: str) -> Finding:
    """Return what the rule of a name has found."""
    return Finding(_by_name()[rule], location, message)


def describe(error: Exception) -> str:
    """Describe an error in a finding: the problem, with what was found and expected."""
    if not isinstance(error, QuantkitError):
        return str(error)
    facts = []
    if error.found is not None:
        facts.append(f"found {error.found}")
    if error.expected is not None:
        facts.append(f"expected {error.expected}")
    if facts:
        return f"{error.problem} ({', '.join(facts)})"
    return error.problem


@dataclass(frozen=True)
class LayerError:
    """The error of a linear, relative to its float source (Frobenius norms), and the error that
    rounding explains.
    """

    module: str
    error: float
    bound: float


@dataclass(frozen=True)
class Diagnosis:
    """What `quantkit.diagnose` finds.

    Attributes:
        kind: of model, in a few words.
        runtime: the requested one; None for all.
        findings: the worst first.
        looked_at: what was read.
        left_out: what was not checked, and why.
        layers: the error of each linear compared with its float source, the largest first; empty
            without a source.
    """

    path: str
    kind: str
    runtime: Runtime | None
    findings: Sequence[Finding]
    looked_at: Sequence[str]
    left_out: Sequence[str]
    layers: Sequence[LayerError] = ()

    @property
    def is_broken(self) -> bool:
        """Return whether something breaks: wherever it is loaded, or in the requested runtime."""
        return any(self.severity(finding) == "error" for finding in self.findings)

    def severity(self, finding: Finding) -> str:
        """Return how bad a finding is here."""
        return finding.rule.severity_for(self.runtime)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "path": self.path,
            "kind": self.kind,
            "runtime": self.runtime,
            "broken": self.is_broken,
            "findings": [finding.to_json(self.runtime) for finding in self.findings],
            "looked_at": list(self.looked_at),
            "left_out": list(self.left_out),
            "layers": [vars(layer) for layer in self.layers],
        }

    def lines(self, width: int = _WIDTH) -> list[str]:
        """Return a table for people: one entry for each rule that found something."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.rule.name, []).append(finding)
        lines = _wrap(f"{self.path}: {self.kind}", "", width)
        for group in groups.values():
            lines += self._entry(group, width)
        if self.layers:
            low, high = (bound(layer.error for layer in self.layers) for bound in (min, max))
            errors = f"{len(self.layers)} linears, relative error {low:.3g} to {high:.3g}"
            lines.append(f"  from the source: {errors}; farthest:")
        lines += [
            f"    {layer.error:.4f}  {_shorten(layer.module, 80)}" for layer in self.layers[:3]
        ]
        counts = Counter(self.severity(group[0]) for group in groups.values())
        words = []
        for one in SEVERITIES:
            if counts[one]:
                words.append(f"{counts[one]} {one}{'s' if counts[one] > 1 else ''}")
        if self.runtime:
            who = f" for {self.runtime}"
        else:
            who = ""
        lines += _wrap(f"{', '.join(words) or 'nothing found'}{who}", "", width)
        if self.looked_at:
            lines += _wrap(f"looked at: {'; '.join(self.looked_at)}", "", width)
        else:
            lines += []
        if self.left_out:
            lines += _wrap(f"not looked at: {'; '.join(self.left_out)}", "", width)
        else:
            lines += []
        # characters that no terminal shows are escaped
        result: list[str] = []
        for line in lines:
            result.append(
                "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
            )
        return result

    def _entry(self, group: Sequence[Finding], width: int) -> list[str]:
        """Return what one rule found: where the first is, and how many more there are."""
        first = group[0]
        rule = group[0].rule
        if len(group) > 1:
            more = f" and {len(group) - 1} more"
        else:
            more = ""
        head = f"  {self.severity(first):<8} {rule.name:<20} "
        where = _shorten(first.location, width - len(head) - len(more)) + more
        if rule.breaks:
            breaks = f"; breaks {', '.join(rule.breaks)}"
        else:
            breaks = ""
        remedy = _wrap(f"-> {rule.remedy} [{rule.source}]", _INDENT, width)
        return [head + where, *_wrap(first.message + breaks, _INDENT, width), *remedy]


def _shorten(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = (length - 3) // 2
    return f"{text[:half]}...{text[len(text) - half :]}"


def _wrap(text: str, indent: str, width: int) -> list[str]:
    rest = indent or _INDENT
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
