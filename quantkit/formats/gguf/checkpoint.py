"""Read models in GGUF: canonical tensors from those of a file or its parts."""

from __future__ import annotations

import copy
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.architectures.disk import DiskTensor, Place
from quantkit.architectures.families.family import PREDICTION_LAYERS
from quantkit.architectures.topology import parameters
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.gguf_types import FILE_TYPES, GgmlType, GgufTensor
from quantkit.files.located import read_part_headers
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import TensorFile, View, contiguous_strides, same_tensor
from quantkit.formats.checkpoint import require_tensors
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.codecs.ggml import (
    BLOCK_TYPES,
    CODED_TYPES,
    EXACT,
    FLOATS,
    NOT_READ,
    SMALL_FLOATS,
)
from quantkit.formats.gguf.config import (
    MODEL_TYPE,
    build_config,
    describe_llama_cpp_differences,
)
from quantkit.formats.gguf.names import (
    ROPE_TENSORS,
    get_stored_shape,
    gguf_tensors,
    has_merged_qkv,
    is_unread,
    keeps_float32,
)
from quantkit.formats.gguf.stored_form import can_move_columns, restore
from quantkit.formats.gguf.tensor_reader import read_canonical_tensor, view_of
from quantkit.formats.kv_cache import KvCache
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_QUANTIZATION_VERSION = 2
_EXACT_NOTE = "read as float32, which is exact"
_MAX_FACTORS = 2**16
# The type of a model without float matrices.
_DEFAULT = DType.BFLOAT16


