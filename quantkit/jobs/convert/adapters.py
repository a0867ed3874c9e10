"""Adapters that `convert` and `quantize` merge into their source."""

from __future__ import annotations

from pathlib import Path

from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.checkpoint import list_uncarried_weights, schemes
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.lora.adapter import PREFIX, Adapter
from quantkit.formats.lora.adapter_config import note_folder_adapter
from quantkit.formats.lora.changes import note_other_base
from quantkit.formats.lora.merged_checkpoint import MergedCheckpoint
from quantkit.formats.lora.requested import Requested, parse_adapters
from quantkit.jobs.output.labels import file_name, find_base_model, find_model_name
from quantkit.tensors.dtypes import DType
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.special_tokens import special_tokens


def merge_adapters(
    source: StoredCheckpoint,
    lora: Requested,
    *,
    dequantize: bool = False,
    allow_nonfinite: bool = False,
    floats_as: DType | None = None,
) -> StoredCheckpoint:
    """Merge the requested adapters into a source; without any, return the source as it is.

    Notes say if an adapter names another base.

    Args:
        dequantize: whether weights of a quantized source may become floats.
        allow_nonfinite: whether adapters may hold NaN and Inf.
        floats_as: see `MergedCheckpoint`.

    Raises:
        RequestError: for an invalid request.
        CheckpointError, UnsupportedError: see `Adapter` and `MergedCheckpoint`; also if the source
            is quantized, and not to be dequantized.
    """
    requested = parse_adapters(lora)
    if not requested:
        return source
    quantized = schemes(source) or list_uncarried_weights(source)
    if quantized and not dequantize:
        raise UnsupportedError(
            "adapters can only be merged into unquantized weights, and the base model is quantized",
            path=source.path,
            found=str(next(iter(quantized.values()))),
            hint=Message(Option("dequantize", value=True), " dequantizes its weights"),
        )
    adapters = []
    for path, weight in requested:
        adapters.append(Adapter(path, weight, allow_nonfinite=allow_nonfinite))
    merged = MergedCheckpoint(source, adapters, floats_as)
    adapter_paths = [path.absolute() for path, _ in requested]
    # The base's folder can contain its adapter too. The note that this adapter is not merged is
    # false once the adapter is requested.
    if source.path.absolute() in adapter_paths:
        false_notes = note_folder_adapter(source.path)
        merged.notes[:] = [note for note in merged.notes if note not in false_notes]
    for adapter in merged.adapters:
        merged.notes += note_other_base(adapter, source.path, _collect_base_names(source))
        merged.notes += _tokenizer_notes(adapter.path, source.path)
        if not adapter.has_prefix:
            merged.notes.append(
                f"{adapter.path}: names of tensors lack PEFT's prefix '{PREFIX}'; they are merged,"
                " as transformers' `load_adapter()` adds them, but PEFT's `PeftModel` leaves them"
                " out"
            )
    return merged


def _tokenizer_notes(adapter: Path, base: Path) -> list[str]:
    """Name what an adapter's own tokenizer has otherwise than the base's, which the result gets.

    Trainers save the tokenizer next to the adapter. An adapter that was trained with another chat
    template or end token does not stop, or answers badly, with those of the base.
    """
    if not base.is_dir():
        return []
    try:
        differing = _find_tokenizer_differences(adapter, base)
    except CheckpointError:
        # Damage in the adapter's files does not matter: the output gets those of the base.
        return []
    if not differing:
        return []
    return [
        f"{adapter}: its tokenizer has another {' and '.join(differing)} than {base}, whose"
        " tokenizer the output gets; to use the adapter's, copy its tokenizer files and chat"
        " template to the base first"
    ]


def _find_tokenizer_differences(adapter: Path, base: Path) -> list[str]:
    differing: list[str] = []
    templates = ChatTemplates(adapter).sources
    if templates and templates != ChatTemplates(base).sources:
        differing.append("chat template")
    end = special_tokens(adapter, {}, ("eos_token",)).get("eos_token")
    base_end = special_tokens(base, {}, ("eos_token",)).get("eos_token")
    if end is not None and base_end is not None and end != base_end:
        differing.append("EOS token")
    return differing


def describe_adapters(source: StoredCheckpoint) -> dict[str, object]:
    """Describe merged adapters for the manifest and the resume fingerprint; empty if there are
    none.
    """
    if not isinstance(source, MergedCheckpoint):
        return {}
    return {"lora": [adapter.to_json() for adapter in source.adapters]}


def _collect_base_names(source: StoredCheckpoint) -> list[str]:
    """Collect the names by which a base is known: its folder's or file's, and those on a hub or in
    its config.
    """
    if source.path.is_dir():
        path = source.path
    else:
        path = source.path.with_suffix("")
    names: list[str] = []
    for name in (file_name(path), find_base_model(source), find_model_name(source)):
        if name is not None and name not in names:
            names.append(name)
    return names
