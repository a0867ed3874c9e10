"""Prepare a quantization before anything is written: check headers, and assign a scheme to each
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
from quantkit.architectures.topology import Parameter, linear_columns
from quantkit.base.arguments import as_path, as_strings
from quantkit.base.messages import Message, Option
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
from quantkit.formats.registry import Target
from quantkit.formats.target_names import TargetName
from quantkit.jobs.convert.adapters import describe_adapters, merge_adapters
from quantkit.jobs.output.labels import model_name
from quantkit.jobs.output.source_folder import (
    check_side_files,
    note_left_behind,
    require_causal_model,
)
from quantkit.jobs.output.target import (
    NATIVE,
    choose_shard_bytes,
    note_dropped_cache,
    require_holds_kv_cache,
    require_kv_cache_run,
)
from quantkit.jobs.output.writer import option_key
from quantkit.jobs.quantize.certificate import CertifiedText, prepare_certified_text
from quantkit.jobs.quantize.held_schemes import assign_schemes
from quantkit.jobs.quantize.options import Method, QuantizeOptions
from quantkit.jobs.quantize.scheme_map import (
    SchemeMap,
    apply_gguf_mix,
    build_recipe,
    find_embedding_override,
    with_head_on_disk,
)
from quantkit.jobs.quantize.settings import gptq_settings
from quantkit.jobs.quantize.weights_only import describe_kept_parts, describe_kept_recurrent
from quantkit.model.column_kernels import select_column_kernels
from quantkit.solver.columns import ColumnKernels, with_positive_scales
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.dtypes import DType
from quantkit.tensors.mix import find_mix
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
    """A source of floats, and how it is quantized and written.

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
        """Decide whether errors of rounding are weighted by the importance of inputs: for fewer
        bits than 8, if the model can be run.
        """
        # GPTQ measures the inputs itself.
        if self.settings is not None or not self.source.config.measurable:
            return False
        # The rows of the embedding are looked up: it has no inputs to weight.
        return any(scheme.bits < 8 for scheme in self.scheme_map.linears.values())

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
    def measurement_inputs(self) -> dict[str, InputRounding]:
        """Select the inputs to round when the result is measured; none for a model that
        transformers runs, whose weights alone are measured.
        """
        if self.source.config.runnable:
            return self.inputs
        return {}

    @property
    def kernels_of(self) -> Callable[[torch.device], ColumnKernels]:
        """Choose the solver's kernels for a device. Scales stay positive where readers round the
        inputs of int4: vLLM's kernels for that were seen to take no others
        (vllm-project/vllm#48905).
        """
        for module in self.inputs:
            scheme = self.scheme_map.schemes[module]
            if scheme.bits == _INT4_BITS and not scheme.of_small_floats:
                return lambda device: with_positive_scales(select_column_kernels(device))
        return select_column_kernels

    @property
    def activations(self) -> dict[str, str]:
        """List the types of the rounded inputs, by scheme of the linears."""
        schemes = self.scheme_map.schemes
        activations: dict[str, str] = {}
        for module, rounding in self.inputs.items():
            activations[str(schemes[module])] = str(rounding.activations)
        return activations

    @cached_property
    def blocks(self) -> list[TensorBlock]:
        """List the tensors of the output, in order."""
        has_cache = self.options.kv_cache is not None
        return tensor_blocks(self.source, self.scheme_map.schemes, self.target, kv_cache=has_cache)

    @cached_property
    def output(self) -> Output:
        """Describe the output for its encoder. Raises `RequestError` or `CheckpointError`: see
        `shard_bytes` and `select_templates`.
        """
        options = self.options
        target = self.target
        specs: list[TensorSpec] = []
        for block in self.blocks:
            specs.extend(block.tensors)
        if options.kv_cache is None:
            kv_cache = None
        else:
            kv_cache = build_fp8_cache(self.source.config, self.dst)
        return Output(
            source=self.source,
            config=self.source.config,
            planned=specs,
            shard_bytes=choose_shard_bytes(options.split_max_size, target.container),
            tokenizer=self.tokenizer,
            method=target.method,
            templates=select_templates(self.source, self.tokenizer, options.template),
            name=model_name(self.source, options.base_model),
            authorship=self.authorship,
            dst=self.dst,
            kv_cache=kv_cache,
            mix=find_mix(options.scheme),
        )

    @cached_property
    def authorship(self) -> dict[str, Any]:
        """Collect who made the model and under which licence, from the source's files; options
        override them.
        """
        authorship = read_authorship(self.source.path)
        license = self.options.license
        base = self.options.base_model
        if license is not None and license != authorship.get("license"):
            relicensed: dict[str, Any] = {"license": license}
            # A name or a link of the source's licence would contradict the new one.
            for key, value in authorship.items():
                if not key.startswith("license"):
                    relicensed[key] = value
            authorship = relicensed
        if base is not None and base != authorship.get("base_model"):
            authorship = {**authorship, "base_model": base, "base_model_relation": "quantized"}
        return authorship

    @cached_property
    def encoder(self) -> Encoder:
        return self.target.container.encoder(self.output)

    @cached_property
    def side_files(self) -> Mapping[str, bytes | Path]:
        """Collect the files next to the weights."""
        return self.target.container.side_files(self.output)

    def in_format(self, target: Target) -> Prepared:
        """Prepare one of several formats, in the format's folder in `dst`. Raises
        `UnsupportedError` if it does not support a scheme.
        """
        options = replace(
            self.options, to=cast(TargetName, target.name), dst=self.dst / target.name
        )
        recipe = self.scheme_map.recipe
        # The notes on the schemes of the first format give way to those of this format.
        _, notes_before = assign_schemes(self.source, recipe, self.dst, self.target)
        scheme_map, scheme_notes = assign_schemes(self.source, recipe, Path(options.dst), target)
        if options.kv_cache is not None:
            require_holds_kv_cache(target, Path(options.dst))
        notes = [note for note in self.notes if note not in notes_before]
        notes += scheme_notes
        return replace(self, options=options, scheme_map=scheme_map, notes=notes)

    def parse_allocation(self, record: Any) -> Allocation | None:
        """Parse a choice of schemes in a journal or a manifest; None if it is for another size, or
        has another form.
        """
        try:
            allocation = Allocation.from_json(record)
        except (AttributeError, LookupError, TypeError):
            return None
        if allocation.target == self.options.size:
            return allocation
        return None

    def with_allocation(self, allocation: Allocation) -> Prepared:
        """Apply the schemes that were chosen for a size. Raises `QuantkitError` as `quantize`
        does.
        """
        source = self.source
        recipe_before = self.scheme_map.recipe
        # Notes on the placeholder of the chosen schemes give way to notes on these.
        _, notes_before = assign_schemes(source, recipe_before, self.dst, self.target)
        recipe = allocation.recipe(recipe_before.overrides)
        scheme_map, scheme_notes = assign_schemes(source, recipe, self.dst, self.target)
        notes = [note for note in self.notes if note not in notes_before]
        notes += scheme_notes
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
    # Checks that need less come first: options, then config.json, then headers of weights.
    recipe = build_recipe(options)
    require_causal_model(as_path("src", options.src))
    source = _open_source(options)
    require_new_names(source.path, dst)
    if options.method == "gptq" and options.size is None:
        require_calibratable(source)
    tokenizer, notes = check_side_files(source, template=options.template)
    notes += note_left_behind(source, target.container, dst, has_card=target.method is not None)
    source = merge_adapters(
        source, options.lora, dequantize=options.dequantize, allow_nonfinite=options.allow_nonfinite
    )
    adapters = describe_adapters(source)
    source, float_notes = _as_floats(source, options)
    notes += float_notes
    if options.tensors_only and target.name != NATIVE:
        raise RequestError(
            Message(
                Option("tensors_only", value=True),
                " cannot be combined with ",
                Option("to", value=target.name),
            ),
            expected=Message(Option("to", value=NATIVE)),
        )
    if options.kv_cache is not None:
        require_kv_cache_run(source)
    linears_by = None
    if not source.config.runnable:
        source.config, linears_by, linear_notes = with_linears(
            source.config, source.extra_config, source.path
        )
        notes += linear_notes
    embedding_override = find_embedding_override(recipe)
    # Only a model that is built tells which tensor is its embedding.
    if (
        source.config.run_by is not None
        and embedding_override is not None
        and embedding_override.scheme is not None
    ):
        from quantkit.via_transformers.embedding import with_embedding

        source.config = with_embedding(source.config, passage_of(source).lazy, source.path)
    recipe = apply_gguf_mix(options, with_head_on_disk(recipe, source.config), source.config)
    scheme_map, scheme_notes = assign_schemes(source, recipe, dst, target, strict=options.strict)
    if source.config.run_by is not None:
        notes.append(f"{source.path}: run by {source.config.run_by}")
    if options.trust_remote_code and source.config.code is None:
        if source.config.run_by is not None:
            why = "config.json names no code"
        else:
            why = "quantkit runs the model itself"
        notes.append(
            Message(
                f"{source.path}: ",
                Option("trust_remote_code", value=True),
                f" has no effect: {why}",
            )
        )
    if not source.config.runnable:
        recurrent = describe_kept_recurrent(source.config, scheme_map.schemes)
        if recurrent:
            notes.append(
                f"{source.path}: {recurrent}; a recipe that names them explicitly can"
                " quantize them to int8"
            )
        parts = describe_kept_parts(source.config, source.extra_config, scheme_map.schemes)
        if parts:
            notes.append(f"{source.path}: not quantized: {'; '.join(parts)}")
    notes += scheme_notes
    notes += note_dropped_cache(source, dst, again=options.kv_cache is not None)
    # The weights are measured, and calibrated, with floats in the cache.
    source.kv_cache = None
    settings = gptq_settings(options, scheme_map.schemes.values(), source, tokenizer)
    certified = prepare_certified_text(
        options.certify_positions, options.certify_text, source, tokenizer
    )
    if certified is not None:
        notes += certified.notes
    prepared = Prepared(
        options=options,
        source=source,
        scheme_map=scheme_map,
        tokenizer=tokenizer,
        linears_by=linears_by,
        settings=settings,
        certified=certified,
        notes=notes,
        adapters=adapters,
    )
    if options.imatrix is not None and not prepared.is_weighted:
        raise RequestError(
            Message(
                Option("imatrix"),
                " has no effect: it only applies to schemes of fewer than 8 bits, in models"
                " that can be run",
            ),
            path=source.path,
        )
    return prepared


