"""The models of an evaluation, the windows they are run on, and a cache of what the reference
computes there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.distributed.shard import require_shareable
from quantkit.errors import CheckpointError, RequestError
from quantkit.evals.table import parse_named_paths, short_names
from quantkit.evals.texts import Text, measuring_tokenizer, token_ids
from quantkit.files.safetensors_io import build_header, open_file
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.folder import code_files
from quantkit.formats.output.destination import destination_errors
from quantkit.model.decoder import Decoder
from quantkit.model.layerwise import Batch
from quantkit.model.linear import QuantLinear
from quantkit.quality.measures import text_windows
from quantkit.tensors.dtypes import DType
from quantkit.text.tokenizer import Tokenizer
from quantkit.version import __version__
from quantkit.via_transformers import Via
from quantkit.via_transformers.forward import final_hidden, open_to_run

FIXED_WINDOW = 2048
"""Longest window of token perplexity and divergence by default, as papers on GPTQ have it."""
ROLLING_WINDOW = 8192
"""Longest window over documents by default: attention masks grow with its square."""


@dataclass(frozen=True)
class Model:
    """A checkpoint, opened, with the tokenizer it is measured with, and the longest rolling
    window in tokens.
    """

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    rolling_window: int


def open_models(
    paths: Sequence[str | Path],
    against: str | Path | None,
    window: int | None,
    group: ProcessGroup = SINGLE,
    backend: Via | None = None,
    *,
    trust_remote_code: bool = False,
) -> list[Model]:
    """Return all models, the reference first and once, by their given names or the shortest
    distinct ends of their paths; folders may be given as ``NAME=PATH``; `backend` and
    `trust_remote_code` are as for `open_to_run`. Raises `RequestError` if there is none but the
    reference, two have one name, the window exceeds a context, or processes cannot share a model,
    and `QuantkitError` if one cannot be opened.
    """
    requested = parse_named_paths(paths)
    if against is not None:
        name, path = parse_named_paths([against])[0]
        same = [one for one in requested if one[1].resolve() == path.resolve()]
        name = name or next((other for other, _ in same if other), None)
        requested = [(name, path), *(one for one in requested if one not in same)]
        if len(requested) == 1:
            raise RequestError("there is no model but the reference", found=path)
    ends = short_names([path for _, path in requested])
    names = [name or end for (name, _), end in zip(requested, ends, strict=True)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(
            "two models have one name", found=twice[0], hint="give each another, as NAME=PATH"
        )
    models = []
    for name, (_, path) in zip(names, requested, strict=True):
        checkpoint = open_to_run(path, via=backend, trust_remote_code=trust_remote_code)
        if checkpoint.config.run_by is None:
            require_runnable(checkpoint)
            require_shareable(checkpoint, group)
        elif group.size > 1:
            raise RequestError(
                "several processes cannot share a model that transformers runs", path=path
            )
        context = checkpoint.config.max_context
        if window is not None and not 2 <= window <= context:
            expected = f"2 to {context} tokens"
            raise RequestError(
                "windows do not fit the model", path=path, found=window, expected=expected
            )
        rolling = window or min(context, ROLLING_WINDOW)
        models.append(Model(name, checkpoint, measuring_tokenizer(checkpoint), rolling))
    return models


def backend_names(model: Decoder) -> list[str]:
    """Backends of a model's quantized layers; empty without quantized layers."""
    return sorted(
        {module.backend.name for module in model.modules() if isinstance(module, QuantLinear)}
    )


def streams(
    models: Sequence[Model], text: Text, length: int, *, same_tokens: bool
) -> list[tuple[int, Tensor]]:
    """Return a text as each model reads it: the number of its tokens, and the text as one stream,
    cut into windows [W, length], with BOS where the tokenizer puts it. Raises `RequestError` if
    `same` is set and they do not all read the same tokens, or if there are less than two tokens.
    """
    ids = [token_ids(model.tokenizer, text.raw) for model in models]
    if same_tokens and (
        odd := [model.name for model, one in zip(models, ids, strict=True) if one != ids[0]]
    ):
        raise RequestError(
            f"{odd[0]} and {models[0].name} do not read the text '{text.name}' as the same tokens"
        )
    if min(len(one) for one in ids) < 2:
        raise RequestError(f"the text '{text.name}' is too short to measure on")
    return [(len(one), text_windows(one, [], length)) for one in ids]


class StateCache:
    """`final_hidden` with a cache on disk: one file for each checkpoint and tokens. Logits, which
    the head computes from these states, are larger by the ratio of vocabulary to width.

    The key of a file consists of everything its states depend on: the checkpoint's files (path,
    name, size, time), the tokens and their positions, and the versions of quantkit, torch and what
    else runs the model.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `DestinationError` if the folder cannot be made."""
        self._folder = folder
        with destination_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def __call__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        *,
        group: ProcessGroup = SINGLE,
        progress: Progress = silent,
    ) -> list[Tensor]:
        """Final hidden states [B, T, D] of every batch, float32, from the cache if it has them.
        Raises `DestinationError` if they cannot be written.
        """
        key = _key(checkpoint, batches)
        path = self._folder / f"{key}.safetensors"
        wanted = []
        for index, batch in enumerate(batches):
            wanted.append((f"{key}.{index}", tuple(batch.tokens.shape)))
        with contextlib.suppress(CheckpointError):  # it is not complete
            if path.is_file():
                file = open_file(path)
                if [(tensor.name, tensor.shape[:-1]) for tensor in file.tensors.values()] == wanted:
                    return [file.read(name) for name, _ in wanted]
        states = final_hidden(checkpoint, batches, group=group, progress=progress)
        tensors = [
            StoredTensor(name, DType.FLOAT32, tuple(state.shape))
            for (name, _), state in zip(wanted, states, strict=True)
        ]
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with destination_errors(path):
                with partial.open("wb") as target:
                    target.write(build_header(tensors))
                    for state in states:
                        target.write(state.contiguous().numpy().data)
                    target.flush()
                    os.fsync(target.fileno())
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return states


def _key(checkpoint: Checkpoint, batches: Sequence[Batch]) -> str:
    files = [*checkpoint.files(), *code_files(checkpoint)]
    facts = [
        str(checkpoint.path.resolve()),
        manifest.identity(files),
        __version__,
        torch.__version__,
    ]
    if checkpoint.config.run_by is not None:
        facts.append(checkpoint.config.run_by)
    digest = hashlib.sha256(json.dumps(facts).encode())
    for batch in batches:
        digest.update(
            json.dumps(
                [list(batch.tokens.shape), batch.tokens.tolist(), batch.positions.tolist()]
            ).encode()
        )
    return digest.hexdigest()
