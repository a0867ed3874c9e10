"""Quantized folders: what transformers and compressed-tensors make of them, and what the
manifest says.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from schemes import any_scheme
from torch import Tensor

import quantkit
from quantkit.calibration.importance import input_importance
from quantkit.errors import CheckpointError, NonFiniteError, RequestError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.target_names import TargetName
from quantkit.model.column_kernels import select_column_kernels
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.qtensor import QuantTensor, Solver
from quantkit.tensors.recipe import Override, Recipe

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {"head_dim": 16, "pad_token_id": 0}),
    "gemma2": ("gemma2", {"head_dim": 16, "pad_token_id": 0, "sliding_window": 7}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "pad_token_id": 0, "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
LAYERS = 2
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Decompressor = BaseCompressor.get_value_from_registry("pack-quantized")


def _source(
    folder: Path, case: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    kind, settings = MODELS[case]
    return oracle.save(
        oracle.make(kind, **{"num_hidden_layers": LAYERS, **settings, **changes}).to(dtype), folder
    )


def _recipe(default: str, *overrides: tuple[str, str | None]) -> Recipe:
    parsed = (Override(p, None if s is None else any_scheme(s)) for p, s in overrides)
    return Recipe(any_scheme(default), tuple(parsed))


def _ours(folder: Path, tokens: Tensor) -> Tensor:
    return _logits(load_model(folder, dtype=torch.float32, backend="reference"), tokens)


@torch.inference_mode()
def _logits(model: Decoder, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens, torch.arange(tokens.shape[1]))
    return found


def _require_parity(quantized: Path, source: Path) -> None:
    """transformers computes what the reference backend does, which is not what the floats gave."""
    theirs = oracle.load(quantized)
    model = load_model(quantized, dtype=torch.float32, backend="reference")
    tokens = oracle.random_tokens(20)
    found = _logits(model, tokens)
    assert (found - oracle.logits(theirs, tokens)).abs().max() < 1e-4
    assert 1e-3 < (found - _ours(source, tokens)).abs().max() < 10
    generated = list(quantkit.generate(model, tokens[0, :6].tolist(), max_new_tokens=4))
    assert generated == oracle.greedy(theirs, tokens[:, :6], 4)


def _module(folder: Path, name: str) -> QuantTensor:
    value = open_checkpoint(folder).load(f"{name}.weight")
    assert isinstance(value, QuantTensor)
    return value


def _manifest(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "quantkit.json").read_text())
    return value


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
@pytest.mark.parametrize("case", MODELS)
def test_transformers_computes_what_the_reference_backend_does(
    case: str, scheme: str, tmp_path: Path
) -> None:
    source = _source(tmp_path / "float", case, eos_token_id=None)
    quantkit.quantize(source, tmp_path / "out", scheme, method="rtn")
    _require_parity(tmp_path / "out", source)


MIXED = _recipe(
    "int4-g32",
    ("model.layers.1.*", "int8"),
    ("*.0.self_attn.v_proj", "int8-g32"),
    ("model.layers.0.mlp.up_proj", None),
    ("lm_head", "int8"),
)


def test_mixed_schemes_kept_layers_and_a_quantized_head_load_in_transformers(
    tmp_path: Path,
) -> None:
    source = _source(tmp_path / "float", eos_token_id=None)
    quantkit.quantize(source, tmp_path / "out", MIXED, method="rtn")
    _require_parity(tmp_path / "out", source)
    tensors = open_checkpoint(tmp_path / "out")
    kinds = {
        m: str(tensors.info(f"{m}.weight").scheme) for m in _manifest(tmp_path / "out")["modules"]
    }
    assert kinds["lm_head"] == kinds["model.layers.1.mlp.down_proj"] == "int8"
    assert kinds["model.layers.0.self_attn.v_proj"] == "int8-g32"
    assert kinds["model.layers.0.mlp.up_proj"] == "None"
    assert kinds["model.layers.0.mlp.down_proj"] == "int4-g32"


def test_rows_that_no_group_divides_fall_back_to_int8_and_load_in_transformers(
    tmp_path: Path,
) -> None:
    source = _source(tmp_path / "float", intermediate_size=80, eos_token_id=None)
    notes = quantkit.quantize(source, tmp_path / "out", "int4-g32", method="rtn").notes
    assert any(
        "int4-g32 does not divide the rows of 2 linears, model.layers.0.mlp.down_proj first" in n
        for n in notes
    )
    _require_parity(tmp_path / "out", source)
    tensors = _manifest(tmp_path / "out")["modules"]
    for module, entry in tensors.items():
        expected = None if module == "lm_head" else "int8" if "down_proj" in module else "int4-g32"
        assert entry["scheme"] == expected
        assert ("reason" in entry) == (expected != "int4-g32")


def test_strict_refuses_rows_that_no_group_divides(tmp_path: Path) -> None:
    source = _source(tmp_path / "float", intermediate_size=80)
    with pytest.raises(
        RequestError, match=r"int4-g32 does not divide the rows of 2 linears, model.layers.0.mlp"
    ):
        quantkit.quantize(source, tmp_path / "out", "int4-g32", method="rtn", strict=True)
    assert not (tmp_path / "out").exists()


def _decompressed(folder: Path, module: str) -> Tensor:
    """A weight as compressed-tensors reads it, in float32."""
    config = QuantizationConfig.model_validate(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    scheme = next(s for s in config.config_groups.values() if isinstance(s, QuantizationScheme))
    stored = {
        n.removeprefix(module + "."): t
        for n, t in load_file(folder / "model.safetensors").items()
        if n.startswith(module + ".")
    }
    stored["weight_scale"] = stored["weight_scale"].float()
    weight: Tensor = Decompressor.decompress(stored, scheme)["weight"]
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scheme", ["int8", "int8-asym", "int8-g32-asym", "int4", "int4-g32", "int4-g32-asym"]
)
def test_compressed_tensors_decompresses_to_our_values(
    scheme: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    # 3 heads of 10: the outputs fill no whole word of zero points.
    source = _source(
        tmp_path / "float",
        dtype=dtype,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        hidden_size=96,
    )
    quantkit.quantize(
        source, tmp_path / "out", any_scheme(scheme), method="rtn", accept_quality_loss=True
    )
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
        module = f"model.layers.0.{name}"
        ours = _module(tmp_path / "out", module)
        assert ours.scale.dtype == dtype
        assert (ours.zero is None) == ("asym" not in scheme)
        assert torch.equal(_decompressed(tmp_path / "out", module), ours.dequantize())


@pytest.mark.parametrize("scheme", [None, 4, {"default": "int8"}])
def test_what_is_no_scheme_is_reported_with_those_that_are(scheme: Any, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError,
        match=r"expected a scheme \(int8, int4-g32, int4-g64 or int4-g128, or a Recipe",
    ):
        quantkit.quantize(_source(tmp_path / "float"), tmp_path / "out", scheme, method="rtn")


def test_one_pattern_of_layers_to_keep_needs_no_list(tmp_path: Path) -> None:
    quantkit.quantize(_source(tmp_path / "float"), tmp_path / "out", "int8", keep="*.0.*")
    modules = _manifest(tmp_path / "out")["modules"]
    assert all(
        (".0." in name or name == "lm_head") == (facts["scheme"] is None)
        for name, facts in modules.items()
    )


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g32-asym"])
def test_what_is_read_back_is_what_round_to_nearest_gave(scheme: str, tmp_path: Path) -> None:
    source = _source(tmp_path / "float", dtype=torch.bfloat16)
    quantkit.quantize(source, tmp_path / "out", scheme, method="rtn")
    floats = load_file(source / "model.safetensors")
    importance = input_importance(open_checkpoint(source), None)
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            weight = floats[f"model.layers.{layer}.{name}.weight"]
            own = importance[f"model.layers.{layer}.{name}"]
            expected, _ = round_to_nearest(
                weight, any_scheme(scheme), torch.bfloat16, select_column_kernels, own
            )
            found = _module(tmp_path / "out", f"model.layers.{layer}.{name}")
            assert torch.equal(found.codes, expected.codes)
            assert torch.equal(found.scale, expected.scale)


def test_what_stays_float_is_copied_bit_for_bit(tmp_path: Path) -> None:
    source = _source(tmp_path / "float", "qwen2", torch.bfloat16)
    quantkit.quantize(source, tmp_path / "out", "int4-g32", method="rtn", keep=["*.1.mlp.*"])
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    kept = [name for name in before if name in after]
    assert {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
    } <= set(kept)
    assert "model.layers.0.self_attn.q_proj.bias" in kept
    assert "model.layers.0.self_attn.q_proj.weight" not in kept
    for name in kept:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])


def test_compressed_tensors_parses_the_quantization_config(tmp_path: Path) -> None:
    quantkit.quantize(_source(tmp_path / "float"), tmp_path / "out", MIXED, method="rtn")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    assert config.ignore == ["model.layers.0.mlp.up_proj"]
    assert config.format == "pack-quantized"
    found = {}
    for group in config.config_groups.values():
        assert isinstance(group, QuantizationScheme)
        assert group.weights is not None
        found[tuple(group.targets)[:1]] = (
            group.weights.num_bits,
            group.weights.strategy,
            group.weights.group_size,
        )
    assert found == {
        ("model.layers.1.self_attn.q_proj",): (8, "channel", None),
        ("model.layers.0.self_attn.q_proj",): (4, "group", 32),
        ("model.layers.0.self_attn.v_proj",): (8, "group", 32),
    }


SPELLED = {
    "one scheme": _recipe("int4-g32"),
    "a row that no group divides": _recipe("int4-g128"),
    "a head of the same scheme": _recipe("int8", ("lm_head", "int8")),
    "mixed": MIXED,
    "queries, keys and values apart": _recipe("int4-g32", ("*.[qkv]_proj", "int8")),
}


@pytest.mark.parametrize("case", SPELLED)
def test_transformers_has_no_complaint_about_the_config(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """compressed-tensors warns of each target that comes behind another for the same module."""
    source = _source(tmp_path / "float", eos_token_id=None)
    quantkit.quantize(
        source, tmp_path / "out", SPELLED[case], method="rtn", accept_quality_loss=True
    )
    _require_parity(tmp_path / "out", source)
    assert caplog.messages == []
    assert "match" not in capfd.readouterr().err


@pytest.mark.parametrize("case", SPELLED)
def test_runtimes_that_fuse_linears_find_the_scheme_of_their_parts(
    case: str, tmp_path: Path
) -> None:
    """Older vLLM and SGLang look for a linear's name among the targets, then for one that is part
    of its class's name, then for the names of those that it is fused from; an output head is no
    linear to them.
    """
    source = _source(tmp_path / "float")
    quantkit.quantize(
        source, tmp_path / "out", SPELLED[case], method="rtn", accept_quality_loss=True
    )
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    bits = {target: group["weights"]["num_bits"] for group in groups for target in group["targets"]}

    def found(name: str, kind: str, parts: list[str]) -> int | None:
        of_class = [target for target in bits if target.lower() in kind.lower()]
        return (
            bits.get(name)
            or next(map(bits.get, of_class), None)
            or next(map(bits.get, parts), None)
        )

    checkpoint = open_checkpoint(tmp_path / "out")
    fused = {
        "self_attn.qkv_proj": "q_proj",
        "self_attn.o_proj": "o_proj",
        "mlp.down_proj": "down_proj",
    }
    for layer in range(LAYERS):
        for name, part in fused.items():
            whole = f"model.layers.{layer}.{name}"
            first = f"{whole.rsplit('.', 1)[0]}.{part}"
            scheme = checkpoint.info(f"{first}.weight").scheme
            assert scheme is not None
            assert found(whole, "QKVParallelLinear", [first]) == scheme.bits
    head = checkpoint.info("lm_head.weight").scheme
    assert found("lm_head", "ParallelLMHead", []) == (None if head is None else head.bits)


def _foreign(
    folder: Path, groups: dict[str, Any], ignore: list[str], **weights: Any
) -> dict[str, Tensor]:
    """Make `folder` a quantized one as other tools write it; gives the weights its values stand
    for.
    """
    tensors = load_file(folder / "model.safetensors")
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    bits, size, symmetric = weights["num_bits"], weights.get("group_size"), weights["symmetric"]
    truth: dict[str, Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        if any(re.match(pattern.removeprefix("re:"), name) for pattern in ignore):
            continue
        weight = tensors.pop(name)
        step = weight.view(len(weight), -1, size or weight.shape[1]).abs().amax(-1) / 2 ** (
            bits - 1
        )
        zero = (
            torch.zeros_like(step, dtype=torch.int8)
            if symmetric
            else torch.randint_like(step, -4, 4).to(torch.int8)
        )
        state = {"weight": weight, "weight_scale": step, "weight_zero_point": zero}
        packed = Decompressor.compress(state, scheme)
        truth[name] = Decompressor.decompress(packed, scheme)["weight"]
        tensors |= {
            f"{name.removesuffix('weight')}{key}": value.contiguous()
            for key, value in packed.items()
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "version": "0.20.0",
        "config_groups": groups,
    }
    oracle.edit_json(folder / "config.json", quantization_config=config)
    return truth


def _group(targets: list[str], **weights: Any) -> dict[str, Any]:
    full = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "type": "int",
        **weights,
    }
    return {
        "targets": targets,
        "weights": full,
        "input_activations": None,
        "output_activations": None,
    }


W4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}


@pytest.mark.parametrize(
    ("targets", "weights"),
    [
        (["Linear"], W4),
        ([r"re:.*_proj$"], W4),
        ([r"re:.*self_attn.*", r"re:.*mlp\..*"], {**W4, "symmetric": False}),
        (["Linear"], {**W4, "actorder": "static"}),
        (["Linear"], {"num_bits": 8, "strategy": "channel", "symmetric": True}),
        (["Linear"], {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ],
    ids=str,
)
def test_folders_of_other_tools_are_read_with_their_values(
    targets: list[str], weights: dict[str, Any], tmp_path: Path
) -> None:
    folder = _source(tmp_path / "model")
    kept = "model.layers.1.mlp.down_proj"
    groups = {"group_0": _group(targets, **weights)}
    truth = _foreign(folder, groups, ["lm_head", r"re:.*layers\.1\.mlp\.down_proj"], **weights)
    assert len(truth) == LAYERS * len(LINEARS) - 1
    checkpoint = open_checkpoint(folder)
    for name, expected in truth.items():
        found = checkpoint.load(name)
        assert isinstance(found, QuantTensor)
        assert torch.equal(found.dequantize(), expected)
    assert checkpoint.info(f"{kept}.weight").scheme is None
    assert torch.isfinite(_ours(folder, oracle.random_tokens(5))).all()


UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another format": ({"format": "marlin-24"}, W4, r"found marlin-24, expected pack-quantized"),
    "two bits": ({}, {**W4, "num_bits": 2}, r"found int2 per group, expected int4 or int8"),
    "another order": ({}, {**W4, "actorder": "dynamic"}, "this column order is not supported"),
    "floats": ({}, {**W4, "type": "float"}, r"found float4 per group"),
    "one scale per block": (
        {},
        {"num_bits": 8, "strategy": "block", "symmetric": True},
        r"found int8 per block",
    ),
    "dynamic weights": (
        {},
        {**W4, "dynamic": True},
        "this compressed-tensors scheme is not supported",
    ),
    "another method": ({"quant_method": "quip", "bits": 4}, W4, r"found quip 4"),
    "no method": ({"quant_method": None}, W4, "an unnamed scheme"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_variants_that_are_not_read_are_refused(case: str, tmp_path: Path) -> None:
    changes, weights, message = UNSUPPORTED[case]
    folder = _source(tmp_path / "model")
    _foreign(folder, {"group_0": _group(["Linear"], **weights)}, ["lm_head"], **W4)
    _change_quantization(folder, **changes)
    with pytest.raises(UnsupportedError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder / "config.json") in str(caught.value)


def _change_quantization(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    oracle.edit_json(folder / "config.json", quantization_config={**raw, **changes})


def test_quantized_activations_stay_floats(tmp_path: Path) -> None:
    folder = _source(tmp_path / "model")
    group = _group(["Linear"], **W4)
    group["input_activations"] = {
        "num_bits": 8,
        "type": "int",
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    }
    truth = _foreign(folder, {"group_0": group}, ["lm_head"], **W4)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == [
        f"{folder}: the config also quantizes activations; quantkit does not"
    ]
    name, expected = next(iter(truth.items()))
    assert torch.equal(checkpoint.load(name).dequantize(), expected)  # type: ignore[union-attr]


@pytest.mark.parametrize("missing", ["config_groups", "weights", "num_bits", "targets"])
def test_an_incomplete_quantization_config_is_refused(missing: str, tmp_path: Path) -> None:
    folder = _source(tmp_path / "model")
    _foreign(folder, {"group_0": _group(["Linear"], **W4)}, ["lm_head"], **W4)
    raw = json.loads((folder / "config.json").read_text())
    settings = raw["quantization_config"]
    group = settings["config_groups"]["group_0"]
    for owner in (settings, group, group.get("weights", {})):
        owner.pop(missing, None)
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"quantization_config.* lacks the key '{missing}'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_missing_part_of_a_quantized_weight_is_refused(suffix: str, tmp_path: Path) -> None:
    quantkit.quantize(_source(tmp_path / "float"), tmp_path / "out", "int4-g32", method="rtn")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj.{suffix}"]
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj"):
        open_checkpoint(tmp_path / "out")


def test_a_stored_shape_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    quantkit.quantize(_source(tmp_path / "float"), tmp_path / "out", "int8")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_shape"][1] = 63
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj"):
        open_checkpoint(tmp_path / "out").load("model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-asym"])
def test_equal_inputs_give_equal_folders_and_leave_the_random_state(
    scheme: str, tmp_path: Path
) -> None:
    source = _source(tmp_path / "float")
    state = torch.get_rng_state()
    for name in ("a", "b"):
        quantkit.quantize(source, tmp_path / name, scheme, method="rtn")
    assert torch.equal(torch.get_rng_state(), state)
    assert _contents(tmp_path / "a") == _contents(tmp_path / "b")
    other = oracle.copy(source, tmp_path / "elsewhere" / "float")
    quantkit.quantize(other, tmp_path / "elsewhere" / "c", scheme, method="rtn")
    assert _contents(tmp_path / "elsewhere" / "c") == _contents(tmp_path / "a")


def test_quantizing_leaves_the_source_as_it_is(tmp_path: Path) -> None:
    source = _source(tmp_path / "float")
    before = _contents(source)
    quantkit.quantize(source, tmp_path / "out", "int4-g32", method="rtn")
    assert _contents(source) == before
    assert {path.name for path in tmp_path.iterdir()} == {"float", "out"}


def test_the_manifest_reports_the_hashes_of_the_sources_tokenizer(
    demo_model: Path, tmp_path: Path
) -> None:
    """Of Meta's file, and of each that a Hugging Face folder has."""
    quantkit.convert(demo_model, tmp_path / "hf")
    quantkit.quantize(tmp_path / "hf", tmp_path / "int8", "int8")
    for source, made in ((demo_model, "hf"), (tmp_path / "hf", "int8")):
        reported = _manifest(tmp_path / made)["source"]["sha256"]
        read = {path.name for path in source.iterdir() if path.name.startswith("tokenizer")}
        assert read <= set(reported)
        assert all(
            reported[name] == hashlib.sha256((source / name).read_bytes()).hexdigest()
            for name in reported
        )
    assert read == {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}


