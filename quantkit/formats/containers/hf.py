"""Hugging Face folders: ``config.json`` with safetensors, or ``pytorch_model*.bin`` to read."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors, parameters_as_written
from quantkit.architectures.families import FAMILIES, config_to_hf
from quantkit.architectures.topology import Parameter, parameters
from quantkit.base.late import LateModule
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import (
    KV_CACHE_SCHEME,
    CompressedTensors,
    Int8Activations,
)
from quantkit.formats.codecs.targets import is_head
from quantkit.formats.container import Container, Output, StoredCheckpoint
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint
from quantkit.formats.containers.hf_files import index_path, weight_kinds
from quantkit.formats.containers.hf_settings import SETTINGS, read_codecs, without_settings
from quantkit.formats.folder import find_copyable_files, json_bytes, side_names, with_templates
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.chat_template import ADDITIONAL_TEMPLATES
from quantkit.text.text_folder import locate_or_extract_text_folder

# Only outputs need these.
if TYPE_CHECKING:
    from quantkit.architectures.families import opaque
    from quantkit.formats.codecs import vllm
    from quantkit.formats.containers import hf_encoder
    from quantkit.text import export
else:
    vllm = LateModule("quantkit.formats.codecs.vllm")
    hf_encoder = LateModule("quantkit.formats.containers.hf_encoder")
    export = LateModule("quantkit.text.export")
    opaque = LateModule("quantkit.architectures.families.opaque")


class HuggingFace(Container):
    """The container of most published models."""

    name = "hf"
    title = "Hugging Face"
    config_file = "config.json"
    weights: Mapping[str, str] = {"safetensors": "safetensors", "bin": "pytorch_model*.bin"}

    def __init__(self, methods: Mapping[str, QuantMethod], native: QuantMethod) -> None:
        """`methods` are those that are read, by ``quant_method``; `native` is written by
        default.
        """
        self.methods = methods
        self._native = native

    @property
    def native(self) -> QuantMethod:
        return self._native

    def find_weight_kinds(self, path: Path) -> list[str]:
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
        """Open a checkpoint as `open` does, but of a model that also reads images or sound only the
        text part, if its family is known.
        """
        return HFCheckpoint(path, kind, self.methods, text_part=True, floats_as=floats_as)

    def with_codes(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        if isinstance(checkpoint, HFCheckpoint):
            return checkpoint.with_codes()
        return checkpoint

    def schemes(
        self, raw: Mapping[str, Any], config: ModelConfig, path: Path
    ) -> dict[str, QuantScheme]:
        """Read the scheme of every module that a config.json quantizes; weights are not needed.

        Raises:
            CheckpointError, UnsupportedError: see `read_codecs`.
        """
        experts = set()
        for parameter in parameters(config):
            if parameter.expert is not None:
                experts.add(parameter.module)
        # With all experts quantized, each is a module of its own, as in the names of a config.
        tensors = {}
        for tensor in disk_tensors(config, experts):
            if tensor.quantizable:
                tensors[tensor.module] = tensor
        _, codecs = read_codecs(raw, tensors, path, self.methods)
        module_schemes: dict[str, QuantScheme] = {}
        for module, codec in codecs.items():
            if codec.scheme is not None:
                for part in tensors[module].parts:
                    module_schemes[part.removesuffix(".weight")] = codec.scheme
        return module_schemes

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:
        joins = bool(quantized) and (method or self.native).joins_experts
        return parameters_as_written(config, quantized, joins_experts=joins)

    def encoder(self, output: Output) -> hf_encoder.SafetensorsEncoder:
        scales = () if output.kv_cache is None else output.kv_cache.read_tensors()
        method = output.method or self.native
        return hf_encoder.SafetensorsEncoder(
            output.planned, output.config, output.shard_bytes, method, scales
        )

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        source = output.source
        config = output.config
        raw = _build_config(source, config)
        settings_files: dict[str, bytes] = {}
        if not output.schemes:
            raw = without_settings(raw)
        # A model that is known by its tensors only keeps the settings of its source.
        if (output.schemes or output.kv_cache is not None) and SETTINGS not in raw:
            method = output.method or self.native
            settings = dict(_settings(output.schemes, config, method, raw).settings.values)
            if output.kv_cache is not None:
                settings[KV_CACHE_SCHEME] = output.kv_cache.scheme
            # mlx-lm and transformers read the same settings under different keys.
            raw |= dict.fromkeys(method.keys, settings)
            settings_files = method.side_files(settings)
        files: dict[str, bytes | Path] = {self.config_file: json_bytes(raw), **settings_files}
        files.update(
            find_copyable_files(locate_or_extract_text_folder(source.path), side_names(source))
        )
        if source.format != self.name:
            files.update(_export_tokenizer(locate_or_extract_text_folder(source.path)))
            token_ids = {}
            for key in ("bos_token_id", "eos_token_id"):
                if raw[key] is not None:
                    token_ids[key] = raw[key]
            files.setdefault("generation_config.json", json_bytes(token_ids))
        return with_templates(files, output.templates, in_settings=True)

    def vllm_problems(
        self, source: Checkpoint, schemes: Mapping[str, QuantScheme], method: QuantMethod | None
    ) -> list[vllm.VllmProblem]:
        """List what vLLM could not load of a folder with these schemes, given by canonical names
        of modules.
        """
        raw = _build_config(source, source.config)
        return vllm.vllm_problems(_settings(schemes, source.config, method or self.native, raw))

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


def _build_config(source: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    if config.tensors is None:
        return {**source.extra_config, **config_to_hf(config)}
    # The config of an unknown architecture is copied, and only its float type can be translated.
    if config.dtype == source.config.dtype:
        return dict(source.extra_config)
    return opaque.with_dtype(source.extra_config, config.dtype)


def _settings(
    schemes: Mapping[str, QuantScheme],
    config: ModelConfig,
    method: QuantMethod,
    raw: Mapping[str, Any],
) -> vllm.Linears:
    """Write the settings of a folder with these schemes, for vLLM too, and combine them with the
    linears that they describe.
    """
    schemes_on_disk, all_shapes = _collect_disk_schemes(schemes, config, method)
    ignored_extra: list[str] = []
    if isinstance(method, CompressedTensors):
        ignored_extra = opaque.list_ignored_extra_layers(config.tensors or (), raw)
    # Experts of ignored layers would keep those of the model from sharing a target.
    ignored_modules = set(ignored_extra)
    shapes = {}
    for module, shape in all_shapes.items():
        if module not in ignored_modules:
            shapes[module] = shape
    input_sizes = {}
    for module, shape in shapes.items():
        input_sizes[module] = 0 if shape is None else shape[-1]
    lists_every_linear = config.tensors is None or config.unstored is not None
    settings = method.write_settings(schemes_on_disk, input_sizes, every=lists_every_linear)
    # Some linears of models known by their tensors, such as those that carry a state, are floats.
    keeps_floats = config.tensors is not None
    for module in input_sizes:
        if module not in schemes_on_disk and not is_head(module):
            keeps_floats = True
    if keeps_floats:
        settings |= method.list_quantized(schemes_on_disk)
    vllm.name_for_vllm(settings, vllm.Linears.of(method, settings, shapes, schemes_on_disk, raw))
    if ignored_extra:
        settings["ignore"] += ignored_extra
    return vllm.Linears.of(method, settings, shapes, schemes_on_disk, raw)


def _collect_disk_schemes(
    schemes: Mapping[str, QuantScheme], config: ModelConfig, method: QuantMethod
) -> tuple[dict[str, QuantScheme], dict[str, tuple[int, ...] | None]]:
    """Collect the schemes by the names of modules on disk, and the shapes of all linears, with a
    tied head and routers, None if unknown; a module with another name for readers is listed by
    both.
    """
    # Readers create a tied head as a module, so settings must say whether it is quantized.
    untied = replace(config, tied_embeddings=False)
    all_tensors = disk_tensors(untied, schemes, joins_experts=method.joins_experts)
    tensors = []
    module_schemes: dict[str, QuantScheme | None] = {}
    for tensor in all_tensors:
        canonical_module = tensor.parts[0].removesuffix(".weight")
        if tensor.linear is not None or canonical_module in schemes:
            tensors.append(tensor)
            module_schemes[tensor.module] = schemes.get(canonical_module)
    aliases: dict[str, str] = {}
    for opaque_tensor in config.tensors or ():
        if opaque_tensor.alias is not None:
            aliases[opaque_tensor.module] = opaque_tensor.alias
    renamed: tuple[str, str] | None = None
    if config.tensors is None:
        renamed = FAMILIES[config.architecture].renamed
    if renamed is not None:
        for module in module_schemes:
            if module.startswith(renamed[0]):
                aliases[module] = renamed[1] + module.removeprefix(renamed[0])
    for module, scheme in list(module_schemes.items()):
        if module in aliases:
            module_schemes[aliases[module]] = scheme
    module_schemes |= dict.fromkeys((*(config.unstored or ()), *opaque.list_copied_modules(config)))
    # Readers may have a module for each linear of experts that are one tensor here.
    if config.tensors is not None:
        for tensor in all_tensors:
            if tensor.stacked is not None:
                for part in tensor.parts:
                    module = part.removesuffix(".weight")
                    module_schemes[aliases.get(module, module)] = None
    known_shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        for name in (tensor.module, aliases.get(tensor.module, tensor.module)):
            known_shapes[name] = tensor.shape
    quantized: dict[str, QuantScheme] = {}
    for module, scheme in module_schemes.items():
        if scheme is not None:
            quantized[module] = scheme
    return quantized, {module: known_shapes.get(module) for module in module_schemes}


def _export_tokenizer(folder: Path) -> dict[str, bytes]:
    """Export a tokenizer from Meta as tokenizer.json; if that would tokenize differently, write
    only the settings with which transformers reads the original.
    """
    path = folder / "tokenizer.model"
    if not path.is_file() or (folder / "tokenizer.json").is_file():
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        exported = export.export_json(path, Path(scratch))
    if exported is not None:
        return exported
    return {
        "tokenizer_config.json": json_bytes(
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        )
    }
