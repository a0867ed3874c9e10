"""Estimate the memory and the time of a training step on a TPU slice by compiling it for this
slice, which needs no TPU.
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
from quantkit.xla.hlo import Collective, count_exchanges
from quantkit.xla.slices import Slice, compile_for_target, gib, make_memory_error
from quantkit.xla.training.arrays import abstract_arrays
from quantkit.xla.training.model import EMBEDDING, MeshDecoder
from quantkit.xla.training.partitions import DATA, MODEL, SLICES, DeviceMesh
from quantkit.xla.training.program import HEAD, TARGET_HEAD, Pace, TrainingPrograms
from quantkit.xla.training.state import abstract_trained, rates, select_trained_leaves

# The report lists exchanges of at least this many bytes per step.
_LEAST = 1 << 20
# How often a device sends the bytes of a collective: an all-reduce in a ring is a reduce-scatter
# followed by an all-gather. Once for all other kinds.
_TRAFFIC = {"all-reduce": 2.0}
# The forward pass, its recomputation, and the gradients by inputs and by weights.
_PASSES = 4
# Without the recomputation.
_USEFUL = 3


@dataclass(frozen=True)
class Exchange:
    """The data that chips exchange in a step by one kind of collective.

    Attributes:
        axis: the axis of the mesh along which chips exchange.
        count: the number of collectives in a step.
        bytes: on each chip, of all these collectives.
    """

    kind: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True)
class MeshEstimate:
    """A step on a mesh; bytes and seconds are per chip.

    Attributes:
        mesh: parts of the samples by parts of the model, in each slice.
        arguments: bytes of weights, samples and trained values.
        temporaries: bytes that the step uses while it runs.
        total: the sum of both, outputs other than trained values, and code.
        exchanges: the collectives.
        compute_seconds: the time of the products at the chip's peak.
        exchange_seconds: the time of the exchanges at the speed of all links.
        utilization: an upper bound: the share of the peak FLOPS, without recomputation, if a step
            takes as long as the longer of both times.
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
        """Format the mesh and its large exchanges as lines of the report."""
        lines = [
            f"{self.mesh}: {size_text(self.total)} ({size_text(self.arguments)} of arguments,"
            f" {size_text(self.temporaries)} of temporaries, the rest of code and outputs); at"
            f" least {1000 * self.compute_seconds:.3g} ms of products,"
            f" {1000 * self.exchange_seconds:.3g} ms of exchanges; at most"
            f" {self.utilization:.0%} of peak FLOPS"
        ]
        for exchange in self.exchanges:
            if exchange.bytes >= _LEAST:
                lines.append(
                    f"    {exchange.count} {exchange.kind} along {exchange.axis}:"
                    f" {size_text(exchange.bytes)}"
                )
        return lines


@dataclass(frozen=True)
class TrainingEstimate:
    """Training of a model's scales on a slice.

    Attributes:
        chips: the number of chips of all slices.
        memory: the memory of a chip that programs can use, in bytes.
        batch: samples of a step.
        length: tokens of a sample.
        flops: of a step on all chips, without recomputation.
        meshes: the meshes that the model fits.
        refused: the reasons against other meshes, by their shape.
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
        """Format the report."""
        lines = [
            f"{self.model} on {self.target}: {self.chips} chips of {gib(self.memory)},"
            f" {self.batch} samples of {self.length} tokens in a step, {self.flops / 1e12:.3g}"
            " TFLOP; by mesh, for each chip:"
        ]
        for mesh in self.meshes:
            lines.extend(mesh.lines())
        for shape, reason in self.refused.items():
            lines.append(f"{shape}: {reason}")
        return lines


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
        checkpoint: the quantized model; only its shapes are used.
        target: kind and number of chips, such as ``v5e-64``; ``2xv5e-64`` for two slices.
        names: the tensors that are trained.
        meshes: shapes for each slice; none compares one dimension with two.
        batch: samples of a step; None is one for each part of the samples, and at least `least`.
        least: the smallest default of `batch`.
        length: tokens of a sample.
        progress: called for each mesh.

    Raises:
        RequestError: for an unknown slice, or if the model fits no mesh, with the figures.
    """
    slice_ = Slice.parse(target)
    shapes = list(meshes) or _list_default_meshes(slice_.chips)
    if batch is None:
        # All meshes get the same batch, so that their times can be compared.
        batch = max(least, slice_.count * max(data for data, _ in shapes))
    devices = slice_.devices()
    estimates: list[MeshEstimate] = []
    refused: dict[str, str] = {}
    last_error: RequestError | None = None
    for number, (data, model) in enumerate(shapes):
        name = f"{data}x{model}"
        progress("compile", number, len(shapes), f"meshes, {name}")
        try:
            if data * model != slice_.chips:
                raise RequestError(
                    "the mesh does not use the whole slice",
                    found=name,
                    expected=f"{slice_.chips} chips",
                )
            mesh = DeviceMesh.of(devices, (data, model), slice_.count)
            estimates.append(_estimate(checkpoint, slice_, mesh, names, batch, length))
        except RequestError as error:
            refused[name] = str(error)
            last_error = error
    if last_error is not None and not estimates:
        raise last_error
    return TrainingEstimate(
        model=checkpoint.path.name,
        target=target,
        chips=slice_.chips * slice_.count,
        memory=slice_.chip.memory,
        batch=batch,
        length=length,
        flops=_flops(checkpoint.config, batch, length, _USEFUL),
        meshes=estimates,
        refused=refused,
    )


