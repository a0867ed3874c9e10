"""Train the scales of a quantized model, and its codes, against the logits of the float model.

The loss is KL(float || quantized) over the whole vocabulary. The float model's last hidden states
are computed once and kept as float32, so the loss is exact. A part of the samples is held back: the
result is the values with the lowest KL on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quantkit.base.progress import Progress, in_phase, silent
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.passes.activation_store import ActivationStore
from quantkit.quality.measures import part_of
from quantkit.training.trained import TrainedCheckpoint

HELD_BACK = 8
"""One of this many samples is held back."""
TARGETS = "float model"
TRAINING = "training"
"""The phases of progress."""
# Tokens that the float model runs at a time, because their states are in memory.
_TOKENS_AT_ONCE = 1 << 15
# Of the KL in progress.
_DIGITS = 4


Hidden = Callable[[Tensor, Progress], Tensor]
"""The float model's hidden states after its final norm, [B, T, D] float32 on the CPU, for tokens
[B, T].
"""


@dataclass(frozen=True)
class Evaluation:
    """The mean KL from the float model, per token in nats, after a number of steps.

    Attributes:
        training: over the samples of the steps since the last evaluation; None before the first
            step.
        held_back: over the samples that are held back.
    """

    step: int
    held_back: float
    training: float | None = None


@dataclass
class State:
    """How far training is.

    Attributes:
        step: the number of completed steps.
        sum, count: of the losses since the last evaluation.
        curve: the evaluations so far.
    """

    step: int = 0
    sum: float = 0.0
    count: int = 0
    curve: list[Evaluation] = field(default_factory=list)

    @property
    def best(self) -> Evaluation:
        """Find the evaluation with the lowest KL on the samples that are held back; the first of
        equal ones.
        """
        return min(self.curve, key=lambda evaluation: evaluation.held_back)


def held_back(samples: int) -> int:
    """Count how many of a number of samples are held back."""
    return max(1, samples // HELD_BACK)


class Samples:
    """Tokens [N, T] for training, and those that are held back, with the float model's hidden
    states for each; a step has `batch` of them.
    """

    def __init__(self, tokens: Tensor, store: ActivationStore, batch: int) -> None:
        self.tokens = tokens
        self.batch = batch
        self._store = store
        self.held_back = held_back(len(tokens))
        self.training = len(tokens) - self.held_back

    def compute_targets(self, hidden: Hidden, progress: Progress) -> None:
        """Run the float model, and keep its hidden states before the head."""
        step = max(1, _TOKENS_AT_ONCE // self.tokens.shape[1])
        parts = torch.split(torch.arange(len(self.tokens)), step)
        for index, part in enumerate(parts):
            part_progress = part_of(in_phase(progress, TARGETS), index, len(parts))
            states = hidden(self.tokens[part], part_progress)
            for number, sample_states in zip(part.tolist(), states, strict=True):
                # A copy: a view would keep the states of all samples of the part in memory.
                self._store.put(number, sample_states.contiguous().clone())

    def targets(self, numbers: Tensor) -> Tensor:
        """Load the float model's hidden states [B, T, D] of some samples."""
        return torch.stack([self._store.get(number) for number in numbers.tolist()])

    def order(self, epoch: int, seed: int) -> Tensor:
        """Shuffle the samples of an epoch into steps, [S, `batch`]; samples that do not fill a
        batch are left out.
        """
        # The order depends only on seed and epoch, so a resumed run continues with the same
        # samples. Epochs of different seeds differ too.
        generator = torch.Generator().manual_seed((seed << 16) + epoch)
        shuffled = torch.randperm(self.training, generator=generator)
        size = min(self.batch, self.training)
        return shuffled[: len(shuffled) // size * size].view(-1, size)

    @property
    def steps(self) -> int:
        """Count the steps of an epoch."""
        return len(self.order(0, 0))


class Engine(Protocol):
    """Computes the steps of a training.

    Attributes:
        moments: running means of gradients and their squares, by tensor; see `Optimizer`.
    """

    moments: dict[str, Tensor]

    def step(self, step: int, numbers: Tensor) -> float:
        """Train on some samples, and return their mean KL of a token before the step."""
        ...

    def loss(self, numbers: Tensor) -> float:
        """Compute the mean KL of a token of some samples."""
        ...

    def fetch(self) -> None:
        """Copy the engine's current values to the model's factors and the moments."""
        ...

    def put(self) -> None:
        """Continue from the values of the model's factors and the moments."""
        ...


class Training:
    """Trains a model for some epochs. A process may end after any step, and another one continues
    from it.

    Attributes:
        steps: of all epochs.
    """

    def __init__(
        self, model: TrainedCheckpoint, samples: Samples, engine: Engine, *, epochs: int, seed: int
    ) -> None:
        self.model = model
        self.samples = samples
        self.engine = engine
        self._seed = seed
        self.steps = epochs * samples.steps
        self.state = State()

    def share_state(self, group: ProcessGroup) -> None:
        """Copy the state of the first process to all processes."""
        self.state = group.broadcast_from_rank0(self.state)
        for value in (*self.model.factors.values(), *self.engine.moments.values()):
            group.copy_from_rank0_(value)
        self.engine.put()

    def run(
        self,
        *,
        evaluated: Callable[[State], None],
        stepped: Callable[[State], None],
        progress: Progress = silent,
    ) -> State:
        """Train to the end. Raises `NonFiniteError` if the KL becomes NaN or Inf.

        Args:
            evaluated: called after each evaluation, the first one before any step.
            stepped: called after each step.
        """
        state = self.state
        if not state.curve:
            # The first evaluation takes a while.
            progress(TRAINING, 0, self.steps, "steps")
            self._evaluate(evaluated)
        # Step and epoch come from the state, which may be that of an interrupted run.
        while state.step < self.steps:
            self._report(progress)
            epoch, index = divmod(state.step, self.samples.steps)
            numbers = self.samples.order(epoch, self._seed)[index]
            state.sum += self.engine.step(state.step, numbers)
            state.count += 1
            state.step += 1
            if state.step % self.samples.steps == 0:
                self._evaluate(evaluated)
            stepped(state)
        self._report(progress)
        return state

    def _evaluate(self, evaluated: Callable[[State], None]) -> None:
        samples = self.samples
        state = self.state
        mean = self.engine.loss(torch.arange(samples.training, len(samples.tokens)))
        if not math.isfinite(mean):
            raise NonFiniteError(
                "the KL from the float model is NaN or Inf",
                path=self.model.path,
                found=f"after {state.step} steps",
                hint="check both models with quantkit doctor",
            )
        if state.count:
            training = state.sum / state.count
        else:
            training = None
        state.curve.append(Evaluation(state.step, mean, training))
        state.sum = 0.0
        state.count = 0
        evaluated(state)

    def _report(self, progress: Progress) -> None:
        kl = f"{self.state.curve[-1].held_back:.{_DIGITS}g}"
        progress(TRAINING, self.state.step, self.steps, f"steps, KL {kl}")
