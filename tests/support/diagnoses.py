"""What the doctor may say of a quantized model of random weights."""

from __future__ import annotations

from pathlib import Path

import quantkit

_OF_RANDOM_WEIGHTS = {"no-prediction", "negative-scales"}
"""What is true of each result of a model that was not trained, or whose scales were searched."""


def require_sound(folder: Path) -> None:
    """Assert that the doctor finds nothing else, for any runtime."""
    assert not quantkit.diagnose(folder, runtime="transformers").findings
    assert {one.rule.name for one in quantkit.diagnose(folder, runtime="vllm").findings} <= {
        "unknown-family"
    }
    assert {
        one.rule.name for one in quantkit.diagnose(folder, deep=True).findings
    } <= _OF_RANDOM_WEIGHTS
