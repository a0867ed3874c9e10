"""Refine a quantized model: train its scales against the logits of the float model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

from quantkit.base.arguments import require_instance
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import accept_fields_of
from quantkit.base.progress import Progress, in_phase, skip_repeated_reports
from quantkit.calibration.data import Calibration
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.distributed.mesh import ALONE, Mesh
from quantkit.distributed.shard import require_same_checkpoint, require_shareable
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.container import StoredCheckpoint, weight_size
from quantkit.formats.output.staging import Staging
from quantkit.jobs.output.estimate import Estimate
from quantkit.jobs.output.writer import NOT_CHECKED, Writer, open_writer, start_source_hashes
from quantkit.jobs.refine.estimate import estimate_refinement
from quantkit.jobs.refine.options import RefineOptions
from quantkit.jobs.refine.plan import Refinement, plan_refinement
from quantkit.jobs.refine.result import RefineResult
from quantkit.jobs.refine.rewritten import (
    base_hashes,
    describe_quantization,
    put_all,
    require_written,
)
from quantkit.jobs.refine.training import training_of
from quantkit.quality.changed_tensors import (
    REFINED,
    Change,
    find_changes,
    merge_changes,
    read_changes,
)
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.gate import require_passed, run_gate
from quantkit.quality.gate_result import Gate
from quantkit.quality.manifest_check import read_input_roundings
from quantkit.quality.source_check import SOURCE_CHECK, SourceCheck, check_source
from quantkit.tensors.qtensor import Solver
from quantkit.training.delta import delta_bytes
from quantkit.training.trained import TrainedCheckpoint, measure_weight_error
from quantkit.training.training import HELD_BACK, State, held_back
from quantkit.xla import require_packages
from quantkit.xla.split import require_trainable


@dataclass(frozen=True)
class RefineArguments(RefineOptions):
    """The arguments of `refine`: the options, who takes part, and where progress is reported.

    Attributes:
        group: the processes of the mesh. Each makes the same call; rank 0 writes, and the others
            wait for it.
        on_estimate: called with the estimate of memory, disk and time before anything takes long,
            except with `backend`.
        progress: as in `convert`.
    """

    _: KW_ONLY
    group: ProcessGroup = SINGLE
    on_estimate: Callable[[Estimate], None] | None = None
    progress: Progress | None = None


@accept_fields_of(RefineArguments)
def refine(options: RefineArguments) -> RefineResult:
    """Train the scales of a quantized model against the logits of the float model it was made from.

    The result has the same format and size, and with `train_codes` unset the same codes. It is kept
    if its KL from the float model is lower on text that was held back.

    Args:

    Returns:
        What was written, the KL before and after, and what the gate measured.

    Raises:
        RequestError: for an option that is invalid, or models that do not belong together.
        CheckpointError, UnsupportedError: if a model is damaged, or has no scales that can be
            trained.
        DestinationError, ResumeError: as in `quantize`.
        QualityError: if the result is not better, or too far from the float model.
            After any of them there is no output; what the last one refuses can be kept with
            `accept_quality_loss` and `resume`.

    Example:
        >>> quantkit.refine("model-int4", "model-int4-refined", against="model").lines()
    """
    began = time.monotonic()
    require_instance("group", options.group, ProcessGroup, "a ProcessGroup")
    group = options.group
    progress = skip_repeated_reports(options.progress)
    planned = plan_refinement(options)
    mesh = _mesh(planned, group)
    if options.on_estimate is not None and group.is_rank0 and options.backend is None:
        options.on_estimate(estimate_refinement(planned, (mesh.data.size, mesh.model.size)))
    drawn = planned.settings.draw(planned.reference, group=group, progress=progress)
    # The check runs a whole model; one process is enough.
    if group.is_rank0:
        check = check_before_training(planned, progress)
    else:
        check = None
    training = training_of(
        planned, drawn, options.output, resume=options.resume, progress=progress, mesh=mesh
    )
    with training as (trained, state):
        if group.is_rank0:
            if options.delta is None:
                write = _write_model
            else:
                write = _write_delta
            result = write(planned, trained, state, drawn, began, check, progress)
    if not group.is_rank0:
        written_result: RefineResult = group.receive_from_rank0()
        return written_result
    group.send_from_rank0(result)
    return result


def _mesh(planned: Refinement, group: ProcessGroup) -> Mesh:
    """Arrange the processes in the shape that was requested.

    Raises:
        RequestError: if it has another number of them, or they cannot share the model.
        GroupError: if their models differ.
        UnsupportedError: for a model that XLA does not train.
    """
    options = planned.options
    if not planned.reference.config.runnable:
        _require_for_transformers(planned, group)
        return ALONE
    if options.backend is not None:
        if group.size > 1:
            raise RequestError(
                Message(Option("backend", value="xla"), " requires a single process"),
                found=f"{group.size} processes",
                hint="run it without torchrun",
            )
        # The axis of the samples: each part gets as many of a step's samples.
        parts = (options.mesh_shape or (1, 1))[0]
        if options.step_samples % parts:
            raise RequestError(
                Message(
                    Option("batch"),
                    " is not divisible by the data-parallel size of ",
                    Option("mesh"),
                ),
                found=options.step_samples,
                expected=f"a multiple of {parts}",
            )
        require_trainable(planned.quantized)
        require_packages()
        return ALONE
    # By default all processes share the model.
    shape = options.mesh_shape or (1, group.size)
    data, model = shape
    if data * model != group.size:
        raise RequestError(
            Message(Option("mesh"), " does not match the number of processes"),
            found=f"{options.mesh} for {group.size}",
            hint="start this many processes with torchrun",
        )
    samples = planned.settings.samples
    most = min(options.step_samples, samples - held_back(samples))
    # A process without samples would have nothing to do in a step.
    if data > most:
        problem = Message(Option("mesh"), " has a data-parallel size above the samples per step")
        raise RequestError(problem, found=data, expected=f"at most {most}")
    if group.size > 1 and planned.names.codes:
        raise RequestError(
            Message(Option("train_codes"), " requires a single process"),
            found=f"{group.size} processes",
            hint=Message("run it without torchrun, or leave ", Option("train_codes"), " out"),
        )
    mesh = Mesh.of(group, shape)
    # Machines may have other copies of the models.
    for checkpoint in (planned.plan.work.source, planned.reference):
        require_same_checkpoint(checkpoint, group)
        require_shareable(checkpoint, mesh.model)
    return mesh


def _require_for_transformers(planned: Refinement, group: ProcessGroup) -> None:
    """Raise a `RequestError` for what training does not do with a model that transformers runs."""
    options = planned.options
    run_by = planned.reference.config.run_by
    if options.backend is not None:
        raise RequestError(
            Message(Option("backend", value=options.backend), f" does not train it: {run_by} runs"),
            path=planned.reference.path,
            found=planned.reference.config.architecture,
            hint=Message("leave ", Option("backend"), " out"),
        )
    if group.size > 1 or options.mesh_shape not in (None, (1, 1)):
        raise RequestError(
            f"refining a model that {run_by} runs requires a single process",
            path=planned.reference.path,
            found=f"{max(group.size, math.prod(options.mesh_shape or (1,)))} processes",
            hint=Message("run it without torchrun and without ", Option("mesh")),
        )


def _write_delta(
    planned: Refinement,
    trained: TrainedCheckpoint,
    state: State,
    drawn: Calibration,
    began: float,
    check: object,
    progress: Progress,
) -> RefineResult:
    """Write the changed tensors to the file of a delta."""
    source = planned.plan.work.source
    output = planned.options.output
    changes = describe_changes(planned, trained, state, drawn)
    # No model is written: the gate measures the trained values in memory.
    gate = check_result(planned, trained, changes.records, progress)
    details = {**changes.details, **_describe_quality(planned, gate, changes.records)}
    content = delta_bytes(planned.quantized, trained, changes.tensors, base_hashes(source), details)
    # A partial file that is renamed: a killed job leaves no delta that looks complete.
    staging = Staging(output, {"job": "refine"}, len(content), resume=False, files=[output.name])
    try:
        staging.folder.write(output.name, content)
        staging.commit([output.name])
    except BaseException:
        staging.discard()
        raise
    return RefineResult(
        path=output,
        weight_bytes=len(content),
        bits_per_weight=None,
        curve=state.curve,
        changed=len(changes.tensors),
        quality=gate,
        seconds=time.monotonic() - began,
        notes=planned.plan.notes,
        manifest=details,
        is_delta=True,
    )


def _write_model(
    planned: Refinement,
    trained: TrainedCheckpoint,
    state: State,
    drawn: Calibration,
    began: float,
    check: object,
    progress: Progress,
) -> RefineResult:
    """Write the refined model, and compare it with the float model."""
    plan = planned.plan
    options = planned.options
    work = replace(plan.work, job="refine", options={**plan.work.options, **options.to_record()})
    changes = describe_changes(planned, trained, state, drawn)
    with open_writer(
        work, plan.dst, resume=options.resume, source_check=False, progress=progress
    ) as writer:
        result = put_trained(writer, planned, trained, changes.records)
        gate = check_result(planned, result, changes.records, progress)
        size = weight_size(result)
        details = {
            # The manifest still tells how the model was quantized.
            **describe_quantization(plan.work.source, result, changes.tensors),
            **changes.details,
            **_describe_quality(planned, gate, changes.records),
            "source_check": check,
        }
        manifest = writer.commit(details)
    notes = [*plan.notes, *writer.notes]
    return RefineResult(
        plan.dst,
        *size,
        state.curve,
        len(changes.tensors),
        gate,
        time.monotonic() - began,
        notes,
        manifest,
    )


def _describe_quality(
    planned: Refinement, gate: Gate, records: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Write the manifest's entries on the gate, and on each quantized module."""
    modules: dict[str, dict[str, object]] = {}
    for module, scheme in schemes(planned.quantized).items():
        modules[module] = {"scheme": str(scheme), **records.get(f"{module}.weight", {})}
    return {
        "quality": gate.to_json(accepted=planned.options.accept_quality_loss),
        "modules": modules,
    }


