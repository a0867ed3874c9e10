"""Estimate the memory of a model on the chips of a TPU slice by compiling its programs for this
slice, which needs no TPU.
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
    """The memory that one compiled program needs on a chip, in bytes.

    Attributes:
        arguments: weights and cache.
        temporaries: memory that the program uses while it runs.
        total: the sum of both, the outputs other than the cache, and the program's code.
        collectives: the number of each kind, over all chips.
    """

    name: str
    arguments: int
    temporaries: int
    total: int
    collectives: dict[str, int]

    def line(self) -> str:
        """Format the phase as a line of the report."""
        counts = [f"{count} {kind}" for kind, count in self.collectives.items()]
        exchanged = ", ".join(counts) or "no collectives"
        arguments = gib(self.arguments)
        temporaries = gib(self.temporaries)
        total = gib(self.total)
        return (
            f"{self.name}: {arguments} of arguments, {temporaries} of temporaries, {total} in all;"
            f" {exchanged}"
        )


@dataclass(frozen=True)
class SliceEstimate:
    """A model on a slice.

    Attributes:
        chips: the number of chips of the slice.
        memory: the memory of a chip that programs can use, in bytes.
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
        """Return the peak memory of a chip, in bytes."""
        return max(phase.total for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Format the report."""
        lines = [
            f"{self.model} on {self.target}: {self.chips} chips of {gib(self.memory)}, batch"
            f" {self.batch}, context {self.context}; per chip:"
        ]
        for phase in self.phases:
            lines.append(phase.line())
        lines.append(f"it fits: {gib(self.memory - self.peak_bytes)} of each chip are free")
        return lines


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
        checkpoint: only its shapes are used.
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
    if batch < 1 or not 1 <= context <= config.max_unscaled_context:
        raise RequestError(
            "batch or context is out of range",
            found=f"{batch} and {context}",
            expected=f"at least 1, and a context of at most {config.max_unscaled_context}",
        )
    split = DeviceSplit(config, schemes(checkpoint), chips)
    mesh = topologies.make_mesh(slice_.topology(), (chips,), (AXIS,))
    decoder = build_sharded_decoder(split)
    dtype = dtype or DType(config.dtype).torch
    specs = {name: checkpoint.info(name) for name in checkpoint.names()}
    state = abstract_state(specs, split, mesh, dtype)
    layer_cache = abstract(mesh, cache_shape(split, batch, context), jax_dtype(dtype))
    cache = ([layer_cache] * config.num_layers, [layer_cache] * config.num_layers)
    argument_bytes = 0
    for array in jax.tree.leaves((state, cache)):
        argument_bytes += math.ceil(_bits(array) / 8 / chips)
    # Checked first, because compiling a large model takes minutes.
    if argument_bytes > memory:
        raise make_memory_error(
            target, f"{gib(argument_bytes)} a chip of weights and cache alone", gib(memory)
        )

    def replicated(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return abstract(mesh, shape, dtype, PartitionSpec())

    numbers = replicated((batch,), np.int32)
    logits = replicated((batch, config.vocab_size), jax_dtype(dtype))
    rows = Rows(numbers, numbers)
    ends = replicated((len(config.eos_token_ids),), np.int32)
    step = chunk_program(decoder, mesh)
    prompt = prefill_program(decoder, mesh)
    tokens = replicated((batch, context), np.int32)
    phases = [
        _phase("a step of decoding", target, step.lower(state, cache, logits, rows, ends, None)),
        _phase(f"a prompt of {context}", target, prompt.lower(state, cache, tokens, numbers)),
    ]
    estimate = SliceEstimate(
        model=checkpoint.path.name,
        target=target,
        chips=chips,
        memory=memory,
        batch=batch,
        context=context,
        phases=phases,
    )
    if estimate.peak_bytes > memory:
        raise make_memory_error(target, f"{gib(estimate.peak_bytes)} a chip", gib(memory))
    return estimate


def collectives(program: str) -> dict[str, int]:
    """Count the collectives of each kind in the text of a compiled program.

    Those in a loop count once.
    """
    counts: dict[str, int] = {}
    for kind in KINDS:
        # An asynchronous collective has a start and an end, of which only the start counts.
        count = len(re.findall(rf"\b{kind}(?:-start)?\(", program))
        if count:
            counts[kind] = count
    return counts


def _phase(name: str, target: str, lowered: Any) -> Phase:
    compiled = compile_for_target(target, lowered, name)
    memory = compiled.memory_analysis()
    # The new cache replaces the old one in the same memory, so it counts only as an argument.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    inputs = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Phase(
        name=name,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        total=inputs + outputs + memory.generated_code_size_in_bytes,
        collectives=collectives(compiled.as_text()),
    )


def _bits(array: jax.ShapeDtypeStruct) -> int:
    count: int = math.prod(array.shape)
    # JAX reports an itemsize of one byte for int4, which TPUs pack.
    if array.dtype == jnp.int4:
        return count * 4
    return count * 8 * int(array.dtype.itemsize)
