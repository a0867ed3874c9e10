"""The doctor finds nothing in results for hybrids, models that read images, and layers for multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mtp
import oracle
import pytest
import tiny_image_text

import quantkit

assert oracle  # which lets transformers be quiet
HYBRIDS = ("granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "kimi_linear")
WITH_IMAGES = ("gemma3", "qwen2_5_vl", "llama4", "smolvlm")
OF_RANDOM_WEIGHTS = {"no-prediction", "negative-scales"}
"""What is true of each result of a model that was not trained, or whose scales were searched."""


@pytest.mark.parametrize("kind", [*HYBRIDS, *WITH_IMAGES, *mtp.KINDS])
def test_a_result_has_nothing(kind: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    if kind in HYBRIDS:
        source = tiny_model(kind)
    elif kind in mtp.KINDS:
        source = mtp.make(kind, tmp_path)
    else:
        tiny_image_text.make(kind, source := tmp_path / "source")
    made = quantkit.quantize(
        source, tmp_path / "made", "int4-g32", method="rtn", via="transformers", source_check=False,
        accept_quality_loss=True,
    ).path  # fmt: skip
    assert not quantkit.diagnose(made, runtime="transformers").findings
    assert {one.rule.name for one in quantkit.diagnose(made, runtime="vllm").findings} <= {"unknown-family"}
    assert {one.rule.name for one in quantkit.diagnose(made, deep=True).findings} <= OF_RANDOM_WEIGHTS
