"""Decoder blocks through Triton against their modules: through Triton's interpreter, or on a GPU
where there is one.

Run as `triton_products` is, in a separate process.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_quick import quicken

import quantkit
from quantkit.architectures.config import LayerConfig
from quantkit.architectures.topology import linear_columns
from quantkit.evals.synthetic import SyntheticCheckpoint, synthetic
from quantkit.kernels import (
    dispatch,
    triton_attention,
    triton_block,
    triton_projections,
    triton_qkv,
)
from quantkit.kernels.dispatch import list_allowed_backends
from quantkit.kernels.triton_backend import TritonBackend
from quantkit.kernels.triton_words import INTERPRETED
from quantkit.model import install_kernels
from quantkit.model.attention import attend_with_mask, make_cached_attention
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.fused_blocks import FusedBlocks, fuse_blocks
from quantkit.model.load import fill_parameters, meta_init
from quantkit.model.mixers.mixer import Step
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

quicken()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LENGTH = 40
SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "layers": (LayerConfig(),),
}
ROPE, BETA = (
    synthetic("llama-160m", None).config.rope,
    {"query_scaling_beta": 0.3, "original_context": 4},
)
FEATURES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "two plain ones": ("int4-g32-asym", torch.float16, {"layers": (LayerConfig(),) * 2}),
    "bfloat16": ("int4-g32", torch.bfloat16, {"head_dim": 48}),
    "biases, norms of heads, a window, gelu": (
        "int8",
        torch.float16,
        {
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "qk_norm": "head",
            "activation": "gelu_tanh",
            "layers": (LayerConfig(window=5),),
            "norm_offset": 1.0,
            "rope": replace(ROPE, **BETA),
        },
    ),
    "scores, limits, no rotary positions": (
        "int4-g32",
        torch.float16,
        {
            "attention_scale": 0.3,
            "attention_softcap": 4.0,
            "sinks": True,
            "clip_qkv": 0.8,
            "residual_multiplier": 0.4,
            "activation": "swiglu_oai",
            "activation_limit": 1.5,
            "layers": (LayerConfig(rotary=False),),
        },
    ),
}

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"
)


class RandomWeights(SyntheticCheckpoint):
    """Random weights that are large, with norms, biases and sinks that differ."""

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        weight = super().load(name)
        if isinstance(weight, QuantTensor):
            weight = replace(weight, scale=weight.scale * 4)
        elif weight.dim() == 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight = weight + torch.randn(weight.shape, generator=generator).to(weight.dtype) / 4
        return weight if part is None else part.of_weight(weight)


@pytest.fixture(autouse=True)
def _products_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton_products` tries them."""
    monkeypatch.setattr(dispatch, "self_test", lambda *case: None)


def _model(text: str, dtype: torch.dtype, **features: Any) -> Decoder:
    """A small model as it is before kernels are put in."""
    config = replace(synthetic("llama-160m", None).config, **{**SMALL, **features})
    schemes = Recipe(QuantScheme.parse(text)).assign(linear_columns(config))
    with meta_init():
        model = Decoder(config)
    fill_parameters(
        model,
        RandomWeights(Path("random"), config, schemes),
        "",
        DEVICE,
        dtype,
        list_allowed_backends("triton"),
    )
    model.rotary.to(DEVICE)
    return model.eval()


def _blocks(model: Decoder) -> FusedBlocks:
    blocks = fuse_blocks(model)
    assert blocks is not None
    return blocks


STEPS: list[tuple[list[int], list[int]]] = [([2, 0], [0, 3]), ([1, 2, 0], [7, 8, 3]), ([2], [9])]
"""Of each step the slots of its sequences, and where their tokens begin; `COUNTS` of each."""
COUNTS = 3, 1, 16


def _list_rows(cache: KVCache) -> list[CachedRows]:
    """The keys and values of all layers."""
    rows: list[CachedRows] = []
    for layer in range(len(cache.layers)):
        rows += (cache.rows(layer).keys, cache.rows(layer).values)
    return rows


