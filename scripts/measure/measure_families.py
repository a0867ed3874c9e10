r"""Time families' blocks on this CPU, in turn with others of the same sizes: a table in Markdown.

    python scripts/measure/measure_families.py [--families gemma2 olmo2] [--scheme int4-g128] \
        [--against llama] [--layers 8] [--rounds 15]

Random weights in a family's sizes, some layers of them, and next to them a model of the same sizes
with blocks as Llama's or Qwen3's. Where a family's layers have attention and a dense feed-forward,
as many bytes are read for a token. Both are loaded, and take turns. Figures are medians over the
rounds: tokens a second, the ratio of each turn's to those of the other model in it, the same of
tokens for a second of processor time, which other processes disturb less, and of bytes of weights
that are read in a second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.architectures.config import (
    ExpertsConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    QueryScaleConfig,
    ShortConvConfig,
)
from quantkit.architectures.rope import RopeConfig
from quantkit.architectures.topology import linear_columns
from quantkit.evals.synthetic import SyntheticCheckpoint, synthetic
from quantkit.evals.timing import Decoding, measure_seconds, prefill_once, weight_bytes
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.ratios import median_ratio
from shared.tables import print_header, print_row

TOKENS = 32  # decoded in a turn
PREFILL = 256  # tokens of a prompt


@dataclass(frozen=True)
class Shape:
    """The sizes of a family's model, what its blocks do, and the window of the first layer of
    each two; or the kinds of its layers, in turn, of which so many have both halves of one of the
    others.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    features: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    kinds: tuple[LayerConfig, ...] = ()

    def shrink(self, factor: int) -> Shape:
        """Return the shape with its widths and numbers of heads divided."""
        features = dict(self.features)
        if "experts" in features:
            experts = features["experts"]
            features["experts"] = replace(
                experts,
                size=experts.size // factor,
                shared_size=experts.shared_size // factor,
            )
        if "mamba2" in features:
            mamba = features["mamba2"]
            features["mamba2"] = replace(mamba, heads=mamba.heads // factor)
        return replace(
            self,
            hidden_size=self.hidden_size // factor,
            intermediate_size=self.intermediate_size // factor,
            num_heads=self.num_heads // factor,
            num_kv_heads=max(1, self.num_kv_heads // factor),
            features=features,
        )

    def config(self, layers: int) -> ModelConfig:
        kinds = list(self.kinds)
        if not kinds:
            kinds = [LayerConfig(window=self.window), LayerConfig()]
        repeated = tuple(kinds[layer % len(kinds)] for layer in range(layers))
        return replace(self._base(), **self.features, layers=repeated)

    def other_config(self, layers: int, against: str) -> ModelConfig:
        """Return another family's config of the same sizes, with as many halves of layers."""
        halves = 0
        for layer in self.config(layers).layers:
            halves += (layer.mixer != "none") + layer.feed_forward
        plain = (LayerConfig(),) * (halves // 2)
        return replace(self._base(), **OTHERS[against], layers=plain)

    def _base(self) -> ModelConfig:
        sizes = dict(vars(self))
        for name in ("features", "window", "kinds"):
            del sizes[name]
        return replace(synthetic("tinyllama-1.1b", None).config, **sizes)


OTHERS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"qk_norm": "head"}}
"""The families to compare with, by what their blocks do."""


_GEMMA = {
    "norms": "both",
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "embedding_multiplier": 48.0,
}
_GEMMA_2 = _GEMMA | {"attention_scale": 0.0625, "attention_softcap": 50.0, "logit_softcap": 30.0}
_GEMMA_3 = _GEMMA | {"qk_norm": "head", "window_rope": RopeConfig(10000.0)}
_OLMO = {"norms": "after", "qk_norm": "width"}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_scale": 0.015625,
    "logit_multiplier": 0.125,
}
_GPT_OSS = {
    "sinks": True,
    "activation": "swiglu_oai",
    "activation_limit": 7.0,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
}
_COHERE_2 = {"centered_norms": True, "parallel_branches": True, "logit_multiplier": 0.25}
_COHERE_2_KINDS = (*(LayerConfig(window=4096),) * 3, LayerConfig(rotary=False))
_HUNYUAN = {"qk_norm": "head", "qk_norm_after_rotary": True}
_CONVOLUTION = LayerConfig(mixer="short_conv", experts=True)
_LFM2_MOE = {
    "qk_norm": "head",
    "short_conv": ShortConvConfig(3),
    "experts": ExpertsConfig(
        count=32,
        size=1792,
        per_token=4,
        score_correction=True,
        scores="sigmoid",
        normalization_eps=1e-6,
    ),
}
_NEMOTRON_H = {
    "mlp_gate": False,
    "activation": "relu2",
    "wide_norms": True,
    "mamba2": Mamba2Config(heads=128, head_size=64, groups=8, state_size=128, convolution=4),
}
_NEMOTRON_H_KINDS = (
    LayerConfig(mixer="mamba2", feed_forward=False),
    LayerConfig(mixer="none"),
    LayerConfig(mixer="mamba2", feed_forward=False),
    LayerConfig(mixer="none"),
    LayerConfig(rotary=False, feed_forward=False),
    LayerConfig(mixer="none"),
)
_LLAMA_4 = {
    "qk_norm": "bare",
    "qk_norm_after_rotary": True,
    "query_scale": QueryScaleConfig(strength=0.1, floor=8192),
    "experts": ExpertsConfig(
        count=16,
        size=8192,
        per_token=1,
        shared_size=8192,
        normalized=False,
        scores="sigmoid",
        weighted_inputs=True,
    ),
}
_LLAMA_4_KINDS = (
    *(LayerConfig(chunk=8192, experts=True),) * 3,
    LayerConfig(rotary=False, experts=True),
)
_MINISTRAL = {"rope": RopeConfig(1e6, original_context=16384, query_scaling_beta=0.1)}
SHAPES = {
    "gemma2": Shape(2304, 9216, 8, 4, 256, _GEMMA_2, 4096),
    "gemma3_text": Shape(2560, 10240, 8, 4, 256, _GEMMA_3, 1024),
    "olmo2": Shape(2048, 8192, 16, 16, 128, _OLMO),
    "olmo3": Shape(4096, 11008, 32, 32, 128, _OLMO, 4096),
    "granite": Shape(2048, 8192, 32, 8, 64, _GRANITE),
    "glm4": Shape(4096, 13696, 32, 2, 128, {"norms": "both", "qkv_bias": True}),
    "ministral3": Shape(3072, 9216, 32, 8, 128, _MINISTRAL),
    "gpt_oss": Shape(2880, 2880, 64, 8, 64, _GPT_OSS, 128),
    "hunyuan_v1_dense": Shape(2048, 6144, 16, 4, 128, _HUNYUAN),
    "cohere2": Shape(4096, 14336, 32, 8, 128, _COHERE_2, kinds=_COHERE_2_KINDS),
    "lfm2_moe": Shape(
        2048,
        7168,
        32,
        8,
        64,
        _LFM2_MOE,
        kinds=(_CONVOLUTION, _CONVOLUTION, LayerConfig(experts=True)),
    ),
    "llama4_text": Shape(5120, 16384, 40, 8, 128, _LLAMA_4, kinds=_LLAMA_4_KINDS),
    "nemotron_h": Shape(4096, 21504, 32, 8, 128, _NEMOTRON_H, kinds=_NEMOTRON_H_KINDS),
}
"""By the family, sizes and features of a published model; gpt-oss's with one expert for all
tokens, and LFM2's with experts in all layers. Llama 4's is that of its smallest model.
"""


