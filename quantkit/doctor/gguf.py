"""Rules about GGUF files: keys that llama.cpp looks for, the tensors of all blocks, the text in
the metadata.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.architectures.names import GGUF_NAMES
from quantkit.base.json_values import format_value
from quantkit.doctor import text
from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import Folder
from quantkit.errors import QuantkitError
from quantkit.files.gguf_types import GgufTensor
from quantkit.formats.gguf.names import sharing_families
from quantkit.text.chat_template import ChatTemplate

_TOKENIZERS = (
    "llama",
    "gpt2",
    "bert",
    "t5",
    "rwkv",
    "plamo2",
    "gemma4",
    "hybriddna",
    "whitespace",
    "none",
    "no_vocab",
)
_KEYS = ("block_count", "context_length", "embedding_length", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_GEMMA2 = {
    "attention.sliding_window_pattern": 1,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
}
"""Values with which llama.cpp stops or divides by zero."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_ALSO_EVEN = ("mistral3",)
"""Architectures that quantkit does not read, and whose blocks all have the same tensors, as in
those that it reads.
"""
_IDS = ("bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id", "eot_token_id")


def check(folder: Folder) -> Iterator[Finding]:
    """Check the headers of a GGUF file, or of the parts of one."""
    if not folder.headers:
        return
    # The first part of a split model has the metadata.
    location, first_header = next(iter(folder.headers.items()))
    metadata = first_header.metadata
    tensors: dict[str, GgufTensor] = {}
    for header in folder.headers.values():
        tensors.update(header.tensors)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        title = format_value(architecture)
        yield finding("gguf-keys", location, f"general.architecture is {title}")
        return
    if architecture in ("clip", "mmproj") or metadata.get("general.type") not in (None, "model"):
        # A companion of a model, such as an encoder of images, has neither blocks nor a tokenizer.
        return
    yield from _check_keys(metadata, architecture, location)
    if folder.complete:
        yield from _check_tensors(metadata, architecture, tensors)
    yield from _check_tokenizer(folder, metadata, tensors, location)


def _check_keys(metadata: Mapping[str, Any], architecture: str, location: str) -> Iterator[Finding]:
    for key in _KEYS:
        value = metadata.get(f"{architecture}.{key}")
        # A list has one value for each layer, where layers differ.
        if isinstance(value, list):
            numbers = value
        else:
            numbers = [value]
        if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
            if value is None:
                fault = "is missing"
            else:
                fault = f"is {format_value(value)}"
            yield finding("gguf-keys", location, f"{architecture}.{key} {fault}")
    if not any(f"{architecture}.{key}" in metadata for key in _EPSILONS):
        yield finding("gguf-keys", location, f"{architecture}.{_EPSILONS[0]} is missing")
    blocks = metadata.get(f"{architecture}.block_count")
    heads = metadata.get(f"{architecture}.attention.head_count_kv")
    if isinstance(heads, list) and len(heads) != blocks:
        yield finding(
            "gguf-keys",
            location,
            f"{architecture}.attention.head_count_kv is of {len(heads)} layers",
        )
    if architecture == "granite" and "granite.logit_scale" not in metadata:
        yield finding("gguf-keys", location, "granite.logit_scale is missing")
    if architecture == "gemma2":
        for key, wrong_value in _GEMMA2.items():
            if metadata.get(f"gemma2.{key}") == wrong_value:
                yield finding("gguf-keys", location, f"gemma2.{key} is {wrong_value}")


