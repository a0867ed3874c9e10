"""Models with float layers in the fused blocks of the CPU kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES
from fused_blocks import block_logits, hidden_states
from instruction_sets import DTYPES, HERE
from torch import nn

import quantkit
from quantkit.errors import UnsupportedError
from quantkit.kernels import cpu, dispatch
from quantkit.model.cache import KVCache
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.linear import QuantLinear, float_linear
from quantkit.model.load import load_model
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

STEPS = [5, 1, 1, 20, 1, 3, 1, 1]
INT8 = QuantScheme.parse("int8")
# Layers that are left in floats, beside others of their block that are quantized.
LEFT_OUT = {
    "values": ("*.v_proj",),
    "a block": ("*.1.self_attn.*", "*.1.mlp.*"),
    "down and gate": ("*.down_proj", "*.gate_proj"),
    "attention": ("*.self_attn.*",),
    "the head": ("lm_head",),
}


MIXTURES = ("mixtral", "qwen3-moe", "olmoe", "qwen2-moe", "gpt-oss")
"""The last two have shared experts, and experts with biases."""


def _make(tmp_path: Path, case: str = "llama") -> Path:
    kind, changes = CASES[case]
    return oracle.save(oracle.make(kind, **changes), tmp_path / "model")


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_float_model_has_the_logits_of_transformers(
    variant: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, of its weights: activations are float32, only the cache has 16 bits."""
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    # Biases of a linear that is not fused with others, norms of heads, and other halves of blocks.
    for number, case in enumerate(("llama-biases", "qwen3", "gemma2")):
        folder = _make(tmp_path / str(number), case)
        model = load_model(folder, dtype=dtype)
        assert model.ops.blocks is not None
        rounded = oracle.load(folder)
        for parameter in rounded.parameters():
            parameter.data = parameter.data.to(dtype).float()
        tokens = oracle.random_tokens(sum(STEPS), batch=2)
        expected = oracle.logits(rounded, tokens)
        found = block_logits(model, tokens, STEPS, torch.float32)
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-3 * expected.std(), case
        cached = block_logits(model, tokens, STEPS, dtype)
        bound = 2e-3 if dtype == torch.float32 else 0.05
        assert (cached - expected).abs().max() < bound * expected.std(), case