def lower_step(
    checkpoint: Checkpoint,
    mesh: DeviceMesh,
    names: TrainedNames,
    *,
    batch: int,
    length: int,
    dtype: Any,
) -> Any:
    """Lower the program of a step, without weights.

    Raises:
        RequestError: if the mesh does not divide the samples.
        UnsupportedError: for a model that XLA does not train.
    """
    config = checkpoint.config
    trained = select_trained_leaves(checkpoint, names)
    mesh.require_divides(batch)
    decoder = MeshDecoder(config, schemes(checkpoint), mesh, dtype)
    arrays = abstract_arrays(checkpoint, mesh)
    # The float model's head has the shape of the quantized model's.
    arrays[TARGET_HEAD] = arrays.get(HEAD, arrays[EMBEDDING])
    tokens = mesh.abstract((batch, length), np.int32, (mesh.samples, None))
    targets = mesh.abstract(
        (batch, length, config.hidden_size), np.float32, (mesh.samples, None, MODEL)
    )
    pace = Pace(*[jax.ShapeDtypeStruct((), np.float32)] * len(Pace._fields))
    programs = TrainingPrograms(decoder, rates(checkpoint, trained))
    return programs.step.lower(arrays, abstract_trained(trained, mesh), tokens, targets, pace)


def sum_exchanges_by_axis(program: str, mesh: DeviceMesh) -> list[Exchange]:
    """Sum the data that devices exchange in a compiled program by kind and axis, largest first."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for collective, times in count_exchanges(program).items():
        total = counts[collective.kind, find_collective_axes(collective, mesh)]
        total[0] += times
        total[1] += times * collective.bytes
    totals: list[Exchange] = []
    for (kind, axis), (count, size) in counts.items():
        totals.append(Exchange(kind, axis, count, size))
    return sorted(totals, key=lambda exchange: -exchange.bytes)


def _estimate(
    checkpoint: Checkpoint,
    slice_: Slice,
    mesh: DeviceMesh,
    names: TrainedNames,
    batch: int,
    length: int,
) -> MeshEstimate:
    lowered = lower_step(checkpoint, mesh, names, batch=batch, length=length, dtype=jnp.bfloat16)
    compiled = compile_for_target(slice_.name, lowered, "a step of training")
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    # The new trained values replace the old ones in the same memory.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = arguments + temporaries + outputs + memory.generated_code_size_in_bytes
    if total > slice_.chip.memory:
        raise make_memory_error(slice_.name, f"{gib(total)} a chip", gib(slice_.chip.memory))
    totals = sum_exchanges_by_axis(compiled.as_text(), mesh)
    sent_bytes = 0.0
    for exchange in totals:
        sent_bytes += _TRAFFIC.get(exchange.kind, 1.0) * exchange.bytes
    chips = slice_.chips * slice_.count
    compute_seconds = _flops(checkpoint.config, batch, length, _PASSES) / chips / slice_.chip.flops
    exchange_seconds = sent_bytes / slice_.chip.links
    useful_seconds = _flops(checkpoint.config, batch, length, _USEFUL) / chips / slice_.chip.flops
    return MeshEstimate(
        mesh=f"{mesh.size(DATA)}x{mesh.size(MODEL)}",
        arguments=arguments,
        temporaries=temporaries,
        total=total,
        exchanges=totals,
        compute_seconds=compute_seconds,
        exchange_seconds=exchange_seconds,
        # As if exchanges ran in parallel with products.
        utilization=useful_seconds / max(compute_seconds, exchange_seconds),
    )


def _flops(config: ModelConfig, batch: int, length: int, passes: int) -> float:
    """Count the operations of a step with a number of passes: products with weights, of queries
    with keys, and of attention weights with values.
    """
    # Two products of two operations per element, of which causal attention needs half.
    attention = 2 * batch * length**2 * config.num_heads * config.head_dim * config.num_layers
    return float(passes * (forward_flops(config, batch * length) + attention))


def _list_default_meshes(chips: int) -> list[tuple[int, int]]:
    """List the default meshes: one dimension, which divides only samples, and the squarest mesh of
    two dimensions.
    """
    model = 1
    while model * model < chips:
        model *= 2
    return [(chips, 1), (chips // model, model)]


def find_collective_axes(collective: Collective, mesh: DeviceMesh) -> str:
    """Find the axes of the mesh along which devices exchange."""
    axes = SLICES, DATA, MODEL
    shape = [mesh.size(axis) for axis in axes]
    # No list of devices stands for all of them.
    devices = np.array(collective.devices or range(int(np.prod(shape))))
    coordinates = np.unravel_index(devices, shape)
    varying: list[str] = []
    for axis, positions in zip(axes, coordinates, strict=True):
        if len(set(positions.tolist())) > 1:
            varying.append(axis)
    return " and ".join(varying) or "none"
