"""The training that `refine` does: in a folder next to the output, from which an interrupted one
continues.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from quantkit.base.progress import Progress
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.data import Calibration
from quantkit.distributed.mesh import ALONE, Mesh
from quantkit.errors import NoImprovementError
from quantkit.formats import manifest
from quantkit.formats.output.staging import SCRATCH, Staging, mark_kept, partial_folder
from quantkit.jobs.output.machine import machine
from quantkit.jobs.refine.estimate import estimate_refinement
from quantkit.jobs.refine.plan import Refinement
from quantkit.training.blockwise import Blockwise, float_states
from quantkit.training.optimizer import Schedule
from quantkit.training.state import SavedTraining
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Engine, Samples, State, Training

_TRAINING = ".training"
"""What the name of the folder with the state of training has after that of the output."""


@contextlib.contextmanager
def training_of(
    planned: Refinement,
    drawn: Calibration,
    output: Path,
    *,
    resume: bool,
    progress: Progress,
    mesh: Mesh = ALONE,
) -> Iterator[tuple[TrainedCheckpoint, State]]:
    """Train, or continue an interrupted training: the model with the lowest KL on the samples that
    are held back. The state of training is removed if the body succeeds.

    Of several processes, rank 0 keeps the state and has that model; the others have the one after
    the last step.

    Raises:
        NoImprovementError: if no step has a lower KL than the model before.
    """
    scratch = estimate_refinement(planned).scratch_bytes
    folder = output.with_name(output.name + _TRAINING)
    staging = None
    useful = True
    if mesh.world.is_rank0:
        staging = Staging(folder, _fingerprint(planned, drawn), scratch, resume=resume)
        mesh.world.send_from_rank0(None)
    else:
        # When it has removed what an earlier run has left.
        mesh.world.receive_from_rank0()
    memory = planned.settings.memory_bytes
    rank = mesh.world.rank
    targets, offsets = (
        ActivationStore(partial_folder(folder) / f"{SCRATCH}-{name}-{rank}", memory // 4)
        for name in ("targets", "offsets")
    )
    try:
        model = TrainedCheckpoint(planned.quantized, planned.names, offsets, memory // 2)
        model.begin(planned.reference)
        samples = Samples(drawn.tokens, targets, planned.options.step_samples)
        engine = _engine(planned, model, samples, mesh, progress)
        training = Training(
            model, samples, engine, epochs=planned.options.num_epochs, seed=planned.settings.seed
        )
        if staging is None:
            saved = None
        else:
            saved = SavedTraining(training, staging)
        if saved is not None:
            saved.restore()
        training.share_state(mesh.world)
        state = training.run(
            evaluated=_nothing if saved is None else saved.save_after_evaluation,
            stepped=_nothing if saved is None else saved.save_if_due,
            progress=progress,
        )
        useful = _is_better(state)
        if not useful:
            raise _not_better(state, planned.quantized.path)
        if saved is not None:
            saved.restore_best()
        yield model, state
    except BaseException as error:
        if staging is None:
            pass
        elif useful and staging.entries:
            mark_kept(error, staging.path)
            staging.close()
        else:
            staging.discard()
        raise
    finally:
        targets.close()
        offsets.close()
    if staging is not None:
        staging.discard()


def _engine(
    planned: Refinement, model: TrainedCheckpoint, samples: Samples, mesh: Mesh, progress: Progress
) -> Engine:
    """Return what trains, once the float model has given its states for the samples."""
    schedule = Schedule(planned.options.num_epochs * samples.steps)
    if planned.options.backend is None:
        samples.compute_targets(float_states(planned.reference, samples.batch, mesh), progress)
        device = mesh.world.device or planned.settings.device
        return Blockwise(model, planned.reference, samples, schedule, device, mesh)
    from quantkit.xla.training import engine as xla  # it changes torch

    devices = xla.mesh_of(planned.options.mesh_shape)
    samples.compute_targets(xla.float_states(planned.reference, devices, samples.batch), progress)
    return xla.OnDevices(model, planned.quantized, planned.reference, samples, schedule, devices)


def _nothing(state: State) -> None:
    """What a process does that keeps no state."""


def _is_better(state: State) -> bool:
    """Return whether a step has a lower KL than the model before."""
    return state.best.step > 0 and state.best.held_back < state.curve[0].held_back


def _not_better(state: State, path: Path) -> NoImprovementError:
    start = state.curve[0].held_back
    lowest = min((one.held_back for one in state.curve[1:]), default=math.nan)
    return NoImprovementError(
        "training did not bring the model closer to its float model",
        path=path,
        found=f"a KL of {lowest:.4g} on text that was held back, {lowest / start - 1:+.1%}",
        expected=f"less than {start:.4g}",
        hint="use more samples, or take the quantized model as it is",
    )


def _fingerprint(planned: Refinement, drawn: Calibration) -> dict[str, object]:
    """Return what an interrupted training must have in common with the one that continues it."""
    return {
        "job": "refine",
        **planned.options.to_record(),
        "source": manifest.identity(planned.plan.work.source.files()),
        "against": manifest.identity(planned.reference.files()),
        "samples": drawn.fingerprint(),
        **machine(planned.settings.device),
    }
