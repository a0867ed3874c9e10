"""The text part of models that read images or sound: what transformers computes of it on text,
and its settings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import quantkit
from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.text_part import _FLAT, _TEXTS, _WHOLES, text_settings
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.jobs.inference.load import load_by_transformers

assert oracle  # which lets transformers be quiet
Tiny = Callable[[str], Path]
TOKENS = torch.randint(3, 1900, (2, 60), generator=torch.Generator().manual_seed(1))
OWN_TEXT = {
    "ministral3": "mistral3"
}  # kinds of text parts that a model can have, besides its default
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-4,
    "rope_theta": 7e4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "sliding_window": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _theirs(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", _WHOLES)
def test_our_decoder_computes_what_transformers_does(
    kind: str, tiny_image_text_model: Tiny
) -> None:
    folder = tiny_image_text_model(kind)
    model, _ = quantkit.load(folder, dtype="fp32")
    torch.testing.assert_close(model(TOKENS), _theirs(folder), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "qwen3_vl_moe", "smolvlm"])
def test_a_quantized_text_part_runs_with_our_kernels(
    kind: str, tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    given: Any = {"via": "transformers", "source_check": False, "accept_quality_loss": True}
    source = tiny_image_text_model(kind)
    dst = quantkit.quantize(source, tmp_path / "int4", "int4-g32", method="rtn", **given).path
    model, tokenizer = quantkit.load(dst, dtype="fp32", backend="cpu-exact")
    floats = quantkit.convert(dst, tmp_path / "floats", dequantize=True).path
    torch.testing.assert_close(
        model(TOKENS), _theirs(floats), atol=1e-3, rtol=0
    )  # the kernels round inputs
    assert (
        len(list(quantkit.generate(model, tokenizer.encode("Once upon a time"), max_new_tokens=4)))
        <= 4
    )


def test_inspect_says_what_runs_the_text_part(tiny_image_text_model: Tiny) -> None:
    assert any(
        "run its text part as qwen2, without images" in note
        for note in quantkit.inspect(tiny_image_text_model("ovis2")).notes
    )


def test_what_the_whole_leaves_out_of_its_head_is_left_out(
    tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    """transformers caps the logits of a Gemma 3 for text alone, and not those of one that reads
    images.
    """
    source = shutil.copytree(tiny_image_text_model("gemma3"), tmp_path / "src")
    oracle.edit_json(
        source / "config.json", text_config=_text_config(source) | {"final_logit_softcapping": 1.0}
    )
    model, _ = quantkit.load(source, dtype="fp32")
    torch.testing.assert_close(model(TOKENS), _theirs(source), atol=1e-4, rtol=0)


def test_a_text_part_whose_logits_transformers_does_not_scale_is_refused(
    tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_image_text_model("llava_next"), tmp_path / "src")
    oracle.edit_json(
        source / "config.json", text_config=_text_config(source) | {"model_type": "granite"}
    )
    with raises(UnsupportedError, path=source / "config.json", found="llava_next"):
        quantkit.load(source)


def _text_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return found


def test_images_in_a_prompt_are_refused(tiny_image_text_model: Tiny) -> None:
    folder = tiny_image_text_model("smolvlm")
    image = json.loads((folder / "config.json").read_text())["image_token_id"]
    for load in (quantkit.load, load_by_transformers):
        model, _ = load(folder)
        with raises(RequestError, found=f"token {image}"):
            list(
                model.generate([5, image, 6])
                if load is not quantkit.load
                else quantkit.generate(model, [5, image])
            )


def test_convert_and_quantize_never_drop_the_other_parts(
    tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    with raises(UnsupportedError, found="llava"):
        quantkit.convert(tiny_image_text_model("llava"), tmp_path / "dst", to="meta")


@pytest.mark.parametrize("names", [["other_model."], []], ids=["two decoders", "none"])
def test_a_folder_without_one_decoder_is_refused(
    names: list[str], tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    tensors = load_file(tiny_image_text_model("llava") / "model.safetensors")
    text = {
        name: value
        for name, value in tensors.items()
        if "embed_tokens" in name or name.endswith("model.norm.weight")
    }
    assert len(text) == 2
    for name, value in text.items():
        tensors |= {prefix + name: value.clone() for prefix in names}
        if not names:
            del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    for other in ("config.json", "tokenizer.model"):
        (tmp_path / other).write_bytes((tiny_image_text_model("llava") / other).read_bytes())
    with raises(CheckpointError, "'embed_tokens'", path=tmp_path):
        quantkit.load(tmp_path)


def test_a_head_that_nothing_ties_is_required(tiny_image_text_model: Tiny, tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    tensors = load_file(tiny_image_text_model("llava_next") / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if "lm_head" not in name}
    assert len(kept) == len(tensors) - 1
    save_file(kept, tmp_path / "model.safetensors")
    raw = json.loads((tiny_image_text_model("llava_next") / "config.json").read_text())
    raw["text_config"]["tie_word_embeddings"] = True  # which is not read for this model
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer.model").write_bytes(
        (tiny_image_text_model("llava_next") / "tokenizer.model").read_bytes()
    )
    with raises(CheckpointError, "'lm_head.weight'", path=tmp_path):
        quantkit.load(tmp_path)


def _configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Config.json files that lack one setting each, by a name."""
    kinds = [(whole, text) for whole, (text, _) in _WHOLES.items()] + [
        (whole, text) for text, whole in OWN_TEXT.items()
    ]
    for whole, text in kinds:
        for without in ("", *SMALL):
            inner = {key: value for key, value in SMALL.items() if key != without}
            yield (
                f"{whole} {text} {without}",
                {"model_type": whole, "text_config": {**inner, "model_type": text}},
            )
            if whole in _FLAT:
                yield f"{whole} flat {without}", {"model_type": whole, **inner}


def _read(raw: dict[str, Any]) -> ModelConfig:
    return replace(
        config_from_hf(text_settings(raw, "config.json"), "config.json"), tied_embeddings=False
    )


CASES = dict(_configs())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("whole", _WHOLES)
def test_what_a_config_leaves_out_is_transformers_default(whole: str, tmp_path: Path) -> None:
    """Equal to what is read of a config that states all that transformers makes of it."""
    cases = {name: raw for name, raw in CASES.items() if raw["model_type"] == whole}
    assert len(cases) > len(SMALL)
    for name, raw in cases.items():
        (tmp_path / "config.json").write_text(json.dumps(raw))
        text = AutoConfig.from_pretrained(tmp_path).get_text_config()
        stated = {
            key: value for key, value in text.to_dict().items() if key != "tie_word_embeddings"
        }
        try:
            expected = _read({"model_type": whole, "text_config": stated})
        except (CheckpointError, UnsupportedError):
            continue  # the defaults do not fit what is stated
        if name.endswith("num_experts"):
            continue  # which must be stated
        assert _read(raw) == expected, name
        assert expected.vocab_size == text.vocab_size
        assert expected.hidden_size == text.hidden_size


def test_every_kind_of_text_part_is_tried() -> None:
    tried = {name.split()[1] for name in CASES}
    assert tried == {*_TEXTS, "flat"}