@pytest.mark.parametrize("variant", HERE)
def test_the_fast_backend_rounds_activations_of_bfloat16_models(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    folder = _make(tmp_path)
    exact, fast = (
        load_model(folder, dtype=torch.bfloat16, backend=backend)
        for backend in ("cpu-exact", "cpu-fast")
    )
    assert fast.ops.blocks is not None
    tokens = oracle.random_tokens(sum(STEPS), batch=2)
    found, expected = (
        block_logits(model, tokens, STEPS, torch.bfloat16) for model in (fast, exact)
    )
    assert (found - expected).abs().max() < 0.1 * expected.std()
    assert torch.equal(found, expected) == (variant != "avx512-bf16")


@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float_layers_among_quantized_ones_run_in_one_call(
    left_out: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kept = tuple(Override(pattern, None) for pattern in LEFT_OUT[left_out])
    quantkit.quantize(
        _make(tmp_path),
        tmp_path / "mixed",
        Recipe(INT8, kept),
        method="rtn",
        accept_quality_loss=True,
    )
    model = load_model(tmp_path / "mixed", dtype=dtype, backend="cpu-exact")
    assert model.ops.blocks is not None
    kinds = {type(module) for module in model.modules()}
    assert {QuantLinear, nn.Linear} <= kinds
    tokens = oracle.random_tokens(sum(STEPS), batch=2)
    found = block_logits(model, tokens, STEPS, torch.float32)
    reference = load_model(tmp_path / "mixed", dtype=torch.float32, backend="reference")
    if dtype != torch.float32:
        for module in reference.modules():
            # The layers of floats have its weights, in 16 bits.
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.copy_(module.weight.to(dtype))
    expected = block_logits(reference, tokens, [sum(STEPS)], torch.float32)
    bound = 1e-2 if dtype == torch.float32 else 5e-2
    assert (found - expected).abs().max() < bound * expected.std()


@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_of_a_float_model_are_each_as_if_alone(
    dtype: torch.dtype, backend: str, tmp_path: Path
) -> None:
    """Together and alone, in one step and token by token."""
    model = load_model(_make(tmp_path), dtype=dtype, backend=backend)
    tokens = oracle.random_tokens(12, batch=33)
    together = hidden_states(model, tokens, [5, 1, 6], dtype)
    assert torch.equal(model.head(together[:, -1]), model.head(together)[:, -1])
    for row in (0, 17, 32):
        for steps in ([5, 1, 6], [12], [1] * 12):
            alone = hidden_states(model, tokens[row : row + 1], steps, dtype)
            assert torch.equal(alone[0], together[row]), (row, steps)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("case", MIXTURES)
def test_a_float_mixture_has_the_logits_of_transformers(
    case: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    folder = _make(tmp_path, case)
    tokens = oracle.random_tokens(sum(STEPS), batch=9)
    for dtype in DTYPES:
        model = load_model(folder, dtype=dtype, backend="cpu-exact")
        assert model.ops.blocks is not None
        rounded = oracle.load(folder)
        for parameter in rounded.parameters():
            parameter.data = parameter.data.to(dtype).float()
        expected = oracle.logits(rounded, tokens)
        for batch in range(1, 10):
            found = block_logits(model, tokens[:batch], STEPS, torch.float32)
            error = (found - expected[:batch]).abs().max()
            assert error < 1e-3 * expected.std(), (dtype, batch)


@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast"])
@pytest.mark.parametrize("case", MIXTURES)
def test_sequences_of_a_float_mixture_are_each_as_if_alone(
    case: str, backend: str, tmp_path: Path
) -> None:
    model = load_model(_make(tmp_path, case), dtype=torch.bfloat16, backend=backend)
    assert model.ops.blocks is not None
    tokens = oracle.random_tokens(8, batch=9)
    alone = []
    for row in range(9):
        alone.append(hidden_states(model, tokens[row : row + 1], [5, 1, 2], torch.bfloat16))
    for batch in range(1, 10):
        together = hidden_states(model, tokens[:batch], [5, 1, 2], torch.bfloat16)
        assert torch.equal(together, torch.cat(alone[:batch])), batch


@pytest.mark.parametrize("kept", ["*.experts.*", "*.experts.*.down_proj", "*.self_attn.*"])
def test_float_experts_run_among_quantized_layers(kept: str, tmp_path: Path) -> None:
    recipe = Recipe(INT8, (Override(kept, None),))
    quantkit.quantize(
        _make(tmp_path, "mixtral"),
        tmp_path / "mixed",
        recipe,
        method="rtn",
        accept_quality_loss=True,
    )
    model = load_model(tmp_path / "mixed", dtype=torch.float32, backend="cpu-exact")
    assert model.ops.blocks is not None
    tokens = oracle.random_tokens(sum(STEPS), batch=2)
    found = block_logits(model, tokens, STEPS, torch.float32)
    model.ops = dataclasses.replace(model.ops, blocks=None)
    by_banks = block_logits(model, tokens, STEPS, torch.float32)
    reference = load_model(tmp_path / "mixed", dtype=torch.float32, backend="reference")
    expected = block_logits(reference, tokens, [sum(STEPS)], torch.float32)
    for logits in (found, by_banks):
        assert (logits - expected).abs().max() < 1e-2 * expected.std()


def test_the_weights_of_float_experts_are_there_once(tmp_path: Path) -> None:
    model = load_model(_make(tmp_path, "mixtral"), dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, Experts):
            bank = module.bank
            assert bank is not None
            for number, expert in enumerate(module.experts):
                assert isinstance(expert, MLP)
                for linear, stacked in (
                    (expert.gate_up_proj, bank.gate_up),
                    (expert.down_proj, bank.down),
                ):
                    assert isinstance(linear, nn.Linear)
                    view = stacked.prepared["weight"][number]
                    assert linear.weight.data_ptr() == view.data_ptr()


def test_float_experts_that_are_trained_run_by_their_modules(tmp_path: Path) -> None:
    model = load_model(_make(tmp_path, "mixtral"), dtype=torch.float32)
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    tokens = oracle.random_tokens(9, batch=2)
    model.get_parameter(name).requires_grad_()
    model(tokens, torch.arange(9)).square().mean().backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    assert gradient.any()


def test_other_sequences_do_not_change_the_text_of_a_float_model(demo_model: Path) -> None:
    model, tokenizer = quantkit.load(demo_model)
    assert model.ops.blocks is not None
    prompts = [tokenizer.encode(text) for text in ("The state", "We", "It was the best of")]
    alone = [list(quantkit.generate(model, ids, max_new_tokens=16)) for ids in prompts]
    together = quantkit.generate_batch(model, prompts, tokenizer=tokenizer, max_new_tokens=16)
    assert [completion.token_ids for completion in together] == alone


@torch.inference_mode()
def test_weights_of_floats_are_not_copied(tmp_path: Path) -> None:
    """The blocks read those of the modules, and those of linears that share an input stay apart."""
    model = load_model(_make(tmp_path), dtype=torch.bfloat16)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 7 * model.config.num_layers + 1
    tokens = oracle.random_tokens(9)
    before = model(tokens)
    for linear in linears[:-1]:
        linear.weight *= 2
    after = model(tokens)
    assert model.ops.blocks is not None
    model.ops = dataclasses.replace(model.ops, blocks=None)
    expected = model(tokens)
    assert (after - expected).abs().max() < 0.2 * expected.std()
    assert (after - before).abs().max() > expected.std()


def test_float_models_that_are_trained_run_by_their_modules(tmp_path: Path) -> None:
    folder = _make(tmp_path)
    model = load_model(folder, dtype=torch.float32)
    assert model.ops.blocks is not None
    theirs = oracle.load(folder)
    tokens = oracle.random_tokens(9, batch=2)
    name = "model.layers.1.mlp.up_proj.weight"
    for each in (model, theirs):
        each.requires_grad_(False)
        each.get_parameter(name).requires_grad_()
    model(tokens, torch.arange(9)).square().mean().backward()
    theirs(tokens).logits.square().mean().backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


def test_the_reference_runs_float_models_by_torch(tmp_path: Path) -> None:
    model = load_model(_make(tmp_path), dtype=torch.bfloat16, backend="reference")
    assert model.ops.blocks is None
    assert model.ops.float_linear is float_linear
    # torch has one product of many rows, not several of few.
    assert isinstance(model.get_submodule("model.layers.0.self_attn.qkv_proj"), nn.Linear)


def test_a_float_model_without_kernels_runs_by_torch_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise UnsupportedError("there is no C++ compiler")

    monkeypatch.setattr(cpu, "load_kernels", missing)
    monkeypatch.setattr(dispatch, "_warned", set())
    model = load_model(_make(tmp_path), dtype=torch.bfloat16)
    assert model.ops.blocks is None
    assert len(caplog.records) == 1
    assert "there is no C++ compiler" in caplog.text
    assert model(oracle.random_tokens(9)).isfinite().all()


def test_a_step_without_a_cache_and_one_over_an_int8_cache_agree(tmp_path: Path) -> None:
    model = load_model(_make(tmp_path), dtype=torch.bfloat16)
    tokens = oracle.random_tokens(30, batch=2)
    whole = model(tokens)
    cache = KVCache(model.config, 2, 33, torch.int8, "cpu")
    with torch.inference_mode():
        found = model(tokens, torch.arange(30), cache)
        modules = dataclasses.replace(model.ops, blocks=None)
        assert model.ops.blocks is not None
        model.ops = modules
        by_torch = model(tokens)
    assert (found - whole).abs().max() < 0.1 * whole.std()
    assert (by_torch - whole).abs().max() < 0.2 * whole.std()
