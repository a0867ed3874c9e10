"""Attention through Triton against float64: through Triton's interpreter, or on a GPU where there
is one.

Run as `triton_products` is, in the same process.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_quick import quicken

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.kernels.backend import OfferedKernels
from quantkit.kernels.triton_attention import attend_to_cache, choose_tile, count_spans
from quantkit.kernels.triton_backend import TritonBackend
from quantkit.kernels.triton_tiles import GpuSpec
from quantkit.kernels.triton_words import INTERPRETED
from quantkit.model.attention import ScoreSettings, attend_with_mask
from quantkit.model.linear import float_linear
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.tensors.cached_rows import CachedRows, to_cached_rows

quicken()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CASES = {
    "one token": (64, 4, 2, [150], None, 2),
    "the first token": (64, 2, 2, [0], None, 2),
    "the end of a tile": (128, 2, 1, [127], None, 2),
    "the start of a tile": (128, 2, 1, [128], None, 3),
    "the end of the cache": (64, 2, 1, [179], None, 3),
    "more spans than tiles": (128, 2, 1, [70], None, 5),
    "a window within a tile": (80, 2, 2, [100], 7, 2),
    "a window over tiles": (96, 6, 2, [99, 100, 101], 70, 2),
    "a window wider than all": (64, 2, 1, [40, 41, 42], 500, 1),
    "a window of one": (64, 2, 1, [63, 64, 65], 1, 2),
    "tokens on both sides of a tile's end": (128, 3, 1, [126, 127, 128], None, 3),
    "many tokens": (96, 5, 1, list(range(120, 136)), None, 2),
    "large heads": (256, 2, 2, [100], 90, 2),
}
"""Head size, heads, KV heads, positions, window, spans."""


def attended(
    queries: Tensor,
    keys: CachedRows,
    values: CachedRows,
    positions: Tensor,
    slots: Tensor | None,
    window: int | None,
    spans: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Any:
    """Attention with the live part of the cache in up to `spans` spans."""
    where = positions, slots, window
    return attend_to_cache(
        queries, *keys, *values, *where, scale, softcap, sinks, arrived=None, spans=spans
    )


LENGTH = 180

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"
)


def _stored(rows: Tensor, dtype: torch.dtype) -> CachedRows:
    """Rows [B, K, S, Dh] as a cache keeps them."""
    return to_cached_rows(rows.to(DEVICE), dtype)


def _operands(
    case: str, dtype: torch.dtype, cached: torch.dtype
) -> tuple[Tensor, CachedRows, CachedRows, Tensor]:
    """Queries that look closely at some keys, keys, values, positions."""
    size, heads, shared, positions, _, _ = CASES[case]
    queries = torch.randn(2, heads, len(positions), size).to(DEVICE, dtype) * 2
    keys, values = (_stored(torch.randn(2, shared, LENGTH, size), cached) for _ in range(2))
    return queries, keys, values, torch.tensor(positions, device=DEVICE)


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers in a dtype; Triton's interpreter cuts off what bfloat16 does not hold."""
    if INTERPRETED and dtype == torch.bfloat16:
        return (rows.view(torch.int32) >> 16 << 16).view(torch.float32).to(dtype)
    return rows.to(dtype)


def _require_right(
    found: Tensor, queries: Tensor, keys: CachedRows, values: CachedRows, *where: Any
) -> None:
    """Each mixed value within the rounding of weights and of the result, and of scores in
    float32.
    """
    floats = [stored.floats(torch.float32) for stored in (keys, values)]
    wide = [
        rows.double() if keys.scales is not None else _rounded(rows, queries.dtype).double()
        for rows in floats
    ]
    expected = attend_with_mask(queries.double(), CachedRows(wide[0]), CachedRows(wide[1]), *where)
    terms = attend_with_mask(
        queries.double(), CachedRows(wide[0]), CachedRows(wide[1].abs()), *where
    )
    largest = (
        queries.double().norm(dim=-1).max() * wide[0].nan_to_num(0, 0, 0).norm(dim=-1).max()
    )  # of a sum
    scores = (
        4 * largest * queries.shape[-1] ** -0.5 * torch.finfo(torch.float32).eps
    )  # by which weights' exponents err
    rounding = torch.finfo(queries.dtype).eps
    bound = (2 * rounding + 200 * torch.finfo(torch.float32).eps + scores) * terms
    assert found.dtype == queries.dtype
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("case", CASES)
def test_attention_is_right_for_every_place_of_the_live_part(case: str) -> None:
    *_, window, spans = CASES[case]
    operands = _operands(case, torch.float32, torch.float32)
    _require_right(attended(*operands, None, window, spans), *operands, None, window)


@pytest.mark.parametrize(
    ("dtype", "cached"),
    [
        (torch.float32, torch.int8),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float16, torch.int8),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.int8),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_attention_is_right_for_every_dtype(dtype: torch.dtype, cached: torch.dtype) -> None:
    for case in ("one token", "a window over tiles"):
        *_, window, spans = CASES[case]
        operands = _operands(case, dtype, cached)
        _require_right(attended(*operands, None, window, spans), *operands, None, window)


