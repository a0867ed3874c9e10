"""What schemes cost in models whose own code runs: the same as in quantkit's decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

from quantkit.bit_allocation.allocation import Unit, units
from quantkit.bit_allocation.losses import estimate_losses
from quantkit.bit_allocation.site_losses import estimate_site_losses
from quantkit.calibration.fisher import FisherPasses
from quantkit.distributed.group import SINGLE
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.scheme import QuantScheme
from quantkit.via_transformers.forward import open_to_run, passage_of
from quantkit.via_transformers.linears import with_linears
from quantkit.via_transformers.sites import find_sites

Tiny = Callable[[str], Path]
SCHEMES = (QuantScheme(4, 32), QuantScheme(8, None))
SAMPLES = oracle.random_tokens(40, batch=4)
CPU = torch.device("cpu")


def _open_by_tensors(folder: Path) -> Any:
    source = open_to_run(folder, via="transformers")
    source.config, _, _ = with_linears(source.config, source.extra_config, source.path)
    return source


def _estimate(
    source: Any, units: list[Unit], gradients: dict[str, Tensor] | None = None
) -> list[dict[QuantScheme, float]]:
    passage = passage_of(source)
    modules = [module for unit in units for module in unit.modules]
    sites, _ = find_sites(passage.partwise, modules)
    return estimate_site_losses(
        source,
        passage,
        passage.survey(sites, SAMPLES[:1]),
        SAMPLES,
        units,
        dict.fromkeys(units, SCHEMES),
        memory_bytes=10**9,
        scale_dtype=torch.float32,
        gradients=gradients,
    )


def test_with_gradients_they_are_those_of_the_decoder(tiny_model: Tiny) -> None:
    own = open_checkpoint(tiny_model("llama"))
    own_units = units(own.config)
    expected = estimate_losses(
        own,
        SAMPLES,
        own_units,
        dict.fromkeys(own_units, SCHEMES),
        device=CPU,
        memory_bytes=10**9,
        scale_dtype=torch.float32,
        group=SINGLE,
    )
    passes = FisherPasses(own, SAMPLES, len(SAMPLES), CPU)
    layers = range(own.config.num_layers)
    for layer in layers:
        passes.forward(layer)
    passes.turn(0)
    gradients: dict[str, Tensor] = {}
    for layer in reversed(layers):
        for module, squares in passes.squares(layer).items():
            gradients[module] = squares / SAMPLES.numel()
    source = _open_by_tensors(tiny_model("llama"))
    source_units = units(source.config, raw=source.extra_config)
    losses = _estimate(source, source_units, gradients)
    losses_of_modules = {
        frozenset(unit.modules): unit_losses
        for unit, unit_losses in zip(source_units, losses, strict=True)
    }
    assert len(losses_of_modules) == len(own_units)
    for unit, expected_losses in zip(own_units, expected, strict=True):
        unit_losses = losses_of_modules[frozenset(unit.modules)]
        assert unit_losses == pytest.approx(expected_losses, rel=1e-3)


@pytest.mark.parametrize("kind", ["gpt_neox", "lfm2"])
def test_without_gradients_they_are_relative_to_the_outputs(kind: str, tiny_model: Tiny) -> None:
    source = _open_by_tensors(tiny_model(kind))
    source_units = units(source.config, raw=source.extra_config)
    model = oracle.load(tiny_model(kind))
    squares: dict[str, Tensor] = {}

    def record(name: str, bias: Tensor | None) -> Callable[..., None]:
        def add(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # Of the outputs without their bias, which no rounding changes.
            rows = output if bias is None else output - bias
            squares[name] = rows.flatten(0, -2).square().mean(0)

        return add

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(record(name, module.bias))
    oracle.logits(model, SAMPLES)
    gradients: dict[str, Tensor] = {}
    for name, mean_squares in squares.items():
        gradients[name] = torch.ones(len(mean_squares)) / mean_squares.sum()
    expected = _estimate(source, source_units, gradients)
    for unit_losses, expected_losses in zip(_estimate(source, source_units), expected, strict=True):
        assert unit_losses == pytest.approx(expected_losses, rel=1e-3)
        assert 0 < unit_losses[SCHEMES[1]] < unit_losses[SCHEMES[0]]


def test_linears_that_runtimes_fuse_and_all_experts_are_units(hybrid: Path) -> None:
    source = _open_by_tensors(hybrid)
    source_units = units(source.config, raw=source.extra_config)
    names = {(unit.layer, unit.name) for unit in source_units}
    assert names == {
        *((layer, name) for layer in (0, 1) for name in ("experts", "shared gate up")),
        *((layer, "shared down") for layer in (0, 1)),
        (1, "k q v"),
        (1, "o"),
    }
    (experts,) = [unit for unit in source_units if (unit.layer, unit.name) == (0, "experts")]
    assert experts.patterns == ["model.layers.0.mlp.experts.*"]
    assert len(experts.modules) == 3 * 4
    losses = _estimate(source, source_units)
    assert all(0 < unit_losses[SCHEMES[1]] < unit_losses[SCHEMES[0]] for unit_losses in losses)
