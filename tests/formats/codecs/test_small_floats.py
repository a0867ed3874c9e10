"""Sources in FP8 and MXFP4, read as the floats that their scales make of them, for every family."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import quantkit
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.formats.codecs.small_floats import dequantize
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice

FP8 = torch.float8_e4m3fn
BLOCK = 32
_ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "exponents": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "rows": _ROWS,
}


def _small(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """A weight in FP8, and its scales by the ends of their names."""
    if kind == "tensor":
        scale = weight.abs().max() / 448
        return {
            "": (weight / scale).to(FP8),
            "_scale": scale.bfloat16(),
            "input": torch.tensor(0.25),
        }
    if kind == "rows":
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"": (weight / scale).to(FP8), "_scale": scale}
    rows, columns = (math.ceil(size / BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    if kind == "exponents":
        scale = scale.log2().ceil().exp2()
    codes = (blocks / scale[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return {
        "": codes.to(FP8),
        "_scale_inv": scale.to(torch.float8_e8m0fnu) if kind == "exponents" else scale,
    }


def _source(kind: str, folder: Path, **sizes: Any) -> tuple[Path, dict[str, Tensor]]:
    """A small model whose linears are in FP8, and the floats that they mean."""
    oracle.save(oracle.make("llama", num_hidden_layers=1, intermediate_size=80, **sizes), folder)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "_proj" in name]:
        for end, tensor in _small(tensors.pop(name), kind).items():
            tensors[
                name.removesuffix("weight") + "input_scale" if end == "input" else name + end
            ] = tensor
        scale = next(
            tensors[name + end] for end in ("_scale_inv", "_scale") if name + end in tensors
        ).float()
        if scale.dim() == 2:
            repeats = [BLOCK if size > 1 else 1 for size in scale.shape]
            repeats = repeats if kind in ("blocks", "exponents") else [1, 1]
            scale = scale.repeat_interleave(repeats[0], 0).repeat_interleave(repeats[1], 1)
            scale = scale[: tensors[name].shape[0], : tensors[name].shape[1]]
        expected[name] = tensors[name].float() * scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    oracle.edit_json(folder / "config.json", quantization_config=SETTINGS[kind])
    return folder, expected


@pytest.mark.parametrize("tensors_only", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_fp8_is_read_as_floats(kind: str, tensors_only: bool, tmp_path: Path) -> None:
    folder, expected = _source(kind, tmp_path / "src")
    source = open_checkpoint(folder, tensors_only=tensors_only)
    assert len(source.names()) == 12
    for name, weight in expected.items():
        assert source.info(name).dtype == "float32"
        assert torch.equal(source.load(name), weight)  # type: ignore[arg-type]
        part = TensorSlice(0, ((1, 9), (11, 12)))
        assert torch.equal(source.load(name, part), part.of(weight))  # type: ignore[arg-type]
        assert torch.equal(source.load(name, TensorSlice(1, ((3, 40),))), weight[:, 3:40])  # type: ignore[arg-type]
    assert "7 weights in FP8" in source.notes[0]
    assert any("scales of activations" in note for note in source.notes) == (kind == "tensor")
    assert quantkit.inspect(folder).bits_per_weight < 32


def test_fp8_means_what_transformers_makes_of_it(tmp_path: Path) -> None:
    folder, _ = _source("blocks", tmp_path / "src", hidden_size=64)
    raw, source = load_file(folder / "model.safetensors"), open_checkpoint(folder)
    for name in [
        name for name in raw if name + "_scale_inv" in raw and raw[name].shape[0] % BLOCK == 0
    ]:
        if raw[name].shape[1] % BLOCK == 0:
            theirs = Fp8Dequantize(None)._dequantize_one(
                raw[name], raw[name + "_scale_inv"], torch.float32
            )
            assert torch.equal(source.load(name), theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["convert", "rtn"])
def test_an_fp8_source_counts_as_one_of_floats(method: str, tmp_path: Path) -> None:
    folder, expected = _source("blocks", tmp_path / "src")
    if method == "convert":
        made = quantkit.convert(folder, tmp_path / "dst").path
        assert "quantization_config" not in json.loads((made / "config.json").read_text())
        found = load_file(made / "model.safetensors")
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        assert quantkit.verify(made, folder).is_same
    else:
        made = quantkit.quantize(folder, tmp_path / "dst", "int8").path
        for name, weight in expected.items():
            value = open_checkpoint(made).load(name)
            assert isinstance(value, QuantTensor)
            assert (value.dequantize() - weight).norm() < 0.02 * weight.norm()


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("to", ["gptq", "awq", "mlx"])
def test_what_needs_integer_codes_says_that_the_source_has_fp8(
    to: Any, kind: str, tmp_path: Path
) -> None:
    folder, _ = _source(kind, tmp_path / "src")
    with raises(RequestError, "FP8", "float32", path=folder, options=["to"]):
        quantkit.convert(folder, tmp_path / "dst", to=to)
    with raises(RequestError, "FP8", path=folder, options=["requantize"]):
        quantkit.convert(folder, tmp_path / "dst", requantize=True)
    with raises(RequestError, "FP8", path=folder, options=["refine"]):
        quantkit.refine(folder, tmp_path / "dst", against=folder)


def test_an_fp8_source_is_quantized_to_another_format(tmp_path: Path) -> None:
    folder, expected = _source("rows", tmp_path / "src")
    made = quantkit.quantize(folder, tmp_path / "dst", "int4-g32", method="rtn", to="gptq").path
    assert isinstance(open_checkpoint(made).load(next(iter(expected))), QuantTensor)


UP = "model.layers.0.mlp.up_proj.weight"
BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor]], object]]] = {
    "no scales": ("blocks", lambda t: t.pop(f"{UP}_scale_inv")),
    "no scales of rows": ("rows", lambda t: t.pop(f"{UP}_scale")),
    "codes as bytes": ("blocks", lambda t: t.update({UP: t[UP].view(torch.uint8)})),
    "scales of floats": ("blocks", lambda t: t.update({UP: t[UP].float()})),
    "scales of nothing": (
        "blocks",
        lambda t: t.update({"model.x.weight_scale_inv": torch.ones(1)}),
    ),
    "scales twice": ("blocks", lambda t: t.update({f"{UP}_scale": torch.ones(1)})),
}


@pytest.mark.parametrize("what", BROKEN)
def test_codes_and_scales_that_lack_each_other_are_refused(what: str, tmp_path: Path) -> None:
    kind, edit = BROKEN[what]
    folder, _ = _source(kind, tmp_path / "src")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedError)):
        open_checkpoint(folder)
    name = "model.x.weight_scale_inv" if what == "scales of nothing" else UP
    with raises(CheckpointError, f"'{name}"):
        quantkit.convert(folder, tmp_path / "dst", tensors_only=True)
    with raises(CheckpointError, f"'{name}"):
        quantkit.quantize(folder, tmp_path / "dst", "int8", tensors_only=True)


def _folder(path: Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "some",
        "dtype": "bfloat16",
        **({"quantization_config": settings} if settings else {}),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("left", ["blocks", "scales"])
def test_mxfp4_without_its_other_half_is_refused(left: str, tmp_path: Path) -> None:
    tensors = {
        f"experts.down_proj_{left}": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
        "q_proj.weight": torch.ones(8, 8),
    }
    folder = _folder(tmp_path / "src", tensors, {"quant_method": "mxfp4"})
    with raises(CheckpointError, f"'experts.down_proj_{left}'", path=folder):
        open_checkpoint(folder, tensors_only=True)


ELSEWHERE: dict[str, tuple[dict[str, Tensor], str]] = {
    "nvidia": ({"l.q_proj.weight": torch.ones(8, 8).to(FP8)}, "hf_quant_config.json"),
    "autogptq": ({"l.q_proj.weight": torch.ones(8, 8)}, "quantize_config.json"),
    "gptq": (
        {
            "l.q_proj.qweight": torch.ones(8, 64, dtype=torch.int32),
            "l.q_proj.scales": torch.ones(2, 64),
        },
        "",
    ),
    "blocks": (
        {
            "l.q_proj.weight": torch.ones(8, 8).to(FP8),
            "l.q_proj.weight_scale_inv": torch.ones(1, 1),
        },
        "",
    ),
    "rows": (
        {"l.q_proj.weight": torch.ones(8, 8).to(FP8), "l.q_proj.weight_scale": torch.ones(8, 1)},
        "",
    ),
    "experts": (
        {
            "l.experts.down_proj": torch.ones(2, 8, 8).to(FP8),
            "l.experts.down_proj_scale": torch.ones(2, 8, 1),
        },
        "",
    ),
    "mxfp4": (
        {
            "l.w_blocks": torch.zeros(2, 8, 1, 16, dtype=torch.uint8),
            "l.w_scales": torch.zeros(2, 8, 1, dtype=torch.uint8),
        },
        "",
    ),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_is_quantized_and_does_not_say_so_in_its_config_is_refused(
    what: str, tmp_path: Path
) -> None:
    tensors, file = ELSEWHERE[what]
    folder = _folder(tmp_path / "src", {**tensors, "l.k_proj.weight": torch.randn(8, 64)}, None)
    if file:
        (folder / file).write_text("{}")
    for job in (
        lambda: quantkit.convert(folder, tmp_path / "dst", tensors_only=True),
        lambda: quantkit.quantize(folder, tmp_path / "dst", "int8", tensors_only=True),
    ):
        with raises(UnsupportedError, path=folder):
            job()


def test_fbgemms_experts_have_a_scale_for_each_output(tmp_path: Path) -> None:
    """As transformers' FbgemmFp8Llama4TextExperts holds them: [E, I, O], with scales [E, 1, O]
    or [E, O, 1].
    """
    weight = torch.randn(3, 8, 8)
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(FP8)
    tensors = {
        "experts.down_proj": codes,
        "experts.down_proj_scale": scale.transpose(1, 2).contiguous(),
        "experts.gate_up_proj": codes.clone(),
        "experts.gate_up_proj_scale": scale.clone(),
        "experts.input_scale_ub": torch.ones(1),
        "attn.k_scale": torch.ones(1),
    }
    folder = _folder(tmp_path / "src", tensors, {"quant_method": "fbgemm_fp8"})
    source = open_checkpoint(folder, tensors_only=True)
    for name in ("experts.down_proj", "experts.gate_up_proj"):
        assert torch.equal(source.load(name), (codes.float() * scale).bfloat16())  # type: ignore[arg-type]
    part = TensorSlice(2, ((1, 5),))
    columns = source.load("experts.down_proj", part)
    assert torch.equal(columns, (codes.float() * scale).bfloat16()[:, :, 1:5])  # type: ignore[arg-type]
    assert any("2 scales" in note for note in source.notes)


def test_scales_that_do_not_go_with_their_weight_are_refused(tmp_path: Path) -> None:
    folder, _ = _source("blocks", tmp_path / "src")
    for size, error, name in (
        ([16, 16], UnsupportedError, "'model.layers.0.mlp.down_proj.weight'"),
        ("128", CheckpointError, "'quantization_config.weight_block_size'"),
        ([0, 1], CheckpointError, "'quantization_config.weight_block_size'"),
    ):
        oracle.edit_json(
            folder / "config.json",
            quantization_config={**SETTINGS["blocks"], "weight_block_size": size},
        )
        with raises(error, name):
            open_checkpoint(folder)


def test_mxfp4_means_what_transformers_makes_of_it(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (3, 32, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 32, 2), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantize(blocks, scales, DType.BFLOAT16).transpose(1, 2), theirs)
    folder = tmp_path / "src"
    folder.mkdir()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": blocks,
        f"{name}_scales": scales,
        "a.q_proj.weight": torch.randn(16, 32),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "some_oss",
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    source = open_checkpoint(folder, tensors_only=True)
    assert torch.equal(source.load(name), theirs)  # type: ignore[arg-type]
    assert torch.equal(source.load(name, TensorSlice(0, ((1, 3),))), theirs[1:3])  # type: ignore[arg-type]
    made = quantkit.quantize(folder, tmp_path / "dst", "int8", tensors_only=True)
    assert torch.equal(load_file(made.path / "model.safetensors")[name], theirs)
    assert made.manifest["carried"] == {name: "dequantized to bfloat16 by its own scales"}
    assert quantkit.verify(made.path, folder).ok


def test_settings_in_a_part_of_the_config_count(tmp_path: Path) -> None:
    folder, expected = _source("blocks", tmp_path / "src")
    config = json.loads((folder / "config.json").read_text())
    config = {"model_type": "seeing", "text_config": config}
    (folder / "config.json").write_text(json.dumps(config))
    made = quantkit.convert(folder, tmp_path / "dst", tensors_only=True).path
    found = load_file(made / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert (
        "quantization_config" not in json.loads((made / "config.json").read_text())["text_config"]
    )


def test_gpt_oss_is_read_from_mxfp4_as_a_family_that_runs(tmp_path: Path) -> None:
    sizes = {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "head_dim": 16,
    }
    folder = oracle.save(
        oracle.make(
            "gpt_oss", num_hidden_layers=1, rope_parameters={"rope_type": "default"}, **sizes
        ),
        tmp_path / "src",
    )
    tensors, means = load_file(folder / "model.safetensors"), {}
    for name in ("gate_up_proj", "down_proj"):
        whole = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = tensors.pop(whole).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
        means[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    oracle.edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    source = open_checkpoint(folder)
    assert source.config.runnable
    for expert in range(3):
        module = f"model.layers.0.mlp.experts.{expert}"
        rows = means["gate_up_proj"][expert].t()
        assert torch.equal(source.load(f"{module}.gate_proj.weight"), rows[0::2])  # type: ignore[arg-type]
        assert torch.equal(source.load(f"{module}.up_proj.weight"), rows[1::2])  # type: ignore[arg-type]
        down = source.load(f"{module}.down_proj.weight", TensorSlice(1, ((2, 9),)))
        assert torch.equal(down, means["down_proj"][expert].t()[:, 2:9])  # type: ignore[arg-type]
