"""Convert a checkpoint: another format, sharding or float type; the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit import manifest
from quantkit.errors import NonFiniteError, RequestError, UnsupportedError
from quantkit.formats.checkpoint import DTYPE_NAMES, FLOAT_DTYPES, Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.encoders import Encoder, MetaEncoder, Planned, SafetensorsEncoder
from quantkit.formats.folder import checked_tokenizer, hf_side_files, meta_side_files, require_new_names
from quantkit.formats.writer import CheckpointWriter
from quantkit.naming import entries
from quantkit.progress import Progress, silent
from quantkit.qtensor import QuantTensor, row_chunks
from quantkit.version import __version__

SHARD_BYTES = 2 << 30
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str = "hf",
    mp: int = 1,
    dtype: str | None = None,
    weights: str | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress = silent,
) -> list[str]:
    """Write the model in `src` to the new folder `dst`.

    Args:
        src: a Meta or Hugging Face folder.
        dst: the folder to make; it must not exist.
        to: ``hf`` or ``meta``.
        mp: number of Meta model-parallel shards.
        dtype: ``bf16``, ``fp16`` or ``fp32``; None keeps each tensor's own.
        weights: picks one of several sets of weights in `src`.
        resume: go on with an interrupted run.
        allow_nonfinite: write NaN and Inf, and values that overflow `dtype`, as they are.
        progress: told of every tensor.

    Returns:
        Notes for the user.

    Raises:
        QuantkitError: of the kind that says what is wrong; `dst` is then not there.
    """
    if to not in ("hf", "meta"):
        raise RequestError("unknown target format", found=to, expected="hf or meta")
    if dtype is not None and dtype not in DTYPES:
        raise RequestError("unknown dtype", found=dtype, expected=", ".join(DTYPES))
    if to == "hf" and mp != 1:
        raise RequestError("--mp goes with --to meta", found=f"--mp {mp}")
    source = open_checkpoint(src, weights)
    require_new_names(source.path, Path(dst))
    tokenizer, notes = checked_tokenizer(source)
    quantized = schemes(source)
    if quantized and (to == "meta" or dtype is not None):
        raise UnsupportedError(
            "the source is quantized; it can be converted as it is, but not to another float type or to Meta",
            path=source.path, found=str(next(iter(quantized.values()))), hint="start from the float model",
        )  # fmt: skip
    config = source.config if dtype is None else source.config.with_dtype(DTYPES[dtype])
    target = None if dtype is None else FLOAT_DTYPES[DTYPES[dtype]]
    planned = _plan(source, target, with_head=to == "meta")
    encoder: Encoder
    if to == "hf":
        encoder = SafetensorsEncoder(planned, SHARD_BYTES)
        side_files = hf_side_files(source, config, quantized)
    else:
        axis = 0 if tokenizer is not None and tokenizer.byte_level else 1
        side_files = meta_side_files(source, config)
        encoder = MetaEncoder(planned, config, mp, embedding_axis=axis)
        if tokenizer is not None and "tokenizer.model" not in side_files:
            notes.append(f"{source.path}: has no tokenizer.model; tokenizer.json is written in its place")

    def produce(item: Planned) -> tuple[Tensor | QuantTensor, None]:
        name = item.name
        if name == "lm_head.weight" and source.config.tied_embeddings:
            name = "model.embed_tokens.weight"
        value = source.load(name)
        if isinstance(value, Tensor):
            value = checked_cast(value, item.dtype, item.name, source.path, allow_nonfinite)
        return value, None

    options = {"to": to, "mp": mp, "dtype": dtype, "allow_nonfinite": allow_nonfinite}
    details = {
        "model": model_summary(source, config.dtype),
        "options": options,
        "schemes": {k: str(v) for k, v in quantized.items()},
    }
    write(
        "convert", source, Path(dst), encoder, produce, side_files, lambda _: details,
        options=options, resume=resume, progress=progress,
    )  # fmt: skip
    return [*source.notes, *notes]


def write(
    job: str,
    source: Checkpoint,
    dst: Path,
    encoder: Encoder,
    produce: Callable[[Planned], tuple[Tensor | QuantTensor, object]],
    side_files: dict[str, bytes | Path],
    details: Callable[[dict[str, object]], dict[str, object]],
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

        def build(file_hashes: dict[str, str], records: dict[str, object]) -> bytes:
            return manifest.build(job, source.format, source_hashes, file_hashes, details(records))

        writer.finish(side_files, build, manifest.NAME)


def checked_cast(tensor: Tensor, dtype: torch.dtype, name: str, path: Path, allow_nonfinite: bool) -> Tensor:
    """The tensor in another float type, unless values would be, or are, NaN or Inf.

    Raises:
        NonFiniteError: naming the tensor and the count.
    """
    result = tensor if tensor.dtype == dtype else tensor.to(dtype)
    if allow_nonfinite or all_finite(result):
        return result
    before, after = _count_nonfinite(tensor), _count_nonfinite(result)
    what = f"{before} values that are NaN or Inf" if before else f"{after} values that overflow {DTYPE_NAMES[dtype]}"
    raise NonFiniteError(
        f"tensor '{name}' holds {what}", path=path, found=f"{after} of {result.numel()}",
        hint="use the source's own dtype or repair it; --allow-nonfinite writes it all the same",
    )  # fmt: skip


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or Inf; one pass, no temporaries."""
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def model_summary(source: Checkpoint, dtype: str) -> dict[str, object]:
    """The few facts about a model that a reader of the manifest looks for first."""
    parameters = sum(int(torch.Size(source.info(name).shape).numel()) for name in source.names())
    return {"architecture": source.config.architecture, "parameters": parameters, "dtype": dtype}


def _plan(source: Checkpoint, dtype: torch.dtype | None, *, with_head: bool) -> list[Planned]:
    config = replace(source.config, tied_embeddings=source.config.tied_embeddings and not with_head)
    planned = []
    for entry in entries(config):
        doubled = entry.name == "lm_head.weight" and source.config.tied_embeddings
        info = source.info("model.embed_tokens.weight" if doubled else entry.name)
        planned.append(Planned(entry.name, entry.shape, dtype or info.dtype, info.scheme))
    return planned


def _bytes(item: Planned) -> int:
    return int(torch.Size(item.shape).numel()) * item.dtype.itemsize


def _count_nonfinite(tensor: Tensor) -> int:
    matrix = tensor.reshape(tensor.shape[0], -1)
    chunks = row_chunks(matrix.shape[0], matrix.shape[1])
    return sum(int((~torch.isfinite(matrix[a:b])).sum()) for a, b in chunks)
