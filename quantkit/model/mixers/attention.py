"""Attention as a mixer; `model.attention` computes the scores.

B batch, T new positions, D hidden size, H heads, K KV heads, Dh head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.model.attention import ScoreSettings
from quantkit.model.mixers.mixer import Mixer, Step
from quantkit.model.norms import UnitNorm, rms_norm
from quantkit.model.rope import rotate


class Attention(Mixer):
    """Grouped-query attention, with or without rotary positions."""

    NAME = "self_attn"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.head_dim = config.head_dim_of(layer)
        query = config.num_heads * self.head_dim
        self.has_gate = config.attention_gate
        projected = 2 * query if self.has_gate else query
        kv = config.kv_heads_of(layer) * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, projected, bias=config.qkv_bias)
        # The layer whose keys and values this one takes; None if it computes its own.
        self.source = config.kv_sources[layer]
        # Whether later layers take this one's.
        self.is_source = layer in config.kv_sources
        self.k_proj: nn.Linear | None = None
        if self.source is None:
            self.k_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        # Some layers take the product of keys, before its norm and rotation, as values.
        self.takes_keys = config.values_are_keys and self.config.window is None
        self.v_proj: nn.Linear | None = None
        if self.source is None and not self.takes_keys:
            self.v_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        # Replaces the three above if loading fuses them: one product of many rows is faster than
        # several of few rows.
        self.qkv_proj: nn.Module | None = None
        self.widths = [projected, kv] if self.takes_keys else [projected, kv, kv]
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        # Bare norms are those of layers with rotary positions.
        self.bare_norm: UnitNorm | None = None
        if config.qk_norm == "bare" and self.config.rotary:
            self.bare_norm = UnitNorm(config.norm_eps)
        self.norms_heads = config.qk_norm in ("head", "bare")
        self.norms_rotated = config.qk_norm_after_rotary
        self.q_norm = self.k_norm = None
        # Replaces both norms if processes share the width, because the mean square is then a sum
        # over processes.
        self.shared_norms: nn.Module | None = None
        if config.qk_norm in ("head", "width"):
            if self.norms_heads:
                query_size = key_size = self.head_dim
            else:
                query_size = query
                key_size = kv
            self.q_norm = rms_norm(config, query_size)
            if self.source is None:
                self.k_norm = rms_norm(config, key_size)
        self.v_norm = UnitNorm(config.norm_eps) if config.value_norm else None
        self.clip = config.clip_qkv
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        # Rounds keys and values [B, K, T, Dh] as a quantized cache does, or records their maxima.
        self.as_cached: nn.Module | None = None
        self._scale = config.attention_scale
        self._softcap = config.attention_softcap

    @property
    def scores(self) -> ScoreSettings:
        return ScoreSettings(self._scale, self._softcap, self.sinks)

    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Mix values by attention, [B, T, H * Dh], for normed hidden states [B, T, D]."""
        if self.source is not None:
            return self._attend_to_source(x, step, self.source)
        if self.qkv_proj is None:
            assert self.k_proj is not None
            parts: tuple[Tensor, ...] = self.q_proj(x), self.k_proj(x)
            if self.v_proj is not None:
                parts = *parts, self.v_proj(x)
        else:
            parts = torch.split(self.qkv_proj(x), self.widths, dim=-1)
        if self.takes_keys:
            parts = *parts, parts[1]
        gate: Tensor | None = None
        if self.has_gate:
            # Each head's gate follows its queries.
            heads = parts[0].view(*parts[0].shape[:-1], -1, 2 * self.head_dim)
            head_queries, head_gates = heads.chunk(2, dim=-1)
            gate = head_gates.flatten(-2)
            parts = head_queries.flatten(-2), *parts[1:]
        # Norms over the width (OLMo 2) precede the split into heads, norms per head (Qwen 3)
        # follow it.
        if not self.norms_heads:
            parts = self._apply_qk_norm(*parts)
        if self.clip is not None:
            parts = tuple(part.clamp(-self.clip, self.clip) for part in parts)
        queries, keys, values = (part.view(*part.shape[:-1], -1, self.head_dim) for part in parts)
        if self.norms_heads and not self.norms_rotated:
            queries, keys, values = self._apply_qk_norm(queries, keys, values)
        if self.v_norm is not None:
            values = self.v_norm(values)
        queries = queries.transpose(1, 2)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        if self.config.rotary:
            turn = step.angles.of(self.config)
            queries = rotate(queries, *turn)
            keys = rotate(keys, *turn)
        if self.norms_rotated:
            queries, keys, values = self._apply_qk_norm(queries, keys, values)
        query_scale = step.angles.query_scale_of(self.config)
        if query_scale is not None:
            scale = query_scale.unsqueeze(-1)
            if scale.dim() == 3:
                # With one row of positions per sequence, the heads need a dimension.
                scale = scale.unsqueeze(1)
            queries = queries * scale.to(queries.dtype)
        if self.as_cached is not None:
            keys, values = self.as_cached(keys, values)
        if self.is_source:
            step.shared[self.layer] = keys, values
        mixed = step.attend(self.layer, queries, keys, values, self.scores)
        if gate is None:
            return mixed
        return mixed * torch.sigmoid(gate)

    def _attend_to_source(self, x: Tensor, step: Step, source: int) -> Tensor:
        """Mix the values of another layer for normed hidden states [B, T, D]."""
        projected = self.q_proj(x)
        queries = projected.view(*projected.shape[:-1], -1, self.head_dim)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        queries = queries.transpose(1, 2)
        if self.config.rotary:
            queries = rotate(queries, *step.angles.of(self.config))
        return step.attend(self.layer, queries, *step.shared[source], self.scores)

    def output(self, mixed: Tensor) -> Tensor:
        """Project mixed values to the branch's output, [B, T, D]."""
        out: Tensor = self.o_proj(mixed)
        return out

    def _apply_qk_norm(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        if self.bare_norm is not None:
            return self.bare_norm(queries), self.bare_norm(keys), values
        if self.q_norm is None or self.k_norm is None:
            return queries, keys, values
        if self.shared_norms is not None:
            return *self.shared_norms(queries, keys), values
        return self.q_norm(queries), self.k_norm(keys), values
