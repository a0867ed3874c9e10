"""The one table of tensor names: Hugging Face's (canonical), Meta's, shapes and sharding.

Canonical q/k rows are in Hugging Face's rotary layout (rotate-half); Meta's are
interleaved, so they are permuted per head at that edge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quantkit.architectures.config import ModelConfig

Split = Literal["none", "rows", "columns", "vocabulary"]
"""How Meta's model-parallel shards divide a tensor: whole on each, along axis 0,
along axis 1, or (the embedding) axis 1 in Llama 1 and 2 and axis 0 in Llama 3."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``shape`` is spelled in symbols: ``v`` vocabulary, ``d`` hidden, ``f`` feed-forward,
    ``q`` all query heads, ``k`` all KV heads, ``h`` one head. ``present`` names the
    `ModelConfig` field that must be true for the tensor to exist; a leading ``!``
    negates it. ``rotary`` marks rows that are permuted per head.
    """

    canonical: str
    shape: str
    meta: str | None = None
    split: Split = "none"
    rotary: bool = False
    linear: bool = False
    present: str | None = None


_ATTENTION = "model.layers.{}.self_attn."
_MLP = "model.layers.{}.mlp."

# fmt: off
TABLE: tuple[Row, ...] = (
    Row("model.embed_tokens.weight", "vd", "tok_embeddings.weight", "vocabulary"),
    Row("model.layers.{}.input_layernorm.weight", "d", "layers.{}.attention_norm.weight"),
    Row(_ATTENTION + "q_proj.weight", "qd", "layers.{}.attention.wq.weight", "rows", rotary=True, linear=True),
    Row(_ATTENTION + "q_proj.bias", "q", rotary=True, present="qkv_bias"),
    Row(_ATTENTION + "k_proj.weight", "kd", "layers.{}.attention.wk.weight", "rows", rotary=True, linear=True),
    Row(_ATTENTION + "k_proj.bias", "k", rotary=True, present="qkv_bias"),
    Row(_ATTENTION + "v_proj.weight", "kd", "layers.{}.attention.wv.weight", "rows", linear=True),
    Row(_ATTENTION + "v_proj.bias", "k", present="qkv_bias"),
    Row(_ATTENTION + "o_proj.weight", "dq", "layers.{}.attention.wo.weight", "columns", linear=True),
    Row(_ATTENTION + "o_proj.bias", "d", present="output_bias"),
    Row(_ATTENTION + "q_norm.weight", "h", present="qk_norm"),
    Row(_ATTENTION + "k_norm.weight", "h", present="qk_norm"),
    Row("model.layers.{}.post_attention_layernorm.weight", "d", "layers.{}.ffn_norm.weight"),
    Row(_MLP + "gate_proj.weight", "fd", "layers.{}.feed_forward.w1.weight", "rows", linear=True),
    Row(_MLP + "gate_proj.bias", "f", present="mlp_bias"),
    Row(_MLP + "up_proj.weight", "fd", "layers.{}.feed_forward.w3.weight", "rows", linear=True),
    Row(_MLP + "up_proj.bias", "f", present="mlp_bias"),
    Row(_MLP + "down_proj.weight", "df", "layers.{}.feed_forward.w2.weight", "columns", linear=True),
    Row(_MLP + "down_proj.bias", "d", present="mlp_bias"),
    Row("model.norm.weight", "d", "norm.weight"),
    Row("lm_head.weight", "vd", "output.weight", "rows", linear=True, present="!tied_embeddings"),
)
# fmt: on

_DERIVED_BUFFERS = re.compile(
    r"(.*\.)?(rope\.freqs|freqs_cis|rotary_emb\.(inv_freq|cos_cached|sin_cached)|attention\.inner_attention\.rope\.freqs)"
)


@dataclass(frozen=True)
class Entry:
    """One tensor of one model: its canonical name, shape and table row."""

    name: str
    shape: tuple[int, ...]
    row: Row
    layer: int | None

    @property
    def module(self) -> str:
        """The module the tensor belongs to, as quantization plans name it."""
        return self.name.rpartition(".")[0]

    def meta_name(self) -> str | None:
        """Meta's name for it, or None where Meta's format has no such tensor."""
        return None if self.row.meta is None else self.row.meta.format(self.layer)


def entries(config: ModelConfig) -> list[Entry]:
    """Every tensor a model of this architecture has, in the order of its layers."""
    sizes = {
        "v": config.vocab_size,
        "d": config.hidden_size,
        "f": config.intermediate_size,
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
        "h": config.head_dim,
    }
    rows = [row for row in TABLE if _present(row, config)]
    first = next(i for i, row in enumerate(rows) if "{}" in row.canonical)
    last = max(i for i, row in enumerate(rows) if "{}" in row.canonical)
    found: list[Entry] = []

    def add(row: Row, layer: int | None) -> None:
        shape = tuple(sizes[symbol] for symbol in row.shape)
        found.append(Entry(row.canonical.format(layer), shape, row, layer))

    for row in rows[:first]:
        add(row, None)
    for layer in range(config.num_layers):
        for row in rows[first : last + 1]:
            add(row, layer)
    for row in rows[last + 1 :]:
        add(row, None)
    return found


def linear_columns(config: ModelConfig) -> dict[str, int]:
    """Every linear module of the model with its number of inputs."""
    return {e.module: e.shape[1] for e in entries(config) if e.row.linear}


def is_derived_buffer(name: str) -> bool:
    """Whether a stored tensor is a rotary table that the config already determines."""
    return _DERIVED_BUFFERS.fullmatch(name) is not None


def split_derived(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate names into (weights, derived buffers)."""
    weights: list[str] = []
    buffers: list[str] = []
    for name in names:
        (buffers if is_derived_buffer(name) else weights).append(name)
    return weights, buffers


def _present(row: Row, config: ModelConfig) -> bool:
    if row.present is None:
        return True
    if row.present.startswith("!"):
        return not getattr(config, row.present[1:])
    return bool(getattr(config, row.present))
