"""A conversion before it is carried out: what becomes of every tensor, and what cannot be done."""

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
from quantkit.arguments import as_path, as_whole, require_flags
from quantkit.errors import NotRepresentableError, RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, read_as_floats, schemes
from quantkit.formats.container import Output, StoredCheckpoint
from quantkit.formats.detect import WeightKind, open_checkpoint
from quantkit.formats.folder import carried_templates, checked_tokenizer, left_behind
from quantkit.formats.kv_cache import KvCache
from quantkit.formats.output.staging import require_name, require_new_names
from quantkit.formats.registry import CONTAINERS, GGUF, Target
from quantkit.jobs.carried_codes import Changes, common_scale_dtype, needed_changes, require_representable, widened
from quantkit.jobs.kv_cache import kept_kv_cache
from quantkit.jobs.labels import model_name
from quantkit.jobs.output import SHARD_BYTES, Work
from quantkit.jobs.target import requested_target, shard_bytes, target_of
from quantkit.tensors.dtypes import FLOATS, SHORT_NAMES, DType, FloatName, float_name
from quantkit.tensors.spec import TensorSpec

_MOST_WIDENED = 1 << 24
_SHORT = {dtype: name for name, dtype in SHORT_NAMES.items()}


@dataclass(frozen=True)
class Conversion:
    """A conversion before it is carried out.

    Attributes:
        work: what is to be written.
        target: as what.
        changes: what becomes of weights that it cannot hold exactly.
        precise: the source as those that are rounded are read, in float32 where they are read as floats.
        notes: for the user.
        kv_cache: what is written of a quantized key/value cache.
    """

    work: Work
    target: Target
    changes: Changes
    precise: Checkpoint
    notes: list[str]
    kv_cache: KvCache | None = None


def conversion(
    src: str | Path, dst: str | Path, *, to: str | None, mp: int, dtype: FloatName | torch.dtype | None,
    dequantize: bool, requantize: bool, split_max_size: int | None, template: str | None, weights: WeightKind | None,
    allow_nonfinite: bool, tensors_only: bool, look: bool = True,
) -> Conversion:  # fmt: skip
    """A conversion before it is carried out.

    Args:
        look: whether to look at weights too, where what is written depends on them, and not at headers alone.

    Raises:
        QuantkitError: as `convert` does for what headers alone can tell.
    """
    require_flags(dequantize=dequantize, requantize=requantize)
    cast = float_name(dtype)
    mp, dst = as_whole("mp", mp), as_path("dst", dst)
    asked = requested_target(to, dst, dequantize=dequantize, requantize=requantize)
    require_name(dst)
    src = as_path("src", src)
    source = precise = open_checkpoint(src, weights, tensors_only=tensors_only, floats_as=cast)
    target = asked or target_of(source, dequantize=dequantize)
    container = target.container
    if mp != 1 and not container.model_parallel:
        able = " or ".join(name for name, one in CONTAINERS.items() if one.model_parallel)
        raise RequestError(f'`mp` goes with `to="{able}"`', found=f"`mp={mp}`")
    require_new_names(source.path, dst)
    tokenizer, notes = checked_tokenizer(source)
    notes += left_behind(source)
    _require_convertible(source, target, cast, dequantize=dequantize, requantize=requantize)
    config = source.config if cast is None else source.config.with_dtype(cast)
    changes = Changes()
    scale_dtype = None
    if target.codes is not None and not dequantize:
        changes = needed_changes(source, target.codes, weights=look) if requantize else changes
        with advising(requantize=requantize):
            require_representable(source, target.codes, changes.rounded)
        if changes.rounded.keys() & read_as_floats(source).keys():
            precise = open_checkpoint(src, weights, tensors_only=tensors_only, floats_as=DType.FLOAT32)
        scale_dtype = common_scale_dtype(source, target.codes, changes, look=look)
        notes += _carrying_notes(source, dst, target, scale_dtype, changes, requantize=requantize)
    specs = _specs(source, cast, None if dequantize else changes, scale_dtype, target)
    kv_cache, more = kept_kv_cache(source, target, dst, dequantize=dequantize, allow_nonfinite=allow_nonfinite)
    notes += more
    templates = carried_templates(source, tokenizer, template)
    most = shard_bytes(split_max_size, container, SHARD_BYTES)
    output = Output(
        source, config, specs, most, tokenizer, mp, target.method, templates, model_name(source), dst, kv_cache
    )  # fmt: skip
    with advising(requantize=requantize):
        side_files = container.side_files(output)
        encoder = container.encoder(output)
    notes += container.notes(output)
    options: dict[str, object] = {
        "to": target.name, "mp": mp, "dtype": None if cast is None else _SHORT[cast],
        "allow_nonfinite": allow_nonfinite,
    }  # fmt: skip
    given = {
        "dequantize": dequantize, "requantize": requantize, "split_max_size": split_max_size,
        "template": None if template is None else Path(template).name, "tensors_only": not source.config.runnable,
    }  # fmt: skip
    options |= {name: value for name, value in given.items() if value}
    work = Work("convert", source, encoder, side_files, options)
    return Conversion(work, target, changes, precise, [*source.notes, *notes], kv_cache)