SCORES = {
    "scaled": ScoreSettings(0.3),
    "capped": ScoreSettings(0.2, 5.0),
    "capped by little": ScoreSettings(None, 50.0),
    "with sinks": ScoreSettings(0.1, None, torch.linspace(-4, 6, 6)),
    "capped, with sinks": ScoreSettings(
        0.2, 2.5, torch.tensor([0.0, 3.0, -50.0, 50.0, -torch.inf, 1.0])
    ),
}


@pytest.mark.parametrize(
    ("dtype", "scores"),
    [
        *((torch.float32, name) for name in SCORES),
        (torch.bfloat16, "capped, with sinks"),
    ],
    ids=str,
)
def test_scores_are_capped_and_sinks_take_their_share(dtype: torch.dtype, scores: str) -> None:
    given = SCORES[scores]
    if given.sinks is not None:
        given = replace(given, sinks=given.sinks.to(DEVICE, dtype))
    for case in ("a window over tiles", "more spans than tiles"):
        *_, window, spans = CASES[case]
        operands = _operands(case, dtype, torch.float32)
        heads = operands[0].shape[1]
        own = given if given.sinks is None else replace(given, sinks=given.sinks[:heads])
        found = attended(*operands, None, window, spans, own.scale, own.softcap, own.sinks)
        _require_right(found, *operands, None, window, own)


