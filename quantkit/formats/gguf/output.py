"""Write GGUF files: their tensors, metadata and notes."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import UnsupportedError
from quantkit.formats.authorship import gguf_authorship
from quantkit.formats.container import Output
from quantkit.formats.gguf.config import (
    build_metadata,
    describe_llama_cpp_differences,
)
from quantkit.formats.gguf.encoder import GgufEncoder
from quantkit.formats.gguf.names import (
    gguf_tensors,
)
from quantkit.formats.gguf.rope import compute_rope_factors
from quantkit.text.export import tokenizer_metadata
from quantkit.text.gguf_vocabulary import ENDS, TOKENS

_TEXTS = "texts"
_PHI3 = "(phi)-?3"
_PHI3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}


def list_parameters(config: ModelConfig) -> list[Parameter]:
    """List the tensors of an output, in the order in which they are written."""
    by_name: dict[str, Parameter] = {}
    for parameter in parameters(config):
        by_name[parameter.name] = parameter
    # Each once: a tied embedding may be written as the head too.
    ordered: dict[str, Parameter] = {}
    for tensor in gguf_tensors(config):
        for name in tensor.parts:
            ordered[name] = by_name[name]
    return list(ordered.values())


def make_encoder(output: Output) -> GgufEncoder:
    """Make the encoder, see `Container.encoder`; raise an `UnsupportedError` also if llama.cpp
    would run the model differently, and a `CheckpointError` if the source's tokenizer is
    damaged.
    """
    config = output.config
    if output.tokenizer is None:
        problem = "the source has no tokenizer, and llama.cpp does not load a model without one"
        hint = "put the tokenizer's files into the folder of the weights"
        raise UnsupportedError(problem, path=output.source.path, hint=hint)
    texts, _ = _text_metadata(output)
    name = adapt_model_name(output.name, config.architecture, texts[TOKENS])
    metadata = build_metadata(config) | {"general.type": "model", "general.name": name}
    metadata |= gguf_authorship(output.source.path, output.authorship) | texts
    eos_ids = dict.fromkeys([*config.eos_token_ids, *texts.get(ENDS, [])])
    if eos_ids:
        metadata[ENDS] = list(eos_ids)
    # The fallback of short rows may be the type of most numbers.
    if output.mix is not None:
        metadata["general.file_type"] = output.mix.file_type
    return GgufEncoder(
        output.planned,
        config,
        metadata,
        compute_rope_factors(config),
        output.shard_bytes,
        output.stem,
    )


def list_notes(output: Output) -> list[str]:
    """List notes for the user on an output, see `Container.notes`."""
    _, text_notes = _text_metadata(output)
    notes = list(text_notes)
    for config_note in describe_llama_cpp_differences(output.config):
        notes.append(f"{output.source.path}: {config_note}")
    return notes


def adapt_model_name(name: str, architecture: str, tokens: Collection[str]) -> str:
    """Change a model's name so that llama.cpp tokenizes like its tokenizer: by the name it
    recognizes Phi-3, whose special tokens remove the spaces after them.
    """
    has_phi3_tokens = {*tokens} >= _PHI3_TOKENS
    if not has_phi3_tokens:
        # A space keeps the name readable, and llama.cpp does not recognize it.
        return re.sub(_PHI3, r"\1 3", name, flags=re.IGNORECASE)
    if architecture == "phi3" and re.search(_PHI3, name, re.IGNORECASE) is None:
        return f"{name} (Phi-3)"
    return name


def _text_metadata(output: Output) -> tuple[dict[str, Any], list[str]]:
    """Build the metadata of the tokenizer and the chat templates, and notes on them, once for an
    output.
    """
    if _TEXTS not in output.cache:
        output.cache[_TEXTS] = tokenizer_metadata(
            output.source.path, output.config.vocab_size, output.templates
        )
    text_metadata: tuple[dict[str, Any], list[str]] = output.cache[_TEXTS]
    return text_metadata
