"""What training the scales of a model takes: memory, disk and time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantkit.architectures.config import ModelConfig
from quantkit.calibration import estimate as costs
from quantkit.calibration.effort import batch_samples, inner_width
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import schemes
from quantkit.jobs.output.speed import Speed
from quantkit.jobs.quantize.estimate import (
    Estimate,
    checked_tokens,
    estimate_quantization,
    forward_bytes,
    process_bytes,
    side_bytes,
)
from quantkit.jobs.quantize.formats import Formats
from quantkit.jobs.quantize.prepare import Prepared, size_fit
from quantkit.jobs.quantize.settings import GptqSettings
from quantkit.jobs.quantize.steps import SOURCE_CHECK
from quantkit.jobs.refine.options import BATCH, EPOCHS
from quantkit.jobs.refine.plan import Refinement
from quantkit.quality.bounds import measured_tokens
from quantkit.tensors.scheme import QuantScheme
from quantkit.training.optimizer import FACTOR_BYTES
from quantkit.training.passes import TOKENS_THROUGH_THE_HEAD
from quantkit.training.state import STATES
from quantkit.training.trained import OFFSET_BYTES, has_trained_scales
from quantkit.training.training import TARGETS, TRAINING, held_back

_PASSES = 4  # forward, forward again, and gradients by inputs and by weights
_OF_BATCH = 10  # of the size of its widest states, at a time: what a block keeps for its gradients
_OF_BLOCK = (
    3  # of the size of a block: its weights, their gradients, and what is computed from these
)
_OF_LOGITS = 6  # copies
REFINED_WRITING = "refine"
"""The phase in which the trained values are written."""
REFINED_GATE = "gate of the refined model"
"""The phase of the gate after training; the gate of the quantized model comes before."""
_STEP_SECONDS = 0.004  # of a block, to load and set up, twice in a step


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
        """Of a model, for each process.

        Args:
            trained: the shape and the scheme of each weight.
            batch: samples of a step.
            mesh: how many processes have other samples, and how many share the model.
        """
        factors = sum(
            rows * scheme.groups(columns) * (2 if scheme.has_minima else 1)
            for (rows, columns), scheme in trained.values()
        )
        weights = sum(rows * columns for (rows, columns), _ in trained.values())
        data, model = mesh
        own, budget = -(-batch // data), settings.memory_bytes
        tokens = own * settings.length
        together = min(own, batch_samples(config, settings.length)) * settings.length
        offsets = OFFSET_BYTES * weights if codes else 0
        targets = 4 * settings.samples * settings.length * config.hidden_size
        kept = sum(min(budget // 4, one) for one in (targets, offsets)) + min(
            budget // 2, weights // model
        )
        states = 4 * (config.num_layers + 2) * tokens * config.hidden_size
        block = (
            4
            * (_OF_BLOCK * costs.largest_block(config) + _OF_BATCH * together * inner_width(config))
            // model
        )
        head = (
            4
            * config.vocab_size
            * (_OF_LOGITS * TOKENS_THROUGH_THE_HEAD + 2 * config.hidden_size // model)
        )
        memory = process_bytes() + FACTOR_BYTES * factors + kept + states + block + head
        kept_back = held_back(settings.samples)
        training = epochs * (settings.samples - kept_back) * settings.length
        passed = _PASSES * training + (epochs + 1) * kept_back * settings.length
        speed = Speed(config)
        arithmetic = speed.products(
            passed * costs.forward_flops(config, 1), device=settings.device
        ) / (data * model)
        steps = {
            TARGETS: speed.forward(settings.samples * settings.length) / (data * model),
            TRAINING: (
                arithmetic + 2 * _STEP_SECONDS * config.num_layers * (training // (data * tokens))
            ),
        }
        on_disk = max(0, targets - budget // 4) + max(0, offsets - budget // 4)
        return cls(memory, on_disk + STATES * (FACTOR_BYTES * factors + offsets), steps)


def estimate_refined_quantization(prepared: Prepared) -> Estimate:
    """Estimate a quantization whose result is refined: the steps of both jobs, one after the other.

    Raises:
        RequestError: if the result has no scales to train, or is rounded to nearest.
    """
    options, settings, source = prepared.options, prepared.settings, prepared.source
    trained = {
        module: (source.info(f"{module}.weight").shape, scheme)
        for module, scheme in prepared.scheme_map.linears.items()
        if has_trained_scales(scheme)
    }
    if not trained:
        raise RequestError(
            "`refine=True` trains scales in floats of integer codes, and no linear gets such",
            path=source.path,
            found=" and ".join(prepared.scheme_map.counts()),
            expected="int4 or int8",
        )
    if settings is None:  # schemes of 8 bits are rounded by default
        raise RequestError(
            "`refine=True` trains on the samples of GPTQ, and this scheme is rounded to nearest by"
            " default",
            path=source.path,
            found=" and ".join(prepared.scheme_map.counts()),
            hint='add `method="gptq"`, or run `quantkit refine` on the result',
        )
    estimate = estimate_quantization(Formats.of(prepared), size_fit(prepared))
    cost = TrainingCost.of(
        source.config,
        settings,
        trained,
        epochs=EPOCHS if options.epochs is None else options.epochs,
        batch=BATCH,
        codes=options.train_codes,
    )
    speed = Speed(source.config)
    steps = {**estimate.steps, **cost.steps}
    steps[REFINED_WRITING] = speed.writing(estimate.disk_bytes, estimate.disk_bytes)
    if source.config.measurable:
        steps[REFINED_GATE] = speed.forward(measured_tokens(source), models=3)
    efforts = {}
    for name, seconds in estimate.efforts.items():
        efforts[name] = seconds + math.fsum(steps.values()) - estimate.seconds
    return replace(
        estimate,
        memory_bytes=max(estimate.memory_bytes, cost.memory_bytes),
        phase="training" if cost.memory_bytes > estimate.memory_bytes else estimate.phase,
        steps=steps,
        seconds=math.fsum(steps.values()),
        efforts=efforts,
        disk_bytes=2 * estimate.disk_bytes,
        scratch_bytes=max(estimate.scratch_bytes, cost.scratch_bytes),
    )


def estimate_refinement(planned: Refinement, mesh: tuple[int, int] | None = None) -> Estimate:
    """What a refinement takes, for each of the processes of a mesh; None is that of the options."""
    plan, options = planned.plan, planned.options
    source, quantized = plan.work.source, planned.quantized
    trained = {
        name: (info.shape, info.scheme)
        for name in planned.names.weights
        if (info := quantized.info(name)).scheme is not None
    }
    cost = TrainingCost.of(
        quantized.config,
        planned.settings,
        trained,
        epochs=options.num_epochs,
        batch=options.step_samples,
        codes=planned.names.codes,
        mesh=mesh or options.mesh_shape or (1, 1),
    )
    measured = measured_tokens(source)
    phases = {
        "training": cost.memory_bytes,
        "the gate": forward_bytes(planned.reference, measured, models=3),
    }
    phase = max(phases, key=lambda name: phases[name])
    speed, steps = Speed(quantized.config), dict[str, float]()
    checked = checked_tokens(source, options.source_check)
    if checked:
        steps[SOURCE_CHECK] = speed.forward(checked)
    steps |= cost.steps
    disk = plan.work.encoder.total_bytes() + side_bytes(plan.work.side_files)
    steps[REFINED_WRITING] = speed.writing(disk, sum(file.size for file in source.files()))
    steps["gate"] = speed.forward(measured, models=3)
    layers = dict(Counter(str(scheme) for scheme in schemes(quantized).values()))
    return Estimate(
        layers,
        phases[phase],
        phase,
        0,
        disk,
        cost.scratch_bytes,
        math.fsum(steps.values()),
        checked,
        plan.notes,
        steps,
    )
