"""What a model takes of the chips of a TPU slice, from the compiler for the real slice; no TPU
is needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import topologies
from jax.sharding import PartitionSpec

from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.tensors.dtypes import DType
from quantkit.xla.hlo import KINDS
from quantkit.xla.model import AXIS, build_sharded_decoder
from quantkit.xla.programs import Rows, cache_shape, chunk_program, prefill_program
from quantkit.xla.slices import Slice, compile_for_target, gib, make_memory_error
from quantkit.xla.split import DeviceSplit
from quantkit.xla.weights import abstract, abstract_state, jax_dtype


@dataclass(frozen=True)
class Phase:
    """What one compiled program takes of a chip, in bytes.

    Attributes:
        arguments: weights and cache.
        temporaries: while it runs.
        total: these, its outputs other than the cache, and its code.
        collectives: how many of each kind, over all chips.
    """

    name: str
    arguments: int
    temporaries: int
    total: int
    collectives: dict[str, int]

    def line(self) -> str:
        """For people."""
        exchanged = (
            ", ".join(f"{count} {kind}" for kind, count in self.collectives.items())
            or "no collectives"
        )
        arguments, temporaries, total = map(gib, (self.arguments, self.temporaries, self.total))
        return (
            f"{self.name}: {arguments} of arguments, {temporaries} of temporaries, {total} in all;"
            f" {exchanged}"
        )


@dataclass(frozen=True)
class SliceEstimate:
    """A model on a slice.

    Attributes:
        chips: that the slice has.
        memory: of a chip that programs can have, in bytes.
        batch: texts at once.
        context: positions of the cache, and tokens of the prompt.
    """

    model: str
    target: str
    chips: int
    memory: int
    batch: int
    context: int
    phases: list[Phase]

    @property
    def peak_bytes(self) -> int:
        """Bytes of a chip at the peak."""
        return max(phase.total for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report for people."""
        return [
            (
                f"{self.model} on {self.target}: {self.chips} chips of {gib(self.memory)}, batch"
                f" {self.batch}, context {self.context}; per chip:"
            ),
            *(phase.line() for phase in self.phases),
            f"it fits: {gib(self.memory - self.peak_bytes)} of each chip are left",
        ]


def estimate_slice(
    checkpoint: Checkpoint,
    target: str,
    *,
    batch: int = 1,
    context: int | None = None,
    dtype: torch.dtype | None = None,
) -> SliceEstimate:
    """Compile generation for a TPU slice, with all its chips as one line of devices.

    Args:
        checkpoint: of which only the shapes are looked at.
        target: kind and number of chips, such as ``v5e-16``.
        batch: texts at once.
        context: positions of the cache; None is all that the model can.
        dtype: of activations and float weights; None is the checkpoint's own.

    Raises:
        RequestError: for an unknown slice, one that does not divide the heads, or one that the
            model does not fit, with the figures.
    """
    config = checkpoint.config
    slice_ = Slice.parse(target)
    chips = slice_.chips
    memory = slice_.chip.memory
    if slice_.count > 1:
        raise RequestError(
            "generation runs on one slice", found=target, expected=target.partition("x")[2]
        )
    if context is None:
        context = config.max_unscaled_context
    else:
        context = context
    if batch < 1 or not 1 <= context <= config.max_unscaled_context:
        raise RequestError(
            "batch or context can't be",
            found=f"{batch} and {context}",
            expected=f"at least 1, and a context of at most {config.max_unscaled_context}",
        )
    split = DeviceSplit(config, schemes(checkpoint), chips)
    mesh = topologies.make_mesh(slice_.topology(), (chips,), (AXIS,))
    decoder = build_sharded_decoder(split)
    dtype = dtype or DType(config.dtype).torch
    state = abstract_state(
        {name: checkpoint.info(name) for name in checkpoint.names()}, split, mesh, dtype
    )
    one = abstract(mesh, cache_shape(split, batch, context), jax_dtype(dtype))
    cache = ([one] * config.num_layers, [one] * config.num_layers)
    held = sum(math.ceil(_bits(array) / 8 / chips) for array in jax.tree.leaves((state, cache)))
    if held > memory:
        raise make_memory_error(
            target, f"{gib(held)} a chip of weights and cache alone", gib(memory)
        )

    def whole(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return abstract(mesh, shape, dtype, PartitionSpec())

    numbers = whole((batch,), np.int32)
    logits = whole((batch, config.vocab_size), jax_dtype(dtype))
    rows = Rows(numbers, numbers)
    ends = whole((len(config.eos_token_ids),), np.int32)
    step = chunk_program(decoder, mesh)
    prompt = prefill_program(decoder, mesh)
    tokens = whole((batch, context), np.int32)
    phases = [
        _phase("a step of decoding", target, step.lower(state, cache, logits, rows, ends, None)),
        _phase(f"a prompt of {context}", target, prompt.lower(state, cache, tokens, numbers)),
    ]
    estimate = SliceEstimate(checkpoint.path.name, target, chips, memory, batch, context, phases)
    if estimate.peak_bytes > memory:
        raise make_memory_error(target, f"{gib(estimate.peak_bytes)} a chip", gib(memory))
    return estimate


def collectives(program: str) -> dict[str, int]:
    """Return how many of each kind a compiled program has, from its text.

    A loop's are those of one round.
    """
    counts = {kind: len(re.findall(rf"\b{kind}(?:-start)?\(", program)) for kind in KINDS}
    return {kind: count for kind, count in counts.items() if count}


def _phase(name: str, target: str, lowered: Any) -> Phase:
    compiled = compile_for_target(target, lowered, name)
    memory = compiled.memory_analysis()
    given = memory.output_size_in_bytes - memory.alias_size_in_bytes
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Phase(
        name,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        taken + given + memory.generated_code_size_in_bytes,
        collectives(compiled.as_text()),
    )


def _bits(array: jax.ShapeDtypeStruct) -> int:
    count: int = math.prod(array.shape)
    return count * (4 if array.dtype == jnp.int4 else 8 * int(array.dtype.itemsize))
