"""What `inspect` states without reading weights is what a loaded model takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

import quantkit
from quantkit.base.memory import size_text
from quantkit.evals.timing import count_loaded_bytes
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.inference.load import load_by_transformers
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
    assert inspected.run_bytes == pytest.approx(count_loaded_bytes(model), rel=0.01)
    assert inspected.cache_bytes_per_token == cache_bytes(model.config, 1, 1, model.dtype)
    size = size_text(inspected.context * inspected.cache_bytes_per_token)
    assert any(size in line for line in inspected.lines())


def test_a_model_that_transformers_runs_takes_float32_and_no_cache(
    hybrid: Path, hybrid_int4: Path
) -> None:
    for path in (hybrid, hybrid_int4):
        inspected = quantkit.inspect(path)
        model, _ = load_by_transformers(path)
        held = {weight.data_ptr(): weight.nbytes for weight in model._lazy.model.parameters()}
        assert inspected.run_bytes == pytest.approx(sum(held.values()), rel=0.01)
        assert inspected.cache_bytes_per_token == 0
        assert not any(" as " in kind for kind in inspected.tensors)


def test_a_model_that_nothing_runs_states_none(hybrid: Path, tmp_path: Path) -> None:
    folder = oracle.copy(hybrid, tmp_path / "model")
    oracle.edit_json(folder / "config.json", model_type="unheard_of", architectures=["Unheard"])
    inspected = quantkit.inspect(folder, tensors_only=True)
    assert (inspected.run_bytes, inspected.cache_bytes_per_token) == (0, 0)
    assert not any("memory to run" in line for line in inspected.lines())


@pytest.mark.cpu_kernels
def test_an_embedding_of_few_bits_takes_no_byte_for_each(
    real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where it is not the head, so that no kernel multiplies by it."""
    source = oracle.copy(real_shape("smollm"), tmp_path / "source")
    made = oracle.load(source)
    made.config.tie_word_embeddings = False
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach() * 0.9)
    oracle.save(made.bfloat16(), source)
    made = quantkit.quantize(
        source,
        tmp_path / "model.gguf",
        "q4_0",
        method="rtn",
        embedding="q4_0",
        source_check=False,
        accept_quality_loss=True,
    )
    inspected = quantkit.inspect(made.path)
    assert not inspected.tied_embeddings
    model = load_model(open_checkpoint(made.path), device="cpu")
    assert count_loaded_bytes(model) == pytest.approx(inspected.run_bytes, rel=0.01)
