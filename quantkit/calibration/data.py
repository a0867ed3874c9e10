"""Calibration text: read, tokenized, and cut into samples."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.tokenizer import Tokenizer


@dataclass(frozen=True)
class Calibration:
    """Samples [N, T] of token ids, and what the manifest says of them."""

    tokens: Tensor
    sha256: str
    seed: int

    def to_json(self) -> dict[str, object]:
        samples, length = self.tokens.shape
        return {"sha256": self.sha256, "samples": samples, "length": length, "seed": self.seed}


def load_calibration(path: Path, tokenizer: Tokenizer, *, samples: int, length: int, seed: int) -> Calibration:
    """Draw samples at random places of a text, each led by BOS where the model has one.

    No sample is padded. The random numbers are the function's own.

    Args:
        path: plain text, or ``.jsonl`` whose lines are objects with a ``text``.
        samples, length: how many, and tokens in each, BOS included.
        seed: of the places.

    Raises:
        RequestError: if the file cannot be read or holds less than one sample.
    """
    if samples < 1 or length < 2:
        raise RequestError("calibration needs at least 1 sample of 2 tokens", found=f"{samples} of {length}")
    try:
        raw = path.read_bytes()
        text = _jsonl_text(raw) if path.suffix == ".jsonl" else raw.decode("utf-8")
    except OSError as error:
        raise RequestError(f"the calibration text cannot be read: {error.strerror}", path=path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"is no calibration text: {error}", path=path, expected="UTF-8 text or JSON lines"
        ) from error
    ids = tokenizer.encode(text)
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    body = ids[len(lead) :] if ids[: len(lead)] == lead else ids
    size = length - len(lead)
    if len(body) < size:
        raise RequestError(
            "the calibration text is shorter than one sample", path=path, found=f"{len(body)} tokens", expected=size,
            hint="give more text, or shorter samples",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(body) - size + 1, (samples,), generator=generator).tolist()
    tokens = torch.tensor([lead + body[start : start + size] for start in starts])
    return Calibration(tokens, hashlib.sha256(raw).hexdigest(), seed)


def _jsonl_text(raw: bytes) -> str:
    return "\n\n".join(json.loads(line)["text"] for line in raw.splitlines() if line.strip())
