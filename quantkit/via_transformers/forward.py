"""Hidden states and logits of any checkpoint that can be run: by our decoder, or by transformers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import StoredCheckpoint
from quantkit.model.layerwise import Batch, head_logits, layerwise_hidden
from quantkit.progress import Progress, silent

if TYPE_CHECKING:
    from quantkit.via_transformers.passage import Passage

_CONTEXT = 2048  # of models without a longest context
_passages: WeakKeyDictionary[Checkpoint, Passage] = WeakKeyDictionary()


def final_hidden(
    checkpoint: Checkpoint, batches: Sequence[Batch], *, cache_dtype: torch.dtype | None = None,
    group: ProcessGroup = SINGLE, progress: Progress = silent,
) -> list[Tensor]:  # fmt: skip
    """Hidden states [B, T, D] before the head of every batch, in float32; see `layerwise_hidden`. Transformers runs
    batches from their start, with floats in the cache, in one process."""
    if checkpoint.config.runnable:
        return layerwise_hidden(checkpoint, batches, cache_dtype=cache_dtype, group=group, progress=progress)
    return passage_of(checkpoint).hidden([batch.tokens for batch in batches], progress)


def final_logits(checkpoint: Checkpoint, hidden: Sequence[Tensor], *, group: ProcessGroup = SINGLE) -> list[Tensor]:
    """Logits [N, V] of each of some hidden states [N, D], in float32; see `head_logits`."""
    if checkpoint.config.runnable:
        return head_logits(checkpoint, hidden, group=group)
    logits = passage_of(checkpoint).logits(torch.cat(list(hidden)))
    return list(torch.split(logits, [len(one) for one in hidden]))


def is_installed() -> bool:
    """Whether transformers and what it takes to run models with it are there."""
    return not _missing()


def require_installed() -> None:
    """Raise a `RequestError` unless they are."""
    if missing := _missing():
        raise RequestError(
            f"{' and '.join(missing)} must be installed to run a model by transformers",
            hint="pip install 'quantkit[transformers]'",
        )  # fmt: skip


def _missing() -> list[str]:
    return [name for name in ("transformers", "greenlet") if importlib.util.find_spec(name) is None]


def run_by_transformers(source: StoredCheckpoint) -> StoredCheckpoint:
    """A source that is known by its tensors only, to be run by transformers. Raises `UnsupportedError` or
    `CheckpointError` if it cannot be."""
    model, config = passage_of(source).lazy.model, source.config
    rows, width = model.get_input_embeddings().weight.shape
    version = f"transformers {importlib.metadata.version('transformers')}"
    source.config = replace(
        config, run_by=version, max_context=config.max_context or _CONTEXT, vocab_size=config.vocab_size or rows,
        hidden_size=config.hidden_size or width,
    )  # fmt: skip
    return source


def passage_of(checkpoint: Checkpoint) -> Passage:
    """The model of a checkpoint that transformers runs. Raises `UnsupportedError` or `CheckpointError` if it cannot."""
    from quantkit.via_transformers.lazy_model import LazyModel
    from quantkit.via_transformers.passage import Passage

    if (found := _passages.get(checkpoint)) is None:
        found = _passages[checkpoint] = Passage(LazyModel(checkpoint), checkpoint.path)
    return found
