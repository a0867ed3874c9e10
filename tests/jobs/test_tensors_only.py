"""Models of any architecture by their tensors alone: rounded, converted, verified, carried bit
for bit; never run.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.architectures.topology import linear_columns, parameters
from quantkit.errors import (
    CheckpointError,
    NonFiniteError,
    QualityError,
    RequestError,
    UnsupportedError,
)
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.weights_only import COMPARED
from quantkit.tensors.qtensor import QuantTensor
from quantkit.via_transformers.linears import with_linears

TRANSFORMERS = importlib.metadata.version("transformers")
KEPT_CONFIG = {
    "model_type": "nobody_knows",
    "custom": {"deep": [1, 2.5, None]},
    "torch_dtype": "float32",
}


def _folder(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(KEPT_CONFIG if config is None else config))
    return path


def _some() -> dict[str, Tensor]:
    """Linears by their names, and what else a folder may hold."""
    return {
        "net.layers.0.attn.q_proj.weight": torch.randn(16, 64),
        "net.layers.0.attn.q_proj.bias": torch.randn(16),
        "net.layers.0.mlp.experts.3.w1.weight": torch.randn(24, 64),
        "net.layers.0.mlp.gate.weight": torch.randn(4, 64),
        "net.layers.1.moe.experts.gate_up_proj": torch.randn(4, 64, 48),
        "net.layers.1.odd näme/with spaces.w2.weight": torch.randn(8, 32),
        "net.conv.weight": torch.randn(8, 4, 3, 3),
        "net.embed_tokens.weight": torch.randn(50, 64),
        "lm_head.weight": torch.randn(50, 64),
        "net.norm.weight": torch.randn(64),
        "net.rotary_emb.inv_freq": torch.randn(8),
        "weight": torch.randn(3, 3),
        "scalar": torch.tensor(3.5),
        "empty.q_proj.weight": torch.empty(0, 64),
        "flags": torch.tensor([True, False]),
        "ids": torch.tensor([[2**40, -1]]),
        "doubles": torch.randn(5, dtype=torch.float64),
        "small.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "small2": torch.randn(4).to(torch.float8_e5m2),
    }


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _require_carried(made: Path, source: dict[str, Tensor], quantized: set[str]) -> None:
    """All tensors but those of the quantized modules are there, byte for byte, and no others."""
    found: dict[str, Tensor] = {}
    for file in made.glob("*.safetensors"):
        found |= load_file(file)
    kept = {
        name: tensor
        for name, tensor in source.items()
        if name.removesuffix(".weight") not in quantized
    }
    parts = {name for name in found if name.rpartition(".weight_")[0] in quantized}
    assert set(found) - parts == set(kept)
    for name, tensor in kept.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert _bits(found[name]) == _bits(tensor), name


def test_an_unknown_architecture_is_refused_with_the_flag_in_the_hint(tmp_path: Path) -> None:
    source = _folder(tmp_path / "src", _some())
    for job in (
        lambda: quantkit.inspect(source),
        lambda: quantkit.convert(source, tmp_path / "dst"),
        lambda: quantkit.quantize(source, tmp_path / "dst", "int8"),
    ):
        with pytest.raises(
            UnsupportedError, match=r"architecture is not supported.*`tensors_only=True`"
        ):
            job()


def test_linears_are_rounded_and_everything_else_is_carried_bit_for_bit(tmp_path: Path) -> None:
    tensors = _some()
    source = _folder(tmp_path / "src", tensors)
    (source / "preprocessor_config.json").write_text("{}")
    (source / "vocab.txt").write_text("a\nb\n")
    (source / "modeling_custom.py").write_text("raise SystemExit")
    made = quantkit.quantize(source, tmp_path / "dst", "int4-g32", method="rtn", tensors_only=True)
    quantized = {
        "net.layers.0.attn.q_proj",
        "net.layers.0.mlp.experts.3.w1",
        "net.layers.1.odd näme/with spaces.w2",
    }
    assert set(quantkit.inspect(made.path).tensors) == {
        "int4-g32",
        *(str(t.dtype)[6:] for t in tensors.values()),
    }
    _require_carried(made.path, tensors, quantized)
    config = json.loads((made.path / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == KEPT_CONFIG
    (group,) = settings["config_groups"].values()
    assert (
        set(group["targets"]) == quantized
    )  # not of a class: nobody knows which modules its readers have
    assert {f"net.layers.1.moe.experts.{n}.gate_proj" for n in range(4)} <= set(settings["ignore"])
    assert {"preprocessor_config.json", "vocab.txt"} <= {path.name for path in made.path.iterdir()}
    assert not list(made.path.glob("*.py"))
    assert any("modeling_custom.py" in note for note in made.notes)
    assert any("stacked experts: 12.29K parameters in 1 tensor" in note for note in made.notes)
    assert COMPARED in made.lines()[0]
    assert made.manifest["tensors_only"] is True
    assert made.manifest["linears_by"] == "names"
    recorded = {module: one for module, one in made.manifest["modules"].items() if one["scheme"]}
    assert set(recorded) == quantized
    assert set(made.manifest["carried"]) == {
        n for n in tensors if n.removesuffix(".weight") not in quantized
    }
    assert set(made.manifest["carried"].values()) == {"bit for bit"}
    for module, record in recorded.items():
        weight, found = (
            tensors[f"{module}.weight"],
            open_checkpoint(made.path).load(f"{module}.weight"),
        )
        assert isinstance(found, QuantTensor)
        error = (found.dequantize() - weight).norm() / weight.norm()
        assert record["relative_error"] == pytest.approx(error.item(), rel=1e-3)


def test_a_result_is_verified_alone_and_against_its_source(tmp_path: Path) -> None:
    source = _folder(tmp_path / "src", _some())
    made = quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True).path
    alone = quantkit.verify(made)
    assert alone.ok
    assert any(COMPARED in line for line in alone.lines())
    for pair in (
        (made, source),
        (source, made),
    ):  # nobody has to say that the source is one of these
        report = quantkit.verify(*pair)
        assert report.verdict.name == "WITHIN_BOUND"
        assert len(report.differing) == 3
        assert (
            f"{COMPARED}: transformers does not know 'nobody_knows', as of version {TRANSFORMERS}"
            in report.lines()
        )
    copy = quantkit.convert(source, tmp_path / "copy", tensors_only=True).path
    assert quantkit.verify(copy, source).is_same


@pytest.mark.parametrize(
    ("name", "value"),
    [("ids", torch.tensor([[2**40 + 1, -1]])), ("flags", torch.tensor([True, True]))],
)
def test_a_tensor_that_differs_is_found_whatever_its_type(
    name: str, value: Tensor, tmp_path: Path
) -> None:
    source = _folder(tmp_path / "src", _some())
    copy = quantkit.convert(source, tmp_path / "copy", tensors_only=True).path
    other = _folder(
        tmp_path / "other", {**_some(), **load_file(source / "model.safetensors"), name: value}
    )
    report = quantkit.verify(copy, other)
    assert [one.name for one in report.differing] == [name]
    assert not report.ok


def test_an_error_that_is_not_the_manifests_is_a_problem(tmp_path: Path) -> None:
    source = _folder(tmp_path / "src", _some())
    made = quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True).path
    path = made / "quantkit.json"
    manifest = json.loads(path.read_text())
    manifest["modules"]["net.layers.0.attn.q_proj"]["relative_error"] *= 1.02
    path.write_text(json.dumps(manifest))
    report = quantkit.verify(made, source)
    assert not report.ok
    assert "in the manifest" in report.problems[0]
    manifest["modules"]["net.layers.0.attn.q_proj"]["scheme"] = None
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError,
        match=r"scheme of 'net\.layers\.0\.attn\.q_proj' differs from the manifest",
    ):
        quantkit.verify(made)


def test_what_rounding_changes_too_much_keeps_its_floats(tmp_path: Path) -> None:
    tensors = _some()
    flat = torch.zeros(16, 64)
    flat[:, 0] = 1.0
    flat[:, 1:] = (
        0.06  # below half a step of int4, and together as large as the outlier: rounded away
    )
    tensors["net.layers.0.attn.q_proj.weight"] = flat
    source = _folder(tmp_path / "flat", tensors)
    made = quantkit.quantize(source, tmp_path / "kept", "int4-g64", method="rtn", tensors_only=True)
    record = made.manifest["modules"]["net.layers.0.attn.q_proj"]
    assert record["scheme"] is None
    assert "more than 0.25" in record["reason"]
    assert any("'net.layers.0.attn.q_proj' stays unquantized" in note for note in made.notes)
    _require_carried(
        made.path,
        tensors,
        {"net.layers.0.mlp.experts.3.w1", "net.layers.1.odd näme/with spaces.w2"},
    )
    only = _folder(tmp_path / "only", {"a.q_proj.weight": flat})
    with pytest.raises(QualityError, match="rounding changes every linear layer too much"):
        quantkit.quantize(only, tmp_path / "none", "int4-g64", method="rtn", tensors_only=True)


def test_recipes_name_modules_and_heads(tmp_path: Path) -> None:
    tensors = _some()
    source = _folder(tmp_path / "src", tensors)
    int8, int4 = quantkit.QuantScheme.parse("int8"), quantkit.QuantScheme.parse("int4-g32")
    recipe = quantkit.Recipe(
        int4, (quantkit.Override("lm_head", int8), quantkit.Override("*.experts.*", None))
    )
    made = quantkit.quantize(source, tmp_path / "dst", recipe, method="rtn", tensors_only=True)
    assert made.schemes == {"int4-g32": 2, "int8": 1}
    _require_carried(
        made.path,
        tensors,
        {"lm_head", "net.layers.0.attn.q_proj", "net.layers.1.odd näme/with spaces.w2"},
    )
    with pytest.raises(RequestError, match="pattern matches no linear layer"):
        quantkit.quantize(source, tmp_path / "x", "int8", tensors_only=True, keep="net.layers.7.*")


def test_nothing_that_needs_to_run_it_does(tmp_path: Path) -> None:
    source = _folder(tmp_path / "src", _some())
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 100)
    with pytest.raises(UnsupportedError, match="cannot be calibrated"):
        quantkit.quantize(
            source, tmp_path / "x", "int8", tensors_only=True, method="gptq", calibration=text
        )
    with pytest.raises(
        RequestError, match='`tensors_only=True` cannot be combined with `to="meta"`'
    ):
        quantkit.convert(source, tmp_path / "x", to="meta", tensors_only=True)
    with pytest.raises(RequestError, match="exclude each other"):
        quantkit.convert(source, tmp_path / "x", tensors_only=True, template="llama3")
    made = quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True).path
    with pytest.raises(UnsupportedError, match="known by its tensors only, so it cannot be run"):
        quantkit.load(made)
    assert not (tmp_path / "x").exists()


def test_metas_folders_are_known(demo_model: Path) -> None:
    with pytest.raises(RequestError, match="all tensors of Meta are known"):
        quantkit.inspect(demo_model, tensors_only=True)


def test_nan_is_refused_unless_allowed(tmp_path: Path) -> None:
    tensors = {**_some(), "mask": torch.tensor([0.0, -torch.inf])}
    source = _folder(tmp_path / "src", tensors)
    with pytest.raises(NonFiniteError, match="'mask' contains 1 values"):
        quantkit.convert(source, tmp_path / "dst", tensors_only=True)
    made = quantkit.convert(source, tmp_path / "dst", tensors_only=True, allow_nonfinite=True).path
    _require_carried(made, tensors, set())
    del tensors["mask"]
    tensors["small2"] = torch.full((4,), torch.nan).to(torch.float8_e5m2)
    with pytest.raises(NonFiniteError, match="'small2' contains 4 values"):
        quantkit.convert(_folder(tmp_path / "b", tensors), tmp_path / "c", tensors_only=True)


def test_floats_take_another_type_and_others_do_not(tmp_path: Path) -> None:
    tensors = _some()
    config = {**KEPT_CONFIG, "text_config": {"dtype": "float32", "size": 3}}
    source = _folder(tmp_path / "src", tensors, config)
    made = quantkit.convert(source, tmp_path / "dst", dtype="bf16", tensors_only=True)
    found = load_file(made.path / "model.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == (
            torch.bfloat16 if tensor.dtype == torch.float32 else tensor.dtype
        )
    written = json.loads((made.path / "config.json").read_text())
    assert written["torch_dtype"] == written["text_config"]["dtype"] == "bfloat16"
    assert made.manifest["carried"]["scalar"] == "cast to bfloat16"
    assert quantkit.verify(made.path, source).ok


def test_bin_files_with_shared_and_turned_tensors(tmp_path: Path) -> None:
    weight = torch.randn(16, 32)
    tensors = {
        "a.q_proj.weight": weight,
        "b.q_proj.weight": weight,
        "c.w1.weight": torch.randn(32, 8).t(),
        "n": weight,
    }
    folder = tmp_path / "src"
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(KEPT_CONFIG))
    made = quantkit.convert(folder, tmp_path / "dst", tensors_only=True).path
    _require_carried(made, tensors, set())
    made = quantkit.quantize(folder, tmp_path / "q", "int8", tensors_only=True).path
    _require_carried(made, tensors, {"a.q_proj", "b.q_proj", "c.w1"})


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _folder(tmp_path / "src", _some())
    whole = quantkit.quantize(source, tmp_path / "whole", "int8", tensors_only=True).path
    from quantkit.jobs.output.writer import Writer

    put, count = Writer.put, 0

    def stopped(self: Writer, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > 9:
            self.record_safe_point()
            raise KeyboardInterrupt
        put(self, *arguments)

    monkeypatch.setattr(Writer, "put", stopped)
    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True)
    monkeypatch.setattr(Writer, "put", put)
    made = quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True, resume=True).path
    for path in whole.iterdir():
        assert path.read_bytes() == (made / path.name).read_bytes(), path.name


def test_plan_reports_such_models_too(tmp_path: Path) -> None:
    source = _folder(tmp_path / "src", _some())
    found = quantkit.plan.quantize(source, tmp_path / "dst", "int8", tensors_only=True)
    assert found.layers == {"int8": 3, "float": 1}
    assert quantkit.plan.convert(source, tmp_path / "dst", tensors_only=True).disk_bytes > 0


def test_linears_are_reported_by_names_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(
        _folder(tmp_path / "src", _some(), {"model_type": "deepseek_v3"}), tensors_only=True
    )
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    config, by, notes = with_linears(source.config, source.extra_config, source.path)
    assert by == "names"
    assert "transformers is not installed" in notes[0]
    assert len(linear_columns(config)) == 4


@pytest.mark.slow
def test_a_hundred_thousand_tensors_are_named_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that grows with the square of their number would never end on DeepSeek V3: names are
    counted, not time.
    """
    from quantkit.architectures.families import opaque

    requested = 0
    block = opaque._cut_block_name

    def counted(name: str) -> str | None:
        nonlocal requested
        requested += 1
        return block(name)

    monkeypatch.setattr(opaque, "_cut_block_name", counted)
    names = [f"model.layers.{i % 61}.mlp.experts.{i}.up_proj.weight" for i in range(100_000)]
    config = opaque.opaque_config({"model_type": "x"}, dict.fromkeys(names, ((8, 8), "bfloat16")))
    config = opaque.with_roles(config, opaque.infer_roles_by_name({}, config.tensors or ()))
    assert requested == len(names)
    assert config.num_layers == 61
    assert len(parameters(config)) == len(linear_columns(config)) == len(names)


