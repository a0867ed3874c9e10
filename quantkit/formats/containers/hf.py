"""Hugging Face folders: ``config.json`` with safetensors, or ``pytorch_model*.bin`` to read."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors, parameters_as_written
from quantkit.architectures.families import config_to_hf
from quantkit.architectures.families.opaque import (
    list_copied_modules,
    list_ignored_extra_layers,
    with_dtype,
)
from quantkit.architectures.topology import Parameter, parameters
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import (
    KV_CACHE_SCHEME,
    CompressedTensors,
    Int8Activations,
)
from quantkit.formats.codecs.vllm import Linears, VllmProblem, name_for_vllm, vllm_problems
from quantkit.formats.container import Container, Output, StoredCheckpoint
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint
from quantkit.formats.containers.hf_encoder import SafetensorsEncoder
from quantkit.formats.containers.hf_files import index_path, weight_kinds
from quantkit.formats.containers.hf_settings import SETTINGS, read_codecs, without_settings
from quantkit.formats.folder import json_bytes, present, side_names, with_templates
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.chat_template import ADDITIONAL_TEMPLATES
from quantkit.text.export import export_json
from quantkit.text.gguf_tokenizer import text_folder


class HuggingFace(Container):
    """The container of most published models."""

    name = "hf"
    title = "Hugging Face"
    config_file = "config.json"
    weights: Mapping[str, str] = {"safetensors": "safetensors", "bin": "pytorch_model*.bin"}
    native: QuantMethod

    def __init__(self, methods: Mapping[str, QuantMethod], native: QuantMethod) -> None:
        """`methods` are those that are read, by ``quant_method``; `native` is written by
        default.
        """
        self.methods = methods
        self.native = native

    def present(self, path: Path) -> list[str]:
        if path.is_dir():
            return weight_kinds(path)
        return []

    def has_index(self, path: Path, kind: str) -> bool:
        return index_path(path, kind).is_file()

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> HFCheckpoint:
        return HFCheckpoint(
            path, kind, self.methods, tensors_only=tensors_only, floats_as=floats_as
        )

    def open_text_part(self, path: Path, kind: str, floats_as: DType | None) -> HFCheckpoint:
        """`open`; of a model that also reads images or sound, the text part alone, if its family
        is known.
        """
        return HFCheckpoint(path, kind, self.methods, text_part=True, floats_as=floats_as)

    def with_codes(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        if isinstance(checkpoint, HFCheckpoint):
            return checkpoint.with_codes()
        return checkpoint

    def schemes(
        self, raw: Mapping[str, Any], config: ModelConfig, path: Path
    ) -> dict[str, QuantScheme]:
        """Return the scheme of every module that a config.json quantizes; weights are not needed.

        Raises:
            CheckpointError, UnsupportedError: see `read_codecs`.
        """
        experts = set()
        for parameter in parameters(config):
            if parameter.expert is not None:
                experts.add(parameter.module)
        # Each expert has its own modules.
        apart = disk_tensors(config, experts)
        tensors = {tensor.module: tensor for tensor in apart if tensor.quantizable}
        _, codecs = read_codecs(raw, tensors, path, self.methods)
        schemes: dict[str, QuantScheme] = {}
        for module, codec in codecs.items():
            if codec.scheme is not None:
                for part in tensors[module].parts:
                    schemes[part.removesuffix(".weight")] = codec.scheme
        return schemes

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:
        joins = bool(quantized) and (method or self.native).joins_experts
        return parameters_as_written(config, quantized, joins_experts=joins)

    def encoder(self, output: Output) -> SafetensorsEncoder:
        scales = () if output.kv_cache is None else output.kv_cache.read_tensors()
        method = output.method or self.native
        return SafetensorsEncoder(output.planned, output.config, output.shard_bytes, method, scales)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        source = output.source
        config = output.config
        raw = _config(source, config)
        settings_files = dict[str, bytes]()
        if output.schemes:
            raw = raw
        else:
            raw = without_settings(raw)
        if (output.schemes or output.kv_cache is not None) and SETTINGS not in raw:
            method = output.method or self.native
            settings = dict(_settings(output.schemes, config, method, raw).settings.values)
            if output.kv_cache is not None:
                settings[KV_CACHE_SCHEME] = output.kv_cache.scheme
            raw |= dict.fromkeys(method.keys, settings)
            settings_files = method.side_files(settings)
        files: dict[str, bytes | Path] = {self.config_file: json_bytes(raw), **settings_files}
        files.update(present(text_folder(source.path), side_names(source)))
        if source.format != self.name:
            files.update(_export_tokenizer(text_folder(source.path)))
            ids = {"bos_token_id": raw["bos_token_id"], "eos_token_id": raw["eos_token_id"]}
            files.setdefault(
                "generation_config.json",
                json_bytes({k: v for k, v in ids.items() if v is not None}),
            )
        return with_templates(files, output.templates, in_settings=True)

    def vllm_problems(
        self, source: Checkpoint, schemes: Mapping[str, QuantScheme], method: QuantMethod | None
    ) -> list[VllmProblem]:
        """Return what vLLM could not load of a folder with these schemes, given by canonical names
        of modules.
        """
        raw = _config(source, source.config)
        return vllm_problems(_settings(schemes, source.config, method or self.native, raw))

    def list_carried_names(self, source: Checkpoint, dst: Path) -> Collection[str]:
        names = side_names(source)
        if source.config.runnable:
            return (*names, ADDITIONAL_TEMPLATES)
        return names

    def notes(self, output: Output) -> list[str]:
        if not isinstance(output.method, Int8Activations):
            return []
        return [
            f"readers of {output.method.name} round activations to int8 too; figures here are of"
            " the weights alone"
        ]


def _config(source: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    if config.tensors is None:
        return {**source.extra_config, **config_to_hf(config)}
    same = config.dtype == source.config.dtype
    if same:
        return dict(source.extra_config)
    return with_dtype(source.extra_config, config.dtype)


def _settings(
    schemes: Mapping[str, QuantScheme],
    config: ModelConfig,
    method: QuantMethod,
    raw: Mapping[str, Any],
) -> Linears:
    """Return the linears of a folder with these schemes, and the settings that state them, for vLLM
    too.
    """
    on_disk, shapes = _on_disk(schemes, config, method)
    if isinstance(method, CompressedTensors):
        extra = list_ignored_extra_layers(config.tensors or (), raw)
    else:
        extra = []
    # Or experts there would keep the model's from sharing a target.
    apart = set(extra)
    shapes = {module: shape for module, shape in shapes.items() if module not in apart}
    inputs = {}
    for module, shape in shapes.items():
        inputs[module] = 0 if shape is None else shape[-1]
    every = config.tensors is None or config.unstored is not None
    settings = method.write_settings(on_disk, inputs, every=every)
    name_for_vllm(settings, Linears.of(method, settings, shapes, on_disk, raw))
    if extra:
        settings["ignore"] += extra
    return Linears.of(method, settings, shapes, on_disk, raw)


def _on_disk(
    schemes: Mapping[str, QuantScheme], config: ModelConfig, method: QuantMethod
) -> tuple[dict[str, QuantScheme], dict[str, tuple[int, ...] | None]]:
    """Return the schemes by the names of modules on disk, and the shapes of all linears, with a
    tied head and routers, None if unknown; a module with another name for readers is listed by
    both.
    """
    untied = replace(config, tied_embeddings=False)
    every = disk_tensors(untied, schemes, joins_experts=method.joins_experts)
    named = [(tensor, tensor.parts[0].removesuffix(".weight")) for tensor in every]
    tensors = []
    for tensor, module in named:
        if tensor.linear is not None or module in schemes:
            tensors.append(tensor)
    found = {}
    for tensor in tensors:
        found[tensor.module] = schemes.get(tensor.parts[0].removesuffix(".weight"))
    aliases = {
        tensor.module: tensor.alias for tensor in config.tensors or () if tensor.alias is not None
    }
    found |= {aliases[module]: scheme for module, scheme in found.items() if module in aliases}
    found |= dict.fromkeys((*(config.unstored or ()), *list_copied_modules(config)))
    # Readers may have a module for each linear of experts that are one tensor here.
    if config.tensors is not None:
        stacked = (
            part.removesuffix(".weight")
            for tensor in every
            if tensor.stacked is not None
            for part in tensor.parts
        )
        found |= dict.fromkeys(aliases.get(module, module) for module in stacked)
    shapes = {}
    for t in tensors:
        for name in (t.module, aliases.get(t.module, t.module)):
            shapes[name] = t.shape
    quantized = {module: scheme for module, scheme in found.items() if scheme is not None}
    return quantized, {module: shapes.get(module) for module in found}


def _export_tokenizer(folder: Path) -> dict[str, bytes]:
    """Return a tokenizer.json for a tokenizer from Meta; if it would tokenize differently, only the
    settings with which transformers reads the original.
    """
    path = folder / "tokenizer.model"
    if not path.is_file() or (folder / "tokenizer.json").is_file():
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        exported = export_json(path, Path(scratch))
    if exported is not None:
        return exported
    return {
        "tokenizer_config.json": json_bytes(
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        )
    }