def _open_source(options: QuantizeOptions) -> StoredCheckpoint:
    """Open the source, to be run by quantkit's decoder or else by transformers.

    Raises `QuantkitError` as `quantize` does.
    """
    path = as_path("src", options.src)
    weights = options.weights
    if options.tensors_only:
        source = open_checkpoint(path, weights, tensors_only=True)
        unstack(source)
        return source
    source = open_to_run(path, weights, options.via, trust_remote_code=options.trust_remote_code)
    # A user who trusts the code expects that it runs: another result would mislead.
    if options.trust_remote_code and source.config.runnable:
        file = find_code_file(source.path)
        if file is not None:
            raise RequestError(
                "the folder's code is not used, because quantkit runs this model itself",
                path=source.path,
                found=file,
                hint=Message(
                    Option("via", value="transformers"),
                    " runs it; or omit ",
                    Option("trust_remote_code"),
                ),
            )
    if source.config.run_by is not None:
        # The checks of the options raise an error for those that transformers does not serve.
        _ = replace(options, via="transformers")
    return source


def _as_floats(
    source: StoredCheckpoint, options: QuantizeOptions
) -> tuple[StoredCheckpoint, list[str]]:
    """Wrap a quantized source so that its weights are floats, with a note. Raises an
    `UnsupportedError` if it is quantized, and not to be dequantized.
    """
    if not (schemes(source) or read_as_floats(source)):
        return source, []
    source_format = describe_format(source)
    if not options.dequantize:
        # The hint repeats the user's command, with the option that makes it work.
        values: dict[str, Any] = {}
        for name, info in find_option_fields(QuantizeOptions).items():
            if info.changes_result:
                values[name] = getattr(options, name)
        values["keep"] = as_strings("keep", options.keep)
        # A command line has no spelling for Python objects.
        if isinstance(options.scheme, Recipe):
            values |= {"scheme": None, "recipe": "FILE"}
        if not isinstance(options.calibration, str | Path | None):
            values["calibration"] = "FILE"
        if not isinstance(options.to, str | None):
            values["to"] = ",".join(options.to)
        words = ["quantkit", "quantize", str(options.src), str(options.dst), *command_words(values)]
        raise UnsupportedError(
            "the source is already quantized",
            path=source.path,
            found=source_format,
            hint=(
                Message(
                    f"start from the float model, or dequantize this one: {shlex.join(words)} ",
                    Option("dequantize", value=True),
                )
            ),
        )
    note = (
        f"{source.path}: the source is already quantized ({source_format}); its weights are read as"
        f" {source.config.dtype}, and rounded again"
    )
    return DequantizedCheckpoint(source), [note]


