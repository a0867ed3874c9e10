"""How errors of outputs add up: the sums of the backward pass, which groups have some, and what
is made of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from partial import contents, interrupted
from safetensors.torch import load_file, save_file
from topology_cases import CASES, ENDS
from torch import Tensor

import quantkit
from quantkit.architectures.topology import input_groups
from quantkit.base.progress import Progress, silent
from quantkit.calibration import factor_pass
from quantkit.calibration.effort import (
    EFFORTS,
    GRADIENTS,
    activation_bytes,
    batch_samples,
    factor_bytes,
    gradient_activation_bytes,
)
from quantkit.calibration.factor_pass import measure_factors
from quantkit.calibration.output_factors import OutputFactors
from quantkit.data.files import EXCERPT
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import NonFiniteError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.load import BLOCK_PREFIX
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.block_passes import BlockPasses
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Inputs, Passage
from quantkit.solver.two_sided import OutputFactor
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import find_sites

CPU = torch.device("cpu")
GPTQ: dict[str, Any] = {
    "method": "gptq",
    "calibration": EXCERPT,
    "samples": 8,
    "length": 64,
    "source_check": False,
    "effort": "thorough",
}
FEW: dict[str, Any] = {**GPTQ, "keep": ["model.layers.[23].*"]}
"""Gradients pass through the layers that are kept, and the others are solved."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ActivationStore]:
    found = ActivationStore(tmp_path / "store", 10**9)
    yield found
    found.close()


def _source(case: str, folder: Path) -> quantkit.StoredCheckpoint:
    kind, changes = CASES[case]
    return open_checkpoint(oracle.save(oracle.make(kind, **{**ENDS, **changes}), folder))


def _names(source: quantkit.StoredCheckpoint) -> list[list[str]]:
    """The linears that share their inputs, by full name, of all groups that have factors."""
    config = source.config
    return [
        [BLOCK_PREFIX.format(layer) + module for module in group.modules]
        for layer in range(config.num_layers)
        for group in input_groups(config, layer)
        if group.expert is None
    ]