def check_before_training(planned: Refinement, progress: Progress) -> object:
    """Check the quantized model on a sample text before it is trained, and write the manifest's
    entry on this check. Raises `CheckpointError` or `NonFiniteError` as `check_source` does.
    """
    if not planned.options.source_check:
        return NOT_CHECKED
    observed = in_phase(progress, SOURCE_CHECK)
    source = check_source(planned.plan.work.source, allow_nonfinite=False, progress=observed)
    if isinstance(source, SourceCheck):
        return asdict(source)
    return f"not measured: {source}"


def check_result(
    planned: Refinement,
    result: Checkpoint,
    records: Mapping[str, Mapping[str, Any]],
    progress: Progress,
) -> Gate:
    """Run the gate on a result.

    Raises `QualityError` if it is too far from the float model.
    """
    # A model whose readers round the inputs of linears is measured with rounded inputs.
    manifest = manifest_or_empty(planned.quantized.path)
    inputs = read_input_roundings(manifest, result, planned.quantized.path)
    gate = run_gate(
        planned.reference, result, records, inputs=inputs, progress=in_phase(progress, "gate")
    )
    if not planned.options.accept_quality_loss:
        remedy = Message(
            "refine with more text or ",
            Option("train_codes", value=True),
            ", or keep it with ",
            Option("accept_quality_loss", value=True),
        )
        require_passed(gate, planned.reference, result, planned.plan.dst, remedy=remedy)
    return gate


