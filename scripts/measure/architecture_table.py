"""The table of docs/models.md on the architectures of transformers, from what
`measure_architectures.py` measures.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny_architectures
import tiny_image_text
import transformers

import quantkit.errors

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.ratios import median_ratio
from shared.tables import DOCS, Section, format_names, format_row, format_table

PAGE = DOCS / "models.md"
SECTION = Section("scripts/measure/measure_architectures.py")
TEXT = tuple(tiny_architectures.ARCHITECTURES)
IMAGE_TEXT = tuple(
    name for name in tiny_image_text.ARCHITECTURES if name not in tiny_image_text.NEEDS_IMAGE
)
NOT_RUN = {
    "needs an image to run": tiny_image_text.NEEDS_IMAGE,
    "not made": {**tiny_architectures.NOT_MADE, **tiny_image_text.NOT_MADE},
}

Results = Mapping[str, Mapping[str, Any]]
"""What `measure_architectures.measure` found of each architecture, or its `error`."""

_METHODS = {"gptq": "GPTQ", "rtn": "rounding"}
_LOADED = {
    "as it is": "`from_pretrained(DST)`",
    "dequantized": (
        "`from_pretrained(DST, quantization_config=CompressedTensorsConfig(dequantize=True))`"
    ),
    "": "`convert --dequantize` and `from_pretrained(DST)`",
}
# After a semicolon outside parentheses.
_NEXT_STEPS = re.compile(r"^((?:[^;()]|\((?:[^()]|\([^()]*\))*\))*);.*")
_NAME = re.compile(r"(?<=[ |])`([a-z][\w.-]*)`(?=[ ,])")


def failure(found: Mapping[str, Any]) -> str | None:
    """Why an architecture does not work, in words; None if it does.

    It works if both methods end without an error, the logits of their results are finite, no tensor
    but the quantized linears has changed, a note says so if and only if transformers does not load
    the packed weights as they are, and the KL of GPTQ is not higher than that of rounding by more
    than two standard errors.
    """
    if "error" in found:
        kind, _, message = str(found["error"]).partition(": ")
        reason = _NEXT_STEPS.sub(r"\1", message)
        return reason if hasattr(quantkit.errors, kind) else f"{kind}: {reason}"
    for method, title in _METHODS.items():
        one = found[method]
        # Rounding does not know what tokens pass.
        outside = list(one["outside"]) if method == "gptq" else []
        if not one["finite"]:
            return f"{title}: the logits are not finite"
        if changed := [*one["changed"], *outside]:
            return f"{title}: {changed[0]} has changed"
        if (one["loaded"] == "as it is") == one["noted"]:
            return f"{title}: a note on loading is wrong: {one['loaded']}"
    return "the KL of GPTQ is higher than that of rounding" if _order(found) > 0 else None


def counts(found: Results) -> str:
    """How many architectures work, those for text and those for images and text: a table in
    Markdown.
    """
    columns = [[found[name] for name in names if name in found] for names in (TEXT, IMAGE_TEXT)]
    working = [[one for one in column if failure(one) is None] for column in columns]
    orders = [[_order(one) for one in column if "error" not in one] for column in columns]
    rows = {
        "tried": [str(len(column)) for column in columns],
        "work": [
            _share(len(one), len(column)) for one, column in zip(working, columns, strict=True)
        ],
        "KL of GPTQ divided by that of rounding, median": [_ratio(one) for one in working],
        "KL of GPTQ is lower, where they differ by more than two standard errors": [
            f"{one.count(-1)} of {len(one) - one.count(0)}" for one in orders
        ],
    }
    titles = ("", "text", "images and text")
    return format_table(titles, (format_row(name, *row) for name, row in rows.items()))


def section(found: Results) -> str:
    """What docs/models.md has between its marks: the counts, and a line for each outcome with
    its architectures.
    """
    reasons = {name: failure(found[name]) for name in (*TEXT, *IMAGE_TEXT)}
    tables = [f"With transformers {transformers.__version__}:\n", counts(found)]
    for names, kind in ((TEXT, "text"), (IMAGE_TEXT, "images and text")):
        working = _group_by_value(
            {name: _LOADED[_find_loader(found[name])] for name in names if reasons[name] is None}
        )
        rows = (
            format_row(f"{how} ({len(working[how])})", format_names(working[how]))
            for how in _LOADED.values()
            if how in working
        )
        titles = (f"{kind}: works, and is loaded by", "architectures")
        tables.append(format_table(titles, rows))
    failing = {name: reason for name, reason in reasons.items() if reason is not None}
    for title, groups in {"does not work": failing, **NOT_RUN}.items():
        rows = (
            format_row(format_names(names), reason.replace("|", "\\|"))
            for reason, names in _group_by_value(groups).items()
        )
        tables.append(format_table((title, "reason"), rows))
    return "\n".join(tables)


def update(found: Results) -> None:
    """Write the section of docs/models.md anew."""
    SECTION.write(PAGE, section(found))


def list_names(page: str) -> list[str]:
    """Return the architectures that the section of a page lists, in its order."""
    return _NAME.findall(SECTION.find(page) or "")


def _find_loader(found: Mapping[str, Any]) -> str:
    """Return how transformers loads the results of both methods; a key of `_LOADED`."""
    ways = {found[method]["loaded"] for method in _METHODS}
    if ways == {"as it is"}:
        return "as it is"
    return "dequantized" if ways <= {"as it is", "dequantized"} else ""


def _group_by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys that have each value, both sorted."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in sorted(values.items()):
        groups[value].append(name)
    return groups


def _order(found: Mapping[str, Any]) -> int:
    """-1 if the KL of GPTQ is lower than that of rounding by more than two standard errors, 1 if it
    is higher by more, else 0.
    """
    gptq, rtn = found["gptq"], found["rtn"]
    noise = 2 * math.hypot(gptq["kl_error"], rtn["kl_error"])
    difference = gptq["kl"] - rtn["kl"]
    return int(difference > noise) - int(difference < -noise)


def _ratio(found: list[Mapping[str, Any]]) -> str:
    """Return the median ratio of the KL of GPTQ to that of rounding, as text."""
    if not found:
        return "-"
    gptq, rounding = ([result[method]["kl"] for result in found] for method in _METHODS)
    return f"{median_ratio(gptq, rounding):.2f}"


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.0f} %)" if whole else "0"