def _check_tensors(
    metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, GgufTensor]
) -> Iterator[Finding]:
    has_equal_blocks = architecture in _ALSO_EVEN
    required_names = ["token_embd.weight"]
    if has_equal_blocks:
        required_names.append(f"{GGUF_NAMES['norm']}.weight")
    for family in sharing_families().get(architecture, ()):
        if family.gguf is not None:
            has_equal_blocks = not family.gguf.uneven
            norm = family.gguf.names.get("norm", GGUF_NAMES["norm"])
            required_names.append(f"{norm}.weight")
    required_names = list(dict.fromkeys(required_names))
    for name in required_names:
        if name not in tensors:
            yield finding("missing-tensor", name, "not in the file")
    blocks = metadata.get(f"{architecture}.block_count")
    width = metadata.get(f"{architecture}.embedding_length")
    table = tensors.get("token_embd.weight")
    if table is not None and type(width) is int and table.shape[-1] != width:
        yield finding(
            "wrong-shape", table.name, f"rows of {table.shape[-1]}, and embedding_length is {width}"
        )
    # A damaged count of billions would take as many dictionaries below.
    if type(blocks) is not int or blocks > len(tensors) + 1:
        return
    block_tensors: dict[int, dict[str, GgufTensor]] = {layer: {} for layer in range(blocks)}
    for name, tensor in tensors.items():
        match = _BLOCK.fullmatch(name)
        if match is None:
            continue
        if int(match[1]) >= blocks:
            yield finding("extra-tensor", name, f"block_count is {blocks}")
        else:
            block_tensors[int(match[1])][match[2]] = tensor
    # No table says which tensors a block of each architecture needs, so blocks are compared with
    # the majority.
    shapes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for members in block_tensors.values():
        for suffix, tensor in members.items():
            shapes[suffix][tensor.shape] += 1
    for layer, members in block_tensors.items():
        if not members:
            yield finding("missing-tensor", f"blk.{layer}", "the block has no tensors")
        elif has_equal_blocks:
            yield from _compare_block(layer, members, shapes, blocks)


def _compare_block(
    layer: int,
    members: Mapping[str, GgufTensor],
    shapes: Mapping[str, Counter[tuple[int, ...]]],
    blocks: int,
) -> Iterator[Finding]:
    """Compare the tensors of a block, by suffix, with the shapes that blocks have."""
    for suffix, counts in shapes.items():
        tensor = members.get(suffix)
        usual_shape = counts.most_common(1)[0][0]
        if tensor is None:
            if 2 * counts.total() > blocks:
                yield finding(
                    "missing-tensor",
                    f"blk.{layer}.{suffix}",
                    "not in the file; other blocks have it",
                )
        elif tensor.shape != usual_shape:
            yield finding(
                "wrong-shape",
                tensor.name,
                f"found {list(tensor.shape)}, in most blocks {list(usual_shape)}",
            )


def _check_tokenizer(
    folder: Folder, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], location: str
) -> Iterator[Finding]:
    prefix = "tokenizer.ggml."
    settings: dict[str, Any] = {}
    for key, value in metadata.items():
        if key.startswith(prefix):
            settings[key.removeprefix(prefix)] = value
    tokens = settings.get("tokens")
    model = settings.get("model")
    if not isinstance(tokens, list) or not tokens:
        yield finding("no-tokenizer", location, "tokenizer.ggml.tokens is missing")
        return
    count = len(tokens)
    for key in ("scores", "token_type"):
        listed = settings.get(key)
        if isinstance(listed, list) and len(listed) != count:
            yield finding("gguf-vocabulary", location, f"{count} tokens, {len(listed)} of {key}")
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != count:
        yield finding(
            "gguf-vocabulary",
            location,
            f"{count} tokens, {embedding.shape[0]} rows of token_embd.weight",
        )
    # Only byte-level BPE has merges, and splits text before them as `pre` says.
    if model == "gpt2":
        for key, rule in (("merges", "gguf-keys"), ("pre", "gguf-pre")):
            if not settings.get(key):
                yield finding(rule, location, f"tokenizer.ggml.{key} is missing")
    elif not isinstance(model, str):
        yield finding("gguf-keys", location, "tokenizer.ggml.model is missing")
    elif model not in _TOKENIZERS:
        yield finding("gguf-tokenizer", location, f"tokenizer.ggml.model is {format_value(model)}")
    for key in _IDS:
        value = settings.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < count):
            yield finding(
                "token-out-of-range",
                location,
                f"{key} {format_value(value)}, expected below {count}",
            )
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        if _is_instruct(folder, metadata):
            yield finding("no-chat-template", location, "by its name it is an instruct model")
        return
    try:
        # A value that is no text is reported like a template that does not compile.
        ChatTemplate(source if isinstance(source, str) else "{%")
    except QuantkitError as error:
        yield finding("damaged-template", location, error.problem)


def _is_instruct(folder: Folder, metadata: Mapping[str, Any]) -> bool:
    """Return whether a name in the metadata, or of the file, is that of an instruct model."""
    names = [folder.path.stem]
    for key in ("general.name", "general.finetune", "general.basename"):
        name = metadata.get(key)
        if isinstance(name, str):
            names.append(name)
    return any(text.INSTRUCT.search(name) for name in names)
