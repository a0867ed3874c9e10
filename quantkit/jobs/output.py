"""What all jobs that write a checkpoint share: the stream of tensors and the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, DestinationError
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.encoders import Encoder, Planned
from quantkit.formats.safetensors_io import require_readable
from quantkit.formats.writer import CheckpointWriter
from quantkit.progress import Progress
from quantkit.quality.source_check import SourceCheck, check_source
from quantkit.tensors.qtensor import QuantTensor
from quantkit.version import __version__

SHARD_BYTES = 2 << 30
"""Largest safetensors file written, unless one tensor is larger."""


@dataclass(frozen=True)
class Work:
    """What one job does with a source.

    Attributes:
        job: its name.
        encoder: knows the tensors to write.
        produce: gives a planned tensor's value and what to record about it.
        side_files: what goes beside the weights: name to content, or to a file to copy.
        describe: given the folder of the written weights and side files and all records by
            tensor, the manifest's own part of the job and further files.
        options: all that decides the weights' bytes besides the source.
        begin: told, before the first tensor, how many an earlier run has left in which folder.
        safe_after: whether a killed run shall be able to go on after a tensor.
        scratch_bytes: space that the job takes on the destination's disk for itself.
        source_check: whether to see first that the source predicts a text at all.
        computed_by: what of the machine decides the weights' bytes; the manifest does not tell it.
    """

    job: str
    encoder: Encoder
    produce: Callable[[Planned], tuple[Tensor | QuantTensor, object]]
    side_files: dict[str, bytes | Path]
    describe: Callable[[Path, dict[str, Any]], tuple[dict[str, object], dict[str, bytes]]]
    options: dict[str, object]
    begin: Callable[[int, Path], None] = lambda done, folder: None
    safe_after: Callable[[Planned], bool] = lambda item: False
    scratch_bytes: int = 0
    source_check: bool = True
    computed_by: Mapping[str, object] = field(default_factory=dict)


def write(work: Work, source: Checkpoint, dst: Path, *, resume: bool, progress: Progress) -> list[str]:
    """Stream planned tensors, one at a time, into a new checkpoint with its manifest.

    Returns:
        Notes for the user.

    Raises:
        QuantkitError: of the kind that says what is wrong; see also `check_source`.
    """
    fingerprint = {
        "job": work.job,
        "quantkit": __version__,
        "source": manifest.identity(source.files()),
        **{f"option {key}": value for key, value in work.options.items()},
        **work.computed_by,
    }
    planned = work.encoder.planned
    total = sum(_bytes(item) for item in planned)
    needed = work.encoder.total_bytes() + work.scratch_bytes
    with CheckpointWriter(
        dst, work.encoder, fingerprint, work.side_files, needed_bytes=needed, resume=resume
    ) as writer:
        hashes = manifest.SourceHashes(source.files())
        done = sum(_bytes(item) for item in planned[: writer.done])
        checked = _checked(work, source, progress)
        work.begin(writer.done, writer.path)
        for item in planned[writer.done :]:
            progress(done, total, item.name)
            hashes.require_sound()
            value, record = work.produce(item)
            writer.put(value, record)
            del value
            if work.safe_after(item):
                writer.checkpoint()
            done += _bytes(item)
        progress(done, total, "")
        source_hashes = hashes.result()
        writer.seal()
        writer.require_in_place()
        _require_readable(writer.path)
        details, files = work.describe(writer.path, writer.records)
        for name, content in files.items():
            writer.add_file(name, content)
        content = manifest.build(
            work.job, source.format, source_hashes, writer.hashes,
            {"source_check": checked.to_json() if isinstance(checked, SourceCheck) else checked, **details},
        )  # fmt: skip
        writer.commit(manifest.NAME, content)
    note = checked.note() if isinstance(checked, SourceCheck) else None
    return [] if note is None else [f"{source.path}: {note}"]


def _checked(work: Work, source: Checkpoint, progress: Progress) -> SourceCheck | str:
    """What the source makes of a text, or why that was not measured."""
    if not work.source_check:
        return "skipped as asked"
    found = check_source(source, allow_nonfinite=work.options["allow_nonfinite"] is True, progress=progress)
    return found if isinstance(found, SourceCheck) else f"not measured: {found}"


def _require_readable(folder: Path) -> None:
    """Open what was written, by our reader and by the safetensors library; headers only.

    Raises:
        DestinationError: if ours finds another model than the config calls for: somebody changed the files.
        RuntimeError: if the library finds other tensors than ours.
    """
    try:
        open_checkpoint(folder)
        for path in sorted(folder.glob("*.safetensors")):
            require_readable(path)
    except CheckpointError as error:
        raise DestinationError(
            f"cannot be read back: {error.problem}", path=error.path, found=error.found, expected=error.expected
        ) from error


def model_summary(source: Checkpoint, dtype: str) -> dict[str, object]:
    """The few facts about a model that a reader of the manifest looks for first."""
    return {"architecture": source.config.architecture, "parameters": parameter_count(source), "dtype": dtype}


def _bytes(item: Planned) -> int:
    return int(torch.Size(item.shape).numel()) * item.dtype.itemsize
