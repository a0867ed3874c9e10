"""Settings of GPTQ's calibration: the requested options, with defaults for the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from quantkit.architectures.config import ModelConfig
from quantkit.base.messages import Message, Option
from quantkit.calibration.data import is_self
from quantkit.calibration.effort import every_group
from quantkit.calibration.settings import GptqSettings, make_gptq_settings
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.jobs.quantize.options import QuantizeOptions, is_solved_by_default
from quantkit.model.device import resolve_device
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import Tokenizer


def gptq_settings(
    options: QuantizeOptions,
    schemes: Collection[QuantScheme],
    source: Checkpoint,
    tokenizer: Tokenizer | None,
) -> GptqSettings | None:
    """Choose the settings of GPTQ; None for rounding. GPTQ solves schemes of at most 6 bits, and
    chooses schemes for a size, unless another method was requested.

    Raises:
        RequestError: if the source cannot be calibrated though a scheme or a size needs it; if
            options of GPTQ are given for a model that is rounded; if the source has no tokenizer;
            if the samples are none, or longer than the model's context.
    """
    sized = options.size is not None
    solved_schemes = [scheme for scheme in schemes if is_solved_by_default(scheme)]
    # A choice of schemes for a size compares losses on GPTQ's samples.
    solved = sized or bool(solved_schemes)
    if options.method == "rtn" or (options.method is None and not solved):
        options.require_no_calibration()
        return None
    needs_tokenizer = tokenizer is None and not is_self(options.calibration)
    lack: str | None = None
    if not source.config.measurable:
        lack = "only its tensors are known"
    # A model that writes its own samples needs no text.
    elif needs_tokenizer:
        lack = "it has no tokenizer"
    # GPTQ was not requested by its name: the error has to say why it is needed.
    if lack is not None and (sized or options.method is None):
        if sized:
            raise RequestError(
                f"a target size requires a model that can be calibrated: {lack}",
                path=source.path,
                hint=Message("choose a scheme and ", Option("method", value="rtn"), " instead"),
            )
        raise RequestError(
            f"{solved_schemes[0]} requires GPTQ by default, and the source cannot be calibrated:"
            f" {lack}",
            path=source.path,
            hint=Message("round to nearest with ", Option("method", value="rtn")),
        )
    if needs_tokenizer:
        raise RequestError(
            "calibration requires a tokenizer, and the source has none",
            path=source.path,
            hint=Message("round to nearest with ", Option("method", value="rtn")),
        )
    return make_gptq_settings(
        tokenizer,
        source,
        calibration=options.calibration,
        text_column=options.text_column,
        samples=options.samples,
        length=options.length,
        seed=options.seed,
        effort_name=options.effort_name,
        activation_memory=options.activation_memory,
        device=resolve_device(options.device),
    )


def note_too_few_tokens(shape: Sequence[int], config: ModelConfig) -> list[str]:
    """Write a note where samples of a shape [N, T] cannot give a Hessian full rank."""
    tokens = math.prod(shape)
    width = max(group.columns for group, _ in every_group(config))
    if tokens >= width:
        return []
    return [
        Message(
            f"{tokens} calibration tokens are fewer than the widest linear's {width} inputs;"
            " give more ",
            Option("samples"),
        )
    ]