def test_a_tokenizer_that_changes_during_the_job_is_an_error(
    demo_model: Path, tmp_path: Path
) -> None:
    source = oracle.copy(demo_model, tmp_path / "m")
    size = (source / "tokenizer.model").stat().st_size

    def change(*_: object) -> None:
        if (source / "tokenizer.model").stat().st_size == size:
            with (source / "tokenizer.model").open("ab") as file:
                file.write(b"\n")

    with pytest.raises(
        CheckpointError, match=r"tokenizer\.model: the source changed while it was read"
    ):
        quantkit.convert(source, tmp_path / "out", source_check=False, progress=change)
    assert not (tmp_path / "out").exists()


def test_the_manifest_reports_hashes_schemes_and_errors(tmp_path: Path) -> None:
    source, out = _source(tmp_path / "float"), tmp_path / "out"
    quantkit.quantize(source, out, MIXED, method="rtn")
    manifest = _manifest(out)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in _contents(out).items()}
    del hashes["quantkit.json"]
    assert manifest["files"] == hashes
    given = {name: hashlib.sha256(data).hexdigest() for name, data in _contents(source).items()}
    assert manifest["source"]["sha256"].items() <= given.items()
    assert {"model.safetensors", "config.json"} <= set(manifest["source"]["sha256"])
    assert manifest["recipe"] == MIXED.to_json()
    assert manifest["model"]["parameters"] == sum(
        p.numel() for p in oracle.make("llama", num_hidden_layers=LAYERS).parameters()
    )
    floats = load_file(source / "model.safetensors")
    assert len(manifest["modules"]) == LAYERS * len(LINEARS) + 1
    for module, entry in manifest["modules"].items():
        if module == "model.layers.0.mlp.up_proj":
            assert entry == {"scheme": None, "reason": "kept as float by the recipe"}
            continue
        weight = floats[f"{module}.weight"]
        quantized = _module(out, module)
        assert entry["scheme"] == str(quantized.scheme)
        assert entry["solver"] == (
            Solver.ROUNDING if quantized.scheme.bits == 8 else Solver.WEIGHTED
        )
        exact = weight.double()
        expected = float((quantized.dequantize().double() - exact).norm() / exact.norm())
        assert entry["relative_error"] == pytest.approx(expected, rel=0.01)
        assert entry["relative_error"] < (0.02 if quantized.scheme.bits == 8 else 0.2)


