"""The gated delta rule (2412.06464), a linear attention whose state is a matrix for each head, as
in Qwen3.5.

B batch, T new positions, D hidden size, H heads of values, Dk and Dv sizes of keys and values, C
tokens of a chunk.
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
_EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""


class GatedDelta(Mixer):
    """Queries read from a matrix, to which keys and values are written token by token, after it has
    decayed; a convolution over the latest tokens comes first, and a norm with a gate last.

    Its states are the inputs of the convolution, [B, K - 1, channels], and the matrices
    [B, H, Dk, Dv].
    """

    NAME = "linear_attn"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        delta = config.gated_delta
        assert delta is not None
        self.delta = delta
        size = config.hidden_size
        values = delta.value_heads * delta.value_dim
        if delta.joined:
            self.in_proj_qkvz = nn.Linear(size, delta.num_channels + values, bias=False)
            self.in_proj_ba = nn.Linear(size, 2 * delta.value_heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(size, delta.num_channels, bias=False)
            self.in_proj_z = nn.Linear(size, values, bias=False)
            self.in_proj_b = nn.Linear(size, delta.value_heads, bias=False)
            self.in_proj_a = nn.Linear(size, delta.value_heads, bias=False)
        # Contains the weight [channels, 1, K], by which `convolve` multiplies.
        channels = delta.num_channels
        self.conv1d = nn.Conv1d(channels, channels, delta.convolution, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(delta.value_heads))
        self.A_log = nn.Parameter(torch.empty(delta.value_heads))
        # Unlike the norms of the block, it has no offset.
        self.norm = RMSNorm(delta.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(values, size, bias=False)

    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Compute the normed and gated values that queries read, [B, T, H * Dv], for normed hidden
        states [B, T, D].
        """
        channels, gate, raw_shares, raw_rates = self._project(x)
        write_shares = raw_shares.float().sigmoid()
        rates = F.softplus(raw_rates.float() + self.dt_bias.float())
        log_decay = -self.A_log.float().exp() * rates
        inputs = channels, write_shares, log_decay
        read = step.scan(self.layer, self._write_and_read, inputs)
        heads = torch.unflatten(read, -1, (-1, self.delta.value_dim))
        normed = self.norm(heads).flatten(-2)
        gated: Tensor = (normed * F.silu(gate.float())).to(x.dtype)
        return gated

    def output(self, mixed: Tensor) -> Tensor:
        """Project gated values to the branch's output, [B, T, D]."""
        out: Tensor = self.out_proj(mixed)
        return out

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project normed hidden states [B, T, D] to the convolution's channels, gates
        [B, T, H * Dv], and two numbers for each head, [B, T, H] each, of which writing and decay
        are made.
        """
        delta = self.delta
        if not delta.joined:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        # Key head by key head; each has the values of several value heads.
        shared = delta.value_heads // delta.key_heads
        values = shared * delta.value_dim
        by_head = torch.unflatten(self.in_proj_qkvz(x), -1, (delta.key_heads, -1))
        parts = torch.split(by_head, [delta.key_dim, delta.key_dim, values, values], dim=-1)
        queries, keys, head_values, gates = (part.flatten(-2) for part in parts)
        numbers = torch.unflatten(self.in_proj_ba(x), -1, (delta.key_heads, 2, shared))
        shares, rates = (part.flatten(-2) for part in numbers.unbind(-2))
        return torch.cat((queries, keys, head_values), dim=-1), gates, shares, rates

    def _write_and_read(
        self, inputs: tuple[Tensor, ...], states: States | None
    ) -> tuple[Tensor, States]:
        """Compute what queries read, [B, T, H * Dv]: a `Recurrence`."""
        projected, write_shares, log_decay = inputs
        delta = self.delta
        earlier = None if states is None else states[0]
        convolved, latest = convolve(projected, self.conv1d, earlier)
        # As in transformers, the convolution's outputs have the dtype of the model.
        activated = F.silu(convolved.to(projected.dtype)).float()
        keys_width = delta.key_heads * delta.key_dim
        widths = [keys_width, keys_width, delta.value_heads * delta.value_dim]
        queries, keys, values = torch.split(activated, widths, dim=-1)
        queries = _to_heads(queries, delta.key_heads, delta.value_heads)
        keys = _to_heads(keys, delta.key_heads, delta.value_heads)
        values = _to_heads(values, delta.value_heads, delta.value_heads)
        queries = _normalize(queries) * delta.key_dim**-0.5
        keys = _normalize(keys)
        if states is None:
            shape = delta.value_heads, delta.key_dim, delta.value_dim
            matrices = torch.zeros(len(projected), *shape, device=values.device)
        else:
            matrices = states[1]
        # By head, as the others: [B, H, T].
        write_shares = write_shares.transpose(1, 2)
        log_decay = log_decay.transpose(1, 2)
        pieces: list[Tensor] = []
        for start in range(0, projected.shape[1], _CHUNK):
            chunk = slice(start, start + _CHUNK)
            read, matrices = apply_delta_rule(
                queries=queries[:, :, chunk],
                keys=keys[:, :, chunk],
                values=values[:, :, chunk],
                write_shares=write_shares[..., chunk],
                log_decay=log_decay[..., chunk],
                matrices=matrices,
            )
            pieces.append(read)
        read = torch.cat(pieces, dim=2).transpose(1, 2).flatten(2)
        return read.to(projected.dtype), (latest, matrices)


def apply_delta_rule(
    *,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    write_shares: Tensor,
    log_decay: Tensor,
    matrices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the rule over one chunk of tokens, all in float32.

    Token by token, a matrix S decays, S <- exp(g) S; takes up what the key does not yet read,
    S <- S + k (b (v - k S)); and is read, q S. Within the chunk, the corrections b (v - k S) of all
    tokens are the solution of a triangular system (2406.06484, section 3).

    Args:
        queries, keys: [B, H, C, Dk].
        values: [B, H, C, Dv].
        write_shares, log_decay: b and g, [B, H, C].
        matrices: S before the chunk, [B, H, Dk, Dv].

    Returns:
        What the queries read, [B, H, C, Dv], and S after the chunk.
    """
    # The decay from the beginning of the chunk to each token, and from each token to a later one.
    total_decay = log_decay.cumsum(-1)
    between = total_decay.unsqueeze(-1) - total_decay.unsqueeze(-2)
    # Before the exponential: those to an earlier token would be infinite.
    between = between.tril().exp().tril()
    from_start = total_decay.exp().unsqueeze(-1)
    shares = write_shares.unsqueeze(-1)
    # What a token writes depends on what the tokens before it wrote, by the products of their keys.
    overlap = (shares * (keys @ keys.transpose(-1, -2)) * between).tril(-1)
    updates = shares * (values - from_start * (keys @ matrices))
    # The solver takes the diagonal of ones for granted.
    corrections = torch.linalg.solve_triangular(overlap, updates, upper=False, unitriangular=True)
    attended = (queries @ keys.transpose(-1, -2)) * between
    read = from_start * (queries @ matrices) + attended @ corrections
    to_end = (total_decay[..., -1:] - total_decay).exp().unsqueeze(-1)
    kept = total_decay[..., -1, None, None].exp() * matrices
    return read, kept + (keys * to_end).transpose(-1, -2) @ corrections


def _to_heads(x: Tensor, heads: int, value_heads: int) -> Tensor:
    """Split [B, T, heads * N] into heads, each repeated for the heads of values that share it:
    [B, value_heads, T, N].
    """
    split = torch.unflatten(x, -1, (heads, -1))
    return split.repeat_interleave(value_heads // heads, dim=2).transpose(1, 2)


def _normalize(x: Tensor) -> Tensor:
    """Scale vectors [..., N] to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
