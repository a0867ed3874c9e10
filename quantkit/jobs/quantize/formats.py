"""The result of a quantization in one format, or in several from one solution: each has a folder in
the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.topology import Parameter
from quantkit.calibration.quantizers import TensorBlock
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.container import Encoder, Output, StoredCheckpoint
from quantkit.formats.folders_encoder import FoldersEncoder, merge_by_folder
from quantkit.formats.kv_cache import KvCache
from quantkit.formats.kv_scales import scale_names
from quantkit.formats.registry import Target
from quantkit.jobs.output.writer import Work
from quantkit.jobs.quantize.held_schemes import assign_schemes
from quantkit.jobs.quantize.scheme_map import SchemeMap
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

if TYPE_CHECKING:
    from quantkit.bit_allocation.allocation import Allocation


@dataclass(frozen=True)
class FormatPlan:
    """A source in one format.

    Attributes:
        output: what the encoder writes.
        blocks: the tensors of the output, in order.
        notes: for the user, on the schemes, and on the samples once they are drawn.
        allocation: the schemes chosen for a size; None before that, and if a scheme was given.
    """

    source: StoredCheckpoint
    target: Target
    scheme_map: SchemeMap
    output: Output
    blocks: list[TensorBlock]
    notes: list[str]
    allocation: Allocation | None = None

    @classmethod
    def of(
        cls,
        source: StoredCheckpoint,
        target: Target,
        scheme_map: SchemeMap,
        output: Output,
        notes: list[str],
    ) -> FormatPlan:
        """Plan the tensors of an output whose other facts are known.

        Raises `UnsupportedError` if the container does not hold the architecture.
        """
        blocks = tensor_blocks(source, scheme_map.schemes, target, output.kv_cache)
        return cls(
            source=source,
            target=target,
            scheme_map=scheme_map,
            output=_plan_tensors(output, blocks),
            blocks=blocks,
            notes=notes,
        )

    @property
    def dst(self) -> Path:
        return self.output.dst

    @property
    def inputs(self) -> dict[str, InputRounding]:
        """Look up how readers round the inputs of linears, by module; no entry where inputs stay
        floats.
        """
        method = self.target.method
        if not isinstance(method, CompressedTensors):
            return {}
        roundings = {}
        for module, scheme in self.scheme_map.linears.items():
            rounding = method.inputs(scheme)
            if rounding is not None:
                roundings[module] = rounding
        return roundings

    @property
    def activations(self) -> dict[str, str]:
        """List the types of the rounded inputs, by scheme of the linears."""
        schemes = self.scheme_map.schemes
        activations: dict[str, str] = {}
        for module, rounding in self.inputs.items():
            activations[str(schemes[module])] = str(rounding.activations)
        return activations

    @cached_property
    def encoder(self) -> Encoder:
        return self.target.container.encoder(self.output)

    @cached_property
    def side_files(self) -> Mapping[str, bytes | Path]:
        """Collect the files next to the weights."""
        return self.target.container.side_files(self.output)

    def count_bytes(self, schemes: Mapping[str, QuantScheme]) -> int:
        """Compute the bytes of all files of weights with other schemes, given by module."""
        blocks = tensor_blocks(self.source, schemes, self.target, self.output.kv_cache)
        output = _plan_tensors(self.output, blocks)
        return self.target.container.encoder(output).total_bytes()

    def with_allocation(self, allocation: Allocation) -> FormatPlan:
        """Apply the schemes that were chosen for a size. Notes on the placeholder of these schemes
        give way to notes on them. Raises `QuantkitError` as `quantize` does.
        """
        recipe = allocation.recipe(self.scheme_map.recipe.overrides)
        scheme_map, notes = assign_schemes(self.source, recipe, self.dst, self.target)
        # Codes and scales of other schemes have other names and types.
        plan = FormatPlan.of(self.source, self.target, scheme_map, self.output, notes)
        return replace(plan, allocation=allocation)

    def add_notes(self, notes: Sequence[str]) -> FormatPlan:
        return replace(self, notes=[*self.notes, *notes])

    def without(self, reasons: Mapping[str, str], notes: list[str]) -> FormatPlan:
        """Let modules keep their floats, each for a reason, with notes on them. Raises
        `QualityError` if nothing remains to quantize.
        """
        scheme_map = self.scheme_map.without(reasons)
        notes = [*self.notes, *notes]
        plan = FormatPlan.of(self.source, self.target, scheme_map, self.output, notes)
        return replace(plan, allocation=self.allocation)


def _plan_tensors(output: Output, blocks: Sequence[TensorBlock]) -> Output:
    """Describe an output with the tensors of blocks instead of its own."""
    specs: list[TensorSpec] = []
    for block in blocks:
        specs.extend(block.tensors)
    # What a container has cached depends on the tensors.
    return replace(output, planned=specs, cache={})


def tensor_blocks(
    source: Checkpoint,
    schemes: Mapping[str, QuantScheme],
    target: Target,
    kv_cache: KvCache | None = None,
) -> list[TensorBlock]:
    """List the tensors of the output in order, scales in the target's type or else the source's.

    Args:
        schemes: by module.
        kv_cache: whose scales, in the source's type, follow the tensors of each layer; None for
            none.
    """
    assert target.codes is not None
    scale_dtype = target.codes.scale_dtype or DType(source.config.dtype)

    def spec(parameter: Parameter) -> TensorSpec:
        name = parameter.name
        shape = parameter.shape
        if parameter.leaf == "weight" and parameter.module in schemes:
            return TensorSpec(name, shape, scale_dtype, schemes[parameter.module])
        return TensorSpec(name, shape, source.info(name).dtype)

    ordered = target.container.parameters(source.config, schemes, target.method)
    scales_of_layer: dict[int | None, list[str]] = {}
    if kv_cache is not None:
        scales_of_layer = _list_scales_by_layer(kv_cache, ordered)

    blocks: list[TensorBlock] = []
    # The container lists its parameters in the order of the file: a block is consecutive there.
    by_layer = itertools.groupby(ordered, key=lambda parameter: parameter.layer)
    for layer, layer_parameters in by_layer:
        specs = [spec(parameter) for parameter in layer_parameters]
        # Taken out, because the tensors of a layer need not follow each other.
        for name in scales_of_layer.pop(layer, []):
            specs.append(TensorSpec(name, (1,), DType(source.config.dtype)))
        blocks.append(TensorBlock(layer, tuple(specs)))
    return blocks


def _list_scales_by_layer(
    kv_cache: KvCache, ordered: Iterable[Parameter]
) -> dict[int | None, list[str]]:
    """List the names of the scales of a cache by the layer whose block has the attention."""
    layer_of_attention: dict[str, int | None] = dict.fromkeys(kv_cache.attention)
    for parameter in ordered:
        module, _, _ = parameter.name.rpartition(".")
        while module:
            if module in layer_of_attention:
                layer_of_attention[module] = parameter.layer
            module, _, _ = module.rpartition(".")
    scales_of_layer: dict[int | None, list[str]] = {}
    for attention, layer in layer_of_attention.items():
        scales_of_layer.setdefault(layer, []).extend(scale_names(attention))
    return scales_of_layer


@dataclass(frozen=True)
class Formats:
    """The formats in which a source is written.

    Attributes:
        dst: the folder, or file, to create.
        by_folder: the result in each format, by its folder in `dst`; a single one is `dst` itself,
            and its key is ``""``.
    """

    dst: Path
    by_folder: Mapping[str, FormatPlan]

    @property
    def first(self) -> FormatPlan:
        return next(iter(self.by_folder.values()))

    @property
    def source(self) -> StoredCheckpoint:
        return self.first.source

    def change_each(self, change: Callable[[FormatPlan], FormatPlan]) -> Formats:
        """Change the plan of each format."""
        by_folder = {}
        for folder, plan in self.by_folder.items():
            by_folder[folder] = change(plan)
        return replace(self, by_folder=by_folder)

    @cached_property
    def blocks(self) -> list[TensorBlock]:
        """List the tensors of the output, in order: of each decoder block those in one format
        after the other.

        Raises:
            UnsupportedError: if the formats do not have the tensors in the same order of decoder
                blocks.
        """
        result: list[TensorBlock] = []
        blocks_by_format = [plan.blocks for plan in self.by_folder.values()]
        # A block is solved once and written in all formats before the next one is solved.
        for row in zip_longest(*blocks_by_format):
            layers = {block.layer for block in row if block is not None}
            # None fills the row of a format that has fewer blocks.
            if None in row or len(layers) > 1:
                raise UnsupportedError(
                    f"{' and '.join(self.by_folder)} order the layers differently, and cannot be"
                    " written together",
                    path=self.source.path,
                    hint="write them with separate commands",
                )
            for name, block in zip(self.by_folder, row, strict=True):
                result.append(replace(block, folder=name))
        return result

    @cached_property
    def encoder(self) -> Encoder:
        """Build the encoder of the output. Raises an `UnsupportedError`, which names the format, if
        one cannot represent the model exactly.
        """
        encoders = {}
        for name, plan in self.by_folder.items():
            with prefix_errors(name):
                encoders[name] = plan.encoder
        if "" in encoders:
            return encoders[""]
        planned: list[tuple[str, TensorSpec]] = []
        for block in self.blocks:
            for spec in block.tensors:
                planned.append((block.folder, spec))
        return FoldersEncoder(planned, encoders)

    @cached_property
    def side_files(self) -> Mapping[str, bytes | Path]:
        """Collect the files next to the weights. Raises `UnsupportedError` as `encoder` does."""
        files = {}
        for name, plan in self.by_folder.items():
            with prefix_errors(name):
                files[name] = plan.side_files
        return merge_by_folder(files)

    def require_side_files(self) -> None:
        """Raise `UnsupportedError` if `side_files` would."""
        _ = self.side_files

    def work(self, works: Mapping[str, Work]) -> Work:
        """Combine the works of all formats, given by folder."""
        if "" in works:
            return works[""]
        first = next(iter(works.values()))
        options = {**first.options, "to": list(works)}
        return replace(first, encoder=self.encoder, side_files=self.side_files, options=options)


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Let an error about a format begin with the format's name; ``""`` is the only format."""
    try:
        yield
    except UnsupportedError as error:
        if not name or name in error.problem:
            raise
        raise type(error)(
            f"{name}: {error.problem}",
            path=error.path,
            found=error.found,
            expected=error.expected,
            hint=error.hint,
        ) from error
