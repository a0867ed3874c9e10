"""The table of docs/models.md on what vLLM loads, from what `measure_vllm.py` finds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_BEGIN, _END = "<!-- made by scripts/measure/measure_vllm.py -->\n", "<!-- end -->\n"
_SECTION = re.compile(f"(?<={_BEGIN}).*?(?={_END})", re.DOTALL)
_RECIPES = {
    "plain": "all linears in int4-g32",
    "kept-layer": "one layer in floats",
    "mixed-layers": "one layer in int8",
    "mixed-linears": "one kind of linear in int8",
    "kept-linears": "one kind of linear in floats",
}
_FORMATS = ("compressed-tensors", "gptq", "awq")
_SAYS = ("inspect", "card", "doctor")

Result = Mapping[str, Any]
"""What `measure_vllm.measure` found of an architecture."""


def says_loadable(folder: Result) -> dict[str, bool]:
    """Whether each of `inspect`, the model card and `doctor` finds nothing that vLLM does not
    load.
    """
    return {"inspect": folder["inspect"], "card": folder["card"], "doctor": not folder["doctor"]}


def differences(result: Result) -> list[str]:
    """The folders of which `inspect`, the model card or `doctor` say another thing than vLLM's
    loader.
    """
    differing = []
    for name, folder in result["folders"].items():
        if "refused" in folder:
            continue
        loads = folder["outcome"] == "loads"
        if any(says != loads for says in says_loadable(folder).values()):
            differing.append(name)
    return differing


def describe(result: Result) -> list[str]:
    """One line for the float model and one for each folder."""
    source = result["source"]
    lines = [f"floats: {source['outcome']} {source['reason'][:150]}"]
    differing = differences(result)
    for name, folder in result["folders"].items():
        if "refused" in folder:
            lines.append(f"{name}: refused: {folder['refused'][:150]}")
            continue
        mark = "DIFFERS: " if name in differing else ""
        verdicts = ", ".join(
            f"{one} {'loads' if says else 'fails'}" for one, says in says_loadable(folder).items()
        )
        lines.append(
            f"{mark}{name}: {folder['outcome']}; {verdicts}; {list(folder['doctor'])}"
            f" {folder['reason'][:200]}"
        )
    return lines


def section(results: Mapping[str, Result]) -> str:
    """What docs/models.md has between its marks."""
    rows = []
    for form in _FORMATS:
        for kind, title in _RECIPES.items():
            folders = [one["folders"].get(f"{form} {kind}", {}) for one in results.values()]
            judged = [folder for folder in folders if "outcome" in folder]
            if not judged:
                continue
            loaded = [folder for folder in judged if folder["outcome"] == "loads"]
            counts = [sum(not says_loadable(folder)[one] for folder in judged) for one in _SAYS]
            agreeing = sum(
                set(says_loadable(folder).values()) == {folder["outcome"] == "loads"}
                for folder in judged
            )
            rows.append(_row(form, title, len(judged), len(loaded), *counts, agreeing))
    heads = (
        "format",
        "recipe",
        "folders",
        "vLLM loads",
        *(f"{one} says it does not" for one in _SAYS),
        "all agree",
    )
    head = _row(*heads)
    judged_names = [name for name, one in results.items() if one["source"]["outcome"] == "loads"]
    tables = [
        f"{len(judged_names)} architectures whose float model vLLM 0.32 loads:\n",
        _table(head, rows),
        f"They are {_names(judged_names)}.\n",
        _table("| not judged | architectures |", _not_judged(results)),
    ]
    return "\n".join(tables)


def update(results: Mapping[str, Result]) -> None:
    """Write the section of docs/models.md anew."""
    made = section(results)
    PAGE.write_text(
        _SECTION.sub(lambda _: made, PAGE.read_text(encoding="utf-8")), encoding="utf-8"
    )


def _not_judged(results: Mapping[str, Result]) -> list[str]:
    """The architectures that vLLM has no class for, and those whose float model it does not
    load.
    """
    titles = {
        "unknown": "vLLM has no class for it",
        "fails": (
            "vLLM does not load the tiny float model: config.json or tensors differ from the"
            " published ones, or it needs a GPU"
        ),
    }
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, result in results.items():
        names[result["source"]["outcome"]].append(name)
    return [
        _row(f"{title} ({len(names[outcome])})", _names(names[outcome]))
        for outcome, title in titles.items()
    ]


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows, ""])
