"""Convert a checkpoint: another format, sharding or float type; the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import FLOAT_DTYPES, Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.encoders import Encoder, MetaEncoder, Planned, SafetensorsEncoder
from quantkit.formats.folder import checked_tokenizer, hf_side_files, meta_side_files, require_new_names
from quantkit.formats.staging import require_name
from quantkit.jobs.output import SHARD_BYTES, Work, model_summary, write
from quantkit.progress import Progress, silent
from quantkit.tensors.finite import checked_cast
from quantkit.tensors.qtensor import QuantTensor

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
    source_check: bool = True,
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
        source_check: see first that the source predicts a packaged text at all, where it has a tokenizer.
        progress: told of every tensor.

    Returns:
        Notes for the user.

    Raises:
        QuantkitError: of the kind that says what is wrong; `dst` is then not there.
    """
    source, work, notes = conversion(
        src, dst, to=to, mp=mp, dtype=dtype, weights=weights, allow_nonfinite=allow_nonfinite,
        source_check=source_check,
    )  # fmt: skip
    return notes + write(work, source, Path(dst), resume=resume, progress=progress)


def conversion(
    src: str | Path, dst: str | Path, *, to: str, mp: int, dtype: str | None, weights: str | None,
    allow_nonfinite: bool, source_check: bool,
) -> tuple[Checkpoint, Work, list[str]]:  # fmt: skip
    """A conversion before it is carried out: the source, the work, and notes for the user.

    Raises:
        QuantkitError: as `convert` does for what headers alone can tell.
    """
    if to not in ("hf", "meta"):
        raise RequestError("unknown target format", found=to, expected="hf or meta")
    if dtype is not None and dtype not in DTYPES:
        raise RequestError("unknown dtype", found=dtype, expected=", ".join(DTYPES))
    if to == "hf" and mp != 1:
        raise RequestError("--mp goes with --to meta", found=f"--mp {mp}")
    require_name(Path(dst))
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

    options: dict[str, object] = {"to": to, "mp": mp, "dtype": dtype, "allow_nonfinite": allow_nonfinite}
    details: dict[str, object] = {
        "model": model_summary(source, config.dtype),
        "options": options,
        "schemes": {k: str(v) for k, v in quantized.items()},
    }
    work = Work(
        "convert", encoder, produce, side_files, lambda folder, records: (details, {}), options,
        source_check=source_check,
    )  # fmt: skip
    return source, work, [*source.notes, *notes]


def _plan(source: Checkpoint, dtype: torch.dtype | None, *, with_head: bool) -> list[Planned]:
    config = replace(source.config, tied_embeddings=source.config.tied_embeddings and not with_head)
    planned = []
    for entry in parameters(config):
        doubled = entry.name == "lm_head.weight" and source.config.tied_embeddings
        info = source.info("model.embed_tokens.weight" if doubled else entry.name)
        planned.append(Planned(entry.name, entry.shape, dtype or info.dtype, info.scheme))
    return planned
