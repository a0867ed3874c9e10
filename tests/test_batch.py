"""Sequences that share the steps of an engine: each is as if it were alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from rows import alone, forward_logprobs, require_same, together
from test_architectures import ROPES
from torch import Tensor

import quantkit
from quantkit.errors import NonFiniteError, RequestError
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime import batch as scheduler
from quantkit.runtime.batch import Batch
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request
from quantkit.runtime.sampling_params import SamplingParams

LENGTHS = (1, 400, 2, 17, 16, 239, 240, 241, 33, 300, 5, 64, 120, 8, 257, 15)
"""Of prompts, around what is read at a time (240) and what kernels take as few rows (16)."""
NEAR = 2e-3
"""Where sums are made in another order: how near two log-probabilities may be for either to be the larger."""
CONTEXT = 512
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "windows": ("mistral", {"sliding_window": 50}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by kind and scheme."""
    base = tmp_path_factory.mktemp("batch")
    for name, (kind, changes) in KINDS.items():
        oracle.save(oracle.make(kind, **changes, max_position_embeddings=CONTEXT), base / name)
        for scheme in ("int8", "int4-g32"):
            quantkit.quantize(base / name, base / f"{name}-{scheme}", scheme, accept_quality_loss=True)
    return base


def _model(folder: Path, backend: str | None = None) -> Decoder:
    model = load_model(folder, dtype=torch.float32, backend=backend)
    model.config = replace(model.config, eos_token_ids=())
    return model


def _prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(_texts(len(lengths)), lengths, strict=True)]


def _texts(count: int) -> Tensor:
    return oracle.random_tokens(CONTEXT, batch=count)


def _staggered(**options: Any) -> list[Request]:
    """Sixteen requests that end one after the other."""
    return [Request(prompt, 3 + 5 * index % 23, **options) for index, prompt in enumerate(_prompts())]


@pytest.mark.parametrize("cached", [None, torch.int8], ids=["float", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast"])
def test_each_sequence_has_the_bits_of_itself_alone(
    backend: str, scheme: str, kind: str, cached: torch.dtype | None, folders: Path
) -> None:
    model = _model(folders / f"{kind}-{scheme}", backend)
    assert model.ops.ragged
    requests = _staggered(logprobs=2)
    expected = [replace(alone(model, one, cache_dtype=cached)[0], prompt=at) for at, one in enumerate(requests)]
    for slots in (3, 16):
        assert together(Engine(model, 430, slots=slots, cache_dtype=cached), requests) == expected
    assert len({tuple(one.token_ids) for one in expected}) == len(expected)
