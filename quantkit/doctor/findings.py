"""Rules, which rules.toml lists, and what they find."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from quantkit.formats.codecs.codec import Runtime as Runtime

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""


@dataclass(frozen=True)
class Rule:
    """Something that can be wrong.

    Attributes:
        name: by which people and scripts know it.
        severity: an error breaks the model, or changes what it predicts, wherever it is loaded.
        checks: what is wrong, in a few words.
        remedy: what to do about it.
        source: a format's description, or threads of runtimes' issue trackers.
        breaks: the runtimes that it breaks although it is no error for all.
    """

    name: str
    severity: Severity
    checks: str
    remedy: str
    source: str
    breaks: tuple[Runtime, ...] = ()

    def severity_for(self, runtime: Runtime | None) -> Severity:
        """Its severity for one runtime, or in general."""
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


@functools.cache
def rules() -> Mapping[str, tuple[Rule, ...]]:
    """All rules, by theme."""
    listed = tomllib.loads(files(__package__).joinpath("rules.toml").read_text("utf-8"))
    return {
        theme: tuple(Rule(name, **{**rule, "breaks": tuple(rule.get("breaks", ()))}) for name, rule in named.items())
        for theme, named in listed.items()
    }


@functools.cache
def _by_name() -> Mapping[str, Rule]:
    return {rule.name: rule for theme in rules().values() for rule in theme}


def finding(rule: str, where: str, what: str) -> Finding:
    """What the rule of a name has found."""
    return Finding(_by_name()[rule], where, what)


def ordered(findings: Iterable[Finding], runtime: Runtime | None) -> list[Finding]:
    """The worst first, those of one rule together, in the order in which they were found; each once."""
    places: dict[str, int] = {}
    found = list(dict.fromkeys(findings))
    for one in found:
        places.setdefault(one.rule.name, len(places))
    return sorted(
        found, key=lambda one: (SEVERITIES.index(one.rule.severity_for(runtime)), places[one.rule.name])
    )  # fmt: skip
