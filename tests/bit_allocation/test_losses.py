"""What schemes cost, and the gradients that weight errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from topology_cases import CASES, ENDS
from torch import Tensor, nn

from quantkit.bit_allocation.allocation import Unit, units
from quantkit.bit_allocation.losses import Losses, estimate_losses, measure_gradient_squares
from quantkit.calibration.output_gradients import GradientPass
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.passes.block_passes import BlockPasses
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Inputs, Passage
from quantkit.tensors.scheme import QuantScheme
from quantkit.via_transformers.forward import open_to_run, passage_of
from quantkit.via_transformers.linears import with_linears
from quantkit.via_transformers.sites import find_sites

Tiny = Callable[[str], Path]
SCHEMES = (QuantScheme(4, 32), QuantScheme(8, None))
SAMPLES = oracle.random_tokens(40, batch=4)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Runnable:
    """A model that samples pass through, with its units."""

    source: Any
    passage: Passage[Any]
    groups: tuple[Inputs, ...]
    units: list[Unit]


def _open_own(folder: Path) -> _Runnable:
    source = open_checkpoint(folder)
    parts = DecoderParts(source, SAMPLES.shape[1], CPU)
    return _Runnable(
        source, Passage(parts, folder), tuple(parts.list_groups()), units(source.config)
    )


def _open_by_tensors(folder: Path) -> _Runnable:
    source = open_to_run(folder, via="transformers")
    source.config, _, _ = with_linears(source.config, source.extra_config, source.path)
    passage = passage_of(source)
    source_units = units(source.config, raw=source.extra_config)
    modules = [module for unit in source_units for module in unit.modules]
    sites, _ = find_sites(passage.partwise, modules)
    return _Runnable(source, passage, passage.survey(sites, SAMPLES[:1]).groups, source_units)


def _estimate(model: _Runnable, group: ProcessGroup = SINGLE) -> Losses:
    return estimate_losses(
        model.source,
        model.passage,
        model.groups,
        SAMPLES,
        model.units,
        dict.fromkeys(model.units, SCHEMES),
        memory_bytes=10**9,
        scale_dtype=torch.float32,
        group=group,
    )


def _measure_squares(model: _Runnable) -> dict[str, Tensor]:
    gradient_pass = GradientPass(model.passage, SAMPLES, 2, 1, SINGLE)
    linears = {module for unit in model.units for module in unit.modules}
    squares = measure_gradient_squares(gradient_pass, model.groups, linears)
    assert squares is not None
    return squares


def test_they_are_the_same_in_both_decoders(tiny_model: Tiny) -> None:
    own = _open_own(tiny_model("llama"))
    expected = _estimate(own)
    model = _open_by_tensors(tiny_model("llama"))
    losses = _estimate(model)
    assert losses.measure == expected.measure == "KL"
    losses_of_modules = {
        frozenset(unit.modules): unit_losses
        for unit, unit_losses in zip(model.units, losses.by_unit, strict=True)
    }
    assert len(losses_of_modules) == len(own.units)
    for unit, expected_losses in zip(own.units, expected.by_unit, strict=True):
        unit_losses = losses_of_modules[frozenset(unit.modules)]
        assert unit_losses == pytest.approx(expected_losses, rel=2e-2)


@pytest.mark.parametrize("case", ["llama-biases", "gemma2", "phi3", "qwen2-moe", "gpt-oss"])
def test_gradients_are_those_of_the_whole_model(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block after block, with the blocks computed anew, each gets what autograd gives for all at
    once.
    """
    kind, changes = CASES[case]
    model = _open_own(oracle.save(oracle.make(kind, **{**ENDS, **changes}), tmp_path))
    config = model.source.config
    count, length = SAMPLES.shape
    drawn = torch.randint(config.vocab_size, (count * length,))
    monkeypatch.setattr(
        torch,
        "multinomial",
        lambda p, n, generator: drawn[generator.initial_seed() * length :][:length, None],
    )
    squares = _measure_squares(model)
    decoder = oracle.ours(model.source)
    outputs: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda module, args, output: outputs.setdefault(name, []).append(output)

    for name, module in decoder.named_modules():
        if name in squares:
            module.register_forward_hook(record(name))
            module.weight.requires_grad_()
    decoder.model.embed_tokens.weight.requires_grad_()
    hidden = decoder.hidden(SAMPLES, torch.arange(length))
    products = hidden @ (decoder.lm_head or decoder.model.embed_tokens).weight.t()
    if config.logit_softcap is not None:
        products = config.logit_softcap * torch.tanh(products / config.logit_softcap)
    loss = nn.functional.cross_entropy(
        (products * config.logit_multiplier).flatten(0, 1), drawn, reduction="sum"
    )
    for name, outputs_of_linear in outputs.items():
        gradients = torch.autograd.grad(loss, outputs_of_linear, retain_graph=True)
        expected = torch.zeros_like(squares[name])
        for gradient in gradients:
            expected += gradient.flatten(0, -2).square().sum(0) / SAMPLES.numel()
        # The inputs of blocks are kept as bfloat16.
        atol = 2e-2 * expected.max().item() + 1e-12
        torch.testing.assert_close(squares[name], expected, rtol=5e-2, atol=atol)
    assert outputs.keys() == {name for name in squares if squares[name].any()}


