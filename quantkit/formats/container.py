"""The interface of containers, which are kinds of checkpoints on disk: find, open and write
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import Parameter
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError, UnsupportedError
from quantkit.files.gguf_types import GGUF_SUFFIX, STEM
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import Checkpoint, list_uncarried_weights, parameter_count, schemes
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod, Reason, Weight
from quantkit.formats.codecs.layouts import G_IDX, SHAPE
from quantkit.formats.kv_cache import KvCache
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import torch
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quantkit.formats.codecs import ggml
    from quantkit.tensors.mix import Mix
else:
    ggml = LateModule("quantkit.formats.codecs.ggml")

_GGUF = "gguf"
Chunk = tuple[str, bytes | memoryview]


class StoredCheckpoint(Checkpoint, Protocol):
    """A checkpoint on disk."""

    @property
    def method(self) -> str | None:
        """Return the name of the `CodeFormat` of its quantized weights; None if there are none."""
        ...

    @property
    def layout(self) -> str:
        """Return its format and variant, for people."""
        ...

    def count_stored_bytes(self, name: str) -> int:
        """Return the size of a tensor on disk."""
        ...

    def readers(self) -> str:
        """Return the programs that load it."""
        ...


class Encoder(Protocol):
    """Turns the values of the tensors of `planned`, in order, into bytes that are appended to
    files.

    It only appends, in one fixed order, so an interrupted output can be resumed before any tensor,
    unless parts of a tensor on disk are held.
    """

    planned: Sequence[TensorSpec]

    @property
    def rearranges(self) -> bool:
        """Return whether floats are copied, for instance to permute rows or to split weights."""
        return False

    @property
    def max_buffered_bytes(self) -> int:
        """Return the largest size of the parts of a tensor on disk that are held until they are
        complete; 0 for none.
        """
        return 0

    @property
    def holds(self) -> bool:
        """Return whether it buffers such parts now, so that not all tensors so far are encoded."""
        return False

    def total_bytes(self) -> int:
        """Return the size of all files, or a little more."""
        ...

    def files(self) -> Sequence[str]:
        """Return the names of the files with tensors."""
        ...

    def canonical_name(self, index: int) -> str:
        """Return the canonical name of tensor number `index`."""
        return self.planned[index].name

    def headers(self) -> Mapping[str, bytes]:
        """Return the bytes with which files begin, by their names; empty if they are not known in
        advance.
        """
        return {}

    def encode(self, index: int, value: Weight) -> Iterator[Chunk]:
        """Encode tensor number `index` as chunks, each appended to the file that it names.

        Raises:
            UnsupportedError: if the format cannot hold it exactly.
        """
        ...

    def decode(self, index: int, folder: Path) -> Weight:
        """Read tensor number `index` back from the files so far, for a quantizer that resumes;
        floats-only formats do not need it.
        """
        raise UnsupportedError("the format cannot be read back before it is complete")

    def finish(self) -> Iterator[Chunk]:
        """Return the end of the files."""
        return iter(())

    def state(self) -> Any:
        """Return JSON from which `restore` continues."""
        return None

    def restore(self, state: Any) -> None:
        """Continue where another encoder's `state` was taken."""
        return

    def extra_files(self) -> dict[str, bytes]:
        """Build the small files that belong to the weights, such as an index."""
        return {}


@dataclass(frozen=True)
class Written:
    """The first tensors of an unfinished output: `count` of them are durably on disk."""

    encoder: Encoder
    folder: Path
    count: int = 0

    # Cached, because a quantizer that resumes looks up every tensor of the model.
    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.encoder.planned[: self.count])

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {spec.name: index for index, spec in enumerate(self.encoder.planned)}

    def load(self, name: str) -> Weight:
        """Read one of the tensors back."""
        return self.encoder.decode(self._indices[name], self.folder)


