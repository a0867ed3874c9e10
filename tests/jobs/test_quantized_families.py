"""Dense families through rounding and GPTQ: what the gate and `verify` say, and that
transformers computes the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES, DENSE

import quantkit
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.model.load import load_model
from quantkit.quality.verify import Verdict, verify

_VOCABULARY = 2048  # of the demo's tokenizer
_ROUNDED: dict[str, Any] = {}
_GPTQ: dict[str, Any] = {"method": "gptq", "calibration": EXCERPT, "samples": 16, "length": 64}


@pytest.mark.slow
@pytest.mark.parametrize("case", DENSE)
def test_a_quantized_model_is_within_its_bounds(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    sizes = {"vocab_size": _VOCABULARY, "hidden_size": 128, "intermediate_size": 192}
    source = oracle.save(oracle.make(kind, **{**changes, **sizes}), tmp_path / "source")
    shutil.copy(DEMO_MODEL / "tokenizer.model", source)
    kl, tokens = {}, oracle.random_tokens(40, batch=2)
    ways = {
        "int8": ("int8", {}),
        "int4": ("int4-g32", {"method": "rtn"}),
        "gptq": ("int4-g32", _GPTQ),
    }
    for name, (scheme, how) in ways.items():
        made = quantkit.quantize(source, tmp_path / name, scheme, source_check=False, **how)
        assert made.quality is not None
        kl[name] = max(text.kl for text in made.quality.texts)
        report = verify(source, made.path)
        assert report.verdict is Verdict.WITHIN_BOUND
        assert len(report.differing) == sum(made.schemes.values())
        ours = load_model(made.path, dtype=torch.float32, backend="reference")
        with torch.inference_mode():
            found = ours(tokens, torch.arange(40))
        expected = oracle.logits(oracle.load(made.path), tokens)
        assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    if (
        kl["int4"] > 1e-6
    ):  # logits that Granite divides to next to nothing tell no more than rounding of sums
        assert max(kl["int8"], kl["gptq"]) < kl["int4"]
