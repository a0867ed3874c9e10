"""What every container offers: a kind of checkpoint on disk, to find, to open and to write."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter
from quantkit.files.gguf_types import GGUF, STEM
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod
from quantkit.formats.kv_cache import KvCache
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.tensors.qtensor import QuantTensor

Chunk = tuple[str, bytes | memoryview]


class StoredCheckpoint(Checkpoint, Protocol):
    """A checkpoint as it lies on disk."""

    @property
    def kv_cache(self) -> KvCache | None:
        """What it says of a quantized key/value cache; None if nothing."""
        ...

    @property
    def method(self) -> str | None:
        """What its quantized weights are written in, see `CodeFormat`; None of one that has none."""
        ...

    @property
    def layout(self) -> str:
        """What people call it: its format, and what of that differs."""
        ...

    def stored_bytes(self, name: str) -> int:
        """What a tensor occupies."""
        ...

    def readers(self) -> str:
        """Who else loads it."""
        ...


class Encoder(Protocol):
    """Turns the values of a fixed list of tensors, in order, into bytes that are appended to files.

    It only appends, in one fixed order, so an interrupted output can be resumed before any tensor, unless parts of a
    tensor on disk are held.

    Attributes:
        planned: the tensors to encode.
    """

    planned: Sequence[TensorSpec]

    @property
    def rearranges(self) -> bool:
        """Whether floats are copied, for instance to permute rows or to split weights."""
        return False

    @property
    def joined_bytes(self) -> int:
        """The largest size of the parts of a tensor on disk that are held until they are complete; 0 for none."""
        return 0

    @property
    def holds(self) -> bool:
        """Whether it holds such parts now, so that not all tensors so far are encoded."""
        return False

    def total_bytes(self) -> int:
        """Size of all files, or a little more."""
        ...

    def files(self) -> Sequence[str]:
        """The names of the files with tensors."""
        ...

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        """What tensor number `index` appends to which file.

        Raises:
            UnsupportedError: if the format cannot hold it exactly.
        """
        ...

    def decode(self, index: int, folder: Path) -> Tensor | QuantTensor:
        """Tensor number `index`, read back from the files so far, for a quantizer that resumes; floats-only formats
        do not need it."""
        raise NotImplementedError

    def finish(self) -> Iterator[Chunk]:
        """The end of the files."""
        return iter(())

    def state(self) -> Any:
        """JSON from which `restore` continues."""
        return None

    def restore(self, state: Any) -> None:
        """Continue where another encoder's `state` was taken."""

    def extra_files(self) -> dict[str, bytes]:
        """Small files that belong to the weights, such as an index."""
        return {}


@dataclass(frozen=True)
class Written:
    """The first tensors of an unfinished output, which an interrupted run has written.

    Attributes:
        encoder: of the output.
        folder: of its files.
        count: how many tensors are durably on disk.
    """

    encoder: Encoder
    folder: Path
    count: int = 0

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.encoder.planned[: self.count])

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {spec.name: index for index, spec in enumerate(self.encoder.planned)}

    def load(self, name: str) -> Tensor | QuantTensor:
        """One of the tensors, read back."""
        return self.encoder.decode(self._indices[name], self.folder)


