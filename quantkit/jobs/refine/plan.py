"""Plan a refinement: check the two models, select the trained tensors, and plan the output, before
anything takes long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.base.arguments import as_path
from quantkit.calibration.data import is_self
from quantkit.calibration.settings import GptqSettings, make_gptq_settings
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import list_uncarried_weights, require_runnable, schemes
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.formats.output.destination import require_absent
from quantkit.formats.output.staging import require_name
from quantkit.jobs.convert.conversion import Conversion
from quantkit.jobs.refine.options import RefineOptions
from quantkit.jobs.refine.rewritten import (
    CheckpointInOutputTypes,
    plan_rewriting,
    require_scales_change,
)
from quantkit.model.device import resolve_device
from quantkit.training.trained import TrainedNames
from quantkit.via_transformers.forward import run_by_transformers

# One sample to train on, and one that is held back.
_MIN_SAMPLES = 2


@dataclass(frozen=True)
class Refinement:
    """A planned refinement.

    Attributes:
        plan: how the result is written.
        quantized: the model to refine, with scales in the types in which they are written.
        reference: the float model.
        settings: of the samples.
    """

    options: RefineOptions
    plan: Conversion
    quantized: CheckpointInOutputTypes
    reference: StoredCheckpoint
    names: TrainedNames
    settings: GptqSettings


def plan_refinement(
    options: RefineOptions, *, by_transformers: bool = False, code: Path | None = None
) -> Refinement:
    """Open both models and check that they can be refined.

    Args:
        by_transformers: whether transformers runs them even if quantkit's decoder knows the family.
        code: the folder of the float model if its code is trusted; see `run_by_transformers`.

    Raises:
        QuantkitError: as `refine` does.
    """
    output = options.output
    require_name(output)
    src = as_path("src", options.src)
    require_absent(output)
    # For a delta, plan the model that `apply_delta` would write: its scales have the same types.
    if options.delta is None:
        dst = output
    else:
        dst = output.with_name(f"{output.name}.applied{src.suffix}")
    plan = plan_rewriting(
        src,
        dst,
        resume=options.resume,
        source_check=options.source_check,
        by_transformers=by_transformers,
        code=code,
    )
    is_decoded = plan.work.source.config.runnable
    reference = open_checkpoint(as_path("against", options.against), tensors_only=not is_decoded)
    if is_decoded:
        require_runnable(reference)
    else:
        reference = run_by_transformers(reference, code=code)
    if schemes(reference) or list_uncarried_weights(reference):
        raise RequestError(
            "the model to refine against must not be quantized",
            path=reference.path,
            expected="the float model",
        )
    quantized = CheckpointInOutputTypes(plan)
    configs = []
    # Quantizers may untie the head from the embedding, and write scales in another float type.
    for checkpoint in (reference, quantized):
        configs.append(replace(checkpoint.config, tied_embeddings=False, dtype="float32"))
    differences = configs[0].differences(configs[1])
    if differences:
        raise RequestError(
            "the quantized model was not created from this float model",
            path=quantized.path,
            found=f"{differences[0]} differs",
            expected=f"the config of {reference.path}",
        )
    # Some tools write quantized models without a tokenizer.
    tokenizer, _ = load_checked_tokenizer(quantized)
    if tokenizer is None:
        tokenizer, _ = load_checked_tokenizer(reference)
    # A model that writes its own samples needs no text.
    if tokenizer is None and not is_self(options.calibration):
        raise RequestError(
            "training requires a tokenizer, and the model has none", path=quantized.path
        )
    if is_decoded:
        names = TrainedNames.of(quantized, norms=options.train_norms, codes=options.train_codes)
    else:
        # Imports greenlet, which is optional.
        from quantkit.training.places import find_trained_names

        names = find_trained_names(quantized, norms=options.train_norms, codes=options.train_codes)
    require_scales_change(plan, names.weights)
    settings = make_gptq_settings(
        tokenizer,
        reference,
        calibration=options.calibration,
        text_column=options.text_column,
        samples=options.samples,
        length=options.length,
        seed=options.seed,
        activation_memory=options.activation_memory,
        device=resolve_device(options.device),
    )
    if settings.samples < _MIN_SAMPLES:
        raise RequestError(
            "too few samples: some are held out for evaluation",
            found=settings.samples,
            expected=f"{_MIN_SAMPLES}",
        )
    return Refinement(
        options=options,
        plan=plan,
        quantized=quantized,
        reference=reference,
        names=names,
        settings=settings,
    )
