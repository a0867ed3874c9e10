"""The Triton kernels for experts against float64: through Triton's interpreter, or on a GPU where
there is one.

`test_triton_interpreter` runs this file in a separate process. On a GPU: ``pytest
tests/kernels/triton_experts.py``.
"""

from __future__ import annotations

import pytest
import torch
from expert_formulas import Mixture, summed
from torch import Tensor
from triton_quick import quicken

from quantkit.kernels.triton_backend import TritonBackend
from quantkit.kernels.triton_experts import choose_experts_config, sort_places_into_blocks
from quantkit.kernels.triton_tiles import GpuSpec
from quantkit.kernels.triton_words import INTERPRETED
from quantkit.tensors.scheme import QuantScheme

quicken()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"
)


def _given(mixture: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    kernel = TritonBackend().offer_kernels().experts
    assert kernel is not None
    gate_up, down = mixture.stacked(TritonBackend(), kernel, DEVICE)
    given = kernel.run(
        x.to(DEVICE),
        weights.to(DEVICE),
        chosen.to(DEVICE),
        gate_up,
        down,
        mixture.activation,
        mixture.limit,
    )
    return given.cpu()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("int8", 1),
        ("int8", 40),
        ("int4-g32", 1),
        ("int4-g32", 3),
        ("int4-g64-asym", 3),
        ("int4-g64-asym", 40),
        ("int4-g128", 3),
    ],
)
def test_each_token_goes_through_its_experts(text: str, tokens: int) -> None:
    mixture = Mixture.random(text, count=5, hidden=128, size=128 if text.endswith("g128") else 64)
    x, (weights, chosen) = torch.randn(tokens, 128), mixture.choices(tokens, 3)
    found = _given(mixture, x, weights, chosen)
    expected = summed(mixture, x, weights, chosen)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [2, 30])
def test_halves_biases_and_clamped_gates(dtype: torch.dtype, tokens: int) -> None:
    mixture = Mixture.random(
        "int4-g32", count=4, hidden=96, size=32, activation="swiglu_oai", limit=0.5, bias=True
    )
    x, (weights, chosen) = torch.randn(tokens, 96).to(dtype), mixture.choices(tokens, 2)
    found = _given(mixture, x, weights, chosen)
    assert found.dtype == dtype
    expected = summed(mixture, x, weights, chosen)
    assert (found.double() - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm()


def test_what_is_not_finite_stays_with_its_expert_and_its_token() -> None:
    mixture = Mixture.random("int8", count=4, hidden=64, size=32)
    x, chosen = torch.randn(12, 64), torch.tensor([[0, 1], [2, 3]] * 6)
    mixture.gate_up[2].scale[5] = torch.nan
    x[4, 7] = torch.nan
    found = _given(mixture, x, torch.ones(12, 2), chosen)
    bad = torch.tensor([row % 2 == 1 or row == 4 for row in range(12)])
    assert not found[bad].isfinite().any()
    assert found[~bad].isfinite().all()


def test_places_fill_blocks_of_one_expert_each() -> None:
    chosen = torch.tensor([[3, 1], [3, 0], [1, 3], [3, 5]])
    places, experts = sort_places_into_blocks(chosen, 6, 2)
    assert experts.tolist() == [0, 1, 3, 3, 5] + [6] * (4 + 6 - 5)
    assert places.view(-1, 2)[:5].tolist() == [[3, 8], [1, 4], [0, 2], [5, 6], [7, 8]]
    assert (places[10:] == 8).all()
    assert [part.tolist() for part in sort_places_into_blocks(chosen[:1], 6, 1)] == [[0, 1], [3, 1]]


def test_tiles_grow_with_the_places_of_an_expert() -> None:
    gpu = GpuSpec("large", 132, 232448)
    configs = [
        choose_experts_config(4, places, 128, 1536, 2048, False, gpu)
        for places in (8, 1024, 32768, 1 << 20)
    ]
    assert [(config.path, config.block_m) for config in configs] == [
        ("gemv", 1),
        ("gemm", 16),
        ("gemm", 128),
        ("gemm", 128),
    ]
    assert all(config.split == 1 for config in configs)


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_compiler_sees_one_graph(tokens: int) -> None:
    mixture = Mixture.random("int4-g32", count=4, hidden=64, size=32)
    kernel = TritonBackend().offer_kernels().experts
    assert kernel is not None
    gate_up, down = mixture.stacked(TritonBackend(), kernel, DEVICE)
    x, (weights, chosen) = torch.randn(tokens, 64), mixture.choices(tokens, 2)

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return kernel.run(x, weights, chosen, gate_up, down, "silu", None)

    operands = x.to(DEVICE), weights.to(DEVICE), chosen.to(DEVICE)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*operands), run(*operands))


def test_the_operator_passes_torchs_own_checks() -> None:
    mixture = Mixture.random("int4-g32-asym", count=3, hidden=64, size=32)
    kernel = TritonBackend().offer_kernels().experts
    assert kernel is not None
    gate_up, _ = mixture.stacked(TritonBackend(), kernel, DEVICE)
    prepared = gate_up.prepared
    x, (_, chosen) = torch.randn(2, 64, device=DEVICE), mixture.choices(2, 2)
    torch.library.opcheck(
        torch.ops.quantkit_triton.grouped_linear.default,
        (x, prepared["words"], prepared["scale"], prepared["zero"], None, chosen.to(DEVICE), 32),
    )
    assert QuantScheme.parse("int4-g32-asym") == gate_up.scheme
