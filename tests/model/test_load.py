"""Filling the decoder: what it costs besides the weights."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from torch import nn

import quantkit
from quantkit.errors import RequestError
from quantkit.evals.synthetic import synthetic
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.model import load
from quantkit.model.decoder import Decoder
from quantkit.model.linear import QuantLinear
from quantkit.model.load import load_model, meta_init
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice


@pytest.mark.slow
def test_loading_and_generating_leave_torchs_compiler_alone(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(demo_model, tmp_path / "int8", "int8")
    code = (
        "import sys, quantkit\nmodel, tokenizer ="
        " quantkit.load(sys.argv[1])\nlist(quantkit.generate(model, tokenizer.encode('Fellow'),"
        " max_new_tokens=2))\nprint([name for name in ('torch._dynamo', 'torch._inductor', 'sympy')"
        " if name in sys.modules])\n"
    )
    for folder in (demo_model, tmp_path / "int8"):
        done = subprocess.run(
            [sys.executable, "-c", code, folder],
            capture_output=True,
            text=True,
            timeout=600,
            cwd="/",
        )
        assert (done.stdout.strip(), done.stderr.strip()) == ("[]", "")


def test_large_tensors_are_copied_in_parts(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_model(demo_model, dtype=torch.float32).state_dict()
    monkeypatch.setattr(load, "COPY_BYTES", 5000)
    parts = load_model(demo_model, dtype=torch.float32).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_linears_of_floats_that_share_an_input_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of a group are floats: beside quantized layers too, and with biases; read in
    parts.
    """
    made = oracle.make("llama", attention_bias=True, mlp_bias=True)
    folder, int8 = oracle.save(made, tmp_path / "model"), QuantScheme.parse("int8")
    kept = tuple(
        Override(f"*.1.{name}", None)
        for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
    )
    quantkit.quantize(
        folder, tmp_path / "mixed", Recipe(int8, kept), method="rtn", accept_quality_loss=True
    )
    monkeypatch.setattr(load, "COPY_BYTES", 5000)
    for path in (folder, tmp_path / "mixed"):
        checkpoint, read = open_checkpoint(path), list[int]()
        # torch's products are faster together; CPU kernels leave floats where the file has them.
        model = load_model(_Noted(checkpoint, read), dtype=torch.bfloat16, backend="reference")
        fused = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.endswith(("qkv_proj", "gate_up_proj"))
        }
        every = {
            f"model.layers.{at}.{name}"
            for at in range(3)
            for name in ("mlp.gate_up_proj", "self_attn.qkv_proj")
        }
        assert fused.keys() == (every if path == folder else {"model.layers.1.mlp.gate_up_proj"})
        own = fused["model.layers.1.mlp.gate_up_proj"]
        for leaf in ("weight", "bias"):
            parts = [
                checkpoint.load(f"model.layers.1.mlp.{name}.{leaf}")
                for name in ("gate_proj", "up_proj")
            ]
            assert torch.equal(getattr(own, leaf), torch.cat(parts).bfloat16())
        tokens = oracle.random_tokens(9, batch=2)
        with torch.inference_mode():
            found, expected = (one(tokens, torch.arange(9)) for one in (model, oracle.ours(path)))
        assert (found - expected).abs().max() < 0.1 * expected.std()
        if path == folder:
            assert max(read) <= 2 * 5000


@dataclass
class _Noted:
    """A checkpoint that notes the bytes of each weight of a block as it is read."""

    own: StoredCheckpoint
    read: list[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def load(self, name: str, part: TensorSlice | None = None) -> Any:
        found = self.own.load(name, part)
        if "layers" in name and any(
            one in name for one in ("q_proj", "k_proj", "v_proj", "gate", "up_proj")
        ):
            self.read.append(found.nbytes if isinstance(found, torch.Tensor) else 0)
        return found


def test_meta_init_leaves_modules_without_memory_but_with_right_angles(demo_model: Path) -> None:
    config = load_model(demo_model).config
    with meta_init():
        model = Decoder(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(
        model.rotary(torch.arange(3)).cosine, load_model(demo_model).rotary(torch.arange(3)).cosine
    )


@pytest.mark.parametrize("path", ["demo", "nothing of the kind"])
def test_an_unknown_backend_is_refused_for_a_model_without_quantized_layers_too(
    path: str, demo_model: Path, tmp_path: Path
) -> None:
    with raises(RequestError, found="foo", expected="cpu-exact, cpu-fast, triton, reference"):
        quantkit.load(demo_model if path == "demo" else tmp_path / path, backend="foo")  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_layer_without_kernels_is_enough_to_refuse_a_model() -> None:
    checkpoint: Any = synthetic("llama-160m", "int8", None)
    odd = next(name for name in checkpoint.schemes if name.endswith("down_proj"))
    checkpoint = replace(checkpoint, schemes={**checkpoint.schemes, odd: QuantScheme(4, 16)})
    with raises(RequestError, "int4-g16", options=["allow_slow"]):
        load_model(checkpoint, device="cpu", dtype=torch.bfloat16)
    model = load_model(checkpoint, device="cpu", dtype=torch.bfloat16, allow_slow=True)
    slow = [
        name
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear) and module.backend.name == "reference"
    ]
    assert slow == [odd]


def test_a_model_that_exceeds_the_memory_is_refused_before_a_weight_is_read(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(demo_model)
    needed = load.measure_run_memory(checkpoint, device="cpu").weight_bytes
    monkeypatch.setattr(load, "free_bytes", lambda device: needed - 1)
    monkeypatch.setattr(type(checkpoint), "load", None)
    with raises(RequestError, path=demo_model):
        load_model(checkpoint, device="cpu")
