"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from quantkit.base.arguments import require_instance
from quantkit.base.option_fields import accept_fields_of
from quantkit.base.progress import Progress, skip_repeated_reports
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.jobs.output.estimate import Estimate
from quantkit.jobs.output.result import QuantizeResult
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.run import run_quantization


@dataclass(frozen=True)
class QuantizeArguments(QuantizeOptions):
    """The arguments of `quantize`: the options, and who takes part.

    Attributes:
        group: the processes that share the calibration. Each makes the same call; rank 0 writes,
            and the others wait for it.
        on_estimate: called with the estimate of memory, disk and time before anything takes long.
        on_note: called with what the user should know while the job still runs: a scheme that will
            hardly pass.
        progress: as in `convert`.
    """

    _: KW_ONLY
    group: ProcessGroup = SINGLE
    on_estimate: Callable[[Estimate], None] | None = None
    on_note: Callable[[str], None] | None = None
    progress: Progress | None = None


@accept_fields_of(QuantizeArguments)
def quantize(options: QuantizeArguments) -> QuantizeResult:
    """Write the model in `src`, quantized, to the new folder, or GGUF file, `dst`, if it passes the
    gate.

    All decoder linears are quantized; ``lm_head`` and the embedding keep their floats
    unless the recipe names them. Rows that the group size does not divide follow
    `QuantScheme.fit_to_columns`, which the manifest records.

    A model known by its tensors only is not run: its linears are rounded, those that lose too much
    keep their floats, and all other tensors stay as they are.

    Args:

    Returns:
        What was written: path, size, bits per weight, what the gate measured, notes; the same in
        each process of a group.

    Raises:
        RequestError: for a scheme, method or option that is invalid, or a size that no choice of
            schemes has.
        CheckpointError, UnsupportedError: if `src` is damaged, or of a kind that cannot be
            quantized, or `to` does not hold the scheme.
        DestinationError, ResumeError: if `dst` exists, cannot be written, or is being written.
        NonFiniteError, QualityError: if the weights hold NaN or Inf, or the result is too far from
            its source. After any of them there is no `dst`.

    Example:
        >>> made = quantkit.quantize("model", "model-int4", "int4-g128")
        >>> print(made.bits_per_weight, made.quality.texts[0].kl)
    """
    require_instance("group", options.group, ProcessGroup, "a ProcessGroup")
    if options.refine:
        # Imports the training, which a plain quantization does not need.
        from quantkit.jobs.quantize.sequence import quantize_and_refine

        run = quantize_and_refine
    else:
        run = run_quantization
    return run(
        options,
        group=options.group,
        on_estimate=options.on_estimate,
        on_note=options.on_note,
        progress=skip_repeated_reports(options.progress),
    )
