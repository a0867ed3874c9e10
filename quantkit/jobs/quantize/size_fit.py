"""Choose the schemes of a quantization for a size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.architectures.topology import linear_columns
from quantkit.base.late import LateModule
from quantkit.base.progress import Progress
from quantkit.bit_allocation.size_target import SizeTarget
from quantkit.calibration.data import Calibration
from quantkit.calibration.settings import GptqSettings
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.output.staging import read_interrupted_fingerprint
from quantkit.jobs.output.writer import option_key
from quantkit.jobs.quantize.calibrated_model import prepare_model
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.tensors.scheme import QuantScheme

# A requested scheme leaves nothing to choose.
if TYPE_CHECKING:
    from quantkit.bit_allocation import allocation as bit_allocations
    from quantkit.bit_allocation import fit as fits
    from quantkit.passes.passage import Survey
else:
    bit_allocations = LateModule("quantkit.bit_allocation.allocation")
    fits = LateModule("quantkit.bit_allocation.fit")

BIT_ALLOCATION = "bit_allocation"
"""The key of the schemes chosen for a size in the manifest, and in the journal of an interrupted
run.
"""


def set_up_size_fit(plan: FormatPlan, size: SizeTarget | None) -> fits.Fit | None:
    """Set up the choice of schemes for a size; None if the schemes were given.

    Raises:
        RequestError: if no choice has the size.
        UnsupportedError: if the format does not hold several schemes.
    """
    if size is None:
        return None
    codes = plan.target.codes
    assert codes is not None
    return fits.Fit(
        source=plan.source,
        target=size,
        codes=codes,
        method=plan.target.method,
        settled=_list_settled(plan),
        total_bytes=plan.count_bytes,
        unsolved=plan.scheme_map.reasons,
    )


def choose_schemes(
    dst: Path,
    fit: fits.Fit,
    settings: GptqSettings,
    drawn: Calibration,
    *,
    resume: bool,
    survey: Survey | None,
    group: ProcessGroup,
    progress: Progress,
) -> bit_allocations.Allocation:
    """Choose the schemes on samples; a run that resumes keeps the choice of the interrupted one.

    Args:
        survey: how samples reach the linears of a model that transformers runs; None for others.

    Raises `QuantkitError` as `quantize` does.
    """
    earlier_choice: bit_allocations.Allocation | None = None
    if resume:
        earlier_choice = _read_interrupted_choice(dst, fit.target, drawn)
    # Only rank 0 writes, so that only its machine is sure to have the interrupted output.
    allocation = group.broadcast_from_rank0(earlier_choice)
    # All processes share the computation of losses.
    if allocation is None:
        model = prepare_model(fit.source, survey, drawn.tokens.shape[1], settings.device)
        allocation = fit.choose_allocation(
            drawn.tokens,
            model.passage,
            model.groups,
            memory_bytes=settings.memory_bytes,
            group=group,
            progress=progress,
        )
    return allocation


def parse_allocation(record: Any, size: SizeTarget) -> bit_allocations.Allocation | None:
    """Parse a choice of schemes in a journal or a manifest; None if it is for another size, or has
    another form.
    """
    try:
        allocation = bit_allocations.Allocation.from_json(record)
    except (AttributeError, LookupError, TypeError):
        return None
    if allocation.target == size:
        return allocation
    return None


def _read_interrupted_choice(
    dst: Path, size: SizeTarget, drawn: Calibration
) -> bit_allocations.Allocation | None:
    """Read the choice of an interrupted run for the same size and samples; the writer compares all
    other options.
    """
    fingerprint = read_interrupted_fingerprint(dst)
    if fingerprint.get(option_key("calibration")) != drawn.to_json():
        return None
    return parse_allocation(fingerprint.get(option_key(BIT_ALLOCATION)), size)


def _list_settled(plan: FormatPlan) -> dict[str, QuantScheme | None]:
    """List the modules whose schemes are not chosen: named ones, and linears of blocks that keep
    their floats.
    """
    config = plan.source.config
    schemes = plan.scheme_map.schemes
    free: set[str] = set()
    for unit in bit_allocations.units(config, raw=plan.source.extra_config):
        free.update(unit.modules)
    settled: dict[str, QuantScheme | None] = {}
    for module, scheme in schemes.items():
        if module not in free:
            settled[module] = scheme
    # Before the choice, linears without a scheme are those that the recipe keeps.
    for module in linear_columns(config):
        is_kept = module in free and module not in schemes
        if is_kept and module not in plan.scheme_map.reasons:
            settled[module] = None
    return settled
