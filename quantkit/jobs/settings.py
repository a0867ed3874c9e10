"""What a user may say of a method, checked, with defaults for the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.arguments import as_path, as_seed, as_text, as_whole
from quantkit.calibration.data import Calibration, load_calibration, require_calibration, require_samples
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
from quantkit.calibration.estimate import gpu_activation_bytes
from quantkit.calibration.packaged import PackagedText, near_uniform_pieces, require_plausible
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import CheckpointError, RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.json_values import shown
from quantkit.model.device import usable_device
from quantkit.progress import Progress, in_phase, silent
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.chat import Chat, chat_format
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.tokenizer import Tokenizer

Method = Literal["rtn", "gptq"]
METHODS = get_args(Method)
_SOLVED_BITS = 4  # by GPTQ, unless another method is said; more are rounded


@dataclass(frozen=True)
class GptqSettings:
    """How GPTQ is calibrated.

    Attributes:
        text, samples, length, seed: as for `load_calibration`; None is the packaged text, and without a length it is
            the model's context, `MAX_LENGTH` at most.
        thorough: follow the float model on all samples.
        memory_bytes: activations held in memory.
        device: where it computes.
    """

    text: str | Path | None
    samples: int
    length: int | None
    seed: int
    thorough: bool
    memory_bytes: int
    device: torch.device

    def effort(self, config: ModelConfig, shape: Sequence[int]) -> Effort:
        """What is done about drift with samples of a shape [N, T]."""
        return (THOROUGH if self.thorough else STANDARD).for_samples(config, shape)

    def scratch_bytes(self, source: Checkpoint, drawn: Calibration) -> int:
        """What of the activations goes to disk."""
        return self.activation_bytes(source.config, drawn.tokens.shape)[1]

    def activation_bytes(self, config: ModelConfig, shape: Sequence[int]) -> tuple[int, int, int]:
        """What of the activations of samples of a shape [N, T] is in memory, on disk, and on the card that computes."""
        room = gpu_activation_bytes(config, shape, self.device)
        return activation_bytes(config, shape, self.effort(config, shape), self.memory_bytes, room)

    def draw(
        self, tokenizer: Tokenizer | None, source: Checkpoint, *, group: ProcessGroup = SINGLE,
        progress: Progress = silent,
    ) -> Calibration:  # fmt: skip
        """The calibration samples for a model; of the packaged text those that the source predicts.

        Args:
            group: the processes that share the samples; the first decides which.

        Raises:
            RequestError: if the source has no tokenizer, or as `load_calibration` and `PackagedText` do.
        """
        tokenizer = _required(tokenizer, source)
        length = self.sample_length(source)
        if self.text is not None:
            return load_calibration(self.text, tokenizer, samples=self.samples, length=length, seed=self.seed)
        choices, told = min(tokenizer.vocab_size, source.config.vocab_size), in_phase(progress, "calibration samples")

        def near_uniform(pieces: Sequence[torch.Tensor]) -> list[bool]:
            found = near_uniform_pieces(source, pieces, choices, told) if group.is_rank0 else []
            return group.broadcast_from_rank0(found)

        text = self._packaged(tokenizer, source)
        return text.draw(samples=self.samples, length=length, seed=self.seed, near_uniform=near_uniform)

    def require_text(self, tokenizer: Tokenizer | None, source: Checkpoint) -> None:
        """Check what `draw` does, without drawing samples.

        Raises:
            RequestError: as `draw` does.
        """
        tokenizer = _required(tokenizer, source)
        length = self.sample_length(source)
        if self.text is None:
            self._packaged(tokenizer, source).require(self.samples, length)
        else:
            require_calibration(self.text, tokenizer, samples=self.samples, length=length, seed=self.seed)

    def require_plausible(self, source: Checkpoint) -> None:
        """Check numbers as far as they can be told without the text.

        Raises:
            RequestError: as `draw` does.
        """
        length = self.sample_length(source)
        if self.text is None and self.samples > 0:
            require_plausible(self.samples, length)
        require_samples(self.samples, length)

    def sample_length(self, source: Checkpoint) -> int:
        """Tokens in each sample.

        Raises:
            RequestError: if the model's context is shorter.
        """
        context = source.config.max_context
        length = min(context, MAX_LENGTH) if self.length is None else self.length
        if length > context:
            raise RequestError(
                "samples are longer than the model's context", found=f"{length} tokens", expected=f"at most {context}",
                hint="give a smaller `length`",
            )  # fmt: skip
        return length

    def _packaged(self, tokenizer: Tokenizer, source: Checkpoint) -> PackagedText:
        chat, notes = _chat(source, tokenizer)
        wanted = self.samples * self.sample_length(source)
        text = PackagedText.of(tokenizer, chat, seed=self.seed, wanted=wanted)
        return replace(text, notes=(*notes, *text.notes))


@dataclass(frozen=True)
class MethodOptions:
    """What a user says of the method; None and False are what was not said.

    Attributes:
        method, calibration, samples, length, seed, thorough, activation_memory, device: as for `quantize`.
        sized: whether the schemes are to be chosen for a size, which is done with the samples of GPTQ.
    """

    method: Method | None
    calibration: str | Path | None
    samples: int | None
    length: int | None
    seed: int | None
    thorough: bool
    activation_memory: int | None
    device: str | torch.device | None
    sized: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            RequestError: if the method is unknown or is given what it has no use for; for a budget that is no number
                of bytes, or a device that cannot be used; if a size goes with rounding.
        """
        if self.method is not None and as_text("method", self.method) not in METHODS:
            raise RequestError("unknown method", found=self.method, expected=" or ".join(METHODS))
        if self.method == "rtn" and self.sized:
            raise RequestError("a size to fit goes with GPTQ", found='`method="rtn"`', expected='`method="gptq"`')
        if self.method == "rtn":
            self._require_unused()
        if self.calibration is not None:
            as_path("calibration", self.calibration)  # a text, kept as it is, may also name a dataset
        for name in ("samples", "length"):
            if (value := getattr(self, name)) is not None:
                as_whole(name, value)
        if self.seed is not None:
            as_seed("seed", self.seed)
        memory = self.activation_memory
        if memory is not None and (
            not isinstance(memory, (int, float)) or isinstance(memory, bool) or not 0 <= memory < math.inf
        ):
            raise RequestError(
                "`activation_memory` is no number of bytes", found=shown(memory), expected="such as 4_000_000_000"
            )
        if self.device is not None:
            usable_device(self.device)

    def settings(
        self, schemes: Collection[QuantScheme], source: Checkpoint, tokenizer: Tokenizer | None
    ) -> GptqSettings | None:
        """The settings of GPTQ, which is what int4 and a size to fit are made by unless another method was said; None
        for rounding.

        Args:
            schemes: that the layers get.

        Raises:
            RequestError: if GPTQ is not asked for by name, or a size is, and the source cannot be calibrated; if
                options of GPTQ go with a model that is rounded; if no samples are asked for, or such as the model has
                no context for.
        """
        solved = self.sized or any(scheme.bits <= _SOLVED_BITS for scheme in schemes)
        if self.method == "rtn" or (self.method is None and not solved):
            self._require_unused()
            return None
        if (self.sized or self.method is None) and (not source.config.calibratable or tokenizer is None):
            lack = "it is known by its tensors only" if not source.config.calibratable else "it has no tokenizer"
            if self.sized:
                raise RequestError(
                    f"a size to fit needs a model that can be calibrated: {lack}", path=source.path,
                    hint='give a scheme and `method="rtn"` instead',
                )  # fmt: skip
            raise RequestError(
                f"int4 is solved by GPTQ, and the source cannot be calibrated: {lack}", path=source.path,
                hint='round it with `method="rtn"`',
            )  # fmt: skip
        found = GptqSettings(
            self.calibration, SAMPLES if self.samples is None else self.samples, self.length,
            SEED if self.seed is None else self.seed, self.thorough,
            ACTIVATION_MEMORY if self.activation_memory is None else int(self.activation_memory),
            usable_device(self.device),
        )  # fmt: skip
        as_seed("seed", found.seed)
        found.require_plausible(source)
        return found

    def _require_unused(self) -> None:
        """
        Raises:
            RequestError: for an option that rounding has no use for.
        """
        options = {
            "calibration": self.calibration, "samples": self.samples, "length": self.length, "seed": self.seed,
            "thorough": self.thorough or None, "activation_memory": self.activation_memory, "device": self.device,
        }  # fmt: skip
        if unused := [name for name, value in options.items() if value is not None]:
            raise RequestError(f'`{unused[0]}` goes with `method="gptq"`')


def _required(tokenizer: Tokenizer | None, source: Checkpoint) -> Tokenizer:
    """
    Raises:
        RequestError: if there is none.
    """
    if tokenizer is None:
        raise RequestError(
            "calibration needs a tokenizer, and the source has none", path=source.path,
            hint='round it with `method="rtn"`',
        )  # fmt: skip
    return tokenizer


def _chat(source: Checkpoint, tokenizer: Tokenizer) -> tuple[Chat | None, list[str]]:
    """How a source is told dialogues, and a note where its own way cannot be taken; None of a base model."""
    try:
        if not ChatTemplates(source.path):
            return None, []
        return chat_format(source.path, tokenizer), []
    except (RequestError, CheckpointError) as error:
        told = f"{error.path or source.path}: {error.problem.rstrip('.')}"
        return None, [f"{told}; dialogues of the calibration text are told as plain text"]
