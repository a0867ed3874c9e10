"""Convert a checkpoint: another format, sharding or float type; the same model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quantkit.architectures.disk import parameters_as_written
from quantkit.arguments import as_path, as_text, as_whole, require_flags
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.container import Output, weight_size
from quantkit.formats.detect import WeightKind, open_checkpoint
from quantkit.formats.folder import carried_templates, checked_tokenizer, left_behind
from quantkit.formats.output.staging import require_name, require_new_names
from quantkit.formats.registry import CONTAINERS, target
from quantkit.jobs.output import SHARD_BYTES, Work, model_summary, writing
from quantkit.jobs.result import ConvertResult
from quantkit.progress import Progress, heard
from quantkit.quality.weights_only import carried_tensors
from quantkit.tensors.dtypes import FLOATS, SHORT_NAMES, DType, FloatName, float_name
from quantkit.tensors.finite import checked_cast
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec

Target = Literal["hf", "meta"]
_SHORT = {dtype: name for name, dtype in SHORT_NAMES.items()}


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: Target = "hf",
    mp: int = 1,
    dtype: FloatName | torch.dtype | None = None,
    template: str | None = None,
    weights: WeightKind | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    source_check: bool = True,
    tensors_only: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write the model in `src` to the new folder `dst`.

    Args:
        src: a Meta or Hugging Face folder.
        dst: the folder to make; it must not exist.
        to: ``hf`` or ``meta``.
        mp: number of Meta model-parallel shards.
        dtype: ``bf16``, ``fp16``, ``fp32``, or torch's; None keeps each tensor's own.
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
        What was written: path, size, bits a weight, notes.

    Raises:
        QuantkitError: of the kind that says what is wrong; `dst` is then not there.

    Example:
        >>> quantkit.convert("Llama-3.2-1B", "Llama-3.2-1B-hf", dtype="bf16")
    """
    began = time.monotonic()
    require_flags(resume=resume, allow_nonfinite=allow_nonfinite, source_check=source_check, tensors_only=tensors_only)
    progress = heard(progress)
    work, notes = conversion(
        src, dst, to=to, mp=mp, dtype=dtype, template=template, weights=weights,
        allow_nonfinite=allow_nonfinite, tensors_only=tensors_only,
    )  # fmt: skip
    source = work.source
    with writing(work, Path(dst), resume=resume, source_check=source_check, progress=progress) as writer:
        writer.tell()
        for spec in writer.missing:
            writer.put(spec.name, _value(source, spec, allow_nonfinite))
        result = writer.seal()
        size = weight_size(result)
        details: dict[str, object] = {
            "model": model_summary(source, float_name(dtype) or source.config.dtype),
            "options": work.options,
            "schemes": {module: str(scheme) for module, scheme in schemes(source).items()},
        }
        if not source.config.runnable:
            details |= {"tensors_only": True, "carried": carried_tensors(source, result)}
        manifest = writer.commit(details)
    return ConvertResult(Path(dst), *size, time.monotonic() - began, [*notes, *writer.notes], manifest)


def conversion(
    src: str | Path, dst: str | Path, *, to: Target, mp: int, dtype: FloatName | torch.dtype | None,
    template: str | None, weights: WeightKind | None, allow_nonfinite: bool, tensors_only: bool,
) -> tuple[Work, list[str]]:  # fmt: skip
    """A conversion before it is carried out: the work, and notes for the user.

    Raises:
        QuantkitError: as `convert` does for what headers alone can tell.
    """
    container, method = target(as_text("to", to))
    cast = float_name(dtype)
    mp, dst = as_whole("mp", mp), as_path("dst", dst)
    if mp != 1 and not container.model_parallel:
        able = " or ".join(name for name, one in CONTAINERS.items() if one.model_parallel)
        raise RequestError(f'`mp` goes with `to="{able}"`', found=f"`mp={mp}`")
    require_name(dst)
    source = open_checkpoint(as_path("src", src), weights, tensors_only=tensors_only)
    require_new_names(source.path, dst)
    tokenizer, notes = checked_tokenizer(source)
    notes += left_behind(source)
    if not source.config.runnable and not container.methods:
        raise RequestError(f'`tensors_only=True` does not go with `to="{to}"`', expected='`to="hf"`')
    quantized = schemes(source)
    if method is not None and not quantized:
        raise RequestError(f'the source is not quantized; `to="{to}"` converts one that is', hint="quantize it first")
    if quantized and (not container.methods or cast is not None):
        raise UnsupportedError(
            "the source is quantized; it can be converted as it is, but not to another float type or to Meta",
            path=source.path, found=str(next(iter(quantized.values()))), hint="start from the float model",
        )  # fmt: skip
    config = source.config if cast is None else source.config.with_dtype(cast)
    specs = _specs(source, cast, with_head=container.stores_tied_head)
    templates = carried_templates(source, tokenizer, template)
    output = Output(source, config, specs, SHARD_BYTES, tokenizer, mp, method, templates)
    side_files = container.side_files(output)
    encoder = container.encoder(output)
    notes += container.notes(output)
    short = None if cast is None else _SHORT[cast]
    options: dict[str, object] = {"to": to, "mp": mp, "dtype": short, "allow_nonfinite": allow_nonfinite}
    if template is not None:
        options["template"] = Path(template).name
    if not source.config.runnable:
        options["tensors_only"] = True
    return Work("convert", source, encoder, side_files, options), [*source.notes, *notes]


def _value(source: Checkpoint, spec: TensorSpec, allow_nonfinite: bool) -> Tensor | QuantTensor:
    """A tensor of the output."""
    value = source.load(_stored_name(source, spec.name))
    if isinstance(value, QuantTensor):
        return value
    return checked_cast(value, spec.dtype.torch, spec.name, source.path, allow_nonfinite)


def _specs(source: Checkpoint, dtype: DType | None, *, with_head: bool) -> list[TensorSpec]:
    config = replace(source.config, tied_embeddings=source.config.tied_embeddings and not with_head)
    specs = []
    for parameter in parameters_as_written(config, schemes(source)):
        info = source.info(_stored_name(source, parameter.name))
        cast = None if not config.runnable and info.dtype not in FLOATS else dtype
        specs.append(TensorSpec(parameter.name, parameter.shape, cast or info.dtype, info.scheme))
    return specs


def _stored_name(source: Checkpoint, name: str) -> str:
    """The tensor that one of the output comes from: the head of a model that has none is its embedding."""
    doubled = name == "lm_head.weight" and source.config.tied_embeddings
    return "model.embed_tokens.weight" if doubled else name
