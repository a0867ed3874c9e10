"""Decoder blocks in one call of a kernel against the decoder's own modules."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES, FULLEST
from fused_blocks import WrongBackend, block_logits, hidden_states
from instruction_sets import HERE
from torch import Tensor

import quantkit
from quantkit.architectures.families import config_from_hf
from quantkit.kernels import cpu
from quantkit.kernels.library import load_kernels
from quantkit.model import fused_blocks
from quantkit.model.attention import attend_with_mask
from quantkit.model.cache import KVCache
from quantkit.model.fused_blocks import block_features
from quantkit.model.linear import QuantLinear, float_linear
from quantkit.model.load import load_model
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels


# The kernels for blocks have one activation of gpt-oss and no norms of values.
_NOT_SERVED = ("gpt-oss-limits", "gemma4")
SERVED = [case for case in CASES if not case.startswith(_NOT_SERVED)]


@pytest.mark.parametrize(
    "case",
    [
        "qwen3-5-moe",
        "qwen3-next",
        "granitemoehybrid-moe",
        "lfm2-moe",
        "nemotron-h-moe",
        "nemotron-h-moe-latent",
    ],
)
def test_layers_with_states_and_experts_pass_the_check_at_load(case: str, tmp_path: Path) -> None:
    """It runs the mixer twice for rows with close choices of experts."""
    kind, changes = CASES[case]
    folder = oracle.save(oracle.make(kind, **changes), tmp_path / "model")
    model = load_model(folder, dtype=torch.float32, backend="cpu-exact")
    assert model.ops.blocks is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        *((case, "int4-g32") for case in SERVED),
        *((case, "int8") for case in SERVED if case in FULLEST),
    ],
)
def test_blocks_in_one_call_give_the_modules_logits(case: str, scheme: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    folder = oracle.save(oracle.make(kind, **changes), tmp_path / "model")
    known = kind == "gpt_oss"  # whose experts are not found by names
    how: dict[str, Any] = {"accept_quality_loss": True} if known else {"tensors_only": True}
    quantkit.quantize(folder, tmp_path / "quantized", scheme, method="rtn", **how)
    model = load_model(tmp_path / "quantized", dtype=torch.float32, backend="cpu-exact")
    steps = [5, 1, 1, 20, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1]
    if (
        model.config.rope_switch is not None
    ):  # keys that were stored before it are not those of one pass
        steps = [5, 1, 1, 10, 1, 1, 3]
        assert sum(steps) <= model.config.rope_switch
    count = sum(steps)
    tokens = oracle.random_tokens(count, batch=2)
    assert model.ops.blocks is not None
    # With random weights, what a head reads by a delta rule is small, and the norm after it
    # stretches the rounding of activations, which fall on other sides of ties.
    share = 1e-3 if model.config.gated_delta is None else 4e-3
    all_found = [
        block_logits(model, tokens, steps, torch.float32, is_prefill=is_prefill)
        for is_prefill in (True, False)
    ]
    with torch.inference_mode():
        all_found.append(model(tokens, torch.arange(count)))
    model.ops = dataclasses.replace(model.ops, blocks=None)
    expected = block_logits(model, tokens, steps, torch.float32)
    for found in all_found:
        assert (found - expected).abs().max() < share * expected.std()
    exact = load_model(tmp_path / "quantized", dtype=torch.float32, backend="reference")
    assert exact.ops.blocks is None
    whole = block_logits(exact, tokens, [count], torch.float32)
    assert (found - whole).abs().max() < 1e-2 * whole.std()


PIECES = [
    [(0, 0, 7)],
    [(2, 0, 3), (0, 7, 1)],
    [(1, 0, 25), (0, 8, 1), (2, 3, 2)],
    [(0, 9, 1), (1, 25, 1), (2, 5, 1)],
]
"""Steps of three sequences: of each piece the sequence, its first position, and how many tokens."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "mistral-window",
        "qwen3-bias",
        "smollm3",
        "hunyuan-dense",
        "cohere2-features",
        "llama4",
    ],
)
@pytest.mark.parametrize(
    ("backend", "cached"),
    [
        ("cpu-exact", torch.float32),
        ("cpu-fast", torch.bfloat16),
        ("cpu-exact", torch.int8),
        ("reference", torch.float32),
        ("reference", torch.int8),
    ],
    ids=str,
)
def test_sequences_that_come_and_go_are_each_as_if_alone(
    case: str, backend: str, cached: torch.dtype, tmp_path: Path
) -> None:
    """One row a token: those of a sequence one after the other, in slots that are not in order."""
    kind, changes = CASES[case]
    folder = oracle.save(oracle.make(kind, **changes), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "quantized", "int4-g32", method="rtn", tensors_only=True)
    model = load_model(tmp_path / "quantized", dtype=torch.float32, backend=backend)
    texts, slots = oracle.random_tokens(30, batch=3), [4, 0, 2]
    shared, found = KVCache(model.config, 5, 31, cached, "cpu"), dict[int, list[Tensor]]()
    with torch.inference_mode():
        for step in PIECES:
            rows = [(text, start + place) for text, start, count in step for place in range(count)]
            tokens = torch.stack([texts[text, position] for text, position in rows]).unsqueeze(1)
            positions = torch.tensor([[position] for _, position in rows])
            places = torch.tensor([slots[text] for text, _ in rows])
            hidden = model.hidden(tokens, positions, shared, slots=places)
            for (text, _), row in zip(rows, hidden[:, 0], strict=True):
                found.setdefault(text, []).append(row)
        for text, states in found.items():
            own = [count for step in PIECES for other, _, count in step if other == text]
            alone = hidden_states(model, texts[text : text + 1], own, cached)[0]
            together = torch.stack(states)
            if backend == "reference":
                bound = (
                    1e-4 if cached == torch.float32 else 1e-2
                )  # codes at an edge fall either way
                torch.testing.assert_close(together, alone, rtol=bound, atol=bound)
            else:
                assert torch.equal(together, alone)


