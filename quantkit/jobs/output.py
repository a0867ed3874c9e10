"""What all jobs that write a checkpoint share: the stream of tensors and the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import manifest
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.encoders import Encoder, Planned
from quantkit.formats.writer import CheckpointWriter
from quantkit.progress import Progress
from quantkit.qtensor import QuantTensor
from quantkit.version import __version__

SHARD_BYTES = 2 << 30
"""Largest safetensors file written, unless one tensor is larger."""


def write(
    job: str,
    source: Checkpoint,
    dst: Path,
    encoder: Encoder,
    produce: Callable[[Planned], tuple[Tensor | QuantTensor, object]],
    side_files: dict[str, bytes | Path],
    details: Callable[[dict[str, Any]], dict[str, object]],
    *,
    options: dict[str, object],
    resume: bool,
    progress: Progress,
) -> None:
    """Stream planned tensors, one at a time, into a new checkpoint with its manifest.

    Args:
        produce: gives a planned tensor's value and what to record about it.
        details: given all records by tensor, the manifest's own part of this job.
        options: all that decides the output's bytes besides the source.
    """
    fingerprint = {
        "job": job,
        "quantkit": __version__,
        "source": manifest.identity(source.files()),
        **{f"option {key}": value for key, value in options.items()},
    }
    total = sum(_bytes(item) for item in encoder.planned)
    with CheckpointWriter(dst, encoder, fingerprint, resume=resume) as writer:
        hashes = manifest.SourceHashes(source.files())
        done = sum(_bytes(item) for item in encoder.planned[: writer.done])
        for item in encoder.planned[writer.done :]:
            progress(done, total, item.name)
            value, record = produce(item)
            writer.put(value, record)
            del value
            done += _bytes(item)
        progress(done, total, "")
        source_hashes = hashes.result()

        def build(file_hashes: dict[str, str], records: dict[str, Any]) -> bytes:
            return manifest.build(job, source.format, source_hashes, file_hashes, details(records))

        writer.finish(side_files, build, manifest.NAME)


def model_summary(source: Checkpoint, dtype: str) -> dict[str, object]:
    """The few facts about a model that a reader of the manifest looks for first."""
    parameters = sum(int(torch.Size(source.info(name).shape).numel()) for name in source.names())
    return {"architecture": source.config.architecture, "parameters": parameters, "dtype": dtype}


def _bytes(item: Planned) -> int:
    return int(torch.Size(item.shape).numel()) * item.dtype.itemsize
