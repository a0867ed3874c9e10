"""Find out what kind of checkpoint is at a path, and open it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quantkit.base.arguments import as_path, as_string
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option, join_messages
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.files.located import gguf_models, locate_existing_model, locate_model
from quantkit.files.source import SourceFile
from quantkit.formats import manifest
from quantkit.formats.checkpoint import make_lora_adapter_error
from quantkit.formats.container import Container, StoredCheckpoint
from quantkit.formats.output.destination import manifest_path
from quantkit.formats.output.staging import require_finished
from quantkit.formats.registry import CONTAINERS, HF
from quantkit.tensors.dtypes import DType

if TYPE_CHECKING:
    from quantkit.formats.lora import adapter_config
else:
    adapter_config = LateModule("quantkit.formats.lora.adapter_config")

Found = tuple[str, Container]
"""A set of weights, by its name for ``--weights``, and its container."""

_DOWNLOAD = "download it again"
_ADAPTER_CONFIG = "adapter_config.json"

WeightKind = Literal["meta", "safetensors", "bin", "gpt-fast", "gpt-fast-int8", "gguf"]
"""A set of weights of a folder that holds several."""


def open_checkpoint(
    path: str | Path,
    weights: WeightKind | None = None,
    *,
    tensors_only: bool = False,
    text_part: bool = False,
    floats_as: DType | None = None,
) -> StoredCheckpoint:
    """Open the checkpoint in a folder; headers only.

    If a folder has several sets of weights, safetensors are preferred to ``.bin``, and a Hugging
    Face set with an index to a Meta set, with a note on what is ignored; a Meta set along with an
    unindexed Hugging Face set is ambiguous.

    Args:
        path: a Meta or Hugging Face folder, or a GGUF file.
        weights: ``meta``, ``safetensors``, ``bin``, ``gpt-fast``, ``gpt-fast-int8`` or ``gguf`` to
            pick a set.
        tensors_only: whether to accept the tensors as they are, of whatever architecture. This is
            the default for a folder that quantkit made in this way, if its architecture is not
            known.
        text_part: whether to take the text part alone of a model that also reads images or sound,
            if its family is known: to run it on text.
        floats_as: see `Container.open`.

    Returns:
        The checkpoint: its config, and its tensors by canonical names, which are read on request.

    Raises:
        RequestError: if the path does not exist.
        CheckpointError: if there is no checkpoint, it is ambiguous, damaged or not finished.
        UnsupportedError: if its kind is known, but not read.
    """
    path = locate_model(as_path("path", path))
    require_finished(path, manifest.NAME)
    if tensors_only or not was_written_tensors_only(path):
        return open_finished_or_not(
            path, weights, tensors_only=tensors_only, text_part=text_part, floats_as=floats_as
        )
    try:
        return open_finished_or_not(path, weights, text_part=text_part, floats_as=floats_as)
    except (CheckpointError, UnsupportedError):
        return open_finished_or_not(path, weights, tensors_only=True, floats_as=floats_as)


def open_pair(a: str | Path, b: str | Path) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    """Open two checkpoints to compare: if one is opened by its tensors only, so is the other; see
    `open_checkpoint`.
    """
    if was_written_tensors_only(a) or was_written_tensors_only(b):
        # All tensors of Meta's folders are known.
        with contextlib.suppress(RequestError):
            return open_checkpoint(a, tensors_only=True), open_checkpoint(b, tensors_only=True)
    try:
        first = open_checkpoint(a)
        second = open_checkpoint(b, tensors_only=not first.config.runnable)
    except UnsupportedError:
        # The second may show how to open the first.
        second = open_checkpoint(b)
        first = open_checkpoint(a, tensors_only=not second.config.runnable)
    if first.config.runnable and not second.config.runnable:
        first = open_checkpoint(a, tensors_only=True)
    return first, second


def open_finished_or_not(
    path: str | Path,
    weights: str | None = None,
    *,
    tensors_only: bool = False,
    text_part: bool = False,
    floats_as: DType | None = None,
) -> StoredCheckpoint:
    """Open a checkpoint as `open_checkpoint` does, also a folder that is being written."""
    folder = locate_existing_model(path)
    descriptions: dict[str, str] = {}
    for known_container in CONTAINERS.values():
        descriptions.update(known_container.weights)
    if weights is not None and as_string("weights", weights) not in descriptions:
        expected = ", ".join(descriptions)
        raise RequestError("unknown kind of weights", found=weights, expected=expected)
    candidates = _find_candidates(folder)
    containers_by_kind = dict(candidates)
    if not candidates and not folder.is_dir():
        # Raises if it is not a regular file.
        SourceFile(folder)
        expected = "the folder that contains it, its config and its tokenizer"
        raise CheckpointError("is a file", path=folder, expected=expected)
    if weights is None:
        kind, container = _choose(folder, candidates)
    elif weights in containers_by_kind:
        kind = weights
        container = containers_by_kind[weights]
    else:
        present_kinds = ", ".join(kind for kind, _ in candidates) or "none"
        raise CheckpointError(f"has no {weights} weights", path=folder, found=present_kinds)
    if tensors_only and container is not HF:
        problem = (
            "only Hugging Face folders can be read by their tensors; all tensors of"
            f" {container.title} are known"
        )
        raise RequestError(problem, path=folder)
    try:
        if text_part and container is HF:
            checkpoint: StoredCheckpoint = HF.open_text_part(folder, kind, floats_as)
        else:
            checkpoint = container.open(
                folder, kind, tensors_only=tensors_only, floats_as=floats_as
            )
    except CheckpointError as error:
        hint = error.hint or ""
        if _DOWNLOAD not in hint or not manifest_path(folder).is_file():
            raise
        # quantkit made it, so it is not from a hub.
        hint = hint.replace(_DOWNLOAD, "copy it or make it again")
        raise CheckpointError(
            error.problem, path=error.path, found=error.found, expected=error.expected, hint=hint
        ) from error
    if (folder / _ADAPTER_CONFIG).is_file():
        checkpoint.notes += adapter_config.note_folder_adapter(folder)
    if weights is None:
        for other_kind, _ in candidates:
            if other_kind != kind:
                checkpoint.notes.append(
                    f"{folder}: {descriptions[other_kind]} along with {descriptions[kind]}; ignored"
                )
    return checkpoint


def with_codes(checkpoint: StoredCheckpoint) -> StoredCheckpoint:
    """Adapt a checkpoint to read all codes as such; see `Container.with_codes`."""
    return CONTAINERS[checkpoint.format].with_codes(checkpoint)


def was_written_tensors_only(path: str | Path) -> bool:
    """Check whether a manifest says that quantkit copied the tensors of an unknown
    architecture.
    """
    folder = locate_model(path)
    if not (folder / manifest.NAME).is_file():
        return False
    try:
        return manifest.read(folder).get("tensors_only") is True
    except CheckpointError:
        return False


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder contains a model's config."""
    return any((folder / container.config_file).is_file() for container in CONTAINERS.values())


