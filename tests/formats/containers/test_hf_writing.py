"""Folders as their families have them on disk: written again as they were read, quantized, and
resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from error_parts import raises
from families import CASES, let_run, make, opened
from hf_layout import SCHEMES, quantized_on_disk, restacked, same, turn
from partial import partial
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from quantkit.architectures.names import BLOCK
from quantkit.base.progress import silent
from quantkit.calibration.quantizers import RtnQuantizer
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.container import Output
from quantkit.formats.containers.hf_checkpoint import SETTINGS, HFCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.output.destination import JOURNAL
from quantkit.formats.registry import HF, target
from quantkit.jobs.output import writer as outputs
from quantkit.jobs.output.target import SHARD_BYTES
from quantkit.jobs.output.writer import Work, open_writer
from quantkit.jobs.quantize.formats import tensor_blocks
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import prepare
from quantkit.jobs.quantize.scheme_map import SchemeMap
from quantkit.model.column_kernels import select_column_kernels
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

INT8 = QuantScheme(8, None)


@pytest.fixture(autouse=True)
def _all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, _ in CASES.values():
        let_run(monkeypatch, kind)


def _weights(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def _require_same(written: Path, source: Path) -> None:
    """Every tensor has the name, dtype, shape and bits that it had."""
    own, other = _weights(written), _weights(source)
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def _convert(source: Path, dst: Path, *, resume: bool = False) -> Path:
    quantkit.convert(source, dst, source_check=False, resume=resume)
    return dst


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_written_as_it_was(case: str, tmp_path: Path) -> None:
    source = oracle.save(make(case), tmp_path / "source")
    _require_same(_convert(source, tmp_path / "made"), source)


@pytest.mark.parametrize("partial_dims", [None, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rows_go_back_to_their_order(
    interleaved: bool, partial_dims: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = oracle.save(oracle.make("qwen3", attention_bias=True, head_dim=8), tmp_path / "source")
    turn(monkeypatch, interleaved=interleaved, partial=partial_dims)
    _require_same(_convert(source, tmp_path / "floats"), source)
    quantized_on_disk(source, QuantScheme(4, 32, symmetric=False))
    _require_same(_convert(source, tmp_path / "quantized"), source)


@pytest.mark.parametrize(
    "case", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3", "gpt-oss"]
)
def test_stacked_experts_are_written_as_the_family_has_them(case: str, tmp_path: Path) -> None:
    own = oracle.save(make(case), tmp_path / "own")
    _require_same(_convert(restacked(case, tmp_path / "stacked"), tmp_path / "made"), own)


@pytest.mark.parametrize("case", ["phi3", "mixtral", "gemma2", "olmoe", "qwen2-moe"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_quantized_folder_is_written_as_it_was(
    scheme: QuantScheme, case: str, tmp_path: Path
) -> None:
    source = oracle.save(make(case), tmp_path / "source")
    quantized_on_disk(source, scheme)
    made = _convert(source, tmp_path / "made")
    _require_same(made, source)
    assert schemes(opened(made)) == schemes(opened(source))


def quantized(source: HFCheckpoint, dst: Path, recipe: Recipe, *, resume: bool = False) -> Path:
    """Quantize by rounding, whether or not the family runs; nothing is measured."""
    assigned = SchemeMap.of(recipe, source.config).schemes
    blocks = tensor_blocks(source, assigned, target("compressed-tensors"))
    tensors = [spec for block in blocks for spec in block.tensors]
    output = Output(source, source.config, tensors, SHARD_BYTES)
    encoder, quantizer = HF.encoder(output), RtnQuantizer(source, allow_nonfinite=False)
    work = Work(
        job="quantize", source=source, encoder=encoder, side_files=HF.side_files(output), options={}
    )
    with open_writer(work, dst, resume=resume, source_check=False, progress=silent) as writer:
        with quantizer.running(blocks, writer.existing_tensors):
            for block in blocks:
                for name, tensor, record in quantizer.solve(block):
                    writer.put(name, tensor, record)
                assert not encoder.holds  # a block is whole
        writer.finish()
        writer.commit({})
    return dst


QUANTIZED = {
    "phi3": {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    "mixtral": {
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(
            f"block_sparse_moe.experts.{expert}.{part}"
            for expert in range(4)
            for part in ("w1", "w2", "w3")
        ),
    },
    "gpt-oss": {
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(
            f"mlp.experts.{expert}.{part}_proj"
            for expert in range(4)
            for part in ("gate", "up", "down")
        ),
    },
}


@pytest.mark.parametrize("case", QUANTIZED)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_modules_have_the_names_on_disk(
    scheme: QuantScheme, case: str, tmp_path: Path
) -> None:
    source = opened(oracle.save(make(case), tmp_path / "source"))
    made = quantized(source, tmp_path / "made", Recipe(scheme))
    modules = {
        name.removesuffix(".weight_packed")
        for name in _weights(made)
        if name.endswith(".weight_packed")
    }
    assert modules == {
        BLOCK.format(layer=layer) + module for layer in range(3) for module in QUANTIZED[case]
    }
    result = opened(made)
    assert result.names() == source.names()
    for name in result.names():
        value, original = result.load(name), source.load(name)
        assert isinstance(original, Tensor)
        if result.info(name).scheme is None:
            assert isinstance(value, Tensor)
            assert torch.equal(value, original), name
        else:
            assert same(
                value, round_to_nearest(original, scheme, torch.float32, select_column_kernels)[0]
            ), name
    settings = json.loads((made / "config.json").read_text())[SETTINGS]
    routers = {"mixtral": ["block_sparse_moe.gate"], "gpt-oss": ["mlp.router"]}.get(case, [])
    assert settings["ignore"] == [
        *(BLOCK.format(layer=layer) + router for layer in range(3) for router in routers),
        "lm_head",
    ]


def test_settings_without_weights_report_the_schemes(tmp_path: Path) -> None:
    for case in QUANTIZED:
        source = opened(oracle.save(make(case), tmp_path / case))
        made = quantized(source, tmp_path / f"{case}-int8", Recipe(INT8))
        raw = json.loads((made / "config.json").read_text())
        assert HF.schemes(raw, source.config, made) == schemes(opened(made))


def test_some_experts_of_a_stack_may_keep_their_floats(tmp_path: Path) -> None:
    source = opened(oracle.save(make("gpt-oss"), tmp_path / "source"))
    recipe = Recipe(INT8).keeping(["*.experts.1.*", "*.2.mlp.experts.*"])
    made = quantized(source, tmp_path / "made", recipe)
    names = _weights(made)
    assert "model.layers.0.mlp.experts.1.gate_proj.weight" in names
    assert "model.layers.0.mlp.experts.1.gate_proj.bias" in names
    assert "model.layers.2.mlp.experts.gate_up_proj" in names
    assert "model.layers.2.mlp.experts.gate_up_proj_bias" in names
    result = opened(made)
    for name in result.names():
        if result.info(name).scheme is None:
            own, other = result.load(name), source.load(name)
            assert isinstance(own, Tensor)
            assert isinstance(other, Tensor)
            assert torch.equal(own, other), name


def _scheme_map(case: str, folder: Path, *overrides: Override) -> SchemeMap:
    return SchemeMap.of(Recipe(INT8, overrides), opened(oracle.save(make(case), folder)).config)


@pytest.mark.parametrize("pattern", ["*.v_proj", "model.layers.1.self_attn.v_proj"])
def test_parts_of_a_fused_module_have_one_scheme(pattern: str, tmp_path: Path) -> None:
    layer = 0
    if "layers.1" in pattern:
        layer = 1
    names = (f"'model.layers.{layer}.self_attn.qkv_proj'", "'*.qkv_proj'")
    with raises(RequestError, *names, found="q_proj int8, k_proj int8, v_proj kept"):
        _scheme_map("phi3", tmp_path, Override(pattern, None))


def test_patterns_match_the_names_on_disk(tmp_path: Path) -> None:
    kept = _scheme_map("phi3", tmp_path / "phi3", Override("*.1.self_attn.qkv_proj", None)).kept()
    assert kept == [*(f"model.layers.1.self_attn.{part}_proj" for part in "qkv"), "lm_head"]
    kept = _scheme_map(
        "mixtral", tmp_path / "mixtral", Override("*.0.block_sparse_moe.experts.3.w2", None)
    ).kept()
    assert kept == ["model.layers.0.mlp.experts.3.down_proj", "lm_head"]
    kept = _scheme_map(
        "gpt-oss", tmp_path / "gpt-oss", Override("*.1.mlp.experts.down_proj", None)
    ).kept()
    assert kept == [
        *(f"model.layers.1.mlp.experts.{expert}.down_proj" for expert in range(4)),
        "lm_head",
    ]


STOPS = {
    "phi3": ["self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight"],
    "gpt-oss": [
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.2.up_proj.weight",
        "mlp.experts.3.gate_proj.bias",
    ],
}


@pytest.mark.parametrize(
    ("case", "stop"), [(case, stop) for case, stops in STOPS.items() for stop in stops]
)
@pytest.mark.parametrize("whole", [False, True], ids=["floats", "int8"])
def test_a_run_stopped_within_a_tensor_goes_on_to_the_same_bytes(
    whole: bool, case: str, stop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = oracle.save(make(case), tmp_path / "source")
    job: Callable[[Path, bool], Path] = (
        (lambda dst, resume: quantized(opened(folder), dst, Recipe(INT8), resume=resume))
        if whole
        else (lambda dst, resume: _convert(folder, dst, resume=resume))
    )
    undisturbed = job(tmp_path / "undisturbed", False)
    monkeypatch.setattr(outputs, "SAFE_POINT_BYTES", 0)
    load = HFCheckpoint.load

    def stopping(self: HFCheckpoint, name: str, *part: object) -> object:
        if name == BLOCK.format(layer=1) + stop:
            raise KeyboardInterrupt
        return load(self, name, *part)  # type: ignore[arg-type]

    dst = tmp_path / "made"
    with monkeypatch.context() as patched:
        patched.setattr(HFCheckpoint, "load", stopping)
        with pytest.raises(KeyboardInterrupt):
            job(dst, False)
    last = json.loads((partial(dst) / JOURNAL).read_text().splitlines()[-1])
    assert last["tensors"] > 10
    loaded: list[str] = []

    def listening(self: HFCheckpoint, name: str, *part: object) -> object:
        loaded.append(name)
        return load(self, name, *part)  # type: ignore[arg-type]

    seal = outputs.Writer.seal

    def stop_listening(self: outputs.Writer) -> object:
        # What is loaded after it is compared with the result.
        monkeypatch.setattr(HFCheckpoint, "load", load)
        return seal(self)

    monkeypatch.setattr(HFCheckpoint, "load", listening)
    monkeypatch.setattr(outputs.Writer, "seal", stop_listening)
    job(dst, True)
    assert loaded
    assert "model.embed_tokens.weight" not in loaded
    for file in ("model.safetensors", "config.json"):
        assert (dst / file).read_bytes() == (undisturbed / file).read_bytes()


@pytest.mark.parametrize("case", ["phi3", "gpt-oss", "mixtral"])
@pytest.mark.parametrize(
    "recipe", [None, Recipe(INT8), Recipe(QuantScheme(4, 32, symmetric=False))], ids=str
)
def test_what_is_written_so_far_is_read_back_part_by_part(
    recipe: Recipe | None, case: str, tmp_path: Path
) -> None:
    source = opened(oracle.save(make(case), tmp_path / "source"))
    assigned = {} if recipe is None else SchemeMap.of(recipe, source.config).schemes
    blocks = tensor_blocks(source, assigned, target("compressed-tensors"))
    planned = [spec for block in blocks for spec in block.tensors]
    encoder = HF.encoder(Output(source, source.config, planned, SHARD_BYTES))
    max_held = held = 0
    with (tmp_path / "model.safetensors").open("wb") as file:
        for index, spec in enumerate(planned):
            value = source.load(spec.name)
            assert isinstance(value, Tensor)
            given = (
                value if spec.scheme is None else quantize_rtn(value, spec.scheme, spec.dtype.torch)
            )
            for _, data in encoder.encode(index, given):
                file.write(data)
            file.flush()
            held = held + 1 if encoder.holds else 0
            max_held = max(max_held, held)
            read = [] if held else [encoder.decode(index, tmp_path)]
            assert all(
                torch.equal(one, given) if spec.scheme is None else same(one, given) for one in read
            ), spec.name
    assert max_held <= 2  # of q, k and v
    assert file.name == str(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size == encoder.total_bytes()


def test_parts_of_one_tensor_must_have_one_float_type(tmp_path: Path) -> None:
    folder = oracle.save(make("gpt-oss"), tmp_path / "apart")
    checkpoint = opened(folder)
    values = {name: checkpoint.load(name) for name in checkpoint.names()}
    odd = "model.layers.0.mlp.experts.1.gate_proj.weight"
    values[odd] = values[odd].to(torch.bfloat16)  # type: ignore[union-attr]
    from safetensors.torch import save_file

    save_file(values, folder / "model.safetensors", {"format": "pt"})  # type: ignore[arg-type]
    with raises(UnsupportedError, "'model.layers.0.mlp.experts.gate_up_proj'"):
        _convert(folder, tmp_path / "made")
    quantkit.convert(folder, tmp_path / "made", dtype="fp32", source_check=False)


@pytest.mark.parametrize(
    ("case", "readers"),
    [
        ("phi3", "quantkit, transformers with compressed-tensors, vLLM on GPUs"),
        ("gpt-oss", "quantkit"),
        ("mixtral", "quantkit, transformers with compressed-tensors, vLLM on GPUs"),
    ],
)
def test_it_is_reported_who_loads_quantized_experts(
    case: str, readers: str, tmp_path: Path
) -> None:
    source = opened(oracle.save(make(case), tmp_path / "source"))
    assert (
        opened(quantized(source, tmp_path / "made", Recipe(INT8))).readers().partition("; ")[0]
        == readers
    )
    kept = Recipe(INT8).keeping(["*.experts.*"] if case == "gpt-oss" else ["lm_head"])
    vllm = "" if case == "gpt-oss" else ", vLLM on GPUs"
    assert (
        opened(quantized(source, tmp_path / "kept", kept)).readers().partition("; ")[0]
        == f"quantkit, transformers with compressed-tensors{vllm}"
    )


@pytest.mark.parametrize("case", ["phi3", "gemma2", "mixtral"])
def test_transformers_loads_quantized_folders(case: str, tmp_path: Path) -> None:
    source = opened(oracle.save(make(case), tmp_path / "source"))
    made = quantized(source, tmp_path / "made", Recipe(QuantScheme(4, 32)))
    settings = json.loads((made / "config.json").read_text())[SETTINGS]
    oracle.copy(tmp_path / "source", tmp_path / "floats")
    result = opened(made)
    values = {name: result.load(name) for name in result.names()}
    planned = [
        spec
        for block in tensor_blocks(source, {}, target("compressed-tensors"))
        for spec in block.tensors
    ]
    encoder = HF.encoder(Output(source, source.config, planned, SHARD_BYTES))
    with (tmp_path / "floats" / "model.safetensors").open("wb") as file:
        for index, spec in enumerate(planned):
            value = values[spec.name]
            for _, data in encoder.encode(
                index, value if isinstance(value, Tensor) else value.dequantize()
            ):
                file.write(data)
    oracle.copy(tmp_path / "source", tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").write_bytes(
        (made / "model.safetensors").read_bytes()
    )
    oracle.edit_json(tmp_path / "theirs" / "config.json", **{SETTINGS: settings})
    tokens = oracle.random_tokens(12)
    theirs, expected = (
        oracle.logits(oracle.load(tmp_path / name), tokens) for name in ("theirs", "floats")
    )
    assert torch.allclose(theirs, expected, atol=1e-4)


def _written(case: str, folder: Path, recipe: Recipe) -> tuple[HFCheckpoint, dict[str, list[str]]]:
    """A quantized checkpoint, and what its config's groups target."""
    source = opened(oracle.save(make(case), folder / "source"))
    made = quantized(source, folder / "made", recipe)
    groups = json.loads((made / "config.json").read_text())[SETTINGS]["config_groups"]
    return opened(made), {name: group["targets"] for name, group in groups.items()}