@contextmanager
def advising(*, requantize: bool) -> Iterator[None]:
    """Have an error about a tensor that a format cannot hold name the option that lets it change, unless it is given.

    Raises:
        NotRepresentableError: of what is done within.
    """
    try:
        yield
    except NotRepresentableError as error:
        if requantize:
            raise
        casts = "casts scales that do not fit, and rounds anew what else cannot be held"
        raise NotRepresentableError(
            error.problem, path=error.path, found=error.found, expected=error.expected,
            hint=f"`requantize=True` {casts if error.by_scales else 'rounds it anew'}", by_scales=error.by_scales,
        ) from error  # fmt: skip


def _require_convertible(
    source: StoredCheckpoint, target: Target, cast: DType | None, *, dequantize: bool, requantize: bool
) -> None:
    """
    Raises:
        RequestError: for options that make no sense for this source.
        UnsupportedError: if it is quantized, and what is asked for would change that.
    """
    quantized, integers = schemes(source), read_as_floats(source)
    if not source.config.runnable:
        if not target.container.methods:
            raise RequestError(f'`tensors_only=True` does not go with `to="{target.name}"`', expected='`to="hf"`')
        if requantize or (target.method is not None and quantized and target.name != source.method):
            raise RequestError("`tensors_only=True` changes no codes", found=f'`to="{target.name}"`')
    if not (quantized or integers):
        if not target.floats:
            problem = f'the source is not quantized; `to="{target.name}"` converts one that is'
            raise RequestError(problem, hint="quantize it first")
        if requantize:
            raise RequestError("`requantize=True` is for a quantized source", path=source.path)
        return
    if dequantize:
        return
    found = str(next(iter(quantized.values()), None) or next(iter(integers.values())))
    if target.codes is None or (cast is not None and target.container is not GGUF):
        what = "floats are" if target.codes is None else "another float type is"
        raise UnsupportedError(
            f"the source is quantized; {what} written of it only where that is asked for", path=source.path,
            found=found, hint="`dequantize=True` writes the floats that its codes mean, each rounded once",
        )  # fmt: skip
    if integers and not requantize:
        name, stored_as = next(iter(integers.items()))
        linear = name.removesuffix(".weight") in linear_columns(source.config)
        why = "its codes are not carried" if linear else "it is none of the linears, which alone have codes here"
        raise UnsupportedError(
            f"tensor '{name}' cannot be held exactly as {target.name}: {why}", path=source.path, found=stored_as,
            expected=f"codes that {target.name} has" if linear else "floats",
            hint="`dequantize=True` writes floats, `requantize=True` "
            + ("rounds it anew" if linear else "writes this one as floats"),
        )  # fmt: skip