@dataclass(frozen=True)
class Output:
    """A checkpoint to be written.

    Attributes:
        source: what it comes from.
        config: of the output.
        planned: its tensors, in order.
        shard_bytes: largest file of weights, unless one tensor is larger.
        tokenizer: the source's, if it has one.
        model_parallel: into how many shards weights are cut.
        method: of its quantized modules; None is the container's own.
        templates: of conversations, by name.
        name: of the model, for people.
        dst: where it goes: a folder, or a file.
        kv_cache: the scheme and scales of a quantized key/value cache to write; None for none.
        found: what a container has found out about it that takes long, by names of its own.
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
    dst: Path = Path()
    kv_cache: KvCache | None = None
    found: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def alone(self) -> bool:
        """Whether it is a file, or several, with nothing beside but a manifest."""
        return self.dst.suffix == GGUF

    @property
    def stem(self) -> str:
        """What the names of its files of weights begin with."""
        return self.dst.stem if self.alone else STEM

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        """The scheme of every quantized module."""
        return {spec.name.removesuffix(".weight"): spec.scheme for spec in self.planned if spec.scheme is not None}


class Container(Protocol):
    """A kind of checkpoint.

    Attributes:
        name: ``format`` of its checkpoints, and what ``--to`` calls it.
        title: what people call it.
        config_file: which says what the model is.
        weights: the sets of weights that it may hold, by the names that ``--weights`` takes, the one to prefer first,
            and how they are spelled for people.
        methods: of quantization that it carries, by ``quant_method``; none if it has one way at most.
        stores_tied_head: whether its readers expect a head even where it is the embedding over again.
        states_tokens: whether its config says which tokens begin and end a text.
        model_parallel: whether its weights may be cut into shards that are loaded side by side.
        derived: whether its weights are made from others in the same folder, which go before them.
        read_only: whether it is not written.
        one_file: whether all weights lie in one file unless a largest size is asked for.
    """

    name: str
    title: str
    config_file: str
    weights: Mapping[str, str]
    methods: Mapping[str, QuantMethod]
    stores_tied_head: bool
    states_tokens: bool
    model_parallel: bool
    derived: bool
    read_only: bool
    one_file: bool

    @property
    def native(self) -> CodeFormat | None:
        """What quantized weights are written in where no method is asked for; None if it holds floats only."""
        ...

    def present(self, path: Path) -> list[str]:
        """The sets of weights that lie at a path, the one to prefer first."""
        ...

    def indexed(self, path: Path, kind: str) -> bool:
        """Whether an index says which files a set of weights is made of."""
        ...

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> StoredCheckpoint:  # fmt: skip
        """Open one of the sets of weights at a path; headers only.

        Args:
            tensors_only: whether to take any tensors for the model's, of whatever architecture.
            floats_as: the type of weights in integers or small floats that are read as floats, which are computed in
                float32 and rounded to it; None is the model's.

        Raises:
            RequestError: if that makes no sense for this kind of checkpoint.
            CheckpointError: if files are missing, damaged or contradict each other.
            UnsupportedError: for architectures and quantizations that are not read.
        """
        ...

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: QuantMethod | None = None
    ) -> list[Parameter]:  # fmt: skip
        """Every tensor of an output, in the order in which they are written.

        Args:
            quantized: modules, by canonical name.
            method: in which they are written; None for the container's own.

        Raises:
            UnsupportedError: if the container has no such model.
        """
        ...

    def encoder(self, output: Output) -> Encoder:
        """What turns the tensors into files.

        Raises:
            UnsupportedError: if they can't be held exactly.
            RequestError: if the options do not go with the model.
        """
        ...

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        """What goes beside the weights: name to content, or to a file to copy.

        Raises:
            UnsupportedError: if the config can't say what the model is.
            CheckpointError: if the source's own files contradict each other.
        """
        ...

    def notes(self, output: Output) -> list[str]:
        """What a user should know of an output though it is no error."""
        ...


def weight_size(checkpoint: StoredCheckpoint) -> tuple[int, float]:
    """What a checkpoint's tensors occupy on disk in bytes, and in bits for each of its parameters."""
    size = sum(checkpoint.stored_bytes(name) for name in checkpoint.names())
    return size, 8 * size / parameter_count(checkpoint)


def tensor_bytes(tensor: Tensor, expected: StoredTensor) -> memoryview:
    """The bytes of a tensor, held to what was planned for it."""
    dtype, shape = DType.of(tensor.dtype), tuple(tensor.shape)
    if shape != expected.shape or dtype != expected.dtype:
        raise ValueError(f"{expected.name}: planned {expected.dtype} {expected.shape}, got {dtype} {shape}")
    return tensor.contiguous().reshape(-1).view(DType.UINT8.torch).numpy().data
