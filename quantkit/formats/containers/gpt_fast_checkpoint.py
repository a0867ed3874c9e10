"""Read files of gpt-fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, Place, build_disk_tensors
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.architectures.names import GPT_FAST, is_derived_buffer
from quantkit.architectures.topology import Parameter, parameters
from quantkit.base.json_values import read_settings
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files import pth_io
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import StoredTensor, same_tensor
from quantkit.formats.checkpoint import require_tensors
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.containers.hf_parts import decode_place, read_floats, share
from quantkit.formats.containers.hf_settings import NOT_CARRIED
from quantkit.formats.kv_cache import KvCache
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_WEIGHT = "weight"
_SCALES = "scales"
_SCHEME = QuantScheme(8, None)
_EMBEDDING = f"{GPT_FAST['embedding']}.weight"
_HEAD = f"{GPT_FAST['head']}.weight"


class GptFastCheckpoint:
    """A file of gpt-fast, read lazily."""

    format = "gpt-fast"
    method: str | None = None
    kv_cache: KvCache | None = None

    def __init__(self, path: Path, weights: Path) -> None:
        """Open one of the files of a folder; headers only.

        Raises:
            CheckpointError: if a file is missing or damaged, or they contradict each other.
            UnsupportedError: for models that gpt-fast has no names for, and linears in other
                integers.
        """
        self.path = path
        config_path = path / "config.json"
        raw = read_settings(config_path)
        self._file = pth_io.open_file(weights)
        self._config_file = SourceFile(config_path)
        self.notes = list(self._file.notes)
        # The config determines rotary tables, so they are not tensors of the model.
        self._stored: dict[str, StoredTensor] = {}
        for name, stored in self._file.tensors.items():
            if not is_derived_buffer(name):
                self._stored[name] = stored
        # The config depends on the stored head, and the expected tensors on the config.
        self.config = self._read_config(raw, config_path)
        written_keys = set(config_to_hf(self.config)) | NOT_CARRIED
        extra_config: dict[str, Any] = {}
        for key, value in raw.items():
            if key not in written_keys:
                extra_config[key] = value
        self.extra_config: Mapping[str, Any] = extra_config
        tensors = _disk_tensors(self.config, path)
        self._specs = self._join_scales(tensors)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        require_tensors(self._specs, shapes, weights)
        self._places: dict[str, tuple[DiskTensor, Place]] = {}
        for tensor in tensors.values():
            for place in tensor.places:
                self._places[place.name] = (tensor, place)

    @property
    def layout(self) -> str:
        return f"{self.format} ({self._file.path.name})"

    def count_stored_bytes(self, name: str) -> int:
        tensor, place = self._places[name]
        size = self._stored[tensor.name].nbytes
        scales = self._stored.get(_scales_of(tensor.name))
        if scales is not None:
            size += scales.nbytes
        return share(size, tensor, place)

    def readers(self) -> str:
        return "quantkit, gpt-fast"

    def names(self) -> list[str]:
        return [parameter.name for parameter in parameters(self.config)]

    def info(self, name: str) -> TensorSpec:
        tensor, place = self._places[name]
        spec = self._specs[tensor.name]
        return TensorSpec(name, place.shape, spec.dtype, spec.scheme)

    def files(self) -> list[SourceFile]:
        return [self._file.source, self._config_file]

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        """Load one tensor, or a part of it, in canonical layout."""
        tensor, place = self._places[name]
        spec = self._specs[tensor.name]
        if spec.scheme is None:
            return read_floats(self._file, self._file.view(tensor.name), tensor, place, part)
        files_by_tensor = dict.fromkeys(self._file.tensors, self._file)
        raw = RawModule(tensor.module, files_by_tensor, self._file.path)
        return decode_place(_Int8Rows(), raw, spec, tensor, place, part)

    def _read_config(self, raw: Mapping[str, Any], path: Path) -> ModelConfig:
        """Read the config of the download, with the float type of the file.

        A head that differs from the embedding unties the two.
        """
        config = config_from_hf(raw, path)
        embedding = self._stored.get(_EMBEDDING)
        head = self._stored.get(_HEAD)
        if embedding is None:
            problem = f"tensor '{_EMBEDDING}' is missing"
            raise CheckpointError(problem, path=self._file.path, expected="a file of gpt-fast")
        if embedding.dtype in FLOATS:
            config = config.with_dtype(embedding.dtype)
        if not config.tied_embeddings or head is None:
            return config
        if same_tensor(self._file, _EMBEDDING, self._file, _HEAD):
            del self._stored[_HEAD]
            return config
        # The int8 script quantizes the head, but not the embedding.
        self.notes.append(
            f"{self._file.path}: the head is {head.dtype} and no longer equals the embedding; it is"
            " kept separate"
        )
        return replace(config, tied_embeddings=False)

    def _join_scales(self, tensors: Mapping[str, DiskTensor]) -> dict[str, TensorSpec]:
        """Describe every tensor on disk, with int8 weights and their scales as one tensor."""
        specs: dict[str, TensorSpec] = {}
        for name, stored in self._stored.items():
            specs[name] = TensorSpec(name, stored.shape, stored.dtype)
        for name, weight in self._stored.items():
            scales = self._stored.get(_scales_of(name))
            if scales is None or name not in tensors or tensors[name].linear is None:
                continue
            has_float_scales = scales.dtype in FLOATS and scales.shape == weight.shape[:1]
            if weight.dtype != DType.INT8 or not has_float_scales:
                problem = f"the scales of '{name}' do not match it"
                description = (
                    f"{scales.dtype} {list(scales.shape)} for {weight.dtype} {list(weight.shape)}"
                )
                raise CheckpointError(
                    problem, path=self._file.path, found=description, expected="one per row of int8"
                )
            specs[name] = TensorSpec(name, weight.shape, scales.dtype, _SCHEME)
            del specs[scales.name]
        return specs


class _Int8Rows:
    def decode(
        self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None = None
    ) -> qtensor.QuantTensor:
        # Canonical codes are unsigned; flipping the sign bit of an int8 adds 128.
        codes = raw.read(_WEIGHT, part).view(torch.uint8) ^ 128
        # A part of the columns needs the scales of all rows.
        scales = raw.read(_SCALES, part if part is not None and part.axis == 0 else None)
        return qtensor.QuantTensor(codes, scales.unsqueeze(1), None, _SCHEME)


def _disk_tensors(config: ModelConfig, path: Path) -> dict[str, DiskTensor]:
    """Derive the tensors that a file should contain, by name.

    Raises:
        UnsupportedError: if gpt-fast has no name for one.
    """

    def locate_parameter(parameter: Parameter) -> tuple[str, None]:
        module = GPT_FAST.get(parameter.role)
        if module is None or parameter.leaf != "weight":
            raise UnsupportedError(
                "gpt-fast does not support this model",
                path=path,
                found=parameter.name,
                expected="a model like Llama",
            )
        return f"{module.format(layer=parameter.layer)}.weight", None

    disk_tensors: dict[str, DiskTensor] = {}
    for tensor in build_disk_tensors(config, locate_parameter, interleaved=True):
        disk_tensors[tensor.name] = tensor
    return disk_tensors


def _scales_of(name: str) -> str:
    return name.removesuffix(_WEIGHT) + _SCALES
