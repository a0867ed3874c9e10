"""What `inspect` states without reading weights is what a loaded model takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.base.memory import size_text
from quantkit.evals.timing import count_loaded_bytes
from quantkit.formats.detect import open_checkpoint
from quantkit.model.cache import cache_bytes
from quantkit.model.load import load_model


@pytest.mark.cpu_kernels
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model", {"scheme": "int4-g32"}),
        ("model.gguf", {"scheme": "q4_k_m"}),
        ("model.gguf", {"scheme": "iq4_xs"}),
        ("model", {"scheme": "fp8"}),
    ],
    ids=str,
)
def test_memory_is_that_of_the_loaded_model(
    name: str, options: dict[str, Any], real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    source = real_shape("smollm")
    made = quantkit.quantize(
        source,
        tmp_path / name,
        method="rtn",
        source_check=False,
        accept_quality_loss=True,
        **options,
    )
    inspected = quantkit.inspect(made.path)
    model = load_model(open_checkpoint(made.path), device="cpu", allow_slow=True)
    # Kernels pad rows and widen some scales.
    assert inspected.run_bytes == pytest.approx(count_loaded_bytes(model), rel=0.05)
    assert inspected.cache_bytes_per_token == cache_bytes(model.config, 1, 1, model.dtype)
    size = size_text(inspected.context * inspected.cache_bytes_per_token)
    assert any(size in line for line in inspected.lines())


def test_a_model_without_a_decoder_states_none(hybrid: Path) -> None:
    inspected = quantkit.inspect(hybrid)
    assert (inspected.run_bytes, inspected.cache_bytes_per_token) == (0, 0)
    assert not any("memory to run" in line for line in inspected.lines())