def test_gradients_of_stacked_experts_are_those_of_the_decoder(tiny_model: Tiny) -> None:
    own = _open_own(tiny_model("qwen3_moe"))
    model = _open_by_tensors(tiny_model("qwen3_moe"))
    expected = _measure_squares(own)
    squares = _measure_squares(model)
    assert squares.keys() == expected.keys()
    assert any("experts" in linear and expected[linear].any() for linear in expected)
    for linear, expected_squares in expected.items():
        atol = 2e-2 * expected_squares.max().item() + 1e-12
        torch.testing.assert_close(squares[linear], expected_squares, rtol=5e-2, atol=atol)


class _Part(ProcessGroup):
    """One of two processes, which keeps what is to be summed, and sums nothing."""

    def sum_(self, value: Tensor) -> None:
        vars(self).setdefault("summed", []).append(value.clone())


def test_processes_share_the_samples(tiny_model: Tiny) -> None:
    summed: list[list[Tensor]] = []
    for group in (_Part(0, 2), _Part(1, 2), _Part(0, 1)):
        _estimate(_open_own(tiny_model("llama")), group)
        summed.append(vars(group)["summed"])
    for first, second, whole in zip(*summed, strict=True):
        atol = 2e-2 * whole.abs().max().item()
        torch.testing.assert_close(first + second, whole, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["gpt_neox", "lfm2"])
def test_without_gradients_they_are_relative_to_the_outputs(
    kind: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _open_by_tensors(tiny_model(kind))
    with_gradients = _estimate(model)
    assert with_gradients.measure == "KL"
    reference = oracle.load(tiny_model(kind))
    squares: dict[str, float] = {}

    def record(name: str, bias: Tensor | None) -> Callable[..., None]:
        def add(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # Of the outputs without their bias, which no rounding changes.
            rows = output if bias is None else output - bias
            squares[name] = rows.flatten(0, -2).square().mean(0).sum().item()

        return add

    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(record(name, module.bias))
    oracle.logits(reference, SAMPLES)

    def measure(*args: Any) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for unit in model.units:
            for module in unit.modules:
                rows = model.source.info(f"{module}.weight").shape[0]
                gradients[module] = torch.full((rows,), 1 / squares[module])
        return gradients

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a reason")

    monkeypatch.setattr("quantkit.bit_allocation.losses.measure_gradient_squares", measure)
    expected = _estimate(model)
    monkeypatch.undo()
    monkeypatch.setattr(BlockPasses, "backward", refuse)
    relative = _estimate(model)
    assert relative.measure == "relative error"
    for unit_losses, expected_losses in zip(relative.by_unit, expected.by_unit, strict=True):
        assert unit_losses == pytest.approx(expected_losses, rel=1e-3)
        assert 0 < unit_losses[SCHEMES[1]] < unit_losses[SCHEMES[0]]


def test_linears_that_runtimes_fuse_and_all_experts_are_units(
    tiny_model: Callable[[str], Path],
) -> None:
    model = _open_by_tensors(tiny_model("qwen3_next"))
    names = {(unit.layer, unit.name) for unit in model.units}
    assert names == {
        *((layer, name) for layer in (0, 1) for name in ("experts", "shared gate up")),
        *((layer, "shared down") for layer in (0, 1)),
        (1, "k q v"),
        (1, "o"),
    }
    (experts,) = [unit for unit in model.units if (unit.layer, unit.name) == (0, "experts")]
    assert experts.patterns == ["model.layers.0.mlp.experts.*"]
    assert len(experts.modules) == 3 * 4
    losses = _estimate(model)
    assert all(0 < unit[SCHEMES[1]] < unit[SCHEMES[0]] for unit in losses.by_unit)
