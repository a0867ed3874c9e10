"""Settings of calibration samples: the requested options, with defaults for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.base.late import LateFunction
from quantkit.base.memory import available_bytes
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, in_phase, silent
from quantkit.calibration import effort
from quantkit.calibration.conversations import model_chat
from quantkit.calibration.data import (
    Calibration,
    is_self,
    load_calibration,
    require_calibration,
    require_samples,
)
from quantkit.calibration.effort import Effort, EffortName
from quantkit.calibration.estimate import gpu_activation_bytes
from quantkit.calibration.packaged import (
    PackagedText,
    measure_losses_of_source,
    require_plausible,
)
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quantkit.calibration.documents import TextSource
    from quantkit.calibration.self_text import draw_self_text, require_self_text
else:
    draw_self_text = LateFunction("quantkit.calibration.self_text:draw_self_text")
    require_self_text = LateFunction("quantkit.calibration.self_text:require_self_text")

DRAWING = "calibration samples"
"""The phase in which the model chooses or writes the samples."""


@dataclass(frozen=True)
class GptqSettings:
    """How GPTQ is calibrated.

    Attributes:
        tokenizer: splits the text into tokens; None only for text that the model writes itself.
        text, column, samples, length, seed: see `load_calibration`; without a text the packaged one
            is used, and with `SELF` the model writes it.
        effort_name: see `EFFORTS`.
        memory_bytes: the most bytes of activations kept in memory.
        device: where GPTQ computes.
    """

    tokenizer: Tokenizer | None
    text: TextSource | None
    column: str | None
    samples: int
    length: int
    seed: int
    effort_name: EffortName
    memory_bytes: int
    device: torch.device

    def effort_on(
        self, config: ModelConfig, shape: Sequence[int], schemes: Iterable[QuantScheme]
    ) -> Effort:
        """Return the effort with samples of shape [N, T], for linears of these schemes."""
        return effort.EFFORTS[self.effort_name].for_samples(config, shape).for_schemes(schemes)

    def with_effort(
        self, name: EffortName, length: int | None, config: ModelConfig
    ) -> GptqSettings:
        """Copy these settings with another effort, and samples of `length` tokens; None takes the
        length that the effort has for a model.
        """
        return replace(
            self,
            effort_name=name,
            length=effort.EFFORTS[name].length(config) if length is None else length,
        )

    def activation_bytes(
        self, config: ModelConfig, shape: Sequence[int], schemes: Iterable[QuantScheme]
    ) -> tuple[int, int, int]:
        """Bytes of the activations of samples of shape [N, T] in memory, on disk, and on the GPU
        that computes.
        """
        room = gpu_activation_bytes(config, shape, self.device)
        return effort.activation_bytes(
            config, shape, self.effort_on(config, shape, schemes), self.memory_bytes, room
        )

    def draw(
        self, source: Checkpoint, *, group: ProcessGroup = SINGLE, progress: Progress = silent
    ) -> Calibration:
        """Draw the calibration samples for a model; from the packaged text only those that the
        source predicts, as rank 0 of the group finds. Rank 0 also writes those of the model itself.

        Raises:
            QuantkitError: as `load_calibration`, `PackagedText` and `draw_self_text` do.
        """
        report = in_phase(progress, DRAWING)
        if is_self(self.text):
            drawn = group.broadcast_from_rank0(self._write_self_text(source, group, report))
            assert drawn is not None
            return drawn
        tokenizer = self._require_tokenizer()
        if self.text is not None:
            return load_calibration(self.text, tokenizer, **self._make_sampling_arguments(source))
        choices = min(tokenizer.vocab_size, source.config.vocab_size)

        def measure_losses(prefixes: Sequence[torch.Tensor]) -> list[float]:
            losses: list[float] = []
            if group.is_rank0:
                losses = measure_losses_of_source(source, prefixes, choices, report)
            return group.broadcast_from_rank0(losses)

        text = self._load_packaged_text(source)
        return text.draw(
            samples=self.samples, length=self.length, seed=self.seed, measure_losses=measure_losses
        )

    def require_text(self, source: Checkpoint) -> None:
        """Make the checks of `draw`, without drawing samples.

        Raises the errors of `draw`.
        """
        if is_self(self.text):
            require_self_text(source, self.tokenizer, self.device)
        elif self.text is None:
            self._load_packaged_text(source).require(self.samples, self.length)
        else:
            tokenizer = self._require_tokenizer()
            require_calibration(self.text, tokenizer, **self._make_sampling_arguments(source))

    def _require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which only text of the model itself does without."""
        assert self.tokenizer is not None
        return self.tokenizer

    def _write_self_text(
        self, source: Checkpoint, group: ProcessGroup, progress: Progress
    ) -> Calibration | None:
        """Let the model write the samples; None on other ranks than 0."""
        if not group.is_rank0:
            return None
        return draw_self_text(
            source,
            self.tokenizer,
            samples=self.samples,
            length=self.length,
            seed=self.seed,
            device=self.device,
            progress=progress,
        )

    def _make_sampling_arguments(self, source: Checkpoint) -> dict[str, Any]:
        chat = partial(model_chat, source.path, self._require_tokenizer())
        return {
            "samples": self.samples,
            "length": self.length,
            "seed": self.seed,
            "column": self.column,
            "chat": chat,
        }

    def _load_packaged_text(self, source: Checkpoint) -> PackagedText:
        tokenizer = self._require_tokenizer()
        chat, notes = model_chat(source.path, tokenizer)
        text = PackagedText.of(
            tokenizer, chat, seed=self.seed, token_count=self.samples * self.length
        )
        return replace(text, notes=(*notes, *text.notes))


def make_gptq_settings(
    tokenizer: Tokenizer | None,
    source: Checkpoint,
    *,
    calibration: TextSource | None,
    text_column: str | None,
    samples: int | None,
    length: int | None,
    seed: int | None,
    activation_memory: int | None,
    device: torch.device,
    effort_name: EffortName = "default",
) -> GptqSettings:
    """Make the settings of GPTQ, with defaults for what is None.

    Raises:
        RequestError: if the samples are none, or longer than the model's context, or a column is
            named though the model writes the text itself.
    """
    if is_self(calibration) and text_column is not None:
        raise RequestError(
            "text that the model writes has no columns",
            hint=Message("leave ", Option("text_column"), " out"),
        )
    context = source.config.max_context
    if samples is None:
        samples = effort.SAMPLES
    if length is None:
        length = effort.EFFORTS[effort_name].length(source.config)
    if length > context:
        raise RequestError(
            "samples are longer than the model's context",
            found=f"{length} tokens",
            expected=f"at most {context}",
            hint=Message("give a smaller ", Option("length")),
        )
    if calibration is None and samples > 0:
        require_plausible(samples, length)
    require_samples(samples, length)
    if activation_memory is None:
        activation_memory = min(effort.ACTIVATION_MEMORY, available_bytes() // 2)
    seed = effort.SEED if seed is None else seed
    return GptqSettings(
        tokenizer=tokenizer,
        text=calibration,
        column=text_column,
        samples=samples,
        length=length,
        seed=seed,
        effort_name=effort_name,
        memory_bytes=int(activation_memory),
        device=device,
    )
