r"""Time families' blocks on this CPU, in turn with Llama's of the same sizes: a table in Markdown.

    python scripts/measure/measure_families.py [--families gemma2 olmo2] [--scheme int4-g128] \
        [--layers 8] [--rounds 15]

Random weights in a family's sizes, some layers of them, and next to them the same tensors in blocks
as Llama's: as many bytes are read for a token. Both are loaded, and take turns. Figures are medians
over the rounds: tokens a second, the ratio of each turn's to Llama's in it, and the same of tokens
for a second of processor time, which other processes disturb less.
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

from quantkit.architectures.config import LayerConfig, ModelConfig
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
    each two.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    features: dict[str, Any] = field(default_factory=dict)
    window: int | None = None

    def config(self, layers: int, *, plain: bool) -> ModelConfig:
        sizes = {
            name: value for name, value in vars(self).items() if name not in ("features", "window")
        }
        base = replace(
            synthetic("tinyllama-1.1b", None).config, **sizes, layers=(LayerConfig(),) * layers
        )
        if plain:
            return base
        kinds = [LayerConfig(window=None if layer % 2 else self.window) for layer in range(layers)]
        return replace(base, **self.features, layers=tuple(kinds))


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
}
"""By the family, sizes and features of a published model; gpt-oss's with one expert for all
tokens.
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
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--prompt", type=int, default=16, help="tokens before those decoded; 16 at least"
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    titles = ("MB", "one call a block", "measure", "tok/s", "Llama's", "ratio")
    print_header(options.scheme, *titles, "of processor time")
    for family in options.families:
        shape = SHAPES[family]
        model, llama = (
            load_random(family, shape.config(options.layers, plain=plain), options.scheme)
            for plain in (False, True)
        )
        size = f"{weight_bytes(model) / 1e6:.0f}"
        fused = "yes" if model.ops.blocks is not None else "no"
        with torch.inference_mode():
            measures = list_measures(model, options.prompt)
            llama_measures = list_measures(llama, options.prompt)
            for name in measures:
                rates = []
                llama_rates = []
                for _ in range(options.rounds + 1):
                    rates.append(measure_rates(*measures[name]))
                    llama_rates.append(measure_rates(*llama_measures[name]))
                # The first round warms up.
                wall, processor = zip(*rates[1:], strict=True)
                llama_wall, llama_processor = zip(*llama_rates[1:], strict=True)
                print_row(
                    family,
                    size,
                    fused,
                    name,
                    f"{statistics.median(wall):.1f}",
                    f"{statistics.median(llama_wall):.1f}",
                    f"{median_ratio(wall, llama_wall):.2f}",
                    f"{median_ratio(processor, llama_processor):.2f}",
                )


if __name__ == "__main__":
    main()
