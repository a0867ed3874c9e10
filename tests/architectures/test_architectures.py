"""Our decoder against transformers, architecture by architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES, DENSE, FULLEST, ROPES
from error_parts import raises
from rows import together

import quantkit
from quantkit.errors import NonFiniteError
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request


def _endless(folder: Path) -> Decoder:
    """The model in a folder, with no end tokens; some families have some where a config says
    none.
    """
    model = load_model(folder, dtype=torch.float32)
    model.config = replace(model.config, eos_token_ids=())
    return model


def _require_parity(model: Any, folder: Path, length: int = 40) -> None:
    ours = load_model(oracle.save(model, folder), dtype=torch.float32)
    tokens = oracle.random_tokens(length, batch=2)
    with torch.inference_mode():
        found = ours(tokens, torch.arange(length))
    expected = oracle.logits(model, tokens)
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # a model whose logits vary, or equality would say little


@pytest.mark.sampled(22)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    _require_parity(oracle.make(kind, **changes), tmp_path / "model")


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", [20, 90], ids=["within", "past-context"])
def test_rope_scaling_equals_that_of_transformers(rope: str, length: int, tmp_path: Path) -> None:
    model = oracle.make("llama", rope_parameters=dict(ROPES[rope]), max_position_embeddings=64)
    _require_parity(model, tmp_path / "model", length)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES)
def test_greedy_generation_through_the_cache_equals_that_of_transformers(
    case: str, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    model = oracle.make(kind, **changes)
    ours = _endless(oracle.save(model, tmp_path / "model"))
    prompt = oracle.random_tokens(9)
    found = list(quantkit.generate(ours, prompt[0].tolist(), max_new_tokens=20))
    assert found == oracle.greedy(model, prompt, 20)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", FULLEST)
def test_sequences_of_all_lengths_in_slots_are_those_of_transformers(
    case: str, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    model = oracle.make(kind, **changes)
    ours = _endless(oracle.save(model, tmp_path / "model"))
    rows = oracle.random_tokens(23, batch=5)
    prompts = [row[:length].tolist() for row, length in zip(rows, (1, 9, 23, 4, 16), strict=True)]
    requests = [Request(prompt, 14, logprobs=0) for prompt in prompts]
    for index, found in enumerate(together(Engine(ours, 40, slots=3), requests)):
        text = torch.tensor([[*prompts[index], *found.token_ids]])
        assert found.token_ids == oracle.greedy(model, text[:, :-14], 14)
        assert found.logprobs is not None
        for place, reported in enumerate(found.logprobs.tokens, text.shape[1] - 14):
            expected = oracle.logits(model, text[:, :place])[0, -1].log_softmax(-1)[text[0, place]]
            assert reported == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["gemma", "gemma2", "gemma3"])
def test_multiplied_embeddings_are_rounded_as_by_transformers(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    folder = oracle.save(oracle.make(kind, **changes).to(dtype), tmp_path / "model")
    tokens = oracle.random_tokens(20)
    with torch.inference_mode():
        theirs = oracle.load(folder, dtype).model.embed_tokens(tokens)
        assert torch.equal(load_model(folder).model.embed(tokens), theirs)


def test_hidden_states_beyond_float16_end_in_one_line(tmp_path: Path) -> None:
    large = oracle.make("gemma2", **CASES["gemma2"][1])
    with torch.no_grad():
        for layer in large.model.layers:
            layer.post_attention_layernorm.weight.fill_(3e4)
    folder = oracle.save(large.half(), tmp_path / "model")
    assert (
        not oracle.logits(oracle.load(folder, torch.float16), oracle.random_tokens(5))
        .isfinite()
        .any()
    )
    with raises(NonFiniteError, "float16", "bf16"):
        # The kernels of CPUs keep hidden states in float32.
        model = load_model(folder, backend="reference")
        next(quantkit.generate(model, [3, 4], max_new_tokens=2))
    assert next(
        quantkit.generate(load_model(folder, dtype=torch.bfloat16), [3, 4], max_new_tokens=2)
    )


def test_cached_steps_give_the_logits_of_one_pass(tmp_path: Path) -> None:
    from quantkit.model.cache import KVCache

    model = load_model(oracle.save(oracle.make("llama"), tmp_path / "model"), dtype=torch.float32)
    tokens = oracle.random_tokens(12, batch=2)
    cache = KVCache(model.config, 2, 20, torch.float32, "cpu")
    with torch.inference_mode():
        whole = model(tokens, torch.arange(12))
        steps = [model(tokens[:, :5], torch.arange(5), cache)]
        steps += [model(tokens[:, t : t + 1], torch.tensor([t]), cache) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-5)


ROUNDED = ("gemma3-features", "olmo3-features", "glm4", "llama-head-dim", "dynamic")
"""Cases that are compiled in int4 too: its linears are the same in all families."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [*DENSE, "dynamic"])
def test_prefill_and_decode_are_one_graph_each(case: str, tmp_path: Path) -> None:
    from quantkit.model.cache import KVCache

    rope = {"rope_parameters": dict(ROPES["dynamic"])} if case == "dynamic" else {}
    kind, changes = CASES.get(case, ("llama", rope))
    layers = {} if "layer_types" in changes else {"num_hidden_layers": 2}
    folder = oracle.save(oracle.make(kind, **changes, **layers), tmp_path / "model")
    paths = [folder]
    if case in ROUNDED:
        paths.append(tmp_path / "int4")
        quantkit.quantize(folder, paths[1], "int4-g32", method="rtn", accept_quality_loss=True)
    for path in paths:
        model = load_model(path, dtype=torch.float32)
        cache, eager_cache = (KVCache(model.config, 1, 16, torch.float32, "cpu") for _ in range(2))
        step = torch.compile(model, fullgraph=True, backend="eager")
        tokens = oracle.random_tokens(9)
        with torch.inference_mode():
            for part, positions in (
                (tokens[:, :8], torch.arange(8)),
                (tokens[:, 8:], torch.tensor([8])),
            ):
                found, expected = step(part, positions, cache), model(part, positions, eager_cache)
                # Over a longer cache torch rounds attention otherwise, which kernels that round
                # their inputs enlarge.
                bound = {"rtol": 0.0, "atol": 1e-3} if path.name == "int4" else {}
                torch.testing.assert_close(found, expected, **bound)
    torch.compiler.reset()
