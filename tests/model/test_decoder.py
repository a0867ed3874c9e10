"""The stages of a block's branches, and the sites of the topology."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from torch import Tensor, nn

from quantkit.architectures.topology import input_groups
from quantkit.model.attention import make_causal_attention
from quantkit.model.decoder import Block, Decoder
from quantkit.model.mixers.mixer import Step

SITES = ["attention.in", "attention.out", "mlp.in", "mlp.out"]
PREFIXES = {"mixer": "attention", "mlp": "mlp"}
"""Of the sites of a branch."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = oracle.save(oracle.make("qwen3"), tmp_path_factory.mktemp("decoder") / "model")
    return oracle.ours(folder)


def _block(model: Decoder, layer: int = 1) -> Block:
    block = model.model.layers[layer]
    assert isinstance(block, Block)
    return block


def _step(model: Decoder) -> Step:
    positions = torch.arange(5)
    return Step(model.rotary(positions), make_causal_attention(positions, model.config.windows))


@torch.inference_mode()
@pytest.mark.parametrize("layer", [0, 1])
def test_the_stages_of_a_branch_give_the_inputs_of_the_linears_at_its_sites(
    layer: int, model: Decoder
) -> None:
    block, step = _block(model, layer), _step(model)
    applied: dict[str, Tensor] = {}
    hooks = [
        linear.register_forward_pre_hook(
            lambda _, inputs, name=name: applied.update({name: inputs[0]})
        )
        for name, linear in block.named_modules()
        if isinstance(linear, nn.Linear)
    ]
    x, given = torch.randn(2, 5, model.config.hidden_size), {}
    for branch in block.branches:
        site = PREFIXES[branch]
        given[f"{site}.in"] = block.apply_norm(branch, x)
        given[f"{site}.out"] = block.inner(branch, x, step)
        x = block.finish(branch, x, given[f"{site}.out"])
    for hook in hooks:
        hook.remove()
    groups = input_groups(model.config, layer)
    assert [group.site for group in groups] == list(given) == SITES
    assert [module for group in groups for module in group.modules] == list(applied)
    for group in groups:
        assert all(torch.equal(given[group.site], applied[module]) for module in group.modules)


@torch.inference_mode()
def test_the_halves_of_the_branches_make_the_block(model: Decoder) -> None:
    block, step = _block(model), _step(model)
    x = torch.randn(2, 5, model.config.hidden_size)
    whole, before = block(x, step), x.clone()
    for branch in block.branches:
        x = block.finish(branch, x, block.inner(branch, x, step))
    assert torch.equal(x, whole)
    assert not torch.equal(whole, before)