@pytest.mark.parametrize(
    "case", ["hunyuan-dense", "cohere2", "lfm2-moe", "nemotron-h-moe-latent", "llama4"]
)
def test_neither_chunks_of_a_prompt_nor_other_sequences_change_a_bit(
    case: str, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    folder = oracle.save(oracle.make(kind, **changes), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "quantized", "int4-g32", method="rtn", tensors_only=True)
    model = load_model(tmp_path / "quantized", dtype=torch.float32, backend="cpu-exact")
    assert model.ops.blocks is not None
    tokens = oracle.random_tokens(50, batch=3)
    for cached in (torch.float32, torch.int8):
        together = hidden_states(model, tokens, [48, 1, 1], cached)
        # Chunks of more rows than attention treats as few.
        for row, steps in ((0, [48, 1, 1]), (1, [31, 17, 1, 1]), (2, [20, 28, 1, 1])):
            alone = hidden_states(model, tokens[row : row + 1], steps, cached)
            assert torch.equal(alone[0], together[row]), (cached, steps)


def _features(case: str) -> frozenset[str]:
    kind, changes = CASES[case]
    return block_features(config_from_hf(oracle.make(kind, **changes).config.to_dict(), Path(case)))


def test_a_configs_features_are_its_fields_that_are_not_at_their_defaults() -> None:
    assert _features("llama") == frozenset()
    assert _features("llama-biases") == {"qkv_bias", "output_bias", "mlp_bias"}
    assert _features("mistral-window") == {"window"}
    assert _features("qwen3") == {"qk_norm"}
    assert _features("smollm3") == {"rotary"}


def test_a_kernel_is_passed_by_for_features_that_it_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = oracle.save(oracle.make("llama"), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "quantized", "int8", accept_quality_loss=True)
    monkeypatch.setattr(fused_blocks, "block_features", lambda config: frozenset({"sandwich"}))
    model = load_model(tmp_path / "quantized", dtype=torch.float32)
    assert model.ops.blocks is None
    assert model.ops.cached_attention is not attend_with_mask
    monkeypatch.setattr(cpu, "BLOCK_FEATURES", cpu.BLOCK_FEATURES | {"sandwich"})
    assert load_model(tmp_path / "quantized", dtype=torch.float32).ops.blocks is not None


def test_more_rows_than_have_inner_states_at_a_time(tmp_path: Path) -> None:
    folder = oracle.save(oracle.make("llama"), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "quantized", "int8", accept_quality_loss=True)
    model = load_model(tmp_path / "quantized", dtype=torch.float32, backend="cpu-exact")
    tokens = oracle.random_tokens(40, batch=15)  # 600 rows, 512 at a time
    with torch.inference_mode():
        found = model(tokens, torch.arange(40))
        model.ops = dataclasses.replace(model.ops, blocks=None)
        expected = model(tokens, torch.arange(40))
    assert (found - expected).abs().max() < 1e-3 * expected.std()


@pytest.mark.parametrize("variant", HERE)
def test_a_bfloat16_model_keeps_its_cache_in_bfloat16(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    folder = oracle.save(oracle.make("llama"), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "quantized", "int8", accept_quality_loss=True)
    model = load_model(tmp_path / "quantized", dtype=torch.bfloat16)
    assert model.ops.blocks is not None
    found = block_logits(model, oracle.random_tokens(9), [4, 1, 1, 1, 1, 1], torch.bfloat16)
    whole = block_logits(
        load_model(tmp_path / "quantized", dtype=torch.float32),
        oracle.random_tokens(9),
        [9],
        torch.float32,
    )
    assert (found - whole).abs().max() < 0.05 * whole.std()


def test_linears_that_are_quantized_differently_become_one_and_floats_stay_apart(
    tmp_path: Path,
) -> None:
    folder = oracle.save(oracle.make("llama"), tmp_path / "model")
    plan = Recipe(
        QuantScheme.parse("int8"),
        (
            Override("*.1.self_attn.k_proj", QuantScheme.parse("int4-g32")),
            Override("*.2.mlp.up_proj", None),
        ),
    )
    quantkit.quantize(folder, tmp_path / "quantized", plan, method="rtn", accept_quality_loss=True)
    model = load_model(tmp_path / "quantized", dtype=torch.float32)
    quantized = {
        name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)
    }
    assert quantized["model.layers.0.self_attn.qkv_proj"].joined == ()
    int8 = QuantScheme.parse("int8")
    assert quantized["model.layers.1.self_attn.qkv_proj"].joined == (
        QuantScheme.parse("int4-g32"),
        int8,
    )
    assert "model.layers.2.mlp.gate_proj" in quantized
    assert model.ops.blocks is not None
    reference = load_model(tmp_path / "quantized", dtype=torch.float32, backend="reference")
    tokens = oracle.random_tokens(9)
    found, expected = (
        block_logits(each, tokens, [5, 1, 3], torch.float32) for each in (model, reference)
    )
    assert (found - expected).abs().max() < 1e-2 * expected.std()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", ["float_linear", "cached_attention", "run_blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.15, 5.0])
