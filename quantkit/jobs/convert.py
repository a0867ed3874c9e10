"""Convert a checkpoint: another format, sharding or float type; the same model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.arguments import as_path, as_whole, require_flags
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, read_as_floats, schemes
from quantkit.formats.container import Output, StoredCheckpoint, weight_size
from quantkit.formats.detect import WeightKind, open_checkpoint
from quantkit.formats.folder import carried_templates, checked_tokenizer, left_behind
from quantkit.formats.output.staging import require_name, require_new_names
from quantkit.formats.registry import CONTAINERS, GGUF, Target
from quantkit.jobs.card import model_name
from quantkit.jobs.carried_codes import (
    Rounding,
    common_scale_dtype,
    require_held,
    rounded,
    to_be_rounded,
    with_scales,
)
from quantkit.jobs.output import SHARD_BYTES, JobWriter, Work, model_summary, writing
from quantkit.jobs.result import ConvertResult
from quantkit.jobs.target import TargetName, asked_target, shard_bytes, target_of
from quantkit.progress import Progress, heard, in_phase
from quantkit.quality.gate import Gate, require_passed, run_gate
from quantkit.quality.transcoded import Exact, require_exact
from quantkit.quality.weights_only import carried_tensors
from quantkit.tensors.dtypes import FLOATS, SHORT_NAMES, DType, FloatName, float_name
from quantkit.tensors.finite import checked_cast
from quantkit.tensors.qtensor import CARRIED, QuantTensor, row_chunks
from quantkit.tensors.spec import TensorSpec

_MOST_WIDENED = 1 << 24
_SHORT = {dtype: name for name, dtype in SHORT_NAMES.items()}


@dataclass(frozen=True)
class Conversion:
    """A conversion before it is carried out.

    Attributes:
        work: what is to be written.
        target: as what.
        rounded: what becomes of weights that it cannot hold exactly, by name.
        notes: for the user.
    """

    work: Work
    target: Target
    rounded: Mapping[str, Rounding]
    notes: list[str]


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: TargetName | None = None,
    mp: int = 1,
    dtype: FloatName | torch.dtype | None = None,
    dequantize: bool = False,
    requantize: bool = False,
    split_max_size: int | None = None,
    template: str | None = None,
    weights: WeightKind | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    source_check: bool = True,
    tensors_only: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write the model in `src` to the new folder, or GGUF file, `dst`.

    The codes, scales and zero points of a quantized model stay what they are, or it is refused. What was written is
    read back and held against the source, tensor by tensor.

    Args:
        src: a model, in any format that is read.
        dst: the folder to make, or a file ``*.gguf``; it must not exist.
        to: ``compressed-tensors``, ``int-quantized``, ``gptq``, ``awq``, ``mlx`` or ``gguf`` of quantized models;
            ``hf``, ``meta`` or ``gguf`` of floats. By default floats go to ``hf``, and a quantized model keeps its
            format where that is written, else goes to ``compressed-tensors``.
        mp: number of Meta model-parallel shards.
        dtype: ``bf16``, ``fp16``, ``fp32``, or torch's; None keeps each tensor's own. Of quantized models it goes with
            GGUF, for the tensors that are floats, and with `dequantize`.
        dequantize: write the floats that a quantized model means, each rounded once to the model's float type.
        requantize: round anew what `to` cannot hold exactly; the result is then held against the source, and refused
            where it is too far from it.
        split_max_size: bytes of the largest file of weights, by default 2 GiB, and all of them in GGUF.
        template: of conversations, for an instruct model that brings none: ``llama2`` or ``llama3``, which say what
            Meta's code does, or a file ``*.jinja``; None carries those of `src`.
        weights: picks one of several sets of weights in `src`: ``meta``, ``safetensors``, ``bin``, ``gpt-fast`` or
            ``gpt-fast-int8``.
        resume: go on with an interrupted run; where there is none, begin.
        allow_nonfinite: write NaN and Inf, and values that overflow `dtype`, as they are.
        source_check: see first that the source predicts a packaged text at all, where it has a tokenizer.
        tensors_only: take the tensors as they are, of whatever architecture.
        progress: told of every layer; None tells nobody.

    Returns:
        What was written: path, size, bits a weight, what was proven equal, notes.

    Raises:
        QuantkitError: of the kind that says what is wrong; `dst` is then not there.

    Example:
        >>> quantkit.convert("Llama-3.2-1B", "Llama-3.2-1B-hf", dtype="bf16")
        >>> quantkit.convert("Llama-3.2-1B-int4", "llama-3.2-1b.gguf").exact.line()
    """
    began = time.monotonic()
    require_flags(resume=resume, allow_nonfinite=allow_nonfinite, source_check=source_check, tensors_only=tensors_only)
    progress = heard(progress)
    planned = conversion(
        src, dst, to=to, mp=mp, dtype=dtype, dequantize=dequantize, requantize=requantize,
        split_max_size=split_max_size, template=template, weights=weights, allow_nonfinite=allow_nonfinite,
        tensors_only=tensors_only,
    )  # fmt: skip
    work, source = planned.work, planned.work.source
    exact: Exact | None = None
    gate: Gate | None = None
    with writing(work, Path(dst), resume=resume, source_check=source_check, progress=progress) as writer:
        writer.tell()
        for spec in writer.missing:
            writer.put(spec.name, *_value(source, spec, planned.rounded, allow_nonfinite))
        result = writer.seal()
        size = weight_size(result)
        if not dequantize and planned.target.codes is not None:
            exact = require_exact(source, result, planned.rounded, progress=progress)
        if planned.rounded:
            gate = run_gate(source, result, writer.records, asked=_asked(work), progress=in_phase(progress, "gate"))
            require_passed(gate, source, result, Path(dst), remedy="start from the float model")
        details = _details(planned, writer, result, float_name(dtype) or source.config.dtype, exact, gate)
        manifest = writer.commit(details)
    return ConvertResult(
        Path(dst), *size, exact, len(planned.rounded), gate, time.monotonic() - began,
        [*planned.notes, *writer.notes], manifest,
    )  # fmt: skip


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
    asked = asked_target(to, dst, dequantize=dequantize, requantize=requantize)
    require_name(dst)
    source = open_checkpoint(as_path("src", src), weights, tensors_only=tensors_only)
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
    to_round: dict[str, Rounding] = {}
    scale_dtype = None
    if target.codes is not None and not dequantize:
        to_round = to_be_rounded(source, target.codes, weights=look) if requantize else {}
        require_held(source, target.codes, to_round)
        scale_dtype = common_scale_dtype(source, target.codes, to_round, look=look)
        notes += _carrying_notes(source, dst, target, scale_dtype, to_round, requantize=requantize)
    specs = _specs(source, cast, None if dequantize else to_round, scale_dtype, target)
    templates = carried_templates(source, tokenizer, template)
    most = shard_bytes(split_max_size, container, SHARD_BYTES)
    output = Output(
        source, config, specs, most, tokenizer, mp, target.method, templates, model_name(source), dst
    )  # fmt: skip
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
    return Conversion(work, target, to_round, [*source.notes, *notes])


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
        raise UnsupportedError(
            f"tensor '{name}' cannot be held exactly as {target.name}: its codes are not carried", path=source.path,
            found=stored_as, expected=f"codes that {target.name} has",
            hint="`dequantize=True` writes floats, `requantize=True` rounds it anew",
        )  # fmt: skip


