"""Quantizing a source that is already quantized: refused, or its weights are read as `convert`
dequantizes them.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gguf_files
import oracle
import pytest
import torch
from command import Capture, run
from gguf import GGMLQuantizationType as Ggml
from partial import contents
from safetensors.torch import save_file

import quantkit
from quantkit.architectures.names import EMBEDDING
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.gguf.config import build_metadata
from quantkit.tensors.qtensor import float_rows
from quantkit.text.export import tokenizer_metadata
from quantkit.text.tokenizer import load_tokenizer

UNCHECKED: Any = {"accept_quality_loss": True, "source_check": False}  # of random weights


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    }
    model = oracle.make("llama", vocab_size=load_tokenizer(DEMO_MODEL).vocab_size, **sizes).to(
        torch.bfloat16
    )
    folder = oracle.save(model, tmp_path_factory.mktemp("floats") / "m")
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def blocks(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file as llama.cpp's quantizer makes it: Q4_1, one matrix in Q8_0, the embedding in
    Q5_0.
    """
    source = open_checkpoint(floats)
    metadata = (
        build_metadata(source.config) | tokenizer_metadata(floats, source.config.vocab_size, {})[0]
    )
    types = {"": Ggml.Q4_1, "blk.0.ffn_up.weight": Ggml.Q8_0, "token_embd.weight": Ggml.Q5_0}
    tensors = gguf_files.tensors_of(oracle.load(floats))
    return gguf_files.write(
        tmp_path_factory.mktemp("blocks") / "model.gguf", metadata, tensors, types
    )


@pytest.fixture(params=["compressed-tensors", "gptq", "awq", "mlx", "gguf", "blocks"])
def source(request: pytest.FixtureRequest, floats: Path, blocks: Path, tmp_path: Path) -> Path:
    if request.param == "blocks":
        return blocks
    scheme = "int4-g64" if request.param in ("mlx", "gguf") else "int4-g64-asym"
    embedding = "int8" if request.param == "mlx" else None
    target = {"to": request.param, "embedding": embedding, "method": "rtn"}
    return quantkit.quantize(floats, tmp_path / "quantized", scheme, **target, **UNCHECKED).path


@pytest.mark.sampled(2)
def test_it_is_quantized_as_if_it_was_dequantized_first(source: Path, tmp_path: Path) -> None:
    quantkit.convert(source, tmp_path / "floats", dequantize=True, source_check=False)
    expected = quantkit.quantize(tmp_path / "floats", tmp_path / "expected", "int8", **UNCHECKED)
    made = quantkit.quantize(source, tmp_path / "made", "int8", dequantize=True, **UNCHECKED)
    (note,) = (note for note in made.notes if "already quantized" in note)
    assert "its weights are read as bfloat16, and rounded again" in note
    found, other = open_checkpoint(made.path), open_checkpoint(expected.path)
    for name in other.names():
        assert found.info(name).scheme == other.info(name).scheme, name
        rows = other.info(name).shape[0]
        assert torch.equal(
            float_rows(found.load(name), 0, rows), float_rows(other.load(name), 0, rows)
        ), name
    assert found.info(f"{EMBEDDING}.weight").dtype == "bfloat16"
    assert json.loads((made.path / "quantkit.json").read_text())["dequantize"] is True
    assert "--dequantize" in (made.path / "README.md").read_text()


def test_the_command_that_would_read_it_is_named(
    blocks: Path, tmp_path: Path, capfd: Capture
) -> None:
    dst = tmp_path / "out"
    arguments = [
        "quantize",
        blocks,
        dst,
        "--scheme",
        "int8",
        "--no-source-check",
        "--accept-quality-loss",
    ]
    code, _, err = run(capfd, *arguments)
    assert code == 4
    assert "already quantized (found gguf (Q4_1, Q8_0))" in err
    assert (
        f"quantkit quantize {blocks} {dst} --scheme int8 --accept-quality-loss --dequantize" in err
    )
    assert "int4" not in err
    code, _, err = run(capfd, *arguments, "--dequantize")
    assert code == 0, err
    recipe = quantkit.Recipe(quantkit.QuantScheme.parse("int8"))
    for given, spelled in (
        (
            {"scheme": "int8", "keep": ["*.0.*", "*.1.*"]},
            "--scheme int8 --keep '*.0.*' --keep '*.1.*'",
        ),
        ({"scheme": recipe, "calibration": ["text"]}, "--calibration FILE --recipe FILE"),
        ({"target_bits": 5}, "--target-bits 5"),
    ):
        with pytest.raises(
            UnsupportedError, match=re.escape(f"{blocks} {dst}2 {spelled} `dequantize=True`")
        ):
            quantkit.plan.quantize(blocks, f"{dst}2", **given)


def test_the_settings_of_a_source_known_by_its_tensors_are_replaced(
    floats: Path, tmp_path: Path
) -> None:
    quantkit.quantize(floats, tmp_path / "int4", "int4-g64", method="rtn", **UNCHECKED)
    given = {"dequantize": True, "tensors_only": True, "source_check": False}
    made = quantkit.quantize(tmp_path / "int4", tmp_path / "int8", "int8", **given)
    assert set(map(str, schemes(open_checkpoint(made.path)).values())) == {"int8"}


def test_a_source_of_floats_stays_as_it_is(floats: Path, tmp_path: Path) -> None:
    made = [
        quantkit.quantize(
            floats, tmp_path / str(dequantize), "int8", dequantize=dequantize, **UNCHECKED
        )
        for dequantize in (False, True)
    ]
    assert not any("already quantized" in note for note in made[1].notes)
    before, after = (contents(one.path)["model.safetensors"] for one in made)
    assert before == after


@pytest.mark.parametrize("by", ["inspect", "convert", "quantize"])
def test_deepseek_v4s_layout_is_refused_by_name(by: str, tmp_path: Path) -> None:
    """Experts hold two e2m1 codes in an int8, linears FP8; their scales are powers of two, in
    `.scale`.
    """
    source = tmp_path / "source"
    source.mkdir()
    settings = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "expert_dtype": "fp4",
        "torch_dtype": "bfloat16",
        "quantization_config": settings,
    }
    (source / "config.json").write_text(json.dumps(config))
    stored = {
        "embed.weight": torch.zeros(32, 64, dtype=torch.bfloat16),
        "layers.0.ffn.experts.0.w1.weight": torch.zeros(32, 32, dtype=torch.int8),
        "layers.0.ffn.experts.0.w1.scale": torch.full((32, 2), 127, dtype=torch.uint8).view(
            torch.float8_e8m0fnu
        ),
    }
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    calls = {
        "inspect": partial(quantkit.inspect, source),
        "convert": partial(quantkit.convert, source, tmp_path / "out", tensors_only=True),
        "quantize": partial(
            quantkit.quantize, source, tmp_path / "out", "int8", method="rtn", tensors_only=True
        ),
    }
    with pytest.raises(UnsupportedError) as caught:
        calls[by]()
    assert caught.value.path == source / "model.safetensors"
    assert "layers.0.ffn.experts.0.w1" in str(caught.value.found)
    assert "FineGrainedFP8Config(dequantize=True)" in str(caught.value.hint)
