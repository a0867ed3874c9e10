"""The kernels for mixtures of experts on a CPU: alone against float64, and in whole blocks
against the modules.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_formulas import Mixture, summed
from fused_blocks import WrongBackend, block_logits
from instruction_sets import HERE
from random_weights import RandomVectors
from torch import Tensor

from quantkit.architectures.config import ExpertsConfig, LayerConfig
from quantkit.architectures.topology import linear_columns
from quantkit.evals.synthetic import synthetic
from quantkit.kernels import cpu
from quantkit.kernels.backend import Backend, ExpertKernel
from quantkit.kernels.dispatch import list_allowed_backends, select_backend
from quantkit.kernels.library import load_kernels
from quantkit.model.decoder import Decoder
from quantkit.model.feed_forward import Experts
from quantkit.model.linear import QuantLinear
from quantkit.model.load import load_model
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

CPU = torch.device("cpu")


def _kernel(text: str, name: str) -> tuple[Backend, ExpertKernel]:
    backend = select_backend(
        QuantScheme.parse(text), CPU, torch.float32, torch.float32, list_allowed_backends(name)
    )
    operations = backend.offer_kernels()
    assert operations is not None
    assert operations.experts is not None
    return backend, operations.experts


def _given(
    mixture: Mixture, text: str, name: str, x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    backend, kernel = _kernel(text, name)
    linears = mixture.stacked(backend, kernel, CPU)
    return kernel.run(x, weights, chosen, *linears, mixture.activation, mixture.limit)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("text", ["int8", "int4-g32", "int4-g64-asym"])
def test_each_token_goes_through_its_experts(
    text: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    mixture = Mixture.random(text, count=6, hidden=128, size=64)
    for tokens in (1, 2, 17, 150):
        x, (weights, chosen) = torch.randn(tokens, 128), mixture.choices(tokens, 3)
        expected = summed(mixture, x, weights, chosen)
        for name, bound in (("cpu-exact", 1e-4), ("cpu-fast", 2e-2)):
            found = _given(mixture, text, name, x, weights, chosen)
            assert (found - expected).norm() < bound * expected.norm()


def test_activations_biases_and_widths_that_fill_no_band() -> None:
    activations = ("silu", "gelu_tanh", "swiglu_oai")
    dtypes = (torch.float32, torch.bfloat16)
    for activation, dtype, size in itertools.product(activations, dtypes, (40, 49)):
        mixture = Mixture.random(
            "int8", count=4, hidden=100, size=size, activation=activation, limit=0.5, bias=True
        )
        x, (weights, chosen) = torch.randn(9, 100).to(dtype), mixture.choices(9, 2)
        product = _given(mixture, "int8", "cpu-exact", x, weights, chosen)
        expected = summed(mixture, x, weights, chosen)
        case = activation, dtype, size
        assert product.dtype == dtype, case
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
        error = (product.double() - expected).norm()
        assert error < tolerance * expected.norm(), case


def test_a_tokens_bits_do_not_depend_on_the_tokens_next_to_it() -> None:
    mixture = Mixture.random("int4-g32", count=8, hidden=96, size=64)
    x, (weights, chosen) = torch.randn(300, 96), mixture.choices(300, 3)
    backend, kernel = _kernel("int4-g32", "cpu-fast")
    linears = mixture.stacked(backend, kernel, CPU)
    together = kernel.run(x, weights, chosen, *linears, "silu", None)
    for row in (0, 7, 299):
        part = slice(row, row + 1)
        assert torch.equal(
            together[part], kernel.run(x[part], weights[part], chosen[part], *linears, "silu", None)
        )


def test_an_expert_that_is_not_finite_spoils_its_own_tokens_only() -> None:
    mixture = Mixture.random("int8", count=4, hidden=64, size=32)
    mixture.down[2].scale[5] = torch.nan
    x, chosen = torch.randn(12, 64), torch.tensor([[0, 1], [2, 3]] * 6)
    found = _given(mixture, "int8", "cpu-exact", x, torch.ones(12, 2), chosen)
    assert found[::2].isfinite().all()
    assert found[1::2, 5].isnan().all()


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_that_is_not_there_is_refused(expert: int) -> None:
    mixture = Mixture.random("int8", count=4, hidden=64, size=32)
    with pytest.raises(RuntimeError, match=f"expert {expert}"):
        _given(
            mixture,
            "int8",
            "cpu-exact",
            torch.randn(1, 64),
            torch.ones(1, 1),
            torch.tensor([[expert]]),
        )


MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_size": 64, "shared_gate": True, "normalized": False},
    "biases": {
        "bias": True,
        "router_bias": True,
        "activation": "swiglu_oai",
        "activation_limit": 2.0,
    },
    "among dense layers": {"dense": (1,), "qk_norm": "head"},
    "norms": {
        "norms": "both",
        "residual_multiplier": 0.3,
        "shared_size": 96,
        "activation": "gelu_tanh",
    },
    "norms after": {"norms": "after"},
    "all": {"count": 3},
    "sigmoids": {"scores": "sigmoid"},
    "sigmoids as they are": {"scores": "sigmoid", "normalized": False, "scaling": 2.5},
    "corrected": {"score_correction": True},
    "corrected, shares of all": {"score_correction": True, "normalized": False},
    "an addend and a factor": {"normalization_eps": 0.2, "scaling": 1.5},
    "as in LFM2": {
        "scores": "sigmoid",
        "score_correction": True,
        "normalization_eps": 1e-6,
        "scaling": 1.5,
        "dense": (0,),
        "qk_norm": "head",
    },
    "without gates": {"mlp_gate": False, "activation": "relu2", "shared_size": 64, "dense": (1,)},
    "weighted inputs": {
        "weighted_inputs": True,
        "scores": "sigmoid",
        "normalized": False,
        "shared_size": 64,
        "residual_multiplier": 0.3,
    },
    "latent states": {"latent_size": 64},
    "latent states and others, as in Nemotron H": {
        "latent_size": 96,
        "shared_size": 64,
        "mlp_gate": False,
        "activation": "relu2",
        "scores": "sigmoid",
        "residual_multiplier": 0.3,
    },
    "latent states, norms": {"latent_size": 64, "shared_size": 64, "norms": "both"},
    "parallel": {"parallel_branches": True, "shared_size": 64},
    "parallel, norms after": {"parallel_branches": True, "norms": "after"},
}


def _mixture(
    scheme: str | None,
    overrides: tuple[Override, ...] = (),
    *,
    dense: tuple[int, ...] = (),
    dtype: str = "float32",
    **changes: Any,
) -> RandomVectors:
    """Random weights of a small mixture of experts."""
    own = {field.name for field in dataclasses.fields(ExpertsConfig)} & set(changes)
    experts = ExpertsConfig(
        **{"count": 8, "size": 96, "per_token": 3, **{name: changes.pop(name) for name in own}}
    )
    config = dataclasses.replace(
        synthetic("llama-160m", None).config,
        hidden_size=128,
        intermediate_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=96,
        dtype=dtype,
        experts=experts,
        layers=tuple(LayerConfig(experts=layer not in dense) for layer in range(3)),
        **changes,
    )
    recipe = None if scheme is None else Recipe(QuantScheme.parse(scheme), overrides)
    schemes = {} if recipe is None else recipe.assign(linear_columns(config))
    return RandomVectors(Path("mixture"), config, schemes)


def _tokens() -> Tensor:
    return torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(0))


def _banks(model: Decoder) -> list[Any]:
    return [module.bank for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
def test_blocks_in_one_call_give_the_modules_logits(case: str, scheme: str) -> None:
    checkpoint = _mixture(scheme, **MIXTURES[case])
    model = load_model(checkpoint, dtype=torch.float32, backend="cpu-exact")
    assert model.ops.blocks is not None
    steps = [5, 1, 1, 20, 13]
    found = block_logits(model, _tokens(), steps, torch.float32)
    model.ops = dataclasses.replace(model.ops, blocks=None)
    banked = block_logits(model, _tokens(), steps, torch.float32)
    for module in model.modules():
        if isinstance(module, Experts):
            assert module.bank is not None
            module.bank = None
    one_by_one = block_logits(model, _tokens(), steps, torch.float32)
    assert (found - one_by_one).abs().max() < 1e-3 * one_by_one.std()
    assert (banked - one_by_one).abs().max() < 1e-3 * one_by_one.std()
    reference = load_model(checkpoint, dtype=torch.float32, backend="reference")
    assert _banks(reference) == [None] * len(_banks(reference))
    whole = block_logits(reference, _tokens(), [40], torch.float32)
    assert (found - whole).abs().max() < 1e-2 * whole.std()


@pytest.mark.parametrize(
    "case",
    ["shared", "as in LFM2", "without gates", "parallel", "latent states", "weighted inputs"],
)
def test_sequences_together_have_the_bits_that_each_has_alone(case: str) -> None:
    model = load_model(
        _mixture("int4-g32", **MIXTURES[case]), dtype=torch.float32, backend="cpu-fast"
    )
    assert model.ops.blocks is not None
    texts = torch.cat([_tokens(), _tokens().flip(0)])
    together = block_logits(model, texts, [30, 1, 1], torch.float32)
    for row in range(4):
        assert torch.equal(
            together[row], block_logits(model, texts[row : row + 1], [30, 1, 1], torch.float32)[0]
        )


def test_the_weights_of_a_bank_are_there_once() -> None:
    model = load_model(_mixture("int4-g32"), dtype=torch.float32, backend="cpu-exact")
    for module in model.modules():
        if isinstance(module, Experts):
            linears = [linear for linear in module.modules() if isinstance(linear, QuantLinear)]
            memories = {
                linear.get_buffer("packed").untyped_storage().data_ptr() for linear in linears
            }
            assert len(linears) == 16
            assert len(memories) == 2


def test_a_bfloat16_model_takes_its_router_as_it_is() -> None:
    model = load_model(_mixture("int8", dtype="bfloat16", shared_size=32, shared_gate=True))
    assert model.ops.blocks is not None
    found = block_logits(model, _tokens(), [9, 1, 30], torch.bfloat16)
    floats = load_model(_mixture("int8", shared_size=32, shared_gate=True), dtype=torch.float32)
    whole = block_logits(floats, _tokens(), [40], torch.float32)
    assert (found - whole).norm() < 0.1 * whole.norm()


@pytest.mark.parametrize("left_out", ["*.1.mlp.experts.2.down_proj", "*.1.mlp.experts.2.up_proj"])
def test_experts_that_are_quantized_differently_go_one_by_one(left_out: str) -> None:
    model = load_model(
        _mixture("int8", (Override(left_out, None),)), dtype=torch.float32, backend="cpu-exact"
    )
    assert [bank is None for bank in _banks(model)] == [False, True, False]
    assert model.ops.blocks is None
    reference = load_model(
        _mixture("int8", (Override(left_out, None),)), dtype=torch.float32, backend="reference"
    )
    found, expected = (
        block_logits(one, _tokens(), [5, 35], torch.float32) for one in (model, reference)
    )
    assert (found - expected).abs().max() < 1e-2 * expected.std()


@pytest.mark.parametrize("feature", [{"expert_scales": True}, {"separate_norms": True}], ids=str)
def test_a_mixture_with_a_feature_that_the_kernel_does_not_know_is_not_for_it(
    feature: dict[str, Any],
) -> None:
    assert load_model(_mixture("int8", **feature), dtype=torch.float32).ops.blocks is None


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lower_number(
    scores: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrections alone decide, and two experts have the same."""
    monkeypatch.setenv("QUANTKIT_CPU", variant)
    checkpoint = _mixture("int8", scores=scores, score_correction=True, per_token=2)
    model = load_model(checkpoint, dtype=torch.float32, backend="reference")
    fused = load_model(checkpoint, dtype=torch.float32, backend="cpu-exact")
    for one in (model, fused):
        for module in one.modules():
            if isinstance(module, Experts):
                assert module.score_correction is not None
                module.gate.weight.data.zero_()
                module.score_correction.data.copy_(torch.tensor([0, 0, 3, 1, 0, 3, 3, 2.0]))
    assert fused.ops.blocks is not None
    x = torch.randn(1, 3, 128)
    first = model.model.layers[0].mlp
    assert isinstance(first, Experts)
    assert first.route(x)[1].tolist() == [[[2, 5]] * 3]
    found, expected = (
        block_logits(one, _tokens(), [5, 35], torch.float32) for one in (fused, model)
    )
    assert (found - expected).abs().max() < 1e-2 * expected.std()


@pytest.mark.parametrize("share", [0.15, 5.0])
@pytest.mark.parametrize(
    ("wrong", "found"), [("experts", "experts"), ("run_blocks", "decoder blocks")]
)
def test_kernels_for_experts_that_a_compiler_got_wrong_are_not_used(
    wrong: str,
    found: str,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels = load_kernels()
    monkeypatch.setattr(cpu, "load_kernels", lambda: WrongBackend(kernels, wrong, share))
    model = load_model(_mixture("int8"), dtype=torch.float32)
    assert model.ops.blocks is None
    assert (
        f"{found} by the compiled kernels are wrong on this machine; torch's are used"
        in caplog.text
    )
    assert (None in _banks(model)) == (wrong == "experts")


@pytest.mark.slow
def test_a_step_of_experts_compiles_into_one_graph() -> None:
    for scheme in ("int8", None):
        model = load_model(_mixture(scheme), dtype=torch.float32)
        model.ops = dataclasses.replace(model.ops, blocks=None)
        experts = model.model.layers[0].mlp
        assert isinstance(experts, Experts)
        compiled = torch.compile(experts.output, backend="eager", fullgraph=True)
        x = torch.randn(1, 9, 128)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), experts.output(x))
