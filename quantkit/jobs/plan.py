"""Check commands and estimate their memory, disk and time, before they begin.

    >>> print(*quantkit.plan.quantize("model", "model-int4", "int4-g128").lines(), sep="\\n")

`convert`, `quantize` and `refine` take the arguments of the jobs of these names, check what these
jobs check, and write nothing. `generate` and `training` do the same for generation and for steps of
`refine` on a TPU slice.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantkit.base.arguments import as_integer, as_path, as_string, require_flags
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import accept_fields_of
from quantkit.base.progress import Progress, skip_repeated_reports
from quantkit.calibration import effort
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.container import Encoder
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.output.destination import require_space
from quantkit.jobs.convert.conversion import plan_conversion
from quantkit.jobs.convert.estimate import estimate_conversion
from quantkit.jobs.convert.options import ConvertOptions
from quantkit.jobs.output.estimate import Estimate, require_buildable
from quantkit.jobs.output.existing import may_accept_existing
from quantkit.jobs.quantize.estimate import estimate_quantization
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import prepare
from quantkit.jobs.quantize.sequence_estimate import estimate_sequence
from quantkit.jobs.quantize.size_fit import set_up_size_fit
from quantkit.jobs.refine.estimate import estimate_refinement
from quantkit.jobs.refine.options import BATCH, RefineOptions, mesh_shape
from quantkit.jobs.refine.plan import plan_refinement
from quantkit.model.device import to_torch_dtype
from quantkit.tensors.dtypes import FloatName
from quantkit.training.trained import TrainedNames
from quantkit.xla import require_compiler

if TYPE_CHECKING:
    from quantkit.xla.estimate import SliceEstimate
    from quantkit.xla.training.estimate import TrainingEstimate

__all__ = ["Estimate", "convert", "generate", "quantize", "refine", "training"]


@accept_fields_of(ConvertOptions)
def convert(options: ConvertOptions) -> Estimate:
    """Estimate what `quantkit.convert` with the same arguments would take.

    Returns:
        Memory, disk and time.

    Raises:
        QuantkitError: as `quantkit.convert` does for what can be found without reading weights.
    """
    planned = plan_conversion(options, headers_only=True)
    estimate = estimate_conversion(planned)
    _require_room(planned.dst, planned.work.encoder, estimate, options)
    return estimate


@accept_fields_of(QuantizeOptions)
def quantize(options: QuantizeOptions) -> Estimate:
    """Estimate what `quantkit.quantize` with the same arguments would take; calibration text is
    read, and no samples are drawn.

    Returns:
        Memory, disk and time, and what becomes of the layers.

    Raises:
        QuantkitError: as `quantkit.quantize` does for what can be found without reading weights.
    """
    planned = prepare(options)
    formats = planned.formats
    settings = planned.solver.settings
    if options.refine:
        estimate = estimate_sequence(planned, options)
    else:
        fit = set_up_size_fit(formats.first, options.size)
        estimate = estimate_quantization(planned, fit, length=options.length, resume=options.resume)
    _require_room(formats.dst, formats.encoder, estimate, options)
    if settings is not None:
        # A calibration text that is missing or too short is an error of the real run too.
        settings.require_text(formats.source)
    return estimate


@accept_fields_of(RefineOptions)
def refine(options: RefineOptions) -> Estimate:
    """Estimate what `quantkit.refine` with the same arguments would take; no samples are drawn.

    Returns:
        Memory, disk and time.

    Raises:
        QuantkitError: as `quantkit.refine` does before it trains.
        RequestError: for `backend`; see `training`.
    """
    if options.backend is not None:
        raise RequestError(
            Message(
                "training with ",
                Option("backend", value=options.backend),
                " is not estimated for this machine",
            ),
            hint=Message("plan it for a ", Option("target")),
        )
    planned = plan_refinement(options)
    estimate = estimate_refinement(planned)
    # A delta is a single small file without a folder to build it in.
    if options.delta is None:
        require_buildable(planned.plan.dst, planned.plan.work.encoder, resume=options.resume)
    require_space(options.output, estimate.disk_bytes + estimate.scratch_bytes)
    planned.settings.require_text(planned.reference)
    return estimate


def generate(
    model: str | Path | Checkpoint,
    target: str,
    *,
    batch: int = 1,
    context: int | None = None,
    dtype: FloatName | torch.dtype | None = None,
) -> SliceEstimate:
    """Estimate what generation takes of each chip of a TPU slice, by compiling for that slice; no
    TPU is needed.

    Args:
        model: a folder, or an open checkpoint; only its shapes are looked at.
        target: kind and number of chips, such as ``v5e-16``.
        batch: texts at once.
        context: tokens of a sequence, prompt included; None is the model's maximum.
        dtype: of activations and float weights: ``bf16``, ``fp16``, ``fp32``, or torch's; None is
            the checkpoint's own.

    Returns:
        What each chip holds and exchanges.

    Raises:
        RequestError: for an unknown slice, or one that the model does not fit; if jax, torchax or
            the compiler for TPUs is not installed.
    """
    float_dtype = to_torch_dtype(dtype)
    target = as_string("target", target)
    batch = as_integer("batch", batch)
    if context is not None:
        context = as_integer("context", context)
    if not hasattr(model, "config"):
        model = as_path("model", model)
    # The imports below need jax and torchax, which are optional.
    require_compiler()
    from quantkit.xla.estimate import estimate_slice

    if isinstance(model, (str, Path)):
        checkpoint: Checkpoint = open_checkpoint(model)
    else:
        checkpoint = model
    require_runnable(checkpoint)
    return estimate_slice(checkpoint, target, batch=batch, context=context, dtype=float_dtype)


def training(
    model: str | Path | Checkpoint,
    target: str,
    *,
    mesh: str | None = None,
    batch: int | None = None,
    length: int | None = None,
    train_norms: bool = False,
    progress: Progress | None = None,
) -> TrainingEstimate:
    """Estimate what a step of `quantkit.refine` takes of each chip of a TPU slice, by compiling for
    that slice; no TPU is needed.

    Args:
        model: the quantized model: a folder, or an open checkpoint; only its shapes are looked at.
        target: kind and number of chips, such as ``v5e-64``; ``2xv5e-64`` for two slices.
        mesh: how many parts the samples have in each slice, and how many the model, such as
            ``8x8``; None compares one dimension, the samples, with two.
        batch: samples of a step; None is one for each part of the samples, and at least 4.
        length: tokens of a sample; None is as `quantkit.refine` draws them.
        train_norms: as in `quantkit.refine`.
        progress: called for each mesh.

    Returns:
        What each chip holds, computes and exchanges, by mesh.

    Raises:
        RequestError: for an unknown slice, or one that the model does not fit on any mesh; if jax,
            torchax or the compiler for TPUs is not installed.
        UnsupportedError: if the model has no scales that can be trained, or XLA does not serve it.
    """
    target = as_string("target", target)
    shape = mesh_shape(mesh)
    require_flags(train_norms=train_norms)
    if batch is not None:
        batch = as_integer("batch", batch, 1)
    if length is not None:
        length = as_integer("length", length, 1)
    if not hasattr(model, "config"):
        model = as_path("model", model)
    require_compiler()
    from quantkit.xla.training.estimate import estimate_training

    if isinstance(model, (str, Path)):
        checkpoint: Checkpoint = open_checkpoint(model)
    else:
        checkpoint = model
    require_runnable(checkpoint)
    # XLA trains no codes: `refine` refuses `train_codes` with `backend="xla"`.
    names = TrainedNames.of(checkpoint, norms=train_norms, codes=False)
    if length is None:
        length = effort.EFFORTS["default"].length(checkpoint.config)
    return estimate_training(
        checkpoint,
        target,
        names=names,
        meshes=[] if shape is None else [shape],
        batch=batch,
        least=BATCH,
        length=length,
        progress=skip_repeated_reports(progress),
    )


def _require_room(
    dst: Path, encoder: Encoder, estimate: Estimate, options: ConvertOptions | QuantizeOptions
) -> None:
    if may_accept_existing(dst, options.if_exists):
        estimate.notes.append(f"{dst}: exists already; it would only be compared")
        return
    require_buildable(dst, encoder, resume=options.resume)
    require_space(dst, estimate.disk_bytes + estimate.scratch_bytes)