@dataclass(frozen=True)
class Output:
    """A checkpoint to be written.

    Attributes:
        source: the checkpoint it is made from.
        config: of the output.
        planned: its tensors, in order.
        shard_bytes: largest file of weights, unless one tensor is larger.
        tokenizer: the source's, if it has one.
        model_parallel: the number of shards into which weights are split.
        method: of its quantized modules; None is the container's own.
        templates: chat templates, by name.
        name: of the model, for people.
        authorship: who made the model and under which licence, by keys of a model card; see
            `read_authorship`.
        dst: the folder, or the file, to create.
        kv_cache: the scheme and scales of a quantized KV cache to write; None for none.
        mix: of llama.cpp's types, if one was requested by its name.
        cache: results that a container computes once.
    """

    source: Checkpoint
    config: ModelConfig
    planned: Sequence[TensorSpec]
    shard_bytes: int
    tokenizer: Tokenizer | None = None
    model_parallel: int = 1
    method: QuantMethod | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    authorship: Mapping[str, Any] = field(default_factory=dict)
    dst: Path = Path()
    kv_cache: KvCache | None = None
    mix: Mix | None = None
    # Left out of comparisons, since it only repeats what follows from the other fields.
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def alone(self) -> bool:
        """Return whether it consists of files without side files, except for the manifest."""
        return self.dst.suffix == GGUF_SUFFIX

    @property
    def stem(self) -> str:
        """Return the first part of the names of its files of weights."""
        if self.alone:
            return self.dst.stem
        return STEM

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        """Collect the scheme of every quantized module."""
        module_schemes: dict[str, QuantScheme] = {}
        for spec in self.planned:
            if spec.scheme is not None:
                module_schemes[spec.name.removesuffix(".weight")] = spec.scheme
        return module_schemes


