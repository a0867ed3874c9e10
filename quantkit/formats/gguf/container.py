"""GGUF files: llama.cpp's, with all of a model in one, or in parts.

Canonical tensors are read as codes if a type holds them exactly, else as floats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter
from quantkit.base.late import LateModule
from quantkit.files.located import gguf_file
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod
from quantkit.formats.container import Container, Encoder, Output, StoredCheckpoint
from quantkit.formats.folder import LICENSES, SIDE_FILES, find_copyable_files
from quantkit.tensors.dtypes import DType
from quantkit.text.chat_template import ADDITIONAL_TEMPLATES
from quantkit.text.text_folder import locate_or_extract_text_folder

# Files are recognized without these.
if TYPE_CHECKING:
    from quantkit.formats.codecs import ggml
    from quantkit.formats.gguf import checkpoint as gguf_checkpoint
    from quantkit.formats.gguf import output as gguf_output
else:
    ggml = LateModule("quantkit.formats.codecs.ggml")
    gguf_checkpoint = LateModule("quantkit.formats.gguf.checkpoint")
    gguf_output = LateModule("quantkit.formats.gguf.output")


class Gguf(Container):
    """The container of llama.cpp: config, tokenizer and weights are in one file, or in its
    parts.
    """

    name = "gguf"
    title = "GGUF"
    config_file = "model.gguf"
    weights: Mapping[str, str] = {"gguf": "*.gguf"}
    derived = True
    unsplit_by_default = True

    @property
    def native(self) -> CodeFormat:
        return ggml.GgmlBlocks()

    def find_weight_kinds(self, path: Path) -> list[str]:
        if gguf_file(path) is None:
            return []
        return ["gguf"]

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> gguf_checkpoint.GgufCheckpoint:
        file = gguf_file(path)
        assert file is not None, path
        return gguf_checkpoint.GgufCheckpoint(file, floats_as)

    def with_codes(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        if isinstance(checkpoint, gguf_checkpoint.GgufCheckpoint):
            return checkpoint.with_codes()
        return checkpoint

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:
        return gguf_output.list_parameters(config)

    def encoder(self, output: Output) -> Encoder:
        return gguf_output.make_encoder(output)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        if output.alone:
            return {}
        return find_copyable_files(locate_or_extract_text_folder(output.source.path), LICENSES)

    def list_carried_names(self, source: Checkpoint, dst: Path) -> Collection[str]:
        in_metadata = (*SIDE_FILES, ADDITIONAL_TEMPLATES)
        # A single file has no folder for licences.
        if dst.suffix == f".{self.name}":
            return in_metadata
        return (*in_metadata, *LICENSES)

    def notes(self, output: Output) -> list[str]:
        return gguf_output.list_notes(output)
