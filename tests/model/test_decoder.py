"""A block's two halves, and what a tap hears of it, by the topology's words."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from torch import Tensor, nn

from quantkit.architectures.topology import input_groups
from quantkit.model.attention import causal_attention
from quantkit.model.decoder import Block, Decoder, Step, Tap, no_tap

HEARD = ["attention.in", "attention.out", "mlp.in", "mlp.out"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = oracle.save(oracle.make("qwen3"), tmp_path_factory.mktemp("decoder") / "model")
    return oracle.ours(folder)


def _block(model: Decoder) -> Block:
    block = model.model.layers[1]
    assert isinstance(block, Block)
    return block


def _step(model: Decoder, tap: Tap = no_tap) -> Step:
    positions = torch.arange(5)
    return Step(model.rotary(positions), causal_attention(positions, model.config.windows), tap)


@torch.inference_mode()
def test_a_tap_hears_the_input_of_every_linear_at_its_site(model: Decoder) -> None:
    block, heard, applied = _block(model), dict[str, Tensor](), dict[str, Tensor]()
    hooks = [
        linear.register_forward_pre_hook(lambda _, inputs, name=name: applied.update({name: inputs[0]}))
        for name, linear in block.named_modules() if isinstance(linear, nn.Linear)
    ]  # fmt: skip
    block(torch.randn(2, 5, model.config.hidden_size), _step(model, lambda site, x: heard.update({site: x.clone()})))
    for hook in hooks:
        hook.remove()
    groups = input_groups(model.config, 1)
    assert list(heard) == [group.site for group in groups] == HEARD
    assert {module for group in groups for module in group.modules} == set(applied)
    for group in groups:
        assert all(torch.equal(heard[group.site], applied[module]) for module in group.modules)


@torch.inference_mode()
def test_the_halves_of_the_branches_make_the_block(model: Decoder) -> None:
    block, step = _block(model), _step(model)
    x = torch.randn(2, 5, model.config.hidden_size)
    whole, before = block(x, step), x.clone()
    for branch in Block.BRANCHES:
        x = block.finish(branch, x, block.inner(branch, x, step), step)
    assert torch.equal(x, whole)
    assert not torch.equal(whole, before)


class _StopError(Exception):
    pass


@torch.inference_mode()
@pytest.mark.parametrize("last", HEARD)
def test_a_tap_may_stop_the_pass(last: str, model: Decoder) -> None:
    heard = []

    def tap(site: str, x: Tensor) -> None:
        heard.append(site)
        if site == last:
            raise _StopError

    with pytest.raises(_StopError):
        _block(model)(torch.randn(1, 5, model.config.hidden_size), _step(model, tap))
    assert heard == HEARD[: HEARD.index(last) + 1]
