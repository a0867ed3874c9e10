"""Results whose readers round the inputs of linears: what config.json states, and how the gate
measures them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

import quantkit
from quantkit.errors import QualityError, RequestError, UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.model.layerwise import Batch, head_logits, layerwise_hidden
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.quality.manifest_check import read_input_roundings
from quantkit.tensors.activations import Activations, InputRounding
from quantkit.tensors.scheme import FLOAT_SCHEMES, FP8, FP8_BLOCK, SCHEMES

TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
INT8, FLOAT8 = {**TOKEN, "type": "int"}, {**TOKEN, "type": "float"}
GROUPS = {**FLOAT8, "strategy": "group", "group_size": 128}
ALL = {**SCHEMES, **FLOAT_SCHEMES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = oracle.make("llama", hidden_size=128, intermediate_size=128, num_hidden_layers=2)
    return oracle.save(made, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("scheme", "activations", "form", "stated"),
    [
        ("fp8", None, "float-quantized", FLOAT8),
        ("fp8", "none", "float-quantized", None),
        ("fp8-block", None, "float-quantized", GROUPS),
        ("mxfp4", "fp8", "mxfp4-pack-quantized", FLOAT8),
        ("int8", "int8", "int-quantized", INT8),
        ("int8", None, "pack-quantized", None),
        ("int4-g64", "int8", "pack-quantized", INT8),
        ("int4-g128", "fp8", "pack-quantized", FLOAT8),
    ],
)
def test_the_config_states_what_readers_round(
    model: Path, tmp_path: Path, scheme: str, activations: Any, form: str, stated: Any
) -> None:
    made = quantkit.quantize(
        model,
        tmp_path / "made",
        scheme,
        activations=activations,
        method="rtn",
        accept_quality_loss=True,
        source_check=False,
    )
    settings = json.loads((made.path / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    assert (settings["format"], group["format"], group["input_activations"]) == (form, form, stated)
    kind = None if stated is None else {"int": "int8", "float": "fp8"}[stated["type"]]
    assert made.manifest.get("activations") == (None if kind is None else {scheme: kind})
    assert any("readers round the inputs of linears" in note for note in made.notes) == (
        kind is not None
    )
    assert quantkit.verify(made.path).ok
    theirs = oracle.load(made.path, torch.bfloat16)
    assert torch.isfinite(oracle.logits(theirs, oracle.random_tokens(9))).all()


@pytest.mark.slow
def test_scales_of_int4_stay_positive_where_readers_round_its_inputs(
    demo_model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "samples": 4,
        "length": 64,
        "accept_quality_loss": True,
        "source_check": False,
    }
    for method in ("rtn", "gptq"):
        own = options if method == "gptq" else {"accept_quality_loss": True}
        for activations in ("int8", "none"):
            folder = tmp_path / f"{method}-{activations}"
            made = quantkit.quantize(
                demo_model, folder, "int4-g32", method=method, activations=activations, **own
            )
            checkpoint = open_checkpoint(made.path)
            values = [checkpoint.load(f"{module}.weight") for module in schemes(checkpoint)]
            assert any((one.scale < 0).any() for one in values) == (activations == "none")  # type: ignore[union-attr]


def test_what_no_runtime_multiplies_is_refused(model: Path, tmp_path: Path) -> None:
    for name, scheme in ALL.items():
        for activations in Activations:
            if activations not in Activations.of(scheme):
                with pytest.raises(
                    UnsupportedError,
                    match=rf"{activations} activations \(supported: .*found {name} for",
                ):
                    quantkit.quantize(
                        model,
                        tmp_path / "refused",
                        scheme,
                        activations=str(activations),
                        method="rtn",
                    )
    with pytest.raises(RequestError, match='`activations` cannot be combined with `to="gptq"`'):
        quantkit.quantize(model, tmp_path / "refused", "int8", activations="int8", to="gptq")
    with pytest.raises(RequestError, match="none or int8 or fp8"):
        quantkit.quantize(model, tmp_path / "refused", "int8", activations="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCK])
def test_inputs_in_float8_are_those_of_compressed_tensors(scheme: quantkit.QuantScheme) -> None:
    x = torch.randn(1, 7, 256) * torch.randn(1, 7, 256).exp()
    x[0, 3] = 0
    args = QuantizationArgs(**(GROUPS if scheme == FP8_BLOCK else FLOAT8))
    rounding = InputRounding.of(Activations.FP8, scheme)
    assert rounding is not None
    scale, _ = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    expected = fake_quantize(x, scale, None, args)
    torch.testing.assert_close(rounding.round_inputs(x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
def test_the_gate_runs_what_transformers_runs(model: Path, tmp_path: Path, name: str) -> None:
    made = quantkit.quantize(
        model, tmp_path / "made", name, accept_quality_loss=True, source_check=False
    )
    checkpoint, tokens = with_codes(open_checkpoint(made.path)), oracle.random_tokens(30)
    inputs = read_input_roundings(made.manifest, checkpoint, made.path)
    assert len(inputs) == 14
    expected = oracle.logits(oracle.load(made.path), tokens)[0]
    logits = {}
    for rounded in (True, False):
        run = RoundedInputs(checkpoint, inputs if rounded else {})
        (hidden,) = layerwise_hidden(run, [Batch.from_start(tokens)])
        (logits[rounded],) = head_logits(run, [hidden.flatten(0, 1)])
    scale = expected.std()
    assert (logits[True] - expected).abs().mean() < 1e-3 * scale
    assert (logits[False] - expected).abs().mean() > 5e-3 * scale


def test_rounded_inputs_that_break_a_model_do_not_pass(model: Path, tmp_path: Path) -> None:
    tensors = oracle.load(model)
    with torch.no_grad():
        for layer in tensors.model.layers:
            layer.input_layernorm.weight[0] = 3e5  # an input that takes the range of all others
            layer.self_attn.q_proj.weight[:, 0] = 0
            layer.self_attn.k_proj.weight[:, 0] = 0
            layer.self_attn.v_proj.weight[:, 0] = 0
            layer.self_attn.v_proj.weight *= 20
    source = oracle.save(tensors, tmp_path / "outliers")
    quantkit.quantize(source, tmp_path / "weights", "int8")
    with pytest.raises(QualityError, match=r"too far from its source|predicts worse"):
        quantkit.quantize(source, tmp_path / "both", "int8", activations="int8")