def test_the_manifest_holds_no_path_and_no_time(tmp_path: Path) -> None:
    quantkit.quantize(_source(tmp_path / "float"), tmp_path / "out", "int8")
    text = (tmp_path / "out" / "quantkit.json").read_text()
    assert str(tmp_path) not in text
    assert tmp_path.name not in text
    assert not re.search(r'"[^"]*/[^"]*"', text)
    assert not re.search(r"\b(19|20)\d\d-\d\d", text)
    assert not re.search(r"\b1[5-9]\d{8}(\.\d+)?\b", text)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
def test_many_shards_have_an_index_that_transformers_reads(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source(tmp_path / "float", eos_token_id=None)
    quantkit.quantize(source, tmp_path / "whole", scheme, method="rtn")
    monkeypatch.setattr("quantkit.jobs.output.target.SHARD_BYTES", 20_000)
    out = tmp_path / "out"
    quantkit.quantize(source, out, scheme, method="rtn")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in out.glob("model-*.safetensors")}
    count = len(shards)
    assert count > 3
    assert set(shards) == {f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)}
    assert index["weight_map"] == {
        name: file for file, tensors in shards.items() for name in tensors
    }
    merged = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in merged.values())
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        assert torch.equal(merged[name], tensor)
    for tensors in shards.values():
        assert len(tensors) <= 4 or sum(t.nbytes for t in tensors.values()) <= 20_000
    _require_parity(out, source)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g32-asym"])
