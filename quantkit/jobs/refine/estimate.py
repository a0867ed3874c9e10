"""Estimate the memory, disk and time that training the scales of a model takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.architectures.config import ModelConfig
from quantkit.calibration import estimate as costs
from quantkit.calibration.data import is_self
from quantkit.calibration.effort import batch_samples, inner_width
from quantkit.calibration.self_text import estimate_writing_bytes
from quantkit.calibration.settings import DRAWING, GptqSettings
from quantkit.formats.checkpoint import schemes
from quantkit.jobs.output.estimate import (
    Estimate,
    count_checked_tokens,
    forward_bytes,
    measure_planned,
    process_bytes,
    side_bytes,
)
from quantkit.jobs.output.speed import Speed, estimate_draw
from quantkit.jobs.refine.plan import Refinement
from quantkit.quality.bounds import count_gate_tokens
from quantkit.quality.source_check import SOURCE_CHECK
from quantkit.tensors.scheme import QuantScheme
from quantkit.training.blockwise import TOKENS_THROUGH_THE_HEAD
from quantkit.training.optimizer import FACTOR_BYTES
from quantkit.training.state import STATES
from quantkit.training.trained import OFFSET_BYTES
from quantkit.training.training import TARGETS, TRAINING, held_back

# Forward, forward again, and gradients by inputs and by weights.
_PASSES = 4
# The states that a block keeps for its gradients, in units of the widest states of the batches that
# go through it together.
_OF_BATCH = 10
# A block's weights, their gradients, and intermediate results of both, in units of its size.
_OF_BLOCK = 3
# Copies of the logits of the tokens that go through the head together.
_OF_LOGITS = 6
REFINED_WRITING = "refine"
"""The phase in which the trained values are written."""
REFINED_GATE = "gate of the refined model"
"""The phase of the gate after training; the gate of the quantized model comes before."""
# To load and set up a block, which happens twice in a step.
_STEP_SECONDS = 0.004


@dataclass(frozen=True)
class TrainingCost:
    """What training takes: bytes of memory, bytes on disk while it runs, and the seconds of its
    phases, in order.
    """

    memory_bytes: int
    scratch_bytes: int
    steps: Mapping[str, float]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        settings: GptqSettings,
        trained: Mapping[str, tuple[tuple[int, ...], QuantScheme]],
        *,
        epochs: int,
        batch: int,
        codes: bool,
        mesh: tuple[int, int] = (1, 1),
    ) -> TrainingCost:
        """Estimate the training of a model, for each process.

        Args:
            trained: the shape and the scheme of each weight.
            batch: samples of a step.
            mesh: how many processes have other samples, and how many share the model.
        """
        factors = 0
        weights = 0
        for (rows, columns), scheme in trained.values():
            # Schemes with minima have a second factor for each group.
            factors_per_group = 2 if scheme.has_minima else 1
            factors += rows * scheme.groups(columns) * factors_per_group
            weights += rows * columns
        data, model = mesh
        process_samples = -(-batch // data)
        budget = settings.memory_bytes
        tokens = process_samples * settings.length
        samples_together = min(process_samples, batch_samples(config, settings.length))
        tokens_together = samples_together * settings.length
        offsets = OFFSET_BYTES * weights if codes else 0
        # The float model's last hidden states, as float32: they add no rounding error to the loss.
        targets = 4 * settings.samples * settings.length * config.hidden_size
        # `training_of` gives targets and offsets a quarter of the budget each, and codes a half.
        # The rest is on disk.
        in_memory = min(budget // 4, targets) + min(budget // 4, offsets)
        in_memory += min(budget // 2, weights // model)
        # The inputs of all blocks are kept for the backward pass, which runs block by block.
        states = 4 * (config.num_layers + 2) * tokens * config.hidden_size
        block_weights = _OF_BLOCK * costs.largest_block(config)
        block_states = _OF_BATCH * tokens_together * inner_width(config)
        block = 4 * (block_weights + block_states) // model
        head_columns = _OF_LOGITS * TOKENS_THROUGH_THE_HEAD + 2 * config.hidden_size // model
        head = 4 * config.vocab_size * head_columns
        memory = process_bytes() + FACTOR_BYTES * factors + in_memory + states + block + head
        kept_back = held_back(settings.samples)
        training = epochs * (settings.samples - kept_back) * settings.length
        # The held-back samples are evaluated before the first epoch and after each one.
        passed = _PASSES * training + (epochs + 1) * kept_back * settings.length
        speed = Speed(config)
        flops = passed * costs.forward_flops(config, 1)
        arithmetic = speed.products(flops, device=settings.device) / (data * model)
        num_steps = training // (data * tokens)
        steps = {
            TARGETS: speed.forward(settings.samples * settings.length) / (data * model),
            TRAINING: arithmetic + 2 * _STEP_SECONDS * config.num_layers * num_steps,
        }
        on_disk = max(0, targets - budget // 4) + max(0, offsets - budget // 4)
        return cls(memory, on_disk + STATES * (FACTOR_BYTES * factors + offsets), steps)


def estimate_refinement(planned: Refinement, mesh: tuple[int, int] | None = None) -> Estimate:
    """Estimate a refinement, for each of the processes of a mesh; None is the mesh of the
    options.
    """
    plan = planned.plan
    options = planned.options
    source = plan.work.source
    quantized = planned.quantized
    trained = {}
    for name in planned.names.weights:
        info = quantized.info(name)
        if info.scheme is not None:
            trained[name] = (info.shape, info.scheme)
    cost = TrainingCost.of(
        quantized.config,
        planned.settings,
        trained,
        epochs=options.num_epochs,
        batch=options.step_samples,
        codes=planned.names.codes,
        mesh=mesh or options.mesh_shape or (1, 1),
    )
    measured = count_gate_tokens(source)
    phases = {
        "training": cost.memory_bytes,
        "the gate": forward_bytes(planned.reference, measured, models=3),
    }
    speed = Speed(quantized.config)
    steps = dict[str, float]()
    checked = count_checked_tokens(source, options.source_check)
    if checked:
        steps[SOURCE_CHECK] = speed.forward(checked)
    settings = planned.settings
    if is_self(settings.text):
        steps = {DRAWING: estimate_draw(settings, speed), **steps}
        phases["the writing of samples"] = process_bytes() + estimate_writing_bytes(
            planned.reference, settings.samples, settings.length, settings.device
        )
    steps |= cost.steps
    phase = max(phases, key=lambda name: phases[name])
    disk = plan.work.encoder.total_bytes() + side_bytes(plan.work.side_files)
    steps[REFINED_WRITING] = speed.writing(disk, sum(file.size for file in source.files()))
    steps["gate"] = speed.forward(measured, models=3)
    layers = dict(Counter(str(scheme) for scheme in schemes(quantized).values()))
    return Estimate(
        layers=layers,
        memory_bytes=phases[phase],
        phase=phase,
        device_bytes=0,
        disk_bytes=disk,
        scratch_bytes=cost.scratch_bytes,
        seconds=math.fsum(steps.values()),
        source_check_tokens=checked,
        notes=plan.notes,
        steps=steps,
        to_run=measure_planned(quantized.config, plan.work.encoder.planned),
        context=quantized.config.max_context,
    )
