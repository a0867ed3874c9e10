"""Families whose layers all have attention, in an engine's slots: held against transformers, which
runs each sequence alone and without a cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from random_logits import CONFIGS, require_same_logits

FAMILIES = ("cohere2", "exaone4", "gemma4_text", "hunyuan_v1_dense", "llama4_text")


@pytest.mark.sampled(15)
@pytest.mark.parametrize("number", range(CONFIGS))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_give_the_logits_of_transformers(
    family: str, number: int, tmp_path: Path
) -> None:
    require_same_logits(family, number, tmp_path)