@pytest.mark.parametrize("cached", [torch.float32, torch.int8], ids=str)
def test_sequences_are_at_places_and_positions_of_their_own(cached: torch.dtype) -> None:
    keys, values = (_stored(torch.randn(2, 2, LENGTH, 32), cached) for _ in range(2))
    queries = torch.randn(3, 6, 4, 32, device=DEVICE)
    starts = torch.tensor([[3], [LENGTH - 9], [LENGTH // 2]], device=DEVICE)
    where = starts + torch.arange(4, device=DEVICE), torch.tensor([1, 0, 1], device=DEVICE)
    for window in (None, 5):
        _require_right(
            attended(queries, keys, values, *where, window, 3),
            queries,
            keys,
            values,
            *where,
            window,
        )


def test_spans_give_the_same_each_time_and_what_one_gives() -> None:
    operands = _operands("one token", torch.float32, torch.float32)
    found = attended(*operands, None, None, 3)
    assert torch.equal(found, attended(*operands, None, None, 3))
    torch.testing.assert_close(found, attended(*operands, None, None, 1), rtol=1e-5, atol=1e-5)


def test_scores_of_any_size_are_weighted() -> None:
    queries, keys, values, positions = _operands("one token", torch.float32, torch.float32)
    for factor in (1e-30, 100.0, -100.0):
        operands = queries * factor, keys, values, positions
        _require_right(attended(*operands, None, None, 2), *operands, None, None)


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("what", ["keys", "values"])
def test_what_is_not_finite_counts_in_the_live_part_alone(what: str, cached: torch.dtype) -> None:
    queries, keys, values, positions = _operands("a window within a tile", torch.bfloat16, cached)
    whole = attended(queries, keys, values, positions, None, 7, 2)
    stale = _stored(torch.full((1, 1, 1, 80), torch.nan), cached)
    changed = list(
        zip((keys if what == "keys" else values).tensors(), stale.tensors(), strict=True)
    )
    for tensor, nan in changed:
        tensor[:, :, :94], tensor[:, :, 101:] = nan[0, 0, 0], nan[0, 0, 0]
    assert torch.equal(attended(queries, keys, values, positions, None, 7, 2), whole)
    for place in (94, 100):
        kept = [tensor[1, 0, place].clone() for tensor, _ in changed]
        for tensor, nan in changed:
            tensor[1, 0, place] = nan[0, 0, 0]
        found = attended(queries, keys, values, positions, None, 7, 2)
        assert found[1, 0, :80].isnan().all()  # of the one head
        found[1, 0, :80] = whole[1, 0, :80]
        assert torch.equal(found, whole)
        for (tensor, _), row in zip(changed, kept, strict=True):
            tensor[1, 0, place] = row


def test_views_are_taken() -> None:
    queries, keys, values, positions = _operands(
        "a window over tiles", torch.float32, torch.float32
    )
    expected = attended(queries, keys, values, positions, None, 70, 2)
    turned = queries.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([keys.rows, values.rows], dim=-1)
    parts = map(CachedRows, wide.chunk(2, dim=-1))
    assert torch.equal(attended(turned, *parts, positions, None, 70, 2), expected)


@pytest.mark.parametrize("size", [6, 33])
def test_rows_of_bytes_have_any_size(size: int) -> None:
    keys, values = (_stored(torch.randn(1, 2, 90, size), torch.int8) for _ in range(2))
    operands = (
        torch.randn(1, 2, 1, size, device=DEVICE),
        keys,
        values,
        torch.tensor([70], device=DEVICE),
    )
    _require_right(attended(*operands, None, None, 2), *operands, None, None)


def test_programs_are_as_many_as_there_is_work_for() -> None:
    gpu = GpuSpec("large", 132, 232448)
    tile = choose_tile(4, 128, torch.bfloat16, gpu)
    assert count_spans(8, 4, 8192, tile, gpu) == 33
    assert count_spans(8, 4, 100, tile, gpu) == 2
    assert count_spans(1, 4, 1 << 20, tile, gpu) == 64
    assert count_spans(1024, 4, 8192, tile, gpu) == 1


@pytest.mark.parametrize("cached", [torch.float32, torch.int8], ids=str)
def test_the_operator_passes_torchs_own_checks(cached: torch.dtype) -> None:
    queries, keys, values, positions = _operands(
        "tokens on both sides of a tile's end", torch.float32, cached
    )
    operands = queries, *keys, *values, positions
    for more in ((None, None, None, None), (9, 0.3, 5.0, torch.ones(3, device=DEVICE))):
        torch.library.opcheck(
            torch.ops.quantkit_triton.cached_attention.default, (*operands, None, *more, None, None)
        )


def test_attention_compiles_into_one_graph() -> None:
    attention = TritonBackend().offer_kernels().cached_attention
    assert attention is not None
    operands = _operands("one token", torch.bfloat16, torch.bfloat16)
    compiled = torch.compile(
        lambda *given: attention(*given, None, 20) + 1, backend="aot_eager", fullgraph=True
    )
    with torch.inference_mode():
        assert torch.equal(compiled(*operands), attention(*operands, None, 20) + 1)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup") / "int8"
    quantkit.quantize(DEMO_MODEL, folder, "int8", accept_quality_loss=True)
    return folder


def test_a_model_attends_through_it_and_does_all_else_as_before(quantized: Path) -> None:
    model, reference = (
        load_model(quantized, device=DEVICE, dtype=torch.float32, backend=name)
        for name in ("triton", "reference")
    )
    assert model.ops.cached_attention is not attend_with_mask
    assert model.ops.float_linear is float_linear
    assert model.ops.blocks is None
    logits = []
    for each in (model, reference):
        engine = Engine(each, 40, cache_dtype=torch.int8, compiled=False)
        tokens = torch.arange(20, 24, device=DEVICE)
        first = engine.step(tokens, [0] * 4, range(4), [3])
        logits.append([first, engine.step(tokens[:1], [0], [4], [0])])
    for found, expected in zip(*logits, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


STEPS = [
    [(2, 0, 5)],
    [(0, 0, 20), (2, 5, 1)],
    [(2, 6, 1), (0, 20, 1), (1, 0, 1)],
    [(1, 1, 7), (2, 7, 1), (0, 21, 1)],
]
"""Of each piece the slot, its first position, and how many tokens."""


def test_an_engines_slots_take_turns_through_it(quantized: Path) -> None:
    """One row of each that decodes in one call, with chunks beside them, few and many; each as
    if it were alone.
    """
    model, reference = (
        load_model(quantized, device=DEVICE, dtype=torch.float32, backend=name)
        for name in ("triton", "reference")
    )
    assert not model.ops.ragged
    texts = torch.randint(3, 2000, (3, 30), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    engine, found = Engine(model, 40, slots=3, compiled=False), dict[int, list[Tensor]]()
    for step in STEPS:
        rows = [(slot, start + place) for slot, start, count in step for place in range(count)]
        slots, positions = zip(*rows, strict=True)
        logits = engine.step(texts[slots, positions], slots, positions, range(len(rows)))
        for slot, row in zip(slots, logits, strict=True):
            found.setdefault(slot, []).append(row)
    for slot, logits in found.items():
        count = len(logits)
        alone = Engine(reference, 40, compiled=False)
        expected = alone.step(texts[slot, :count], [0] * count, range(count), range(count))
        torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mistake", ["wrong", "failing"])
def test_attention_that_is_wrong_is_found_out_at_load(
    mistake: str, quantized: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(
        queries: Tensor,
        keys: CachedRows,
        values: CachedRows,
        positions: Tensor,
        slots: Tensor | None,
        window: int | None,
        *scores: Any,
    ) -> Tensor:
        if mistake == "failing":
            raise RuntimeError("out of\nresource")
        return attend_with_mask(
            queries,
            keys,
            values,
            positions + (keys.scales is not None),
            slots,
            window,
            ScoreSettings(*scores),
        )

    monkeypatch.setattr(
        TritonBackend, "offer_kernels", lambda self: OfferedKernels(cached_attention=wrong)
    )
    with caplog.at_level(logging.WARNING):
        model = load_model(quantized, device=DEVICE, dtype=torch.float32, backend="triton")
    assert model.ops.cached_attention is attend_with_mask
    (message,) = caplog.messages
    assert message.startswith("attention ")
    assert ("out of resource" in message) == (mistake == "failing")
