"""Mamba-2 (2405.21060), a state space whose state is a matrix for each head, as in Granite 4, Bamba
and Nemotron H.

B batch, T new positions, D hidden size, H heads, P the size of a head, G groups of heads, N the
size of a state, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.model.mixers.convolution import convolve
from quantkit.model.mixers.mixer import Mixer, States, Step
from quantkit.model.norms import RMSNorm

_CHUNK = 64
"""Tokens that are computed together: a larger chunk needs fewer steps, and matrices whose size
grows with its square.
"""


class Mamba2(Mixer):
    """A matrix for each head, which decays and takes up values token by token, at places that the
    heads of a group share; a convolution over the latest tokens comes first, and a norm of each
    group with a gate last.

    Its states are the inputs of the convolution, [B, K - 1, channels], and the matrices
    [B, H, N, P].
    """

    NAME = "mamba"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        mamba = config.mamba2
        assert mamba is not None
        self.mamba = mamba
        size = config.hidden_size
        channels = mamba.num_channels
        # The gate, the channels of the convolution, and a step size for each head.
        self.widths = [mamba.inner_size, channels, mamba.heads]
        self.in_proj = nn.Linear(size, sum(self.widths), bias=mamba.bias)
        # Contains the weight [channels, 1, K] and its bias; `convolve` multiplies by them.
        self.conv1d = nn.Conv1d(
            channels, channels, mamba.convolution, groups=channels, bias=mamba.convolution_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(mamba.heads))
        self.A_log = nn.Parameter(torch.empty(mamba.heads))
        self.D = nn.Parameter(torch.empty(mamba.heads))
        # Unlike the norms of the block, it has no offset.
        self.norm = RMSNorm(mamba.inner_size, config.norm_eps)
        self.out_proj = nn.Linear(mamba.inner_size, size, bias=mamba.bias)

    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Compute gated and normed values that the heads read, [B, T, H * P], for normed hidden
        states [B, T, D].
        """
        gate, channels, raw_steps = torch.split(self.in_proj(x), self.widths, dim=-1)
        step_sizes = F.softplus(raw_steps.float() + self.dt_bias.float())
        step_sizes = step_sizes.clamp(*self.mamba.step_limits)
        read = step.scan(self.layer, self._write_and_read, (channels, step_sizes))
        gated = read * F.silu(gate.float())
        # One mean square for each group of heads.
        groups = torch.unflatten(gated, -1, (self.mamba.groups, -1))
        mean_squares = groups.square().mean(-1)
        group_size = groups.shape[-1]
        normed = self.norm.normalize_by_mean_square(
            gated, mean_squares.repeat_interleave(group_size, dim=-1)
        )
        return normed.to(x.dtype)

    def output(self, mixed: Tensor) -> Tensor:
        """Project normed values to the branch's output, [B, T, D]."""
        out: Tensor = self.out_proj(mixed)
        return out

    def _write_and_read(
        self, inputs: tuple[Tensor, ...], states: States | None
    ) -> tuple[Tensor, States]:
        """Compute what the heads read, float32 [B, T, H * P]: a `Recurrence`."""
        channels = inputs[0]
        # By head, as the others: [B, H, T].
        step_sizes = inputs[1].transpose(1, 2)
        mamba = self.mamba
        earlier = None if states is None else states[0]
        convolved, latest = convolve(channels, self.conv1d, earlier)
        # As in transformers, the convolution's outputs have the dtype of the model.
        activated = F.silu(convolved.to(channels.dtype)).float()
        group_width = mamba.groups * mamba.state_size
        widths = [mamba.inner_size, group_width, group_width]
        parts = torch.split(activated, widths, dim=-1)
        # [B, heads or groups, T, size]
        values = torch.unflatten(parts[0], -1, (mamba.heads, -1)).transpose(1, 2)
        keys = torch.unflatten(parts[1], -1, (mamba.groups, -1)).transpose(1, 2)
        queries = torch.unflatten(parts[2], -1, (mamba.groups, -1)).transpose(1, 2)
        log_decay = -self.A_log.float().exp().unsqueeze(-1) * step_sizes
        if states is None:
            shape = mamba.heads, mamba.state_size, mamba.head_size
            matrices = torch.zeros(len(channels), *shape, device=values.device)
        else:
            matrices = states[1]
        pieces: list[Tensor] = []
        for start in range(0, channels.shape[1], _CHUNK):
            chunk = slice(start, start + _CHUNK)
            read, matrices = apply_state_space(
                queries=queries[:, :, chunk],
                keys=keys[:, :, chunk],
                values=values[:, :, chunk],
                step_sizes=step_sizes[..., chunk],
                log_decay=log_decay[..., chunk],
                matrices=matrices,
            )
            pieces.append(read)
        skipped = values * self.D.float().view(-1, 1, 1)
        read = torch.cat(pieces, dim=2) + skipped
        return read.transpose(1, 2).flatten(2), (latest, matrices)


def apply_state_space(
    *,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    step_sizes: Tensor,
    log_decay: Tensor,
    matrices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the state space over one chunk of tokens, all in float32.

    Token by token, a matrix S decays and takes up a value, S <- exp(g) S + k (dt v), and is read,
    q S. The heads of a group share queries and keys. Within the chunk, the matrices between tokens
    are not needed: the values that a token reads are weighted by the products of its query with
    their keys and by the decay since then (2405.21060, section 6).

    Args:
        queries, keys: C and B in the paper, [B, G, C, N].
        values: [B, H, C, P].
        step_sizes, log_decay: dt and g, [B, H, C].
        matrices: S before the chunk, [B, H, N, P].

    Returns:
        What the queries read, [B, H, C, P], and S after the chunk.
    """
    heads = values.shape[1] // keys.shape[1]
    queries_by_head = queries.repeat_interleave(heads, dim=1)
    keys_by_head = keys.repeat_interleave(heads, dim=1)
    scaled_values = step_sizes.unsqueeze(-1) * values
    if values.shape[2] == 1:
        # One token needs no products between tokens: decode, where small operations take the time.
        written = keys_by_head.transpose(-1, -2) * scaled_values
        matrices = log_decay.exp().unsqueeze(-1) * matrices + written
        return queries_by_head @ matrices, matrices
    # The decay from each token, in columns, to each later one. Summed from there: the difference of
    # two sums from the beginning of the chunk would lose digits after a token with strong decay.
    count = values.shape[2]
    decays = log_decay.unsqueeze(-1).expand(*log_decay.shape, count)
    between = decays.tril(-1).cumsum(-2).exp().tril()
    products = (queries @ keys.transpose(-1, -2)).repeat_interleave(heads, dim=1)
    from_start = log_decay.cumsum(-1).exp().unsqueeze(-1)
    read = from_start * (queries_by_head @ matrices) + (products * between) @ scaled_values
    to_end = between[..., -1, :].unsqueeze(-1)
    kept = from_start[..., -1:, :] * matrices
    return read, kept + (keys_by_head * to_end).transpose(-1, -2) @ scaled_values
