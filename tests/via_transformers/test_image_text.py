"""Models that read images and text: their text part is calibrated and measured on text, the others are carried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny_image_text
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import quantkit
from quantkit.errors import UnsupportedError

assert oracle  # which lets transformers be quiet
KINDS = {
    "smolvlm": "a connector", "janus": "an aligner and image generation", "llama4": "no other class for the body",
    "mllama": "layers that attend to images",
}  # fmt: skip
TEXT = ("language_model.", "model.language_model.", "model.text_model.", "lm_head.")
TOKENS = torch.arange(3, 43).unsqueeze(0)


@pytest.fixture(scope="module")
def image_text(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("image-text")

    def made(kind: str) -> Path:
        if not (folder / kind).exists():
            tiny_image_text.make(kind, folder / kind)
        return folder / kind

    return made


def _quantize(source: Path, target: Path, method: str) -> quantkit.QuantizeResult:
    given: dict[str, Any] = {"samples": 16} if method == "gptq" else {}
    return quantkit.quantize(
        source, target, "int4-g32", method=method, via="transformers", source_check=False, accept_quality_loss=True,
        **given,
    )  # fmt: skip


def _logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_text_part_is_quantized(kind: str, method: str, image_text: Any, tmp_path: Path) -> None:
    source = image_text(kind)
    made = _quantize(source, tmp_path / "dst", method)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, made.path))
    packed = [name for name in after if name.endswith("weight_packed")]
    assert len(packed) >= 14
    assert all(name.startswith(TEXT) for name in packed)
    others = {name: value for name, value in before.items() if not name.startswith(TEXT)}
    assert len(others) > 10
    assert all(torch.equal(after[name], value) for name, value in others.items())


def test_transformers_loads_it_as_what_it_is(image_text: Any, tmp_path: Path) -> None:
    made = _quantize(image_text("smolvlm"), tmp_path / "dst", "rtn")
    assert not any("does not load" in note for note in made.notes)
    card = (made.path / "README.md").read_text()
    assert "AutoModelForImageTextToText.from_pretrained" in card
    assert "pipeline_tag: image-text-to-text" in card
    floats = quantkit.convert(made.path, tmp_path / "floats", dequantize=True, tensors_only=True).path
    assert torch.equal(_logits(made.path), _logits(floats))


def test_an_encoder_is_refused(image_text: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"the model has an encoder.*Florence2ForConditionalGeneration"):
        _quantize(image_text("florence2"), tmp_path / "dst", "rtn")
