"""Models that transformers runs in every format whose readers know them: transformers' own loader
gives the logits of the dequantized weights.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_gptqmodel
import lora
import oracle
import pytest
import torch
import transformers
from command import Capture, run
from partial import contents
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from quantkit.doctor.diagnose import diagnose
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.jobs.output.writer import Writer
from quantkit.model.layerwise import Batch
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.quality.manifest_check import read_input_roundings
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.via_transformers.experts import _product, round_expert_inputs
from quantkit.via_transformers.forward import final_hidden, final_logits, run_by_transformers

Tiny = Callable[[str], Path]
TOKENS = torch.arange(3, 43).unsqueeze(0)
FORMATS = ("gptq", "awq")
FAST = ("lfm2", "qwen3_5_text")
OTHERS = ("cohere2", "falcon_h1", "gemma4_text", "olmo_hybrid", "qwen3_next")
WITH_EXPERTS = ("deepseek_v3", "glm4_moe", "granitemoehybrid", "nemotron_h")
SAMPLES: dict[str, Any] = {"samples": 8, "length": 64}
UNCHECKED: dict[str, Any] = {"source_check": False, "accept_quality_loss": True}


def _logits(folder: Path) -> Tensor:
    """What quantkit makes of a folder, run by transformers."""
    checkpoint = run_by_transformers(open_checkpoint(folder, tensors_only=True))
    (hidden,) = final_hidden(checkpoint, [Batch.from_start(TOKENS)])
    return final_logits(checkpoint, [hidden[0]])[0]


def _dequantized(folder: Path, dst: Path) -> Any:
    floats = quantkit.convert(folder, dst, dequantize=True, tensors_only=True).path
    return oracle.load(floats)


def _unpacked(folder: Path, name: str) -> dict[str, Tensor]:
    """The weights that the words of a folder stand for, by module."""
    tensors = load_file(folder / "model.safetensors")
    floats = {}
    for key in tensors:
        module, _, leaf = key.rpartition(".")
        if leaf != "qweight":
            continue
        parts = [tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales")]
        if name == "gptq":
            floats[module] = fake_gptqmodel.gptq_floats(*parts, tensors[f"{module}.g_idx"])
        else:
            floats[module] = fake_gptqmodel.awq_floats(*parts)
    return floats


def _require_equal_weights(made: quantkit.QuantizeResult) -> None:
    """The folders of GPTQ and AWQ hold the same weights, which are those of the floats."""
    unpacked = {name: _unpacked(made.formats[name].path, name) for name in FORMATS}
    assert unpacked["gptq"].keys() == unpacked["awq"].keys()
    assert len(unpacked["gptq"]) == sum(made.formats["gptq"].schemes.values()) > 0
    for module, weight in unpacked["gptq"].items():
        assert torch.equal(weight, unpacked["awq"][module]), module
    for name in FORMATS:
        checkpoint = open_checkpoint(made.formats[name].path, tensors_only=True)
        for module, weight in unpacked[name].items():
            value: Any = checkpoint.load(f"{module}.weight")
            assert torch.equal(value.dequantize(), weight), module


@pytest.mark.parametrize(
    "kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_transformers_loads_gptq_and_awq_with_the_logits_of_the_floats(
    kind: str, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # quantkit's own decoder runs some of them.
    options = {**SAMPLES, **UNCHECKED, "via": "transformers"}
    made = quantkit.quantize(tiny_model(kind), tmp_path / "out", "int4-g32", to=FORMATS, **options)
    _require_equal_weights(made)
    has_experts = any(".experts." in module for module in made.formats["gptq"].manifest["modules"])
    assert any("does not load the packed weights" in note for note in made.notes) == has_experts, (
        made.notes
    )
    for name in FORMATS:
        folder = made.formats[name].path
        expected = oracle.logits(_dequantized(folder, tmp_path / f"{name}-floats"), TOKENS)[0]
        torch.testing.assert_close(_logits(folder), expected, rtol=1e-4, atol=1e-4)
        assert not diagnose(folder).is_broken
        if has_experts:
            continue
        with monkeypatch.context() as patch:
            fake_gptqmodel.install(patch)
            loaded, count = _load_packed(folder)
            assert count == sum(made.formats[name].schemes.values())
            torch.testing.assert_close(
                oracle.logits(loaded, TOKENS)[0], expected, rtol=1e-4, atol=1e-4
            )


def _load_packed(folder: Path) -> tuple[Any, int]:
    """Load a folder with transformers; also count the linears that stay packed."""
    with warnings.catch_warnings(action="ignore"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not any(info.values()), info
    packed = [one for one in model.modules() if isinstance(one, fake_gptqmodel.PackedLinear)]
    return model.eval(), len(packed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_experts_are_apart_and_only_transformers_own_loader_needs_floats(
    kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    # quantkit's own decoder runs some of them.
    options = {**SAMPLES, **UNCHECKED, "via": "transformers"}
    made = quantkit.quantize(tiny_model(kind), tmp_path / "out", "int4-g32", to=FORMATS, **options)
    _require_equal_weights(made)
    for name in FORMATS:
        folder = made.formats[name].path
        assert any(".experts.0." in module for module in _unpacked(folder, name))
        notes = [note for note in made.notes if str(folder) in note and "does not load" in note]
        assert any("experts" in note for note in notes)
        expected = oracle.logits(_dequantized(folder, tmp_path / f"{name}-floats"), TOKENS)[0]
        torch.testing.assert_close(_logits(folder), expected, rtol=1e-4, atol=1e-4)
        assert "transformers with gptqmodel" not in (folder / "README.md").read_text()


@pytest.mark.slow
def test_each_format_has_the_bytes_of_a_run_in_it_alone_also_after_an_interruption(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("dots1")
    formats = ("compressed-tensors", "gptq", "awq", "mlx")
    options: dict[str, Any] = {**SAMPLES, **UNCHECKED}
    # Scales have one type where all formats hold it.
    floats = quantkit.convert(source, tmp_path / "src", dtype="fp16", tensors_only=True)
    for name in formats:
        quantkit.quantize(floats.path, tmp_path / name, "int4-g32", to=name, **options)
    record_safe_point = Writer.record_safe_point
    count = 0

    def stop_after_some(self: Writer) -> None:
        nonlocal count
        record_safe_point(self)
        count += 1
        if count == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "record_safe_point", stop_after_some)
    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize(floats.path, tmp_path / "out", "int4-g32", to=formats, **options)
    monkeypatch.undo()
    quantkit.quantize(floats.path, tmp_path / "out", "int4-g32", to=formats, resume=True, **options)
    for name in formats:
        assert contents(tmp_path / "out" / name) == contents(tmp_path / name), name
    again = quantkit.quantize(
        floats.path, tmp_path / "out", "int4-g32", to=formats, if_exists="skip", **options
    )
    assert again.skipped


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("lfm2", ["q_proj", "w2"]),
        pytest.param("nemotron_h", ["q_proj", "o_proj"], marks=pytest.mark.slow),
    ],
)
def test_an_adapter_is_merged_before_a_recipe_quantizes(
    kind: str, targets: list[str], tiny_model: Tiny, tmp_path: Path
) -> None:
    """With the names that PEFT gives modules, which differ from those on disk in Nemotron H."""
    source = tiny_model(kind)
    adapter = lora.save_adapter(source, tmp_path / "adapter", target_modules=targets)
    merged = {
        name: parameter.detach()
        for name, parameter in lora.loaded(source, adapter).merge_and_unload().named_parameters()
    }
    recipe = Recipe(QuantScheme.parse("int4-g32"), (Override("*.layers.0.*", None),))
    made = quantkit.quantize(
        source, tmp_path / "out", recipe, lora=adapter, to="gptq", method="rtn", **UNCHECKED
    )
    assert made.manifest["lora"]
    unpacked = _unpacked(made.path, "gptq")
    assert any(module.endswith(targets[0]) for module in unpacked)
    assert not any(".layers.0." in module for module in unpacked)
    for module, weight in unpacked.items():
        name = f"{module}.weight".replace("backbone.", "model.")
        # Experts are one parameter there.
        if name in merged:
            error = (weight - merged[name]).norm() / merged[name].norm()
            assert error < 0.12, module


def test_inputs_that_readers_round_are_those_of_transformers(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    made = quantkit.quantize(tiny_model("lfm2"), tmp_path / "made", "fp8", **UNCHECKED)
    assert any("round the inputs" in note and "so does the gate" in note for note in made.notes)
    checkpoint = with_codes(
        run_by_transformers(open_checkpoint(tmp_path / "made", tensors_only=True))
    )
    inputs = read_input_roundings(made.manifest, checkpoint, made.path)
    assert len(inputs) == sum(made.schemes.values())
    expected = oracle.logits(oracle.load(made.path), TOKENS)[0]
    logits = {}
    for is_rounded in (True, False):
        run_model = RoundedInputs(checkpoint, inputs if is_rounded else {})
        (hidden,) = final_hidden(run_model, [Batch.from_start(TOKENS)])
        (logits[is_rounded],) = final_logits(run_model, [hidden[0]])
    torch.testing.assert_close(logits[True], expected, rtol=1e-4, atol=1e-4)
    assert (logits[False] - expected).abs().mean() > 5e-3 * expected.std()
    assert quantkit.verify(made.path).ok  # whose perplexities are those of rounded inputs


def test_inputs_of_experts_are_rounded_for_each_linear_of_a_weight() -> None:
    class Experts(torch.nn.Module):
        is_transposed = has_bias = False
        is_concatenated = has_gate = True
        num_experts = 2

    module = Experts()
    module.gate_up_proj = torch.nn.Parameter(torch.randn(2, 8, 16))
    rounding = InputRounding("int")
    round_expert_inputs(module, "gate_up_proj", 1, [(0, 4, rounding), (4, 8, None)])
    states = torch.randn(5, 16)
    weight = module.gate_up_proj[1]
    expected = torch.cat(
        (rounding.round_inputs(states) @ weight[:4].t(), states @ weight[4:].t()), dim=-1
    )
    torch.testing.assert_close(_product(module, "gate_up_proj", 1, states), expected)
    torch.testing.assert_close(
        _product(module, "gate_up_proj", 0, states), states @ module.gate_up_proj[0].t()
    )


@pytest.mark.slow
def test_what_transformers_scales_by_tensors_of_its_own_is_a_note(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    """Its AWQ models of some architectures have scales of activations, which are not in folders."""
    made = quantkit.quantize(
        tiny_model("gpt_neox"), tmp_path / "out", "int4-g32", to=FORMATS, method="rtn", **UNCHECKED
    )
    notes = [note for note in made.notes if "does not load the packed weights" in note]
    assert len(notes) == 1
    assert str(made.formats["awq"].path) in notes[0]


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("falcon_h1", {"to": "gguf"}, UnsupportedError, "GGUF.*falcon_h1"),
    ("falcon_h1", {"to": "gguf", "scheme": "q4_k_m"}, UnsupportedError, "GGUF.*falcon_h1"),
    ("llama", {"to": "gguf", "via": "transformers"}, UnsupportedError, 'via="own"'),
    ("falcon_h1", {"to": "mlx"}, UnsupportedError, "mlx.*falcon_h1"),
    ("falcon_h1", {"to": ["gptq", "mlx"]}, UnsupportedError, "mlx.*falcon_h1"),
    ("lfm2", {"to": "gptq", "activations": "int8"}, RequestError, "activations"),
]


@pytest.mark.parametrize(("kind", "options", "error", "message"), REFUSED)
def test_what_no_reader_loads_is_refused_by_name(
    kind: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    tiny_model: Tiny,
    tmp_path: Path,
) -> None:
    wanted = {"scheme": "int4-g32", "method": "rtn", **UNCHECKED, **options}
    with pytest.raises(error, match=message):
        quantkit.quantize(tiny_model(kind), tmp_path / "out", **wanted)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_mlx_and_the_result_is_inspected(
    tiny_model: Tiny, tmp_path: Path, capfd: Capture
) -> None:
    source = tiny_model("lfm2")
    words = f"quantize {source} {tmp_path / 'out'} --scheme int4-g32 --to mlx --method rtn"
    options = "--no-source-check --accept-quality-loss"
    code, _, _ = run(capfd, *words.split(), *options.split())
    assert code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["group_size"] == 32
    assert config["model_type"] == "lfm2"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    module = "model.layers.0.feed_forward.w1"
    words_of = tensors[f"{module}.weight"].view(torch.int32)
    codes = fake_gptqmodel.fields_of(words_of).float()
    scales, biases = (
        tensors[f"{module}.{leaf}"].repeat_interleave(32, 1) for leaf in ("scales", "biases")
    )
    weight: Any = open_checkpoint(tmp_path / "out", tensors_only=True).load(f"{module}.weight")
    torch.testing.assert_close(codes * scales + biases, weight.dequantize())
    assert quantkit.verify(tmp_path / "out", source).verdict.name == "WITHIN_BOUND"
