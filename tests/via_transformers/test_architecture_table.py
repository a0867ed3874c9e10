"""The table of docs/models.md on the architectures of transformers: what it lists, and what
counts as working.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architecture_table
import pytest
from architecture_table import IMAGE_TEXT, NOT_RUN, PAGE, TEXT
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

LISTED = sorted([*TEXT, *IMAGE_TEXT, *(name for names in NOT_RUN.values() for name in names)])
METHOD = {
    "kl": 0.2,
    "kl_error": 0.01,
    "finite": True,
    "changed": [],
    "outside": {},
    "loaded": "as it is",
    "noted": False,
}
WORKS = {"gptq": {**METHOD, "kl": 0.1}, "rtn": METHOD}


def _with(method: str, **changes: Any) -> dict[str, Any]:
    return {**WORKS, method: {**WORKS[method], **changes}}


def test_the_table_lists_the_architectures_of_transformers() -> None:
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert sorted(architecture_table.list_names(PAGE.read_text())) == LISTED == sorted(known)


REASONS: list[tuple[dict[str, Any], str | None]] = [
    (WORKS, None),
    (_with("gptq", kl=0.21), None),  # no more than the noise
    (_with("gptq", kl=0.25), "the KL of GPTQ is higher than that of rounding"),
    (_with("rtn", finite=False), "rounding: the logits are not finite"),
    (_with("gptq", changed=["norm.weight"]), "GPTQ: norm.weight has changed"),
    (_with("gptq", outside={"tower.weight": 1}), "GPTQ: tower.weight has changed"),
    (_with("rtn", outside={"layers.*.cross_attn.weight": 2}), None),
    (_with("gptq", loaded="dequantized", noted=True), None),
    (_with("gptq", loaded="dequantized"), "GPTQ: a note on loading is wrong: dequantized"),
    (_with("rtn", noted=True), "rounding: a note on loading is wrong: as it is"),
    (
        {"error": "QualityError: it is too far (found a KL(a || b) of 1; 2 by rounding); hint"},
        "it is too far (found a KL(a || b) of 1; 2 by rounding)",
    ),
    ({"error": "IndexError: out of range"}, "IndexError: out of range"),
]
"""Outcomes, and the cell of the table that each is listed under."""


def test_what_works_and_why_not() -> None:
    for outcome, reason in REASONS:
        assert architecture_table.failure(outcome) == reason, outcome


def test_each_architecture_is_in_the_row_of_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "models.md"
    page.write_text(
        "before\n<!-- made by scripts/measure/measure_architectures.py -->\n"
        "old\n<!-- end -->\nafter\n"
    )
    monkeypatch.setattr(architecture_table, "PAGE", page)
    found = {
        **dict.fromkeys((*TEXT, *IMAGE_TEXT), WORKS),
        "llama": _with("rtn", loaded="dequantized", noted=True),
        "mixtral": _with("gptq", loaded="RuntimeError", noted=True),
        "bert": {"error": "RequestError: it is too small"},
        "mpt": {"error": "RequestError: it is too small"},
    }
    architecture_table.update(found)
    text = page.read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert sorted(architecture_table.list_names(text)) == LISTED
    assert "| `bert`, `mpt` | it is too small |" in text
    assert "dequantize=True))` (1) | `llama` |" in text
    assert "| `convert --dequantize` and `from_pretrained(DST)` (1) | `mixtral` |" in text
    assert f"| `from_pretrained(DST)` ({len(IMAGE_TEXT)}) | `aria`, " in text
    assert f"| work | {len(TEXT) - 2} (99 %) | {len(IMAGE_TEXT)} (100 %) |" in text
