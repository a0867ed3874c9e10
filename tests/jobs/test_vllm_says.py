"""The note of `quantize`, the model card, `inspect` and `doctor` agree on what vLLM does not
load.
"""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
from families import make

import quantkit
from quantkit import Override, QuantScheme, Recipe

INT4, INT8 = QuantScheme(4, 32), QuantScheme(8, None)
REFUSED = "vLLM 0.32 does not load it"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}


def kept(*patterns: str) -> Recipe:
    return Recipe(INT4).keeping(patterns)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("to", "recipe", "rule"),
    [
        ("compressed-tensors", kept(), None),
        ("compressed-tensors", kept("*.layers.0.*"), None),
        ("compressed-tensors", kept("*.q_proj"), "fused-schemes"),
        ("compressed-tensors", Recipe(INT4, (Override("*.down_proj", INT8),)), "expert-schemes"),
        ("gptq", kept("*.layers.0.*"), None),
        ("gptq", Recipe(INT4, (Override("*.layers.0.*", INT8),)), None),
        ("gptq", Recipe(INT4, (Override("*.q_proj", INT8),)), "fused-schemes"),
        ("awq", kept("*.layers.0.*"), None),
        ("awq", kept("*.q_proj"), "fused-schemes"),
    ],
)
def test_all_say_whether_vllm_loads_a_folder(
    to: str, recipe: Recipe, rule: str | None, tmp_path: Path
) -> None:
    source = oracle.save(make("qwen3-moe", **SIZES), tmp_path / "source")
    made = quantkit.quantize(
        source,
        tmp_path / "made",
        recipe,
        to=to,
        method="rtn",
        accept_quality_loss=True,
        source_check=False,
    )
    diagnosis = quantkit.diagnose(made.path, runtime="vllm")
    errors = {
        finding.rule.name
        for finding in diagnosis.findings
        if diagnosis.severity(finding) == "error"
    }
    assert errors - {"no-tokenizer"} == ({rule} if rule else set())
    inspection = quantkit.inspect(made.path)
    loads = rule is None
    assert any(reader.startswith("vLLM") for reader in inspection.readers) == loads
    assert (inspection.readers_note is None or REFUSED not in inspection.readers_note) == loads
    assert (REFUSED not in (made.path / "README.md").read_text()) == loads
    assert any(REFUSED in note for note in made.notes) != loads