class GgufCheckpoint:
    """A model in GGUF, read lazily.

    Its float type is that of most of its float matrices, or bfloat16. Norms, biases and routers
    stay float32. Integers that are no codes here are read as floats: an embedding or a head as
    float32 if that is exact, others in the model's type.
    """

    format = "gguf"
    kv_cache: KvCache | None = None

    def __init__(self, path: Path, floats_as: DType | None = None) -> None:
        """Open a file, with its other parts if there are several; headers only.

        Args:
            floats_as: see `Container.open`.

        Raises:
            CheckpointError: if a file is missing, damaged or contradicts itself.
            UnsupportedError: for unknown architectures and types of tensors.
        """
        headers = read_part_headers(path)
        self._codes = BLOCK_TYPES
        self.path = headers[0].path
        self.notes: list[str] = []
        self._stored: dict[str, GgufTensor] = {}
        # By tensor.
        self._files: dict[str, TensorFile] = {}
        for header in headers:
            views = {name: view_of(stored) for name, stored in header.tensors.items()}
            file = TensorFile(header.source, views)
            self._stored.update(header.tensors)
            self._files.update(dict.fromkeys(header.tensors, file))
        # Not kept: the tokens of a large vocabulary are Python objects of 150 MB, which would be in
        # memory next to the weights. The tokenizer is read from the file again.
        metadata = headers[0].metadata
        self._sources = [header.source for header in headers]
        self._file_type = metadata.get("general.file_type")
        self._require_types(metadata)
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        factors = {}
        for name in ROPE_TENSORS:
            if name in self._stored:
                factors[name] = self._factors(name)
        config = build_config(
            metadata, shapes, factors, self.path, tied=self._is_tied(), dtype=_DEFAULT.value
        )
        self._leave_out_prediction(config.num_layers, metadata)
        # null if it is unknown: without the key, transformers uses its own default.
        pad_token_id = None
        padding_ids = Settings(metadata, self.path).ids("tokenizer.ggml.padding_token_id")
        if padding_ids and padding_ids[0] < config.vocab_size:
            pad_token_id = padding_ids[0]
        self.extra_config: Mapping[str, Any] = {"pad_token_id": pad_token_id}
        tensors = gguf_tensors(
            config, merged_qkv=has_merged_qkv(config, self._stored), stored=self._stored
        )
        self._disk: dict[str, DiskTensor] = {}
        for tensor in tensors:
            self._disk[tensor.name] = tensor
        # The types of matrices decide the model's; which tensors are matrices follows from the
        # config.
        self.config = config.with_dtype(self._dtype().value)
        self._floats_as = floats_as or DType(self.config.dtype)
        self._check()
        # Several where a canonical tensor is divided.
        self._places: dict[str, list[tuple[DiskTensor, Place]]] = {}
        for tensor in self._disk.values():
            # A tied head is a copy of the embedding and has the same canonical name.
            if tensor.name == _HEAD and self.config.tied_embeddings:
                continue
            for place in tensor.places:
                self._places.setdefault(place.name, []).append((tensor, place))
        self._order = [parameter.name for parameter in parameters(self.config)]
        # Else quantkit wrote it, with these notes.
        if MODEL_TYPE not in metadata:
            for config_note in describe_llama_cpp_differences(self.config):
                self.notes.append(f"{self.path}: {config_note}")
        for name in (_EMBEDDING, _HEAD):
            if name in self._disk and self._exact_floats(self._disk[name]):
                self.notes.append(
                    f"{self.path}: {name} is {self._stored[name].type}, {_EXACT_NOTE}"
                )

    def with_codes(self) -> GgufCheckpoint:
        """Copy this checkpoint to one that reads all codes as such; see `Container.with_codes`."""
        coded = copy.copy(self)
        coded._codes = CODED_TYPES
        # Tensors with codes are not read as floats.
        coded.notes = [note for note in self.notes if not note.endswith(_EXACT_NOTE)]
        return coded

    @property
    def method(self) -> str | None:
        if any(self._spec(tensor).scheme for tensor in self._disk.values()):
            return self.format
        return None

    @property
    def layout(self) -> str:
        name = self._file_type_name() or self._prevalent_type()
        if len(self._sources) > 1:
            parts = f", {len(self._sources)} files"
        else:
            parts = ""
        return f"{self.format} ({name}{parts})"

    def _file_type_name(self) -> str | None:
        """Look up llama.cpp's name of the file, such as Q4_K_M; None if the file states none that
        its tensors allow.
        """
        name = None
        if isinstance(self._file_type, int):
            name = FILE_TYPES.get(self._file_type)
        claims_floats = name in {kind.value for kind in FLOATS}
        has_only_floats = all(tensor.type in FLOATS for tensor in self._stored.values())
        if claims_floats == has_only_floats:
            return name
        return None

    def _prevalent_type(self) -> str:
        # Ties go to the first of all types, not to the first tensor's.
        kinds = Counter(dict.fromkeys(GgmlType, 0))
        for tensor in self._stored.values():
            kinds[tensor.type] += tensor.nbytes
        return kinds.most_common(1)[0][0].value

    def names(self) -> list[str]:
        return list(self._order)

    def info(self, name: str) -> TensorSpec:
        specs = [self._spec(tensor) for tensor, _ in self._places[name]]
        spec = specs[0]
        dtype = spec.dtype
        # Floats of different types are joined in that of the model.
        if any(other.dtype != dtype for other in specs):
            dtype = self._floats_as
        return TensorSpec(
            name=name,
            shape=self._places[name][0][1].shape,
            dtype=dtype,
            scheme=spec.scheme,
            stored_as=spec.stored_as,
        )

    def files(self) -> list[SourceFile]:
        return list(self._sources)

    def count_stored_bytes(self, name: str) -> int:
        size = 0
        for tensor, place in self._places[name]:
            nbytes = self._stored[tensor.name].nbytes
            if not place.rearranged:
                nbytes = nbytes * math.prod(place.shape) // math.prod(tensor.shape)
            size += nbytes
        return size

    def readers(self) -> str:
        return "quantkit, llama.cpp"

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        """Load one tensor, or a part of it."""
        tensor, place = self._places[name][0]
        if not place.rearranged:
            return self._read(tensor, place, part)
        # Any row may be anywhere in the file, so that all are read.
        places: list[Place] = []
        values: list[Weight] = []
        for divided, divided_place in self._places[name]:
            places.append(divided_place)
            values.append(self._read(divided, divided_place))
        restored = restore(places, values, self.info(name).dtype)
        if part is None:
            return restored
        return part.of_weight(restored)

    def _read(self, tensor: DiskTensor, place: Place, part: TensorSlice | None = None) -> Weight:
        return read_canonical_tensor(
            file=self._files[tensor.name],
            view=self._view(tensor),
            kind=self._stored[tensor.name].type,
            spec=self._spec(tensor),
            tensor=tensor,
            place=place,
            config=self.config,
            part=part,
        )

    def _spec(self, tensor: DiskTensor) -> TensorSpec:
        kind = self._stored[tensor.name].type
        if kind in FLOATS:
            return TensorSpec(tensor.name, tensor.shape, FLOATS[kind])
        keeps_codes = tensor.quantizable or tensor.stacked is not None or tensor.name == _EMBEDDING
        if keeps_codes and kind in self._codes and self._can_restore_codes(tensor):
            scheme = self._codes[kind].scheme
            # GGUF's scales are float16, except for powers of two.
            dtype = self._floats_as if scheme.scales is Scales.POWERS else DType.FLOAT16
            return TensorSpec(tensor.name, tensor.shape, dtype, scheme)
        if self._exact_floats(tensor):
            return TensorSpec(tensor.name, tensor.shape, DType.FLOAT32)
        stored_as = None if kind in SMALL_FLOATS else kind.value
        return TensorSpec(
            name=tensor.name,
            shape=tensor.shape,
            dtype=self._floats_as,
            scheme=None,
            stored_as=stored_as,
        )

    def _can_restore_codes(self, tensor: DiskTensor) -> bool:
        """Return whether the codes of a tensor can be put in canonical order, with those of others
        that store the same canonical tensor.
        """
        scheme = self._codes[self._stored[tensor.name].type].scheme
        for divided, place in self._places[tensor.parts[0]]:
            has_other_codes = self._stored[divided.name].type != self._stored[tensor.name].type
            if place.rearranged and (has_other_codes or not can_move_columns(place, scheme)):
                return False
        return True

    def _exact_floats(self, tensor: DiskTensor) -> bool:
        """Return whether a tensor is the embedding or the head in integers that are no codes, and
        float32 is exact.
        """
        kind = self._stored[tensor.name].type
        return tensor.name in (_EMBEDDING, _HEAD) and kind in EXACT and kind not in self._codes

    def _view(self, tensor: DiskTensor) -> View:
        """Locate a tensor, in the expected shape; of blocks, their bytes."""
        view = self._files[tensor.name].view(tensor.name)
        # Files may have other sizes of 1, and rows where one vector is expected.
        shape = tensor.shape
        if self._stored[tensor.name].type not in FLOATS:
            # The last size is that of the bytes of blocks.
            shape = (*tensor.shape[:-1], view.shape[-1])
        return replace(view, shape=shape, stride=contiguous_strides(shape))

    def _require_types(self, metadata: Mapping[str, Any]) -> None:
        version = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
        for name, tensor in self._stored.items():
            is_quantized = tensor.type not in FLOATS
            if tensor.type in NOT_READ or (is_quantized and len(tensor.shape) == 1):
                problem = f"tensor '{name}' has an unsupported type"
                raise UnsupportedError(problem, path=self._files[name].path, found=tensor.type)
            if is_quantized and version != _QUANTIZATION_VERSION:
                raise UnsupportedError(
                    "has unknown quantization rules",
                    path=self.path,
                    found=f"general.quantization_version {format_value(version)}",
                    expected=_QUANTIZATION_VERSION,
                )

    def _leave_out_prediction(self, layers: int, metadata: Mapping[str, Any]) -> None:
        """Leave out the tensors of layers for multi-token prediction, which come after the `layers`
        of the model.
        """
        architecture = metadata["general.architecture"]
        if not metadata.get(f"{architecture}.{PREDICTION_LAYERS}"):
            return
        blocks = metadata[f"{architecture}.block_count"]
        left_out: list[str] = []
        for name in self._stored:
            if name.startswith(tuple(f"blk.{layer}." for layer in range(layers, blocks))):
                left_out.append(name)
        for name in left_out:
            del self._stored[name]
        if left_out:
            self.notes.append(
                f"{self.path}: {len(left_out)} tensors of layers for multi-token prediction are"
                " left out, as transformers leaves out those of a folder"
            )

    def _factors(self, name: str) -> tuple[float, ...]:
        tensor = self._stored[name]
        is_list = len(tensor.shape) == 1 and tensor.shape[0] <= _MAX_FACTORS
        if tensor.type is not GgmlType.F32 or not is_list:
            raise CheckpointError(
                f"tensor '{name}' is not a list of factors",
                path=self._files[name].path,
                found=f"{tensor.type} {list(tensor.shape)}",
            )
        # Read here, because the config depends on the values, without torch.
        return struct.unpack(f"<{tensor.shape[0]}f", self._files[name].read_bytes(name))

    def _is_tied(self) -> bool:
        """Check whether the head is absent or a copy of the embedding, as some architectures
        store it.
        """
        if _HEAD not in self._stored or _EMBEDDING not in self._stored:
            return True
        if self._stored[_HEAD].type != self._stored[_EMBEDDING].type:
            return False
        return same_tensor(self._files[_HEAD], _HEAD, self._files[_EMBEDDING], _EMBEDDING)

    def _dtype(self) -> DType:
        sizes: Counter[DType] = Counter()
        for tensor in self._disk.values():
            stored = self._stored.get(tensor.name)
            if stored is not None and stored.type in FLOATS and not keeps_float32(tensor):
                sizes[FLOATS[stored.type]] += stored.nbytes
        if sizes:
            return sizes.most_common(1)[0][0]
        return _DEFAULT

    def _check(self) -> None:
        expected = {}
        for name, disk_tensor in self._disk.items():
            expected[name] = get_stored_shape(self.config, disk_tensor)
        is_tied = self.config.tied_embeddings
        specs = {}
        for name, tensor in self._stored.items():
            # These became a part of the config.
            if name in ROPE_TENSORS:
                continue
            if is_unread(self.config, name):
                continue
            # A head that equals the embedding is allowed in any architecture.
            if name == _HEAD and is_tied and name not in expected:
                continue
            # Blocks count as floats here: `_require_types` checked them.
            dtype = FLOATS.get(tensor.type, DType(self.config.dtype))
            specs[name] = TensorSpec(name, _as_expected(tensor, expected.get(name)), dtype)
        if is_tied and _HEAD not in specs:
            expected.pop(_HEAD, None)
        require_tensors(specs, expected, self.path)


def _as_expected(tensor: GgufTensor, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return a tensor's shape, without leading sizes of 1 that are not expected."""
    # ggml's tensors have four sizes, and leading sizes of 1 say nothing.
    padded = (1,) * (4 - len(tensor.shape)) + tensor.shape
    if shape is not None and padded == (1,) * (4 - len(shape)) + shape:
        return shape
    return tensor.shape
