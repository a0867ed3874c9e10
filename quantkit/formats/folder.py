"""What lies beside the weights: config, generation settings, tokenizer, licence."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_to_hf
from quantkit.architectures.meta_params import config_to_meta
from quantkit.architectures.topology import linear_columns
from quantkit.data.files import gate_texts
from quantkit.errors import CheckpointError, RequestError
from quantkit.formats import compressed_tensors as ct
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.staging import partial_folder
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.compare import first_difference, vocabulary_texts
from quantkit.text.export import export_json
from quantkit.text.tokenizer import Tokenizer, load_tokenizer, original_tokenizer

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
READ_NAMES = {"config.json", "params.json", "generation_config.json", *_TOKENIZER_FILES}
"""Files beside the weights that decide what a model is or says."""
_OTHER_FILES = ("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md", "NOTICE")


def hf_side_files(
    source: Checkpoint, config: ModelConfig, schemes: Mapping[str, QuantScheme]
) -> dict[str, bytes | Path]:
    """The small files of a Hugging Face folder for a model that came from `source`."""
    raw: dict[str, Any] = {**source.extra_config, **config_to_hf(config)}
    if schemes:
        raw["quantization_config"] = ct.quantization_config(
            schemes, linear_columns(replace(config, tied_embeddings=False))
        )
    files: dict[str, bytes | Path] = {"config.json": _json(raw)}
    files.update(_present(source.path, _TOKENIZER_FILES + _OTHER_FILES))
    if source.format == "meta":
        files.update(_exported_tokenizer(source.path))
        ids = {"bos_token_id": raw["bos_token_id"], "eos_token_id": raw["eos_token_id"]}
        files.setdefault("generation_config.json", _json({k: v for k, v in ids.items() if v is not None}))
    return files


def meta_side_files(source: Checkpoint, config: ModelConfig) -> dict[str, bytes | Path]:
    """The small files of a Meta folder for a model that came from `source`.

    Raises:
        CheckpointError: if it has a tokenizer.model, which Meta's code reads, that is another tokenizer than the one
            it is read with.
    """
    files: dict[str, bytes | Path] = {"params.json": _json(config_to_meta(config))}
    original = source.path / "tokenizer.model"
    names = ("tokenizer.model",) if original.is_file() else ("tokenizer.json", "tokenizer_config.json")
    if original.is_file() and (source.path / "tokenizer.json").is_file():
        _require_same_tokens(source.path, original)
    files.update(_present(source.path, names + _OTHER_FILES[1:]))
    return files


def checked_tokenizer(source: Checkpoint) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of a checkpoint, held against its embedding, and what to note about it.

    Raises:
        CheckpointError: if it is damaged, or knows more tokens than the embedding.
    """
    if not _present(source.path, _TOKENIZER_FILES[:2]):
        return None, [f"{source.path}: has no tokenizer; the output will have none"]
    tokenizer = load_tokenizer(source.path)
    rows = source.config.vocab_size
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            "the tokenizer knows more tokens than the embedding has rows", path=source.path,
            found=f"{tokenizer.vocab_size} tokens", expected=f"at most {rows}",
            hint="the tokenizer is another model's",
        )  # fmt: skip
    if tokenizer.vocab_size < rows:
        return tokenizer, [f"{source.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {rows} rows"]
    return tokenizer, []


def _require_same_tokens(folder: Path, path: Path) -> None:
    used, original = load_tokenizer(folder), original_tokenizer(path)
    text = first_difference(original, used, (*gate_texts().values(), *vocabulary_texts(original)))
    if text is not None:
        raise CheckpointError(
            "tokenizer.model is another tokenizer than tokenizer.json", path=path,
            found=f"other tokens for {text[:40]!r}", hint="remove the one that is not the model's",
        )  # fmt: skip


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a model's config."""
    return any((folder / name).is_file() for name in ("config.json", "params.json"))


def require_new_names(source: Path, dst: Path) -> None:
    """Refuse a destination that is the source, or is built where that is.

    Raises:
        RequestError: if it is.
    """
    if os.path.realpath(source) in (os.path.realpath(dst), os.path.realpath(partial_folder(dst))):
        raise RequestError("source and destination are the same folder", found=dst)


def _present(folder: Path, names: tuple[str, ...]) -> dict[str, bytes | Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}


def _exported_tokenizer(folder: Path) -> dict[str, bytes]:
    """A tokenizer.json for a tokenizer that came from Meta, or where that would not
    tokenize alike, just the settings with which transformers reads the original."""
    path = folder / "tokenizer.model"
    if not path.is_file() or (folder / "tokenizer.json").is_file():
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        exported = export_json(path, Path(scratch))
    if exported is not None:
        return exported
    return {"tokenizer_config.json": _json({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
