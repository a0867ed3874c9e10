"""LoRA adapters that PEFT makes and merges: the oracle of `quantkit.convert(..., lora=...)`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oracle
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    from transformers import AutoModelForImageTextToText


def load(base: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model as transformers loads it, also one that reads images."""
    if "ConditionalGeneration" not in (base / "config.json").read_text():
        return oracle.load(base, dtype)
    return AutoModelForImageTextToText.from_pretrained(base, dtype=dtype).eval()


def save_adapter(
    base: Path, folder: Path, *, seed: int = 3, safetensors: bool = True, **settings: Any
) -> Path:
    """Write an adapter of a base, all of whose tensors are random."""
    settings = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        **settings,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        model = peft.get_peft_model(load(base), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(parameter + noise if "lora_magnitude" in name else noise)
        model.save_pretrained(folder, safe_serialization=safetensors)
    return folder


def loaded(base: Path, adapter: Path) -> Any:
    """A base with an adapter that is not merged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(load(base), adapter).eval()


def default_settings() -> dict[str, Any]:
    """What PEFT writes for an adapter with no options."""
    return dict(peft.LoraConfig().to_dict())


def merged(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a base that PEFT has merged an adapter into."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(load(base, dtype), adapter).merge_and_unload()
    return {name: value.detach() for name, value in model.state_dict().items()}


def merged_with_weights(base: Path, adapters: Mapping[Path, float]) -> dict[str, Tensor]:
    """The same for several adapters with weights, whose ranks PEFT concatenates."""
    paths: Sequence[Path] = list(adapters)
    names = [f"adapter{number}" for number in range(len(paths))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(load(base), paths[0], adapter_name=names[0])
        for name, path in zip(names[1:], paths[1:], strict=True):
            model.load_adapter(path, adapter_name=name)
        model.add_weighted_adapter(names, list(adapters.values()), "all", combination_type="cat")
        model.set_adapter("all")
        merged = model.merge_and_unload()
    return {name: value.detach() for name, value in merged.state_dict().items()}
