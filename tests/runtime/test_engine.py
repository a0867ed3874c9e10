"""The engine: caches, buckets of prompts, and compiled steps against eager ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from instruction_sets import HERE
from rows import read_late
from torch import Tensor

import quantkit
from quantkit.errors import NonFiniteError, RequestError
from quantkit.kernels.library import load_kernels
from quantkit.model.attention import attend_with_mask
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime import engine as engine_module
from quantkit.runtime.engine import Engine, bucket
from quantkit.tensors.cached_rows import CachedRows

pytestmark = pytest.mark.cpu_kernels


def _quantized(folder: Path, layers: int) -> Path:
    model = oracle.make("llama", max_position_embeddings=512, num_hidden_layers=layers)
    quantkit.quantize(
        oracle.save(model, folder / "model"), folder / "int8", "int8", accept_quality_loss=True
    )
    return folder / "int8"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _quantized(tmp_path_factory.mktemp("engine"), 2)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For steps that are compiled: a second layer would only take as long as the first."""
    return _quantized(tmp_path_factory.mktemp("engine"), 1)


def _tokens(model: Decoder | Engine, prompt: Tensor, count: int) -> list[int]:
    return list(quantkit.generate(model, prompt.flatten().tolist(), max_new_tokens=count))


def _without_end(path: Path, backend: str | None = None) -> Decoder:
    model = load_model(path, dtype=torch.float32, backend=backend)
    model.config = replace(model.config, eos_token_ids=())
    return model


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["cpu-exact", "reference"])
def test_compiled_steps_are_one_graph_a_bucket_and_give_the_eager_tokens(
    one_layer: Path, backend: str
) -> None:
    model = _without_end(one_layer, backend=backend)
    engine = Engine(model, 100, compiled=True)
    prompts = oracle.random_tokens(60)
    for count in (16, 32):  # one of each bucket
        _tokens(engine, prompts[:, :count], 2)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (1, 2, 15, 17, 31):
            found = _tokens(engine, prompts[:, :count], 8)
            assert found == _tokens(model, prompts[:, :count], 8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


def test_compiling_without_a_compiler_is_refused(one_layer: Path) -> None:
    without = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with without, pytest.raises(RequestError, match="finds no C"):
        Engine(_without_end(one_layer), 100, compiled=True)


def test_code_compiled_for_other_vectors_is_not_taken_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = engine_module.cpu_compile_options()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    others = engine_module.cpu_compile_options()
    keys = []
    for each in (options, others):
        with torch._inductor.config.patch(each):
            keys.append(
                torch._inductor.config.save_config_portable()
            )  # what the key of the cache is made of
    assert keys[0] != keys[1]


def test_logits_outlive_the_memory_of_a_recorded_step(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(quantized, dtype=torch.float32)
    memory = torch.zeros(1, model.config.vocab_size)

    def recorded(step: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
        return lambda *operands: memory.copy_(step(*operands))

    monkeypatch.setattr(engine_module, "_compile", recorded)
    engine = Engine(model, 100, compiled=True)
    first = engine.step(torch.tensor([1]), [0], [0], [0])
    before = first.clone()
    second = engine.step(torch.tensor([2]), [0], [1], [0])
    assert not torch.equal(first, second)
    assert torch.equal(first, before)


@pytest.mark.slow
def test_an_engine_forgets_the_prompt_before(quantized: Path) -> None:
    model = _without_end(quantized)
    prompts = oracle.random_tokens(80)
    for compiled in (False, True):
        engine = Engine(model, 90, compiled=compiled)
        _tokens(engine, prompts[:, 40:], 9)
        assert _tokens(engine, prompts[:, :7], 30) == _tokens(model, prompts[:, :7], 30)


def test_several_sequences_of_one_length_run_together(quantized: Path) -> None:
    model = _without_end(quantized)
    prompts = oracle.random_tokens(9, batch=3)
    engine = Engine(model, 20, slots=3)
    slots = [slot for slot in range(3) for _ in range(9)]
    tokens = engine.step(prompts.flatten(), slots, [*range(9)] * 3, [8, 17, 26]).argmax(-1)
    drawn = [tokens]
    for position in range(9, 13):
        tokens = engine.step(tokens, range(3), [position] * 3, range(3)).argmax(-1)
        drawn.append(tokens)
    assert torch.stack(drawn, 1).tolist() == [_tokens(model, row, 5) for row in prompts]


def test_nothing_is_written_beyond_the_cache(quantized: Path) -> None:
    model = _without_end(quantized)
    engine = Engine(model, 4)
    with pytest.raises(
        RequestError, match=r"the cache is full \(found 5, expected at most 4 positions"
    ):
        engine.step(oracle.random_tokens(5)[0], [0] * 5, range(5), [4])
    engine.step(oracle.random_tokens(4)[0], [0] * 4, range(4), [3])
    with pytest.raises(RequestError, match="the cache is full"):
        engine.step(oracle.random_tokens(1)[0], [0], [4], [0])
    with pytest.raises(RequestError, match="slot is out of range"):
        engine.step(oracle.random_tokens(1)[0], [1], [0], [0])
    with pytest.raises(RequestError, match="exceed the engine"):
        _tokens(engine, oracle.random_tokens(3), 2)
    with pytest.raises(RequestError, match="exceed the model's context"):
        Engine(model, model.config.max_context + 1)


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(count, 16) for count in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


def test_looking_at_tokens_late_gives_the_same_ones(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _without_end(quantized)
    prompt = oracle.random_tokens(5)
    expected = _tokens(model, prompt, 20)
    read_late(monkeypatch)
    assert _tokens(model, prompt, 20) == expected
    end = expected[10]
    model.config = replace(model.config, eos_token_ids=(end,))
    assert _tokens(model, prompt, 20) == expected[: expected.index(end)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_is_never_given_out(
    late: bool, temperature: float, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_late(monkeypatch, late=late)
    engine = Engine(_without_end(quantized), 30)
    step, steps = engine.step, iter(range(100))
    monkeypatch.setattr(
        engine, "step", lambda *given: step(*given) * (torch.nan if next(steps) == 4 else 1)
    )
    given: list[int] = []
    with pytest.raises(NonFiniteError):
        given.extend(
            quantkit.generate(engine, [1, 2], max_new_tokens=20, temperature=temperature, seed=1)
        )
    assert len(given) <= 4


def test_rows_of_an_int8_cache_are_right_to_half_a_step(quantized: Path) -> None:
    config = load_model(quantized).config
    cache = KVCache(config, 2, 6, torch.int8, "cpu")
    shape = 2, config.num_kv_heads, 3, config.head_dim
    keys, values = torch.randn(shape) * torch.logspace(-8, 8, 3).view(3, 1), torch.randn(shape)
    keys[0, 0, 1] = 0
    stored = cache.update(1, torch.tensor([4, 0, 2]), keys, values)
    for rows, found in zip((keys, values), stored, strict=True):
        error = found.floats(torch.float32)[:, :, [4, 0, 2]] - rows
        assert (error.abs() <= rows.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()
        assert (found.floats(torch.float32)[:, :, [1, 3, 5]] == 0).all()
    rows = 2 * config.num_kv_heads * 6
    assert [tensor.nbytes for tensor in cache.rows(0).keys.tensors()] == [
        rows * config.head_dim,
        rows * 4,
    ]


def test_an_int8_cache_hands_on_what_is_not_finite(quantized: Path) -> None:
    config = load_model(quantized).config
    cache = KVCache(config, 1, 2, torch.int8, "cpu")
    rows = torch.ones(1, config.num_kv_heads, 2, config.head_dim)
    rows[0, 0, 0, 0], rows[0, 0, 1, 1] = torch.nan, -torch.inf
    found = cache.update(0, torch.arange(2), rows, rows)[0].floats(torch.float32)
    assert found[0, 0].isnan().all()
    assert (found[0, 1] == 1).all()


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("size", [16, 40, 128])
def test_the_kernels_attend_over_int8_as_torch_does(variant: str, size: int) -> None:
    codes, scales = (
        torch.randint(-127, 128, (2, 2, 300, size), dtype=torch.int8),
        torch.rand(2, 2, 300) * 0.02,
    )
    keys, values = CachedRows(codes, scales), CachedRows(codes.roll(7, 2), scales.roll(7, 2))
    queries, positions = torch.randn(2, 6, 3, size), torch.tensor([3, 280, 299])
    attention = load_kernels(variant).cached_attention
    found = attention(queries, *keys, *values, positions, None, 0, size**-0.5)
    expected = attend_with_mask(queries, keys, values, positions, None, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


WRONG_CACHES: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no scales": ({"key_scales": None}, "have scales in int8, and only there"),
    "scales of floats": (
        {"keys": torch.zeros(1, 2, 9, 32), "values": torch.zeros(1, 2, 9, 32)},
        "only there",
    ),
    "scales of fewer rows": ({"value_scales": torch.ones(1, 2, 8)}, r"float32 \[B, K, S\]"),
    "scales of two bytes": ({"key_scales": torch.ones(1, 2, 9).bfloat16()}, r"float32 \[B, K, S\]"),
    "fewer values": ({"values": torch.ones(1, 2, 8, 32, dtype=torch.int8)}, "of one shape"),
    "rows of another size": (
        dict.fromkeys(("keys", "values"), torch.ones(1, 2, 9, 36, dtype=torch.int8)),
        "do not go with keys",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_CACHES)
def test_caches_that_make_no_sense_are_refused(wrong: str) -> None:
    changes, reason = WRONG_CACHES[wrong]
    codes, scales = torch.ones(1, 2, 9, 32, dtype=torch.int8), torch.ones(1, 2, 9)
    given = {"keys": codes, "key_scales": scales, "values": codes, "value_scales": scales} | changes
    with pytest.raises(RuntimeError, match=reason):
        load_kernels().cached_attention(
            torch.zeros(1, 2, 1, 32), *given.values(), torch.tensor([3]), None, 0, 1.0
        )


@pytest.mark.parametrize("variant", HERE)
def test_blocks_store_int8_as_the_cache_does(
    variant: str, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    model = _without_end(quantized)
    assert model.ops.blocks is not None
    logits, caches = [], []
    for blocks in (model.ops.blocks, None):
        model.ops = replace(model.ops, blocks=blocks)
        cache = KVCache(model.config, 2, 12, torch.int8, "cpu")
        with torch.inference_mode():
            logits.append(model(oracle.random_tokens(12, batch=2), torch.arange(12), cache))
        layers = [cache.rows(layer) for layer in range(model.config.num_layers)]
        caches.append(
            [rows.floats(torch.float32) for layer in layers for rows in (layer.keys, layer.values)]
        )
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[
        1
    ].std()  # codes at an edge fall either way
    for found, expected in zip(*caches, strict=True):
        steps = expected.abs().amax(-1, keepdim=True) / 127
        assert ((found - expected).abs() <= 3 * steps + 1e-4).all()


def test_an_int8_cache_costs_little(quantized: Path) -> None:
    model = _without_end(quantized)
    tokens, found = oracle.random_tokens(40), {}
    for dtype in (torch.float32, torch.int8):
        cache = KVCache(model.config, 1, 40, dtype, "cpu")
        with torch.inference_mode():
            parts = [model(tokens[:, at : at + 1], torch.tensor([at]), cache) for at in range(40)]
        found[dtype] = torch.cat(parts, 1).log_softmax(-1)
    exact, rounded = found[torch.float32], found[torch.int8]
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 < divergence < 1e-3


@pytest.mark.parametrize(
    ("option", "expected"),
    [("--eager", (None, False)), ("--compile", (None, True)), ("--int8-cache", (torch.int8, None))],
)
def test_the_command_hands_on_its_cache_and_how_steps_run(
    option: str, expected: object, demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []

    made = Engine.__init__

    def noted(
        self: Engine,
        *given: Any,
        compiled: bool | None,
        cache_dtype: torch.dtype | None,
        **more: Any,
    ) -> None:
        requested.append((cache_dtype, compiled))
        made(self, *given, cache_dtype=cache_dtype, **more)

    monkeypatch.setattr(Engine, "__init__", noted)
    code, text, _ = run(
        capfd,
        "generate",
        demo_model,
        "--prompt",
        "Fellow citizens",
        "--max-new-tokens",
        "5",
        option,
    )
    assert code == 0
    assert len(text) > len("Fellow citizens") + 5
    assert requested == [expected]
