"""Models that read images and text: their text part is calibrated and measured on text, the others
are carried, and images mean the same to the result.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from image_prompts import image_features, random_images, save_processor, with_images
from measure_architectures import load
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

import quantkit
from quantkit.architectures.families.opaque import infer_roles_by_name
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.figures import mean_estimate
from quantkit.text.tokenizer import load_tokenizer
from quantkit.via_transformers.forward import open_to_run, passage_of
from quantkit.via_transformers.linears import with_linears

Tiny = Callable[[str], Path]
assert oracle  # which lets transformers be quiet
KINDS = {"janus": "an aligner and image generation", "mllama": "layers that attend to images"}
"""Whose text parts have something that none in `WITH_IMAGES` has."""
WITH_IMAGES = (
    "gemma3",
    "internvl",
    "lfm2_vl",
    "llama4",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
)
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEXT = (
    "language_model.",
    "model.language_model.",
    "model.text_model.",
    "model.layers.",
    "lm_head.",
)
TOKENS = torch.arange(3, 43).unsqueeze(0)


def _quantize(source: Path, target: Path, method: str) -> quantkit.QuantizeResult:
    given: dict[str, Any] = {"samples": 16} if method == "gptq" else {}
    return quantkit.quantize(
        source,
        target,
        "int4-g32",
        method=method,
        via="transformers",
        source_check=False,
        accept_quality_loss=True,
        **given,
    )


def _load(folder: Path) -> Any:
    return load(folder, AutoModelForImageTextToText)


@torch.no_grad()
def _log_probs(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    return model(**inputs, use_cache=False).logits.log_softmax(-1)


def _require_text_only(source: Path, folder: Path, packed: int = 14) -> None:
    """Assert that a result has a number of packed weights or more, all in the text part, others
    as in its source.
    """
    before, after = (load_file(one / "model.safetensors") for one in (source, folder))
    found = [name for name in after if name.endswith("weight_packed")]
    assert len(found) >= packed
    assert all(name.startswith(TEXT) for name in found)
    others = {name: value for name, value in before.items() if not name.startswith(TEXT)}
    assert len(others) > 10
    assert all(torch.equal(after[name], value) for name, value in others.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_text_part_is_quantized(
    kind: str, method: str, tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    source = tiny_image_text_model(kind)
    made = _quantize(source, tmp_path / "dst", method)
    _require_text_only(source, made.path)


@pytest.mark.slow
def test_transformers_loads_it_as_what_it_is(tiny_image_text_model: Tiny, tmp_path: Path) -> None:
    made = _quantize(tiny_image_text_model("smolvlm"), tmp_path / "dst", "rtn")
    assert not any("does not load" in note for note in made.notes)
    card = (made.path / "README.md").read_text()
    assert "AutoModelForImageTextToText.from_pretrained" in card
    assert "pipeline_tag: image-text-to-text" in card
    floats = quantkit.convert(
        made.path, tmp_path / "floats", dequantize=True, tensors_only=True
    ).path
    packed, dequantized = (
        _log_probs(_load(one), {"input_ids": TOKENS}) for one in (made.path, floats)
    )
    assert torch.equal(packed, dequantized)


@pytest.mark.parametrize(
    "kind", ["smolvlm", "deepseek_vl", "qwen2_5_vl", "video_llava", "idefics2"]
)
def test_other_parts_are_found_by_names_too(kind: str, tiny_image_text_model: Tiny) -> None:
    source = open_checkpoint(tiny_image_text_model(kind), tensors_only=True)
    config, _, _ = with_linears(source.config, source.extra_config, source.path)
    by_names = infer_roles_by_name(source.extra_config, config.tensors or ())
    roles = {
        one.name: (one.role, by_names.get(one.name, ("",))[0])
        for one in config.tensors or ()
        if one.role
    }
    assert {found for role, found in roles.values() if role == "tower"} == {"tower"}
    assert {found for role, found in roles.values() if role == "linear"} == {"linear"}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "llava"])
def test_a_model_computes_in_float32_whatever_its_parts_state(
    kind: str, tiny_image_text_model: Tiny
) -> None:
    source = tiny_image_text_model(kind)
    assert '"bfloat16"' in (source / "config.json").read_text()
    lazy = passage_of(open_to_run(source, via="transformers")).partwise
    for part in lazy.parts:
        lazy.load(part)
    assert {one.dtype for one in lazy.model.parameters()} == {torch.float32}
    with torch.no_grad():
        logits = lazy.model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(
        logits.log_softmax(-1), _log_probs(_load(source), {"input_ids": TOKENS}), atol=1e-5, rtol=0
    )


@pytest.mark.slow
def test_a_tied_model_may_store_its_head(
    tiny_image_text_model: Tiny, tmp_path: Path, capfd: Capture
) -> None:
    source = shutil.copytree(tiny_image_text_model("qwen3_vl"), tmp_path / "src")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    oracle.edit_json(source / "config.json", tie_word_embeddings=True)
    given = (
        "--scheme",
        "int4-g32",
        "--samples",
        "16",
        "--no-source-check",
        "--accept-quality-loss",
    )
    assert run(capfd, "quantize", source, tmp_path / "dst", *given)[0] == 0
    made = load_file(tmp_path / "dst" / "model.safetensors")
    assert torch.equal(made["lm_head.weight"], tensors["lm_head.weight"])
    assert quantkit.verify(tmp_path / "dst", source).ok


@pytest.mark.slow
def test_two_schemes_leave_doctor_nothing_to_say(
    tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    """Settings name each linear as on disk and as transformers does."""
    given: Any = {
        "method": "rtn",
        "via": "transformers",
        "source_check": False,
        "accept_quality_loss": True,
    }
    made = quantkit.quantize(
        tiny_image_text_model("qwen2_5_vl"), tmp_path / "dst", "int4-g32", head="int8", **given
    )
    groups = json.loads((made.path / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert any(
        name.startswith("model.language_model.layers.")
        for group in groups
        for name in group["targets"]
    )
    assert not [
        one for one in quantkit.diagnose(made.path).findings if one.rule.name == "names-nothing"
    ]


@pytest.mark.slow
def test_gptq_refuses_a_tower_that_a_recipe_names(
    tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    scheme = quantkit.QuantScheme.parse("int4-g32")
    recipe = quantkit.Recipe(scheme, (quantkit.Override("*visual*", scheme),))
    source = tiny_image_text_model("qwen2_5_vl")
    settings: Any = {"via": "transformers", "source_check": False, "accept_quality_loss": True}
    with raises(RequestError, "visual", path=source, options=["method"]):
        quantkit.quantize(source, tmp_path / "a", recipe, samples=16, **settings)
    result = quantkit.quantize(source, tmp_path / "b", recipe, method="rtn", **settings)
    modules = result.manifest["modules"]
    assert any("visual." in name for name in modules if modules[name]["scheme"])


def test_an_encoder_is_refused(tiny_image_text_model: Tiny, tmp_path: Path) -> None:
    with raises(UnsupportedError, "encoder", found="Florence2ForConditionalGeneration"):
        _quantize(tiny_image_text_model("florence2"), tmp_path / "dst", "rtn")


def _kl(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Of two models' logarithms of probabilities: the mean over tokens and its standard error."""
    kl = mean_estimate((expected.exp() * (expected - found)).sum(-1).flatten().double())
    assert kl.error is not None
    return kl.value, kl.error


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_IMAGES)
@torch.no_grad()
def test_images_mean_the_same_to_the_result(
    kind: str, tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    source = tiny_image_text_model(kind)
    results = [_quantize(source, tmp_path / method, method).path for method in ("gptq", "rtn")]
    results.append(quantkit.convert(results[0], tmp_path / "floats", dequantize=True).path)
    for folder, packed in zip(results, (10, 10, 0), strict=True):
        _require_text_only(source, folder, packed)
    model, (length, windows) = _load(source), (64, 8)
    texts = torch.tensor(load_tokenizer(DEMO_MODEL).encode(excerpt())[: windows * length]).view(
        windows, length
    )
    first, second = (random_images(kind, windows, seed) for seed in (1, 2))
    prompt = with_images(model, kind, texts, first)
    for folder in results:
        one = _load(folder)
        assert torch.equal(image_features(one, kind, first), image_features(model, kind, first))
        expected, found = (_log_probs(some, prompt)[:, -length:] for some in (model, one))
        assert found.isfinite().all()
        assert (
            found - _log_probs(one, {**prompt, **second})[:, -length:]
        ).abs().max() > 0.1  # the image matters
        image, error = _kl(expected, found)
        text, text_error = _kl(*(_log_probs(some, {"input_ids": texts}) for some in (model, one)))
        assert 0 < image < 2 * text + 2 * math.hypot(error, 2 * text_error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_a_processor_makes_prompts_for_the_result(
    kind: str, tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_image_text_model(kind), tmp_path / "src")
    model = _load(source)
    save_processor(model.config, source)
    result = _quantize(source, tmp_path / "dst", "rtn").path
    pixels = np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    for folder in (result, quantkit.convert(result, tmp_path / "floats", dequantize=True).path):
        processor, expected = (AutoProcessor.from_pretrained(one) for one in (folder, source))
        assert processor.apply_chat_template([{"role": "user", "content": "Once"}]) == "Once"
        tokenizer = processor.tokenizer
        text = (
            f"{tokenizer.boi_token if kind == 'gemma3' else tokenizer.image_token}"
            f" {excerpt()[:200]}"
        )
        given, reference = (
            one(images=Image.fromarray(pixels), text=text, return_tensors="pt")
            for one in (processor, expected)
        )
        assert given.keys() == reference.keys()
        assert all(torch.equal(given[name], reference[name]) for name in given)
        found = _log_probs(_load(folder), given)
        assert found.isfinite().all()
        assert 0 < _kl(_log_probs(model, given), found)[0] < 0.1


@pytest.mark.slow
def test_processors_and_templates_are_copied(tiny_image_text_model: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_image_text_model("smolvlm"), tmp_path / "src")
    contents = {name: f'{{"chat_template": "{name}"}}\n'.encode() for name in PROCESSORS}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    result = _quantize(source, tmp_path / "dst", "rtn").path
    for folder in (result, quantkit.convert(result, tmp_path / "floats", dequantize=True).path):
        assert {name: (folder / name).read_bytes() for name in PROCESSORS} == contents