def _measure(
    source: quantkit.StoredCheckpoint,
    tokens: Tensor,
    wanted: list[str],
    store: ActivationStore,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> OutputFactors:
    """Measure the factors of linears in quantkit's decoder."""
    parts = DecoderParts(source, tokens.shape[1], CPU)
    factors, reason = measure_factors(
        Passage(parts, source.path),
        parts.list_groups(),
        tokens,
        wanted,
        store,
        samples_at_once=batch_samples(source.config, tokens.shape[1]),
        head_layers=1,
        group=group,
        progress=progress,
    )
    assert reason is None
    return factors


def _take_whole(factors: OutputFactors, names: list[str]) -> OutputFactor:
    """The factor of all linears of a group together."""
    whole, _ = factors.take(names)
    assert whole is not None
    return whole


def _dense(factor: OutputFactor) -> Tensor:
    return torch.block_diag(*factor.blocks)


@pytest.mark.parametrize("most", [2048, 24])
@pytest.mark.parametrize("case", ["llama-biases", "qwen2-moe"])
def test_factors_are_products_of_the_whole_models_gradients(
    case: str, most: int, store: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source(case, tmp_path / "model")
    tokens = oracle.random_tokens(24, batch=2)
    drawn = torch.randint(source.config.vocab_size, (48,))
    monkeypatch.setattr(
        torch,
        "multinomial",
        lambda p, n, generator: drawn[generator.initial_seed() * 24 :][:24, None],
    )
    monkeypatch.setattr(factor_pass, "FACTOR_ROWS", most)
    groups = _names(source)
    wanted = [name for names in groups for name in names]
    factors = _measure(source, tokens, wanted, store)
    model = oracle.ours(source)
    outs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name in wanted:
            module.register_forward_hook(lambda _, x, out, name=name: outs.__setitem__(name, out))
    model.model.embed_tokens.weight.requires_grad_()
    head = (model.lm_head or model.model.embed_tokens).weight
    products = model.hidden(tokens, torch.arange(24)) @ head.t()
    loss = torch.nn.functional.cross_entropy(products.flatten(0, 1), drawn, reduction="sum")
    assert groups
    for names in groups:
        found = torch.autograd.grad(loss, [outs[name] for name in names], retain_graph=True)
        gradients = torch.cat([one.flatten(0, -2) for one in found], 1)
        whole = _take_whole(factors, names)
        assert max(map(len, whole.blocks)) <= most
        mask = torch.block_diag(*map(torch.ones_like, whole.blocks))
        expected = gradients.t() @ gradients * mask
        for rows in torch.arange(len(expected)).split([len(block) for block in whole.blocks]):  # type: ignore[no-untyped-call]
            mean = expected.diagonal()[rows].mean()
            expected.diagonal()[rows] += factor_pass.NOISE * len(rows) / tokens.numel() * mean
        torch.testing.assert_close(
            _dense(whole), expected, rtol=0, atol=2e-2 * expected.abs().max().item()
        )


def _survey(folder: Path, names: list[str]) -> tuple[Passage[LazyModel], tuple[Inputs, ...]]:
    """The model in a folder, as transformers runs it, and the products of linears in it that have
    the same input.
    """
    lazy = LazyModel(open_checkpoint(folder, tensors_only=True))
    sites, _ = find_sites(lazy, names)
    passage = Passage(lazy, folder)
    return passage, passage.survey(sites, oracle.random_tokens(24)).groups


@pytest.mark.parametrize("case", ["llama-biases", "qwen2-moe"])
def test_factors_are_the_same_if_transformers_runs_the_model(
    case: str, store: ActivationStore, tmp_path: Path
) -> None:
    source = _source(case, tmp_path / "model")
    tokens = oracle.random_tokens(24, batch=3)
    # Files have other names for shared experts.
    groups = [names for names in _names(source) if "shared" not in names[0]]
    wanted = [name for names in groups for name in names]
    expected = _measure(source, tokens, wanted, store)
    passage, inputs = _survey(tmp_path / "model", wanted)
    kept = ActivationStore(tmp_path / "kept", 0)
    factors, reason = measure_factors(
        passage, inputs, tokens, wanted, kept, samples_at_once=2, head_layers=1
    )
    assert reason is None
    for names in groups:
        whole = _dense(_take_whole(expected, names))
        torch.testing.assert_close(
            _dense(_take_whole(factors, names)), whole, rtol=0, atol=2e-2 * whole.abs().max().item()
        )
    # What the backward pass has not taken would stay on disk.
    assert not any((tmp_path / "kept").iterdir())


def test_processes_add_up_what_one_measures_by_transformers(
    store: ActivationStore, tmp_path: Path
) -> None:
    source = _source("llama", tmp_path / "model")
    tokens = oracle.random_tokens(24, batch=3)
    names = _names(source)[0]
    passage, inputs = _survey(tmp_path / "model", names)

    def measured(group: ProcessGroup, folder: str) -> Tensor:
        kept = ActivationStore(tmp_path / folder, 10**9)
        factors, _ = measure_factors(
            passage, inputs, tokens, names, kept, samples_at_once=1, head_layers=1, group=group
        )
        return _dense(_take_whole(factors, names))

    first, second = (measured(_Part(rank, 2), f"part{rank}") for rank in range(2))
    whole = measured(SINGLE, "whole")
    torch.testing.assert_close(first + second, whole, rtol=0, atol=2e-2 * whole.abs().max().item())


def test_a_model_that_gradients_cannot_pass_has_no_factors(
    store: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source("llama", tmp_path / "model")
    names = _names(source)[0]
    passage, inputs = _survey(tmp_path / "model", names)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a reason")

    tokens = oracle.random_tokens(24, batch=2)
    monkeypatch.setattr(BlockPasses, "backward", refuse)
    factors, reason = measure_factors(
        passage, inputs, tokens, names, store, samples_at_once=1, head_layers=1
    )
    assert reason == "a reason"
    assert factors.take(names) == (None, {})


@pytest.mark.slow
def test_thorough_lowers_the_divergence_of_a_model_that_transformers_runs(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "model")
    settings = {**GPTQ, "samples": 32, "length": 128, "via": "transformers"}
    divergences: dict[str, float] = {}
    for effort in ("default", "thorough"):
        made = quantkit.quantize(
            tmp_path / "model", tmp_path / effort, "int4-g64", **{**settings, "effort": effort}
        )
        assert made.quality is not None
        divergences[effort] = made.quality.texts[0].kl
    assert divergences["thorough"] < 0.9 * divergences["default"]


class _Part(ProcessGroup):
    """One of two processes, which sees what is to be summed, and sums nothing."""

    def sum_(self, value: Tensor) -> None:
        vars(self).setdefault("summed", []).append(value)


def test_processes_add_up_what_one_measures(demo_model: Path, tmp_path: Path) -> None:
    source, tokens = open_checkpoint(demo_model), oracle.random_tokens(24, batch=3, vocabulary=2048)
    groups = _names(source)
    wanted = [name for names in groups for name in names]

    def measured(group: ProcessGroup) -> OutputFactors:
        store = ActivationStore(tmp_path / "store", 10**9)
        return _measure(source, tokens, wanted, store, group)

    halves = [_Part(rank, 2) for rank in range(2)]
    parts, whole = [measured(half) for half in halves], measured(SINGLE)
    for names in groups:
        first, second = (_take_whole(part, names).blocks[0] for part in parts)
        expected = _take_whole(whole, names).blocks[0]
        torch.testing.assert_close(
            first + second, expected, rtol=0, atol=1e-4 * expected.abs().max().item()
        )
        assert any(first is one for one in vars(halves[0])["summed"])


def test_what_exceeds_the_memory_is_on_disk_and_the_same(demo_model: Path, tmp_path: Path) -> None:
    source, tokens = open_checkpoint(demo_model), oracle.random_tokens(24, batch=3, vocabulary=2048)
    wanted = [name for names in _names(source) for name in names]
    found: list[OutputFactors] = []
    kept: list[int] = []

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if done >= source.config.num_layers and len(kept) == len(
            found
        ):  # all blocks have run forward
            kept.append(sum(file.stat().st_size for file in (tmp_path / "0").glob("*")))

    stores = [ActivationStore(tmp_path / str(memory), memory) for memory in (10**9, 0)]
    for store in stores:
        found.append(_measure(source, tokens, wanted, store, progress=progress))
    assert kept == [0, source.config.num_layers * tokens.numel() * source.config.hidden_size * 2]
    for names in _names(source):
        held, read = (_take_whole(factors, names) for factors in found)
        assert torch.equal(_dense(held), _dense(read))
    for store in stores:
        store.close()


def test_linears_are_found_together_or_apart_and_once(store: ActivationStore) -> None:
    whole = torch.arange(36.0).view(6, 6)
    factors = OutputFactors(store)
    for first in ("a", "d"):
        names = [first, first + "2"]
        factors.keep({names[0]: slice(0, 2), names[1]: slice(2, 6)}, [whole])
    together, by_name = factors.take(["a", "a2"])
    assert together is not None
    assert torch.equal(_dense(together), whole)
    assert torch.equal(_dense(by_name["a2"]), whole[2:, 2:])
    together, by_name = factors.take(["d2"])
    assert together is None
    assert list(by_name) == ["d2"]
    assert torch.equal(_dense(by_name["d2"]), whole[2:, 2:])
    for names in (["a", "a2"], ["d"], ["unknown"]):
        assert factors.take(names) == (None, {})


@pytest.mark.slow
def test_the_solver_uses_them_if_scales_are_floats(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(name: str, scheme: str, **options: Any) -> str:
        out = quantkit.quantize(
            demo_model, tmp_path / name, scheme, **{**FEW, **options}, accept_quality_loss=True
        )
        files: dict[str, str] = out.manifest["files"]
        return files["model.safetensors"]

    with_factors, default = made("with", "int4-g64"), made("default", "int4-g64", effort="default")
    monkeypatch.setattr(OutputFactors, "take", lambda *_: (None, {}))
    assert made("without", "int4-g64") != with_factors
    monkeypatch.setattr(
        "quantkit.calibration.gptq_quantizer.measure_factors",
        lambda *_, **__: pytest.fail("measured"),
    )
    assert made("default2", "int4-g64", effort="default") == default
    made("floats", "mxfp4")


@pytest.mark.slow
def test_a_run_that_resumes_with_less_memory_writes_the_same(
    demo_model: Path, tmp_path: Path
) -> None:
    whole = quantkit.quantize(demo_model, tmp_path / "whole", "int4-g64", **FEW).path
    options = {name: value for name, value in FEW.items() if name != "source_check"}
    interrupted(
        functools.partial(quantkit.quantize, scheme="int4-g64", **options),
        demo_model,
        tmp_path / "out",
    )
    resumed = quantkit.quantize(
        demo_model, tmp_path / "out", "int4-g64", **FEW, resume=True, activation_memory=0
    ).path
    assert contents(resumed) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["model.layers.1.mlp.down_proj", "model.norm", "lm_head"])
def test_values_that_are_not_finite_are_named(
    module: str, demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    if f"{module}.weight" not in weights:
        pytest.skip("tied")
    weights[f"{module}.weight"].view(-1)[0] = torch.nan
    save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with raises(NonFiniteError, f"'{module}.weight'", path=tmp_path / "source"):
        quantkit.quantize(tmp_path / "source", tmp_path / "out", "int4-g64", **GPTQ)


def test_plans_count_the_backward_pass(demo_model: Path, tmp_path: Path) -> None:
    config = open_checkpoint(demo_model).config
    plans = {
        effort: quantkit.plan.quantize(
            demo_model, tmp_path / "out", "int4-g64", **{**GPTQ, "effort": effort}
        )
        for effort in ("default", "thorough")
    }
    assert GRADIENTS not in plans["default"].steps
    assert GRADIENTS in plans["thorough"].steps
    floats = quantkit.plan.quantize(demo_model, tmp_path / "out", "mxfp4", **GPTQ)
    assert GRADIENTS not in floats.steps
    thorough, shape = EFFORTS["thorough"], (128, 2048)
    assert thorough.gradient_samples(config, shape) == 16
    assert EFFORTS["default"].gradient_samples(config, shape) == 0
    held, disk, _ = activation_bytes(config, (8, 64), thorough, 10**9)
    assert held > factor_bytes(config) > 0 == disk
    inputs = config.num_layers * 16 * 2048 * config.hidden_size * 2
    assert gradient_activation_bytes(config, shape, thorough) == inputs
    assert gradient_activation_bytes(config, shape, EFFORTS["default"]) == 0
    held, disk, _ = activation_bytes(config, (16, 2048), thorough, 0)
    assert (held, disk) == (
        0,
        max(inputs, sum(activation_bytes(config, (16, 2048), thorough, 10**12))),
    )
