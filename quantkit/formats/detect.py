"""Tell what lies at a path, and open it."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.files.source import SourceFile
from quantkit.formats.hf import HFCheckpoint, index_path, weight_kinds
from quantkit.formats.meta import MetaCheckpoint, shard_paths

WEIGHTS = ("meta", "safetensors", "bin")
_SPELLED = {"meta": "consolidated.*.pth", "safetensors": "safetensors", "bin": "pytorch_model*.bin"}


def open_checkpoint(path: str | Path, weights: str | None = None) -> Checkpoint:
    """Open the checkpoint in a folder; headers only.

    Where a folder holds several sets of weights, safetensors win over ``.bin``, and a
    Hugging Face set with an index over a Meta set, with a note of what is ignored; a Meta
    set beside an unindexed Hugging Face set is ambiguous.

    Args:
        path: a Meta or Hugging Face folder.
        weights: ``meta``, ``safetensors`` or ``bin`` to pick a set.

    Raises:
        CheckpointError: if there is no checkpoint, it is ambiguous, or it is damaged.
        UnsupportedError: if its kind is known and cannot be read.
    """
    folder = Path(path)
    if weights is not None and weights not in WEIGHTS:
        raise RequestError("unknown kind of weights", found=weights, expected=", ".join(WEIGHTS))
    if not folder.exists():
        raise CheckpointError("does not exist", path=folder)
    if not folder.is_dir():
        raise _not_a_folder(folder)
    kind = _choose(folder) if weights is None else weights
    if kind not in _present(folder):
        raise CheckpointError(f"has no {kind} weights", path=folder, found=", ".join(_present(folder)) or "none")
    checkpoint = MetaCheckpoint(folder) if kind == "meta" else HFCheckpoint(folder, kind)
    if weights is None:
        ignored = [_SPELLED[other] for other in _present(folder) if other != kind]
        checkpoint.notes += [f"{folder}: {files} beside {_SPELLED[kind]}; ignored" for files in ignored]
    return checkpoint


def _choose(folder: Path) -> str:
    kinds = _present(folder)
    if not kinds:
        raise _no_weights(folder)
    if "safetensors" in kinds and "bin" in kinds:
        kinds.remove("bin")  # as transformers chooses, whichever has an index
    indexed = [kind for kind in kinds if kind != "meta" and index_path(folder, kind).is_file()]
    if "meta" in kinds and len(kinds) > 1 and not indexed:
        raise CheckpointError(
            "holds two sets of weights", path=folder, found=f"consolidated.*.pth and {kinds[0]}",
            hint=f"pick one with --weights meta or --weights {kinds[0]}",
        )  # fmt: skip
    return (indexed or kinds)[0]


def _present(folder: Path) -> list[str]:
    """The sets of weights in a folder, the one to prefer first."""
    return [*weight_kinds(folder), *(["meta"] if shard_paths(folder) else [])]


def _not_a_folder(path: Path) -> Exception:
    file = SourceFile(path)
    if file.read(0, min(file.size, 4)) == b"GGUF":
        return UnsupportedError("GGUF files are not read", path=path, expected="a Meta or Hugging Face folder")
    return CheckpointError("is a file", path=path, expected="the folder that holds it with its config and tokenizer")


def _no_weights(folder: Path) -> Exception:
    if (folder / "adapter_config.json").is_file():
        return UnsupportedError(
            "is a LoRA adapter, not a model", path=folder, found="adapter_config.json",
            hint="merge it into its base model first",
        )  # fmt: skip
    if gguf := sorted(folder.glob("*.gguf")):
        return UnsupportedError("GGUF files are not read", path=gguf[0], expected="a Meta or Hugging Face folder")
    if (original := folder / "original").is_dir() and shard_paths(original):
        return CheckpointError("has no weights", path=folder, hint=f"there is a Meta checkpoint in {original}")
    return CheckpointError(
        "has no weights", path=folder,
        expected="consolidated.00.pth, model.safetensors, pytorch_model.bin or an index of shards",
    )  # fmt: skip
