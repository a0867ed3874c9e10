"""Caches a reference's final hidden states on disk, for later evaluations.

The head computes logits from them, which are larger by the ratio of vocabulary to width.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import CheckpointError
from quantkit.files.safetensors_io import build_header, open_file
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.output.destination import destination_error
from quantkit.model.layerwise import Batch, layerwise_hidden
from quantkit.progress import Progress, silent
from quantkit.tensors.dtypes import DType
from quantkit.version import __version__


class StateCache:
    """`layerwise_hidden` with a cache on disk: one file for each checkpoint and tokens.

    The key of a file consists of everything its states depend on: the checkpoint's files (path, name, size, time), the
    tokens and their positions, and the versions of quantkit and torch.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            DestinationError: if the folder cannot be made.
        """
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise destination_error(error, folder) from error

    def __call__(
        self, checkpoint: Checkpoint, batches: Sequence[Batch], *, group: ProcessGroup = SINGLE,
        progress: Progress = silent,
    ) -> list[Tensor]:  # fmt: skip
        """Final hidden states [B, T, D] of every batch, float32, from the cache if it has them.

        Raises:
            DestinationError: if they cannot be written.
        """
        key = _key(checkpoint, batches)
        path = self._folder / f"{key}.safetensors"
        shapes = [(*batch.tokens.shape, checkpoint.config.hidden_size) for batch in batches]
        tensors = [StoredTensor(f"{key}.{index}", DType.FLOAT32, shape) for index, shape in enumerate(shapes)]
        with contextlib.suppress(CheckpointError):  # it is not complete
            if path.is_file() and list((file := open_file(path)).tensors.values()) == tensors:
                return [file.read(tensor.name) for tensor in tensors]
        states = layerwise_hidden(checkpoint, batches, group=group, progress=progress)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with partial.open("wb") as target:
                target.write(build_header(tensors))
                for state in states:
                    target.write(state.contiguous().numpy().data)
                target.flush()
                os.fsync(target.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise destination_error(error, path) from error
        return states


def _key(checkpoint: Checkpoint, batches: Sequence[Batch]) -> str:
    facts = [str(checkpoint.path.resolve()), manifest.identity(checkpoint.files()), __version__, torch.__version__]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for batch in batches:
        digest.update(json.dumps([list(batch.tokens.shape), batch.tokens.tolist(), batch.positions.tolist()]).encode())
    return digest.hexdigest()
