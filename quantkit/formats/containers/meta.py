"""Meta folders: ``params.json`` with ``consolidated.NN.pth`` model-parallel shards."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import parameters_as_written
from quantkit.architectures.topology import Parameter
from quantkit.base.late import LateModule
from quantkit.errors import CheckpointError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.container import Container, Encoder, Output
from quantkit.formats.folder import (
    LICENSES,
    TOKENIZER_FILES,
    find_copyable_files,
    json_bytes,
    with_templates,
)
from quantkit.tensors.dtypes import DType
from quantkit.text.chat_template import ADDITIONAL_TEMPLATES
from quantkit.text.text_folder import locate_or_extract_text_folder
from quantkit.text.tokenizer import load_original_tokenizer, load_tokenizer

# Folders are recognized without these.
if TYPE_CHECKING:
    from quantkit.architectures import meta_params
    from quantkit.data import files as data_files
    from quantkit.formats.containers import meta_checkpoint, meta_encoder
    from quantkit.text import compare
else:
    meta_checkpoint = LateModule("quantkit.formats.containers.meta_checkpoint")
    meta_encoder = LateModule("quantkit.formats.containers.meta_encoder")
    meta_params = LateModule("quantkit.architectures.meta_params")
    data_files = LateModule("quantkit.data.files")
    compare = LateModule("quantkit.text.compare")

_TOKENIZER = "tokenizer.model"
_SHARD = re.compile(r"consolidated\.(\d+)\.pth")


class Meta(Container):
    """The container of Meta's own downloads; floats only."""

    name = "meta"
    title = "Meta"
    config_file = "params.json"
    weights: Mapping[str, str] = {"meta": "consolidated.*.pth"}
    stores_tied_head = True
    states_tokens = False
    model_parallel = True

    def find_weight_kinds(self, path: Path) -> list[str]:
        if path.is_dir() and shard_paths(path):
            return ["meta"]
        return []

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> meta_checkpoint.MetaCheckpoint:
        return meta_checkpoint.MetaCheckpoint(path, shard_paths(path))

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:
        return parameters_as_written(config, quantized)

    def encoder(self, output: Output) -> Encoder:
        # Llama 3, the first with a byte-level tokenizer, splits the embedding by rows.
        if output.tokenizer is not None and output.tokenizer.byte_level:
            axis = 0
        else:
            axis = 1
        return meta_encoder.MetaEncoder(
            output.planned, output.config, output.model_parallel, embedding_axis=axis
        )

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        """Build the side files, see `Container.side_files`; Meta's code reads tokenizer.model,
        which must be the same as tokenizer.json.
        """
        folder = locate_or_extract_text_folder(output.source.path)
        files: dict[str, bytes | Path] = {
            self.config_file: json_bytes(meta_params.config_to_meta(output.config))
        }
        original = folder / _TOKENIZER
        has_original = original.is_file()
        names: tuple[str, ...] = ("tokenizer.json", "tokenizer_config.json")
        if has_original:
            names = (_TOKENIZER,)
        # quantkit uses tokenizer.json if a folder has both, and only the other one is written.
        if has_original and (folder / "tokenizer.json").is_file():
            used_tokenizer = load_tokenizer(folder)
            written_tokenizer = load_original_tokenizer(original)
            difference = compare.first_difference(
                written_tokenizer, used_tokenizer, data_files.gate_texts().values()
            )
            if difference is not None:
                raise CheckpointError(
                    "tokenizer.model and tokenizer.json are different tokenizers",
                    path=original,
                    found=f"a difference in {difference}",
                    hint="remove the one that does not belong to the model",
                )
        files.update(find_copyable_files(folder, names + LICENSES))
        return with_templates(files, output.templates, in_settings=not has_original)

    def list_carried_names(self, source: Checkpoint, dst: Path) -> Collection[str]:
        return (*TOKENIZER_FILES, ADDITIONAL_TEMPLATES, *LICENSES)

    def notes(self, output: Output) -> list[str]:
        folder = locate_or_extract_text_folder(output.source.path)
        if output.tokenizer is None or (folder / _TOKENIZER).is_file():
            return []
        return [f"{folder}: has no tokenizer.model; tokenizer.json is written instead"]


def shard_paths(folder: Path) -> list[Path]:
    """Find the ``consolidated.NN.pth`` files of a folder, in order."""
    return sorted(path for path in folder.iterdir() if _SHARD.fullmatch(path.name))
