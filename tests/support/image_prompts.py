"""Prompts of text and one random image, in the form that the processors of models that read
images give them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from quantkit.data.files import DEMO_MODEL
from quantkit.text.export import export_json

SIDE, PATCH = 32, 8  # of an image, in pixels; `tiny_image_text` makes models for it
_PER_SIDE = SIDE // PATCH
_TOKEN_TYPES = {"gemma3": "token_type_ids"} | dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "mm_token_type_ids"
)


def random_images(kind: str, count: int, seed: int) -> dict[str, Tensor]:
    """Random images in the form that an architecture's processor gives them.

    Args:
        kind: the architecture, a `model_type`.
        count: how many images.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if kind.startswith("qwen"):  # patches of two frames, of all images
        grid = torch.tensor([[1, _PER_SIDE, _PER_SIDE]] * count)
        return {
            "pixel_values": pixels(count * _PER_SIDE**2, 2 * 3 * PATCH**2),
            "image_grid_thw": grid,
        }
    if kind == "lfm2_vl":
        return {
            "pixel_values": pixels(count, _PER_SIDE**2, 3 * PATCH**2),
            "spatial_shapes": torch.tensor([[_PER_SIDE, _PER_SIDE]] * count),
            "pixel_attention_mask": torch.ones(count, _PER_SIDE**2, dtype=torch.long),
        }
    if kind == "smolvlm":
        return {"pixel_values": pixels(count, 1, 3, SIDE, SIDE)}
    found = {"pixel_values": pixels(count, 3, SIDE, SIDE)}
    return (
        {**found, "image_sizes": torch.tensor([[SIDE, SIDE]] * count)}
        if kind == "mistral3"
        else found
    )


def image_features(model: Any, kind: str, images: dict[str, Tensor]) -> Tensor:
    """What the text part of a model reads of images, [rows, H]."""
    with torch.no_grad():
        found = getattr(model, "model", model).get_image_features(**images)
        if kind == "llama4":  # whose projector is not part of it
            return model.multi_modal_projector(found.last_hidden_state).flatten(0, -2)
    return torch.cat([one.flatten(0, -2) for one in found.pooler_output])


def with_images(
    model: Any, kind: str, texts: Tensor, images: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The inputs of a model: texts [W, T], each with an image at the start, which has as many
    tokens as features.
    """
    rows = len(image_features(model, kind, images)) // len(texts)
    ids = torch.cat([torch.full((len(texts), rows), model.config.image_token_id), texts], 1)
    types = {
        name: (ids == model.config.image_token_id).long()
        for name in [_TOKEN_TYPES.get(kind)]
        if name
    }
    return {"input_ids": ids, **images, **types}


def save_processor(config: Any, folder: Path) -> None:
    """Write the processor of a tiny Llava or Gemma 3, with a chat template and the tokenizer of the
    demo model, whose last tokens stand for images.
    """
    names = {"image_token": config.image_token_id}
    if config.model_type == "gemma3":
        names |= {"boi_token": config.boi_token_index, "eoi_token": config.eoi_token_index}
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in (
            export_json(DEMO_MODEL / "tokenizer.model", Path(scratch)) or {}
        ).items():
            (folder / name).write_bytes(content)
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    special = {name: plain.convert_ids_to_tokens(number) for name, number in names.items()}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=special)
    square = {"height": SIDE, "width": SIDE}
    template = "{{ messages[0].content }}"
    if config.model_type == "gemma3":
        images: Any = Gemma3ImageProcessorPil(size=square)
        made: Any = Gemma3Processor(
            images, tokenizer, template, image_seq_length=config.mm_tokens_per_image
        )
    else:
        images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square)
        settings = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        made = LlavaProcessor(
            images, tokenizer, patch_size=PATCH, chat_template=template, **settings
        )
    made.save_pretrained(folder)
