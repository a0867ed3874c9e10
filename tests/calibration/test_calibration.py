"""Calibration text, and GPTQ over a whole checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.calibration import group_solver
from quantkit.data.files import excerpt
from quantkit.errors import DestinationError, NonFiniteError, RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch
from quantkit.model.load import load_model
from quantkit.passes import activation_store
from quantkit.quality.gate import RtnBaseline
from quantkit.quality.measures import compare_batches, text_windows
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import Tokenizer, load_tokenizer, prompt_start

SPLIT = 11000  # characters to calibrate on; the rest is to measure on


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from quantkit.data.files import DEMO_MODEL

    return load_tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(excerpt()[:SPLIT])
    return path


def _quantize(
    model: Path, dst: Path, text: Path, scheme: str | QuantScheme = "int4-g64", **options: object
) -> Path:
    settings = {"samples": 24, "length": 128, **options}
    quantkit.quantize(model, dst, scheme, method="gptq", calibration=text, **settings)  # type: ignore[arg-type]
    return dst


def _kl(reference: Checkpoint, other: Checkpoint, batch: Batch) -> float:
    return compare_batches(reference, other, [batch])[0].divergence.kl


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"calibration": "text.txt"}, {"options": ["calibration", "method"]}),
        ({"samples": "4"}, {"options": ["samples", "method"]}),
        ({"method": "awq"}, {"found": "awq", "expected": "rtn or gptq"}),
    ],
)
def test_method_and_calibration_go_together(
    options: dict[str, str], parts: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    with raises(RequestError, **parts):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", **{"method": "rtn", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("job", ["quantize", "plan"])
def test_rounding_has_no_use_for_settings_of_gptq(
    job: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    options = (
        ["--samples", "128"],
        ["--length", "64"],
        ["--seed", "0"],
        ["--thorough"],
        ["--activation-memory", "4GB"],
        ["--device", "cpu"],
    )
    for option in options:
        command = ["quantize"] if job == "quantize" else ["plan", "quantize"]
        arguments = [*command, demo_model, tmp_path / "out", "--scheme", "int8", *option]
        code, _, err = run(capfd, *arguments)
        assert code == 2, option
        assert option[0] in err, option
        assert "--method gptq" in err, option
        assert not list(tmp_path.iterdir()), option


@pytest.mark.parametrize(
    "option",
    [
        ("--activation-memory", "nan"),
        ("--activation-memory", "inf"),
        ("--activation-memory", "-1"),
        ("--device", "nonsense"),
        ("--device", "meta"),
        ("--length", "0"),
        ("--samples", "0"),
        ("--seed", str(2**64)),
    ],
)
def test_values_that_make_no_sense_are_refused(
    option: tuple[str, str], demo_model: Path, text: Path, tmp_path: Path, capfd: Capture
) -> None:
    command = ["quantize", demo_model, tmp_path / "out", "--scheme", "int4-g64", "--method", "gptq"]
    for words in (command, ["plan", *command]):
        code, _, err = run(capfd, *words, "--calibration", text, *option)
        assert code == 2
        assert err.startswith("quantkit: error: ")
    assert not list(tmp_path.iterdir())


def test_a_device_that_cannot_be_used_is_refused_wherever_a_model_is_run(demo_model: Path) -> None:
    for load in (quantkit.load, load_model):
        for name in ("nonsense", "meta", "cuda:99"):
            with raises(RequestError, "device", found=name):
                load(demo_model, device=name)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4-g64", "int4-g128-asym", QuantScheme(4, None)], ids=str)
def test_gptq_is_much_closer_to_the_source_than_rounding(
    scheme: str | QuantScheme, demo_model: Path, text: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    quantkit.quantize(demo_model, tmp_path / "rtn", scheme, method="rtn", accept_quality_loss=True)
    _quantize(demo_model, tmp_path / "gptq", text, scheme, samples=64)
    batch = Batch.from_start(
        text_windows(tokenizer.encode(excerpt()[SPLIT:]), prompt_start(tokenizer), 128)
    )
    source = open_checkpoint(demo_model)
    rtn, gptq = (_kl(source, open_checkpoint(tmp_path / name), batch) for name in ("rtn", "gptq"))
    assert gptq < 0.5 * rtn


@pytest.mark.slow
def test_transformers_loads_what_gptq_writes(demo_model: Path, text: Path, tmp_path: Path) -> None:
    folder = _quantize(demo_model, tmp_path / "out", text)
    scales = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
    assert (scales < 0).any()
    tokens = oracle.random_tokens(30, vocabulary=2000)
    with torch.inference_mode():
        ours = load_model(folder, dtype=torch.float32, backend="reference")(
            tokens, torch.arange(30)
        )
    assert (ours - oracle.logits(oracle.load(folder), tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "llama"])
def test_every_architecture_can_be_calibrated(
    kind: str, demo_model: Path, text: Path, tmp_path: Path
) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    source = oracle.save(
        oracle.make(kind, vocab_size=2048, sliding_window=9, use_sliding_window=True, **changes),
        tmp_path / "m",
    )
    (source / "tokenizer.model").write_bytes((demo_model / "tokenizer.model").read_bytes())
    _quantize(source, tmp_path / "gptq", text, "int4-g32", length=40, source_check=False)
    batch = Batch.from_start(oracle.random_tokens(40, batch=4, vocabulary=2048))
    reference, solved = open_checkpoint(source), open_checkpoint(tmp_path / "gptq")
    assert _kl(reference, solved, batch) < _kl(
        reference, RtnBaseline(reference, schemes(solved)), batch
    )


@pytest.mark.slow
def test_two_runs_and_a_resumed_one_give_equal_bytes(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = (
        _contents(_quantize(demo_model, tmp_path / name, text)) for name in ("first", "again")
    )
    assert first == again

    def interrupt(phase: str, done: int, total: int, unit: str) -> None:
        if (phase, done) == ("quantize", 14):  # at the end of block 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _quantize(demo_model, tmp_path / "resumed", text, progress=interrupt)
    solved = []

    def counted(*arguments: Any, **options: Any) -> Any:
        solved.append(arguments[0].shape)
        return solve(*arguments, **options)

    solve = group_solver.solve
    monkeypatch.setattr(group_solver, "solve", counted)
    assert _contents(_quantize(demo_model, tmp_path / "resumed", text, resume=True)) == first
    assert len(solved) == 3 * 4  # block 0 was on disk


@pytest.mark.slow
def test_activations_on_disk_change_nothing(demo_model: Path, text: Path, tmp_path: Path) -> None:
    made = []

    def watch(phase: str, done: int, total: int, unit: str) -> None:
        made.append(len(list((tmp_path / "disk.partial" / ".activations-0").glob("*"))))

    in_memory = _contents(_quantize(demo_model, tmp_path / "memory", text))
    on_disk = _contents(
        _quantize(demo_model, tmp_path / "disk", text, activation_memory=0, progress=watch)
    )
    assert in_memory == on_disk
    assert max(made) > 1


@pytest.mark.slow
def test_full_disk_under_the_activations_is_reported_and_resumable(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _contents(_quantize(demo_model, tmp_path / "whole", text))
    write = activation_store._write
    paths: list[Path] = []

    def write_until_full(path: Path, value: Tensor) -> None:
        paths.append(path)
        if len(paths) == 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, value)

    monkeypatch.setattr(activation_store, "_write", write_until_full)
    with raises(DestinationError, "No space", options=["activation_memory", "resume"]):
        _quantize(demo_model, tmp_path / "out", text, activation_memory=0)
    assert not list((tmp_path / "out.partial").glob(".activations*"))
    monkeypatch.undo()
    assert _contents(_quantize(demo_model, tmp_path / "out", text, resume=True)) == whole


@pytest.mark.slow
def test_the_manifest_reports_how_each_layer_was_solved(
    demo_model: Path, text: Path, tmp_path: Path
) -> None:
    folder = _quantize(demo_model, tmp_path / "out", text, seed=4, keep=["*.k_proj"])
    manifest = json.loads((folder / "quantkit.json").read_text())
    assert manifest["method"] == "gptq"
    assert manifest["calibration"] == {
        "sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        "samples": 24,
        "length": 128,
        "seed": 4,
    }
    solved = manifest["modules"]["model.layers.1.mlp.down_proj"]
    assert solved["solver"] == "gptq"
    assert 0 < solved["output_error"] < 0.2
    assert solved["damping"] == 0.01
    assert manifest["modules"]["model.layers.1.self_attn.k_proj"]["scheme"] is None


def test_inputs_whose_squares_overflow_name_rounding(
    tmp_path: Path, demo_model: Path, text: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "source", dtype="fp32")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    for linear, factor in (("up_proj", 2.0**70), ("down_proj", 2.0**-70)):
        weights[f"model.layers.1.mlp.{linear}.weight"] *= factor
    save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with raises(NonFiniteError, "'model.layers.1.mlp.down_proj'", options=["method"]):
        _quantize(tmp_path / "source", tmp_path / "out", text, samples=2)


def test_a_nan_in_one_weight_names_the_layer(tmp_path: Path, demo_model: Path, text: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with raises(NonFiniteError, "'model.layers.1.mlp.down_proj.weight'", found="1 of 49152"):
        _quantize(tmp_path / "source", tmp_path / "out", text)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_too_few_tokens_are_noted(demo_model: Path, text: Path, tmp_path: Path) -> None:
    found = quantkit.quantize(
        demo_model,
        tmp_path / "out",
        "int4-g64",
        method="gptq",
        calibration=text,
        samples=2,
        length=32,
        accept_quality_loss=True,
    )
    assert any(
        "64 calibration tokens are fewer than the widest linear's 384 inputs" in note
        for note in found.notes
    )
