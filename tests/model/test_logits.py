"""Logits at every entry and of any number of tokens and sequences, in every dtype, against
float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from drafts import speculate
from torch import Tensor

import quantkit
from quantkit.evals.bench import bench
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.linear import QuantLinear, float32_linears, float_linear
from quantkit.model.load import load_model
from quantkit.runtime import engine as engine_module
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

COUNTS = (1, 8, 9, 16, 33)  # few rows, and more than the kernels for few take
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = {"cpu-exact": 1e-3, "cpu-fast": 0.2, "reference": 1e-5}
"""What rounding activations may cost, of the spread of logits: the largest of thousands."""
STEPS = 12  # of the dtype, that rounding to it may cost in two layers
INT8_CACHE = 0.1
MODELS = (
    "float-int8",
    "float-int4-g32",
    "tied-int8",
    "tied-int4-g32",
    "int8-int4-g32",
    "int4-g32-int8",
)
"""Heads and the schemes of the layers."""

Logits = Callable[[Decoder, int], Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in bfloat16, by the head they have and the scheme of their layers."""
    base = tmp_path_factory.mktemp("heads")
    for tied in (False, True):
        sizes = {"num_hidden_layers": 2, "tie_word_embeddings": tied}
        kind = "qwen2" if tied else "llama"  # with biases and without
        oracle.save(oracle.make(kind, **sizes).bfloat16(), base / f"{tied}")
    for name in MODELS:
        head, _, scheme = name.rpartition("-int")
        own = None if head in ("float", "tied") else QuantScheme.parse(head)
        plan = Recipe(
            QuantScheme.parse(f"int{scheme}"), () if own is None else (Override("lm_head", own),)
        )
        quantkit.quantize(
            base / str(head == "tied"), base / name, plan, method="rtn", accept_quality_loss=True
        )
    return {folder.name: folder for folder in base.iterdir()}


@functools.cache
def _model(folder: Path, dtype: torch.dtype, backend: str) -> Decoder:
    model = load_model(folder, dtype=dtype, backend=backend)
    model.config = replace(model.config, eos_token_ids=())
    return model


def _tokens(batch: int, count: int) -> Tensor:
    return oracle.random_tokens(count, batch=batch)


def _among_themselves(model: Decoder, count: int) -> Tensor:
    return model(_tokens(1, count), torch.arange(count))


def _over_a_cache(model: Decoder, count: int, dtype: torch.dtype | None = None) -> Tensor:
    cache = KVCache(model.config, 2, count + 5, dtype or model.dtype, "cpu")
    tokens = _tokens(2, count + 5)
    pieces = (slice(0, 4), slice(4, 4 + count), slice(4 + count, 5 + count))
    return torch.cat(
        [model(tokens[:, piece], torch.arange(count + 5)[piece], cache) for piece in pieces], 1
    )


def _over_bytes(model: Decoder, count: int) -> Tensor:
    return _over_a_cache(model, count, torch.int8)


def _of_a_batch(model: Decoder, count: int) -> Tensor:
    engine, tokens, slots = Engine(model, 6, slots=count), _tokens(count, 6), range(count)
    rows = [(slot, position) for slot in slots for position in range(4)]
    first = engine.step(tokens[:, :4].flatten(), *zip(*rows, strict=True), range(3, 4 * count, 4))
    return torch.stack(
        [first, *(engine.step(tokens[:, at], slots, [at] * count, slots) for at in (4, 5))], 1
    )


def _of_the_last(model: Decoder, count: int) -> Tensor:
    """As a draft is judged, and as answers are scored: [count, V]."""
    hidden = model.hidden(_tokens(1, count + 2), torch.arange(count + 2))
    return model.head(hidden[0, -count:])


ENTRIES: dict[str, Logits] = {
    "forward": _among_themselves,
    "cache": _over_a_cache,
    "int8 cache": _over_bytes,
    "engine": _of_a_batch,
    "last": _of_the_last,
}


