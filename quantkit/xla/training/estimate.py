"""What a step of training takes of the chips of a TPU slice, from the compiler for the real
slice; no TPU is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quantkit.architectures.config import ModelConfig
from quantkit.base.memory import size_text
from quantkit.base.progress import Progress, silent
from quantkit.calibration.estimate import forward_flops
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.training.trained import TrainedNames
from quantkit.xla.hlo import Collective, exchanges
from quantkit.xla.slices import Slice, compile_for_target, gib, make_memory_error
from quantkit.xla.training.arrays import abstract_arrays
from quantkit.xla.training.model import EMBEDDING, MeshDecoder
from quantkit.xla.training.partitions import DATA, MODEL, SLICES, DeviceMesh
from quantkit.xla.training.program import HEAD, TARGET_HEAD, Pace, TrainingPrograms
from quantkit.xla.training.state import abstract_trained, rates, select_trained_leaves

# Bytes a step, of exchanges that are named in the report.
_LEAST = 1 << 20
# Of its bytes, that a device sends in a ring; one for all other kinds.
_TRAFFIC = {"all-reduce": 2.0}
# a forward pass, again, and gradients by inputs and by weights; all but the second
_PASSES = 4
_USEFUL = 3


@dataclass(frozen=True)
class Exchange:
    """What chips exchange in a step by one kind of collective.

    Attributes:
        axis: of the mesh along which they do.
        count: in a step.
        bytes: on each chip, all together.
    """

    kind: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True)
class MeshEstimate:
    """A step on a mesh; bytes and seconds are those of a chip.

    Attributes:
        mesh: parts of the samples by parts of the model, in each slice.
        arguments: bytes of weights, samples and trained values.
        temporaries: bytes while the step runs.
        total: these, outputs other than trained values, and code.
        exchanges: the collectives.
        compute_seconds: of its products at the chip's peak.
        exchange_seconds: of what it sends at the speed of all its links.
        utilization: of the peak, by the arithmetic without what is computed again, if a step takes
            as long as the longer of both; a bound.
    """

    mesh: str
    arguments: int
    temporaries: int
    total: int
    exchanges: list[Exchange]
    compute_seconds: float
    exchange_seconds: float
    utilization: float

    def lines(self) -> list[str]:
        """For people."""
        sent = [exchange for exchange in self.exchanges if exchange.bytes >= _LEAST]
        return [
            (
                f"{self.mesh}: {size_text(self.total)} ({size_text(self.arguments)} of arguments,"
                f" {size_text(self.temporaries)} of temporaries, the rest of code and outputs); at"
                f" least {1000 * self.compute_seconds:.3g} ms of products,"
                f" {1000 * self.exchange_seconds:.3g} ms of exchanges; at most"
                f" {self.utilization:.0%} of peak FLOPS"
            ),
            *(
                f"    {one.count} {one.kind} along {one.axis}: {size_text(one.bytes)}"
                for one in sent
            ),
        ]


@dataclass(frozen=True)
class TrainingEstimate:
    """Training of a model's scales on a slice.

    Attributes:
        chips: of all slices.
        memory: of a chip that programs can have, in bytes.
        batch: samples of a step.
        length: tokens of a sample.
        flops: of a step on all chips, without what is computed again.
        meshes: those that the model fits.
        refused: why other meshes do not serve, by their shape.
    """

    model: str
    target: str
    chips: int
    memory: int
    batch: int
    length: int
    flops: float
    meshes: list[MeshEstimate]
    refused: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report for people."""
        return [
            (
                f"{self.model} on {self.target}: {self.chips} chips of {gib(self.memory)},"
                f" {self.batch} samples of {self.length} tokens in a step, {self.flops / 1e12:.3g}"
                " TFLOP; by mesh, for each chip:"
            ),
            *(line for mesh in self.meshes for line in mesh.lines()),
            *(f"{mesh}: {reason}" for mesh, reason in self.refused.items()),
        ]


def estimate_training(
    checkpoint: Checkpoint,
    target: str,
    *,
    names: TrainedNames,
    meshes: Sequence[tuple[int, int]],
    batch: int | None,
    least: int,
    length: int,
    progress: Progress = silent,
) -> TrainingEstimate:
    """Compile a step of training for a TPU slice.

    Args:
        checkpoint: the quantized model, of which only the shapes are looked at.
        target: kind and number of chips, such as ``v5e-64``; ``2xv5e-64`` for two slices.
        names: the tensors that are trained.
        meshes: shapes for each slice; none compares one dimension with two.
        batch: samples of a step; None is one for each part of the samples, and at least `least`.
        length: tokens of a sample.
        progress: called for each mesh.

    Raises:
        RequestError: for an unknown slice, or if the model fits no mesh, with the figures.
    """
    slice_ = Slice.parse(target)
    shapes = list(meshes) or _shapes(slice_.chips)
    if batch is None:
        batch = max(least, slice_.count * max(data for data, _ in shapes))
    else:
        batch = batch
    devices = slice_.devices()
    found = []
    refused = dict[str, str]()
    last: RequestError | None = None
    for number, (data, model) in enumerate(shapes):
        name = f"{data}x{model}"
        progress("compile", number, len(shapes), f"meshes, {name}")
        try:
            if data * model != slice_.chips:
                raise RequestError(
                    "the mesh is not all of the slice", found=name, expected=f"{slice_.chips} chips"
                )
            mesh = DeviceMesh.of(devices, (data, model), slice_.count)
            found.append(_estimate(checkpoint, slice_, mesh, names, batch, length))
        except RequestError as error:
            refused[name], last = str(error), error
    if last is not None and not found:
        raise last
    return TrainingEstimate(
        checkpoint.path.name,
        target,
        slice_.chips * slice_.count,
        slice_.chip.memory,
        batch,
        length,
        _flops(checkpoint.config, batch, length, _USEFUL),
        found,
        refused,
    )