class Container(Protocol):
    """A kind of checkpoint.

    Attributes:
        name: ``format`` of its checkpoints, and the value of ``--to``.
        title: for people.
        config_file: the file with the model's config.
        weights: the sets of weights that it may have, by the values of ``--weights``, the preferred
            one first, and how they are spelled for people.
        methods: of quantization, by ``quant_method``; empty if there is at most one.
        stores_tied_head: whether its readers expect a head even if it is tied to the embedding.
        states_tokens: whether its config has the tokens that begin and end text.
        model_parallel: whether its weights may be split into shards that are loaded together.
        derived: whether its weights are made from others in the same folder, which are preferred.
        read_only: whether it is not written.
        unsplit_by_default: whether all weights are in one file unless a largest size is requested.
    """

    name: str
    title: str
    config_file: str
    weights: Mapping[str, str]
    methods: Mapping[str, QuantMethod] = MappingProxyType({})
    stores_tied_head: bool = False
    states_tokens: bool = True
    model_parallel: bool = False
    derived: bool = False
    read_only: bool = False
    unsplit_by_default: bool = False

    @property
    def native(self) -> CodeFormat | None:
        """Return the format of quantized weights if no method is requested; None if it holds floats
        only.
        """
        return None

    def find_weight_kinds(self, path: Path) -> list[str]:
        """Find the sets of weights at a path, the preferred one first."""
        ...

    def has_index(self, path: Path, kind: str) -> bool:
        """Return whether an index lists the files of a set of weights."""
        return False

    def with_codes(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        """Adapt one of its checkpoints to read all codes as such, also those for which there are no
        kernels: to carry them to another file, and to compare what was written.
        """
        return checkpoint

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> StoredCheckpoint:
        """Open one of the sets of weights at a path; headers only.

        Args:
            tensors_only: whether to accept any tensors, of whatever architecture; of Hugging Face
                folders alone.
            floats_as: the type of weights in integers or small floats that are read as floats,
                which are computed in float32 and rounded to it; None is the model's.

        Raises:
            CheckpointError: if files are missing, damaged or contradict each other.
            UnsupportedError: for architectures and quantizations that are not read.
        """
        ...

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:
        """List every tensor of an output, in the order in which they are written.

        Args:
            quantized: modules, by canonical name.
            method: of these modules; None for the container's own.

        Raises:
            UnsupportedError: if the container has no such model.
        """
        raise _make_not_written_error(self.title)

    def encoder(self, output: Output) -> Encoder:
        """Make the encoder of an output.

        Raises:
            UnsupportedError: if the format cannot hold a tensor exactly.
            RequestError: if the options do not go with the model.
        """
        raise _make_not_written_error(self.title)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        """Build the files that go with the weights: name to content, or to a file to copy.

        Raises:
            UnsupportedError: if the config cannot describe the model.
            CheckpointError: if the source's own files contradict each other.
        """
        raise _make_not_written_error(self.title)

    def list_carried_names(self, source: Checkpoint, dst: Path) -> Collection[str]:
        """List the names of a source's side files that are copied to an output `dst`, or whose
        content goes into other files of it.
        """
        return ()

    def notes(self, output: Output) -> list[str]:
        """Return notes for the user on an output."""
        return []


def _make_not_written_error(title: str) -> RequestError:
    return RequestError(
        f"{title} files can be read, but not written", expected=Message("another ", Option("to"))
    )


def describe_format(checkpoint: StoredCheckpoint) -> str:
    """Describe the format of a checkpoint, with the kinds of its quantized tensors in the format's
    own words, for people.
    """
    # GGUF's users know Q8_0, not int8-g32.
    type_names: dict[QuantScheme, str] = {}
    if checkpoint.method == _GGUF:
        for block_type in ggml.BLOCK_TYPES.values():
            type_names[block_type.scheme] = block_type.type
    kinds: Counter[str] = Counter()
    for scheme in schemes(checkpoint).values():
        kinds[type_names.get(scheme, str(scheme))] += 1
    kinds.update(list_uncarried_weights(checkpoint).values())
    if not kinds:
        return checkpoint.format
    kinds_by_count = [kind for kind, _ in kinds.most_common()]
    return f"{checkpoint.method or checkpoint.format} ({', '.join(kinds_by_count)})"


def weight_size(checkpoint: StoredCheckpoint) -> tuple[int, float]:
    """Measure a checkpoint's tensors on disk, in bytes and in bits per parameter."""
    size = sum(checkpoint.count_stored_bytes(name) for name in checkpoint.names())
    return size, 8 * size / parameter_count(checkpoint)


def tensor_bytes(tensor: torch.Tensor, expected: StoredTensor) -> memoryview:
    """View a tensor as bytes, after a check that it has the planned dtype and shape."""
    dtype = DType.of(tensor.dtype)
    shape = tuple(tensor.shape)
    if shape != expected.shape or dtype != expected.dtype:
        raise ValueError(
            f"{expected.name}: planned {expected.dtype} {expected.shape}, got {dtype} {shape}"
        )
    # As uint8, because numpy has no bfloat16.
    return tensor.contiguous().reshape(-1).view(DType.UINT8.torch).numpy().data


def count_stored_bytes(spec: TensorSpec, codes: CodeFormat) -> int:
    """Count the bytes of a weight's codes, scales and zero points in a format that supports them,
    or of its floats.
    """
    if spec.scheme is None:
        return math.prod(spec.shape) * spec.dtype.itemsize
    holder = codes.codec(spec.scheme, embedding=spec.name == f"{EMBEDDING}.weight")
    assert not isinstance(holder, Reason)
    # Only GGUF's blocks are no tensors of their own.
    if not isinstance(codes, QuantMethod):
        assert isinstance(holder, ggml.BlockType)
        return spec.shape[0] * holder.type.row_bytes(spec.shape[1])
    stored = holder.list_stored_tensors(spec)  # type: ignore[attr-defined]
    total = 0
    for tensor in stored:
        # Bookkeeping of the format, which has no bits of weights.
        if not tensor.name.endswith((SHAPE, G_IDX)):
            total += tensor.nbytes
    return total