def _find_candidates(folder: Path) -> list[Found]:
    candidates: list[Found] = []
    for container in CONTAINERS.values():
        for kind in container.find_weight_kinds(folder):
            candidates.append((kind, container))
    return candidates


def _choose(folder: Path, candidates: list[Found]) -> Found:
    if not candidates:
        raise _make_no_weights_error(folder)
    first: dict[str, Found] = {}
    for kind, container in candidates:
        # As transformers chooses, whichever has an index.
        first.setdefault(container.name, (kind, container))
    # Derived weights count only if those that they are made from are absent.
    eligible = []
    for kind, container in first.values():
        if not container.derived:
            eligible.append((kind, container))
    eligible = eligible or list(first.values())
    indexed = []
    for kind, container in eligible:
        if container.has_index(folder, kind):
            indexed.append((kind, container))
    if len(eligible) > 1 and not indexed:
        descriptions = []
        options = []
        for kind, container in eligible:
            descriptions.append(container.weights[kind])
            options.append(Message(Option("weights", value=kind)))
        raise CheckpointError(
            "contains two sets of weights",
            path=folder,
            found=" and ".join(descriptions),
            hint=Message("pick one with ", join_messages(" or ", options)),
        )
    return (indexed or eligible)[0]


def _make_no_weights_error(folder: Path) -> Exception:
    if (folder / _ADAPTER_CONFIG).is_file():
        return make_lora_adapter_error(folder, _ADAPTER_CONFIG)
    gguf_files = gguf_models(folder)
    if gguf_files:
        file_names = ", ".join(path.name for path in gguf_files)
        return CheckpointError(
            "contains several GGUF models", path=folder, found=file_names, hint="name the file"
        )
    problem = "has no weights"
    # An output with several results has a folder for each.
    results = manifest.models_in(folder)
    if results:
        hint = f"name one of the models in it: {', '.join(map(str, results))}"
        return CheckpointError(problem, path=folder, hint=hint)
    # Meta's repositories on the hub have its own format in this folder.
    originals = _find_candidates(folder / "original")
    if originals:
        _, container = originals[0]
        hint = f"there is a {container.title} checkpoint in {folder / 'original'}"
        return CheckpointError(problem, path=folder, hint=hint)
    expected = (
        "consolidated.00.pth, model.safetensors, pytorch_model.bin, an index of shards or one"
        " *.gguf"
    )
    return CheckpointError(problem, path=folder, expected=expected)