def _carrying_notes(
    source: Checkpoint, dst: Path, target: Target, scale_dtype: DType | None, changes: Changes, *, requantize: bool
) -> list[str]:
    """What a user should know of the codes that are written."""
    notes, to_round = [], changes.rounded
    total = len(schemes(source)) + sum(name.removesuffix(".weight") not in schemes(source) for name in to_round)
    if changes.cast:
        name, cast = next(iter(changes.cast.items()))
        notes.append(
            f"{dst}: {len(changes.cast)} of {total} quantized tensors keep their codes, and their scales are cast to"
            f" {cast.dtypes[-1]} ('{name}': {cast.reason})"
        )
    if to_round:
        name, first = next(iter(to_round.items()))
        kinds = ", ".join(sorted({str(one.scheme) for one in to_round.values()}))
        notes.append(
            f"{dst}: {len(to_round)} of {total} quantized tensors cannot be held exactly as {target.name} and are"
            f" rounded anew to {kinds} ('{name}': {first.reason})"
        )
    elif requantize and not changes.cast:
        notes.append(f"{dst}: `requantize=True` was not needed: {target.name} holds every quantized tensor exactly")
    if target.codes is not None and EMBEDDING in schemes(source) and widened(source, EMBEDDING, target.codes):
        notes.append(
            f"{dst}: the embedding, {source.info(f'{EMBEDDING}.weight').scheme}, becomes float32, which is exact:"
            f" readers of {target.name} have no codes of embeddings, or few do"
        )
    as_floats = [name for name in read_as_floats(source) if name not in to_round]
    if as_floats:
        notes.append(
            f"{dst}: '{as_floats[0]}'{f' and {len(as_floats) - 1} more' * (len(as_floats) > 1)}, stored as integers,"
            f" become {source.config.dtype}"
        )
    if scale_dtype is None and schemes(source):
        found = ", ".join(sorted({str(source.info(f"{module}.weight").dtype) for module in schemes(source)}))
        notes.append(f"{dst}: scales stay {found}, as {source.config.dtype} does not have them all; some readers round")
    return notes


def _specs(
    source: Checkpoint, cast: DType | None, changes: Changes | None, scale_dtype: DType | None, target: Target
) -> list[TensorSpec]:
    """The tensors of the output, in order.

    Args:
        changes: of weights that do not stay as they are; None where all become floats.
        scale_dtype: of all scales; None where each weight's own stays.
    """
    config = replace(
        source.config, tied_embeddings=source.config.tied_embeddings and not target.container.stores_tied_head
    )
    model = DType(config.dtype)
    assigned = {}
    to_round = None if changes is None else changes.rounded
    if to_round is not None:
        assigned = {f"{module}.weight": scheme for module, scheme in schemes(source).items()}
        assigned |= {name: one.scheme for name, one in to_round.items()}
    specs = []
    quantized = {name.removesuffix(".weight") for name in assigned}
    for parameter in target.container.parameters(config, quantized, target.method):
        name, shape = parameter.name, parameter.shape
        info = source.info(stored_name(source, name))
        if to_round is not None and target.codes is not None and widened(source, parameter.module, target.codes):
            specs.append(TensorSpec(name, shape, DType.FLOAT32))
            continue
        if (scheme := assigned.get(name)) is not None:
            own = info.dtype if info.scheme is not None and name not in (to_round or {}) else model
            specs.append(TensorSpec(name, shape, scale_dtype or own, scheme))
            continue
        if cast is not None and (config.runnable or info.dtype in FLOATS):
            specs.append(TensorSpec(name, shape, cast))
            continue
        dequantized = info.scheme is not None or (to_round is None and _of_blocks(source, info))
        specs.append(TensorSpec(name, shape, model if dequantized or _widened(source, info, model) else info.dtype))
    return specs


def _of_blocks(source: Checkpoint, info: TensorSpec) -> bool:
    """Whether a matrix may be one that GGUF has in blocks, and that is read in float32 to be exact."""
    return source.format == GGUF.name and len(info.shape) > 1


def _widened(source: Checkpoint, info: TensorSpec, model: DType) -> bool:
    """Whether GGUF has a tensor in float32, as it has norms and biases, of which the model's type has every number."""
    if source.format != GGUF.name or info.dtype != DType.FLOAT32 or math.prod(info.shape) > _MOST_WIDENED:
        return False
    value = source.load(info.name)
    return isinstance(value, Tensor) and torch.equal(value.to(model.torch).float(), value)


def stored_name(source: Checkpoint, name: str) -> str:
    """The tensor that one of the output comes from: the head of a model that has none is its embedding."""
    doubled = name == "lm_head.weight" and source.config.tied_embeddings
    return "model.embed_tokens.weight" if doubled else name
