"""Refining a model: closer to its float model, in the same format, and nothing else changed."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Capture, run
from error_parts import list_options, raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.data.files import EXCERPT
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    NoImprovementError,
    NonFiniteError,
    NotRepresentableError,
    QualityError,
    RequestError,
    ResumeError,
    UnsupportedError,
)
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.model.layerwise import Batch
from quantkit.quality.measures import compare_batches, text_windows
from quantkit.quality.verify import Verdict
from quantkit.tensors.qtensor import QuantTensor, pack_int32
from quantkit.text.tokenizer import load_tokenizer, prompt_start
from quantkit.training import optimizer

TEXT: dict[str, Any] = {"calibration": EXCERPT, "samples": 32, "length": 32, "source_check": False}
QUICK: dict[str, Any] = {**TEXT, "epochs": 1}
ALL: dict[str, Any] = {**TEXT, "samples": 64, "epochs": 2, "train_codes": True, "train_norms": True}
OTHER_TEXT = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def refined(floats: Path, int4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refined") / "refined"
    quantkit.refine(int4, folder, against=floats, **TEXT, epochs=3)
    return folder


@pytest.fixture(scope="module")
def all_trained(floats: Path, int4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `ALL`, in steps that change some codes."""
    folder = tmp_path_factory.mktemp("trained") / "trained"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_MAX_CODE_STEP", 0.01)
        quantkit.refine(int4, folder, against=floats, **ALL)
    return folder


def kl(floats: Path, other: Path) -> float:
    """On a text that is in no calibration."""
    tokenizer = load_tokenizer(floats)
    windows = text_windows(tokenizer.encode(OTHER_TEXT.read_text()), prompt_start(tokenizer), 64)[
        :8
    ]
    (found,) = compare_batches(
        open_checkpoint(floats), open_checkpoint(other), [Batch.from_start(windows)]
    )
    return found.divergence.kl


def weights(path: Path) -> dict[str, QuantTensor]:
    model = with_codes(open_checkpoint(path))
    found = {module: model.load(f"{module}.weight") for module in schemes(model)}
    assert all(isinstance(value, QuantTensor) for value in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.slow
def test_it_is_closer_on_another_text_and_has_the_same_codes(
    floats: Path, int4: Path, refined: Path
) -> None:
    assert kl(floats, refined) < 0.95 * kl(floats, int4)
    before, after = weights(int4), weights(refined)
    assert before.keys() == after.keys()
    for module, value in before.items():
        assert torch.equal(value.codes, after[module].codes)
        assert value.scale.dtype == after[module].scale.dtype
    assert any(
        not torch.equal(value.scale, after[module].scale) for module, value in before.items()
    )
    for name in ("config.json", "tokenizer.json"):
        assert (int4 / name).read_bytes() == (refined / name).read_bytes()


@pytest.mark.slow
def test_the_manifest_lists_the_curve_and_each_changed_tensor(refined: Path, int4: Path) -> None:
    made = json.loads((refined / "quantkit.json").read_text())
    stated = made["refined"]
    assert (made["job"], stated["epochs"], stated["train_codes"]) == ("refine", 3, False)
    held_back = [one["held_back"] for one in stated["curve"]]
    assert stated["kept_step"] == stated["curve"][held_back.index(min(held_back))]["step"] > 0
    assert set(stated["tensors"]) <= {f"{module}.weight" for module in weights(int4)}
    assert all(one["before"] != one["after"] for one in stated["tensors"].values())
    assert {
        made["modules"][name.removesuffix(".weight")]["solver"] for name in stated["tensors"]
    } == {"scales trained"}


def test_verify_judges_it_by_its_logits(floats: Path, refined: Path, tmp_path: Path) -> None:
    assert quantkit.verify(refined, floats).verdict is Verdict.WITHIN_BOUND
    assert quantkit.verify(refined).is_same


@pytest.mark.slow
def test_verify_finds_a_trained_norm_that_was_changed_later(
    floats: Path, int4: Path, tmp_path: Path
) -> None:
    quantkit.refine(int4, tmp_path / "norms", against=floats, **QUICK, train_norms=True)
    report = quantkit.verify(tmp_path / "norms", floats)
    assert report.verdict is Verdict.WITHIN_BOUND
    name = "model.layers.0.input_layernorm.weight"
    assert name in {one.name for one in report.differing}
    (file,) = (tmp_path / "norms").glob("*.safetensors")
    tensors = load_file(file)
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, file, {"format": "pt"})
    report = quantkit.verify(tmp_path / "norms", floats)
    assert report.verdict is Verdict.DIFFERENT
    assert name in {one.name for one in report.differing if not one.within}


