"""Measure how much of the KL of a quantized tiny model comes from other choices of experts and
tokens.

    python scripts/measure/measure_frozen_choices.py [NAME ...]

The quantized model runs by transformers alone, with its own choices, and with those that the float
model makes at each top-k: of its routers, of its indexers (which choose the tokens that attention
reads), or of both.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tiny_architectures
import torch
from measure_architectures import load
from torch import Tensor
from torch.overrides import TorchFunctionMode

import quantkit
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.quality.figures import mean_estimate
from quantkit.text.tokenizer import load_tokenizer

_LENGTH = 128
_KINDS: Mapping[str, Collection[str]] = {
    "its own choices": (),
    "experts of the float model": ("experts",),
    "tokens of the float model": ("tokens",),
    "both": ("experts", "tokens"),
}


class _Choices(TorchFunctionMode):
    """Records what each top-k of a model chooses, or replaces it by what was recorded."""

    def __init__(self, chosen: list[Tensor], frozen: Collection[str] | None) -> None:
        """
        Args:
            chosen: by each call; empty before they are recorded.
            frozen: the kinds of choices to replace; None records them.
        """
        super().__init__()
        self._chosen = chosen
        self._frozen = frozen
        self._index = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        if self._frozen is None:
            self._chosen.append(result.indices)
            return result
        indices = self._chosen[self._index]
        self._index += 1
        # Tiny models have fewer experts than tokens.
        kind = "tokens" if args[0].shape[-1] == _LENGTH else "experts"
        if kind not in self._frozen:
            return result
        return type(result)((args[0].gather(-1, indices), indices))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["deepseek_v32", "glm_moe_dsa"])
    options = parser.parse_args()
    ids = load_tokenizer(DEMO_MODEL).encode(excerpt())
    texts = torch.tensor(ids[: len(ids) // _LENGTH * _LENGTH]).view(-1, _LENGTH)[:16]
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            for method, kind, kl, error in measure(name, Path(folder), texts):
                print(f"{name}, {method}, {kind}: KL {kl:.4f} ± {error:.4f}", flush=True)


def measure(name: str, folder: Path, texts: Tensor) -> list[tuple[str, str, float, float]]:
    """Measure the KL of int4-g32 on texts [W, T] by GPTQ and by rounding, with each of `_KINDS`.

    Returns:
        The method, the kind, the KL in nats a token and its standard error.
    """
    source = folder / "source"
    tiny_architectures.make(name, source)
    chosen: list[Tensor] = []
    reference = _compute_log_probs(load(source), texts, _Choices(chosen, None))
    rows: list[tuple[str, str, float, float]] = []
    for method, settings in {"gptq": {"samples": 32}, "rtn": {}}.items():
        made = quantkit.quantize(
            source,
            folder / method,
            "int4-g32",
            method=method,
            via="transformers",
            source_check=False,
            accept_quality_loss=True,
            **settings,
        )
        floats = quantkit.convert(
            made.path, folder / f"{method}-floats", dequantize=True, source_check=False
        )
        model = load(floats.path)
        for kind, frozen in _KINDS.items():
            log_probs = _compute_log_probs(model, texts, _Choices(chosen, frozen))
            kl_of_tokens = (reference.exp() * (reference - log_probs)).sum(-1)
            kl = mean_estimate(kl_of_tokens.flatten().double())
            rows.append((method, kind, kl.value, kl.error))
    return rows


def _compute_log_probs(model: Any, texts: Tensor, choices: _Choices) -> Tensor:
    """Compute logarithms of probabilities [W, T, V]."""
    with torch.inference_mode(), choices:
        logits = [model(input_ids=batch, use_cache=False).logits for batch in texts.split(4)]
    return torch.cat(logits).float().log_softmax(-1)


if __name__ == "__main__":
    main()
