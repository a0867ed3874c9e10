"""What a model takes of the chips of a TPU slice, from the compiler for the real slice; no TPU is needed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.tensors.dtypes import DType
from quantkit.xla.model import AXIS, sharded_decoder
from quantkit.xla.programs import Rows, cache_shape, chunk_program, prefill_program
from quantkit.xla.split import DeviceSplit
from quantkit.xla.weights import abstract, abstract_state, jax_dtype

_MEMORY = {"v5e": 15.75, "v6e": 31.25}  # GiB of a chip that the compiler gives out
_SHAPES = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # by chips
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPILER_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",  # no request to a metadata server about this machine
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a chip that may be here is not taken
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
_REFUSED = "RESOURCE_EXHAUSTED: "  # how the compiler says it
_GIB = 1 << 30


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
        exchanged = ", ".join(f"{count} {kind}" for kind, count in self.collectives.items()) or "no collectives"
        arguments, temporaries, total = map(_gib, (self.arguments, self.temporaries, self.total))
        return f"{self.name}: {arguments} of arguments, {temporaries} of temporaries, {total} in all; {exchanged}"


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
    def needed(self) -> int:
        """Bytes of a chip at the peak."""
        return max(phase.total for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for people."""
        return [
            f"{self.model} on {self.target}: {self.chips} chips of {_gib(self.memory)}, batch {self.batch}, "
            f"context {self.context}; per chip:",
            *(phase.line() for phase in self.phases),
            f"it fits: {_gib(self.memory - self.needed)} of each chip are left",
        ]


def estimate_slice(
    checkpoint: Checkpoint, target: str, *, batch: int = 1, context: int | None = None, dtype: torch.dtype | None = None
) -> SliceEstimate:
    """Compile generation for a TPU slice, with all its chips as one line of devices.

    Args:
        checkpoint: of which only the shapes are looked at.
        target: kind and number of chips, such as ``v5e-16``.
        batch: texts at once.
        context: positions of the cache; None is all that the model can.
        dtype: of activations and float weights; None is the checkpoint's own.

    Raises:
        RequestError: for an unknown slice, one that does not divide the heads, or one that the model does not
            fit, with the figures.
    """
    config = checkpoint.config
    kind, memory, chips = _slice(target)
    context = config.max_unscaled_context if context is None else context
    if batch < 1 or not 1 <= context <= config.max_unscaled_context:
        raise RequestError(
            "batch or context can't be", found=f"{batch} and {context}",
            expected=f"at least 1, and a context of at most {config.max_unscaled_context}",
        )  # fmt: skip
    split = DeviceSplit(config, schemes(checkpoint), chips)
    mesh = _mesh(kind, chips)
    decoder, dtype = sharded_decoder(split), dtype or DType(config.dtype).torch
    state = abstract_state({name: checkpoint.info(name) for name in checkpoint.names()}, split, mesh, dtype)
    one = abstract(mesh, cache_shape(split, batch, context), jax_dtype(dtype))
    cache = ([one] * config.num_layers, [one] * config.num_layers)
    held = sum(math.ceil(_bits(array) / 8 / chips) for array in jax.tree.leaves((state, cache)))
    if held > memory:
        raise _too_much(target, f"{_gib(held)} a chip of weights and cache alone", _gib(memory))

    def whole(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return abstract(mesh, shape, dtype, PartitionSpec())

    numbers, logits = whole((batch,), np.int32), whole((batch, config.vocab_size), jax_dtype(dtype))
    rows, ends = Rows(numbers, numbers), whole((len(config.eos_token_ids),), np.int32)
    step, prompt = chunk_program(decoder, mesh), prefill_program(decoder, mesh)
    tokens = whole((batch, context), np.int32)
    phases = [
        _phase("a step of decoding", target, lambda: step.lower(state, cache, logits, rows, ends, None)),
        _phase(f"a prompt of {context}", target, lambda: prompt.lower(state, cache, tokens, numbers)),
    ]
    estimate = SliceEstimate(checkpoint.path.name, target, chips, memory, batch, context, phases)
    if estimate.needed > memory:
        raise _too_much(target, f"{_gib(estimate.needed)} a chip", _gib(memory))
    return estimate


def collectives(program: str) -> dict[str, int]:
    """How many of each kind a compiled program has, from its text. A loop's are those of one round."""
    counts = {kind: len(re.findall(rf"\b{kind}(?:-start)?\(", program)) for kind in _COLLECTIVES}
    return {kind: count for kind, count in counts.items() if count}


def _slice(target: str) -> tuple[str, int, int]:
    """Kind, bytes on a chip and number of chips."""
    kind, _, count = target.partition("-")
    if kind not in _MEMORY or not count.isdigit() or int(count) not in _SHAPES:
        expected = f"{' or '.join(_MEMORY)}, a hyphen and {', '.join(map(str, _SHAPES))}"
        raise RequestError("unknown TPU slice", found=target, expected=expected)
    return kind, int(_MEMORY[kind] * _GIB), int(count)


def _mesh(kind: str, chips: int) -> Mesh:
    os.environ.update(_COMPILER_ONLY)
    jax.config.update("jax_platforms", "cpu")
    try:
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{_SHAPES[chips]}")
    except jax.errors.JaxRuntimeError as error:
        raise RequestError(f"libtpu does not start: {error}") from error
    return topologies.make_mesh(slice_, (chips,), (AXIS,))


def _phase(name: str, target: str, lower: Callable[[], Any]) -> Phase:
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition(_REFUSED)[2].partition("\n")[0]
        if not reason:
            raise
        raise _too_much(target, f"for {name}: {reason}", None) from error
    memory = compiled.memory_analysis()
    given = memory.output_size_in_bytes - memory.alias_size_in_bytes
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Phase(
        name, memory.argument_size_in_bytes, memory.temp_size_in_bytes,
        taken + given + memory.generated_code_size_in_bytes, collectives(compiled.as_text()),
    )  # fmt: skip


def _too_much(target: str, found: str, memory: str | None) -> RequestError:
    return RequestError(
        f"the model does not fit {target}", found=found, expected=None if memory is None else f"at most {memory}",
        hint="take more chips, fewer bits, a smaller batch or a shorter context",
    )  # fmt: skip


def _bits(array: jax.ShapeDtypeStruct) -> int:
    count: int = math.prod(array.shape)
    return count * (4 if array.dtype == jnp.int4 else 8 * int(array.dtype.itemsize))


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