@dataclass(frozen=True)
class Changes:
    """What training has changed.

    Attributes:
        tensors: the changed ones, by name.
        records: the manifest's entries on quantized weights, by name.
        details: the manifest's entry on the refinement.
    """

    tensors: Mapping[str, Change]
    records: dict[str, dict[str, object]]
    details: dict[str, Any]


def describe_changes(
    planned: Refinement, trained: TrainedCheckpoint, state: State, drawn: Calibration
) -> Changes:
    """Compare a trained model with the quantized one, and describe the changes for the manifest."""
    changed = find_changes(planned.quantized, trained, sorted(trained.factors))
    return Changes(
        tensors=changed,
        records=_records_of(planned, trained, changed),
        details=_describe_refinement(planned, changed, state, drawn),
    )


def put_trained(
    writer: Writer,
    planned: Refinement,
    trained: TrainedCheckpoint,
    records: Mapping[str, Mapping[str, object]],
) -> StoredCheckpoint:
    """Write all tensors of a trained model, and open the result.

    Raises:
        NonFiniteError: if a scale is NaN or Inf.
        QuantkitError: if a tensor differs when it is read back.
    """
    result = put_all(writer, trained, records)
    if planned.names.codes:
        require_written(trained, result, None)
    else:
        # Trained scales alone must leave the codes of the quantized model as they are.
        require_written(trained, result, planned.quantized)
    return result


def _records_of(
    planned: Refinement, trained: TrainedCheckpoint, changed: Mapping[str, Change]
) -> dict[str, dict[str, object]]:
    """Write the records of weights for the manifest, with the error of each trained weight."""
    if planned.names.codes:
        solver = Solver.CODES_TRAINED
    else:
        solver = Solver.SCALES_TRAINED
    records: dict[str, dict[str, object]] = {}
    for name in schemes(planned.quantized):
        weight = f"{name}.weight"
        if weight not in changed:
            records[weight] = {"solver": Solver.CARRIED}
            continue
        error = measure_weight_error(trained.build_weight(weight), planned.reference.load(weight))
        records[weight] = {"solver": solver}
        if error is not None:
            records[weight]["relative_error"] = float(f"{error:.4g}")
    return records


def _describe_refinement(
    planned: Refinement, changed: Mapping[str, Change], state: State, drawn: Calibration
) -> dict[str, Any]:
    """Write the manifest's entry on a refinement, with the tensors that an earlier one has
    changed.
    """
    reference = planned.reference
    # `verify` compares by their hashes all tensors that any refinement has changed.
    tensors = merge_changes(read_changes(planned.quantized.path), changed)
    return {
        REFINED: {
            **planned.options.to_record(),
            "against": {
                "format": reference.format,
                "sha256": start_source_hashes(reference).result(),
            },
            "calibration": drawn.to_json(),
            "held_back": f"1 of {HELD_BACK} samples",
            "curve": [asdict(evaluation) for evaluation in state.curve],
            "kept_step": state.best.step,
            "tensors": {name: asdict(tensor) for name, tensor in tensors.items()},
        }
    }