def _bound(dtype: torch.dtype, backend: str, entry: str = "cache") -> float:
    """How far logits may be off, of their spread: whole blocks round to the dtype in the cache
    alone.
    """
    rounded = dtype != torch.float32 and (
        backend == "reference" or entry not in ("forward", "last")
    )
    steps = STEPS * torch.finfo(dtype).eps if rounded else 0
    return MODES[backend] + steps + (INT8_CACHE if entry == "int8 cache" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", MODES)
@torch.inference_mode()
def test_logits_are_those_of_float32(
    backend: str, dtype: torch.dtype, entry: str, folders: dict[str, Path]
) -> None:
    for name in MODELS:
        model, exact = (
            _model(folders[name], dtype, backend),
            _model(folders[name], torch.float32, "reference"),
        )
        assert (model.ops.blocks is None) == (backend == "reference")
        assert isinstance(model.lm_head, QuantLinear) == name.startswith("int")
        for count in COUNTS:
            found, expected = ENTRIES[entry](model, count), _expected(exact, entry, count)
            assert found.dtype == (dtype if backend == "reference" else torch.float32)
            assert found.shape == expected.shape
            error = (found.float() - expected).abs().max() / expected.std()
            assert error < _bound(dtype, backend, entry), (name, count)


@functools.cache
def _expected(exact: Decoder, entry: str, count: int) -> Tensor:
    over = ENTRIES["cache" if entry == "int8 cache" else entry]
    return over(exact, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_likeliest_with_a_draft_and_without(
    name: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    folder, prompt = folders[name], _tokens(1, 5)[0].tolist()
    model, exact = _model(folder, dtype, "cpu-exact"), _model(folder, torch.float32, "reference")
    draft = _model(folders["float-int4-g32"], dtype, "cpu-exact")
    for found in (
        list(generate(model, prompt, max_new_tokens=20)),
        speculate(model, draft, prompt, max_new_tokens=20, draft_tokens=8),
    ):
        assert len(found) == 20
        text = torch.tensor([prompt + found])
        with torch.inference_mode():
            logits = exact(text, torch.arange(25))[0, 4:-1]
        chosen = logits.gather(-1, text[0, 5:, None]).squeeze(-1)
        assert (logits.amax(-1) - chosen <= 2 * _bound(dtype, "cpu-exact") * logits.std()).all()


@pytest.mark.slow
def test_compiled_steps_of_many_sequences_give_the_eager_logits(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(step: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
        return torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(engine_module, "_compile", compiled)
    model, tokens = _model(folders["float-int8"], torch.bfloat16, "cpu-exact"), _tokens(9, 5)
    found = []
    for each in (True, False):
        engine = Engine(model, 8, slots=9, compiled=each)
        slots, positions = [slot for slot in range(9) for _ in range(4)], [*range(4)] * 9
        first = engine.step(tokens[:, :4].flatten(), slots, positions, range(3, 36, 4))
        found.append(torch.stack([first, engine.step(tokens[:, 4], range(9), [4] * 9, range(9))]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_bench_times_more_sequences_than_few_rows(folders: dict[str, Path]) -> None:
    options = {"runs": 1, "backend": "cpu-exact", "compiled": False, "device": "cpu"}
    assert bench(folders["float-int8"], prompt_lengths=(16,), batches=(16,), **options)


def test_products_keep_the_dtype_of_the_rows_and_round_once() -> None:
    for weight_dtype, dtype in itertools.product(DTYPES, DTYPES):
        x, weight = torch.randn(3, 9, 70).to(dtype), torch.randn(31, 70).to(weight_dtype)
        product = float_linear(x, weight)
        expected = x.double() @ weight.double().t()
        case = weight_dtype, dtype
        assert product.dtype == dtype, case
        size = x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=1)
        slack = (
            70 * torch.finfo(torch.float32).eps * size + torch.finfo(dtype).eps / 2 * expected.abs()
        )
        assert ((product.double() - expected).abs() <= 1.01 * slack).all(), case


@pytest.mark.parametrize(
    ("columns", "parts"),
    [(1 << 12, [(0, 512), (512, 600)]), (11008, [(0, 176), (176, 352), (352, 528), (528, 600)])],
)
def test_a_weight_is_made_float32_in_parts(
    columns: int, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of at most 2**21 values, and of whole tiles of 16 rows."""
    made = []
    rows = quantkit.model.linear.float_rows

    def watched(weight: Tensor, start: int, stop: int) -> Tensor:
        made.append((start, stop))
        return rows(weight, start, stop)

    monkeypatch.setattr(quantkit.model.linear, "float_rows", watched)
    x, weight = torch.randn(9, columns), torch.randn(600, columns).bfloat16()
    torch.testing.assert_close(
        float32_linears([x], weight)[0], x @ weight.float().t(), rtol=1e-4, atol=1e-3
    )
    assert made == parts
