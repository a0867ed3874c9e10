"""Tensors as GGUF files hold them: read with the gguf library, read back halfway, in one file
and in several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from error_parts import raises
from topology_cases import CASES, ENDS
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.topology import parameters
from quantkit.errors import ResumeError, UnsupportedError
from quantkit.formats.gguf.encoder import GgufEncoder
from quantkit.formats.gguf.names import gguf_tensors
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import MXFP4, QuantScheme
from quantkit.tensors.spec import TensorSpec

ONE = 1 << 40
SCHEMES = [None, QuantScheme(8, None), QuantScheme(4, 32), QuantScheme(4, 64), MXFP4]
FAMILIES = [
    "llama",
    "qwen2",
    "gemma2",
    "phi3",
    "qwen3-moe",
    "mixtral",
    "glm4",
    "ministral3",
    "gpt-oss",
    "cohere2",
    "hunyuan-dense",
    "lfm2-moe",
    "qwen3-5",
    "qwen3-next",
]


def config_of(case: str, **changes: Any) -> ModelConfig:
    kind, settings = CASES[case]
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "vocab_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": len(settings.get("layer_types", range(2))),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "model_type": kind,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "head_dim": 32,
        "num_experts_per_tok": 2,
        # Of delta rules: codes of such heads can be put in another order.
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    return config_from_hf({**ENDS, **settings, **sizes, **changes}, "config.json")


def values_of(
    config: ModelConfig, scheme: QuantScheme | None, dtype: DType
) -> dict[str, Tensor | QuantTensor]:
    found: dict[str, Tensor | QuantTensor] = {}
    for number, parameter in enumerate(parameters(config)):
        value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).to(
            dtype.torch
        )
        linear = parameter.linear
        if (
            scheme
            and parameter.is_linear_weight
            and linear
            and linear.quantizable
            and parameter.role != "head"
        ):
            found[parameter.name] = quantize_rtn(value, scheme, torch.float16)
        else:
            found[parameter.name] = value
    return found


def planned(config: ModelConfig, values: dict[str, Tensor | QuantTensor]) -> list[TensorSpec]:
    found = []
    # Each once: a linear of Qwen3-Next is two tensors.
    for name in dict.fromkeys(name for tensor in gguf_tensors(config) for name in tensor.parts):
        value = values[name]
        if isinstance(value, QuantTensor):
            found.append(TensorSpec(name, value.shape, DType.FLOAT16, value.scheme))
        else:
            found.append(TensorSpec(name, tuple(value.shape), DType.of(value.dtype)))
    return found


def written(encoder: GgufEncoder, values: dict[str, Tensor | QuantTensor], folder: Path) -> None:
    for index, spec in enumerate(encoder.planned):
        append(encoder.encode(index, values[spec.name]), folder)
    append(encoder.finish(), folder)


def append(chunks: Iterator[tuple[str, Any]], folder: Path) -> None:
    for name, data in chunks:
        with (folder / name).open("ab") as file:
            file.write(data)


def encoder_of(
    config: ModelConfig, values: dict[str, Tensor | QuantTensor], max_bytes: int = ONE
) -> GgufEncoder:
    metadata = {"general.architecture": "llama", "general.name": "a model"}
    extra = {"rope_freqs.weight": [float(number) for number in range(1, 17)]}
    return GgufEncoder(planned(config, values), config, metadata, extra, max_bytes, "model")


def same(found: Tensor | QuantTensor, expected: Tensor | QuantTensor) -> bool:
    if isinstance(expected, Tensor):
        return (
            isinstance(found, Tensor)
            and found.dtype == expected.dtype
            and torch.allclose(found, expected, atol=0)
        )
    assert isinstance(found, QuantTensor)
    return (
        found.scheme == expected.scheme
        and found.codes.equal(expected.codes)
        and found.scale.equal(expected.scale)
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("case", FAMILIES)
def test_what_is_written_is_read_back(
    case: str, scheme: QuantScheme | None, tmp_path: Path
) -> None:
    config = config_of(case)
    values = values_of(config, scheme, DType.BFLOAT16)
    encoder = encoder_of(config, values)
    for index, spec in enumerate(encoder.planned):
        append(encoder.encode(index, values[spec.name]), tmp_path)
        if not encoder.holds:
            assert same(encoder.decode(index, tmp_path), values[spec.name]), (
                spec.name
            )  # the file is not whole yet
    for index, spec in enumerate(encoder.planned):
        assert same(encoder.decode(index, tmp_path), values[spec.name]), spec.name
    assert (tmp_path / "model.gguf").stat().st_size == encoder.total_bytes()


def test_the_owner_finds_the_tensors(tmp_path: Path) -> None:
    config = config_of("llama")
    values = values_of(config, QuantScheme(4, 64), DType.BFLOAT16)
    written(encoder_of(config, values), values, tmp_path)

    reader = gguf.GGUFReader(tmp_path / "model.gguf")

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert next(iter(tensors)) == "rope_freqs.weight"
    assert np.array_equal(tensors["rope_freqs.weight"].data, np.arange(1.0, 17.0, dtype=np.float32))
    assert {name for name in tensors if tensors[name].tensor_type.name == "F32"} == {
        "rope_freqs.weight",
        "output_norm.weight",
        *(f"blk.{layer}.{part}_norm.weight" for layer in range(2) for part in ("attn", "ffn")),
    }
    assert tensors["token_embd.weight"].tensor_type.name == "BF16"
    query = tensors["blk.1.attn_q.weight"]
    assert (query.tensor_type.name, list(query.shape)) == ("Q4_0", [128, 128])
    expected = values["model.layers.1.self_attn.q_proj.weight"]
    assert isinstance(expected, QuantTensor)
    rows = (
        expected.dequantize().view(4, 2, 16, 128).swapaxes(1, 2).reshape(128, 128)
    )  # as llama.cpp's converter
    assert np.array_equal(gguf.quants.dequantize(query.data, query.tensor_type), rows.numpy())
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0
    assert fields["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    assert fields["general.name"] == "a model"


def test_norms_hold_what_is_added_to_them(tmp_path: Path) -> None:
    config = config_of("gemma2")
    values = values_of(config, None, DType.FLOAT32)
    written(encoder_of(config, values), values, tmp_path)

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}

    norm = values["model.norm.weight"]
    assert isinstance(norm, Tensor)
    assert np.array_equal(tensors["output_norm.weight"].data, (norm + 1).numpy())


def test_experts_lie_in_one_tensor(tmp_path: Path) -> None:
    config = config_of("qwen3-moe")
    values = values_of(config, QuantScheme(8, None), DType.FLOAT16)
    written(encoder_of(config, values), values, tmp_path)

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}

    down = tensors["blk.0.ffn_down_exps.weight"]
    assert config.experts is not None
    assert list(down.shape) == [64, 128, config.experts.count]
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"
    for expert in range(config.experts.count):
        value = values[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"]
        assert isinstance(value, QuantTensor)
        found = gguf.quants.dequantize(down.data[expert], down.tensor_type)
        assert np.array_equal(found, value.dequantize().numpy())


@pytest.mark.parametrize("max_bytes", [20_000, 60_000, 1])
def test_files_of_a_largest_size(max_bytes: int, tmp_path: Path) -> None:
    config = config_of("llama")
    values = values_of(config, QuantScheme(4, 32), DType.BFLOAT16)
    encoder = encoder_of(config, values, max_bytes)
    written(encoder, values, tmp_path)

    files = sorted(path.name for path in tmp_path.iterdir())
    count = len(files)
    assert (
        files == encoder.files() == [f"model-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    )
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == encoder.total_bytes()
    tensors = 0
    for index, name in enumerate(files):
        reader = gguf.GGUFReader(tmp_path / name)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        assert (fields["split.no"], fields["split.count"]) == (index, count)
        assert fields["split.tensors.count"] == len(gguf_tensors(config)) + 1
        assert ("general.name" in fields) == (index == 0)
        tensors += len(reader.tensors)
        alone = len(reader.tensors) == 1
        assert alone or (tmp_path / name).stat().st_size <= max_bytes
    assert tensors == len(gguf_tensors(config)) + 1
    for index, spec in enumerate(encoder.planned):
        assert same(encoder.decode(index, tmp_path), values[spec.name]), spec.name


def test_another_header_is_no_run_to_go_on_with() -> None:
    config = config_of("llama")
    values = values_of(config, None, DType.BFLOAT16)
    state = encoder_of(config, values).state()

    encoder_of(config, values).restore(state)
    with pytest.raises(ResumeError):
        encoder_of(config, values, 20_000).restore(state)


@pytest.mark.parametrize("scheme", [QuantScheme(4, 32, False), QuantScheme(4, 16)], ids=str)
def test_what_blocks_do_not_hold_is_refused_before_anything_is_written(scheme: QuantScheme) -> None:
    config = config_of("llama")
    with raises(UnsupportedError, "'model.layers.0.self_attn.q_proj.weight'", str(scheme)):
        encoder_of(config, values_of(config, scheme, DType.FLOAT16))


def test_a_scale_that_blocks_do_not_have_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    values = values_of(config, QuantScheme(4, 32), DType.FLOAT16)
    name = "model.layers.1.mlp.up_proj.weight"
    value = values[name]
    assert isinstance(value, QuantTensor)
    values[name] = QuantTensor(value.codes, value.scale.float() * math.pi, None, value.scheme)

    with raises(UnsupportedError, f"'{name}'", "Q4_0"):
        written(encoder_of(config, values), values, tmp_path)
