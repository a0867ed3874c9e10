"""GGUF files: llama.cpp's, with all of a model in one, or in parts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.gguf import gguf_tensors
from quantkit.architectures.gguf_config import metadata_of, notes_of
from quantkit.architectures.gguf_rope import rope_tensors
from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import UnsupportedError
from quantkit.files.located import gguf_file
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.ggml import GgmlBlocks
from quantkit.formats.container import Container, Output, refuse_tensors_only
from quantkit.formats.containers.gguf_checkpoint import GgufCheckpoint
from quantkit.formats.folder import OTHER_FILES, present
from quantkit.tensors.dtypes import DType
from quantkit.text.export import tokenizer_metadata
from quantkit.text.gguf_tokenizer import text_folder
from quantkit.text.gguf_vocabulary import ENDS, TOKENS

if TYPE_CHECKING:
    from quantkit.formats.containers.gguf_encoder import GgufEncoder

_TEXTS = "texts"
_PHI3 = "(phi)-?3"
_PHI3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}


class Gguf(Container):
    """The container of llama.cpp: config, tokenizer and weights are in one file, or in its parts."""

    name = "gguf"
    title = "GGUF"
    config_file = "model.gguf"
    weights: Mapping[str, str] = {"gguf": "*.gguf"}
    native = GgmlBlocks()
    derived = True
    one_file = True

    def present(self, path: Path) -> list[str]:
        return [] if gguf_file(path) is None else ["gguf"]

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> GgufCheckpoint:  # fmt: skip
        refuse_tensors_only(self, tensors_only, path)
        file = gguf_file(path)
        assert file is not None, path
        return GgufCheckpoint(file, floats_as)

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:  # fmt: skip
        known = {parameter.name: parameter for parameter in parameters(config)}
        return [known[name] for name in dict.fromkeys(name for one in gguf_tensors(config) for name in one.parts)]

    def encoder(self, output: Output) -> GgufEncoder:
        """See `Container.encoder`; an `UnsupportedError` also if llama.cpp would run the model differently, and a
        `CheckpointError` if the source's tokenizer is damaged."""
        from quantkit.formats.containers.gguf_encoder import GgufEncoder

        config = output.config
        if output.tokenizer is None:
            problem = "the source has no tokenizer, and llama.cpp loads no model without one"
            hint = "put the tokenizer's files into the folder of the weights"
            raise UnsupportedError(problem, path=output.source.path, hint=hint)
        texts, _ = _text_metadata(output)
        name = stated_name(output.name, config.architecture, texts[TOKENS])
        metadata = metadata_of(config) | {"general.type": "model", "general.name": name} | texts
        if ends := dict.fromkeys([*config.eos_token_ids, *texts.get(ENDS, [])]):
            metadata[ENDS] = list(ends)
        return GgufEncoder(output.planned, config, metadata, rope_tensors(config), output.shard_bytes, output.stem)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        return {} if output.alone else present(text_folder(output.source.path), OTHER_FILES[1:])

    def notes(self, output: Output) -> list[str]:
        return [*_text_metadata(output)[1], *(f"{output.source.path}: {note}" for note in notes_of(output.config))]


def stated_name(name: str, architecture: str, tokens: Collection[str]) -> str:
    """A model's name with which llama.cpp tokenizes like its tokenizer: by the name it recognizes Phi-3, whose special
    tokens remove the spaces after them."""
    named = re.search(_PHI3, name, re.IGNORECASE)
    if not {*tokens} >= _PHI3_TOKENS:
        return re.sub(_PHI3, r"\1 3", name, flags=re.IGNORECASE)
    return f"{name} (Phi-3)" if architecture == "phi3" and named is None else name


def _text_metadata(output: Output) -> tuple[dict[str, Any], list[str]]:
    """The metadata of the tokenizer and the chat templates, and notes on them; computed once."""
    if _TEXTS not in output.found:
        output.found[_TEXTS] = tokenizer_metadata(output.source.path, output.config.vocab_size, output.templates)
    found: tuple[dict[str, Any], list[str]] = output.found[_TEXTS]
    return found