@pytest.mark.parametrize("family", ["mixtral", "phi3"])
def test_a_model_that_runs_is_verified_as_it_was_made(family: str, tmp_path: Path) -> None:
    experts = (
        {"num_local_experts": 4, "num_experts_per_tok": 2}
        if family == "mixtral"
        else {"pad_token_id": 0}
    )
    source = oracle.save(oracle.make(family, num_hidden_layers=1, **experts), tmp_path / "src")
    made = quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True).path
    assert quantkit.verify(made).ok
    assert not quantkit.inspect(made).runnable
    for pair in ((made, source), (source, made)):
        report = quantkit.verify(*pair)
        assert report.ok
        assert report.run_by == f"transformers {TRANSFORMERS}"
        assert all(0 < probe.divergence.kl < 0.01 for probe in report.probes.values())
    assert "was taken by its tensors only" in " ".join((made / "README.md").read_text().split())


def test_linears_with_as_many_rows_as_experts_are_linears_and_routers_are_not(
    tmp_path: Path,
) -> None:
    config = {**KEPT_CONFIG, "num_experts": 32}
    linears = [
        "l.mlp.gate_proj",
        "l.mlp.experts.0.gate_proj",
        "l.mlp.gate_up_proj",
        "l.mlp.w1",
        "l.mlp.up_proj",
    ]
    routers = [
        "l.mlp.gate",
        "l.mlp.router",
        "l.mlp.router.wi",
        "l.mlp.gate.wg",
        "l.mlp.wg",
        "l.mlp.gating",
    ]
    tensors = {f"{name}.weight": torch.randn(32, 64) for name in [*linears, *routers]}
    made = quantkit.quantize(
        _folder(tmp_path / "src", tensors, config), tmp_path / "dst", "int8", tensors_only=True
    )
    assert {name for name, one in made.manifest["modules"].items() if one["scheme"]} == set(linears)


