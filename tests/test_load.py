"""Filling the decoder: what it costs besides the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.errors import RequestError
from quantkit.model import load
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model, meta_init


def test_loading_and_generating_leave_torchs_compiler_alone(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "int8", "int8")
    code = (
        "import sys, quantkit\n"
        "model, tokenizer = quantkit.load(sys.argv[1])\n"
        "list(quantkit.generate(model, tokenizer.encode('Fellow'), max_new_tokens=2))\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])\n"
    )
    for folder in (demo_model, tmp_path / "int8"):
        done = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=600, cwd="/"
        )
        assert (done.stdout.strip(), done.stderr.strip()) == ("[]", "")


def test_large_tensors_are_copied_in_parts(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(demo_model, dtype=torch.float32).state_dict()
    monkeypatch.setattr(load, "_COPY_BYTES", 5000)
    parts = load_model(demo_model, dtype=torch.float32).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_meta_init_leaves_modules_without_memory_but_with_right_angles(demo_model: Path) -> None:
    config = load_model(demo_model).config
    with meta_init():
        model = Decoder(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.rotary(torch.arange(3)).cosine, load_model(demo_model).rotary(torch.arange(3)).cosine)


@pytest.mark.parametrize("path", ["demo", "nothing of the kind"])
def test_an_unknown_backend_is_refused_for_a_model_without_quantized_layers_too(
    path: str, demo_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=r"unknown backend \(found foo, expected cpu-exact, .*reference\)"):
        quantkit.load(demo_model if path == "demo" else tmp_path / path, backend="foo")  # type: ignore[arg-type]
