"""The scales of a quantized key/value cache: carried bit for bit, or dropped with a note; run,
or not with a note.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
)
from error_parts import raises
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.base.json_values import Settings
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import CheckpointError, NonFiniteError, QuantkitError, UnsupportedError
from quantkit.formats.containers.hf_encoder import SafetensorsEncoder
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.kv_cache import read_cache_scheme
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.qtensor import QuantTensor
from quantkit.text.tokenizer import load_tokenizer

LAYERS = 2
ATTENTION = "model.layers.{}.self_attn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
K, V = (f"{ATTENTION.format(1)}.{one}_scale" for one in "kv")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "vocab_size": load_tokenizer(DEMO_MODEL).vocab_size,
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "int4": {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    },
    "int8": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
}
Tensors = dict[str, torch.Tensor]


def _made(folder: Path, weights: str | None) -> Path:
    """A folder that compressed-tensors itself writes, with scales of its cache set to small
    numbers.
    """
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS[weights]}} if weights else {}
    form = "pack-quantized" if weights else "dense"
    config = QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], kv_cache_scheme=SCHEME, format=form
    )
    model = oracle.make("llama", **SIZES).to(torch.bfloat16)
    apply_quantization_config(model, config, show_progress=False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith(("k_scale", "v_scale")):
            parameter.data.copy_(torch.rand(1, generator=generator) + 0.01)
        elif name.endswith("weight_scale"):
            weight = model.get_parameter(name.removesuffix("_scale"))
            parameter.data.copy_(
                weight.view(*parameter.shape, -1).abs().amax(-1) / (7 if weights == "int4" else 127)
            )
    compressor = ModelCompressor.from_pretrained_model(model)
    if weights:
        compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("made")
    return {
        name: _made(base / name, None if name == "floats" else name)
        for name in (*WEIGHTS, "floats")
    }


def _scales(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        found |= {
            name: one
            for name, one in load_file(file).items()
            if "_proj.weight" not in name and "_scale" in name
        }
    return found


def _settings(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def _equal(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        one.dtype == second[name].dtype
        and one.shape == second[name].shape
        and torch.equal(one, second[name])
        for name, one in first.items()
    )


def _edit(folder: Path, change: Callable[[Tensors], object], **settings: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if settings:
        oracle.edit_json(
            folder / "config.json", quantization_config={**_settings(folder), **settings}
        )


@pytest.mark.parametrize("weights", ["int4", "int8", "floats"])
def test_a_folder_of_compressed_tensors_goes_round_and_loads_in_transformers(
    weights: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders[weights]
    result = quantkit.convert(source, tmp_path / "out", source_check=False)
    before = _scales(source)
    assert len(before) == 2 * LAYERS
    assert _equal(_scales(result.path), before)
    assert _settings(result.path)["kv_cache_scheme"] == _settings(source)["kv_cache_scheme"]
    assert QuantizationConfig.model_validate(_settings(result.path)).kv_cache_scheme is not None
    assert any("KV cache are copied" in note for note in result.notes)
    reported = f"float8 per tensor, static, scales of {LAYERS} of {LAYERS} layers"
    assert any(
        reported in note and note.endswith("keys and values are rounded to it")
        for note in result.notes
    )
    found = quantkit.inspect(result.path)
    assert f"  KV cache: {reported}" in found.lines()
    assert found.kv_cache == {"scheme": _settings(source)["kv_cache_scheme"], "layers": LAYERS}
    report = verify(source, result.path)
    assert (report.verdict, report.kv_cache) == (Verdict.SAME, None)
    assert quantkit.diagnose(result.path).findings == []
    loaded = AutoModelForCausalLM.from_pretrained(result.path).state_dict()
    assert _equal({name: loaded[name] for name in before}, before)


def test_weights_are_read_as_without_such_a_cache(folders: dict[str, Path], tmp_path: Path) -> None:
    source, plain = folders["int4"], oracle.copy(folders["int4"], tmp_path / "plain")
    _edit(
        plain, lambda tensors: [tensors.pop(name) for name in _scales(plain)], kv_cache_scheme=None
    )
    one, other = open_checkpoint(source), open_checkpoint(plain)
    assert one.names() == other.names()
    for name in one.names():
        first, second = one.load(name), other.load(name)
        first, second = (
            x.dequantize() if isinstance(x, QuantTensor) else x for x in (first, second)
        )
        assert torch.equal(first, second)
    model, _ = quantkit.load(source, dtype="fp32", device="cpu")
    assert not [
        name for name, _ in model.named_parameters() if name.endswith(("k_scale", "v_scale"))
    ]


def test_scales_end_the_last_of_several_files(folders: dict[str, Path], tmp_path: Path) -> None:
    made = quantkit.convert(
        folders["int4"], tmp_path / "out", split_max_size=20_000, source_check=False
    )
    files = sorted(path.name for path in made.path.glob("*.safetensors"))
    assert len(files) > 2
    assert _equal(_scales(made.path), _scales(folders["int4"]))
    index = json.loads((made.path / "model.safetensors.index.json").read_text())
    assert {index["weight_map"][name] for name in _scales(made.path)} == {files[-1]}
    sizes = [one.nbytes for file in files for one in load_file(made.path / file).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert verify(folders["int4"], made.path).is_same


def test_a_form_with_activations_in_int8_holds_them_too(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    made = quantkit.convert(
        folders["int8"], tmp_path / "out", to="int-quantized", source_check=False
    )
    assert _equal(_scales(made.path), _scales(folders["int8"]))
    assert _settings(made.path)["kv_cache_scheme"] == SCHEME | {"group_size": None}


OTHERS: list[dict[str, Any]] = [
    {"to": "gptq"},
    {"to": "awq"},
    {"to": "mlx"},
    {"to": "hf", "dequantize": True},
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_what_has_no_place_for_them_says_that_they_are_dropped(
    options: dict[str, Any], folders: dict[str, Path], tmp_path: Path, capfd: Capture
) -> None:
    result = quantkit.convert(
        folders["int4"],
        tmp_path / "out",
        requantize="dequantize" not in options,
        source_check=False,
        **options,
    )
    assert any("KV cache are dropped" in note for note in result.notes)
    assert _scales(result.path) == {}
    assert "kv_cache_scheme" not in (result.path / "config.json").read_text()
    assert quantkit.inspect(result.path).kv_cache is None
    report = verify(folders["int4"], result.path)
    assert report.to_json()["kv_cache"] == {"has": str(folders["int4"]), "lacks": str(result.path)}
    assert [line for line in report.lines() if f"KV cache: {folders['int4']} " in line]
    assert report.ok
    code, out, _ = run(capfd, "verify", "--strict", result.path, folders["int4"])
    assert str(result.path) in out
    assert code == report.verdict.value


def test_a_gguf_file_has_no_place_for_them(folders: dict[str, Path], tmp_path: Path) -> None:
    result = quantkit.convert(
        folders["int4"], tmp_path / "out.gguf", requantize=True, source_check=False
    )
    assert any("KV cache are dropped" in note for note in result.notes)
    assert open_checkpoint(result.path).kv_cache is None


def _float8(folder: Path) -> Path:
    """A small model in FP8, a scale for each weight, and static scales of activations."""
    oracle.save(oracle.make("llama", **SIZES), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors |= {
            f"{name}_scale": scale,
            name.removesuffix("weight") + "input_scale": torch.tensor(0.25),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
OPTIMIZER = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
PUBLISHED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "AutoFP8": (
        ["k_proj.output_scale", "v_proj.output_scale"],
        {**AUTO_FP8, "kv_cache_scheme": "static"},
        "config",
    ),
    "AutoFP8, first": (["kv_scale"], {**AUTO_FP8, "kv_cache_scheme": "static"}, "config"),
    "fp8": (["k_scale", "v_scale"], {**AUTO_FP8, "kv_cache_scheme": SCHEME}, "config"),
    "Model Optimizer": (
        ["k_proj.k_scale", "v_proj.v_scale"],
        {"quant_method": "modelopt", **OPTIMIZER},
        "config",
    ),
    "Model Optimizer's file": (["k_proj.k_scale", "v_proj.v_scale"], OPTIMIZER, "hf_quant_config"),
    "no scheme": (["k_scale", "v_scale"], AUTO_FP8, "config"),
}


def _published(kind: str, folder: Path) -> Path:
    leaves, settings, place = PUBLISHED[kind]
    _float8(folder)
    names = [f"{ATTENTION.format(layer)}.{leaf}" for layer in range(LAYERS) for leaf in leaves]
    _edit(folder, lambda tensors: tensors.update({name: torch.tensor(0.125) for name in names}))
    if place == "config":
        oracle.edit_json(folder / "config.json", quantization_config=settings)
    else:
        (folder / f"{place}.json").write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": settings})
        )
    return folder


@pytest.mark.parametrize("kind", PUBLISHED)
def test_folders_in_fp8_are_read_with_a_note(kind: str, tmp_path: Path) -> None:
    source, plain = _published(kind, tmp_path / "source"), _float8(tmp_path / "plain")
    oracle.edit_json(plain / "config.json", quantization_config=AUTO_FP8)
    checkpoint, other = open_checkpoint(source), open_checkpoint(plain)
    assert checkpoint.kv_cache is not None
    stated = "no scheme stated" if kind == "no scheme" else "float8"
    assert checkpoint.kv_cache.line().startswith(stated)
    assert checkpoint.kv_cache.line().endswith(f"scales of {LAYERS} of {LAYERS} layers")
    use = (
        "not used here: the settings state no scheme"
        if kind == "no scheme"
        else "keys and values are rounded to it"
    )
    assert any("the KV cache is" in note and note.endswith(use) for note in checkpoint.notes)
    assert not [note for note in checkpoint.notes if "their use is not stated" in note]
    for name in other.names():
        assert torch.equal(checkpoint.load(name), other.load(name))  # type: ignore[arg-type]
    for job in (
        lambda: quantkit.convert(source, tmp_path / "out", source_check=False),
        lambda: quantkit.quantize(
            source, tmp_path / "int8", "int8", source_check=False, accept_quality_loss=True
        ),
    ):
        made: Any = job()
        assert any(
            "the scheme and scales of the KV cache are dropped" in note for note in made.notes
        )
        assert open_checkpoint(made.path).kv_cache is None
        assert not [
            name
            for name in load_file(made.path / "model.safetensors")
            if name.endswith(("k_scale", "v_scale"))
        ]
    assert "errors" not in quantkit.diagnose(source).lines()[-1]


def test_older_names_are_kept_and_mean_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    older = oracle.copy(folders["int4"], tmp_path / "older")

    def rename(tensors: Tensors) -> None:
        for name in _scales(older):
            attention, _, leaf = name.rpartition(".")
            tensors[f"{attention}.{leaf[0]}_proj.output_scale"] = tensors.pop(name)

    _edit(older, rename)
    made = quantkit.convert(older, tmp_path / "out", source_check=False)
    names = {
        name
        for name in load_file(made.path / "model.safetensors")
        if name.endswith("_proj.output_scale")
    }
    assert len(names) == 2 * LAYERS
    assert verify(made.path, folders["int4"]).is_same


def test_a_cache_is_run_as_transformers_runs_it(folders: dict[str, Path], tmp_path: Path) -> None:
    source, tokens = folders["floats"], oracle.random_tokens(40, 2, SIZES["vocab_size"])
    plain = quantkit.convert(source, tmp_path / "plain", dequantize=True, source_check=False).path
    model, _ = quantkit.load(source, dtype="fp32", device="cpu")
    expected, without = (oracle.logits(oracle.load(one), tokens) for one in (source, plain))
    with torch.inference_mode():
        error, effect = ((one - expected).abs().mean().item() for one in (model(tokens), without))
    assert error < 0.05 * effect


NOT_RUN = {
    "only float8 is supported": {"type": "int"},
    "only static scales are supported": {"dynamic": True},
    "only one scale per tensor is supported": {"strategy": "attn_head"},
}


@pytest.mark.parametrize("why", NOT_RUN)
def test_a_cache_that_is_not_run_is_said_to_be_none(
    why: str, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, plain = (oracle.copy(folders["int4"], tmp_path / one) for one in ("source", "plain"))
    _edit(source, lambda _: None, kv_cache_scheme={**SCHEME, **NOT_RUN[why]})
    _edit(
        plain, lambda tensors: [tensors.pop(name) for name in _scales(plain)], kv_cache_scheme=None
    )
    models = [quantkit.load(one, device="cpu")[0] for one in (source, plain)]
    assert [record.message.endswith(f"not used here: {why}") for record in caplog.records] == [True]
    tokens = oracle.random_tokens(20, vocabulary=SIZES["vocab_size"])
    with torch.inference_mode():
        found, expected = (model(tokens) for model in models)
    assert torch.equal(found, expected)


DIFFERENT: dict[str, tuple[Callable[[Tensors], object], dict[str, Any], str]] = {
    "a scale": (
        lambda t: t[V].mul_(2),
        {},
        "layer 1, v_scale: ",
    ),
    "one missing": (lambda t: t.pop(K), {}, "layer 1, k_scale: "),
    "scheme": (
        lambda _: None,
        {"kv_cache_scheme": {**SCHEME, "num_bits": 4}},
        "float8",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_verify_says_what_differs(what: str, folders: dict[str, Path], tmp_path: Path) -> None:
    change, settings, name = DIFFERENT[what]
    other = oracle.copy(folders["int4"], tmp_path / "other")
    _edit(other, change, **settings)
    report = verify(folders["int4"], other)
    assert report.verdict is Verdict.DIFFERENT
    assert name in report.problems[0]
    assert report.tensors
    assert not report.differing


ATTENTION_1 = ATTENTION.format(1)
OTHER_TENSORS: dict[str, tuple[str, torch.Tensor]] = {
    "keys' zero point": (f"{ATTENTION_1}.k_zero_point", torch.tensor([3], dtype=torch.int8)),
    "values' zero point, by its older name": (
        f"{ATTENTION_1}.v_proj.output_zero_point",
        torch.tensor([1.0]).to(torch.float8_e4m3fn),
    ),
    "zero point of both": (f"{ATTENTION_1}.kv_zero_point", torch.tensor([2**60 + 1])),
    "queries": (f"{ATTENTION_1}.q_scale", torch.tensor([0.25], dtype=torch.bfloat16)),
    "queries, by their older name": (f"{ATTENTION_1}.q_proj.output_scale", torch.tensor(0.25)),
    "probabilities": (f"{ATTENTION_1}.prob_output_scale", torch.tensor(0.25)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", OTHER_TENSORS)
def test_verify_compares_every_tensor_of_the_cache(
    what: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    name, tensor = OTHER_TENSORS[what]
    first = oracle.copy(folders["int4"], tmp_path / "first")
    second = oracle.copy(folders["int4"], tmp_path / "second")
    _edit(first, lambda tensors: tensors.update({name: tensor}))
    assert verify(first, first).is_same
    other = tensor - 1 if tensor.dtype == torch.int64 else (tensor.float() * 2).to(tensor.dtype)
    for changes in ({}, {name: other}):
        _edit(second, lambda tensors, changes=changes: tensors.update(changes))
        report = verify(first, second)
        assert report.verdict is Verdict.DIFFERENT
        assert "KV cache" in report.problems[0]
        assert not report.differing


def test_names_and_types_of_zero_points_make_no_difference(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    first, second = (oracle.copy(folders["int4"], tmp_path / one) for one in ("first", "second"))
    _edit(
        first,
        lambda tensors: tensors.update(
            {f"{ATTENTION_1}.k_zero_point": torch.tensor([3], dtype=torch.int8)}
        ),
    )
    _edit(
        second,
        lambda tensors: tensors.update(
            {f"{ATTENTION_1}.k_proj.output_zero_point": torch.tensor(3.0)}
        ),
    )
    assert verify(first, second).is_same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_with_nan_scales_equals_itself(
    dtype: torch.dtype, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = oracle.copy(folders["int4"], tmp_path / "source")
    _edit(source, lambda tensors: tensors.update({K: torch.tensor([math.nan], dtype=dtype)}))
    assert verify(source, source).problems == []  # but its logits are NaN


UNSOUND: dict[str, tuple[float, type[QuantkitError], str]] = {
    "NaN": (math.nan, NonFiniteError, "a scale"),
    "Inf": (math.inf, NonFiniteError, "a scale"),
    "zero": (0.0, CheckpointError, "found 0)"),
    "negative": (-0.5, CheckpointError, "found -0.5)"),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_scales_that_are_none_are_not_written_again(
    what: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    value, error, name = UNSOUND[what]
    source = oracle.copy(folders["int4"], tmp_path / "source")
    _edit(source, lambda tensors: tensors[V].fill_(value))
    with raises(error, f"'{V}'", name, path=source / "model.safetensors"):
        quantkit.convert(source, tmp_path / "out", source_check=False)
    if error is NonFiniteError:
        out = tmp_path / "out"
        quantkit.convert(source, out, allow_nonfinite=True, source_check=False)
        assert not load_file(out / "model.safetensors")[V].isfinite().any()
    quantkit.convert(source, tmp_path / "floats", dequantize=True, source_check=False)


ASYMMETRIC = {**SCHEME, "type": "int", "symmetric": False}
PER_HEAD = {**SCHEME, "strategy": "attn_head"}
ZERO_POINTS = {
    f"{ATTENTION.format(layer)}.{part}_zero_point" for layer in range(LAYERS) for part in "kv"
}
Q_SCALE, K_ZERO_POINT = f"{ATTENTION_1}.q_scale", f"{ATTENTION_1}.k_zero_point"


def _zero_points(tensors: Tensors) -> None:
    tensors |= {
        name: torch.tensor([place], dtype=torch.int8)
        for place, name in enumerate(sorted(ZERO_POINTS))
    }


def _per_head(tensors: Tensors) -> None:
    """Scales for each head, as compressed-tensors' `initialize_qparams` has them."""
    heads = oracle.make("llama", **SIZES).config.num_key_value_heads
    for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
        tensors[name] = tensors[name].repeat(heads).reshape(heads, 1, 1)


