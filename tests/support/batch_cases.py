"""A model and requests that begin at different steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import torch
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.request import Request

LENGTHS = (1, 400, 2, 17, 16, 239, 240, 241, 33, 300, 5, 64, 120, 8, 257, 15)
"""Of prompts, around what is read at a time (240) and what kernels take as few rows (16)."""


CONTEXT = 512


def batch_model(
    folder: Path | str, backend: str | None = None, group: ProcessGroup = SINGLE
) -> Decoder:
    model = load_model(
        Path(folder), device="cpu", dtype=torch.float32, backend=backend, group=group
    )
    model.config = replace(model.config, eos_token_ids=())
    return model


def random_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [
        row[:length].tolist() for row, length in zip(_texts(len(lengths)), lengths, strict=True)
    ]


def _texts(count: int) -> Tensor:
    return oracle.random_tokens(CONTEXT, batch=count)


def staggered_requests(**options: Any) -> list[Request]:
    """Sixteen requests that end one after the other."""
    return [
        Request(prompt, 3 + 5 * index % 23, **options)
        for index, prompt in enumerate(random_prompts())
    ]