def test_verify_finds_a_trained_scale_that_was_changed_later(
    floats: Path, refined: Path, tmp_path: Path
) -> None:
    """Though the logits are within the bound."""
    shutil.copytree(refined, tmp_path / "changed")
    file = tmp_path / "changed/model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj"
    tensors[f"{name}.weight_scale"][3, 1] *= 1.05
    save_file(tensors, file, {"format": "pt"})
    report = quantkit.verify(tmp_path / "changed", floats)
    assert report.verdict is Verdict.DIFFERENT
    assert any(f"'{name}.weight'" in problem for problem in report.problems)


@pytest.mark.slow
def test_another_format_and_another_refinement_keep_the_list(
    floats: Path, int4: Path, all_trained: Path, tmp_path: Path
) -> None:
    """So that trained norms are not taken for damaged ones."""
    quantkit.convert(all_trained, tmp_path / "gptq", to="gptq", source_check=False, requantize=True)
    quantkit.refine(all_trained, tmp_path / "again", against=floats, **{**QUICK, "samples": 64})
    for name in ("gptq", "again"):
        assert quantkit.verify(tmp_path / name, floats).verdict is Verdict.WITHIN_BOUND
    lists = [
        json.loads((path / "quantkit.json").read_text())["refined"]["tensors"]
        for path in (all_trained, tmp_path / "again")
    ]
    assert lists[0].keys() == lists[1].keys()
    assert all(one["before"] == lists[1][name]["before"] for name, one in lists[0].items())


@pytest.mark.slow
def test_groups_of_whole_rows_in_awq(floats: Path, tmp_path: Path) -> None:
    """Whose scales are stored the other way round."""
    quantkit.quantize(
        floats, tmp_path / "src", "int4-g128-asym", method="rtn", to="awq", source_check=False
    )
    made = quantkit.refine(tmp_path / "src", tmp_path / "dst", against=floats, **QUICK)
    assert made.after < made.before


@pytest.mark.slow
def test_codes_are_trained_too(
    floats: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_MAX_CODE_STEP", 0.01)  # for few steps
    made = quantkit.refine(
        int4, tmp_path / "codes", against=floats, **TEXT, epochs=3, train_codes=True
    )
    before, after = weights(int4), weights(tmp_path / "codes")
    share = sum(
        (value.codes != after[name].codes).float().mean().item() for name, value in before.items()
    )
    assert 0.001 < share / len(before) < 0.5
    assert made.after < made.before
    assert quantkit.verify(tmp_path / "codes", floats).verdict is Verdict.WITHIN_BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "scheme"),
    [
        ("gptq", "int4-g32"),
        ("awq", "int4-g32-asym"),
        ("mlx", "int4-g32"),
        ("gguf", "int4-g32"),
        ("gguf", "q4_1"),
    ],
)
def test_other_formats_keep_their_form_and_codes(
    floats: Path, tmp_path: Path, to: str, scheme: str
) -> None:
    end = ".gguf" if to == "gguf" else ""
    src, dst = tmp_path / f"src{end}", tmp_path / f"dst{end}"
    quantkit.quantize(floats, src, scheme, method="rtn", to=to, source_check=False)  # type: ignore[arg-type]
    quantkit.refine(src, dst, against=floats, **QUICK)
    before, after = weights(src), weights(dst)
    assert all(torch.equal(value.codes, after[name].codes) for name, value in before.items())
    assert open_checkpoint(src).layout == open_checkpoint(dst).layout
    assert kl(floats, dst) < kl(floats, src)