def test_converting_a_quantized_folder_copies_its_codes(scheme: str, tmp_path: Path) -> None:
    quantkit.quantize(
        _source(tmp_path / "float", dtype=torch.bfloat16), tmp_path / "q", scheme, method="rtn"
    )
    quantkit.convert(tmp_path / "q", tmp_path / "copy")
    before, after = (
        load_file(tmp_path / "q" / "model.safetensors"),
        load_file(tmp_path / "copy" / "model.safetensors"),
    )
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)
    tokens = oracle.random_tokens(9)
    assert torch.equal(_ours(tmp_path / "copy", tokens), _ours(tmp_path / "q", tokens))


@pytest.mark.parametrize("options", [{"to": "meta"}, {"dtype": "fp16"}], ids=str)
def test_a_quantized_folder_is_not_converted_where_codes_would_be_lost(
    options: dict[str, Any], tmp_path: Path
) -> None:
    quantkit.quantize(_source(tmp_path / "float"), tmp_path / "q", "int8")
    with pytest.raises(UnsupportedError, match="the source is quantized"):
        quantkit.convert(tmp_path / "q", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_quantized_folder_is_not_quantized_again(tmp_path: Path) -> None:
    quantkit.quantize(_source(tmp_path / "float"), tmp_path / "q", "int8")
    with pytest.raises(
        UnsupportedError, match=r"already quantized \(found compressed-tensors \(int8\)"
    ):
        quantkit.quantize(tmp_path / "q", tmp_path / "out", "int4-g32", method="rtn")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(
    name: str, value: float, tmp_path: Path
) -> None:
    source = _source(tmp_path / "float")
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[7] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        NonFiniteError, match=re.escape(f"tensor '{name}' contains 1 values that are NaN or Inf")
    ):
        quantkit.quantize(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_a_quantized_weight_that_is_not_finite_is_refused_even_if_others_may_be(
    tmp_path: Path,
) -> None:
    source = _source(tmp_path / "float")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        quantkit.quantize(source, tmp_path / "out", "int8", allow_nonfinite=True)
    assert not (tmp_path / "out").exists()


def test_scales_that_overflow_their_dtype_are_refused(tmp_path: Path) -> None:
    source = _source(tmp_path / "float")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    oracle.edit_json(source / "config.json", dtype="float16")
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        quantkit.quantize(source, tmp_path / "out", "int4-g32", method="rtn")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (_recipe("int8", ("*", None)), "nothing would be quantized"),
        (_recipe("int8", ("*.w1", "int8")), r"pattern matches no linear layer"),
        (
            _recipe("int8", ("model.embed_tokens", "int4-g32")),
            "the embedding does not support this scheme",
        ),
        (_recipe("int8", ("lm_head", "int8")), "lm_head is tied to the embedding"),
    ],
)
def test_recipes_that_cannot_be_are_refused_before_anything_is_written(
    recipe: Recipe, message: str, tmp_path: Path
) -> None:
    source = _source(tmp_path / "float", "llama-tied")
    with pytest.raises(RequestError, match=message):
        quantkit.quantize(source, tmp_path / "out", recipe, method="rtn")
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_shapes_that_a_format_does_not_hold_are_refused_before_samples_are_drawn(
    target: TargetName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.calibration.settings.GptqSettings.draw", _not_reached)
    source = _source(tmp_path / "float", dtype=torch.bfloat16, intermediate_size=36)
    with pytest.raises(
        UnsupportedError,
        match=rf"{target} cannot store 'model.layers.0.mlp.gate_proj' in int4-g32",
    ):
        quantkit.quantize(source, tmp_path / "out", "int4-g32", to=target, method="rtn")
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def _not_reached(*_: object, **__: object) -> Any:
    raise AssertionError("samples were drawn")


@pytest.mark.slow
def test_the_demo_model_quantizes_from_its_meta_shards(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", method="rtn")
    text = "The old house stood at the end of the road"
    model, tokenizer = quantkit.load(
        tmp_path / "out", device="cpu", dtype=torch.float32, backend="reference"
    )
    tokens = torch.tensor([tokenizer.encode(text)])
    expected = oracle.logits(oracle.load(tmp_path / "out"), tokens)
    assert (_logits(model, tokens) - expected).abs().max() < 1e-4
