"""Convert a checkpoint: another format, sharding or float type; the same model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.arguments import require_flags
from quantkit.formats.checkpoint import schemes
from quantkit.formats.container import StoredCheckpoint, weight_size
from quantkit.formats.detect import WeightKind
from quantkit.jobs.carried_codes import cast, rounded, with_scales
from quantkit.jobs.conversion import Conversion, advising, conversion, stored_name
from quantkit.jobs.output import Work, Writer, model_summary, writing
from quantkit.jobs.result import ConvertResult
from quantkit.jobs.target import TargetName
from quantkit.progress import Progress, deduplicated, in_phase
from quantkit.quality.gate import Gate, require_passed, run_gate
from quantkit.quality.transcoded import Exact, require_exact, require_same_kv_cache
from quantkit.quality.weights_only import carried_tensors
from quantkit.tensors.dtypes import FloatName, float_name
from quantkit.tensors.finite import checked_cast, checked_codes
from quantkit.tensors.qtensor import CARRIED, QuantTensor, row_chunks
from quantkit.tensors.spec import TensorSpec


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
        requantize: change as little as needed of what `to` cannot hold exactly: cast scales to a type that it holds,
            codes and zero points as they are, else round the weight anew. The result is then compared with the
            source, and refused if it is too far from it.
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
    progress = deduplicated(progress)
    planned = conversion(
        src, dst, to=to, mp=mp, dtype=dtype, dequantize=dequantize, requantize=requantize,
        split_max_size=split_max_size, template=template, weights=weights, allow_nonfinite=allow_nonfinite,
        tensors_only=tensors_only,
    )  # fmt: skip
    work, source = planned.work, planned.work.source
    exact: Exact | None = None
    gate: Gate | None = None
    changes = planned.changes
    with writing(work, Path(dst), resume=resume, source_check=source_check, progress=progress) as writer:
        writer.report_progress()
        with advising(requantize=requantize):
            for spec in writer.missing:
                writer.put(spec.name, *_value(planned, spec, allow_nonfinite))
        result = writer.seal()
        size = weight_size(result)
        if planned.kv_cache is not None:
            require_same_kv_cache(planned.kv_cache, result)
        if not dequantize and planned.target.codes is not None:
            dtypes = {name: one.dtypes for name, one in changes.cast.items()}
            exact = require_exact(source, result, changes.rounded, dtypes, progress=progress)
        if changes.rounded or changes.cast:
            gate = run_gate(source, result, writer.records, asked=_asked(work), progress=in_phase(progress, "gate"))
            require_passed(gate, source, result, Path(dst), remedy="start from the float model")
        details = _details(planned, writer, result, float_name(dtype) or source.config.dtype, exact, gate)
        manifest = writer.commit(details)
    return ConvertResult(
        Path(dst), *size, exact, len(changes.rounded), gate, time.monotonic() - began,
        [*planned.notes, *writer.notes], manifest,
    )  # fmt: skip


def _value(
    planned: Conversion, spec: TensorSpec, allow_nonfinite: bool
) -> tuple[Tensor | QuantTensor, Mapping[str, object] | None]:
    """A tensor of the output, and what the manifest says of how it was found."""
    changes = planned.changes
    source = planned.precise if spec.name in changes.rounded else planned.work.source
    value = source.load(stored_name(source, spec.name))
    if isinstance(value, QuantTensor) and spec.scheme is not None:
        checked_codes(value, spec.name, source.path, allow_nonfinite)
    if spec.scheme is not None and spec.name in changes.rounded:
        return rounded(value, spec.scheme, spec.dtype.torch, spec.name, source.path)
    if isinstance(value, Tensor):
        return checked_cast(value, spec.dtype.torch, spec.name, source.path, allow_nonfinite), None
    if spec.scheme is not None and spec.name in changes.cast:
        return cast(value, changes.cast[spec.name].dtypes)
    if spec.scheme is not None:
        return with_scales(value, spec.dtype) or value, {"solver": CARRIED}
    floats = torch.empty(value.shape, dtype=spec.dtype.torch)
    for start, stop in row_chunks(*value.shape):
        some = value.rows(start, stop).dequantize()
        floats[start:stop] = checked_cast(some, spec.dtype.torch, spec.name, source.path, allow_nonfinite)
    return floats, None


def _asked(work: Work) -> dict[str, Any]:
    """The schemes in which the output was asked for, by module."""
    return {spec.name.removesuffix(".weight"): spec.scheme for spec in work.encoder.planned if spec.scheme is not None}


def _details(
    planned: Conversion, writer: Writer, result: StoredCheckpoint, dtype: str, exact: Exact | None,
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