def test_matrices_that_stay_floats_are_named_with_their_share(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.q_proj.weight": torch.randn(32, 32),
        "model.layers.0.block_sparse_moe.input_linear.weight": torch.randn(4, 64, 32),
        "model.layers.1.ffn.experts.mlp.w1": torch.randn(128, 32),
        "model.embed_tokens.weight": torch.randn(90, 32),
        "model.layers.0.conv1d.weight": torch.randn(64, 1, 64),
        "model.layers.2.eh_proj.weight": torch.randn(32, 64),
    }
    config = {**KEPT_CONFIG, "num_hidden_layers": 2}
    made = quantkit.quantize(
        _folder(tmp_path / "src", tensors, config), tmp_path / "dst", "int8", tensors_only=True
    )
    (note,) = (note for note in made.notes if "not quantized" in note)
    names = (
        "(model.layers.*.block_sparse_moe.input_linear.weight, model.layers.*.ffn.experts.mlp.w1)"
    )
    assert (
        f"other matrices: 12.29K parameters in 2 tensors {names}, 55.0% of the parameters" in note
    )
    assert (
        "further layers for prediction: 2.05K parameters in 1 tensor"
        " (model.layers.*.eh_proj.weight)" in note
    )
    assert "embed" not in note
    assert "conv" not in note