def tensor_blocks(
    source: Checkpoint,
    schemes: Mapping[str, QuantScheme],
    target: Target,
    *,
    kv_cache: bool = False,
) -> list[TensorBlock]:
    """List the tensors of the output in order, scales in the target's type or else the source's.

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

    blocks: list[TensorBlock] = []
    # The container lists its parameters in the order of the file: a block is consecutive there.
    by_layer = itertools.groupby(ordered, key=lambda parameter: parameter.layer)
    for layer, layer_parameters in by_layer:
        specs = [spec(parameter) for parameter in layer_parameters]
        if kv_cache and layer is not None:
            for name in scale_names(layer):
                specs.append(TensorSpec(name, (1,), DType(source.config.dtype)))
        blocks.append(TensorBlock(layer, tuple(specs)))
    return blocks


def set_up_size_fit(prepared: Prepared) -> Fit | None:
    """Set up the choice of schemes for a size; None if the schemes were given.

    Raises:
        RequestError: if no choice has the size.
        UnsupportedError: if the format does not hold several schemes.
    """
    size = prepared.options.size
    target = prepared.target
    if size is None:
        return None

    def total_bytes(schemes: Mapping[str, QuantScheme]) -> int:
        """Compute the bytes of all files of weights, given the scheme of each module that gets
        one.
        """
        scheme_map = replace(prepared.scheme_map, schemes=dict(schemes))
        # A copy: the encoder is cached in each `Prepared`.
        return replace(prepared, scheme_map=scheme_map).encoder.total_bytes()

    assert target.codes is not None
    return Fit(
        source=prepared.source,
        target=size,
        codes=target.codes,
        method=target.method,
        settled=_not_chosen(prepared),
        total_bytes=total_bytes,
    )


def choose_schemes(
    prepared: Prepared, fit: Fit, drawn: Calibration, *, group: ProcessGroup, progress: Progress
) -> Prepared:
    """Choose the schemes on samples; a resumed run keeps the choice of the interrupted one. Raises
    `QuantkitError` as `quantize` does.
    """
    settings = prepared.settings
    # A size goes with GPTQ only.
    assert settings is not None
    earlier_choice: Allocation | None = None
    if prepared.options.resume:
        earlier_choice = _read_interrupted_choice(prepared, drawn)
    # Only rank 0 writes, so that only its machine is sure to have the interrupted output.
    allocation = group.broadcast_from_rank0(earlier_choice)
    if allocation is None:
        allocation = fit.choose_allocation(
            drawn.tokens,
            device=settings.device,
            memory_bytes=settings.memory_bytes,
            group=group,
            progress=progress,
        )
    return prepared.with_allocation(allocation)


def _read_interrupted_choice(prepared: Prepared, drawn: Calibration) -> Allocation | None:
    """Read the choice of an interrupted run for the same size and samples; the writer compares all
    other options.
    """
    fingerprint = read_interrupted_fingerprint(prepared.dst)
    if fingerprint.get(option_key("calibration")) != drawn.to_json():
        return None
    return prepared.parse_allocation(fingerprint.get(option_key(BIT_ALLOCATION)))


def _not_chosen(prepared: Prepared) -> dict[str, QuantScheme | None]:
    """List the modules whose schemes are not chosen: named ones, and linears of blocks that keep
    their floats.
    """
    source = prepared.source
    schemes = prepared.scheme_map.schemes
    free: set[str] = set()
    for unit in units(source.config):
        free.update(unit.modules)
    not_chosen: dict[str, QuantScheme | None] = {}
    for module, scheme in schemes.items():
        if module not in free:
            not_chosen[module] = scheme
    # Before the choice, linears without a scheme are those that the recipe keeps.
    for module in linear_columns(source.config):
        if module in free and module not in schemes:
            not_chosen[module] = None
    return not_chosen


def note_too_few_tokens(shape: Sequence[int], config: ModelConfig) -> list[str]:
    """Write a note where samples of a shape [N, T] cannot give a Hessian full rank."""
    tokens = math.prod(shape)
    width = max(group.columns for group, _ in every_group(config))
    if tokens >= width:
        return []
    return [
        Message(
            f"{tokens} calibration tokens are fewer than the widest linear's {width} inputs;"
            " give more ",
            Option("samples"),
        )
    ]