def step_of(
    checkpoint: Checkpoint,
    mesh: DeviceMesh,
    names: TrainedNames,
    *,
    batch: int,
    length: int,
    dtype: Any,
) -> Any:
    """Return the program of a step, lowered, without weights.

    Raises:
        RequestError: if the mesh does not divide the samples.
        UnsupportedError: for a model that XLA does not train.
    """
    config = checkpoint.config
    trained = select_trained_leaves(checkpoint, names)
    mesh.require_divides(batch)
    decoder = MeshDecoder(config, schemes(checkpoint), mesh, dtype)
    held = abstract_arrays(checkpoint, mesh)
    held[TARGET_HEAD] = held.get(HEAD, held[EMBEDDING])
    tokens = mesh.abstract((batch, length), np.int32, (mesh.samples, None))
    targets = mesh.abstract(
        (batch, length, config.hidden_size), np.float32, (mesh.samples, None, MODEL)
    )
    pace = Pace(*[jax.ShapeDtypeStruct((), np.float32)] * len(Pace._fields))
    programs = TrainingPrograms(decoder, rates(checkpoint, trained))
    return programs.step.lower(held, abstract_trained(trained, mesh), tokens, targets, pace)


def by_axis(program: str, mesh: DeviceMesh) -> list[Exchange]:
    """Return what devices exchange in a compiled program, by kind and axis, the most first."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for one, times in exchanges(program).items():
        total = counts[one.kind, find_collective_axes(one, mesh)]
        total[0] += times
        total[1] += times * one.bytes
    found = []
    for (kind, axis), (count, size) in counts.items():
        found.append(Exchange(kind, axis, count, size))
    return sorted(found, key=lambda one: -one.bytes)


def _estimate(
    checkpoint: Checkpoint,
    slice_: Slice,
    mesh: DeviceMesh,
    names: TrainedNames,
    batch: int,
    length: int,
) -> MeshEstimate:
    lowered = step_of(checkpoint, mesh, names, batch=batch, length=length, dtype=jnp.bfloat16)
    compiled = compile_for_target(slice_.name, lowered, "a step of training")
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = arguments + temporaries + outputs + memory.generated_code_size_in_bytes
    if total > slice_.chip.memory:
        raise make_memory_error(slice_.name, f"{gib(total)} a chip", gib(slice_.chip.memory))
    found = by_axis(compiled.as_text(), mesh)
    chips = slice_.chips * slice_.count
    compute = _flops(checkpoint.config, batch, length, _PASSES) / chips / slice_.chip.flops
    sent = sum(_TRAFFIC.get(one.kind, 1.0) * one.bytes for one in found) / slice_.chip.links
    useful = _flops(checkpoint.config, batch, length, _USEFUL) / chips / slice_.chip.flops
    shape = f"{mesh.size(DATA)}x{mesh.size(MODEL)}"
    return MeshEstimate(
        shape, arguments, temporaries, total, found, compute, sent, useful / max(compute, sent)
    )


def _flops(config: ModelConfig, batch: int, length: int, passes: int) -> float:
    """Of a step in a number of passes: products with weights, and of queries with keys and shares
    with values, of which causal attention needs half.
    """
    attention = 2 * batch * length**2 * config.num_heads * config.head_dim * config.num_layers
    return float(passes * (forward_flops(config, batch * length) + attention))


def _shapes(chips: int) -> list[tuple[int, int]]:
    """Meshes to compare: one dimension, which divides samples alone, and the squarest of two."""
    model = 1
    while model * model < chips:
        model *= 2
    return [(chips, 1), (chips // model, model)]


def find_collective_axes(collective: Collective, mesh: DeviceMesh) -> str:
    """Return the axes of the mesh along which devices exchange."""
    shape = [mesh.size(axis) for axis in (SLICES, DATA, MODEL)]
    places = np.array(
        np.unravel_index(np.array(collective.devices or range(int(np.prod(shape)))), shape)
    )
    varying = []
    for axis, place in zip((SLICES, DATA, MODEL), places, strict=True):
        if len(set(place.tolist())) > 1:
            varying.append(axis)
    return " and ".join(varying) or "none"