def test_operations_that_a_compiler_got_wrong_are_not_used(
    wrong: str,
    dtype: torch.dtype,
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = oracle.save(oracle.make("llama"), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "quantized", "int8", accept_quality_loss=True)
    tokens = oracle.random_tokens(9)
    good = load_model(tmp_path / "quantized", dtype=dtype)
    expected = block_logits(good, tokens, [4, 1, 1, 1, 2], dtype)
    assert not caplog.records
    kernels = load_kernels()
    monkeypatch.setattr(cpu, "load_kernels", lambda: WrongBackend(kernels, wrong, share))
    model = load_model(tmp_path / "quantized", dtype=dtype)
    assert model.ops.blocks is None
    # A failure of a later operation leaves this one as it is.
    assert (model.ops.float_linear is float_linear) == (wrong == "float_linear")
    assert "torch" in caplog.text
    actual = block_logits(model, tokens, [4, 1, 1, 1, 2], dtype)
    assert (actual - expected).abs().max() < (
        1e-3 if dtype == torch.float32 else 0.1
    ) * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g128"])
def test_the_exact_mode_writes_the_references_text(
    scheme: str, demo_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(
        demo_model, tmp_path / "quantized", scheme, method="rtn", accept_quality_loss=True
    )
    texts = []
    for backend in ("cpu-exact", "reference"):
        model, tokenizer = quantkit.load(
            tmp_path / "quantized", dtype=torch.float32, backend=backend
        )
        model.config = dataclasses.replace(model.config, eos_token_ids=())
        ids = tokenizer.encode("Fellow citizens, the state of")
        texts.append(list(quantkit.generate(model, ids, max_new_tokens=200)))
    assert texts[0] == texts[1]
    assert len(texts[0]) == 200


def test_small_operations_keep_to_the_calling_thread(tmp_path: Path) -> None:
    folder = oracle.save(oracle.make("llama"), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "quantized", "int8", accept_quality_loss=True)
    model = load_model(tmp_path / "quantized")
    try:
        torch.set_num_threads(3)
        with model.ops.single_threaded():
            inside = torch.get_num_threads()
        assert (inside, torch.get_num_threads()) == (1, 3)
    finally:
        torch.set_num_threads(1)