def load_random(name: str, config: ModelConfig, scheme: str) -> Decoder:
    """Return a model of random weights."""
    recipe = Recipe(QuantScheme.parse(scheme), (Override("lm_head", QuantScheme.parse("int8")),))
    return load_model(
        SyntheticCheckpoint(Path(name), config, recipe.assign(linear_columns(config))), device="cpu"
    )


def list_measures(model: Decoder, prompt: int) -> dict[str, tuple[int, Callable[[], float]]]:
    """Return by the measure its tokens, and what gives the seconds that they take."""
    decoding = Decoding(model, 1, TOKENS, None, prompt=prompt)
    prefill = partial(measure_seconds, partial(prefill_once, model, PREFILL, None))
    return {"decode": (TOKENS, decoding.run), f"prefill {PREFILL}": (PREFILL, prefill)}


def measure_rates(tokens: int, run: Callable[[], float]) -> tuple[float, float]:
    """Return tokens a second, and for a second of processor time."""
    started = time.process_time()
    seconds = run()
    return tokens / seconds, tokens / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--against", default="llama", choices=OTHERS)
    parser.add_argument("--shrink", type=int, default=1, help="divide widths and heads by this")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--prompt", type=int, default=16, help="tokens before those decoded; 16 at least"
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    other_name = options.against
    titles = ("MB", f"{other_name}'s", "one call a block", "measure", "tok/s", f"{other_name}'s")
    print_header(options.scheme, *titles, "ratio", "of processor time", "of bytes")
    for family in options.families:
        shape = SHAPES[family].shrink(options.shrink)
        model = load_random(family, shape.config(options.layers), options.scheme)
        other_config = shape.other_config(options.layers, other_name)
        other = load_random(other_name, other_config, options.scheme)
        size = weight_bytes(model)
        other_size = weight_bytes(other)
        fused = "yes" if model.ops.blocks is not None else "no"
        with torch.inference_mode():
            measures = list_measures(model, options.prompt)
            other_measures = list_measures(other, options.prompt)
            for name in measures:
                rates = []
                other_rates = []
                for _ in range(options.rounds + 1):
                    rates.append(measure_rates(*measures[name]))
                    other_rates.append(measure_rates(*other_measures[name]))
                # The first round warms up.
                wall, processor = zip(*rates[1:], strict=True)
                other_wall, other_processor = zip(*other_rates[1:], strict=True)
                ratio = median_ratio(wall, other_wall)
                print_row(
                    family,
                    f"{size / 1e6:.0f}",
                    f"{other_size / 1e6:.0f}",
                    fused,
                    name,
                    f"{statistics.median(wall):.1f}",
                    f"{statistics.median(other_wall):.1f}",
                    f"{ratio:.2f}",
                    f"{median_ratio(processor, other_processor):.2f}",
                    f"{ratio * size / other_size:.2f}",
                )


if __name__ == "__main__":
    main()
