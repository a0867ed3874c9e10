"""What `quantize` does before it writes: checks from headers alone, and the scheme of each
layer.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import Parameter, linear_columns
from quantkit.base.arguments import as_path, as_strings
from quantkit.base.option_fields import command_words, find_option_fields
from quantkit.base.progress import Progress
from quantkit.bit_allocation.allocation import Allocation, units
from quantkit.bit_allocation.fit import Fit
from quantkit.calibration.data import Calibration
from quantkit.calibration.effort import every_group
from quantkit.calibration.quantizers import TensorBlock
from quantkit.calibration.settings import GptqSettings
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.authorship import read_authorship
from quantkit.formats.checkpoint import Checkpoint, read_as_floats, require_calibratable, schemes
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.container import Encoder, Output, StoredCheckpoint, describe_format
from quantkit.formats.dequantized_checkpoint import DequantizedCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import select_templates
from quantkit.formats.kv_scales import build_fp8_cache, scale_names
from quantkit.formats.output.staging import (
    read_interrupted_fingerprint,
    require_name,
    require_new_names,
)
from quantkit.formats.registry import Target, TargetName
from quantkit.jobs.convert.adapters import describe_adapters, with_adapters
from quantkit.jobs.output.labels import model_name
from quantkit.jobs.output.source_folder import (
    check_side_files,
    note_left_behind,
    require_causal_model,
)
from quantkit.jobs.output.target import (
    NATIVE,
    note_dropped_cache,
    require_holds_kv_cache,
    require_kv_cache_run,
    shard_bytes,
)
from quantkit.jobs.output.writer import option_key
from quantkit.jobs.quantize.certificate import CertifiedText, prepare_certified_text
from quantkit.jobs.quantize.held_schemes import assign_schemes
from quantkit.jobs.quantize.options import Method, QuantizeOptions
from quantkit.jobs.quantize.scheme_map import (
    SchemeMap,
    apply_gguf_mix,
    build_recipe,
    of_embedding,
    with_head_on_disk,
)
from quantkit.jobs.quantize.settings import gptq_settings
from quantkit.jobs.quantize.weights_only import kept_parts, kept_recurrent
from quantkit.model.column_kernels import column_kernels
from quantkit.solver.columns import ColumnKernels, with_positive_scales
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.dtypes import DType
from quantkit.tensors.mix import mix_named
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.text.tokenizer import Tokenizer
from quantkit.via_transformers.forward import open_to_run, passage_of
from quantkit.via_transformers.linears import with_linears
from quantkit.via_transformers.own_code import find_code_file
from quantkit.via_transformers.stacks import unstack

if TYPE_CHECKING:
    import torch

    from quantkit.via_transformers.passage import Survey

BIT_ALLOCATION = "bit_allocation"
"""The key of the schemes chosen for a size in the manifest, and in the journal of an interrupted
run.
"""
_INT4_BITS = 4


@dataclass(frozen=True)
class Prepared:
    """A source of floats, and what is to be written of it.

    Attributes:
        linears_by: how the linear layers of a model known by its tensors only were found; None for
            others.
        unread: why transformers does not load the result as it is; None before that is known, and
            if it does.
        survey: how samples reach the linears of a model that transformers runs; None before that,
            and for others.
        settings: of GPTQ; None for rounding.
        certified: the text on which the loss by position is measured; None if this was not
            requested.
        notes: for the user.
        allocation: the schemes chosen for a size; None before that, and if a scheme was given.
        adapters: what the manifest records of adapters that are merged; empty if there are none.
    """

    options: QuantizeOptions
    source: StoredCheckpoint
    scheme_map: SchemeMap
    tokenizer: Tokenizer | None
    linears_by: str | None
    settings: GptqSettings | None
    certified: CertifiedText | None
    notes: list[str]
    allocation: Allocation | None = None
    survey: Survey | None = None
    unread: str | None = None
    adapters: Mapping[str, object] = field(default_factory=dict)

    @property
    def dst(self) -> Path:
        return Path(self.options.dst)

    @property
    def target(self) -> Target:
        return self.options.target

    @property
    def method(self) -> Method:
        if self.settings is None:
            return "rtn"
        return "gptq"

    @property
    def is_weighted(self) -> bool:
        """Return whether errors are weighted by the importance of inputs: of fewer bits than 8, if
        the model can be run.
        """
        schemes = (
            scheme for module, scheme in self.scheme_map.schemes.items() if module != EMBEDDING
        )
        return (
            self.settings is None
            and self.source.config.measurable
            and any(scheme.bits < 8 for scheme in schemes)
        )

    @property
    def inputs(self) -> dict[str, InputRounding]:
        """Return how readers round the inputs of linears, by module; none where they stay
        floats.
        """
        method = self.target.method
        if not isinstance(method, CompressedTensors):
            return {}
        found = {}
        for module, scheme in self.scheme_map.linears.items():
            found[module] = method.inputs(scheme)
        return {module: one for module, one in found.items() if one is not None}

    @property
    def measurement_inputs(self) -> dict[str, InputRounding]:
        """Return the inputs that are rounded where the result is measured; none by transformers,
        which runs the weights.
        """
        if self.source.config.runnable:
            return self.inputs
        return {}

    @property
    def kernels_of(self) -> Callable[[torch.device], ColumnKernels]:
        """Return the solver's kernels of a device. Scales stay positive where readers round the
        inputs of int4: vLLM's kernels for that were seen to take no others
        (vllm-project/vllm#48905).
        """
        schemes = [self.scheme_map.schemes[module] for module in self.inputs]
        if not any(scheme.bits == _INT4_BITS and not scheme.of_small_floats for scheme in schemes):
            return column_kernels
        return lambda device: with_positive_scales(column_kernels(device))

    @property
    def activations(self) -> dict[str, str]:
        """Return the types of these inputs, by scheme of the linears."""
        schemes = self.scheme_map.schemes
        activations: dict[str, str] = {}
        for module, input_ in self.inputs.items():
            activations[str(schemes[module])] = str(input_.activations)
        return activations

    @cached_property
    def blocks(self) -> list[TensorBlock]:
        """Return the tensors of the output, in order."""
        has_cache = self.options.kv_cache is not None
        return tensor_blocks(self.source, self.scheme_map.schemes, self.target, kv_cache=has_cache)

    @cached_property
    def output(self) -> Output:
        """Return what is to be written. Raises `RequestError` or `CheckpointError`: see
        `shard_bytes` and `select_templates`.
        """
        options = self.options
        target = self.target
        return Output(
            self.source,
            self.source.config,
            [spec for block in self.blocks for spec in block.tensors],
            shard_bytes(options.split_max_size, target.container),
            self.tokenizer,
            method=target.method,
            templates=select_templates(self.source, self.tokenizer, options.template),
            name=model_name(self.source, options.base_model),
            authorship=self.authorship,
            dst=self.dst,
            kv_cache=None
            if options.kv_cache is None
            else build_fp8_cache(self.source.config, self.dst),
            mix=mix_named(options.scheme),
        )

    @cached_property
    def authorship(self) -> dict[str, Any]:
        """Who made the model and under which licence: what the source states, and options where
        they say otherwise.
        """
        stated = read_authorship(self.source.path)
        license = self.options.license
        base = self.options.base_model
        if license is not None and license != stated.get("license"):
            stated = {"license": license} | {
                key: stated[key] for key in stated if not key.startswith("license")
            }
        if base is not None and base != stated.get("base_model"):
            stated = {**stated, "base_model": base, "base_model_relation": "quantized"}
        return stated

    @cached_property
    def encoder(self) -> Encoder:
        return self.target.container.encoder(self.output)

    @cached_property
    def side_files(self) -> Mapping[str, bytes | Path]:
        """Return the files next to the weights."""
        return self.target.container.side_files(self.output)

    def in_format(self, target: Target) -> Prepared:
        """Return the same in one of several formats, in the format's folder in `dst`. Raises
        `UnsupportedError` if it does not support a scheme.
        """
        options = replace(
            self.options, to=cast(TargetName, target.name), dst=self.dst / target.name
        )
        recipe = self.scheme_map.recipe
        _, notes_before = assign_schemes(self.source, recipe, self.dst, self.target)
        scheme_map, more = assign_schemes(self.source, recipe, Path(options.dst), target)
        if options.kv_cache is not None:
            require_holds_kv_cache(target, Path(options.dst))
        notes = [*(note for note in self.notes if note not in notes_before), *more]
        return replace(self, options=options, scheme_map=scheme_map, notes=notes)

    def parse_allocation(self, record: Any) -> Allocation | None:
        """Return a choice from a journal or a manifest; None if it is for another size, or has
        another form.
        """
        try:
            allocation = Allocation.from_json(record)
        except (AttributeError, LookupError, TypeError):
            return None
        if allocation.target == self.options.size:
            return allocation
        return None

    def with_allocation(self, allocation: Allocation) -> Prepared:
        """With schemes that were chosen for a size. Raises `QuantkitError` as `quantize` does."""
        source = self.source
        before = self.scheme_map.recipe
        _, notes_before = assign_schemes(source, before, self.dst, self.target)
        scheme_map, more = assign_schemes(
            source, allocation.recipe(before.overrides), self.dst, self.target
        )
        notes = [*(note for note in self.notes if note not in notes_before), *more]
        return replace(self, scheme_map=scheme_map, notes=notes, allocation=allocation)


def prepare(options: QuantizeOptions) -> Prepared:
    """Open a source of floats, assign the schemes and settle the method.

    Raises:
        QuantkitError: as `quantize` does.
    """
    dst = as_path("dst", options.dst)
    target = options.target
    require_name(dst)
    if options.kv_cache is not None:
        require_holds_kv_cache(target, dst)
    recipe = build_recipe(options)
    require_causal_model(as_path("src", options.src))
    source = _open_source(options)
    require_new_names(source.path, dst)
    if options.method == "gptq" and options.size is None:
        require_calibratable(source)
    tokenizer, notes = check_side_files(source, template=options.template)
    notes += note_left_behind(source, target.container, dst, has_card=target.method is not None)
    source = with_adapters(
        source, options.lora, dequantize=options.dequantize, allow_nonfinite=options.allow_nonfinite
    )
    adapters = describe_adapters(source)
    source, more = _as_floats(source, options)
    notes += more
    if options.tensors_only and target.name != NATIVE:
        raise RequestError(
            f'`tensors_only=True` does not go with `to="{target.name}"`',
            expected=f'`to="{NATIVE}"`',
        )
    if options.kv_cache is not None:
        require_kv_cache_run(source)
    linears_by = None
    if not source.config.runnable:
        source.config, linears_by, more = with_linears(
            source.config, source.extra_config, source.path
        )
        notes += more
    if (
        source.config.run_by is not None
        and (named := of_embedding(recipe)) is not None
        and named.scheme is not None
    ):
        from quantkit.via_transformers.embedding import with_embedding

        source.config = with_embedding(source.config, passage_of(source).lazy, source.path)
    recipe = apply_gguf_mix(options, with_head_on_disk(recipe, source.config), source.config)
    scheme_map, more = assign_schemes(source, recipe, dst, target, strict=options.strict)
    if source.config.run_by is not None:
        notes.append(f"{source.path}: run by {source.config.run_by}")
    if options.trust_remote_code and source.config.code is None:
        if source.config.run_by is not None:
            why = "config.json names no code"
        else:
            why = "quantkit runs the model itself"
        notes.append(f"{source.path}: `trust_remote_code=True` has no effect: {why}")
    if not source.config.runnable:
        if recurrent := kept_recurrent(source.config, scheme_map.schemes):
            notes.append(
                f"{source.path}: {recurrent}; a recipe that names them alone may give them int8"
            )
        if left := kept_parts(source.config, source.extra_config, scheme_map.schemes):
            notes.append(f"{source.path}: kept as they are: {'; '.join(left)}")
    notes += [*more, *note_dropped_cache(source, dst, again=options.kv_cache is not None)]
    # Its weights are measured, and calibrated, with floats in the cache.
    source.kv_cache = None
    settings = gptq_settings(options, scheme_map.schemes.values(), source, tokenizer)
    certified = prepare_certified_text(
        options.certify_positions, options.certify_text, source, tokenizer
    )
    if certified is None:
        notes += []
    else:
        notes += certified.notes
    prepared = Prepared(
        options,
        source,
        scheme_map,
        tokenizer,
        linears_by,
        settings,
        certified,
        notes,
        adapters=adapters,
    )
    if options.imatrix is not None and not prepared.is_weighted:
        raise RequestError(
            "`imatrix` would not be used: it weights errors of fewer than 8 bits, in models that"
            " can be run",
            path=source.path,
        )
    return prepared


def _open_source(options: QuantizeOptions) -> StoredCheckpoint:
    """Return the source, run by our decoder, or else by transformers.

    Raises `QuantkitError` as `quantize` does.
    """
    path = as_path("src", options.src)
    weights = options.weights
    if options.tensors_only:
        source = open_checkpoint(path, weights, tensors_only=True)
        unstack(source)
        return source
    source = open_to_run(path, weights, options.via, trust_remote_code=options.trust_remote_code)
    if (
        options.trust_remote_code
        and source.config.runnable
        and (file := find_code_file(source.path)) is not None
    ):
        raise RequestError(
            "the folder's code is not run for a model that quantkit runs itself",
            path=source.path,
            found=file,
            hint='`via="transformers"` runs it; or leave `trust_remote_code` out',
        )
    if source.config.run_by is not None:
        # Raises for options that do not go with it.
        _ = replace(options, via="transformers")
    return source


def _as_floats(
    source: StoredCheckpoint, options: QuantizeOptions
) -> tuple[StoredCheckpoint, list[str]]:
    """Return a source whose weights are floats, and a note if it is quantized. Raises an
    `UnsupportedError` if it is quantized, and not to be dequantized.
    """
    if not (schemes(source) or read_as_floats(source)):
        return source, []
    found = describe_format(source)
    if not options.dequantize:
        names = [
            name
            for name, info in find_option_fields(QuantizeOptions).items()
            if info.changes_result
        ]
        given = {name: getattr(options, name) for name in names} | {
            "keep": as_strings("keep", options.keep)
        }
        if isinstance(options.scheme, Recipe):
            given |= {"scheme": None, "recipe": "FILE"}
        if not isinstance(options.calibration, str | Path | None):
            given["calibration"] = "FILE"
        if not isinstance(options.to, str | None):
            given["to"] = ",".join(options.to)
        words = ["quantkit", "quantize", str(options.src), str(options.dst), *command_words(given)]
        raise UnsupportedError(
            "the source is quantized already",
            path=source.path,
            found=found,
            hint=(
                f"start from the float model, or read this one as floats: {shlex.join(words)}"
                " `dequantize=True`"
            ),
        )
    read = f"its weights are read as {source.config.dtype}, and rounded again"
    return DequantizedCheckpoint(source), [
        f"{source.path}: the source is quantized already ({found}); {read}"
    ]


def tensor_blocks(
    source: Checkpoint,
    schemes: Mapping[str, QuantScheme],
    target: Target,
    *,
    kv_cache: bool = False,
) -> list[TensorBlock]:
    """Return the tensors of the output in order, scales in the target's type or else the source's.

    Args:
        schemes: by module.
        kv_cache: whether each layer ends with the scales of its part of a KV cache, in the source's
            type.
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

    def scales(layer: int | None) -> list[TensorSpec]:
        names = scale_names(layer) if kv_cache and layer is not None else ()
        return [TensorSpec(name, (1,), DType(source.config.dtype)) for name in names]

    by_layer = itertools.groupby(ordered, key=lambda parameter: parameter.layer)
    result: list[TensorBlock] = []
    for layer, block in by_layer:
        result.append(TensorBlock(layer, (*map(spec, block), *scales(layer))))
    return result


def size_fit(prepared: Prepared) -> Fit | None:
    """Return what chooses the schemes; None if they were given.

    Raises:
        RequestError: if no choice has the size.
        UnsupportedError: if the format does not hold several schemes.
    """
    size = prepared.options.size
    target = prepared.target
    if size is None:
        return None

    def total_bytes(schemes: Mapping[str, QuantScheme]) -> int:
        """Of all files of weights, given the scheme of each module that gets one."""
        return replace(
            prepared, scheme_map=replace(prepared.scheme_map, schemes=dict(schemes))
        ).encoder.total_bytes()

    assert target.codes is not None
    return Fit(
        prepared.source, size, target.codes, target.method, _not_chosen(prepared), total_bytes
    )


def choose_schemes(
    prepared: Prepared, fit: Fit, drawn: Calibration, *, group: ProcessGroup, progress: Progress
) -> Prepared:
    """Return the source with the schemes chosen on samples; a resumed run keeps the choice of the
    interrupted one. Raises `QuantkitError` as `quantize` does.
    """
    settings = prepared.settings
    # A size goes with GPTQ only.
    assert settings is not None
    allocation = group.broadcast_from_rank0(
        _of_interrupted(prepared, drawn) if prepared.options.resume else None
    )
    if allocation is None:
        allocation = fit.choose_allocation(
            drawn.tokens,
            device=settings.device,
            memory_bytes=settings.memory_bytes,
            group=group,
            progress=progress,
        )
    return prepared.with_allocation(allocation)


def _of_interrupted(prepared: Prepared, drawn: Calibration) -> Allocation | None:
    """Return the choice of an interrupted run for the same size and samples; the writer compares
    all other options.
    """
    fingerprint = read_interrupted_fingerprint(prepared.dst)
    if fingerprint.get(option_key("calibration")) != drawn.to_json():
        return None
    return prepared.parse_allocation(fingerprint.get(option_key(BIT_ALLOCATION)))


def _not_chosen(prepared: Prepared) -> dict[str, QuantScheme | None]:
    """Return the modules whose schemes are not chosen: named ones, and linears of blocks that keep
    their floats.
    """
    source = prepared.source
    schemes = prepared.scheme_map.schemes
    free = set()
    for unit in units(source.config):
        for module in unit.modules:
            free.add(module)
    kept = []
    for module in linear_columns(source.config):
        if module in free and module not in schemes:
            kept.append(module)
    named = {module: scheme for module, scheme in schemes.items() if module not in free}
    return {**named, **dict.fromkeys(kept)}


def too_few_tokens(shape: Sequence[int], config: ModelConfig) -> list[str]:
    """Return a note where samples of a shape [N, T] cannot give a Hessian full rank."""
    tokens = math.prod(shape)
    width = max(group.columns for group, _ in every_group(config))
    if tokens >= width:
        return []
    return [
        f"{tokens} calibration tokens are fewer than the widest linear's {width} inputs; give more"
        " `samples`"
    ]