def _both(model: Decoder, cached: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each step the hidden states, what the blocks give for them, and what the modules give."""
    blocks, config, given = _blocks(model), model.config, []
    own, modules = (KVCache(config, 3, LENGTH, cached, DEVICE) for _ in range(2))
    torch.manual_seed(0)
    with torch.inference_mode():
        for (slots, starts), count in zip(STEPS, COUNTS, strict=True):
            positions = torch.tensor(starts, device=DEVICE).unsqueeze(1) + torch.arange(
                count, device=DEVICE
            )
            places = torch.tensor(slots, device=DEVICE)
            angles = model.rotary(positions)
            x = torch.randn(*positions.shape, config.hidden_size).to(DEVICE, model.dtype)
            step = Step(
                angles,
                make_cached_attention(modules, positions, config.windows, attend_with_mask, places),
            )
            expected = x
            for block in model.model.layers:
                expected = block(expected, step)
            given.append(
                (x, blocks(x.clone(), positions, angles, own, places, is_prefill=False), expected)
            )
    for found, right in zip(_list_rows(own), _list_rows(modules), strict=True):
        stored, wanted = found.floats(torch.float32), right.floats(torch.float32)
        assert (stored - wanted).abs().max() < (
            0.06 if model.dtype == torch.bfloat16 else 0.02
        ) * wanted.abs().max()
        assert torch.equal(stored.any(-1), wanted.any(-1))  # nothing else was written
    return given


@pytest.mark.parametrize(
    ("name", "cached"),
    [
        ("two plain ones", None),
        ("bfloat16", torch.int8),
        *((name, None) for name in list(FEATURES)[2:]),
        ("scores, limits, no rotary positions", torch.int8),
    ],
)
def test_blocks_give_what_their_modules_give(name: str, cached: torch.dtype | None) -> None:
    text, dtype, features = FEATURES[name]
    model = _model(text, dtype, **features)
    for x, found, expected in _both(model, cached or dtype):
        added = (expected - x).float()
        assert found.dtype == dtype
        share = (0.1 if dtype == torch.bfloat16 else 0.01) + (0.02 if cached else 0)
        assert (found.float() - expected.float()).abs().max() < share * added.std()
    for block in model.model.layers:
        for name, buffer in block.named_buffers():
            assert not name.endswith("arrived") or not buffer.any()


def _cache(model: Decoder) -> KVCache:
    return KVCache(model.config, 1, LENGTH, model.dtype, DEVICE)


def test_a_block_is_five_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self._kernel.__name__)
            return wrap(self._kernel)[grid]

    wrap = triton_qkv.wrap_triton
    for module in (triton_attention, triton_projections, triton_qkv):
        monkeypatch.setattr(module, "wrap_triton", Counted)
    model = _model("int8", torch.float16, layers=(LayerConfig(),) * 2)
    positions = torch.arange(2, device=DEVICE)
    x = torch.randn(1, 2, 96).to(DEVICE, torch.float16)
    with torch.inference_mode():
        _blocks(model)(x, positions, model.rotary(positions), _cache(model), is_prefill=True)
    block = ["project_heads", "attend_and_join", "add_product", "gate_product", "add_product"]
    assert launched == ["weigh_states", *block, *block]


def test_blocks_compile_into_one_graph_in_any_mode() -> None:
    model = _model("int8", torch.float16)
    with torch.inference_mode():
        blocks = _blocks(model)
    x, positions = torch.randn(1, 2, 96).to(DEVICE, torch.float16), torch.arange(2, device=DEVICE)

    def step(x: Tensor, cache: KVCache) -> Tensor:
        return blocks(x, positions, model.rotary(positions), cache, is_prefill=True) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(compiled(x, _cache(model)), step(x, _cache(model)))


def test_steps_that_they_do_not_serve_run_the_modules() -> None:
    model = _model("int8", torch.float16)
    blocks, cache = _blocks(model), _cache(model)
    few, many = (torch.zeros(2, count, 96, device=DEVICE) for count in (8, 9))
    assert blocks.serves(few, cache)
    assert not blocks.serves(many, cache)
    assert not blocks.serves(few, None)


@pytest.mark.parametrize(
    ("dtype", "features"),
    [
        (torch.float32, {}),
        (torch.float16, {"qk_norm": "width"}),
        (torch.float16, {"norms": "both"}),
        (torch.float16, {"head_dim": 24}),
    ],
    ids=str,
)
def test_models_that_they_do_not_serve_run_the_modules(
    dtype: torch.dtype, features: dict[str, Any]
) -> None:
    assert fuse_blocks(_model("int8", dtype, **features)) is None


@pytest.mark.parametrize(
    "name", ["project_qkv", "project_and_gate", "project_and_add", "attend_to_cache"]
)
def test_kernels_that_are_wrong_are_found_out_at_load(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model("int8", torch.float16)
    right = getattr(triton_block, name)

    def slightly_off(*operands: Any) -> Any:
        out = right(*operands)
        (out if isinstance(out, Tensor) else out[0])[..., -1] *= 1.2
        return out

    monkeypatch.setattr(triton_block, name, slightly_off)
    with torch.inference_mode():
        assert not install_kernels._same_blocks(model)


def test_blocks_that_add_nothing_are_right() -> None:
    """As those that a model was grown by."""
    model = _model("int8", torch.float16)
    block = model.model.layers[0]
    for linear in (block.self_attn.o_proj, block.mlp.down_proj):
        linear.scale.zero_()
    with torch.inference_mode():
        assert install_kernels._same_blocks(model)


def test_large_states_and_norms_stay_within_float16() -> None:
    model = _model("int8", torch.float16)
    block = model.model.layers[0]
    for norm in (block.input_layernorm, block.post_attention_layernorm):
        norm.weight.data.mul_(300)
    for linear in (block.self_attn.qkv_proj, block.mlp.gate_up_proj):
        linear.scale.mul_(1 / 300)
    positions = torch.arange(2, device=DEVICE)
    x = torch.randn(1, 2, 96).to(DEVICE, torch.float16) * 9000
    angles = model.rotary(positions)
    with torch.inference_mode():
        found = _blocks(model)(x.clone(), positions, angles, _cache(model), is_prefill=True)
        step = Step(
            angles,
            make_cached_attention(_cache(model), positions, model.config.windows, attend_with_mask),
        )
        expected = block(x, step)
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= 32  # a step or two of the largest


def test_the_operators_pass_torchs_own_checks() -> None:
    model = _model("int4-g32-asym", torch.float16)
    linear = model.model.layers[0].self_attn.qkv_proj
    weight = linear.words, linear.scale, linear.zero, None, linear.arrived, 32
    x, norm = torch.randn(2, 96).to(DEVICE, torch.float16), torch.ones(96, device=DEVICE)
    weighted, squares = triton_projections.apply_norm_weights(x, norm)
    rows, scales = (
        torch.zeros(1, 2, LENGTH, 32, dtype=torch.int8, device=DEVICE),
        torch.zeros(1, 2, LENGTH, device=DEVICE),
    )
    positions, angles = torch.arange(2, device=DEVICE), torch.ones(2, 32, device=DEVICE)
    cached = rows, scales, rows.clone(), scales.clone()
    turn = angles, angles, None, positions, None, 1
    operators = torch.ops.quantkit_triton
    torch.library.opcheck(operators.weighted_states.default, (x, norm))
    torch.library.opcheck(
        operators.projected_heads.default,
        (weighted, squares, *weight, 1e-5, 1.0, None, 0.0, *turn, *cached),
    )
    torch.library.opcheck(
        operators.gated_product.default, (weighted, squares, *weight, 1e-5, 1.0, 0, 0.0, 1.7)
    )
    out = model.model.layers[0].self_attn.o_proj
    weight = out.words, out.scale, out.zero, None, out.arrived, 32
    mixed = torch.randn(2, 128).to(DEVICE, torch.float16)
    torch.library.opcheck(operators.added_product.default, (mixed, x, *weight, norm, 1.0))
    queries = torch.randn(1, 4, 2, 32).to(DEVICE, torch.float16)
    arrived = triton_attention.attention_counters(2, 4, 2, DEVICE)
    options = None, None, None, None, None, arrived, None
    torch.library.opcheck(
        operators.cached_attention.default, (queries, *cached, positions, *options)
    )


def test_a_model_says_the_same_through_blocks_and_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        install_kernels, "_same_attention", lambda *case: True
    )  # `triton_attention` tries it
    model = _model("int4-g32", torch.float16, qk_norm="head")
    install_kernels.install_kernels(model)
    assert model.ops.blocks is not None
    said = []
    for blocks in (model.ops.blocks, None):
        model.ops = replace(model.ops, blocks=blocks)
        said.append(list(quantkit.generate(model, [5, 17, 40], max_new_tokens=3)))
    assert said[0] == said[1]
    assert len(said[0]) == 3


def test_a_setting_chooses_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TritonBackend().offer_kernels().block is not None
    monkeypatch.setenv("QUANTKIT_BLOCKS", "0")
    assert TritonBackend().offer_kernels().block is None
