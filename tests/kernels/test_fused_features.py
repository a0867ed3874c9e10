"""Features of other families in blocks of one call, against the decoder's own modules; and what
the self-test finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from fused_blocks import PLAIN_SETTINGS
from random_weights import RandomWeights
from torch import Tensor

from quantkit.architectures.config import (
    ExpertsConfig,
    GatedDeltaConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    QueryScaleConfig,
    ShortConvConfig,
)
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.rope import RopeConfig
from quantkit.architectures.topology import linear_columns
from quantkit.kernels import cpu
from quantkit.kernels.cpu_operators import BlockOperands, Blocks
from quantkit.kernels.library import load_kernels
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

WINDOWED = (LayerConfig(window=6), LayerConfig(), LayerConfig(window=6))
PLAIN_ROPE = RopeConfig(theta=10000.0)
PARTIAL_ROPE = replace(PLAIN_ROPE, rotary_dim=4)
# More columns than a piece of work has, more than the vectors of the rest have, and some that fill
# no vector.
DELTA = GatedDeltaConfig(key_heads=2, value_heads=4, key_dim=20, value_dim=84, convolution=4)
MAMBA = Mamba2Config(heads=4, head_size=84, groups=2, state_size=12, convolution=3)
FEATURES: dict[str, dict[str, Any]] = {
    "norms after": {"norms": "after"},
    "norms both": {"norms": "both"},
    "norm offset": {"norm_offset": 0.4},
    "gelu": {"activation": "gelu_tanh"},
    "swiglu_oai": {"activation": "swiglu_oai", "activation_limit": 0.5, "mlp_bias": True},
    "scale": {"attention_scale": 0.05},
    "softcap": {"attention_softcap": 0.7},
    "sinks": {"sinks": True},
    "residual multiplier": {"residual_multiplier": 0.3},
    "width norms": {"qk_norm": "width"},
    "norms after rotation": {"qk_norm": "head", "qk_norm_after_rotary": True},
    "norms after rotation, clip, query scale": {
        "qk_norm": "head",
        "qk_norm_after_rotary": True,
        "clip_qkv": 0.4,
        "rope": replace(PLAIN_ROPE, original_context=4, query_scaling_beta=0.7),
    },
    "centered norms": {"centered_norms": True},
    "centered norms on both sides": {
        "centered_norms": True,
        "norms": "both",
        "norm_offset": 0.4,
        "residual_multiplier": 0.3,
    },
    "parallel": {"parallel_branches": True},
    "parallel, norms after": {"parallel_branches": True, "norms": "both"},
    "squares": {"mlp_gate": False, "activation": "relu2", "mlp_bias": True},
    "clip": {"clip_qkv": 0.4},
    "clip, head norms": {"clip_qkv": 0.4, "qk_norm": "head"},
    "window rope": {"layers": WINDOWED, "window_rope": replace(PLAIN_ROPE, theta=50.0)},
    "no rope": {"layers": (LayerConfig(rotary=False), LayerConfig(), LayerConfig(rotary=False))},
    "partial rope": {"rope": PARTIAL_ROPE},
    "leading rope": {"rope": PARTIAL_ROPE, "leading_rotary": True},
    "gate": {"attention_gate": True, "qk_norm": "head"},
    "short convolution": {
        "layers": (LayerConfig(mixer="short_conv"), LayerConfig(), LayerConfig(mixer="short_conv")),
        "short_conv": ShortConvConfig(size=3),
    },
    "short convolution, biases": {
        "layers": (LayerConfig(mixer="short_conv"),) * 3,
        "short_conv": ShortConvConfig(size=4, bias=True),
    },
    "delta rule": {
        "layers": (LayerConfig(), LayerConfig(mixer="gated_delta"), LayerConfig()),
        "gated_delta": DELTA,
    },
    "joined delta rule": {
        "layers": (LayerConfig(), LayerConfig(mixer="gated_delta"), LayerConfig()),
        "gated_delta": replace(DELTA, joined=True),
    },
    "state space": {
        "layers": (LayerConfig(), LayerConfig(mixer="mamba2"), LayerConfig(mixer="mamba2")),
        "mamba2": MAMBA,
    },
    "state space, biases, limits": {
        "layers": (LayerConfig(), LayerConfig(mixer="mamba2"), LayerConfig()),
        "mamba2": replace(MAMBA, convolution_bias=False, bias=True, step_limits=(0.2, 0.8)),
        "residual_multiplier": 0.5,
    },
    "as in Qwen3.5": {
        "attention_gate": True,
        "qk_norm": "head",
        "norm_offset": 1.0,
        "rope": PARTIAL_ROPE,
        "leading_rotary": True,
        "layers": (LayerConfig(mixer="gated_delta"),) * 2 + (LayerConfig(),),
        "gated_delta": DELTA,
    },
    "as in Cohere 2": {
        "centered_norms": True,
        "parallel_branches": True,
        "layers": (*WINDOWED[:2], LayerConfig(rotary=False)),
        "logit_multiplier": 0.7,
    },
    "chunks": {"layers": (LayerConfig(chunk=6), LayerConfig(), LayerConfig(chunk=5))},
    "query scale of layers without rotation": {
        "layers": (LayerConfig(rotary=False), LayerConfig(), LayerConfig(rotary=False)),
        "query_scale": QueryScaleConfig(strength=0.7, floor=4),
    },
    "bare norms": {"qk_norm": "bare", "layers": (LayerConfig(rotary=False), *(LayerConfig(),) * 2)},
    "as in Llama 4": {
        "qk_norm": "bare",
        "qk_norm_after_rotary": True,
        "query_scale": QueryScaleConfig(strength=0.7, floor=4),
        "layers": (
            LayerConfig(chunk=6, experts=True),
            LayerConfig(chunk=6),
            LayerConfig(rotary=False, experts=True),
        ),
        "experts": ExpertsConfig(
            count=6,
            size=40,
            per_token=2,
            shared_size=56,
            normalized=False,
            scores="sigmoid",
            weighted_inputs=True,
        ),
    },
    "as in Nemotron H": {
        "mlp_gate": False,
        "activation": "relu2",
        "wide_norms": True,
        "layers": (
            LayerConfig(mixer="mamba2", feed_forward=False),
            LayerConfig(mixer="none"),
            LayerConfig(rotary=False, feed_forward=False),
            LayerConfig(mixer="none", experts=True),
        ),
        "mamba2": MAMBA,
        "experts": ExpertsConfig(
            count=6,
            size=40,
            per_token=2,
            shared_size=56,
            score_correction=True,
            float32_router=True,
            scores="sigmoid",
            normalization_eps=1e-20,
            scaling=2.5,
        ),
    },
    "query scale": {"rope": replace(PLAIN_ROPE, original_context=4, query_scaling_beta=0.7)},
    "outside of blocks": {
        "embedding_multiplier": 3.0,
        "logit_multiplier": 0.5,
        "logit_softcap": 2.0,
    },
    "as in Gemma 2": {
        "norms": "both",
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "attention_scale": 0.1,
        "attention_softcap": 0.7,
        "layers": WINDOWED,
        "embedding_multiplier": 8.0,
        "logit_softcap": 30.0,
    },
    "all": {
        "norms": "both",
        "norm_offset": 1.0,
        "activation": "swiglu_oai",
        "activation_limit": 0.5,
        "mlp_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "attention_scale": 0.1,
        "attention_softcap": 0.7,
        "sinks": True,
        "residual_multiplier": 0.3,
        "qk_norm": "width",
        "clip_qkv": 1.5,
        "layers": WINDOWED,
        "window_rope": replace(PLAIN_ROPE, theta=50.0),
        "rope": replace(PLAIN_ROPE, original_context=4, query_scaling_beta=0.7),
    },
}


def _checkpoint(**features: Any) -> RandomWeights:
    raw = oracle.make("llama").config.to_dict()
    config: ModelConfig = replace(config_from_hf(raw, Path("config.json")), **features)
    schemes = Recipe(QuantScheme.parse("int8")).assign(linear_columns(config))
    return RandomWeights(Path("random"), config, schemes)


def _model(**features: Any) -> Decoder:
    return load_model(_checkpoint(**features), dtype=torch.float32, backend="cpu-exact")


def _logits(
    model: Decoder,
    tokens: Tensor,
    steps: list[int],
    cached: torch.dtype = torch.float32,
    *,
    is_prefill: bool = False,
) -> Tensor:
    """Logits [B, T, V], so many tokens at a time through the cache, the first among themselves
    if `is_prefill`.
    """
    cache, parts, start = KVCache(model.config, len(tokens), tokens.shape[1], cached, "cpu"), [], 0
    with torch.inference_mode():
        for count in steps:
            given = tokens[:, start : start + count], torch.arange(start, start + count), cache
            parts.append(model.head(model.hidden(*given, is_prefill=is_prefill and start == 0)))
            start += count
    return torch.cat(parts, dim=1)


STEPS = [5, 1, 1, 20, 1, 1, 3, 1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FEATURES)
def test_blocks_in_one_call_give_the_modules_logits(name: str) -> None:
    model, tokens = _model(**FEATURES[name]), oracle.random_tokens(33, batch=2)
    assert model.ops.blocks is not None
    found = [_logits(model, tokens, STEPS, is_prefill=is_prefill) for is_prefill in (True, False)]
    with torch.inference_mode():
        found.append(model(tokens, torch.arange(33)))
    rounded = _logits(model, tokens, STEPS, torch.int8)
    model.ops = replace(model.ops, blocks=None)
    expected = _logits(model, tokens, STEPS)
    for logits in found:
        assert (logits - expected).abs().max() < 1e-3 * expected.std()
    assert (rounded - _logits(model, tokens, STEPS, torch.int8)).abs().max() < 0.02 * expected.std()
    without = _logits(_model(), tokens, STEPS)
    assert (without - expected).abs().max() > 0.1 * expected.std()  # the feature shows


@pytest.mark.parametrize(
    "name",
    [
        "all",
        "short convolution, biases",
        "as in Qwen3.5",
        "state space",
        "norms after rotation, clip, query scale",
        "as in Cohere 2",
        "as in Nemotron H",
        "as in Llama 4",
    ],
)
@pytest.mark.parametrize("cached", [torch.float32, torch.int8], ids=str)
def test_rows_of_any_sequences_are_each_as_if_alone(cached: torch.dtype, name: str) -> None:
    model, texts = _model(**FEATURES[name]), oracle.random_tokens(30, batch=3)
    shared = KVCache(model.config, 5, 31, cached, "cpu")
    slots = torch.tensor([4, 0, 2])
    found: list[list[Tensor]] = [[], [], []]
    with torch.inference_mode():
        for piece in ([(0, 0, 7)], [(2, 0, 3), (0, 7, 1)], [(1, 0, 25), (0, 8, 1), (2, 3, 2)]):
            rows = [(text, start + place) for text, start, count in piece for place in range(count)]
            tokens = torch.stack([texts[row] for row in rows]).unsqueeze(1)
            where = torch.tensor([[position] for _, position in rows])
            hidden = model.hidden(tokens, where, shared, slots=slots[[text for text, _ in rows]])
            for (text, _), row in zip(rows, hidden[:, 0], strict=True):
                found[text].append(row)
        for text, steps in enumerate(([7, 1, 1], [25], [3, 2])):
            alone = KVCache(model.config, 1, 31, cached, "cpu")
            start = 0
            for count in steps:
                own = (
                    texts[text : text + 1, start : start + count],
                    torch.arange(start, start + count),
                    alone,
                )
                assert torch.equal(
                    model.hidden(*own)[0], torch.stack(found[text][start : start + count])
                )
                start += count


FORGOTTEN: dict[str, tuple[str, Any]] = {
    "query scale": ("query_scales", None),
    "query scale of layers without rotation": ("query_scales", None),
    "chunks": ("chunk", 0),
    "window rope": ("window", 0),
    "scale": ("scale", None),
    "softcap": ("softcap", None),
    "clip": ("clip", None),
    "gelu": ("activation", "silu"),
    "swiglu_oai": ("limit", None),
    "residual multiplier": ("multiplier", 1.0),
    "norms after rotation": ("norms_rotated", False),
    "centered norms on both sides": ("centered", False),
    "parallel": ("parallel", False),
}
"""By the feature, the operand that a wrong kernel does not look at, and what it does instead."""


class _Forgetful:
    """Kernels that do something for all blocks, or all attention, that a block's features do not
    say.
    """

    def __init__(self, operand: str, instead: Any, *operators: str) -> None:
        self._operand, self._instead, self._operators = operand, instead, operators
        self._kernels = load_kernels()

    def __getattr__(self, name: str) -> Any:
        return (
            getattr(self, f"_{name}") if name in self._operators else getattr(self._kernels, name)
        )

    def _prepare_blocks(self, blocks: Sequence[BlockOperands], exact: bool) -> Blocks:
        def changed(settings: tuple[Any, ...]) -> tuple[Any, ...]:
            named = dict(zip(PLAIN_SETTINGS, settings, strict=True))
            return tuple((named | {self._operand: self._instead}).values())[: len(PLAIN_SETTINGS)]

        prepared: Blocks = self._kernels.prepare_blocks(
            [(*halves, changed(own)) for *halves, own in blocks], exact
        )
        return prepared

    def _run_blocks(
        self, x: Tensor, blocks: int, angles: list[Tensor], query_scales: list[Any], *operands: Any
    ) -> None:
        if self._operand == "query_scales":
            query_scales = [self._instead] * len(query_scales)
        self._kernels.run_blocks(x, blocks, angles, query_scales, *operands)

    def _cached_attention(self, *operands: Any) -> Tensor:
        changed = list(operands)
        changed[("window", "scale", "softcap", "sinks").index(self._operand) + 7] = self._instead
        mixed: Tensor = self._kernels.cached_attention(*changed)
        return mixed


@pytest.mark.parametrize("feature", FORGOTTEN)
def test_a_block_kernel_that_forgets_a_feature_is_found_at_load(
    feature: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = _Forgetful(*FORGOTTEN[feature], "prepare_blocks", "run_blocks")
    monkeypatch.setattr(cpu, "load_kernels", lambda: kernels)
    assert _model(**FEATURES[feature]).ops.blocks is None
    assert "decoder blocks" in caplog.text


@pytest.mark.parametrize(
    ("features", "operand", "instead"),
    [
        (FEATURES["scale"], "scale", 0.25),
        ({"attention_softcap": 50.0}, "softcap", None),
        ({"attention_softcap": 20.0, "attention_scale": 0.01}, "softcap", None),
        (FEATURES["sinks"], "sinks", None),
        ({"layers": (LayerConfig(), LayerConfig(), LayerConfig(window=4096))}, "window", 0),
    ],
    ids=["scale", "softcap", "softcap, scale", "sinks", "window"],
)
def test_attention_that_forgets_a_feature_is_found_at_load(
    features: dict[str, Any],
    operand: str,
    instead: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels = _Forgetful(operand, instead, "cached_attention")
    monkeypatch.setattr(cpu, "load_kernels", lambda: kernels)
    assert _model(**features).ops.blocks is None
    assert "attention" in caplog.text


def test_a_bfloat16_model_with_sinks_attends_by_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without blocks in one call, by its modules."""
    checkpoint = _checkpoint(**FEATURES["all"])
    kept = {name: scheme for name, scheme in checkpoint.schemes.items() if "layers.1." not in name}
    model = load_model(dataclasses.replace(checkpoint, schemes=kept), backend="cpu-exact")
    assert model.ops.blocks is not None
    model.ops = dataclasses.replace(model.ops, blocks=None)
    tokens = oracle.random_tokens(33, batch=2)
    found = _logits(model, tokens, STEPS, torch.bfloat16)
    exact = load_model(
        dataclasses.replace(checkpoint, schemes=kept), dtype=torch.float32, backend="reference"
    )
    expected = _logits(exact, tokens, STEPS)
    assert (found - expected).abs().max() < 0.2 * expected.std()
