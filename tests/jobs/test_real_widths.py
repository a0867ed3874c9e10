"""Quantized models of published widths, with their tokenizers: transformers and the gguf package judge the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import oracle
import pytest
import torch
from real_shapes import SHAPES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantkit
from quantkit.data.files import gate_texts
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.verify import Verdict, verify

OPTIONS: dict[str, Any] = {"source_check": False, "accept_quality_loss": True}
FEW: dict[str, Any] = {**OPTIONS, "samples": 8, "length": 32}
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What llama.cpp takes for rows that 256 does not divide."""


def count_rows_of(name: str, module: str) -> int:
    """Return the number of columns of a tensor of a file, by the shape's settings."""
    settings = SHAPES[name].settings
    if module == "ffn_down":
        return int(settings["intermediate_size"])
    if module == "attn_output":
        heads = settings["num_attention_heads"]
        return int(settings.get("head_dim", settings["hidden_size"] // heads) * heads)
    return int(settings["hidden_size"])


def cut_windows(folder: Path, text: str, window: int) -> Tensor:
    """Return the first two windows of a text as transformers tokenizes it, each beginning as a prompt does."""
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


@pytest.mark.parametrize("name", SHAPES)
def test_the_gate_measures_what_transformers_computes(
    name: str, real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    """The windows begin as prompts do: with BOS only where the tokenizer puts it."""
    result = quantkit.quantize(real_shape(name), tmp_path / "int8", "int8", **OPTIONS)
    assert result.quality is not None
    reference, model = oracle.load(real_shape(name)), oracle.load(result.path)
    for measured in result.quality.texts:
        windows = cut_windows(real_shape(name), gate_texts()[measured.text], result.quality.window)
        assert measured.kl == pytest.approx(measure_kl(reference, model, windows), rel=0.01), measured.text


@pytest.mark.parametrize("name", SHAPES)
def test_int4_in_groups_of_32_reaches_all_linears(name: str, real_shape: Callable[[str], Path], tmp_path: Path) -> None:
    result = quantkit.quantize(real_shape(name), tmp_path / "int4", "int4-g32", **FEW)
    coded = schemes(open_checkpoint(result.path))
    assert len(coded) == 14
    assert {str(scheme) for scheme in coded.values()} == {"int4-g32"}
    windows = cut_windows(real_shape(name), gate_texts()["mixed"], 64)
    reference = oracle.load(real_shape(name))
    assert 0 < measure_kl(reference, oracle.load(result.path), windows) < 0.5
    assert verify(result.path, real_shape(name)).verdict is Verdict.WITHIN_BOUND


@pytest.mark.parametrize(("name", "size"), [("smollm", 128), ("qwen2", 64), ("llama2", 64)])
def test_linears_that_groups_do_not_divide_keep_their_floats(
    name: str, size: int, real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = f"int4-g{size}"
    with pytest.raises(RequestError):
        quantkit.quantize(real_shape(name), tmp_path / "strict", scheme, strict=True, **FEW)
    result = quantkit.quantize(real_shape(name), tmp_path / "int4", scheme, **FEW)
    coded = schemes(open_checkpoint(result.path))
    sizes = SHAPES[name].settings
    assert ("model.layers.0.mlp.up_proj" in coded) == (sizes["hidden_size"] % size == 0)
    assert ("model.layers.0.mlp.down_proj" in coded) == (sizes["intermediate_size"] % size == 0)
    floats = {key: value.detach() for key, value in oracle.load(real_shape(name)).state_dict().items()}
    stored = {key: value.detach() for key, value in oracle.load(result.path).state_dict().items()}
    for key, value in floats.items():
        if key.endswith("_proj.weight"):
            assert torch.equal(stored[key], value) == (key.removesuffix(".weight") not in coded), key


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_k_quant_mix_has_the_types_of_llama_cpp(
    method: str, name: str, real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    options = FEW if method == "gptq" else OPTIONS
    result = quantkit.quantize(real_shape(name), tmp_path / "q4.gguf", "q4_k_m", method=method, **options)
    reader = gguf.GGUFReader(result.path)
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    for module in ("attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate", "ffn_down"):
        kind = "Q6_K" if module == "ffn_down" else "Q4_K"  # the first eighth of layers has more bits
        expected = FALLBACKS[kind] if count_rows_of(name, module) % 256 else kind
        assert types[f"blk.0.{module}.weight"] == expected, module
    windows = cut_windows(real_shape(name), gate_texts()["mixed"], 64)
    reference = oracle.load(real_shape(name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="q4.gguf", dtype=torch.float32).eval()
    assert 0 < measure_kl(reference, model, windows) < 0.5
    assert verify(result.path).same
    assert verify(result.path, real_shape(name)).verdict is Verdict.WITHIN_BOUND


@pytest.mark.parametrize("name", SHAPES)
def test_a_quantized_folder_keeps_its_tokenizer(name: str, real_shape: Callable[[str], Path], tmp_path: Path) -> None:
    result = quantkit.quantize(real_shape(name), tmp_path / "int8", "int8", **OPTIONS)
    expected, actual = (AutoTokenizer.from_pretrained(str(folder)) for folder in (real_shape(name), result.path))
    text = "<p>two  spaces</s> and <unused3> <tool_call></p>\n\n"
    assert actual(text)["input_ids"] == expected(text)["input_ids"]
    model = oracle.load(result.path)
    assert model.generation_config.eos_token_id == oracle.load(real_shape(name)).generation_config.eos_token_id
