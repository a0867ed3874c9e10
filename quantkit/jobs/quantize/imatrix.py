"""Importance matrices in llama.cpp's form: measured on text and written, or read to weight
errors of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor
from quantkit.base.arguments import as_path
from quantkit.base.progress import Progress, silent
from quantkit.calibration.data import is_self
from quantkit.calibration.documents import TextSource
from quantkit.calibration.importance import importance_of, sum_squared_inputs
from quantkit.errors import CheckpointError, DestinationError, NonFiniteError, RequestError
from quantkit.files.gguf_types import GGUF_SUFFIX
from quantkit.files.imatrix_io import Entry, ImportanceMatrix, read_imatrix
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.formats.gguf.names import gguf_tensors
from quantkit.formats.gguf.stored_form import rearrange_columns, restore_columns
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.settings import gptq_settings

_DAT = ".dat"
# Tokens per chunk of llama.cpp by default. The older form counts chunks, not tokens, and does not
# state their size.
_CHUNK = 512


@dataclass(frozen=True)
class ImatrixResult:
    """What `quantkit.imatrix` wrote: the file, for how many tensors, from how many tokens of
    which text.
    """

    path: Path
    tensors: int
    tokens: int
    text: str

    def to_json(self) -> dict[str, object]:
        """Convert the result to plain values."""
        return {
            "path": str(self.path),
            "tensors": self.tensors,
            "tokens": self.tokens,
            "text": self.text,
        }

    def lines(self) -> list[str]:
        """Write the report for people."""
        return [
            f"wrote {self.path}: {self.tensors} tensors, from {self.tokens} tokens of {self.text}"
        ]


def imatrix(
    src: str | Path,
    dst: str | Path,
    *,
    calibration: TextSource | None = None,
    text_column: str | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    progress: Progress = silent,
) -> ImatrixResult:
    """Measure the mean squared inputs of each linear, and write them in llama.cpp's form.

    Args:
        src: a model whose architecture GGUF has.
        dst: the new file: GGUF if its name ends so, or the older form, ``.dat``.
        calibration, text_column, samples, length, seed: as in `quantize`, whose samples for GPTQ
            these are.
        progress: as in `convert`.

    Raises:
        RequestError: for another name of the file, or a text that cannot be used.
        CheckpointError, UnsupportedError: if `src` is damaged, or GGUF does not have its
            architecture.
        DestinationError: if `dst` exists or cannot be written.
        NonFiniteError: if the inputs of a linear are NaN or Inf.
    """
    path = as_path("dst", dst)
    if path.suffix.lower() not in (_DAT, GGUF_SUFFIX):
        raise RequestError(
            "unknown format of importance matrix",
            found=path.name,
            expected="a name that ends in .gguf or .dat",
        )
    if path.exists():
        raise DestinationError("exists already; nothing is overwritten", path=path)
    sample_options = {
        "calibration": calibration,
        "text_column": text_column,
        "samples": samples,
        "length": length,
        "seed": seed,
    }
    # GPTQ's samples do not depend on the scheme: any that GPTQ solves will do here.
    options = QuantizeOptions(src, dst, "int4-g32", method="gptq", **sample_options)  # type: ignore[arg-type]
    source = open_checkpoint(as_path("src", src))
    require_runnable(source)
    tensors = list(_list_measured_tensors(source.config))
    settings = gptq_settings(options, (), source, load_checked_tokenizer(source)[0])
    assert settings is not None  # for GPTQ
    drawn = settings.draw(source, progress=progress)
    if calibration is None:
        text = "included text"
    elif is_self(calibration):
        text = "text of the model itself"
    elif isinstance(calibration, (str, Path)):
        # The last part of the path alone: the file must not depend on where the text is.
        text = Path(calibration).name
    else:
        text = "text"
    sums, counts = sum_squared_inputs(source, drawn.tokens, progress=progress)
    for name, total in sums.items():
        if not total.isfinite().all():
            raise NonFiniteError(f"the inputs of linear '{name}' are NaN or Inf", path=source.path)
    entries = {}
    for tensor in tensors:
        entry = _build_entry(tensor, sums, counts)
        # Without tokens there is no mean: an expert that no sample reaches has no entry.
        if entry is not None:
            entries[tensor.name] = entry
    matrix = ImportanceMatrix(entries, text, *drawn.tokens.shape)
    if path.suffix.lower() == _DAT:
        content = matrix.to_dat()
    else:
        content = matrix.to_gguf()
    # A killed job must not leave a file that looks complete.
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        unfinished.write_bytes(content)
        unfinished.rename(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise DestinationError(
            f"cannot be written: {error.strerror or error}", path=path
        ) from error
    return ImatrixResult(path, len(entries), drawn.tokens.numel(), text)


def importance_from(path: Path, source: Checkpoint) -> dict[str, Tensor]:
    """Read the importance of the inputs of linears, by name, from an importance matrix, in the form
    in which `input_importance` measures it.

    Raises:
        CheckpointError: if the file is damaged, or of another model.
        UnsupportedError: if GGUF does not have the model's architecture.
    """
    matrix = read_imatrix(path)
    importance_by_linear = {}
    entries = matrix.entries
    # Entries of the newer form, which states its chunk size, count tokens.
    tokens_per_count = 1 if matrix.chunk_size else _CHUNK
    for tensor in _list_measured_tensors(source.config):
        entry = entries.get(tensor.name)
        if entry is None:
            continue
        columns = tensor.shape[-1]
        if tensor.stacked is not None:
            experts = tensor.shape[0]
        else:
            experts = 1
        if entry.means.numel() != columns * experts:
            raise CheckpointError(
                f"the importance of '{tensor.name}' does not fit this model",
                path=path,
                found=entry.means.numel(),
                expected=f"{columns * experts} inputs",
                hint="measure it on this model",
            )
        means = restore_columns(entry.means.view(experts, columns), tensor.places[0])
        assert isinstance(means, Tensor)
        counts = entry.counts.expand(experts) * tokens_per_count
        for part, place in zip(tensor.parts, tensor.places, strict=True):
            # Parts of a fused tensor have the same inputs, which are the only row.
            expert = place.expert or 0
            weights = importance_of(means[expert], counts[expert].item())
            if weights is not None:
                importance_by_linear[part.removesuffix(".weight")] = weights
    if not importance_by_linear:
        raise CheckpointError(
            "the importance matrix has no tensor of this model",
            path=path,
            found=next(iter(entries), "nothing"),
            expected="names of GGUF's tensors, such as blk.0.attn_q.weight",
        )
    return importance_by_linear


def _list_measured_tensors(config: ModelConfig) -> Iterator[DiskTensor]:
    """Yield the tensors whose inputs are measured: linears, and stacks of experts."""
    for tensor in gguf_tensors(config):
        is_linear = tensor.quantizable or tensor.stacked is not None
        if is_linear and tensor.name.endswith(".weight"):
            yield tensor


def _build_entry(
    tensor: DiskTensor, sums: Mapping[str, Tensor], counts: Mapping[str, int]
) -> Entry | None:
    """Build the entry of a tensor; None if no token reached it."""
    names = [part.removesuffix(".weight") for part in tensor.parts]
    if tensor.stacked is None:
        # The other parts of a fused tensor have the same inputs.
        names = names[:1]
    if not any(name in sums for name in names):
        return None
    zeros = torch.zeros(tensor.shape[-1])
    token_counts = []
    means = []
    for name in names:
        count = counts.get(name, 0)
        token_counts.append(float(count))
        means.append(sums.get(name, zeros) / max(1, count))
    stored_means = rearrange_columns(torch.stack(means), tensor.places[0])
    assert isinstance(stored_means, Tensor)
    return Entry(stored_means, torch.tensor(token_counts))
