"""Make tiny models of random weights, one for each architecture of transformers that predicts text
from images and text, for tests.

    python scripts/measure/tiny_image_text.py FOLDER [NAME ...]

Each model is a folder of FOLDER with the name of its architecture: a config, weights as safetensors
and a tokenizer.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_architectures import ALL_HEADS, copy_tokenizer, fill, fitting, main, vocabulary
from tiny_architectures import ARCHITECTURES as TEXT
from tiny_architectures import COMMON as LANGUAGE
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from quantkit.data.files import DEMO_MODEL

# Of the parts besides the text part: towers for images, video and sound, and what leads from them
# to it.
TOWER: dict[str, object] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "d_model": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "max_position_embeddings": 64,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "deepstack_visual_indexes": [0],
    "output_channels": 32,
    "mlp_dim": 64,
    "vocab_size": 64,
    "encoder_hidden_size": 32,
    "cross_attention_frequency": 1,
    # what the text part reads
    "out_hidden_size": 64,
    "output_dim": 64,
    "projection_dim": 64,
    "text_hidden_size": 64,
    "adapter_out_dim": 64,
    # of mixtures of experts
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    # of sound
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "downsample_hidden_size": 16,
    "max_source_positions": 64,
    # of codes for images
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "num_embeddings": 64,
    "codebook_size": 64,
    "latent_channels": 32,
    "resolution": 32,
}

# Of the whole, besides the sizes of its text part where it has none.
WHOLE: dict[str, object] = {
    "projection_dim": 64,
    "projector_hidden_size": 64,
    "mm_tokens_per_image": 4,
    "image_seq_length": 16,
    "vision_feature_layer": -1,
    "alignment_intermediate_size": 64,
    "num_query_tokens": 4,
    "image_text_hidden_size": 64,
}

MROPE: dict[str, object] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
}
HALF_MROPE: dict[str, object] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
SAM: dict[str, object] = {"downsample_channels": [32, 32]}

# Models that cannot be given text alone.
NEEDS_IMAGE: dict[str, str] = {
    "blip": "its text part attends to the image",
    "blip-2": "pixel_values is a required argument",
    "idefics": "its text part attends to the image",
    "instructblip": "pixel_values is a required argument",
    "instructblipvideo": "pixel_values is a required argument",
    "kosmos-2": "the image takes the place of the first tokens",
    "pix2struct": "the image is read by the encoder",
    "t5gemma2": "the decoder needs its own tokens",
    "udop": "needs the places of words on the page",
    "vision-encoder-decoder": "the image is read by the encoder",
}

NOT_MADE: dict[str, str] = {
    "diffusion_gemma": "predicts many tokens at once, from random ones",
    "evolla": "reads proteins, and transformers' own table has no class for its config",
    "fast_vlm": "its vision tower needs timm",
    "gemma3n": "its vision tower needs timm",
    "perception_lm": "its vision tower needs timm",
    "pi0": "predicts a robot's actions",
    "pp_formulanet": "its class does not state its embedding, and the encoder reads the image",
    "shieldgemma2": (
        "classifies images: transformers' own table has a class that does not load it again"
    ),
}

# What differs from the common values, by part; "" is the whole.
OVERRIDES: dict[str, dict[str, Any]] = {
    "chameleon": {
        "": {"vocabulary_map": {"<image>": 2047, "IMGIMGA": 4, "IMGIMGB": 5}}
    },  # bytes that no text has
    "cosmos3_edge": {"text_config": MROPE},
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": SAM,
            "encoder_config": {"layer_types": ["full_attention"] * 2},
        }
    },
    "dots3_note": {
        "vision_config": {"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32},
        "audio_config": {"adapter_input_size": 32, "feature_size": 16},
    },
    "emu3": {
        "": {
            "vocabulary_map": {
                "<image>": 2047,
                "<|extra_200|>": 2046,
                "<|visual token 000000|>": 2045,
            }
        }
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [64, 32],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [3, 3, 2],
            },
        }
    },
    "florence2": {
        "vision_config": {
            "depths": [1, 1],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 32],
            "num_heads": [2, 2],
            "num_groups": [2, 2],
            "window_size": 4,
        }
    },
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 16},
    },
    "glm46v": {"text_config": MROPE},
    "glm4v": {"text_config": MROPE},
    "glm4v_moe": {"text_config": HALF_MROPE},
    "glm5_next": {
        "text_config": {**ALL_HEADS, "qk_rope_head_dim": 0, "head_dim": 0},
        "vision_config": {"projection_intermediate_size": 64},
    },
    "glm_ocr": {"text_config": MROPE},
    "glmga": {"text_config": MROPE},
    "granite4_vision": {
        "": {
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [1],
            "downsample_rate": "1/2",
        },
        "vision_config": {"hidden_size": 64},  # a head has 64 in the projector
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64},
    },
    "hunyuan_vl": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 2, 2, 2],
            }
        },
        "vision_config": {
            "max_image_size": 32,
            "min_image_size": 16,
            "img_max_token_num": 16,
            "max_vit_seq_len": 64,
        },
    },
    "llama4": {
        "vision_config": {
            "vision_output_dim": 64,
            "intermediate_size": 128,  # what the shuffled patches are: four times the hidden size
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        }
    },
    "mistral4": {"": ALL_HEADS},
    "mistral_large4": {"text_config": ALL_HEADS},
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "molmo2": {
        "vision_config": {"image_size": [32, 32]},
        "adapter_config": {"vision_feature_layer": [1, 0]},
    },
    "muse_spark": {
        "": {"out_hidden_size": 64},
        "audio_config": {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
    },
    "nemotron_h_omni": {
        "": {"vision_hidden_size": 32},
        "vision_config": {"model_type": "radio", "video_temporal_patch_size": 2},
        "audio_config": {
            "model_type": "parakeet_encoder",
            "projection_hidden_size": 64,
            "projection_bias": False,
        },
    },
    "paddleocr_vl": {"text_config": MROPE},
    "qwen2_5_omni_thinker": {"text_config": MROPE},
    "qwen2_5_vl": {"text_config": MROPE},
    "qwen3_vl_moe": {"text_config": {"moe_intermediate_size": 96}},
    "qwen2_vl": {
        "text_config": MROPE,
        "vision_config": {"hidden_size": 64},
    },  # that of the text part
    "unlimited_ocr": {"vision_config": {"sam_config": SAM}},
}

ARCHITECTURES = [
    name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in NOT_MADE
]

_BOUND = 16.0  # of what Gemma 4 clips at, which begins as infinity
_PARTS_OF_TEXT = ("text_config", "decoder")
_SPECIAL = re.compile(r".*(token|start|end|newline).*_(id|index)")
_OF_TEXT = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def configuration(model_type: str, tokens: int) -> PreTrainedConfig:
    """The config: of each part, and of the whole, the common values that its class has fields for,
    and the overrides.

    Arguments:
        tokens: the size of the vocabulary; the last ones stand for images, video and sound.
    """
    config_class = CONFIG_MAPPING[model_type]
    given = OVERRIDES.get(model_type, {})
    values = fitting(config_class, {**LANGUAGE, **WHOLE, "vocab_size": tokens})
    fields = inspect.signature(config_class.__init__).parameters
    special = [name for name in fields if _SPECIAL.fullmatch(name) and name not in _OF_TEXT]
    values |= {name: tokens - 1 - index for index, name in enumerate(special)}
    values |= {**_parts(config_class, tokens, given), **given.get("", {})}
    return config_class(**copy.deepcopy(values), dtype="float32")


def _parts(config_class: Any, tokens: int, given: Mapping[str, Any]) -> dict[str, PreTrainedConfig]:
    """The configs of the parts of a model, or of one of its parts, of the classes that it has by
    default.
    """
    usual = config_class()
    found = {}
    for name, stated in config_class.sub_configs.items():
        known = getattr(usual, name, None)
        part_class = stated if known is None else type(known)
        own = dict(given.get(name, {}))
        if "model_type" in own:
            part_class = CONFIG_MAPPING[own.pop("model_type")]
        common = TOWER
        if name in _PARTS_OF_TEXT:
            size = {"vocab_size": tokens, "vocab_size_per_layer_input": tokens}
            common = {**LANGUAGE, **size}
            own = {**TEXT.get(part_class.model_type, {}), **own}
        inner = _parts(part_class, tokens, own)
        found[name] = part_class(
            **copy.deepcopy({**fitting(part_class, common), **own, **inner}), dtype="float32"
        )
    return found


def build(model_type: str, tokens: int, *, seed: int) -> PreTrainedModel:
    """The model, with random values in place of biases, gates and other parameters that begin as
    zeros.
    """
    torch.manual_seed(seed)
    config = configuration(model_type, tokens)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    fill(model)
    for _, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.nan_to_num_(posinf=_BOUND, neginf=-_BOUND)
    return model


def make(model_type: str, folder: Path, tokenizer: Path = DEMO_MODEL, *, seed: int = 0) -> None:
    """Write a model of float32 weights, and a copy of a tokenizer. The parts of its config state
    bfloat16, as those of many published models state another type than that of the whole.

    Arguments:
        model_type: one of `ARCHITECTURES`.
        folder: where to.
        tokenizer: a folder with a tokenizer.
        seed: of the weights.
    """
    build(model_type, vocabulary(tokenizer), seed=seed).save_pretrained(folder)
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    for part in stated.values():
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = "bfloat16"
    path.write_text(json.dumps(stated, indent=2))
    copy_tokenizer(tokenizer, folder)


if __name__ == "__main__":
    main(__doc__.splitlines()[0], ARCHITECTURES, make)
