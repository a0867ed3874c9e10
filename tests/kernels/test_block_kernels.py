"""The C++ kernels for attention and for whole blocks: each feature, and all together, against
float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import require_close
from fused_blocks import list_settings
from instruction_sets import DTYPES, HERE
from torch import Tensor

from quantkit.kernels.cpu_operators import BlockOperands, Blocks
from quantkit.kernels.library import load_kernels
from quantkit.tensors.cached_rows import CachedRows, to_cached_rows
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

INT8 = QuantScheme.parse("int8")
SCORES = {
    "capped": (0.3, 4.0, False, None),
    "with sinks": (0.2, None, True, 100),
    "capped, with sinks": (0.05, 1.5, True, None),
    "capped, with sinks, in a window": (0.05, 1.5, True, 100),
}
"""Scale, soft cap, whether heads have sinks, window."""
ATTENTION_SHAPES = [(8, 2, 1, 600, 64), (4, 4, 3, 300, 80), (6, 1, 33, 260, 20)]
"""Heads, KV heads, tokens, length of the cache, head size."""


def _mixed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Values mixed by attention, [B, T, H Dh], in float64; `seen` [T, S] or [B, 1, T, S]."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (rows.double().repeat_interleave(group, 1) for rows in (keys, values))
    scores = queries.double() @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        alone = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, alone], dim=-1)
    shares = torch.softmax(scores, -1)[..., : keys.shape[2]]
    return (shares @ values).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("variant", HERE)
def test_attention_scores_are_capped_and_sinks_take_their_share(variant: str) -> None:
    operator = load_kernels(variant).cached_attention
    for scores, dtype, shape in itertools.product(SCORES, DTYPES, ATTENTION_SHAPES):
        heads, shared, tokens, length, size = shape
        scale, softcap, has_sinks, window = SCORES[scores]
        queries = torch.randn(2, heads, tokens, size).to(dtype)
        keys, values = torch.randn(2, 2, shared, length, size).to(dtype)
        sinks = torch.linspace(-3, 9, heads) if has_sinks else None
        positions = torch.arange(length - tokens, length)
        product = operator(
            queries, keys, None, values, None, positions, None, window or 0, scale, softcap, sinks
        )
        distance = positions.unsqueeze(-1) - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))
        expected = _mixed(queries, keys, values, seen, scale, softcap, sinks)
        tolerance = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        case = scores, dtype, shape
        require_close(product.double(), expected, case, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("tokens", [1, 20])
def test_capped_scores_are_right_whatever_their_size(variant: str, tokens: int) -> None:
    """The value of a lone key is its share beside a sink, which tells its score."""
    cap, products = 5.0, torch.cat([torch.linspace(-9, 9, 500), 10 ** torch.linspace(-6, 30, 500)])
    keys = products.view(-1, 1, 1, 1) * torch.eye(4)[0]
    queries, ones = (
        torch.eye(4)[0].expand(len(products), 1, tokens, 4),
        torch.ones(len(products), 1, 1, 4),
    )
    keys, values = (
        torch.cat([rows, torch.zeros(len(products), 1, tokens, 4)], dim=2) for rows in (keys, ones)
    )
    positions = torch.zeros(tokens, dtype=torch.int64)
    operator = load_kernels(variant).cached_attention
    found = operator(
        queries, keys, None, values, None, positions, None, 0, 1.0, cap, torch.zeros(1)
    )
    expected = torch.sigmoid(cap * torch.tanh(products.double() / cap))
    torch.testing.assert_close(found[:, -1, 0].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_sink_far_above_or_below_all_scores_takes_all_or_nothing(
    variant: str, tokens: int
) -> None:
    queries, keys = torch.randn(1, 3, tokens, 32), torch.randn(1, 3, 300, 32)
    positions = torch.arange(300 - tokens, 300)
    operator = load_kernels(variant).cached_attention
    sinks = torch.tensor([500.0, -500.0, -math.inf])
    found = operator(
        queries, keys, None, keys, None, positions, None, 0, 0.2, None, sinks
    ).unflatten(-1, (3, 32))
    without = operator(queries, keys, None, keys, None, positions, None, 0, 0.2).unflatten(
        -1, (3, 32)
    )
    assert found[:, :, 0].abs().max() < 1e-30
    torch.testing.assert_close(found[:, :, 1:], without[:, :, 1:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("tokens", [1, 20])
def test_capped_attention_hands_on_what_is_not_finite(variant: str, tokens: int) -> None:
    queries, keys = torch.randn(1, 2, tokens, 32), torch.randn(1, 2, 90, 32)
    values = keys.clone()
    keys[0, 1, 4, 3] = torch.nan
    positions = torch.arange(70 - tokens, 70)
    operator = load_kernels(variant).cached_attention
    found = operator(
        queries, keys, None, values, None, positions, None, 0, 1.0, 5.0, torch.tensor([0.0, 1.0])
    )
    assert found[..., :32].isfinite().all()
    assert found[..., 32:].isnan().all()
    found = operator(
        queries,
        values,
        None,
        values,
        None,
        positions,
        None,
        0,
        1.0,
        None,
        torch.tensor([torch.nan, 1.0]),
    )
    assert found[..., :32].isnan().all()
    assert found[..., 32:].isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"softcap": 0.0},
        {"softcap": -1.0},
        {"sinks": torch.zeros(3)},
        {"sinks": torch.zeros(2).double()},
    ],
    ids=str,
)
def test_scores_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    keys = torch.zeros(1, 1, 9, 32)
    settings = {"softcap": None, "sinks": None} | wrong
    (name,) = wrong
    with pytest.raises(RuntimeError, match=name):
        load_kernels().cached_attention(
            torch.zeros(1, 2, 1, 32),
            keys,
            None,
            keys,
            None,
            torch.tensor([3]),
            None,
            0,
            1.0,
            *settings.values(),
        )


HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 64, 96, 4, 2, 32
LINEAR_PARTS = {
    "qkv": {"query": HEADS * SIZE, "key": KV_HEADS * SIZE, "value": KV_HEADS * SIZE},
    "out": {"out": HIDDEN},
    "gate_up": {"gate": INNER, "up": INNER},
    "down": {"down": HIDDEN},
}
"""Rows of what may be one linear or several."""


PARTS = frozenset({"query", "key", "value", "out", "gate", "up", "down"})


@dataclass(frozen=True)
class Features:
    """What a block does besides Llama's."""

    norms: tuple[bool, bool] = (True, False)  # before, and after
    query_norm: int | None = None
    key_norm: int | None = None
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    clip: float | None = None
    norms_rotated: bool = False
    query_scale: bool = False
    centered: bool = False
    parallel: bool = False
    activation: str = "silu"
    limit: float | None = None
    multiplier: float = 1.0
    biases: bool = False
    floats: torch.dtype | None = None  # of the weights in `float_parts`, which are then apart
    float_parts: frozenset[str] = PARTS


