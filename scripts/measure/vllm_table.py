"""The table of docs/models.md on what vLLM loads, from what `measure_vllm.py` finds."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.tables import DOCS, Section, format_names, format_row, format_table

PAGE = DOCS / "models.md"
SECTION = Section("scripts/measure/measure_vllm.py")
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
            rows.append(format_row(form, title, len(judged), len(loaded), *counts, agreeing))
    heads = (
        "format",
        "recipe",
        "folders",
        "vLLM loads",
        *(f"{one} says it does not" for one in _SAYS),
        "all agree",
    )
    judged_names = [name for name, one in results.items() if one["source"]["outcome"] == "loads"]
    tables = [
        f"{len(judged_names)} architectures whose float model vLLM 0.32 loads:\n",
        format_table(heads, rows),
        f"They are {format_names(sorted(judged_names))}.\n",
        format_table(("not judged", "architectures"), _list_not_judged(results)),
    ]
    return "\n".join(tables)


def update(results: Mapping[str, Result]) -> None:
    """Write the section of docs/models.md anew."""
    SECTION.write(PAGE, section(results))


def _list_not_judged(results: Mapping[str, Result]) -> list[str]:
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
        format_row(f"{title} ({len(names[outcome])})", format_names(sorted(names[outcome])))
        for outcome, title in titles.items()
    ]