def test_experts_of_one_scheme_are_named_by_a_pattern(tmp_path: Path) -> None:
    recipe = Recipe(QuantScheme(4, 32), (Override("*.self_attn.*", INT8),))
    result, targets = _written("mixtral", tmp_path, recipe)
    assert targets["group_1"] == [r"re:.*\.experts\.\d+\..*"]
    assert len(targets["group_0"]) == 12
    assert schemes(result) == SchemeMap.of(recipe, result.config).schemes


@pytest.mark.parametrize(
    ("recipe", "readers"),
    [
        (Recipe(INT8).keeping(["*.experts.1.*"]), "quantkit"),
        (Recipe(INT8).keeping(["*.layers.0.*"]), "quantkit, vLLM on GPUs"),
        (Recipe(QuantScheme(4, 32), (Override("*.w2", INT8),)), "quantkit"),
    ],
)
def test_experts_of_several_schemes_are_not_loaded_by_transformers(
    recipe: Recipe, readers: str, tmp_path: Path
) -> None:
    result, _ = _written("mixtral", tmp_path, recipe)
    assert result.readers().partition("; ")[0] == readers
    assert schemes(result) == SchemeMap.of(recipe, result.config).schemes
    options = QuantizeOptions(tmp_path / "source", tmp_path / "other", recipe, method="rtn")
    notes = prepare(options).formats.first.notes
    assert (
        f"{tmp_path / 'other'}: transformers does not load experts of several schemes correctly"
        " (seen in 5.23); quantkit does" in notes
    )


@pytest.mark.parametrize("case", CASES)
def test_a_meta_folder_is_refused_or_holds_the_same_tensors(case: str, tmp_path: Path) -> None:
    source = oracle.save(make(case), tmp_path / "source")
    if case not in (
        "llama",
        "phi3",
        "smollm3",
    ):  # three layers of SmolLM3 all have rotary positions
        with raises(UnsupportedError, "'hf'"):
            quantkit.convert(source, tmp_path / "meta", to="meta", source_check=False)
        assert not (tmp_path / "meta").exists()
        return
    quantkit.convert(source, tmp_path / "meta", to="meta", source_check=False)
    meta, original = open_checkpoint(tmp_path / "meta"), opened(source)
    for name in original.names():
        value, expected = meta.load(name), original.load(name)
        assert isinstance(value, Tensor)
        assert isinstance(expected, Tensor)
        assert torch.equal(value, expected), name
