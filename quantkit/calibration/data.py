"""Calibration text: read, tokenized, and cut into samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.files import file_text
from quantkit.calibration.hub import hub_id, hub_text
from quantkit.errors import RequestError
from quantkit.tokenizer import Tokenizer

# What is read of a text: four times the samples in English, and never less than 4 MiB.
_BYTES_PER_TOKEN = 16
_LEAST_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Calibration:
    """Samples [N, T] of token ids, int64, and what the manifest says of them.

    ``sha256`` is that of the file or, where ``source`` names a dataset on a hub, of the text read.
    """

    tokens: Tensor
    sha256: str
    seed: int
    source: str | None = None

    def to_json(self) -> dict[str, object]:
        samples, length = self.tokens.shape
        of_hub = {} if self.source is None else {"source": self.source}
        return {"sha256": self.sha256, "samples": samples, "length": length, "seed": self.seed, **of_hub}


def load_calibration(source: str | Path, tokenizer: Tokenizer, *, samples: int, length: int, seed: int) -> Calibration:
    """Draw samples at random places of a text, each led by BOS where the tokenizer leads a text by it.

    No sample is padded. The random numbers are the function's own. Of a long text its first
    16 bytes for each token drawn are read, or its first 4 MiB where that is more.

    Args:
        source: a file of plain text, ``.json`` or ``.jsonl`` whose lines are objects with a
            ``text``, or ``.parquet`` with such a column; or, as a string where there is no such
            file, a dataset on the hub: ``owner/name``, ``owner/name:config`` or
            ``owner/name:config:split``. A `Path` is always a file.
        samples, length: how many, and tokens in each, BOS included.
        seed: of the places.

    Raises:
        RequestError: if the text cannot be read or holds less than one sample.
    """
    if samples < 1 or length < 2:
        raise RequestError("calibration needs at least 1 sample of 2 tokens", found=f"{samples} of {length}")
    limit = max(_BYTES_PER_TOKEN * samples * length, _LEAST_BYTES)
    dataset = hub_id(source)
    if dataset is None:
        text, sha256 = file_text(Path(source), limit)
    else:
        text = hub_text(dataset, limit)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
    if not text.strip():
        raise RequestError("the calibration text is empty", path=source)
    ids = tokenizer.encode(text)
    lead = 1 if tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id] else 0
    size, found = length - lead, len(ids) - lead
    if found < size:
        raise RequestError(
            "the calibration text is shorter than one sample", path=source, found=f"{found} tokens", expected=size,
            hint="give more text, or shorter samples",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(found - size + 1, (samples,), generator=generator)
    stream = torch.tensor(ids)
    tokens = torch.cat([stream[:lead].expand(samples, lead), stream[lead:].unfold(0, size, 1)[starts]], dim=1)
    return Calibration(tokens, sha256, seed, None if dataset is None else str(dataset))
