"""Tiny random `transformers` models: the oracle that quantkit's model is held against."""

from __future__ import annotations

import json
import shutil
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.kernels.dispatch import list_allowed_backends
from quantkit.model.decoder import Decoder
from quantkit.model.load import fill_parameters, meta_init

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def make(kind: str, **changes: Any) -> Any:
    """A random float32 model of an architecture, by its ``model_type``.

    Biases and norms are randomized too, so that losing one shows.
    """
    settings = {**SIZES, **({"head_dim": 16} if kind == "qwen3" else {}), **changes}
    config = transformers.AutoConfig.for_model(
        kind, **deepcopy(settings)
    )  # which adds to settings of ropes
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    # Gemma's norms add 1, but not Gemma 4's.
    middle = 0 if kind.startswith("gemma") and not kind.startswith("gemma4") else 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                middle + 0.1 * noise
                if "norm" in name
                else 0.3 * noise / parameter.shape[-1] ** 0.25
            )
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a Hugging Face folder with `save_pretrained`, with no tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder as a user of transformers does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def ours(source: Path | Checkpoint) -> Decoder:
    """Our float32 model of a checkpoint or its folder, each linear under its own name."""
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    with meta_init():
        model = Decoder(checkpoint.config)
    fill_parameters(
        model,
        checkpoint,
        "",
        torch.device("cpu"),
        torch.float32,
        list_allowed_backends(allow_slow=True),
    )
    return model.eval()


@torch.inference_mode()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits [B, T, V] of the transformers model."""
    out: Tensor = model(tokens).logits
    return out


@torch.inference_mode()
def greedy(model: Any, tokens: Tensor, count: int) -> list[int]:
    """The greedy continuation of one sequence [1, T], without stopping at an end token."""
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    return tokens[0, -count:].tolist()


def random_tokens(count: int, batch: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    """Token ids [B, T], none of them an end token."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, vocabulary, (batch, count), generator=generator)


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file in place; a value of None removes the key."""
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def copy(folder: Path, target: Path) -> Path:
    """A copy of a folder that a test may damage."""
    shutil.copytree(folder, target)
    for file in target.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    return target