def _carrying_notes(
    source: Checkpoint, dst: Path, target: Target, scale_dtype: DType | None, to_round: Mapping[str, Rounding], *,
    requantize: bool,
) -> list[str]:  # fmt: skip
    """What a user should know of the codes that are written."""
    notes = []
    total = len(schemes(source)) + sum(name.removesuffix(".weight") not in schemes(source) for name in to_round)
    if to_round:
        name, first = next(iter(to_round.items()))
        kinds = ", ".join(sorted({str(one.scheme) for one in to_round.values()}))
        notes.append(
            f"{dst}: {len(to_round)} of {total} quantized tensors cannot be held exactly as {target.name} and are"
            f" rounded anew to {kinds} ('{name}': {first.reason})"
        )
    elif requantize:
        notes.append(f"{dst}: `requantize=True` was not needed: {target.name} holds every quantized tensor exactly")
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


def _value(
    source: Checkpoint, spec: TensorSpec, to_round: Mapping[str, Rounding], allow_nonfinite: bool
) -> tuple[Tensor | QuantTensor, Mapping[str, object] | None]:
    """A tensor of the output, and what the manifest says of how it was found."""
    value = source.load(_stored_name(source, spec.name))
    if spec.scheme is not None and spec.name in to_round:
        return rounded(value, spec.scheme, spec.dtype.torch, spec.name)
    if isinstance(value, Tensor):
        return checked_cast(value, spec.dtype.torch, spec.name, source.path, allow_nonfinite), None
    if spec.scheme is not None:
        return with_scales(value, spec.dtype) or value, {"solver": CARRIED}
    floats = torch.empty(value.shape, dtype=spec.dtype.torch)
    for start, stop in row_chunks(*value.shape):
        some = value.rows(start, stop).dequantize()
        floats[start:stop] = checked_cast(some, spec.dtype.torch, spec.name, source.path, allow_nonfinite)
    return floats, None


