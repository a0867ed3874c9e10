"""Meta folders: ``params.json`` with ``consolidated.NN.pth`` model-parallel shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import parameters_as_written
from quantkit.architectures.meta_params import config_to_meta
from quantkit.architectures.topology import Parameter
from quantkit.data.files import gate_texts
from quantkit.errors import CheckpointError
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.container import Container, Output, refuse_tensors_only
from quantkit.formats.containers.meta_checkpoint import MetaCheckpoint, shard_paths
from quantkit.formats.folder import OTHER_FILES, json_bytes, present, with_templates
from quantkit.tensors.dtypes import DType
from quantkit.text.compare import first_difference
from quantkit.text.gguf_tokenizer import text_folder
from quantkit.text.tokenizer import load_tokenizer, original_tokenizer

if TYPE_CHECKING:
    from quantkit.formats.containers.meta_encoder import MetaEncoder

_TOKENIZER = "tokenizer.model"


class Meta(Container):
    """The container of Meta's own downloads; floats only."""

    name = "meta"
    title = "Meta"
    config_file = "params.json"
    weights: Mapping[str, str] = {"meta": "consolidated.*.pth"}
    stores_tied_head = True
    states_tokens = False
    model_parallel = True

    def present(self, path: Path) -> list[str]:
        return ["meta"] if path.is_dir() and shard_paths(path) else []

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> MetaCheckpoint:  # fmt: skip
        refuse_tensors_only(self, tensors_only, path)
        return MetaCheckpoint(path)

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:  # fmt: skip
        return parameters_as_written(config, quantized)

    def encoder(self, output: Output) -> MetaEncoder:
        from quantkit.formats.containers.meta_encoder import MetaEncoder

        # Llama 3, the first with a byte-level tokenizer, splits the embedding by rows.
        axis = 0 if output.tokenizer is not None and output.tokenizer.byte_level else 1
        return MetaEncoder(output.planned, output.config, output.model_parallel, embedding_axis=axis)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        """See `Container.side_files`; Meta's code reads tokenizer.model, which must be the same as tokenizer.json."""
        folder = text_folder(output.source.path)
        files: dict[str, bytes | Path] = {self.config_file: json_bytes(config_to_meta(output.config))}
        original = folder / _TOKENIZER
        names = (_TOKENIZER,) if original.is_file() else ("tokenizer.json", "tokenizer_config.json")
        if original.is_file() and (folder / "tokenizer.json").is_file():
            _require_same_tokens(folder, original)
        files.update(present(folder, names + OTHER_FILES[1:]))
        return with_templates(files, output.templates, in_settings=not original.is_file())

    def notes(self, output: Output) -> list[str]:
        folder = text_folder(output.source.path)
        if output.tokenizer is None or (folder / _TOKENIZER).is_file():
            return []
        return [f"{folder}: has no tokenizer.model; tokenizer.json is written in its place"]


def _require_same_tokens(folder: Path, path: Path) -> None:
    used, original = load_tokenizer(folder), original_tokenizer(path)
    difference = first_difference(original, used, gate_texts().values())
    if difference is not None:
        problem, found = "tokenizer.model is another tokenizer than tokenizer.json", f"a difference in {difference}"
        raise CheckpointError(problem, path=path, found=found, hint="remove the one that is not the model's")
