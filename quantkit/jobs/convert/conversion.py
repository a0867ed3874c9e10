"""What `convert` does before it writes: checks from headers alone, and what becomes of each
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import linear_columns
from quantkit.base.arguments import as_path
from quantkit.base.messages import Message, Option, join_messages
from quantkit.errors import NotRepresentableError, RequestError, UnsupportedError
from quantkit.formats.authorship import CARD, read_authorship
from quantkit.formats.checkpoint import (
    Checkpoint,
    list_uncarried_weights,
    resolve_stored_name,
    schemes,
)
from quantkit.formats.codecs.mlx import Mlx
from quantkit.formats.container import Output, StoredCheckpoint
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint
from quantkit.formats.dequantized_checkpoint import may_be_in_blocks
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.formats.folder import select_templates
from quantkit.formats.kv_cache import KvCache
from quantkit.formats.output.staging import require_name, require_new_names
from quantkit.formats.registry import CONTAINERS, GGUF, Target
from quantkit.jobs.convert import carried_codes
from quantkit.jobs.convert.adapters import describe_adapters, merge_adapters
from quantkit.jobs.convert.card import write_conversion_card
from quantkit.jobs.convert.carried_codes import Changes, must_write_embedding_as_float32
from quantkit.jobs.convert.options import ConvertOptions
from quantkit.jobs.output.labels import model_name
from quantkit.jobs.output.source_folder import (
    check_side_files,
    note_left_behind,
    require_causal_model,
)
from quantkit.jobs.output.target import (
    choose_default_target,
    choose_kv_cache,
    choose_shard_bytes,
    choose_target,
    require_names,
)
from quantkit.jobs.output.writer import Work
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.via_transformers.stacks import unstack

# Elements of the largest tensor that is read to compare types: norms and biases are smaller.
_MAX_COMPARED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Conversion:
    """A planned conversion.

    Attributes:
        changes: what happens to weights that the format cannot hold exactly.
        rounding_source: the source for weights that are rounded anew: it reads stored integers as
            float32.
        kv_cache: the settings of a quantized KV cache to write; None for none.
    """

    dst: Path
    options: ConvertOptions
    work: Work
    target: Target
    changes: Changes
    rounding_source: Checkpoint
    notes: list[str]
    kv_cache: KvCache | None


def plan_conversion(options: ConvertOptions, *, headers_only: bool = False) -> Conversion:
    """Open the source, and decide what happens to each tensor.

    Args:
        headers_only: whether to read no weights, even if the output depends on them.

    Raises:
        QuantkitError: as `convert` does before it writes.
    """
    dst = as_path("dst", options.dst)
    float_type = options.float_type
    dequantize = options.dequantize
    requantize = options.requantize
    # Options are checked before the source is opened: opening a large folder takes longer.
    requested = choose_target(options.to, dst, dequantize=dequantize, requantize=requantize)
    require_name(dst)
    src = as_path("src", options.src)
    require_causal_model(src)
    source = _open(src, options, float_type)
    target = requested or choose_default_target(source, dequantize=dequantize)
    if not dequantize and _must_read_all_codes(source, target):
        source = with_codes(source)
    rounding_source = source
    container = target.container
    if options.mp != 1 and not container.model_parallel:
        parallel_names: list[str] = []
        for name, known_container in CONTAINERS.items():
            if known_container.model_parallel:
                parallel_names.append(name)
        able = " or ".join(parallel_names)
        raise RequestError(
            Message(Option("mp"), " requires ", Option("to", value=able)),
            found=Message(Option("mp", value=options.mp)),
        )
    require_new_names(source.path, dst)
    _require_convertible(source, target, options)
    tokenizer, notes = check_side_files(source, template=options.template)
    authorship = read_authorship(source.path)
    has_card = bool(authorship) and container is not GGUF
    notes += note_left_behind(source, container, dst, has_card=has_card)
    if float_type is None:
        config = source.config
    else:
        config = source.config.with_dtype(float_type)
    changes = Changes()
    scale_dtype = None
    if target.codes is not None and not dequantize:
        if requantize:
            changes = carried_codes.plan_changes(source, target.codes, weights=not headers_only)
        with suggest_requantize(options):
            carried_codes.require_representable(source, target.codes, changes.rounded)
        # Weights are rounded from float32. Stored integers that are read in the model's type would
        # be rounded twice.
        if changes.rounded.keys() & list_uncarried_weights(source).keys():
            rounding_source = _open(src, options, DType.FLOAT32)
        scale_dtype = carried_codes.choose_common_scale_dtype(
            source, target.codes, changes, look=not headers_only
        )
        notes += _describe_code_changes(
            source, dst, target, scale_dtype, changes, requantize=requantize
        )
    spec_changes = None if dequantize else changes
    specs = _plan_specs(source, float_type, spec_changes, scale_dtype, target)
    # A `dtype` that changes no tensor is recorded like none: the outputs are the same.
    if float_type == config.dtype == source.config.dtype:
        uncast_specs = _plan_specs(source, None, spec_changes, scale_dtype, target)
        if specs == uncast_specs:
            float_type = None
    kv_cache, kv_notes = choose_kv_cache(
        source, target, dst, dequantize=dequantize, allow_nonfinite=options.allow_nonfinite
    )
    # What is dropped has no part in checks either.
    source.kv_cache = kv_cache
    output = Output(
        source=source,
        config=config,
        planned=specs,
        shard_bytes=choose_shard_bytes(options.split_max_size, container),
        tokenizer=tokenizer,
        model_parallel=options.mp,
        method=target.method,
        templates=select_templates(source, tokenizer, options.template),
        name=model_name(source),
        authorship=authorship,
        dst=dst,
        kv_cache=kv_cache,
    )
    with suggest_requantize(options):
        side_files = container.side_files(output)
        encoder = container.encoder(output)
    if has_card:
        side_files[CARD] = write_conversion_card(output)
    notes += [*kv_notes, *container.notes(output)]
    recorded = options.to_record(
        target.name, float_type=float_type, tensors_only=not source.config.runnable
    )
    recorded |= describe_adapters(source)
    work = Work(
        job="convert", source=source, encoder=encoder, side_files=side_files, options=recorded
    )
    notes = [*source.notes, *notes]
    return Conversion(
        dst=dst,
        options=options,
        work=work,
        target=target,
        changes=changes,
        rounding_source=rounding_source,
        notes=notes,
        kv_cache=kv_cache,
    )


def _must_read_all_codes(source: StoredCheckpoint, target: Target) -> bool:
    """Return whether codes for which there are no kernels are read as codes, not as floats.

    Those with MLX's offsets are, for another folder of MLX. For a file of GGUF, those of all other
    sources are: blocks of GGUF are carried, and others, such as FP8, are refused or rounded anew.
    """
    if source.method == Mlx.name:
        return target.method is not None and target.method.name == Mlx.name
    return target.container is GGUF


def _open(src: Path, options: ConvertOptions, floats_as: DType | None) -> StoredCheckpoint:
    source = open_checkpoint(
        src, options.weights, tensors_only=options.tensors_only, floats_as=floats_as
    )
    if isinstance(source, HFCheckpoint) and not source.config.runnable and source.has_codes:
        # Experts that become floats become one tensor again, and some weights are transposed.
        unstack(source)
    return merge_adapters(
        source,
        options.lora,
        dequantize=options.dequantize,
        allow_nonfinite=options.allow_nonfinite,
        floats_as=options.float_type,
    )


@contextmanager
def suggest_requantize(options: ConvertOptions) -> Iterator[None]:
    """Add `requantize` as the hint of a `NotRepresentableError` from the body, unless it is set."""
    try:
        yield
    except NotRepresentableError as error:
        if options.requantize:
            raise
        if error.by_scales:
            remedy = (
                "casts scales that do not fit, and requantizes other tensors that cannot be"
                " stored exactly"
            )
        else:
            remedy = "requantizes it"
        raise NotRepresentableError(
            error.problem,
            path=error.path,
            found=error.found,
            expected=error.expected,
            hint=Message(Option("requantize", value=True), f" {remedy}"),
            by_scales=error.by_scales,
        ) from error


def _require_convertible(source: StoredCheckpoint, target: Target, options: ConvertOptions) -> None:
    """Raise a `RequestError` for options that do not go with the source, an `UnsupportedError` if
    they would change codes.
    """
    quantized = schemes(source)
    integers = list_uncarried_weights(source)
    if not source.config.runnable:
        if not target.container.methods:
            raise RequestError(
                Message(
                    Option("tensors_only", value=True),
                    " cannot be combined with ",
                    Option("to", value=target.name),
                ),
                expected=Message(Option("to", value="hf")),
            )
        # The tensors of an unknown architecture are copied. Another format of codes would need
        # their roles.
        changes_codes = target.method is not None and target.name != source.method
        if options.requantize or (quantized and changes_codes):
            raise RequestError(
                Message(Option("tensors_only", value=True), " does not change quantized weights"),
                found=Message(Option("to", value=target.name)),
            )
    if not (quantized or integers):
        requested: Option | None = None
        if not target.floats:
            requested = Option("to", value=target.name)
        elif options.requantize:
            requested = Option("requantize", value=True)
        if requested is not None:
            raise RequestError(
                Message(requested, " requires a source with int4 or int8 codes"),
                path=source.path,
                found=describe_floats(source),
                hint=Message("quantize it: `quantkit quantize` has ", Option("to", job="")),
            )
        return
    if options.dequantize:
        return
    if source.config.runnable and target.name != source.method:
        require_names(source, target)
    first_format = str(next(iter([*quantized.values(), *integers.values()])))
    # In GGUF `dtype` is the type of the float tensors, next to which codes stay as they are.
    if target.codes is None or (options.dtype is not None and target.container is not GGUF):
        if target.codes is None:
            written_as = "an unquantized model"
        else:
            written_as = "another dtype"
        raise UnsupportedError(
            f"the source is quantized; it must be dequantized to be written as {written_as}",
            path=source.path,
            found=first_format,
            hint=Message(
                Option("dequantize", value=True),
                " dequantizes it, and rounds each weight once",
            ),
        )
    if integers and not options.requantize:
        name, stored_as = next(iter(integers.items()))
        ways = [Message(Option("dequantize", value=True), " dequantizes it")]
        if name.removesuffix(".weight") in linear_columns(source.config):
            reason = "its quantized weights cannot be copied"
            expected = f"a type that {target.name} has"
            ways.append(Message(Option("requantize", value=True), " requantizes it"))
        else:
            reason = "only linears can be quantized in this format"
            expected = "an unquantized tensor"
            ways.append(Message(Option("requantize", value=True), " dequantizes this tensor"))
        if source.format == GGUF.name:
            ways.insert(0, Message(Option("to", value=GGUF.name), " keeps all quantized weights"))
        raise UnsupportedError(
            f"tensor '{name}' cannot be stored exactly as {target.name}: {reason}",
            path=source.path,
            found=stored_as,
            expected=expected,
            hint=join_messages(", ", ways),
        )


def describe_floats(source: StoredCheckpoint) -> str:
    """Describe the weights of a model without codes that could be copied, for errors: small floats
    are quantized weights too, although they are read as floats.
    """
    kinds: list[str] = []
    if isinstance(source, HFCheckpoint):
        kinds = source.list_kinds_read_as_floats()
    if not kinds:
        return "an unquantized model"
    return f"weights in {' and '.join(kinds)}, which are read as {source.config.dtype}"


def _describe_code_changes(
    source: Checkpoint,
    dst: Path,
    target: Target,
    scale_dtype: DType | None,
    changes: Changes,
    *,
    requantize: bool,
) -> list[str]:
    """Describe for the user what happens to the codes."""
    notes: list[str] = []
    to_round = changes.rounded
    quantized = schemes(source)
    # Integers that are read as floats are quantized tensors too, which `schemes` does not list.
    total = len(quantized.keys() | {name.removesuffix(".weight") for name in to_round})
    if changes.scale_casts:
        name, cast = next(iter(changes.scale_casts.items()))
        notes.append(
            f"{dst}: {len(changes.scale_casts)} of {total} quantized tensors are kept, except"
            f" that their scales are cast to {cast.dtypes[-1]} ('{name}': {cast.reason})"
        )
    if to_round:
        name, first = next(iter(to_round.items()))
        kinds = ", ".join(sorted({str(rounding.scheme) for rounding in to_round.values()}))
        notes.append(
            f"{dst}: {len(to_round)} of {total} quantized tensors cannot be stored exactly as"
            f" {target.name} and are requantized to {kinds} ('{name}': {first.reason})"
        )
    elif requantize and not changes.scale_casts:
        notes.append(
            Message(
                f"{dst}: ",
                Option("requantize", value=True),
                f" was not needed: {target.name} stores every quantized tensor exactly",
            )
        )
    if (
        target.codes is not None
        and EMBEDDING in quantized
        and must_write_embedding_as_float32(source, EMBEDDING, target.codes)
    ):
        notes.append(
            f"{dst}: the embedding, {source.info(f'{EMBEDDING}.weight').scheme}, becomes float32,"
            f" which is exact: few or no readers of {target.name} support quantized embeddings"
        )
    as_floats = [name for name in list_uncarried_weights(source) if name not in to_round]
    if as_floats:
        remaining = f" and {len(as_floats) - 1} more" if len(as_floats) > 1 else ""
        notes.append(
            f"{dst}: '{as_floats[0]}'{remaining}, stored as integers, become {source.config.dtype}"
        )
    if scale_dtype is None and quantized:
        scale_dtypes = {str(source.info(f"{module}.weight").dtype) for module in quantized}
        notes.append(
            f"{dst}: scales stay {', '.join(sorted(scale_dtypes))}, because {source.config.dtype}"
            " cannot represent them all; some readers round them"
        )
    return notes


def _plan_specs(
    source: Checkpoint,
    float_type: DType | None,
    changes: Changes | None,
    scale_dtype: DType | None,
    target: Target,
) -> list[TensorSpec]:
    """Choose shape, type and scheme of each tensor of the output, in order. Without `changes` all
    are floats; without `scale_dtype` scales keep their types.
    """
    # A config without ties lists the head among the parameters. Readers of Meta's files and
    # gpt-fast's expect a head, even if it equals the embedding.
    tied = source.config.tied_embeddings and not target.container.stores_tied_head
    config = replace(source.config, tied_embeddings=tied)
    model_dtype = DType(config.dtype)
    assigned: dict[str, QuantScheme] = {}
    if changes is not None:
        for module, scheme in schemes(source).items():
            assigned[f"{module}.weight"] = scheme
        for name, rounding in changes.rounded.items():
            assigned[name] = rounding.scheme
    specs: list[TensorSpec] = []
    quantized = {name.removesuffix(".weight") for name in assigned}
    for parameter in target.container.parameters(config, quantized, target.method):
        name = parameter.name
        tensor_scheme = assigned.get(name)
        info = source.info(resolve_stored_name(source, name))
        if (
            changes is not None
            and target.codes is not None
            and must_write_embedding_as_float32(source, parameter.module, target.codes)
        ):
            # The product of a code and its scale can need more digits than the model's type has.
            dtype = DType.FLOAT32
            tensor_scheme = None
        elif changes is not None and tensor_scheme is not None:
            # The type of a tensor with codes is that of its scales.
            keeps_codes = info.scheme is not None and name not in changes.rounded
            if scale_dtype is not None:
                dtype = scale_dtype
            elif keeps_codes:
                dtype = info.dtype
            else:
                dtype = model_dtype
        elif float_type is not None and (config.runnable or info.dtype in FLOATS):
            dtype = float_type
        else:
            # GGUF blocks that may store a matrix are read as float32 where that is exact.
            blocks = changes is None and may_be_in_blocks(source, info)
            if (
                info.scheme is not None
                or blocks
                or _is_float32_without_need(source, info, model_dtype)
            ):
                dtype = model_dtype
            else:
                dtype = info.dtype
        specs.append(TensorSpec(name, parameter.shape, dtype, tensor_scheme))
    return specs


def _is_float32_without_need(source: Checkpoint, info: TensorSpec, model: DType) -> bool:
    """Check whether GGUF stores a tensor as float32, such as a norm, though the model's type holds
    it exactly.

    llama.cpp's converter writes all tensors of one dimension as float32.
    """
    if (
        source.format != GGUF.name
        or info.dtype != DType.FLOAT32
        or math.prod(info.shape) > _MAX_COMPARED_ELEMENTS
    ):
        return False
    value = source.load(info.name)
    return isinstance(value, Tensor) and torch.equal(value.to(model.torch).float(), value)
