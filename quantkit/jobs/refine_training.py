"""The training that `refine` does: in a folder next to the output, from which an interrupted one continues."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.data import Calibration
from quantkit.errors import QualityError
from quantkit.formats import manifest
from quantkit.formats.output.staging import SCRATCH, Staging, mark_kept, partial_folder
from quantkit.jobs.quantize_work import machine
from quantkit.jobs.refine_estimate import estimate_refinement
from quantkit.jobs.refine_plan import Refinement
from quantkit.progress import Progress
from quantkit.training.state import SavedTraining
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Samples, State, Training

_TRAINING = ".training"
"""What the name of the folder with the state of training has after that of the output."""


@contextlib.contextmanager
def training_of(
    planned: Refinement, drawn: Calibration, output: Path, *, resume: bool, progress: Progress
) -> Iterator[tuple[TrainedCheckpoint, State]]:
    """Train, or continue an interrupted training: the model with the lowest KL on the samples that are held back. The
    state of training is removed if the body succeeds.

    Raises:
        QualityError: if no step has a lower KL than the model before.
    """
    scratch = estimate_refinement(planned).scratch_bytes
    staging = Staging(output.with_name(output.name + _TRAINING), _fingerprint(planned, drawn), scratch, resume=resume)
    memory, useful = planned.settings.memory_bytes, True
    targets, offsets = (
        ActivationStore(staging.path / f"{SCRATCH}-{name}", memory // 4) for name in ("targets", "offsets")
    )
    try:
        model = TrainedCheckpoint(planned.quantized, planned.names, offsets, memory // 2)
        model.begin(planned.reference)
        samples = Samples(drawn.tokens, targets)
        samples.compute_targets(planned.reference, progress)
        training = Training(
            model, planned.reference, samples, epochs=planned.options.num_epochs, seed=planned.settings.seed,
            device=planned.settings.device,
        )  # fmt: skip
        saved = SavedTraining(training, staging)
        saved.restore()
        state = training.run(evaluated=saved.evaluated, stepped=saved.stepped, progress=progress)
        useful = _is_better(state)
        if not useful:
            raise _not_better(state, planned.quantized.path)
        saved.restore_best()
        yield model, state
    except BaseException as error:
        if useful and staging.entries:
            mark_kept(error, staging.path)
            staging.close()
        else:
            staging.discard()
        raise
    finally:
        targets.close()
        offsets.close()
    staging.discard()


def refined_state(output: Path) -> Path:
    """Where the state of the training for an output is, from which `resume` goes on."""
    return partial_folder(output.with_name(output.name + _TRAINING))


def _is_better(state: State) -> bool:
    """Whether a step has a lower KL than the model before."""
    return state.best.step > 0 and state.best.held_back < state.curve[0].held_back


def _not_better(state: State, path: Path) -> QualityError:
    start, lowest = state.curve[0].held_back, min((one.held_back for one in state.curve[1:]), default=math.nan)
    return QualityError(
        "training did not bring the model closer to its float model", path=path,
        found=f"a KL of {lowest:.4g} on text that was held back, {lowest / start - 1:+.1%}",
        expected=f"less than {start:.4g}", hint="use more samples, or take the quantized model as it is",
    )  # fmt: skip


def _fingerprint(planned: Refinement, drawn: Calibration) -> dict[str, object]:
    """What an interrupted training must have in common with the one that continues it."""
    return {
        "job": "refine", **planned.options.recorded(), "source": manifest.identity(planned.plan.work.source.files()),
        "against": manifest.identity(planned.reference.files()), "samples": drawn.fingerprint(),
        **machine(planned.settings.device),
    }  # fmt: skip
