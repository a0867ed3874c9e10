"""What a user may say of a method, checked, with defaults for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from quantkit.calibration.data import Calibration, load_calibration
from quantkit.calibration.effort import (
    ACTIVATION_MEMORY,
    MAX_LENGTH,
    SAMPLES,
    SEED,
    STANDARD,
    THOROUGH,
    Effort,
    activation_bytes,
)
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.json_values import shown
from quantkit.model.device import usable_device
from quantkit.text.tokenizer import Tokenizer

Method = Literal["rtn", "gptq"]
METHODS = get_args(Method)


@dataclass(frozen=True)
class GptqSettings:
    """How GPTQ is calibrated.

    Attributes:
        text, samples, length, seed: as for `load_calibration`; without a length it is the model's context,
            `MAX_LENGTH` at most.
        thorough: follow the float model on all samples.
        memory_bytes: activations held in memory.
        device: where it computes.
    """

    text: str | Path
    samples: int
    length: int | None
    seed: int
    thorough: bool
    memory_bytes: int
    device: torch.device

    @property
    def effort(self) -> Effort:
        """What is done about drift."""
        return THOROUGH if self.thorough else STANDARD

    def scratch_bytes(self, source: Checkpoint, drawn: Calibration) -> int:
        """What of the activations goes to disk."""
        return activation_bytes(source.config, drawn.tokens.shape, self.effort, self.memory_bytes)[1]

    def draw(self, tokenizer: Tokenizer | None, source: Checkpoint) -> Calibration:
        """The calibration samples for a model.

        Raises:
            RequestError: if the source has no tokenizer, or as `load_calibration` does.
        """
        if tokenizer is None:
            raise RequestError("calibration needs a tokenizer, and the source has none", path=source.path)
        context = source.config.max_context
        length = min(context, MAX_LENGTH) if self.length is None else self.length
        if length > context:
            raise RequestError("samples exceed the model's context", found=length, expected=context)
        return load_calibration(self.text, tokenizer, samples=self.samples, length=length, seed=self.seed)


def gptq_settings(
    method: str, calibration: str | Path | None, *, samples: int | None, length: int | None, seed: int | None,
    thorough: bool, activation_memory: int | None, device: str | torch.device | None,
) -> GptqSettings | None:  # fmt: skip
    """The settings of the method gptq; None for one that has none.

    Args:
        method, calibration, samples, length, seed, thorough, activation_memory, device: as for
            `quantize`; None and False are what was not said.

    Raises:
        RequestError: if the method is unknown, has not what it needs or is given what it has
            no use for; for a budget that is no number of bytes, or a device that cannot be used.
    """
    if method not in METHODS:
        raise RequestError("unknown method", found=method, expected=" or ".join(METHODS))
    if method != "gptq":
        options = {
            "calibration": calibration, "samples": samples, "length": length, "seed": seed,
            "thorough": thorough or None, "activation_memory": activation_memory, "device": device,
        }  # fmt: skip
        if unused := [name for name, value in options.items() if value is not None]:
            raise RequestError(f'`{unused[0]}` goes with `method="gptq"`')
        return None
    if calibration is None:
        raise RequestError(
            "the method gptq needs calibration text: `calibration=FILE`, or a hub dataset"
            " such as Salesforce/wikitext:wikitext-2-raw-v1:train"
        )
    memory = ACTIVATION_MEMORY if activation_memory is None else activation_memory
    if not isinstance(memory, (int, float)) or not 0 <= memory < math.inf:
        raise RequestError(
            "`activation_memory` is no number of bytes", found=shown(memory), expected="such as 4_000_000_000"
        )
    return GptqSettings(
        calibration, SAMPLES if samples is None else samples, length, SEED if seed is None else seed, thorough,
        int(memory), usable_device(device),
    )  # fmt: skip
