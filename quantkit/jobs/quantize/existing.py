"""Read the result of a quantization that exists, with `if_exists="skip"`, and compare it with the
one that the job would write.
"""

from __future__ import annotations

import time
from dataclasses import replace

from quantkit.base.progress import Progress
from quantkit.bit_allocation.size_target import SizeTarget
from quantkit.calibration.data import Calibration
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.container import weight_size
from quantkit.jobs.output.existing import Existing, require_folders
from quantkit.jobs.output.result import QuantizeResult, join_results
from quantkit.jobs.quantize.card import model_card_files
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.jobs.quantize.measured import Measured
from quantkit.jobs.quantize.plan import Plan
from quantkit.jobs.quantize.size_fit import BIT_ALLOCATION, parse_allocation
from quantkit.jobs.quantize.verification import collect_result, describe_work, open_result
from quantkit.jobs.quantize.work import settle_schemes_and_samples, work_of
from quantkit.quality.gate_result import Gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly


def read_existing_result(
    plan: Plan,
    size: SizeTarget | None,
    group: ProcessGroup,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Read the result that exists, and send it to the other processes.

    Args:
        size: what the schemes are chosen for; None if they were given.

    Raises:
        DestinationError: if it is not the one that this job would write.
    """
    formats = plan.formats
    require_folders(formats.dst, formats.by_folder)
    existing_by_folder = {}
    for folder, format_plan in formats.by_folder.items():
        existing_by_folder[folder] = Existing.read(format_plan.dst, progress)
    if size is not None:
        # A size goes with one format.
        existing = existing_by_folder[""]
        allocation = parse_allocation(existing.manifest.get(BIT_ALLOCATION), size)
        if allocation is None:
            raise existing.differs(BIT_ALLOCATION)
        formats = formats.change_each(lambda plan: plan.with_allocation(allocation))
    # The options are compared first, which is fast: drawing samples may run the model.
    for folder, format_plan in formats.by_folder.items():
        expected = {"job": "quantize", **work_of(plan, format_plan, None, group).options}
        existing = existing_by_folder[folder]
        existing.require({key: existing.manifest.get(key) for key in expected}, expected)
    # The other processes only wait for the result, so that rank 0 draws all samples.
    formats, samples = settle_schemes_and_samples(
        formats, plan.solver, None, resume=False, group=SINGLE, progress=progress
    )
    plan = replace(plan, formats=formats)
    drawn = None
    if samples is not None:
        drawn = samples.drawn
    results = {}
    # The card of each format names its own options.
    for folder, format_plan in formats.by_folder.items():
        results[folder] = _read_existing_format(
            plan, format_plan, drawn, existing_by_folder[folder], group, began, progress
        )
    result = join_results(results, formats.dst, time.monotonic() - began)
    group.send_from_rank0(result)
    return result


def _read_existing_format(
    plan: Plan,
    format_plan: FormatPlan,
    drawn: Calibration | None,
    existing: Existing,
    group: ProcessGroup,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Read the result in one format; see `read_existing_result`."""
    checks = plan.checks
    work = work_of(plan, format_plan, drawn, group)
    existing.require_inputs(
        work, describe_work(work), source_check=checks.source_check, progress=progress
    )
    accepted = checks.accept_quality_loss
    certificate = None
    text = checks.certified
    gate = existing.read_passed_check(
        Gate if format_plan.source.config.measurable else WeightsOnly, "quality", accepted=accepted
    )
    # A certificate that is missing, or was not requested, is a difference too.
    if ("positions" in existing.manifest) != (text is not None):
        raise existing.differs("certify_positions")
    if text is not None:
        text_facts = {"text": text.name, "sha256": text.sha256, "asked": text.requested}
        certificate = existing.read_passed_check(
            PositionCertificate, "positions", accepted=accepted, **text_facts
        )
    opened, problem = open_result(format_plan, existing.open_weights(work))
    measured = Measured(*weight_size(opened), gate, certificate, problem)
    existing.require_files(work, model_card_files(plan, format_plan, drawn, measured))
    return collect_result(
        plan, format_plan, drawn, measured, began, existing.manifest, skipped=True
    )
