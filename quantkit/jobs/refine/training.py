"""Train for `refine`, with the state in a folder next to the output, from which an interrupted
training continues.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from quantkit.base.progress import Progress
from quantkit.calibration.data import Calibration
from quantkit.distributed.mesh import ALONE, Mesh
from quantkit.errors import NoImprovementError
from quantkit.formats import manifest
from quantkit.formats.output.staging import (
    SCRATCH,
    Staging,
    name_partial_folder,
    note_partial_output,
)
from quantkit.jobs.output.machine import machine
from quantkit.jobs.refine.estimate import estimate_refinement
from quantkit.jobs.refine.plan import Refinement
from quantkit.passes.activation_store import ActivationStore
from quantkit.training.blockwise import float_states
from quantkit.training.decoder import make_decoder_engine
from quantkit.training.optimizer import Schedule
from quantkit.training.state import SavedTraining
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Engine, Samples, State, Training

_TRAINING = ".training"
"""The end of the name of the folder with the state of training, after the name of the output."""


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
    """Train, or continue an interrupted training, and yield the model with the lowest KL on the
    samples that are held back. The state of training is removed if the body succeeds.

    Of several processes, rank 0 keeps the state and yields that model; the others yield the one
    after the last step.

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
        # Wait until rank 0 has removed the files of an earlier run: stores write to that folder.
        mesh.world.receive_from_rank0()
    memory = planned.settings.memory_bytes
    rank = mesh.world.rank
    # A quarter of the memory for targets and for offsets, and a half for codes.
    scratch_folder = name_partial_folder(folder)
    targets = ActivationStore(scratch_folder / f"{SCRATCH}-targets-{rank}", memory // 4)
    offsets = ActivationStore(scratch_folder / f"{SCRATCH}-offsets-{rank}", memory // 4)
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
        if saved is None:
            state = training.run(evaluated=_do_nothing, stepped=_do_nothing, progress=progress)
        else:
            state = training.run(
                evaluated=saved.save_after_evaluation,
                stepped=saved.save_if_due,
                progress=progress,
            )
        useful = _is_better(state)
        if not useful:
            raise _build_no_improvement_error(state, planned.quantized.path)
        # The model has the values after the last step; the best ones are on disk.
        if saved is not None:
            saved.restore_best()
        yield model, state
    # Also Ctrl-C: the saved state is kept, unless continuing from it cannot help.
    except BaseException as error:
        if staging is None:
            pass
        elif useful and staging.entries:
            note_partial_output(error, staging.path)
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
    """Run the float model on the samples for the targets, and build the engine that trains."""
    schedule = Schedule(planned.options.num_epochs * samples.steps)
    if not planned.reference.config.runnable:
        # Imports transformers, which is optional.
        from quantkit.training.by_transformers import make_transformers_engine

        samples.compute_targets(float_states(planned.reference, samples.batch), progress)
        return make_transformers_engine(model, planned.reference, samples, schedule)
    if planned.options.backend is None:
        samples.compute_targets(float_states(planned.reference, samples.batch, mesh), progress)
        device = mesh.world.device or planned.settings.device
        return make_decoder_engine(model, planned.reference, samples, schedule, device, mesh)
    # Importing torchax changes torch.
    from quantkit.xla.training import engine as xla

    devices = xla.make_mesh(planned.options.mesh_shape)
    samples.compute_targets(
        xla.make_hidden_function(planned.reference, devices, samples.batch), progress
    )
    return xla.OnDevices(model, planned.quantized, planned.reference, samples, schedule, devices)


def _do_nothing(state: State) -> None:
    """Do nothing: only rank 0 saves the state."""


def _is_better(state: State) -> bool:
    """Tell whether a step has a lower KL than the model before training."""
    return state.best.step > 0 and state.best.held_back < state.curve[0].held_back


def _build_no_improvement_error(state: State, path: Path) -> NoImprovementError:
    """Build the error for a training without a step of lower KL."""
    start = state.curve[0].held_back
    lowest = min((evaluation.held_back for evaluation in state.curve[1:]), default=math.nan)
    return NoImprovementError(
        "training did not bring the model closer to its float model",
        path=path,
        found=f"a KL of {lowest:.4g} on held-out text, {lowest / start - 1:+.1%}",
        expected=f"less than {start:.4g}",
        hint="use more samples, or keep the quantized model unchanged",
    )


def _fingerprint(planned: Refinement, drawn: Calibration) -> dict[str, object]:
    """Collect the facts that an interrupted training must share with the one that continues it."""
    return {
        "job": "refine",
        **planned.options.to_record(),
        "source": manifest.identity(planned.plan.work.source.files()),
        "against": manifest.identity(planned.reference.files()),
        "samples": drawn.fingerprint(),
        # Sums of floats depend on the machine: a continued training must give the same bytes.
        **machine(planned.settings.device),
    }
