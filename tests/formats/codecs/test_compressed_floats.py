"""FP8, MXFP4 and NVFP4 in compressed-tensors: what its own decoder, transformers and quantkit
read of a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from error_parts import raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import CheckpointError, NotRepresentableError, UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import FLOAT_SCHEMES
from quantkit.tensors.tensor_slice import TensorSlice

FORMATS = {
    "fp8": "float-quantized",
    "fp8-block": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of bfloat16, whose widths 128 divides; q has rows of more than one tile."""
    made = oracle.make("llama", hidden_size=256, intermediate_size=128, num_hidden_layers=1)
    return oracle.save(made.bfloat16(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, options = (
        tmp_path_factory.mktemp("results"),
        {"method": "rtn", "accept_quality_loss": True},
    )
    return {
        name: quantkit.quantize(model, folder / name, name, **options).path
        for name in FLOAT_SCHEMES
    }


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def codes_of(folder: Path, module: str) -> QuantTensor:
    value = with_codes(open_checkpoint(folder)).load(f"{module}.weight")
    assert isinstance(value, QuantTensor)
    return value


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_the_decoder_of_compressed_tensors_gives_our_numbers(
    name: str, folders: dict[str, Path]
) -> None:
    settings, stored = settings_of(folders[name]), load_file(folders[name] / "model.safetensors")
    assert settings["format"] == FORMATS[name]
    (scheme,) = QuantizationConfig.model_validate(settings).config_groups.values()
    modules = schemes(with_codes(open_checkpoint(folders[name])))
    assert len(modules) == 7
    assert {str(one) for one in modules.values()} == {name}
    for module in modules:
        own = {
            key.removeprefix(f"{module}."): one
            for key, one in stored.items()
            if key.startswith(f"{module}.")
        }
        decoded = BaseCompressor.get_value_from_registry(FORMATS[name]).decompress(own, scheme)[
            "weight"
        ]
        assert decoded.dtype == torch.bfloat16  # in which it multiplies
        assert torch.equal(decoded, codes_of(folders[name], module).floats(torch.bfloat16))


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_they_are_read_as_floats_unless_codes_are_wanted(
    name: str, folders: dict[str, Path]
) -> None:
    floats, coded = open_checkpoint(folders[name]), with_codes(open_checkpoint(folders[name]))
    assert not schemes(floats)
    value, codes = floats.load(f"{UP}.weight"), codes_of(folders[name], UP)
    assert isinstance(value, torch.Tensor)
    assert torch.equal(value, codes.floats(torch.bfloat16))
    for part in (TensorSlice(0, ((3, 70),)), TensorSlice(1, ((128, 256),))):
        some = coded.load(f"{UP}.weight", part)
        assert isinstance(some, QuantTensor)
        assert torch.equal(some.dequantize(), part.of(codes.dequantize()))
    assert f"{len(schemes(coded))} weights in" in " ".join(floats.notes)
    assert coded.count_stored_bytes(f"{UP}.weight") == floats.count_stored_bytes(f"{UP}.weight")


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_transformers_loads_them(name: str, folders: dict[str, Path]) -> None:
    theirs, tokens = oracle.load(folders[name], torch.bfloat16), oracle.random_tokens(40)
    oracle.logits(theirs, tokens)  # it decompresses when it runs
    assert torch.equal(
        theirs.get_submodule(Q).weight, codes_of(folders[name], Q).floats(torch.bfloat16)
    )


def test_linears_that_runtimes_fuse_share_the_float_of_nvfp4(folders: dict[str, Path]) -> None:
    scales = {
        name: one
        for name, one in load_file(folders["nvfp4"] / "model.safetensors").items()
        if "global" in name
    }
    assert all((one.dtype, tuple(one.shape)) == (torch.float32, (1,)) for one in scales.values())
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        own = [one for name, one in scales.items() if any(leaf in name for leaf in fused)]
        assert len(own) == len(fused)
        assert all(torch.equal(one, own[0]) for one in own)
    assert len({one.item() for one in scales.values()}) > 1


def test_two_schemes_of_a_recipe_have_their_own_formats(model: Path, tmp_path: Path) -> None:
    recipe = quantkit.Recipe(
        quantkit.QuantScheme.parse("int4-g64"),
        (quantkit.Override("*.down_proj", FLOAT_SCHEMES["fp8"]),),
    )
    made = quantkit.quantize(
        model, tmp_path / "mixed", recipe, method="rtn", accept_quality_loss=True
    )
    settings = settings_of(made.path)
    assert settings["format"] == "mixed-precision"
    by_format = {group["format"]: group for group in settings["config_groups"].values()}
    assert by_format["float-quantized"]["targets"] == ["model.layers.0.mlp.down_proj"]
    assert by_format["float-quantized"]["input_activations"]["type"] == "float"
    assert by_format["pack-quantized"]["input_activations"] is None
    theirs, tokens = oracle.load(made.path, torch.bfloat16), oracle.random_tokens(40)
    oracle.logits(theirs, tokens)
    down = "model.layers.0.mlp.down_proj"
    assert torch.equal(
        theirs.get_submodule(down).weight, codes_of(made.path, down).floats(torch.bfloat16)
    )
    assert quantkit.verify(made.path).ok


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_experts_are_read_by_transformers_or_a_note_says_so(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 8}
    made = oracle.make(
        "mixtral", num_local_experts=2, num_hidden_layers=1, num_attention_heads=8, **sizes
    )
    floats = oracle.save(made.bfloat16(), tmp_path / "floats")
    options: dict[str, Any] = {"method": "rtn", "accept_quality_loss": True, "source_check": False}
    result = quantkit.quantize(floats, tmp_path / "made", name, **options)
    noted = any("transformers does not load experts in" in note for note in result.notes)
    assert noted == (name in ("nvfp4", "fp8-block"))
    readers = quantkit.inspect(result.path).readers
    assert any("transformers" in reader for reader in readers) != noted
    same = quantkit.convert(result.path, tmp_path / "same", dequantize=True).path
    expected = oracle.logits(oracle.load(same, torch.bfloat16), oracle.random_tokens(8))
    try:
        found = oracle.logits(oracle.load(result.path, torch.bfloat16), oracle.random_tokens(8))
    except RuntimeError:
        assert noted
        return
    near = (found - expected).abs().mean() < 0.2 * expected.std()  # inputs of FP8 are rounded too
    assert bool(near) != noted


def test_a_tensor_on_disk_that_cuts_tiles_is_refused_at_once(tmp_path: Path) -> None:
    model = oracle.make("phi3", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    floats = oracle.save(model.bfloat16(), tmp_path / "floats")
    with raises(NotRepresentableError, "self_attn.k_proj.weight'", "128", found=32):
        quantkit.quantize(
            floats, tmp_path / "made", "fp8-block", on_estimate=lambda _: pytest.fail("it went on")
        )


def test_other_formats_refuse_them_by_name(model: Path, tmp_path: Path) -> None:
    for target in ("int-quantized", "gptq", "awq", "mlx"):
        with raises(UnsupportedError, target, "mxfp4", path=model):
            quantkit.quantize(model, tmp_path / "refused", "mxfp4", method="rtn", to=target)
    # GGUF has blocks of MXFP4.
    for scheme in ("fp8", "nvfp4"):
        with raises(UnsupportedError, "gguf", scheme, path=model):
            quantkit.quantize(model, tmp_path / "refused", scheme, method="rtn", to="gguf")


def test_a_result_becomes_floats_and_other_formats(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for name, folder in folders.items():
        floats = quantkit.convert(folder, tmp_path / name, dequantize=True).path
        value = open_checkpoint(floats).load(f"{UP}.weight")
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, codes_of(folder, UP).floats(torch.bfloat16))
    again = quantkit.convert(folders["nvfp4"], tmp_path / "gptq", to="gptq", requantize=True).path
    assert {str(one) for one in schemes(open_checkpoint(again)).values()} == {"int4-g32"}


def test_a_missing_global_scale_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    damaged = oracle.copy(folders["nvfp4"], tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    del tensors[f"{UP}.weight_global_scale"]
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    with raises(CheckpointError, f"'{UP}.weight_global_scale'", path=damaged):
        open_checkpoint(damaged)


def test_scales_of_inputs_in_folders_of_others_are_left_out(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    other = oracle.copy(folders["nvfp4"], tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file(
        {**tensors, f"{UP}.input_global_scale": torch.ones(1)},
        other / "model.safetensors",
        {"format": "pt"},
    )
    checkpoint = open_checkpoint(other)
    assert any("1 scales of activations" in note for note in checkpoint.notes)
    assert f"{UP}.input_global_scale" not in checkpoint.names()
