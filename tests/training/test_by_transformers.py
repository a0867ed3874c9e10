"""Training a model that transformers runs: its gradients are those of autograd, and the result is
closer to the float model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny_architectures
import torch
from error_parts import raises
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.model.layerwise import Batch
from quantkit.passes.activation_store import ActivationStore
from quantkit.quality.verify import Verdict
from quantkit.tensors.qtensor import QuantTensor
from quantkit.training.blockwise import Blockwise
from quantkit.training.by_transformers import make_transformers_engine
from quantkit.training.optimizer import Optimizer, Schedule
from quantkit.training.places import find_trained_names
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Samples
from quantkit.via_transformers.experts import use_experts
from quantkit.via_transformers.forward import final_hidden, final_logits, open_to_run, passage_of

Tiny = Callable[[str], Path]
TEXT: dict[str, Any] = {"calibration": EXCERPT, "samples": 32, "length": 32, "source_check": False}
LENGTH = 16


@pytest.fixture(scope="module")
def models(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float model with experts and state spaces, and the same rounded."""
    source = tiny_model("jamba")
    out = tmp_path_factory.mktemp("models") / "int4"
    quantkit.quantize(
        source,
        out,
        "int4-g32",
        method="rtn",
        source_check=False,
        accept_quality_loss=True,
    )
    return source, out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trained float model of an architecture without a decoder here, and the same rounded."""
    folder = tmp_path_factory.mktemp("trained")
    quantkit.convert(DEMO_MODEL, folder / "floats", source_check=False)
    # Its weights have the names and shapes of a Llama's.
    oracle.edit_json(
        folder / "floats" / "config.json",
        model_type="internlm3",
        architectures=["InternLM3ForCausalLM"],
    )
    (folder / "floats" / "quantkit.json").unlink()
    quantkit.quantize(
        folder / "floats", folder / "int4", "int4-g32", method="rtn", source_check=False
    )
    return folder / "floats", folder / "int4"


def make_engine(
    models: tuple[Path, Path], tokens: Tensor, folder: Path, *, codes: bool = False
) -> tuple[TrainedCheckpoint, Blockwise]:
    reference, quantized = (open_to_run(path, via="transformers") for path in models)
    names = find_trained_names(quantized, norms=True, codes=codes)
    offsets = ActivationStore(folder / "offsets", 10**9)
    model = TrainedCheckpoint(quantized, names, offsets, 10**9)
    model.begin(reference)
    samples = Samples(tokens, ActivationStore(folder / "targets", 10**9), batch=2)
    samples.compute_targets(
        lambda tokens, progress: torch.cat(
            final_hidden(reference, [Batch.from_start(part) for part in tokens.split(1)])
        ),
        lambda *report: None,
    )
    return model, make_transformers_engine(model, reference, samples, Schedule(8))


def by_autograd(
    models: tuple[Path, Path], tokens: Tensor, folder: Path
) -> tuple[float, dict[str, Tensor]]:
    """The mean KL from the float model, and its gradients by the parameters of transformers."""
    quantkit.convert(models[1], folder / "dequantized", dequantize=True, source_check=False)
    floats = oracle.load(models[0])
    other = oracle.load(folder / "dequantized")
    for model in (floats, other):
        use_experts(model)
    with torch.no_grad():
        expected = floats(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
    other.requires_grad_(True)
    found = other(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
    loss = (expected.exp() * (expected - found)).sum(-1).mean()
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in other.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return loss.item(), gradients


def test_loss_and_gradients_are_those_of_the_whole_model(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = oracle.random_tokens(LENGTH, batch=5, vocabulary=2000)
    model, engine = make_engine(models, tokens, tmp_path)
    gradients: dict[str, Tensor] = {}

    def record(optimizer: Optimizer, step: int, name: str, gradient: Tensor | None) -> None:
        assert name not in gradients
        assert gradient is not None
        gradients[name] = gradient

    monkeypatch.setattr(Optimizer, "update", record)
    # In batches of one sample.
    monkeypatch.setattr(engine, "_together", 1)
    numbers = torch.tensor([3, 0, 2])
    expected_loss, expected = by_autograd(models, tokens[numbers], tmp_path)
    assert engine.step(0, numbers) == pytest.approx(expected_loss, rel=1e-4)
    assert engine.loss(numbers) == pytest.approx(expected_loss, rel=1e-4)
    names = model.names_trained
    assert set(gradients) == {*names.weights, *names.norms}
    assert "model.final_layernorm.weight" in names.norms
    experts = 0
    for name, gradient in gradients.items():
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        if ".experts." in owner:
            experts += 1
            place, _, expert = owner.rpartition(".")
            stacked = "down_proj" if leaf == "down_proj" else "gate_up_proj"
            whole = expected[f"{place}.{stacked}"][int(expert)]
            # The gate's outputs come before those of the other linear.
            parts = {
                "down_proj": whole,
                **dict(zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True)),
            }
            reference = parts[leaf]
        else:
            reference = expected[name]
        scale = reference.abs().max().item()
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-3 * scale)
    # In one of two layers.
    assert experts == 3 * 4


def test_steps_lower_the_loss_on_their_samples(models: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = oracle.random_tokens(LENGTH, batch=4, vocabulary=2000)
    model, engine = make_engine(models, tokens, tmp_path, codes=True)
    numbers = torch.arange(4)
    losses = [engine.step(step, numbers) for step in range(3)]
    # Further steps send some tokens to other experts.
    assert engine.loss(numbers) < 0.9 * losses[0]
    assert all(factor.any() for factor in model.factors.values())


def test_tensors_that_blocks_have_in_common_are_not_trained(tmp_path: Path) -> None:
    tiny_architectures.make("zamba2", tmp_path / "model")
    quantkit.quantize(
        tmp_path / "model",
        tmp_path / "int4",
        "int4-g32",
        method="rtn",
        source_check=False,
        accept_quality_loss=True,
    )
    quantized = open_to_run(tmp_path / "int4", via="transformers")
    names = find_trained_names(quantized, norms=True, codes=False)
    assert names.weights
    lazy = passage_of(quantized).partwise
    for name in (*names.weights, *names.norms):
        assert len(lazy.same_as(lazy.targets[name][0])) == 1


@pytest.mark.slow
def test_the_refined_model_is_closer_and_has_the_same_codes(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    out = quantkit.refine(trained[1], tmp_path / "out", against=trained[0], **TEXT, epochs=2)
    held_back = [evaluation.held_back for evaluation in out.curve]
    assert min(held_back) < 0.95 * held_back[0]
    assert out.manifest["run_by"].startswith("transformers")
    assert out.quality is not None
    assert quantkit.verify(out.path, trained[0]).verdict is Verdict.WITHIN_BOUND
    before, after = (with_codes(open_checkpoint(path)) for path in (trained[1], out.path))
    assert schemes(before) == schemes(after)
    changed = 0
    for module in schemes(before):
        weights = [model.load(f"{module}.weight") for model in (before, after)]
        assert isinstance(weights[0], QuantTensor)
        assert isinstance(weights[1], QuantTensor)
        assert torch.equal(weights[0].codes, weights[1].codes)
        changed += not torch.equal(weights[0].scale, weights[1].scale)
    assert changed > 10
    # transformers loads it with the weights that the gate has measured.
    quantkit.convert(
        out.path, tmp_path / "floats", dequantize=True, dtype="fp32", source_check=False
    )
    tokens = oracle.random_tokens(LENGTH, 2, 2000)
    loaded = oracle.logits(oracle.load(tmp_path / "floats"), tokens)
    run = open_to_run(out.path)
    states = final_hidden(run, [Batch.from_start(tokens)])
    logits = final_logits(run, [states[0].flatten(0, 1)])[0]
    torch.testing.assert_close(logits, loaded.flatten(0, 1), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_delta_gives_the_refined_model(trained: tuple[Path, Path], tmp_path: Path) -> None:
    settings = {**TEXT, "against": trained[0], "epochs": 1, "train_codes": True}
    quantkit.refine(trained[1], tmp_path / "out", train_norms=True, **settings)
    quantkit.refine(trained[1], delta=tmp_path / "delta", train_norms=True, **settings)
    applied = quantkit.apply_delta(trained[1], tmp_path / "delta", tmp_path / "applied").path
    for folder in (tmp_path / "out", applied):
        manifest = json.loads((folder / "quantkit.json").read_text())
        assert manifest["carried"]["model.norm.weight"] == "trained"
        assert manifest["carried"]["lm_head.weight"] == "bit for bit"
        assert quantkit.verify(folder, trained[0]).verdict is Verdict.WITHIN_BOUND
    tensors = [load_file(folder / "model.safetensors") for folder in (tmp_path / "out", applied)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())


@pytest.mark.slow
def test_quantize_refines_what_it_has_quantized(tmp_path: Path) -> None:
    quantkit.convert(DEMO_MODEL, tmp_path / "model", source_check=False)
    made = quantkit.quantize(
        tmp_path / "model",
        tmp_path / "out",
        "int4-g64",
        via="transformers",
        refine=True,
        epochs=1,
        **{**TEXT, "length": 64},
        accept_quality_loss=True,
    )
    assert made.refined is not None
    assert [evaluation["step"] for evaluation in made.refined] == [0, 7]
    assert made.manifest["run_by"].startswith("transformers")
    assert quantkit.verify(made.path, tmp_path / "model").verdict is Verdict.WITHIN_BOUND
    assert not (tmp_path / "out.unrefined").exists()


@pytest.mark.parametrize("options", [{"mesh": "2x1"}, {"backend": "xla"}])
def test_what_training_does_not_do_is_refused(
    options: dict[str, str], models: tuple[Path, Path], tmp_path: Path
) -> None:
    with raises(RequestError, path=models[0], options=options):
        quantkit.refine(models[1], tmp_path / "out", against=models[0], **TEXT, **options)
    assert not list(tmp_path.iterdir())


def test_a_model_that_transformers_does_not_know_is_refused(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(models[1], tmp_path / "int4")
    oracle.edit_json(tmp_path / "int4" / "config.json", model_type="unheard", architectures=["No"])
    with raises(UnsupportedError, path=tmp_path / "int4"):
        quantkit.refine(tmp_path / "int4", tmp_path / "out", against=models[0], **TEXT)


@pytest.mark.slow
def test_linears_that_no_sample_reached_stay_floats_when_the_others_are_refined(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    source = tiny_model("longcat_flash")
    settings: dict[str, Any] = {**TEXT, "accept_quality_loss": True, "epochs": 1}
    made = quantkit.quantize(source, tmp_path / "out", "int4-g32", refine=True, **settings)
    floats: list[str] = []
    for module, record in made.manifest["modules"].items():
        if record["scheme"] is None and ".experts." in module:
            floats.append(module)
    # Its identity experts have weights that nothing multiplies by.
    assert floats
    expected = open_checkpoint(source, tensors_only=True)
    result = with_codes(open_checkpoint(made.path, tensors_only=True))
    assert all(
        torch.equal(result.load(f"{module}.weight"), expected.load(f"{module}.weight"))  # type: ignore[arg-type]
        for module in floats
    )
    assert quantkit.verify(made.path).ok


@pytest.mark.slow
def test_a_model_without_a_body_of_its_own_is_refined(tiny_model: Tiny, tmp_path: Path) -> None:
    source = tiny_model("llama4_text")
    settings: dict[str, Any] = {**TEXT, "accept_quality_loss": True, "epochs": 1}
    made = quantkit.quantize(source, tmp_path / "out", "int4-g32", refine=True, **settings)
    assert quantkit.verify(made.path).ok


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hrm_text", "molmo2"])
def test_linears_that_transformers_splits_are_refined(
    kind: str, tiny_model: Tiny, tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    source = (tiny_image_text_model if kind == "molmo2" else tiny_model)(kind)
    settings: dict[str, Any] = {"accept_quality_loss": True, "source_check": False}
    result = quantkit.quantize(source, tmp_path / "int4", "int4-g32", method="rtn", **settings)
    options: dict[str, Any] = {**TEXT, "epochs": 1}
    refined = quantkit.refine(result.path, tmp_path / "refined", against=source, **options)
    before, after = (
        with_codes(open_checkpoint(path, tensors_only=True)) for path in (result.path, refined.path)
    )
    for name in schemes(before):
        weights = [checkpoint.load(f"{name}.weight") for checkpoint in (before, after)]
        assert all(isinstance(weight, QuantTensor) for weight in weights)
        assert not torch.equal(weights[0].scale, weights[1].scale), name
    assert quantkit.verify(refined.path).ok