def _specs(
    source: Checkpoint, cast: DType | None, to_round: Mapping[str, Rounding] | None, scale_dtype: DType | None,
    target: Target,
) -> list[TensorSpec]:  # fmt: skip
    """The tensors of the output, in order.

    Args:
        to_round: weights that get other codes; None where all become floats.
        scale_dtype: of all scales; None where each weight's own stays.
    """
    config = replace(
        source.config, tied_embeddings=source.config.tied_embeddings and not target.container.stores_tied_head
    )
    model = DType(config.dtype)
    assigned = {}
    if to_round is not None:
        assigned = {f"{module}.weight": scheme for module, scheme in schemes(source).items()}
        assigned |= {name: one.scheme for name, one in to_round.items()}
    specs = []
    quantized = {name.removesuffix(".weight") for name in assigned}
    for parameter in target.container.parameters(config, quantized, target.method):
        name, shape = parameter.name, parameter.shape
        info = source.info(_stored_name(source, name))
        if (scheme := assigned.get(name)) is not None:
            own = info.dtype if info.scheme is not None and name not in (to_round or {}) else model
            specs.append(TensorSpec(name, shape, scale_dtype or own, scheme))
            continue
        kept = not config.runnable and info.dtype not in FLOATS
        dequantized = info.scheme is not None or (to_round is None and _of_blocks(source, info))
        own = model if dequantized or _widened(source, info, model) else info.dtype
        specs.append(TensorSpec(name, shape, own if kept else cast or own))
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


def _stored_name(source: Checkpoint, name: str) -> str:
    """The tensor that one of the output comes from: the head of a model that has none is its embedding."""
    doubled = name == "lm_head.weight" and source.config.tied_embeddings
    return "model.embed_tokens.weight" if doubled else name


def _asked(work: Work) -> dict[str, Any]:
    """The schemes in which the output was asked for, by module."""
    return {spec.name.removesuffix(".weight"): spec.scheme for spec in work.encoder.planned if spec.scheme is not None}


def _details(
    planned: Conversion, writer: JobWriter, result: StoredCheckpoint, dtype: str, exact: Exact | None,
    gate: Gate | None,
) -> dict[str, object]:  # fmt: skip
    """The manifest's own part of a conversion."""
    source, assigned = planned.work.source, schemes(result)
    details: dict[str, object] = {
        "model": model_summary(source, dtype), "options": planned.work.options,
        "schemes": {module: str(scheme) for module, scheme in assigned.items()},
    }  # fmt: skip
    if exact is not None:
        details["exact"] = exact.to_json()
    if gate is not None:
        modules = {
            module: {"scheme": str(scheme), **writer.records.get(f"{module}.weight", {})}
            for module, scheme in assigned.items()
        }
        details |= {"quality": gate.to_json(), "modules": modules}
    if not source.config.runnable:
        details |= {"tensors_only": True, "carried": carried_tensors(source, result)}
    return details
