"""Prepare a model so that calibration samples can pass through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from quantkit.architectures.names import EMBEDDING
from quantkit.formats.checkpoint import Checkpoint
from quantkit.via_transformers.forward import passage_of

# These import greenlet, and the decoder.
if TYPE_CHECKING:
    from quantkit.passes.cache_recorder import CacheRecorder
    from quantkit.passes.partwise_model import PartwiseModel
    from quantkit.passes.passage import Inputs, Passage, Survey


@dataclass(frozen=True)
class CalibratedModel:
    """A model that samples pass through.

    Attributes:
        passage: the model.
        groups: its linears, by shared input.
        recording_cache: makes a context in which its keys and values are recorded.
        embedding_parameter: the name of its embedding; None if the embedding's error is not
            followed.
    """

    passage: Passage[PartwiseModel]
    groups: Sequence[Inputs]
    recording_cache: Callable[[CacheRecorder], AbstractContextManager[None]]
    embedding_parameter: str | None


def prepare_model(
    source: Checkpoint, survey: Survey | None, length: int, device: torch.device
) -> CalibratedModel:
    """Prepare the model that samples pass through: of transformers if they were surveyed, or else
    quantkit's decoder.

    Args:
        survey: how samples reach the linears of a model that transformers runs; None for others.
        length: the tokens of each sample.
    """
    from quantkit.passes.decoder_parts import DecoderParts
    from quantkit.passes.passage import Passage

    if survey is not None:
        from quantkit.via_transformers.cached_attention import recording_cache

        passage = passage_of(source)
        passage.partwise.move_to(device)
        return CalibratedModel(
            passage=passage,
            groups=survey.groups,
            recording_cache=partial(recording_cache, passage.partwise),
            embedding_parameter=None,
        )
    parts = DecoderParts(source, length, device)
    return CalibratedModel(
        passage=Passage(parts, source.path),
        groups=parts.list_groups(),
        recording_cache=parts.recording_cache,
        embedding_parameter=f"{EMBEDDING}.weight",
    )