def _with(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


NOT_WRITTEN: dict[
    str, tuple[list[Callable[[Tensors], object]], dict[str, Any], type[QuantkitError], str]
] = {
    "NaN of queries": (
        [_with(Q_SCALE, torch.tensor([math.nan]))],
        SCHEME,
        NonFiniteError,
        "q_scale'",
    ),
    "negative of queries": (
        [_with(Q_SCALE, torch.tensor([-1.0]))],
        SCHEME,
        CheckpointError,
        "q_scale'",
    ),
    "NaN zero point": (
        [_zero_points, _with(K_ZERO_POINT, torch.tensor([math.nan]))],
        ASYMMETRIC,
        NonFiniteError,
        "k_zero_point'",
    ),
    "two for a tensor": (
        [_with(K, torch.ones(2))],
        SCHEME,
        CheckpointError,
        "k_scale'",
    ),
    "two zero points": (
        [_zero_points, _with(K_ZERO_POINT, torch.zeros(2))],
        ASYMMETRIC,
        CheckpointError,
        "k_zero_point'",
    ),
    "too few heads": (
        [_per_head, _with(K, torch.ones(1, 1, 1))],
        PER_HEAD,
        CheckpointError,
        "k_scale'",
    ),
    "queries have other heads": (
        [_per_head, _with(Q_SCALE, torch.ones(7, 1, 1))],
        PER_HEAD,
        CheckpointError,
        "q_scale'",
    ),
    "no zero points": ([], ASYMMETRIC, CheckpointError, "layer 0's k"),
    "one zero point missing": (
        [_zero_points, lambda tensors: tensors.pop(K_ZERO_POINT)],
        ASYMMETRIC,
        CheckpointError,
        "layer 1's k",
    ),
}


@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_a_cache_that_no_reader_loads_is_not_written_again(
    what: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    changes, scheme, error, name = NOT_WRITTEN[what]
    source = oracle.copy(folders["int4"], tmp_path / "source")
    _edit(source, lambda tensors: [change(tensors) for change in changes], kv_cache_scheme=scheme)
    with raises(error, name):
        quantkit.convert(source, tmp_path / "out", source_check=False)
    assert quantkit.diagnose(source).is_broken
    quantkit.convert(source, tmp_path / "floats", dequantize=True, source_check=False)


@pytest.mark.parametrize(("change", "scheme"), [(_zero_points, ASYMMETRIC), (_per_head, PER_HEAD)])
def test_zero_points_and_scales_for_each_head_are_carried(
    change: Callable[[Tensors], object],
    scheme: dict[str, Any],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    source = oracle.copy(folders["int4"], tmp_path / "source")
    _edit(source, change, kv_cache_scheme=scheme)
    made = quantkit.convert(source, tmp_path / "out", source_check=False)
    before, after = (load_file(path / "model.safetensors") for path in (source, made.path))
    names = {name for name in before if name.endswith(("k_scale", "v_scale", "_zero_point"))}
    assert len(names) >= 2 * LAYERS
    assert _equal({name: after[name] for name in names}, {name: before[name] for name in names})
    assert verify(source, made.path).is_same
    assert quantkit.diagnose(made.path).findings == []
    loaded = AutoModelForCausalLM.from_pretrained(made.path).state_dict()
    assert all(torch.equal(loaded[name], before[name]) for name in names)


REFUSED: dict[str, tuple[Callable[[Tensors], object], dict[str, Any], type[QuantkitError], str]] = {
    "a list": (
        lambda _: None,
        {"kv_cache_scheme": [8]},
        CheckpointError,
        "found [8]",
    ),
    "a name": (lambda _: None, {"kv_cache_scheme": "int9"}, CheckpointError, "found 'int9'"),
    "twice": (
        lambda t: t.update({f"{ATTENTION.format(1)}.v_proj.output_scale": torch.ones(1)}),
        {},
        CheckpointError,
        "v_proj.output_scale'",
    ),
    "of no layer": (
        lambda t: t.update({f"{ATTENTION.format(LAYERS)}.k_scale": torch.ones(1)}),
        {},
        CheckpointError,
        f"found layer {LAYERS}",
    ),
    "bits": (
        lambda _: None,
        {"kv_cache_scheme": {**SCHEME, "num_bits": "x"}},
        CheckpointError,
        "kv_cache_scheme.num_bits (found 'x'",
    ),
    "zero points twice": (
        lambda t: t.update(
            {f"{ATTENTION_1}.{one}": torch.ones(1) for one in ("k_zero_point", "kv_zero_point")}
        ),
        {},
        CheckpointError,
        "kv_zero_point'",
    ),
    "a zero point that is none": (
        lambda t: t.update({f"{ATTENTION_1}.k_zero_point": torch.ones(1).bool()}),
        {},
        UnsupportedError,
        "k_zero_point'",
    ),
    "integers": (
        lambda t: t.update({V: torch.ones(1).int()}),
        {},
        UnsupportedError,
        V,
    ),
    "of something else": (
        lambda t: t.update({f"{ATTENTION.format(1)}.o_scale": torch.ones(1)}),
        {},
        CheckpointError,
        "'model.layers.1.self_attn.o_scale'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_understood_is_refused_by_name(
    what: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    change, settings, error, name = REFUSED[what]
    source = oracle.copy(folders["int4"], tmp_path / "source")
    _edit(source, change, **settings)
    with raises(error, name):
        open_checkpoint(source)


VALUES: dict[str, list[Any]] = {
    "num_bits": [8, 6, 5, "x", 8.5, None],
    "type": ["int", "Float", "bfloat", None, 8],
    "symmetric": [True, False, None, "x"],
    "dynamic": [False, True, "local", "x", None],
}
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": strategy, **neighbors}
    for strategy in (
        "tensor",
        "Channel",
        "group",
        "block",
        "token",
        "tensor_group",
        "attn_head",
        "head",
        3,
        None,
    )
    for neighbors in (
        {},
        {"group_size": 16},
        {"group_size": 0},
        {"group_size": -1},
        {"group_size": -2},
        {"block_structure": [8, 8]},
    )
]


def _accepted_by_compressed_tensors(scheme: dict[str, Any]) -> bool:
    try:
        QuantizationArgs.model_validate(scheme)
    except (ValueError, NotImplementedError):
        return False
    return True


def test_schemes_are_read_that_compressed_tensors_accepts() -> None:
    ones = [{**SCHEME, key: value} for key, values in VALUES.items() for value in values]
    floats = [
        {**ones[0], **strategy, "dynamic": dynamic}
        for strategy in STRATEGIES
        for dynamic in VALUES["dynamic"]
    ]
    integers = [{**SCHEME, "type": "int", "num_bits": bits} for bits in VALUES["num_bits"]]
    accepted = [
        scheme for scheme in (*ones, *floats, *integers) if _accepted_by_compressed_tensors(scheme)
    ]
    assert len(accepted) > 20
    for scheme in accepted:
        assert read_cache_scheme(Settings({"kv_cache_scheme": scheme}, "config.json")) == scheme
    for scheme in [scheme for scheme in (*ones, *floats, *integers) if scheme not in accepted]:
        with raises(CheckpointError, "kv_cache_scheme.", path=Path("config.json")):
            read_cache_scheme(Settings({"kv_cache_scheme": scheme}, "config.json"))


def _floats_with_cache(folder: Path) -> Path:
    """A model in bfloat16 of which Model Optimizer quantizes the cache alone."""
    oracle.save(oracle.make("llama", **SIZES).bfloat16(), folder)
    names = [
        f"{ATTENTION.format(layer)}.{one}_proj.{one}_scale"
        for layer in range(LAYERS)
        for one in "kv"
    ]
    _edit(folder, lambda tensors: tensors.update({name: torch.tensor(0.125) for name in names}))
    settings = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    return folder


def test_floats_with_a_cache_of_model_optimizer_are_read(tmp_path: Path) -> None:
    source, plain = _floats_with_cache(tmp_path / "source"), tmp_path / "plain"
    oracle.save(oracle.make("llama", **SIZES).bfloat16(), plain)
    assert {finding.rule.name for finding in quantkit.diagnose(source).findings} == {"no-tokenizer"}
    result = quantkit.convert(source, tmp_path / "out", source_check=False)
    assert any("KV cache are dropped" in note for note in result.notes)
    assert not (result.path / "hf_quant_config.json").exists()
    before, after = (load_file(path / "model.safetensors") for path in (plain, result.path))
    assert _equal(before, after)
    AutoModelForCausalLM.from_pretrained(result.path)


def test_model_optimizer_that_states_neither_weights_nor_cache_is_refused(tmp_path: Path) -> None:
    source = _floats_with_cache(tmp_path / "source")
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    with raises(UnsupportedError, path=source / "config.json", expected="FP8"):
        open_checkpoint(source)


def test_other_weights_of_model_optimizer_are_refused_by_name(tmp_path: Path) -> None:
    source = _published("Model Optimizer", tmp_path / "source")
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    oracle.edit_json(source / "config.json", quantization_config=settings)
    with raises(UnsupportedError, found="'NVFP4'", expected="FP8") as caught:
        open_checkpoint(source)
    assert caught.value.hint is not None
    assert "nvfp4-pack-quantized" in caught.value.hint


def test_an_interrupted_conversion_goes_on_to_the_same_bytes(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.jobs.output.writer.SAFE_POINT_BYTES", 1)
    whole = quantkit.convert(folders["int4"], tmp_path / "whole", source_check=False)

    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if phase == "convert" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(folders["int4"], tmp_path / "out", source_check=False, progress=stop)
    quantkit.convert(folders["int4"], tmp_path / "out", source_check=False, resume=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        whole.path / "model.safetensors"
    ).read_bytes()


def test_scales_that_come_back_otherwise_are_a_failure_that_keeps_what_is_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = SafetensorsEncoder.finish

    def altered(self: SafetensorsEncoder) -> Any:
        return ((name, bytes(byte ^ 1 for byte in data)) for name, data in finish(self))

    monkeypatch.setattr(SafetensorsEncoder, "finish", altered)
    with raises(QuantkitError, path=tmp_path / "out.partial") as caught:
        quantkit.convert(folders["int4"], tmp_path / "out", source_check=False)
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


@pytest.mark.parametrize("weights", ["int4", "floats"])
def test_a_model_known_by_its_tensors_carries_scheme_and_scales(
    weights: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders[weights]
    result = quantkit.convert(source, tmp_path / "out", tensors_only=True, source_check=False)
    assert _equal(_scales(result.path), _scales(source))
    assert _settings(result.path)["kv_cache_scheme"] == _settings(source)["kv_cache_scheme"]
    assert any("KV cache are copied" in note for note in result.notes)
    assert verify(source, result.path).is_same


def test_quantize_drops_scheme_and_scales_of_a_model_known_by_its_tensors(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    result = quantkit.quantize(
        folders["floats"], tmp_path / "out", "int8", tensors_only=True, source_check=False
    )
    assert any("KV cache are dropped" in note for note in result.notes)
    assert not [
        name
        for name in load_file(result.path / "model.safetensors")
        if name.endswith(("k_scale", "v_scale"))
    ]
    assert _settings(result.path).get("kv_cache_scheme") is None


def test_tensors_of_such_names_that_no_scheme_explains_stay_the_models(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    source = oracle.copy(folders["floats"], tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    made = quantkit.convert(source, tmp_path / "out", tensors_only=True, source_check=False)
    assert _equal(_scales(made.path), _scales(source))
