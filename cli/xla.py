"""``quantkit generate --backend xla``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import click

from quantkit.cli.progress import bar
from quantkit.errors import RequestError


def generate_on_devices(
    path: Path, prompt: str, sampling: dict[str, Any], dtype: Any, weights: str | None, devices: int | None,
    multi_host: bool,
) -> None:  # fmt: skip
    """Continue a prompt; of several hosts the first one prints."""
    from quantkit.jobs.load import load_xla
    from quantkit.runtime.stream import text_pieces

    if not prompt:
        raise RequestError("the prompt is empty")
    with bar("load", unit="tensor") as progress:
        model, tokenizer = load_xla(
            path, devices=devices, dtype=dtype, weights=weights, multi_host=multi_host, progress=progress
        )
    from quantkit.parallel.xla.generate import generate

    ids = tokenizer.encode(prompt, specials=True)
    tokens = generate(model, ids, **sampling)
    speaks = model.leads
    for piece in itertools.chain([prompt], text_pieces(tokenizer, ids, tokens), ["\n"]):
        if speaks:
            click.echo(piece, nl=False)


def float_type(name: str | None) -> Any:
    """The torch type of a ``--dtype``; None is the model's own."""
    from quantkit.formats.checkpoint import FLOAT_DTYPES
    from quantkit.jobs.convert import DTYPES

    return None if name is None else FLOAT_DTYPES[DTYPES[name]]
