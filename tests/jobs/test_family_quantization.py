"""Each dense family rounded and by GPTQ: it passes the gate, verify agrees, and transformers computes what we do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from test_architectures import CASES, DENSE
from vocabularies import train

import quantkit
from quantkit.data.files import EXCERPT
from quantkit.model.load import load_model
from quantkit.quality.verify import Verdict

_SIZES = {"vocab_size": 400, "max_position_embeddings": 128}
_GPTQ: dict[str, Any] = {"method": "gptq", "calibration": EXCERPT, "samples": 16, "length": 64}
_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {}), "int4": ("int4-g32", {"method": "rtn"}), "int4-gptq": ("int4-g32", _GPTQ)
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer") / "tokenizer.model"


@pytest.mark.parametrize("case", DENSE)
def test_quantized_models_are_within_bounds_and_the_same_to_transformers(
    case: str, tokenizer: Path, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    source = oracle.save(oracle.make(kind, **{**changes, **_SIZES}), tmp_path / "source")
    shutil.copy(tokenizer, source)
    tokens = oracle.random_tokens(40, batch=2)
    for name, (scheme, options) in _WAYS.items():
        made = tmp_path / name
        quantkit.quantize(source, made, scheme, source_check=False, **options)
        assert quantkit.verify(source, made).verdict is Verdict.WITHIN_BOUND
        ours = load_model(made, dtype=torch.float32, backend="reference")
        with torch.inference_mode():
            found = ours(tokens, torch.arange(40))
        assert (found - oracle.logits(oracle.load(made), tokens)).abs().max() < 1e-4