def test_a_linear_with_nan_is_refused_with_a_hint_that_helps(tmp_path: Path) -> None:
    weight = torch.randn(8, 32)
    weight[0, 0] = torch.nan
    source = _folder(
        tmp_path / "src", {"l.q_proj.weight": torch.randn(8, 32), "l.k_proj.weight": weight}
    )
    with pytest.raises(
        NonFiniteError, match=r'`keep="l\.k_proj"` and `allow_nonfinite=True` leave it unchanged'
    ):
        quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True, allow_nonfinite=True)
    options: Any = {"tensors_only": True, "allow_nonfinite": True, "keep": "l.k_proj"}
    assert quantkit.quantize(source, tmp_path / "dst", "int8", **options).schemes == {"int8": 1}


@pytest.mark.parametrize("what", ["worst_error", "quantized", "carried", "list"])
def test_a_summary_that_is_not_the_tensors_is_found(what: str, tmp_path: Path) -> None:
    source = _folder(tmp_path / "src", _some())
    made = quantkit.quantize(source, tmp_path / "dst", "int8", tensors_only=True).path
    path = made / "quantkit.json"
    manifest = json.loads(path.read_text())
    if what == "list":
        manifest["carried"] = {}
    else:
        manifest["quality"][what] = manifest["quality"][what] / 2
    path.write_text(json.dumps(manifest))
    report = quantkit.verify(made, source)
    assert not report.ok
    assert len(report.problems) == 1
    with pytest.raises(CheckpointError, match="manifest"):
        quantkit.verify(made)


def test_the_model_card_of_zero_points_names_no_reader_that_does_not_load_them(
    tmp_path: Path,
) -> None:
    source = _folder(tmp_path / "src", _some())
    for scheme in ("int4-g32", "int4-g32-asym"):
        made = quantkit.quantize(
            source, tmp_path / scheme, scheme, method="rtn", tensors_only=True
        ).path
        readme = " ".join((made / "README.md").read_text().split())
        assert "Loading was not tried" in readme
        assert ("transformers" in readme.partition("## Use")[2]) == (scheme == "int4-g32")