ALL = Features(
    norms=(True, True),
    query_norm=HEADS * SIZE,
    key_norm=KV_HEADS * SIZE,
    window=9,
    scale=0.1,
    softcap=3.0,
    sinks=True,
    clip=1.5,
    query_scale=True,
    activation="swiglu_oai",
    limit=0.7,
    multiplier=0.4,
    biases=True,
)
FEATURES = {
    "llama": Features(),
    "norms after": Features(norms=(False, True)),
    "norms both": Features(norms=(True, True)),
    "no norms": Features(norms=(False, False)),
    "head norms": Features(query_norm=SIZE, key_norm=SIZE),
    "width norms": Features(query_norm=HEADS * SIZE, key_norm=KV_HEADS * SIZE),
    "window": Features(window=4),
    "chunk": Features(chunk=4),
    "chunk, longer than a step": Features(chunk=11),
    "scale": Features(scale=0.05),
    "softcap": Features(softcap=2.0),
    "sinks": Features(sinks=True),
    "clip": Features(clip=0.7),
    "clip before head norms": Features(query_norm=SIZE, key_norm=SIZE, clip=0.7),
    "head norms after the rotation": Features(query_norm=SIZE, key_norm=SIZE, norms_rotated=True),
    "clip, then norms, then a query scale": Features(
        query_norm=SIZE, key_norm=SIZE, norms_rotated=True, clip=0.7, query_scale=True
    ),
    "centered norms": Features(centered=True),
    "centered norms on both sides": Features(centered=True, norms=(True, True), multiplier=0.4),
    "parallel": Features(parallel=True),
    "parallel, centered": Features(parallel=True, centered=True, norms=(True, True), biases=True),
    "parallel, no norms": Features(parallel=True, norms=(False, False)),
    "relu2": Features(activation="relu2", biases=True),
    "query scale": Features(query_scale=True),
    "gelu": Features(activation="gelu_tanh"),
    "swiglu_oai": Features(activation="swiglu_oai", limit=0.5),
    "swiglu_oai without a limit": Features(activation="swiglu_oai"),
    "multiplier": Features(multiplier=0.22),
    "biases": Features(biases=True),
    "all": ALL,
    "floats apart": Features(floats=torch.float32),
    "bfloat16 with biases": Features(floats=torch.bfloat16, biases=True),
    "float16": Features(floats=torch.float16),
    "values and up of floats": replace(
        ALL, floats=torch.bfloat16, float_parts=frozenset({"value", "up"})
    ),
    "queries, values, gate and down of floats": Features(
        floats=torch.float16,
        float_parts=frozenset({"query", "value", "gate", "down"}),
        biases=True,
    ),
}
FLOATS = [name for name in FEATURES if FEATURES[name].floats is not None]


