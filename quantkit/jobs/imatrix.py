"""Importance matrices in llama.cpp's form: measured on text and written, or read to weight errors of rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor
from quantkit.architectures.gguf import gguf_tensors
from quantkit.arguments import as_integer, as_path, as_seed
from quantkit.calibration import effort
from quantkit.calibration.conversations import model_chat
from quantkit.calibration.data import load_calibration
from quantkit.calibration.documents import TextSource
from quantkit.calibration.importance import importance_of, squared_inputs
from quantkit.calibration.packaged import PackagedText
from quantkit.errors import CheckpointError, DestinationError, RequestError
from quantkit.files.gguf_types import GGUF
from quantkit.files.imatrix_io import Entry, ImportanceMatrix, read_imatrix
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.progress import Progress, silent

_DAT = ".dat"
_CHUNK = 512  # tokens, by default, of llama.cpp's chunks, which the older form counts


@dataclass(frozen=True)
class ImatrixResult:
    """What `quantkit.imatrix` wrote: the file, for how many tensors, from how many tokens of which text."""

    path: Path
    tensors: int
    tokens: int
    text: str

    def to_json(self) -> dict[str, object]:
        """All of it, as plain values."""
        return {"path": str(self.path), "tensors": self.tensors, "tokens": self.tokens, "text": self.text}

    def lines(self) -> list[str]:
        """The report for people."""
        return [f"wrote {self.path}: {self.tensors} tensors, from {self.tokens} tokens of {self.text}"]


def imatrix(
    src: str | Path, dst: str | Path, *, calibration: TextSource | None = None, text_column: str | None = None,
    samples: int = effort.SAMPLES, length: int | None = None, seed: int = effort.SEED, progress: Progress = silent,
) -> ImatrixResult:  # fmt: skip
    """Measure the mean squared inputs of each linear, and write them in llama.cpp's form.

    Args:
        src: a model whose architecture GGUF has.
        dst: the new file: GGUF if its name ends so, or the older form, ``.dat``.
        calibration, text_column, samples, length, seed: as in `quantize`.
        progress: as in `convert`.

    Raises:
        RequestError: for another name of the file, or a text that cannot be used.
        CheckpointError, UnsupportedError: if `src` is damaged, or GGUF does not have its architecture.
        DestinationError: if `dst` exists or cannot be written.
    """
    path = as_path("dst", dst)
    if path.suffix.lower() not in (_DAT, f".{GGUF.lstrip('.')}"):
        raise RequestError("the name tells the form of an importance matrix", found=path.name, expected=".gguf or .dat")
    if path.exists():
        raise DestinationError("exists already; nothing is overwritten", path=path)
    source = open_checkpoint(as_path("src", src))
    require_runnable(source)
    tensors = list(_with_inputs(source.config))
    tokenizer, _ = checked_tokenizer(source)
    if tokenizer is None:
        raise RequestError(
            "an importance matrix is measured on text, and the source has no tokenizer", path=source.path
        )
    count = as_integer("samples", samples)
    size = effort.EFFORTS["default"].length(source.config) if length is None else as_integer("length", length)
    chat = partial(model_chat, source.path, tokenizer)
    if calibration is None:
        packaged = PackagedText.of(tokenizer, chat()[0], seed=as_seed("seed", seed), wanted=count * size)
        drawn = packaged.draw(samples=count, length=size, seed=seed, near_uniform=lambda pieces: [False] * len(pieces))
        text = "included text"
    else:
        drawn = load_calibration(
            calibration, tokenizer, samples=count, length=size, seed=as_seed("seed", seed), column=text_column,
            chat=chat,
        )  # fmt: skip
        text = Path(calibration).name if isinstance(calibration, (str, Path)) else "text"
    sums, counts = squared_inputs(source, drawn.tokens, progress=progress)
    entries = {tensor.name: entry for tensor in tensors if (entry := _entry(tensor, sums, counts)) is not None}
    found = ImportanceMatrix(entries, text, *drawn.tokens.shape)
    content = found.to_dat() if path.suffix.lower() == _DAT else found.to_gguf()
    partial_file = path.with_name(f"{path.name}.partial")
    try:
        partial_file.write_bytes(content)
        partial_file.rename(path)
    except OSError as error:
        raise DestinationError(f"cannot be written: {error.strerror or error}", path=path) from error
    return ImatrixResult(path, len(entries), drawn.tokens.numel(), text)


def importance_from(path: Path, source: Checkpoint) -> dict[str, Tensor]:
    """The importance of the inputs of linears, by name, as `input_importance` measures it, from an importance matrix.

    Raises:
        CheckpointError: if the file is damaged, or of another model.
        UnsupportedError: if GGUF does not have the model's architecture.
    """
    matrix, found = read_imatrix(path), {}
    entries, tokens = matrix.entries, 1 if matrix.chunk_size else _CHUNK
    for tensor in _with_inputs(source.config):
        entry = entries.get(tensor.name)
        if entry is None:
            continue
        columns, experts = tensor.shape[-1], tensor.shape[0] if tensor.stacked is not None else 1
        if entry.means.numel() != columns * experts:
            raise CheckpointError(
                f"the importance of '{tensor.name}' is not of this model", path=path, found=entry.means.numel(),
                expected=f"{columns * experts} inputs", hint="make it from this model",
            )  # fmt: skip
        means, counts = entry.means.view(experts, columns), entry.counts.expand(experts) * tokens
        for part, place in zip(tensor.parts, tensor.places, strict=True):
            own = place.expert or 0
            weights = importance_of(means[own], counts[own].item())
            if weights is not None:
                found[part.removesuffix(".weight")] = weights
    if not found:
        raise CheckpointError(
            "the importance matrix has no tensor of this model", path=path,
            found=next(iter(entries), "nothing"), expected="names of GGUF's tensors, such as blk.0.attn_q.weight",
        )  # fmt: skip
    return found


def _with_inputs(config: ModelConfig) -> Iterator[DiskTensor]:
    """The tensors whose inputs are measured: linears, and stacks of experts."""
    for tensor in gguf_tensors(config):
        if (tensor.quantizable or tensor.stacked is not None) and tensor.name.endswith(".weight"):
            yield tensor


def _entry(tensor: DiskTensor, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> Entry | None:
    """The entry of a tensor; None if no token reached it."""
    names = [part.removesuffix(".weight") for part in tensor.parts]
    if tensor.stacked is None:
        names = names[:1]  # the others have the same inputs
    if not any(name in sums for name in names):
        return None
    counted = torch.tensor([float(counts.get(name, 0)) for name in names])
    zeros = torch.zeros(tensor.shape[-1])
    means = torch.stack([sums.get(name, zeros) / max(1, counts.get(name, 0)) for name in names])
    return Entry(means, counted) if math.isfinite(means.sum().item()) else None
