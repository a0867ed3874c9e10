"""The hidden states of a source on the gate's windows, computed once for all checks of a job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.layerwise import Batch
from quantkit.quality.bounds import build_gate_windows, count_gate_tokens
from quantkit.quality.measures import Windows
from quantkit.via_transformers.forward import final_hidden


def count_kept_bytes(source: Checkpoint) -> int:
    """Count the bytes of the states that `KeptStates` holds, in float32."""
    return 4 * count_gate_tokens(source) * source.config.hidden_size


class KeptStates:
    """`final_hidden` that computes the states of a source on all of the gate's windows when some of
    them are asked for first, and keeps them. Other batches are computed each time.
    """

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        # A batch [W, T] for each text, as the gate runs it.
        self._batches: list[Batch] | None = None
        # [W, T, D] for each batch; empty until they are computed.
        self._states: list[Tensor] = []

    def __call__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        *,
        group: ProcessGroup = SINGLE,
        progress: Progress = silent,
    ) -> list[Tensor]:
        """Compute the hidden states [B, T, D] before the head of every batch, or take those that
        were computed before.
        """
        texts = [self._find_text(batch) for batch in batches]
        if checkpoint is not self._source or None in texts:
            return final_hidden(checkpoint, batches, group=group, progress=progress)
        if not self._states:
            self._states = final_hidden(
                checkpoint, self._list_batches(), group=group, progress=progress
            )
        else:
            # Nothing is left to compute.
            progress("layers", 1, 1, "layers")
        result: list[Tensor] = []
        for text, batch in zip(texts, batches, strict=True):
            assert text is not None
            result.append(self._states[text][: len(batch.tokens)])
        return result

    def _list_batches(self) -> list[Batch]:
        if self._batches is None:
            self._batches = []
            for _, windows in build_gate_windows(self._source).values():
                self._batches.append(Windows.of(windows).batch())
        return self._batches

    def _find_text(self, batch: Batch) -> int | None:
        """Find the text whose first windows a batch has; None if there is none."""
        for index, known in enumerate(self._list_batches()):
            first = known.tokens[: len(batch.tokens)]
            if torch.equal(first, batch.tokens) and torch.equal(known.positions, batch.positions):
                return index
        return None