@dataclass(frozen=True)
class ExampleStep:
    """Where the rows of a step are: positions [B, T], and the sequences' slots [B]."""

    positions: Tensor
    slots: Tensor
    prefill: bool

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        frequencies = 100.0 ** (-torch.arange(SIZE // 2) * 2 / SIZE)
        turns = self.positions.unsqueeze(-1) * torch.cat([frequencies, frequencies])
        return turns.cos() * 1.1, turns.sin() * 1.1

    @property
    def query_scale(self) -> Tensor:
        return 1 + 0.3 * torch.log1p(self.positions // 8)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * cosine.double().unsqueeze(1) + half * sine.double().unsqueeze(1)


@dataclass
class ExampleBlock:
    """A block of random weights: as the operator takes them, and in float64."""

    features: Features
    ops: Any
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, QuantTensor] = field(default_factory=dict)
    floats: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        own = self.features
        shapes = {
            "qkv": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
            "out": (HIDDEN, HEADS * SIZE),
            "gate_up": (INNER if own.activation == "relu2" else 2 * INNER, HIDDEN),
            "down": (HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            self.weights[name] = quantize_rtn(drawn(*shape) / shape[1] ** 0.5, INT8, torch.float32)
            self.tensors[f"{name}_bias"] = drawn(shape[0]) if own.biases else None
            if own.floats is not None:
                rows = list(LINEAR_PARTS[name].values())
                dense = self.weights[name].dequantize().to(own.floats).split(rows)
                for part, weight in zip(LINEAR_PARTS[name], dense, strict=True):
                    if part in own.float_parts:
                        self.floats[part] = weight
        widths = {
            "query_norm": own.query_norm,
            "key_norm": own.key_norm,
            "sinks": HEADS if own.sinks else None,
        }
        for half in ("attention", "feed_forward"):
            for place, there in zip(("before", "after"), own.norms, strict=True):
                widths[f"{half}_{place}"] = HIDDEN if there else None
        for name, width in widths.items():
            self.tensors[name] = None if width is None else 1 + drawn(width) / 4

    def _operands(self, name: str) -> list[Tensor | None]:
        """Weights and biases of a linear's parts; of one alone, if none of them is of floats."""
        parts = LINEAR_PARTS[name]
        whole, bias = self.weights[name], self.tensors[f"{name}_bias"]
        operands: list[Tensor | None] = []
        apart = self.features.floats is not None
        start = 0
        for part, rows in parts.items() if apart else [(name, len(whole.codes))]:
            own = slice(start, start + rows)
            if part in self.floats:
                operands.append(self.floats[part])
            else:
                part_rows = whole.rows(start, start + rows)
                operands.append(self.ops.pack([part_rows], rows, exact=True))
            operands.append(None if bias is None else bias[own])
            start += rows
        return operands + [None] * (2 * len(parts) - len(operands))

    def run(self, x: Tensor, step: ExampleStep, stored: Sequence[CachedRows] | None) -> Tensor:
        """Through the operator; hidden states [B, T, D]."""
        own, of = self.features, self.tensors
        attention = [
            of["attention_before"],
            *self._operands("qkv"),
            of["query_norm"],
            of["key_norm"],
            of["sinks"],
            *self._operands("out"),
            of["attention_after"],
        ]
        feed_forward = [
            of["feed_forward_before"],
            *self._operands("gate_up"),
            *self._operands("down"),
            of["feed_forward_after"],
        ]
        out = x.clone()
        rows = (
            [] if stored is None else [part for each in stored for part in each if part is not None]
        )
        settings = list_settings(
            heads=HEADS,
            kv_heads=KV_HEADS,
            window=own.window or 0,
            chunk=own.chunk or 0,
            scale=own.scale,
            softcap=own.softcap,
            clip=own.clip,
            norms_rotated=own.norms_rotated,
            activation=own.activation,
            limit=own.limit,
            centered=own.centered,
            multiplier=own.multiplier,
            parallel=own.parallel,
        )
        blocks = self.ops.prepare_blocks([("attention", attention, feed_forward, settings)])
        self.ops.run_blocks(
            out,
            blocks.number,
            step.angles,
            [step.query_scale if own.query_scale else None],
            step.positions,
            step.slots,
            rows,
            step.prefill,
        )
        return out

    def expected(self, x: Tensor, step: ExampleStep, stored: Sequence[CachedRows]) -> Tensor:
        """The same in float64, over the cache as it is after that."""
        own, of = self.features, self.tensors
        wide = x.double()
        projected = self._linear("qkv", self._hidden_norm(wide, of["attention_before"]))
        queries, keys, values = projected.split(
            [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1
        )
        if own.query_norm != SIZE:
            queries, keys = self._norm(queries, of["query_norm"]), self._norm(keys, of["key_norm"])
        if own.clip is not None:
            queries, keys, values = (
                part.clamp(-own.clip, own.clip) for part in (queries, keys, values)
            )
        queries, keys, values = (
            part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (queries, keys, values)
        )
        if own.query_norm == SIZE and not own.norms_rotated:
            queries, keys = self._norm(queries, of["query_norm"]), self._norm(keys, of["key_norm"])
        queries, keys = (_turned(part, *step.angles) for part in (queries, keys))
        if own.norms_rotated:
            queries, keys = self._norm(queries, of["query_norm"]), self._norm(keys, of["key_norm"])
        if own.query_scale:
            queries = queries * step.query_scale[:, None, :, None].double()
        distance = step.positions.unsqueeze(-1) - step.positions.unsqueeze(-2)
        if not step.prefill:
            keys, values = (rows.of_slots(step.slots).floats(torch.float64) for rows in stored)
            distance = step.positions.unsqueeze(-1) - torch.arange(keys.shape[2])
        seen = (distance >= 0) & (distance < (own.window or 10**6))
        if own.chunk is not None:
            places = step.positions.unsqueeze(-1)
            seen &= distance <= places % own.chunk
        mixed = _mixed(
            queries,
            keys,
            values,
            seen.unsqueeze(1),
            own.scale or SIZE**-0.5,
            own.softcap,
            of["sinks"],
        )
        before = wide
        attended = self._hidden_norm(self._linear("out", mixed), of["attention_after"])
        wide = wide + own.multiplier * attended
        source = before if own.parallel else wide
        gates = self._linear("gate_up", self._hidden_norm(source, of["feed_forward_before"]))
        if own.activation == "relu2":
            inner = gates.clamp(min=0).square()
        else:
            inner = _gated(own.activation, own.limit, *gates.chunk(2, -1))
        return wide + own.multiplier * self._hidden_norm(
            self._linear("down", inner), of["feed_forward_after"]
        )

    def _hidden_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or not self.features.centered:
            return self._norm(x, weight)
        return F.layer_norm(x, x.shape[-1:], weight.double(), None, 1e-5)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.tensors[f"{name}_bias"]
        weights = self.weights[name].dequantize().double()
        start = 0
        for part, rows in LINEAR_PARTS[name].items():
            if part in self.floats:
                weights[start : start + rows] = self.floats[part].double()
            start += rows
        product = x @ weights.t()
        return product if bias is None else product + bias.double()

    @staticmethod
    def _norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight.double(), 1e-5)


def _gated(activation: str, limit: float | None, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    maximum = math.inf if limit is None else limit
    gate, up = gate.clamp(max=maximum), up.clamp(-maximum, maximum)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


STEPS = [(6, True), (1, False), (3, False), (30, False), (1, False)]
"""Tokens of each step, and whether they see none but each other."""


@pytest.mark.parametrize("variant", HERE)
def test_blocks_serve_each_feature(variant: str) -> None:
    """A prompt, one token, a few, many, of sequences at positions of their own in slots that are
    not in order.
    """
    for cached, name in itertools.product((torch.float32, torch.int8), FEATURES):
        block = ExampleBlock(FEATURES[name], load_kernels(variant))
        keys, values = (
            to_cached_rows(torch.zeros(2, KV_HEADS, 60, SIZE), cached) for _ in range(2)
        )
        starts = torch.tensor([[0], [0]])
        for count, prefill in STEPS:
            step = ExampleStep(starts + torch.arange(count), torch.tensor([1, 0]), prefill)
            x = torch.randn(2, count, HIDDEN)
            states = block.run(x, step, (keys, values)).double()
            expected = block.expected(x, step, (keys, values))
            case = cached, name, count
            require_close(states, expected, case, rtol=1e-3, atol=1e-3)
            starts = step.positions[:, -1:] + (torch.tensor([[1], [5]]) if prefill else 1)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "all",
        "clip, then norms, then a query scale",
        "parallel, centered",
        "relu2",
        *FLOATS,
    ],
)
def test_rows_of_blocks_have_the_bits_that_they_have_alone(name: str) -> None:
    block = ExampleBlock(FEATURES[name], load_kernels())
    x, stored = torch.randn(3, 5, HIDDEN), [torch.zeros(3, KV_HEADS, 60, SIZE) for _ in range(2)]
    starts = torch.tensor([[0], [7], [20]])
    step = ExampleStep(starts + torch.arange(5), torch.arange(3), prefill=False)
    together = block.run(x, step, [CachedRows(rows.clone()) for rows in stored])
    for row in range(3):
        own = ExampleStep(step.positions[row : row + 1], torch.tensor([row]), prefill=False)
        assert torch.equal(
            block.run(x[row : row + 1], own, [CachedRows(rows) for rows in stored])[0],
            together[row],
        )


ACTIVATIONS = [("silu", None), ("gelu_tanh", None), ("swiglu_oai", None), ("swiglu_oai", 7.0)]


@pytest.mark.parametrize("variant", HERE)
def test_activations_are_right_to_float32(variant: str) -> None:
    """A block that adds the inner state of the first column to the second; its attention adds
    nothing.
    """
    ops = load_kernels(variant)

    def packed(rows: int, columns: int, ones: list[tuple[int, int]]) -> Tensor:
        codes = torch.full((rows, columns), 128, dtype=torch.uint8)
        for place in ones:
            codes[place] += 1
        weight = QuantTensor(codes, torch.ones(rows, 1), None, QuantScheme.parse("int8"))
        product: Tensor = ops.pack([weight], len(weight.codes), exact=True)
        return product

    gates = torch.cat([torch.linspace(-12, 12, 997), 10 ** torch.linspace(-6, 30, 100)])
    for activation, limit in ACTIVATIONS:
        for up in (1.0, -9.0):
            x = torch.zeros(1, len(gates), 32)
            x[0, :, 0] = gates
            bias = torch.zeros(64)
            bias[32] = up
            attention = [
                None,
                packed(96, 32, []),
                *[None] * 8,
                packed(32, 32, []),
                None,
                None,
            ]
            feed_forward = [
                None,
                packed(64, 32, [(0, 0)]),
                bias,
                None,
                None,
                packed(32, 32, [(1, 0)]),
                None,
                None,
            ]
            settings = list_settings(activation=activation, limit=limit)
            blocks = ops.prepare_blocks([("attention", attention, feed_forward, settings)])
            angles = torch.ones(len(gates), 32), torch.zeros(len(gates), 32)
            positions = torch.arange(len(gates))
            ops.run_blocks(x, blocks.number, angles, [None], positions, None, [], True)
            expected = _gated(
                activation, limit, gates.double(), torch.full_like(gates, up).double()
            )
            case = activation, limit, up
            require_close(x[0, :, 1].double(), expected, case, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("attention", "feed_forward", "activation", "reason"),
    [
        (range(12), None, "silu", "attention: 13"),
        (None, range(7), "silu", "feed-forward: 8"),
        (None, None, "relu", "relu"),
    ],
)
def test_blocks_that_make_no_sense_are_refused(
    attention: range | None, feed_forward: range | None, activation: str, reason: str
) -> None:
    block = ExampleBlock(
        replace(FEATURES["llama"], activation=activation), _Shortened(attention, feed_forward)
    )
    step = ExampleStep(torch.arange(3).unsqueeze(0), torch.tensor([0]), prefill=True)
    with pytest.raises(RuntimeError, match=reason):
        block.run(torch.randn(1, 3, HIDDEN), step, None)


@pytest.mark.parametrize(
    ("place", "weight", "reason"),
    [
        (3, torch.zeros(KV_HEADS * SIZE, HIDDEN + 32), "go together"),
        (3, torch.zeros(KV_HEADS * SIZE + 1, HIDDEN), "go together"),
        (3, torch.zeros(HIDDEN), "weight"),
        (3, torch.zeros(KV_HEADS * SIZE, HIDDEN).double(), "float32"),
        (1, None, "no weight"),
    ],
)
def test_weights_of_floats_that_do_not_fit_are_refused(
    place: int, weight: Tensor | None, reason: str
) -> None:
    ops = load_kernels()

    class Replacing:
        pack = ops.pack

        def prepare_blocks(self, blocks: list[BlockOperands]) -> Blocks:
            ((mixer, attention, feed_forward, settings),) = blocks
            tensors = list(attention)
            tensors[place] = weight
            return ops.prepare_blocks([(mixer, tensors, feed_forward, settings)])

    block = ExampleBlock(FEATURES["floats apart"], Replacing())
    step = ExampleStep(torch.arange(3).unsqueeze(0), torch.tensor([0]), prefill=True)
    with pytest.raises(RuntimeError, match=reason):
        block.run(torch.randn(1, 3, HIDDEN), step, None)


class _Shortened:
    """The operators, with some of a block's tensors alone."""

    def __init__(self, attention: range | None, feed_forward: range | None) -> None:
        self._kept, self.pack = (attention, feed_forward), load_kernels().pack

    def prepare_blocks(self, blocks: list[BlockOperands]) -> Blocks:
        mixer, attention, feed_forward, settings = blocks[0]
        halves = [
            half if kept is None else [half[index] for index in kept]
            for half, kept in zip((attention, feed_forward), self._kept, strict=True)
        ]
        return load_kernels().prepare_blocks([(mixer, *halves, settings)])
