"""Reading Meta folders: canonical tensors from the shards.

Each weight is split over the shards as the table of names says. Query and key rows are interleaved
for rotary embedding, and are reordered to rotate-half order. KV heads are repeated if there are
more shards than heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.meta_params import (
    config_from_meta,
    find_assumed_rope_factor,
)
from quantkit.architectures.names import META_NAMES, is_derived_buffer
from quantkit.architectures.topology import Parameter, parameters
from quantkit.base.json_values import Settings, read_settings
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files import pth_io
from quantkit.files.source import SourceFile, make_damaged_file_error
from quantkit.files.tensor_file import StoredTensor, TensorFile, same_tensor
from quantkit.formats.checkpoint import raise_unexpected, require_tensors
from quantkit.formats.containers.meta_tensors import meta_name, to_rotate_half
from quantkit.formats.kv_cache import KvCache
from quantkit.tensors.dtypes import FLOATS
from quantkit.tensors.late import torch
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.text.tokenizer import load_tokenizer

_EMBEDDING = f"{META_NAMES['embedding']}.weight"
_HEAD = f"{META_NAMES['head']}.weight"
# Of the first layer.
_QUERY = f"{META_NAMES['attention.q'].format(layer=0)}.weight"
_GATE = f"{META_NAMES['mlp.gate'].format(layer=0)}.weight"
_OTHER_MODEL = "the shards are of different models"


class MetaCheckpoint:
    """A Meta folder, read lazily in canonical names and layout."""

    format = "meta"
    method: str | None = None
    kv_cache: KvCache | None = None

    def __init__(self, path: Path, shards: Sequence[Path]) -> None:
        """Open a folder with the files `shards`, in order; headers only.

        Raises:
            CheckpointError: if shards are missing or damaged, or contradict each other, the params
                or the architecture.
            UnsupportedError: if the checkpoint is quantized or is not a Llama text model.
        """
        self.path = path
        self.notes: list[str] = []
        self.extra_config: Mapping[str, Any] = {}
        params_path = path / "params.json"
        params = read_settings(params_path)
        self._params = SourceFile(params_path)
        self._paths = _require_contiguous(shards, path)
        self._shards = [pth_io.open_file(shard_path) for shard_path in self._paths]
        for shard in self._shards:
            self.notes.extend(shard.notes)
        self._stored = self._shards[0].tensors
        self._weights = self._same_tensors([shard.tensors for shard in self._shards])
        # Llama 1 and 2; Llama 3's shapes change it when the config is read.
        self.embedding_axis = 1
        self.config = self._read_config(params, params_path)
        self._parameters = {parameter.name: parameter for parameter in parameters(self.config)}
        self._check()
        factor = find_assumed_rope_factor(params, self.config)
        if factor is not None:
            note = "does not set rope_scaling_factor"
            version = "3.1" if factor == 8 else "3.2"
            self.notes.append(
                f"{params_path}: {note}; {factor:g} is assumed, as in Llama {version}"
            )

    @property
    def layout(self) -> str:
        return f"{self.format} ({len(self._paths)} shards)"

    def count_stored_bytes(self, name: str) -> int:
        spec = self.info(name)
        return StoredTensor(name, spec.dtype, spec.shape).nbytes

    def readers(self) -> str:
        return "quantkit, Meta's reference code"

    def names(self) -> list[str]:
        return list(self._parameters)

    def info(self, name: str) -> TensorSpec:
        parameter = self._parameters[name]
        return TensorSpec(name, parameter.shape, self._stored[meta_name(parameter)].dtype)

    def files(self) -> list[SourceFile]:
        return [*(shard.source for shard in self._shards), self._params]

    def load(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Load one tensor, or a part of it, joined from its shards, in canonical layout; a part
        of rotary rows must be of complete heads.

        Raises:
            CheckpointError: if copies of a tensor in several shards differ.
        """
        parameter = self._parameters[name]
        stored_name = meta_name(parameter)
        stored = self._stored[stored_name]
        axis = self._axis(parameter)
        piece_size = stored.shape[axis]
        # The shards with the same piece follow each other.
        copies = self._copies(parameter)
        holders_by_piece = []
        for first_shard in range(0, len(self._shards), copies):
            holders_by_piece.append(self._shards[first_shard : first_shard + copies])
        # A part along another axis takes the same columns or rows of every piece.
        if part is not None and part.axis == axis:
            pieces = _overlaps(holders_by_piece, piece_size, part)
        else:
            pieces = [(holders, part) for holders in holders_by_piece]
        shape = list(parameter.shape)
        if part is not None:
            shape[part.axis] = part.size
        # Pieces are read into their place, so that no piece is in memory twice.
        joined = stored.dtype.empty(shape)
        start = 0
        for holders, piece_part in pieces:
            size = piece_size
            if piece_part is not None and piece_part.axis == axis:
                size = piece_part.size
            target = joined.narrow(axis, start, size)
            start += size
            if not parameter.rotary:
                holders[0].read_into(target, stored_name, piece_part)
            else:
                interleaved = holders[0].read(stored_name, piece_part)
                target.copy_(to_rotate_half(interleaved, self.config.head_dim))
            for holder in holders[1:]:
                expected = holders[0].read(stored_name, piece_part)
                if not expected.equal(holder.read(stored_name, piece_part)):
                    problem = (
                        f"tensor '{stored_name}' must be the same in every shard that has it, but"
                        " is not"
                    )
                    raise CheckpointError(problem, path=self.path, hint=_OTHER_MODEL)
        return joined

    def _same_tensors(self, shards: Sequence[Mapping[str, StoredTensor]]) -> set[str]:
        """Check that all shards have the weights in the same shape and float type, and return the
        names of these.
        """
        first_shard = shards[0]
        weights = {name for name in first_shard if not is_derived_buffer(name)}
        for path, shard in zip(self._paths[1:], shards[1:], strict=True):
            difference = sorted(set(first_shard) ^ set(shard))
            if difference:
                problem = f"contains different tensors than {self._paths[0].name}"
                stray = f"'{difference[0]}' in one"
                raise CheckpointError(problem, path=path, found=stray, hint=_OTHER_MODEL)
            for name in weights:
                tensor = shard[name]
                expected = first_shard[name]
                if tensor != expected:
                    if tensor.shape == expected.shape:
                        property_name = "float type"
                    else:
                        property_name = "shape"
                    raise CheckpointError(
                        f"tensor '{name}' has a different {property_name} than in"
                        f" {self._paths[0].name}",
                        path=path,
                        found=f"{tensor.dtype} {list(tensor.shape)}",
                        expected=f"{expected.dtype} {list(expected.shape)}",
                    )
        return weights

    def _read_config(self, params: Mapping[str, Any], params_path: Path) -> ModelConfig:
        """Read the architecture from params.json and the shapes."""
        count = len(self._paths)
        for required_name in (_EMBEDDING, _QUERY, _GATE):
            if required_name not in self._weights:
                # Names of other formats or quantizations explain more than the missing one.
                patterns = {f"{module.format(layer='{}')}.weight" for module in META_NAMES.values()}
                unexpected = []
                for name in self._weights:
                    if re.sub(r"\.\d+\.", ".{}.", name) not in patterns:
                        unexpected.append(name)
                if unexpected:
                    raise_unexpected(unexpected, self._paths[0])
                raise CheckpointError(f"tensor '{required_name}' is missing", path=self._paths[0])
        rows, width = self._matrix_shape(_EMBEDDING)
        query_rows, dim = self._matrix_shape(_QUERY)
        feed_forward, _ = self._matrix_shape(_GATE)
        dtype = self._stored[_QUERY].dtype
        if dtype not in FLOATS:
            raise UnsupportedError(
                "weights are not stored in a float type", path=self._paths[0], found=dtype
            )
        settings = Settings(params, params_path)
        # Query rows over all shards, unless the params have another size of heads.
        query_size = dim
        if settings.has("dim") and settings.integer("dim", 1, Limits.width) != dim:
            raise CheckpointError(
                "dim disagrees with the weights",
                path=params_path,
                found=params["dim"],
                expected=dim,
            )
        if settings.has("n_heads") and settings.has("head_dim"):
            heads = settings.integer("n_heads", 1, Limits.heads)
            query_size = heads * settings.integer("head_dim", 1, Limits.heads)
        if query_rows * count != query_size:
            self._wrong_count(query_size // query_rows)
        # Complete rows of the embedding mean that it is split by rows.
        if width == dim:
            self.embedding_axis = 0
            rows *= count
        elif width * count != dim:
            self._wrong_count(dim // width if width and dim % width == 0 else None)
        config = config_from_meta(
            params,
            params_path,
            vocab_size=rows,
            intermediate_size=feed_forward * count,
            tied_embeddings=self._is_tied(),
            dtype=dtype.value,
        )
        try:
            tokenizer = load_tokenizer(self.path)
        except CheckpointError:
            # Reported when a tokenizer is needed.
            return config
        return replace(config, bos_token_id=tokenizer.bos_id, eos_token_ids=tokenizer.eos_ids)

    def _wrong_count(self, expected: int | None) -> None:
        problem = "the number of shards disagrees with the shapes"
        shards = f"{len(self._paths)} consolidated.*.pth"
        hint = "a shard is missing or stray"
        raise CheckpointError(
            f"{problem} of the tensors", path=self.path, found=shards, expected=expected, hint=hint
        )

    def _matrix_shape(self, name: str) -> tuple[int, ...]:
        shape = self._stored[name].shape
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(
                f"tensor '{name}' has the wrong shape", path=self._paths[0], found=list(shape)
            )
        return shape

    def _is_tied(self) -> bool:
        """Check whether the output projection is absent or a copy of the embedding."""
        if _HEAD not in self._weights:
            return True
        if self.embedding_axis == 0:
            return all(same_tensor(shard, _HEAD, shard, _EMBEDDING) for shard in self._shards)
        head = self._stored[_HEAD]
        embedding = self._stored[_EMBEDDING]
        rows, width = embedding.shape
        count = len(self._shards)
        if head.dtype != embedding.dtype or len(head.shape) != 2:
            return False
        if (head.shape[0] * count, head.shape[1]) != (rows, width * count):
            return False
        # The head is split by rows and the embedding by columns, so some rows of one shard's head
        # are compared with the same rows of all shards' embeddings at a time.
        for rank, shard in enumerate(self._shards):
            first_row = rank * head.shape[0]
            for part in shard.row_parts(_HEAD):
                start, stop = part.ranges[0]
                embedding_rows = TensorSlice(0, ((first_row + start, first_row + stop),))
                pieces = []
                for embedding_shard in self._shards:
                    pieces.append(embedding_shard.read_bytes(_EMBEDDING, embedding_rows))
                if shard.read_bytes(_HEAD, part) != _side_by_side(pieces, stop - start):
                    return False
        return True

    def _check(self) -> None:
        by_meta_name: dict[str, Parameter] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter in self._parameters.values():
            by_meta_name[meta_name(parameter)] = parameter
            shapes[parameter.name] = parameter.shape
        unexpected = self._weights - set(by_meta_name)
        # Meta's format stores a tied head too.
        if self.config.tied_embeddings:
            unexpected.discard(_HEAD)
        if unexpected:
            raise_unexpected(unexpected, self._paths[0])
        specs = {}
        for stored_name, parameter in by_meta_name.items():
            if stored_name in self._weights:
                specs[parameter.name] = TensorSpec(
                    parameter.name,
                    self._compute_joined_shape(parameter, stored_name),
                    self._stored[stored_name].dtype,
                )
        require_tensors(specs, shapes, self.path)

    def _compute_joined_shape(self, parameter: Parameter, name: str) -> tuple[int, ...]:
        joined = list(self._stored[name].shape)
        if parameter.split_axis is not None and len(joined) == 2:
            axis = self._axis(parameter)
            joined[axis] = joined[axis] * len(self._paths) // self._replicas(parameter)
        return tuple(joined)

    def _axis(self, parameter: Parameter) -> int:
        if parameter.role == "embedding":
            return self.embedding_axis
        return parameter.split_axis or 0

    def _copies(self, parameter: Parameter) -> int:
        """Count the consecutive shards with the same piece."""
        if parameter.split_axis is None:
            return len(self._shards)
        return self._replicas(parameter)

    def _replicas(self, parameter: Parameter) -> int:
        """Count the shards with the same KV head; more than one only if each shard has a single KV
        head.
        """
        if parameter.dims[0] != "kv":
            return 1
        shards = len(self._shards)
        heads = self.config.num_kv_heads
        has_single_head = self._stored[meta_name(parameter)].shape[0] == self.config.head_dim
        if has_single_head and shards > heads and shards % heads == 0:
            return shards // heads
        return 1


def _overlaps(
    pieces: list[list[TensorFile]], size: int, part: TensorSlice
) -> list[tuple[list[TensorFile], TensorSlice | None]]:
    """Find the pieces, of equal size along the part's axis, that a part overlaps, and the overlap
    of each.
    """
    overlaps: list[tuple[list[TensorFile], TensorSlice | None]] = []
    for start, stop in part.ranges:
        for index in range(start // size, -(-stop // size)):
            low = max(start - index * size, 0)
            high = min(stop - index * size, size)
            overlaps.append((pieces[index], TensorSlice(part.axis, ((low, high),))))
    return overlaps


def _side_by_side(pieces: Sequence[bytes], rows: int) -> bytes:
    """Join rows whose columns are split over pieces of equal size."""
    width = len(pieces[0]) // rows
    row_pieces: list[bytes] = []
    for start in range(0, rows * width, width):
        for piece in pieces:
            row_pieces.append(piece[start : start + width])
    return b"".join(row_pieces)


def _require_contiguous(paths: Sequence[Path], folder: Path) -> Sequence[Path]:
    for expected, path in enumerate(paths):
        number = path.stem.rpartition(".")[2]
        if int(number) != expected:
            missing = f"consolidated.{expected:02d}.pth"
            shards = f"{len(paths)} shards up to {paths[-1].name}"
            raise make_damaged_file_error("the weight file is missing", folder / missing, shards)
    if not paths:
        raise CheckpointError("has no consolidated.*.pth", path=folder)
    return paths