@pytest.fixture(scope="module")
def mlx(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As mlx-lm writes them: groups from their smallest to their largest weight, the embedding
    too.
    """
    folder = tmp_path_factory.mktemp("mlx") / "mlx"
    shutil.copytree(floats, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(floats / "model.safetensors").items():
        if value.dim() == 1:
            tensors[name] = value
            continue
        module, groups = name.removesuffix("weight"), value.float().view(len(value), -1, 32)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).bfloat16()
        codes = ((groups - low) / scale.float()).round().clamp(0, 15).to(torch.uint8).flatten(1)
        tensors[name] = pack_int32(codes, 4).view(torch.uint32)
        tensors |= {
            f"{module}scales": scale.squeeze(-1),
            f"{module}biases": low.bfloat16().squeeze(-1),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}})
    )
    (folder / "quantkit.json").unlink()
    return folder


@pytest.mark.slow
def test_offsets_of_mlx_are_trained_with_their_scales(
    floats: Path, mlx: Path, tmp_path: Path
) -> None:
    """The files of mlx-lm have offsets that are no multiples of their scales."""
    made = quantkit.refine(mlx, tmp_path / "dst", against=floats, **QUICK)
    assert not any("are read as" in note for note in made.notes)
    assert kl(floats, tmp_path / "dst") < kl(floats, mlx)
    before, after = (load_file(one / "model.safetensors") for one in (mlx, tmp_path / "dst"))
    assert before.keys() == after.keys()
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    linears = {
        name for name in before if ".layers." in name and name.endswith(("scales", "biases"))
    }
    assert same == before.keys() - linears
    assert open_checkpoint(mlx).layout == open_checkpoint(tmp_path / "dst").layout
    assert quantkit.verify(tmp_path / "dst", floats).verdict is Verdict.WITHIN_BOUND
    quantkit.refine(mlx, against=floats, delta=tmp_path / "delta", **QUICK)
    quantkit.apply_delta(mlx, tmp_path / "delta", tmp_path / "applied")
    assert (tmp_path / "applied/model.safetensors").read_bytes() == (
        tmp_path / "dst/model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_int8_takes_smaller_steps(demo_model: Path, tmp_path: Path) -> None:
    """Steps as large as those of int4 would lose more than int8 does."""
    floats, src, dst = tmp_path / "floats", tmp_path / "src", tmp_path / "dst"
    quantkit.convert(demo_model, floats, dtype="fp32", source_check=False)
    quantkit.quantize(floats, src, "int8", source_check=False)
    made = quantkit.refine(src, dst, against=floats, **QUICK)
    assert made.after < made.before
    assert kl(floats, dst) < kl(floats, src)


@pytest.mark.slow
def test_offsets_that_mlx_cannot_hold_are_refused_before_training(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of float32, so that offsets are exact before, and not after."""
    quantkit.convert(floats, tmp_path / "fp16", dtype="fp16", source_check=False)
    quantkit.quantize(
        tmp_path / "fp16", tmp_path / "asym", "int4-g32-asym", method="rtn", source_check=False
    )
    quantkit.convert(
        tmp_path / "asym", tmp_path / "mlx", to="mlx", requantize=True, source_check=False
    )
    monkeypatch.setattr("quantkit.jobs.refine.rewritten._TRIAL_FACTOR", 1 + 2**-22)
    with raises(NotRepresentableError, path=tmp_path / "mlx", options=["to"]):
        quantkit.refine(tmp_path / "mlx", tmp_path / "dst", against=tmp_path / "fp16", **QUICK)


@pytest.mark.slow
def test_a_result_that_is_no_better_is_not_written(
    floats: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "FACTOR_RATE", 5.0)
    with pytest.raises(NoImprovementError):
        quantkit.refine(int4, tmp_path / "dst", against=floats, **QUICK)
    assert not list(tmp_path.iterdir())


class Stop(Exception):
    pass


def stopping_at(step: int) -> Callable[..., None]:
    def progress(phase: str, done: int, total: int, unit: str, /) -> None:
        if phase == "training" and done == step:
            raise Stop

    return progress


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 14])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    floats: Path,
    int4: Path,
    all_trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    """From a state within an epoch, from one after an evaluation; and with little memory."""
    monkeypatch.setattr("quantkit.training.state.SECONDS", 0.0)
    monkeypatch.setattr(optimizer, "_MAX_CODE_STEP", 0.01)
    options: dict[str, Any] = {**ALL, "against": floats}
    with pytest.raises(Stop):
        quantkit.refine(int4, tmp_path / "dst", **options, progress=stopping_at(step))
    assert [path.name for path in tmp_path.glob("dst*")] == ["dst.training.partial"]
    with pytest.raises(ResumeError):
        quantkit.refine(int4, tmp_path / "dst", **options)
    with raises(ResumeError, found="changed epochs"):
        quantkit.refine(int4, tmp_path / "dst", **{**options, "epochs": 3}, resume=True)
    quantkit.refine(int4, tmp_path / "dst", **options, activation_memory=1000, resume=True)
    for file in sorted(path.name for path in all_trained.iterdir()):
        assert (tmp_path / "dst" / file).read_bytes() == (all_trained / file).read_bytes(), file
    assert [path.name for path in tmp_path.glob("dst*")] == ["dst"]


