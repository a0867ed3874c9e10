"""Mamba-2 by chunks, held against its definition token by token, in float64; and its states."""

from __future__ import annotations

import pytest
import torch
from architecture_cases import CASES
from oracle import make, save
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.formats.detect import open_checkpoint
from quantkit.model.mixers.mamba2 import Mamba2, apply_state_space

HEADS, GROUPS, STATE, SIZE = 6, 2, 5, 4


def _draw(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    return {
        "queries": normal(GROUPS, count, STATE),
        "keys": normal(GROUPS, count, STATE),
        "values": normal(HEADS, count, SIZE),
        "step_sizes": normal(HEADS, count).exp(),
        "log_decay": -normal(HEADS, count).exp(),
        "matrices": normal(HEADS, STATE, SIZE),
    }


def _token_by_token(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    state, read = given["matrices"], []
    keys, queries = (
        given[name].repeat_interleave(HEADS // GROUPS, dim=1) for name in ("keys", "queries")
    )
    for place in range(given["values"].shape[2]):
        state = given["log_decay"][:, :, place, None, None].exp() * state
        value = given["step_sizes"][:, :, place, None] * given["values"][:, :, place]
        state = state + torch.einsum("bhn,bhp->bhnp", keys[:, :, place], value)
        read.append(torch.einsum("bhn,bhnp->bhp", queries[:, :, place], state))
    return torch.stack(read, dim=2), state


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_a_chunk_gives_what_its_tokens_give_one_by_one(count: int) -> None:
    given = _draw(count)
    for found, expected in zip(apply_state_space(**given), _token_by_token(given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_strong_decay_of_a_token_takes_no_digits_from_later_ones() -> None:
    given = _draw(64)
    # Of every head: the first token forgets all, the others nearly nothing.
    given["log_decay"] = given["log_decay"] * 1e-3
    given["log_decay"][:, :, 0] = -1e5
    expected = _token_by_token(given)
    found = apply_state_space(**{name: one.float() for name, one in given.items()})
    for ours, right in zip(found, expected, strict=True):
        assert (ours - right).abs().max() < 2e-6 * right.abs().max()


@pytest.fixture(scope="module")
def mixer(tmp_path_factory: pytest.TempPathFactory) -> Mamba2:
    kind, changes = CASES["granitemoehybrid-features"]
    folder = save(make(kind, **changes), tmp_path_factory.mktemp("mamba") / "model")
    checkpoint = open_checkpoint(folder)
    config: ModelConfig = checkpoint.config
    mixer = Mamba2(config, 0)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            value = checkpoint.load(f"model.layers.0.mamba.{name}")
            assert isinstance(value, Tensor)
            parameter.copy_(value)
    return mixer


def _inputs(mixer: Mamba2, count: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    channels = torch.randn(batch, count, mixer.mamba.num_channels, generator=generator)
    step_sizes = torch.randn(batch, count, mixer.mamba.heads, generator=generator).exp()
    return channels, step_sizes


@torch.inference_mode()
def test_the_cut_of_a_text_changes_no_more_than_rounding(mixer: Mamba2) -> None:
    inputs = _inputs(mixer, 150)
    whole, after = mixer._write_and_read(inputs, None)
    for cuts in ([1], [64], [3, 70, 1, 1, 20], [1] * 149):
        states, pieces, start = None, [], 0
        for count in (*cuts, 150 - sum(cuts)):
            part = tuple(one[:, start : start + count] for one in inputs)
            read, states = mixer._write_and_read(part, states)
            pieces.append(read)
            start += count
        assert states is not None
        scale = whole.abs().max()
        assert (torch.cat(pieces, dim=1) - whole).abs().max() < 1e-5 * scale
        # The convolution's tail is a copy of its inputs.
        assert torch.equal(states[0], after[0])
        assert (states[1] - after[1]).abs().max() < 1e-5 * after[1].abs().max()


@pytest.mark.parametrize("count", [1, 100])
@torch.inference_mode()
def test_a_sequence_is_the_same_alone_and_in_a_batch(mixer: Mamba2, count: int) -> None:
    """But for torch's SiLU, which gives numbers at other places of a tensor other last bits."""
    channels, step_sizes = _inputs(mixer, count, batch=5)
    together, states = mixer._write_and_read((channels, step_sizes), None)
    for row in range(5):
        alone = channels[row : row + 1], step_sizes[row : row + 1]
        read, state = mixer._write_and_read(alone, None)
        torch.testing.assert_close(read[0], together[row], rtol=1e-6, atol=1e-6)
        for one, other in zip(state, states, strict=True):
            torch.testing.assert_close(one[0], other[row], rtol=1e-6, atol=1e-6)
