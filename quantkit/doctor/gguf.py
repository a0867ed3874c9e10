"""Rules about GGUF files: keys that llama.cpp looks for, the tensors of all blocks, the text in
the metadata.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

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
    """Yield what is wrong with a GGUF file, or the parts of one."""
    if not folder.headers:
        return
    metadata = next(iter(folder.headers.values())).metadata
    tensors = {}
    for header in folder.headers.values():
        for name, tensor in header.tensors.items():
            tensors[name] = tensor
    where = next(iter(folder.headers))
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        yield finding("gguf-keys", where, f"general.architecture is {format_value(architecture)}")
        return
    if architecture in ("clip", "mmproj") or metadata.get("general.type") not in (None, "model"):
        # A companion of a model.
        return
    yield from _check_keys(metadata, architecture, where)
    if folder.complete:
        yield from _check_tensors(metadata, architecture, tensors)
    yield from _check_tokenizer(folder, metadata, tensors, where)


def _check_keys(metadata: Mapping[str, Any], architecture: str, location: str) -> Iterator[Finding]:
    for key in _KEYS:
        value = metadata.get(f"{architecture}.{key}")
        if isinstance(value, list):
            numbers = value
        else:
            numbers = [value]
        if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
            if value is None:
                said = "is missing"
            else:
                said = f"is {format_value(value)}"
            yield finding("gguf-keys", location, f"{architecture}.{key} {said}")
    if not any(f"{architecture}.{key}" in metadata for key in _EPSILONS):
        yield finding("gguf-keys", location, f"{architecture}.{_EPSILONS[0]} is missing")
    blocks, heads = (
        metadata.get(f"{architecture}.{key}") for key in ("block_count", "attention.head_count_kv")
    )
    if isinstance(heads, list) and len(heads) != blocks:
        yield finding(
            "gguf-keys",
            location,
            f"{architecture}.attention.head_count_kv is of {len(heads)} layers",
        )
    if architecture == "granite" and "granite.logit_scale" not in metadata:
        yield finding("gguf-keys", location, "granite.logit_scale is missing")
    for key, wrong in _GEMMA2.items() if architecture == "gemma2" else ():
        if metadata.get(f"gemma2.{key}") == wrong:
            yield finding("gguf-keys", location, f"gemma2.{key} is {wrong}")


def _check_tensors(
    metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, GgufTensor]
) -> Iterator[Finding]:
    even = architecture in (*sharing_families(), *_ALSO_EVEN)
    for name in ("token_embd.weight", "output_norm.weight") if even else ("token_embd.weight",):
        if name not in tensors:
            yield finding("missing-tensor", name, "not in the file")
    blocks = metadata.get(f"{architecture}.block_count")
    width = metadata.get(f"{architecture}.embedding_length")
    table = tensors.get("token_embd.weight")
    if table is not None and type(width) is int and table.shape[-1] != width:
        yield finding(
            "wrong-shape", table.name, f"rows of {table.shape[-1]}, and embedding_length is {width}"
        )
    if type(blocks) is not int or blocks > len(tensors) + 1:
        return
    own: dict[int, dict[str, GgufTensor]] = {layer: {} for layer in range(blocks)}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            if int(match[1]) >= blocks:
                yield finding("extra-tensor", name, f"block_count is {blocks}")
            else:
                own[int(match[1])][match[2]] = tensor
    shapes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for found in own.values():
        for suffix, tensor in found.items():
            shapes[suffix][tensor.shape] += 1
    for layer, found in own.items():
        if not found:
            yield finding("missing-tensor", f"blk.{layer}", "the block has no tensors")
        elif even:
            for suffix, counts in shapes.items():
                if suffix not in found and 2 * counts.total() > blocks:
                    yield finding(
                        "missing-tensor",
                        f"blk.{layer}.{suffix}",
                        "not in the file; other blocks have it",
                    )
                elif suffix in found and found[suffix].shape != (
                    shape := counts.most_common(1)[0][0]
                ):
                    what = f"found {list(found[suffix].shape)}, in most blocks {list(shape)}"
                    yield finding("wrong-shape", found[suffix].name, what)


def _check_tokenizer(
    folder: Folder, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], location: str
) -> Iterator[Finding]:
    prefix = "tokenizer.ggml."
    stated = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    tokens = stated.get("tokens")
    model = stated.get("model")
    if not isinstance(tokens, list) or not tokens:
        yield finding("no-tokenizer", location, "tokenizer.ggml.tokens is missing")
        return
    count = len(tokens)
    for key in ("scores", "token_type"):
        listed = stated.get(key)
        if isinstance(listed, list) and len(listed) != count:
            yield finding("gguf-vocabulary", location, f"{count} tokens, {len(listed)} of {key}")
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != count:
        yield finding(
            "gguf-vocabulary",
            location,
            f"{count} tokens, {embedding.shape[0]} rows of token_embd.weight",
        )
    if model == "gpt2":
        for key, rule in (("merges", "gguf-keys"), ("pre", "gguf-pre")):
            if not stated.get(key):
                yield finding(rule, location, f"tokenizer.ggml.{key} is missing")
    elif not isinstance(model, str):
        yield finding("gguf-keys", location, "tokenizer.ggml.model is missing")
    elif model not in _TOKENIZERS:
        yield finding("gguf-tokenizer", location, f"tokenizer.ggml.model is {format_value(model)}")
    for key in _IDS:
        value = stated.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < count):
            yield finding(
                "token-out-of-range",
                location,
                f"{key} {format_value(value)}, expected below {count}",
            )
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        names = [
            metadata.get(key) for key in ("general.name", "general.finetune", "general.basename")
        ]
        if any(
            isinstance(name, str) and text.INSTRUCT.search(name)
            for name in (*names, folder.path.stem)
        ):
            yield finding("no-chat-template", location, "by its name it is an instruct model")
        return
    try:
        ChatTemplate(source if isinstance(source, str) else "{%")
    except QuantkitError as error:
        yield finding("damaged-template", location, error.problem)
