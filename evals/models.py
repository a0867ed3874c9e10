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
    """Open all models, the reference first and once, under their given names or the shortest
    distinct ends of their paths; folders may be given as ``NAME=PATH``; `backend` and
    `trust_remote_code` are as for `open_to_run`. Raises `RequestError` if there is none but the
    reference, two have one name, the window exceeds a context, or processes cannot share a model,
    and `QuantkitError` if one cannot be opened.
    """
    requested = parse_named_paths(paths)
    if against is not None:
        requested = _move_reference_first(requested, against)
    path_ends = short_names([path for _, path in requested])
    names: list[str] = []
    for (given_name, _), path_end in zip(requested, path_ends, strict=True):
        names.append(given_name or path_end)
    for name in names:
        # Results, listeners and tables refer to a model by its name.
        if names.count(name) > 1:
            raise RequestError(
                "two models have the same name", found=name, hint="name them: NAME=PATH"
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
                "the window does not fit the model's context",
                path=path,
                found=window,
                expected=expected,
            )
        rolling = window or min(context, ROLLING_WINDOW)
        models.append(Model(name, checkpoint, measuring_tokenizer(checkpoint), rolling))
    return models


def _move_reference_first(
    requested: Sequence[tuple[str | None, Path]], against: str | Path
) -> list[tuple[str | None, Path]]:
    """Put the reference before the models, and leave it out among them. A reference without a name
    takes the one that it has among the models.

    Raises:
        RequestError: if there is no model but the reference.
    """
    reference_name, reference_path = parse_named_paths([against])[0]
    resolved_reference = reference_path.resolve()
    models: list[tuple[str | None, Path]] = []
    for name, path in requested:
        if path.resolve() == resolved_reference:
            reference_name = reference_name or name
        else:
            models.append((name, path))
    if not models:
        raise RequestError("the reference is the only model", found=reference_path)
    return [(reference_name, reference_path), *models]


def backend_names(model: Decoder) -> list[str]:
    """List the backends of a model's quantized layers; empty without quantized layers."""
    names = set()
    for module in model.modules():
        if isinstance(module, QuantLinear):
            names.add(module.backend.name)
    return sorted(names)


def tokenize_streams(
    models: Sequence[Model], text: Text, length: int, *, same_tokens: bool
) -> list[tuple[int, Tensor]]:
    """Tokenize a text for each model: the number of its tokens, and the text as one stream, cut
    into windows [W, length], with BOS where the tokenizer puts it. Raises `RequestError` if
    `same_tokens` is set and they do not all read the same tokens, or if there are less than two
    tokens.
    """
    ids_by_model = [token_ids(model.tokenizer, text.raw) for model in models]
    if same_tokens:
        # A divergence compares the predictions of the same next token.
        for model, ids in zip(models, ids_by_model, strict=True):
            if ids != ids_by_model[0]:
                raise RequestError(
                    f"{model.name} and {models[0].name} tokenize the text '{text.name}' differently"
                )
    # The first token of a window predicts the second: one alone has nothing to measure.
    if min(map(len, ids_by_model)) < 2:
        raise RequestError(f"the text '{text.name}' is too short to measure")
    token_streams = []
    for ids in ids_by_model:
        # No token is added at the windows' beginnings: papers cut one stream.
        token_streams.append((len(ids), text_windows(ids, [], length)))
    return token_streams


class StateCache:
    """`final_hidden` with a cache on disk: one file for each checkpoint and tokens. Logits, which
    the head computes from these states, are larger by the ratio of vocabulary to width.

    The key of a file consists of everything its states depend on: the checkpoint's files (path,
    name, size, time), the tokens and their positions, and the versions of quantkit, torch and what
    else runs the model.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder. Raises `DestinationError` if that fails."""
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
        """Compute the final hidden states [B, T, D] of every batch in float32, or read them from
        the cache if it has them. Raises `DestinationError` if they cannot be written.
        """
        key = _key(checkpoint, batches)
        path = self._folder / f"{key}.safetensors"
        expected_tensors = []
        for index, batch in enumerate(batches):
            expected_tensors.append((f"{key}.{index}", tuple(batch.tokens.shape)))
        # A damaged file is computed again, like an absent one.
        with contextlib.suppress(CheckpointError):
            if path.is_file():
                file = open_file(path)
                stored_tensors = []
                for tensor in file.tensors.values():
                    # The hidden size follows from the checkpoint, which the key identifies.
                    stored_tensors.append((tensor.name, tensor.shape[:-1]))
                if stored_tensors == expected_tensors:
                    return [file.read(name) for name, _ in expected_tensors]
        states = final_hidden(checkpoint, batches, group=group, progress=progress)
        tensors = []
        for (name, _), state in zip(expected_tensors, states, strict=True):
            tensors.append(StoredTensor(name, DType.FLOAT32, tuple(state.shape)))
        # Written under another name and renamed, so that an interrupted run leaves no half file
        # under the final name; the process id keeps two runs apart.
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
    # The code in a model's folder computes its states too.
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
        inputs = [list(batch.tokens.shape), batch.tokens.tolist(), batch.positions.tolist()]
        digest.update(json.dumps(inputs).encode())
    return digest.hexdigest()
