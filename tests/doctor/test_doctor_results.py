"""The doctor finds nothing in results for hybrids and models that read images; `test_mtp` has those
with layers for multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diagnoses import require_sound

import quantkit

HYBRIDS = ("granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "kimi_linear")
WITH_IMAGES = ("gemma3", "qwen2_5_vl", "llama4", "smolvlm")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HYBRIDS, *WITH_IMAGES])
def test_a_result_has_nothing(
    kind: str,
    tiny_model: Callable[[str], Path],
    tiny_image_text_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = tiny_model(kind) if kind in HYBRIDS else tiny_image_text_model(kind)
    made = quantkit.quantize(
        source,
        tmp_path / "made",
        "int4-g32",
        method="rtn",
        via="transformers",
        source_check=False,
        accept_quality_loss=True,
    ).path
    require_sound(made)