def test_a_damaged_state_is_refused(
    floats: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.training.state.SECONDS", 0.0)
    with pytest.raises(Stop):
        quantkit.refine(int4, tmp_path / "dst", against=floats, **QUICK, progress=stopping_at(2))
    file = next((tmp_path / "dst.training.partial").glob("state-2-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with raises(ResumeError, path=file):
        quantkit.refine(int4, tmp_path / "dst", against=floats, **QUICK, resume=True)


@pytest.mark.slow
def test_a_delta_gives_the_same_model(
    floats: Path, int4: Path, all_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_MAX_CODE_STEP", 0.01)  # so that codes change
    options: dict[str, Any] = {"against": floats, **ALL}
    made = quantkit.refine(int4, delta=tmp_path / "made.delta", **options)
    assert made.is_delta
    assert made.weight_bytes == (tmp_path / "made.delta").stat().st_size
    content = (tmp_path / "made.delta").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header["__metadata__"]) == [
        "format",
        "head",
        "sha256",
    ]  # the same bytes in every process
    quantkit.apply_delta(int4, tmp_path / "made.delta", tmp_path / "dst")
    assert (tmp_path / "dst/model.safetensors").read_bytes() == (
        all_trained / "model.safetensors"
    ).read_bytes()
    assert quantkit.verify(tmp_path / "dst", floats).verdict is Verdict.WITHIN_BOUND
    assert quantkit.verify(tmp_path / "dst").is_same


@pytest.mark.slow
def test_a_delta_of_scales_is_small(floats: Path, int4: Path, tmp_path: Path) -> None:
    """Two bytes for a group of 32 weights, and the names."""
    quantkit.refine(int4, delta=tmp_path / "made.delta", against=floats, **QUICK)
    found = weights(int4)
    groups = sum(value.scale.numel() for value in found.values())
    assert 2 * groups < (tmp_path / "made.delta").stat().st_size < 2 * groups + 1000 * len(found)


@pytest.mark.slow
def test_a_delta_must_pass_the_gate(
    floats: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model must."""
    monkeypatch.setattr("quantkit.quality.gate.FLOOR", 0.0)
    monkeypatch.setattr("quantkit.quality.gate.SLACK", 0.1)
    for output in ({"dst": tmp_path / "dst"}, {"delta": tmp_path / "made.delta"}):
        with raises(QualityError, options=["accept_quality_loss"]):
            quantkit.refine(int4, **output, against=floats, **QUICK)  # type: ignore[arg-type]
        assert not next(iter(output.values())).exists()


def test_an_output_that_exists_is_found_before_training(
    floats: Path, int4: Path, tmp_path: Path
) -> None:
    phases: list[str] = []
    for output in ({"dst": floats}, {"delta": int4 / "config.json"}):
        with raises(DestinationError, path=next(iter(output.values()))):
            quantkit.refine(
                int4,
                **output,
                against=floats,
                **QUICK,
                progress=lambda phase, *_: phases.append(phase),  # type: ignore[arg-type]
            )
    assert not phases


@pytest.mark.slow
def test_a_delta_goes_with_its_model_alone(
    floats: Path, int4: Path, refined: Path, tmp_path: Path
) -> None:
    delta, dst = tmp_path / "made.delta", tmp_path / "dst"
    quantkit.refine(int4, delta=delta, against=floats, **QUICK)
    with raises(CheckpointError, path=refined, found="another 'model.safetensors'"):
        quantkit.apply_delta(refined, delta, dst)
    changed = tmp_path / "changed"
    shutil.copytree(int4, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rope_theta": 20000.0}))
    with raises(CheckpointError, path=changed, found="another 'config.json'"):
        quantkit.apply_delta(changed, delta, dst)
    text = tmp_path / "text"
    shutil.copytree(int4, text)
    (text / "generation_config.json").write_text('{"temperature": 99.0}')
    with raises(CheckpointError, path=text, found="another 'generation_config.json'"):
        quantkit.apply_delta(text, delta, dst)
    (text / "generation_config.json").unlink()
    with raises(CheckpointError, path=text, found="no 'generation_config.json'"):
        quantkit.apply_delta(text, delta, dst)
    data = bytearray(delta.read_bytes())
    for place in (4, 100, len(data) // 2, len(data) - 1):
        damaged = bytes(data[:place]) + bytes([data[place] ^ 4]) + bytes(data[place + 1 :])
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(CheckpointError) as error:
            quantkit.apply_delta(int4, tmp_path / "damaged", dst)
        assert "`" not in str(error.value)
    with pytest.raises(CheckpointError):
        quantkit.apply_delta(int4, int4 / "model.safetensors", dst)
    assert not dst.exists()


def test_the_model_to_refine_against_is_of_floats(mlx: Path, int4: Path, tmp_path: Path) -> None:
    """Also where its codes are read as floats, as those of mlx-lm are."""
    for against in (mlx, int4):
        with raises(RequestError, path=against, expected="the float model"):
            quantkit.refine(mlx, tmp_path / "dst", against=against, **QUICK)


def test_offsets_in_floats_are_not_trained_by_xla(floats: Path, mlx: Path, tmp_path: Path) -> None:
    with raises(UnsupportedError, path=mlx, found="float offsets of groups"):
        quantkit.refine(mlx, tmp_path / "dst", against=floats, backend="xla", **QUICK)


@pytest.mark.slow
def test_a_forged_delta_is_an_error(floats: Path, int4: Path, tmp_path: Path) -> None:
    """With a hash that fits: no key of it is believed."""
    from safetensors import safe_open

    from quantkit.training.delta import _check

    delta, forged = tmp_path / "made.delta", tmp_path / "forged.delta"
    quantkit.refine(int4, delta=delta, against=floats, **QUICK)
    with safe_open(delta, "pt") as file:
        head = json.loads(file.metadata()["head"])
    tensors = load_file(delta)
    first = next(iter(head["changed"]))
    bomb = torch.frombuffer(bytearray(zlib.compress(bytes(1 << 24))), dtype=torch.uint8)
    cases: list[tuple[Any, dict[str, torch.Tensor]]] = [
        ({}, tensors),
        ([], tensors),
        ({**head, "base": 3}, tensors),
        ({**head, "changed": {first: 3}}, tensors),
        ({**head, "details": {}}, tensors),
        (head, {**tensors, f"{first}.codes": bomb}),
        (head, {**tensors, f"{first}.scale": tensors[f"{first}.scale"].half()}),
        (head, {name: one for name, one in tensors.items() if not name.startswith(first)}),
    ]
    for changed, parts in cases:
        text = json.dumps(changed)
        save_file(
            parts,
            forged,
            {"format": "quantkit delta 1", "head": text, "sha256": _check(text, parts)},
        )
        with pytest.raises(CheckpointError):
            quantkit.apply_delta(int4, forged, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_nan_in_either_model_is_an_error(floats: Path, int4: Path, tmp_path: Path) -> None:
    for which, name in (
        (int4, "model.layers.1.mlp.up_proj.weight_scale"),
        (floats, "model.norm.weight"),
    ):
        broken = tmp_path / f"broken-{which.name}"
        shutil.copytree(which, broken)
        (broken / "quantkit.json").unlink()
        (file,) = broken.glob("*.safetensors")
        tensors = load_file(file)
        tensors[name].view(-1)[0] = torch.nan
        save_file(tensors, file, {"format": "pt"})
        src, against = (broken, floats) if which == int4 else (int4, broken)
        with pytest.raises(NonFiniteError):
            quantkit.refine(src, tmp_path / "dst", against=against, **QUICK)
        assert not list(tmp_path.glob("dst*"))


def test_models_that_do_not_belong_together_are_refused(
    floats: Path, int4: Path, tmp_path: Path
) -> None:
    with raises(RequestError, path=int4, expected="the float model"):
        quantkit.refine(int4, tmp_path / "dst", against=int4, **QUICK)
    with raises(RequestError, path=floats, options=["refine"]):
        quantkit.refine(floats, tmp_path / "dst", against=floats, **QUICK)
    with raises(RequestError, found="neither", options=["delta"]):
        quantkit.refine(int4, against=floats, **QUICK)
    with raises(RequestError, found=tmp_path / "dst.gguf"):
        quantkit.refine(int4, tmp_path / "dst.gguf", against=floats, **QUICK)
    with raises(DestinationError, path=floats):
        quantkit.refine(int4, floats, against=floats, **QUICK)


@pytest.mark.slow
def test_quantize_refines_what_it_quantized(floats: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**TEXT, "samples": 96, "method": "gptq"}
    plain = quantkit.quantize(floats, tmp_path / "plain", "int4-g64", **options)
    made = quantkit.quantize(floats, tmp_path / "dst", "int4-g64", **options, refine=True, epochs=2)
    assert made.refined is not None
    assert min(one["held_back"] for one in made.refined) < made.refined[0]["held_back"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "plain"]
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "dst")
    assert all(torch.equal(value.codes, after[name].codes) for name, value in before.items())
    assert made.manifest["source"] == plain.manifest["source"]
    assert made.manifest["job"] == "quantize"
    assert made.manifest["refine"]["epochs"] == 2
    assert "--refine --epochs 2" in (tmp_path / "dst/README.md").read_text()
    assert quantkit.verify(tmp_path / "dst", floats).verdict is Verdict.WITHIN_BOUND


@pytest.mark.slow
def test_what_training_does_not_improve_is_written_as_it_was_quantized(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "FACTOR_RATE", 5.0)
    options: dict[str, Any] = {**TEXT, "method": "gptq"}
    for suffix in ("", ".gguf"):
        scheme = "q4_0" if suffix else "int4-g64"
        source = quantkit.convert(
            floats, tmp_path / "bf16", dtype="bf16", source_check=False, if_exists="skip"
        ).path
        plain = quantkit.quantize(source, tmp_path / f"plain{suffix}", scheme, **options)
        result = quantkit.quantize(
            source, tmp_path / f"dst{suffix}", scheme, **options, refine=True, epochs=1
        )
        assert result.refined is None
        assert set(result.notes) - set(plain.notes)
        assert result.manifest["modules"] == plain.manifest["modules"]
        assert result.manifest["quality"] == plain.manifest["quality"]
        assert "refine" not in result.manifest
        assert quantkit.verify(result.path).is_same
        assert quantkit.verify(plain.path, result.path).verdict is Verdict.SAME
        if not suffix:
            assert "--refine" not in (result.path / "README.md").read_text()
    assert not [
        path.name
        for path in tmp_path.iterdir()
        if "unrefined" in path.name or "partial" in path.name
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "rate"),
    [
        pytest.param(RuntimeError, None, id="better-RuntimeError"),
        pytest.param(QualityError, None, id="better-QualityError"),
        pytest.param(RequestError, 5.0, id="no better-RequestError"),
        pytest.param(KeyboardInterrupt, 5.0, id="no better-KeyboardInterrupt"),
    ],
)
def test_the_quantized_model_outlives_a_failed_check(
    error: type[BaseException],
    rate: float | None,
    floats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if rate is not None:
        monkeypatch.setattr(optimizer, "FACTOR_RATE", rate)

    def check(*_: object, **__: object) -> None:
        raise error("not passed")

    options: dict[str, Any] = {**TEXT, "samples": 96, "method": "gptq", "refine": True, "epochs": 1}
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.jobs.quantize.sequence.require_passed", check)
        with pytest.raises(error):
            quantkit.quantize(floats, tmp_path / "dst", "int4-g64", **options)
    assert not (tmp_path / "dst").exists()
    assert (tmp_path / "dst.partial").is_dir()
    assert schemes(open_checkpoint(tmp_path / "dst.unrefined"))
    made = quantkit.quantize(floats, tmp_path / "dst", "int4-g64", **options, resume=True)
    assert (made.refined is None) == (rate is not None)
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


@pytest.mark.slow
def test_an_interrupted_quantize_goes_on_to_refine(floats: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**TEXT, "samples": 48, "method": "gptq", "refine": True, "epochs": 2}
    quantkit.quantize(floats, tmp_path / "whole", "int4-g64", **options)
    with pytest.raises(Stop):
        quantkit.quantize(floats, tmp_path / "dst", "int4-g64", **options, progress=stopping_at(2))
    made = quantkit.quantize(floats, tmp_path / "dst", "int4-g64", **options, resume=True)
    assert (made.path / "model.safetensors").read_bytes() == (
        tmp_path / "whole/model.safetensors"
    ).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "whole"]


def test_schemes_without_trained_scales_are_refused_first(floats: Path, tmp_path: Path) -> None:
    with raises(RequestError, path=floats, found="fp8"):
        quantkit.quantize(floats, tmp_path / "dst", "fp8", method="gptq", refine=True, **TEXT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("scheme", "options"), [("int8", ["refine", "method"]), ("fp8", ["refine"])]
)
def test_schemes_that_are_rounded_by_default_are_refused_first(
    floats: Path, tmp_path: Path, scheme: str, options: list[str]
) -> None:
    with raises(RequestError, path=floats, found=scheme, options=options):
        quantkit.quantize(floats, tmp_path / "dst", scheme, refine=True)
    with raises(RequestError, path=floats, found=scheme, options=options):
        quantkit.plan.quantize(floats, tmp_path / "dst", scheme, refine=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value", "advised"),
    [
        ("lora", "adapter", {"lora", "tensors_only"}),
        ("dequantize", True, {"dequantize", "tensors_only"}),
        ("tensors_only", True, {"tensors_only"}),
        ("if_exists", "skip", {"if_exists"}),
        ("kv_cache", "fp8", set()),
        ("certify_positions", 8, set()),
    ],
)
def test_what_does_not_go_with_refinement_is_refused_with_what_to_do(
    floats: Path, tmp_path: Path, option: str, value: object, advised: set[str]
) -> None:
    options: dict[str, Any] = {option: value, "refine": True}
    with raises(RequestError, options=["refine", option]) as caught:
        quantkit.quantize(floats, tmp_path / "dst", "int4-g32", **options)
    assert caught.value.hint
    assert list_options(caught.value.hint) == advised
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused_with_what_to_do(floats: Path, tmp_path: Path) -> None:
    several = ProcessGroup(rank=0, size=2, device=None, name="two")
    with raises(RequestError, options=["refine"]) as caught:
        quantkit.quantize(floats, tmp_path / "dst", "int4-g32", refine=True, group=several)
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_gate_compares_weights_that_can_be_compared(
    floats: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by logits alone, which texts may not show."""
    monkeypatch.setattr("quantkit.quality.gate.weight_bound", lambda *_: 1e-3)
    with raises(QualityError, "model.layers."):
        quantkit.refine(int4, tmp_path / "dst", against=floats, **QUICK)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"tensors_only": True}, ["refine", "tensors_only"]),
        ({"dequantize": True}, ["refine", "dequantize"]),
        ({"to": ["gptq", "awq"]}, ["refine"]),
        ({"method": "rtn"}, ["refine", "method"]),
    ],
    ids=str,
)
def test_what_does_not_go_with_refine_is_named(
    floats: Path, tmp_path: Path, settings: dict[str, Any], options: list[str]
) -> None:
    with raises(RequestError, options=options):
        quantkit.quantize(floats, tmp_path / "dst", "int4-g32", refine=True, **settings)
    with raises(RequestError, options=["train_codes", "refine"]):
        quantkit.quantize(floats, tmp_path / "dst", "int4-g32", train_codes=True)


@pytest.mark.slow
def test_the_commands(floats: Path, int4: Path, tmp_path: Path, capfd: Capture) -> None:
    text = ["--calibration", EXCERPT, "--samples", "32", "--length", "32", "--epochs", "1"]
    pair = [int4, tmp_path / "dst", "--against", floats, *text, "--no-source-check"]
    code, out, _ = run(capfd, "plan", "refine", *pair)
    assert (code, "in training" in out or "in the gate" in out) == (0, True)
    code, out, err = run(capfd, "refine", *pair)
    assert (code, err) == (0, "")
    assert "KL" in out
    delta = tmp_path / "made.delta"
    assert run(capfd, "refine", int4, "--delta", delta, "--against", floats, *text)[0] == 0
    assert run(capfd, "apply-delta", int4, delta, tmp_path / "applied")[0] == 0
    assert (tmp_path / "applied/model.safetensors").read_bytes() == (
        tmp_path / "dst/model.safetensors"
    ).read_bytes()
    assert run(capfd, "apply-delta", floats, delta, tmp_path / "other")[0] == 2
    delta.write_bytes(b"broken")
    assert run(capfd, "apply-delta", int4, delta, tmp_path / "other")[0] == 3
