"""A model's weights as other settings of its attention would read them: those that are mistaken for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.rope import MAX_THETA, MIN_THETA
from quantkit.architectures.topology import parameters
from quantkit.errors import CheckpointError
from quantkit.files.source import SourceFile
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.containers.meta_checkpoint import to_interleaved, to_rotate_half
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_BASES = (0.01, 100.0)  # times the config's; what is closer to it predicts nearly the same


class Reading:
    """A checkpoint, read in another way than its config says.

    Attributes:
        what: the way, for people.
    """

    def __init__(
        self, what: str, source: Checkpoint, config: ModelConfig | None = None,
        reorder: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            config: what the model is; None is what its own config says.
            reorder: gives rows [heads * head_dim, ...] of queries and keys, and the size of a head, in another order.
        """
        self.what = what
        self._source = source
        self._reorder = reorder
        self.config = source.config if config is None else config
        self._rotary = {one.name for one in parameters(self.config) if one.rotary} if reorder else set()
        self.path, self.format = source.path, source.format
        self.extra_config, self.notes = source.extra_config, source.notes

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorSpec:
        return self._source.info(name)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        if self._reorder is None or name not in self._rotary:
            return self._source.load(name, part)
        value = self._source.load(name)
        rows = value.dequantize() if isinstance(value, QuantTensor) else value
        rows = self._reorder(rows, self.config.head_dim)
        return rows if part is None else part.of(rows)

    def files(self) -> list[SourceFile]:
        return self._source.files()


def readings(source: Checkpoint) -> Iterator[Reading]:
    """The ways in which a model could be read by mistake: another rope base, heads half or twice as large, rows of
    queries and keys in the order of the other of Meta's and Hugging Face's formats."""
    config = source.config
    for factor in _BASES:
        theta = config.rope.theta * factor
        if MIN_THETA < theta < MAX_THETA:
            yield Reading(f"a rope base of {theta:g}", source, replace(config, rope=replace(config.rope, theta=theta)))
    whole = config.rope.rotary_dim is None and config.latent_attention is None
    if whole:
        yield Reading("q and k rows taken from pairs to halves", source, reorder=to_rotate_half)
        yield Reading("q and k rows taken from halves to pairs", source, reorder=to_interleaved)
    of_a_head = config.qk_norm == "head" or config.sinks or config.rope.short_factor is not None
    if whole and not of_a_head:
        yield from (Reading(_heads(other), source, other) for other in _other_heads(config, source.path))


def _other_heads(config: ModelConfig, path: object) -> Iterator[ModelConfig]:
    """The same widths in twice and in half as many heads, where these divide."""
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
    changes = [(2 * heads, 2 * kv, size // 2)] if size % 2 == 0 else []
    changes += [(heads // 2, kv // 2, 2 * size)] if heads % 2 == kv % 2 == 0 else []
    for heads, kv, size in changes:
        try:
            yield replace(config, num_heads=heads, num_kv_heads=kv, head_dim=size).validated(path)
        except CheckpointError:  # a size that rotary positions do not fit
            continue


def _heads(config: ModelConfig) -> str:
    return f"{config.num_heads} heads of {config.head_dim}"
