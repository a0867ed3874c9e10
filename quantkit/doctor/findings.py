"""Rules, which rules.toml lists, what they find, and the report that `quantkit.diagnose`
returns.
"""

from __future__ import annotations

import functools
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from quantkit.base.messages import Option, join_messages
from quantkit.errors import QuantkitError
from quantkit.formats.codecs.codec import Runtime as Runtime

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""
# Of a line of the table for people.
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
        """Choose the severity for one runtime, or in general."""
        if runtime in self.breaks:
            return "error"
        return self.severity


@dataclass(frozen=True)
class Finding:
    """What is wrong in one place.

    Attributes:
        rule: what is wrong in general.
        location: a module, a tensor or a file.
        message: what was found and expected.
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
    """Read all rules, by theme."""
    themes = tomllib.loads(files(__package__).joinpath("rules.toml").read_text("utf-8"))
    result: dict[str, tuple[Rule, ...]] = {}
    for theme, tables in themes.items():
        theme_rules: list[Rule] = []
        for name, table in tables.items():
            # TOML has lists, and a rule is part of findings that are keys of a dict.
            breaks = tuple(table.get("breaks", ()))
            theme_rules.append(Rule(name, **{**table, "breaks": breaks}))
        result[theme] = tuple(theme_rules)
    return result


@functools.cache
def _by_name() -> Mapping[str, Rule]:
    result: dict[str, Rule] = {}
    for theme in rules().values():
        for rule in theme:
            result[rule.name] = rule
    return result


def finding(rule: str, location: str, message: str) -> Finding:
    """Build a finding of the rule with a name."""
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
        """Choose the severity of a finding for the requested runtime."""
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

    def lines(self, width: int = _WIDTH, spell: Callable[[Option], str] = str) -> list[str]:
        """Format a table for people: one entry for each rule that found something.

        Args:
            width: characters in a line.
            spell: spells the options that the text names; as Python does by default.
        """
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.rule.name, []).append(finding)
        lines = _wrap(f"{self.path}: {self.kind}", "", width)
        for group in groups.values():
            lines += self._entry(group, width)
        if self.layers:
            errors = [layer.error for layer in self.layers]
            summary = (
                f"{len(errors)} linears, relative error {min(errors):.3g} to {max(errors):.3g}"
            )
            lines.append(f"  from the source: {summary}; farthest:")
        for layer in self.layers[:3]:
            lines.append(f"    {layer.error:.4f}  {_shorten(layer.module, 80)}")
        counts = Counter(self.severity(group[0]) for group in groups.values())
        words = []
        for severity in SEVERITIES:
            if counts[severity]:
                words.append(f"{counts[severity]} {severity}{'s' if counts[severity] > 1 else ''}")
        if self.runtime:
            suffix = f" for {self.runtime}"
        else:
            suffix = ""
        lines += _wrap(f"{', '.join(words) or 'nothing found'}{suffix}", "", width)
        if self.looked_at:
            lines += _wrap(f"looked at: {'; '.join(self.looked_at)}", "", width)
        if self.left_out:
            # Options are spelled before the line is broken: a broken `Message` would lose them.
            left_out = join_messages("; ", self.left_out).render(spell)
            lines += _wrap(f"not looked at: {left_out}", "", width)
        # Names of tensors and files come from anybody's model: control characters in them would
        # reach the terminal.
        return [_escape_unprintable(line) for line in lines]

    def _entry(self, group: Sequence[Finding], width: int) -> list[str]:
        """Format what one rule found: where the first finding is, and how many others there are."""
        first = group[0]
        rule = group[0].rule
        if len(group) > 1:
            count_suffix = f" and {len(group) - 1} more"
        else:
            count_suffix = ""
        head = f"  {self.severity(first):<8} {rule.name:<20} "
        location = _shorten(first.location, width - len(head) - len(count_suffix)) + count_suffix
        if rule.breaks:
            breaks = f"; breaks {', '.join(rule.breaks)}"
        else:
            breaks = ""
        remedy = _wrap(f"-> {rule.remedy} [{rule.source}]", _INDENT, width)
        return [head + location, *_wrap(first.message + breaks, _INDENT, width), *remedy]


def _escape_unprintable(line: str) -> str:
    characters: list[str] = []
    for character in line:
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)


def _shorten(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = (length - 3) // 2
    return f"{text[:half]}...{text[len(text) - half :]}"


def _wrap(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent or _INDENT,
        # Names of tensors and links are copied from here, so they stay in one piece.
        break_long_words=False,
        break_on_hyphens=False,
    )
