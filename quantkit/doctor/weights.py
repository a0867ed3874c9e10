"""Rules about files and their tensors: files that are complete and as the index says, and tensors
that are those that config.json calls for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from quantkit.architectures.disk import disk_name
from quantkit.architectures.families import list_ignored_rope_settings
from quantkit.architectures.families.opaque import is_extra_layer
from quantkit.architectures.names import is_derived_buffer, is_embedding
from quantkit.base.json_values import format_value
from quantkit.doctor.findings import Finding, describe, finding
from quantkit.doctor.folder import Folder, may_hold_weights
from quantkit.doctor.parts import PREDICTION
from quantkit.doctor.side_files import CONFIG, check_dead, check_links, file_kind
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.codecs.awq import Awq
from quantkit.formats.codecs.gptq import Gptq
from quantkit.formats.codecs.table import METHODS
from quantkit.formats.containers.hf_settings import SETTINGS, read_codecs
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.manifest import models_in
from quantkit.tensors.dtypes import STORED_FLOATS

_ALONE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
_OF_ACTIVATIONS = re.compile(
    r"(.+)\.(input_scale|input_scale_ub|activation_scale|output_scale|input_zero_point|output_zero_point"
    r"|input_global_scale|[qkv]_scale|kv_scale|k_zero_point|v_zero_point)"
)
"""Tensors that belong to quantized activations or a quantized cache."""


def check_files(folder: Folder) -> Iterator[Finding]:
    """Check that the files of a folder can be read, and are those of its index."""
    if not folder.listed and "adapter_config.json" in folder.names:
        yield finding("adapter", folder.path.name, "adapter_config.json, and no weights of a model")
    elif not folder.kind:
        kinds = "*.safetensors, pytorch_model*.bin, consolidated.*.pth or *.gguf"
        models = ", ".join(path.name for path in models_in(folder.root))
        yield finding(
            "no-weights", folder.path.name, f"no {kinds}{models and f'; models are in {models}'}"
        )
    # A GGUF file has its tokenizer and settings in itself, so no reader opens files next to it.
    if folder.kind != "gguf":
        yield from check_dead(folder)
        yield from check_links(folder)
    listed = set(folder.listed)
    for path, error in folder.problems:
        yield _describe_unreadable(folder, path, error, is_listed=path in listed)
    if folder.kind in ("safetensors", "bin") and CONFIG not in folder.names:
        yield finding("no-config", CONFIG, "nothing says what the model is")
    if folder.index is not None:
        yield from _check_index(folder)
    else:
        for name, (first, second) in folder.twice.items():
            yield finding("tensor-twice", name, f"in {first} and in {second}")
        usual_name = _ALONE.get(folder.kind)
        names = [path.name for path in folder.listed]
        sound = folder.complete and not (folder.problems or folder.dead or folder.twice)
        if usual_name is not None and sound and names != [usual_name]:
            further_count = len(names) - 1
            if further_count:
                message = f"and {further_count} more, and no index"
            else:
                message = f"alone, expected {usual_name}"
            yield finding("no-index", names[0], message)
    for path in folder.stray:
        yield finding("stray-file", path.name, "is not in the index")


def check_opened(folder: Folder) -> Iterator[Finding]:
    """Open a folder or file in which nothing else was found, and yield why quantkit refuses it."""
    try:
        open_checkpoint(folder.listed[0] if folder.kind == "gguf" else folder.root)
    except UnsupportedError:
        # The model is sound, as far as quantkit knows its format.
        return
    except CheckpointError as error:
        yield finding("refused", folder.path.name, str(error))


def check_by_transformers(folder: Folder) -> tuple[bool, list[Finding]]:
    """Check the tensors of a family that is not known here against transformers' class. Return
    whether transformers is installed and has such a class, and what its tensors lack.
    """
    # These modules import torch, which a diagnosis from headers does without.
    from quantkit.via_transformers.forward import open_to_look_at, passage_of
    from quantkit.via_transformers.stacks import unstack

    source = None
    try:
        source = open_to_look_at(folder.root)
        if source is not None:
            unstack(source)
            passage_of(source)
    except CheckpointError as error:
        # Without a source, the class did not get to see the tensors.
        if source is None:
            return False, []
        return True, [finding("refused", folder.path.name, str(error))]
    except QuantkitError:
        # The model is sound, as far as its format is known.
        return False, []
    return source is not None, []


def _describe_unreadable(
    folder: Folder, path: Path, error: QuantkitError, *, is_listed: bool
) -> Finding:
    name = path.name
    problem = error.problem
    message = describe(error)
    if not is_listed:
        rule = "damaged-index" if name.endswith(".index.json") else "damaged-json"
        return finding(rule, name, message)
    # Readers of tensors say of a broken link or a pipe only that they cannot read it.
    if name in folder.names and not path.is_file():
        return finding("not-a-file", name, file_kind(path))
    if not path.exists():
        if folder.index is not None:
            reason = "the index names it"
        else:
            reason = "its set has more parts than are there"
        return finding("missing-file", name, reason)
    # All damage of files is one type of error, whose kinds differ only in the text.
    if "empty" in problem:
        return finding("empty-file", name, "0 bytes")
    if any(words in problem for words in ("git-lfs", "HTML", "error message")):
        return finding("placeholder", name, message)
    return finding("truncated-file" if "truncated" in problem else "damaged-file", name, message)


def _check_index(folder: Folder) -> Iterator[Finding]:
    assert folder.index is not None
    if not folder.index_has_metadata:
        # transformers 5 reads the key unconditionally, and raises a KeyError.
        yield finding(
            "damaged-index",
            "metadata",
            "the index lacks this object, and transformers does not load it",
        )
    for name, file in folder.index.items():
        if not isinstance(file, str) or not may_hold_weights(file):
            yield finding(
                "damaged-index",
                name,
                f"the index names no file of weights here: {format_value(file)}",
            )
        elif file in folder.files and name not in folder.files[file].tensors:
            yield finding("stale-index", name, f"the index has it in {file}, which lacks it")
    for file, opened in folder.files.items():
        for name in opened.tensors:
            indexed_file = folder.index.get(name)
            if indexed_file == file:
                continue
            if indexed_file:
                index_entry = f"in {indexed_file} by the index"
            else:
                index_entry = "not in the index"
            yield finding("stale-index", name, f"is in {file}, and {index_entry}")


def check(view: View) -> Iterator[Finding]:
    """Compare the tensors of a folder with its config."""
    kind = view.folder.config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        yield finding("bad-config", CONFIG, f"model_type is {format_value(kind)}")
    # Readers use this key along with rope_parameters.
    base = view.folder.config.get("rope_theta")
    is_invalid = base is not None and (type(base) not in (int, float) or base <= 0)
    if is_invalid and view.problem is None:
        yield finding("bad-config", CONFIG, f"rope_theta is {format_value(base)}")
    else:
        for ignored in list_ignored_rope_settings(view.folder.config):
            yield finding("rope-conflict", CONFIG, f"{ignored}, in transformers 5")
    error = view.problem
    if error is not None:
        message = error.problem
        if error.found is not None:
            message += f" (found {error.found})"
        # With a valid config, the problem comes from matching it with the stored tensors.
        if view.config is not None:
            yield finding("two-forms", view.folder.path.name, message)
        elif isinstance(error, UnsupportedError):
            yield finding("unknown-setting", CONFIG, message)
        else:
            yield finding("bad-config", CONFIG, message)
    if view.has_known_tensors:
        yield from _check_missing(view)
        yield from _check_extra(view)
        yield from _check_shapes(view)


def check_read(view: View, *, deep: bool) -> Iterator[Finding]:
    """Open a folder in which nothing else was found, and yield why quantkit refuses it. With
    `deep`, zero points and offsets, by which some formats are recognized, are read; otherwise only
    the settings are checked.
    """
    folder = view.folder
    try:
        if deep or folder.settings is None:
            open_checkpoint(folder.root)
        else:
            raw = {SETTINGS: folder.settings}
            modules = dict.fromkeys([*view.linears, *view.coded])
            read_codecs(raw, modules, folder.root / CONFIG, METHODS, view.stored)
    except (CheckpointError, UnsupportedError) as error:
        yield finding("not-read-here", folder.path.name, str(error))


def _check_missing(view: View) -> Iterator[Finding]:
    for name, tensor in view.expected.items():
        # Another rule checks that the codes are complete.
        coded = name.removesuffix(".weight") in view.coded
        if name in view.stored or coded or view.folder.in_unread_file(name):
            continue
        if is_embedding(tensor.module) and _stores_tied_head(view):
            # Readers tie it to the head, whichever of the two is stored.
            continue
        if tensor.stacked:
            stacked = f", or those of each expert of {tensor.module}"
        else:
            stacked = ""
        yield finding(
            "missing-tensor", name, f"not in any file; expected {list(tensor.shape)}{stacked}"
        )


def _stores_tied_head(view: View) -> bool:
    return (
        view.config is not None
        and view.config.tied_embeddings
        and disk_name(view.config, "head") in view.stored
    )


def _check_extra(view: View) -> Iterator[Finding]:
    raw = view.folder.config
    predicts = any(raw.get(key) for key in PREDICTION)
    owners: dict[str, str] = {}
    for module, coded in view.coded.items():
        for part in coded.tensors.values():
            owners[part.name] = module
    # Modules whose weights may be stored as codes. A tied model may store its head as well.
    quantizable = {"lm_head"}
    for expected_tensor in view.expected.values():
        module = expected_tensor.module
        if expected_tensor.linear is not None or expected_tensor.stacked or is_embedding(module):
            quantizable.add(module)
    for name, tensor in view.stored.items():
        module = name.rpartition(".")[0]
        if name in view.expected or is_derived_buffer(name) or _OF_ACTIVATIONS.fullmatch(name):
            continue
        if name == "lm_head.weight" or owners.get(name) in quantizable:
            continue
        # The config counts layers for further tokens, and does not say which tensors they have.
        if predicts and is_extra_layer(name, raw):
            continue
        if name.endswith(".bias") and module in view.coded and isinstance(view.method, Gptq | Awq):
            # Zeros that their writers add; vLLM and GPTQModel skip them.
            continue
        yield finding(
            "extra-tensor",
            name,
            f"{tensor.dtype} {list(tensor.shape)}, which the config does not call for",
        )


def _check_shapes(view: View) -> Iterator[Finding]:
    rows = view.rows_of_embedding()
    for name, tensor in view.expected.items():
        stored = view.stored.get(name)
        coded = view.coded.get(tensor.module)
        shape: tuple[int, ...] | None = None
        if coded is not None:
            shape = coded.plain_code_shape
        elif stored is not None:
            shape = stored.shape
        allowed_shapes = [tensor.shape]
        # Some stacked experts have inputs before outputs.
        if tensor.stacked is not None:
            allowed_shapes.append((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]))
        # Another rule compares the number of rows with vocab_size.
        if rows is not None and tensor.module in ("lm_head", "model.embed_tokens"):
            allowed_shapes.append((rows, *tensor.shape[1:]))
        if shape is not None and shape not in allowed_shapes:
            yield finding(
                "wrong-shape", name, f"found {list(shape)}, expected {list(tensor.shape)}"
            )
        if stored is not None and coded is None and stored.dtype not in STORED_FLOATS:
            yield finding("wrong-type", name, f"found {stored.dtype}, expected floats")
