"""Adapters that `convert` and `quantize` merge into their source."""

from __future__ import annotations

from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import read_as_floats, schemes
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.lora.adapter import Adapter, Requested, requested_adapters
from quantkit.formats.lora.adapter_config import own_adapter_note
from quantkit.formats.lora.changes import base_notes
from quantkit.formats.lora.merged_checkpoint import MergedCheckpoint
from quantkit.jobs.labels import base_model, file_name, known_name
from quantkit.tensors.dtypes import DType


def with_adapters(
    source: StoredCheckpoint, lora: Requested, *, dequantize: bool = False, allow_nonfinite: bool = False,
    floats_as: DType | None = None,
) -> StoredCheckpoint:  # fmt: skip
    """A source with the requested adapters merged into it, or as it is if there are none. Notes say if an adapter names
    another base.

    Args:
        dequantize: whether weights of a quantized source may become floats.
        allow_nonfinite: whether adapters may hold NaN and Inf.
        floats_as: see `MergedCheckpoint`.

    Raises:
        RequestError: for an invalid request.
        CheckpointError, UnsupportedError: see `Adapter` and `MergedCheckpoint`; also if the source is quantized, and
            not to be dequantized.
    """
    requested = requested_adapters(lora)
    if not requested:
        return source
    quantized = schemes(source) or read_as_floats(source)
    if quantized and not dequantize:
        raise UnsupportedError(
            "adapters are merged into floats, and the base is quantized", path=source.path,
            found=str(next(iter(quantized.values()))), hint="`dequantize=True` reads its weights as floats",
        )  # fmt: skip
    adapters = [Adapter(path, weight, allow_nonfinite=allow_nonfinite) for path, weight in requested]
    merged = MergedCheckpoint(source, adapters, floats_as)
    if source.path.absolute() in [path.absolute() for path, _ in requested]:
        merged.notes[:] = [note for note in merged.notes if note not in own_adapter_note(source.path)]
    for adapter in merged.adapters:
        merged.notes += base_notes(adapter, source.path, _names(source))
    return merged


def recorded_adapters(source: StoredCheckpoint) -> dict[str, object]:
    """What the manifest and the resume fingerprint record of merged adapters; empty if there are none."""
    if not isinstance(source, MergedCheckpoint):
        return {}
    return {"lora": [adapter.to_json() for adapter in source.adapters]}


def _names(source: StoredCheckpoint) -> list[str]:
    """The names by which a base is known: its folder's or file's, and those on a hub or in its config."""
    path = source.path if source.path.is_dir() else source.path.with_suffix("")
    found = (file_name(path), base_model(source), known_name(source))
    return list(dict.fromkeys(name for name in found if name is not None))
