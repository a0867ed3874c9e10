"""Quantized models of published widths, with their tokenizers: transformers and the gguf package
judge the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import oracle
import pytest
import torch
from real_shapes import SHAPES, TEXTS
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantkit
from quantkit.data.files import gate_texts
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.verify import verify

OPTIONS: dict[str, Any] = {"source_check": False, "accept_quality_loss": True}
FEW: dict[str, Any] = {**OPTIONS, "samples": 8, "length": 32}
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What llama.cpp takes for rows that 256 does not divide."""


def count_columns(name: str, module: str) -> int:
    """Return the number of columns of a tensor of a file, by the shape's settings."""
    settings = SHAPES[name].settings
    if module == "ffn_down":
        return int(settings["intermediate_size"])
    if module == "attn_output":
        heads = settings["num_attention_heads"]
        return int(settings.get("head_dim", settings["hidden_size"] // heads) * heads)
    return int(settings["hidden_size"])


def cut_windows(folder: Path, text: str, window: int) -> Tensor:
    """Return the first two windows of a text as transformers tokenizes it, each beginning as a
    prompt does.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    prefix = tokenizer("")["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    body = window - len(prefix)
    return torch.tensor([[*prefix, *ids[start : start + body]] for start in (0, body)])


def measure_kl(reference: Any, model: Any, windows: Tensor) -> float:
    """Return the mean KL(reference || model) in nats per token."""
    expected = torch.log_softmax(oracle.logits(reference, windows), -1)
    actual = torch.log_softmax(oracle.logits(model, windows), -1)
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


@pytest.fixture(scope="module")
def int8(
    real_shape: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], quantkit.QuantizeResult]:
    """Return a function that quantizes a shape to int8, once."""

    @functools.cache
    def quantize(name: str) -> quantkit.QuantizeResult:
        return quantkit.quantize(
            real_shape(name), tmp_path_factory.mktemp(name) / "int8", "int8", **OPTIONS
        )

    return quantize


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_gate_measures_what_transformers_computes(
    name: str, real_shape: Callable[[str], Path], int8: Callable[[str], quantkit.QuantizeResult]
) -> None:
    """The windows begin as prompts do: with BOS only where the tokenizer puts it."""
    quality = int8(name).to_json()["quality"]
    reference, model = oracle.load(real_shape(name)), oracle.load(int8(name).path)
    for measured in quality["texts"]:
        windows = cut_windows(real_shape(name), gate_texts()[measured["text"]], quality["window"])
        assert measured["kl"] == pytest.approx(
            measure_kl(reference, model, windows), rel=2e-3, abs=1e-6
        ), measured["text"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_quantized_folder_keeps_its_tokenizer(
    name: str, real_shape: Callable[[str], Path], int8: Callable[[str], quantkit.QuantizeResult]
) -> None:
    expected, actual = (
        AutoTokenizer.from_pretrained(str(folder)) for folder in (real_shape(name), int8(name).path)
    )
    for text in TEXTS:
        assert actual(text)["input_ids"] == expected(text)["input_ids"], text
    model = oracle.load(int8(name).path)
    assert (
        model.generation_config.eos_token_id
        == oracle.load(real_shape(name)).generation_config.eos_token_id
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "up_size", "down_size"),
    [
        ("smollm", 128, 64, 128),
        ("qwen2", 64, 64, 32),
        ("gemma3", 128, 128, 128),
        ("llama2", 128, 128, 32),
    ],
)
def test_rows_that_groups_do_not_divide_have_smaller_ones(
    name: str,
    size: int,
    up_size: int,
    down_size: int,
    real_shape: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    result = quantkit.quantize(real_shape(name), tmp_path / "int4", f"int4-g{size}", **FEW)
    coded = schemes(open_checkpoint(result.path))
    assert len(coded) == 14
    assert coded["model.layers.0.mlp.up_proj"].group_size == up_size
    assert coded["model.layers.0.mlp.down_proj"].group_size == down_size
    windows = cut_windows(real_shape(name), gate_texts()["mixed"], 64)
    kl = measure_kl(oracle.load(real_shape(name)), oracle.load(result.path), windows)
    assert 1e-5 < kl < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_k_quant_mix_has_the_types_of_llama_cpp(
    name: str, real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    result = quantkit.quantize(real_shape(name), tmp_path / "q4.gguf", "q4_k_m", **FEW)
    reader = gguf.GGUFReader(result.path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    for module in ("attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate", "ffn_down"):
        kind = "Q6_K" if module == "ffn_down" else "Q4_K"  # the last eighth of layers has more bits
        expected = FALLBACKS[kind] if count_columns(name, module) % 256 else kind
        assert types[f"blk.1.{module}.weight"] == expected, module
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    windows = cut_windows(real_shape(name), gate_texts()["mixed"], 64)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="q4.gguf", dtype=torch.float32
    ).eval()
    assert 1e-5 < measure_kl(oracle.load(real_shape(name)), model, windows) < 0.5
    assert verify(result.path, real_shape(name)).problems == []
