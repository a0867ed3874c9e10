"""Read the pickles that `torch.save` writes as plain values, and call nothing that they name.

`pickletools` of the standard library parses them. Only the opcodes that torch's own
``weights_only`` reader knows are accepted. A tensor becomes a `Reference` to its storage, anything
else that torch would build an `Other`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from quantkit.errors import CheckpointError
from quantkit.files.source import make_damaged_file_error
from quantkit.files.tensor_file import check_size, check_sizes, compute_extent
from quantkit.tensors.dtypes import DType

MAX_BYTES = 1 << 23
"""Largest pickle that is read: some 40,000 tensors."""

_STORAGES = {
    "DoubleStorage": DType.FLOAT64,
    "FloatStorage": DType.FLOAT32,
    "HalfStorage": DType.FLOAT16,
    "BFloat16Storage": DType.BFLOAT16,
    "LongStorage": DType.INT64,
    "IntStorage": DType.INT32,
    "ShortStorage": DType.INT16,
    "CharStorage": DType.INT8,
    "ByteStorage": DType.UINT8,
    "BoolStorage": DType.BOOL,
    "ComplexDoubleStorage": DType.COMPLEX128,
    "ComplexFloatStorage": DType.COMPLEX64,
    "UntypedStorage": DType.UINT8,
    "QInt8Storage": DType.QINT8,
    "QUInt8Storage": DType.QUINT8,
    "QInt32Storage": DType.QINT32,
    "QUInt4x2Storage": DType.QUINT4X2,
    "QUInt2x4Storage": DType.QUINT2X4,
}
_STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")
# What torch builds without running code of the file, other than plain tensors.
_OTHERS = {
    "collections.Counter",
    "_codecs.encode",
    "__builtin__.set",
    "__builtin__.bytearray",
    "__builtin__.complex",
    "builtins.set",
    "builtins.bytearray",
    "builtins.complex",
    "torch.Size",
    "torch.device",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch.per_tensor_affine",
    "torch.per_tensor_symmetric",
    "torch.per_channel_affine",
    "torch.per_channel_symmetric",
    "torch.per_channel_affine_float_qparams",
}
# What the stack machine raises for a damaged pickle: operands of a wrong type, an empty stack, an
# unknown index of the memo, or a length beyond the memory.
_DAMAGE = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class Storage:
    """A number of elements in the file, by its key there."""

    key: str
    dtype: DType
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Reference:
    """A tensor: a view of a storage, with offset and strides in elements."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Other:
    """Another object that torch builds, by the name of the function that builds it."""

    name: str


class Unpickler:
    """Reads pickles from a file, one after the other.

    Attributes:
        storages: all storages referred to so far, by key.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def load(self) -> Any:
        """Read the next value: plain ones, `Reference`, `Storage` and `Other`; any dictionary is a
        dict.

        Raises:
            CheckpointError: if it is damaged, or names anything that could run code.
        """
        self._stack = []
        self._marks = []
        self._memo = {}
        try:
            for opcode, argument, _ in pickletools.genops(self._file):
                if opcode.name != "STOP":
                    if opcode.name not in _OPCODES:
                        raise ValueError(f"torch does not write the opcode {opcode.name}")
                    _OPCODES[opcode.name](self, argument)
            return self._stack.pop()
        except _DAMAGE as error:
            raise make_unreadable_error(self._path, error) from error

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, kind: type) -> Any:
        value = self._stack.pop()
        # Not `isinstance`: True is not an integer here.
        if type(value) is not kind:
            raise TypeError(f"found {type(value).__name__}, expected {kind.__name__}")
        return value

    def _since_mark(self) -> list[Any]:
        """Remove the values since the last mark from the stack, and return them."""
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _mark(self) -> None:
        """Begin an empty stack, and keep the one before for `_since_mark`."""
        self._marks.append(self._stack)
        self._stack = []

    def _tuple(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _append(self, items: list[Any]) -> None:
        values = self._pop(list)
        values.extend(items)
        self._push(values)

    def _set(self, items: list[Any]) -> None:
        values = self._pop(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is str:
                # Half of a surrogate pair raises here; a message with it could not be printed.
                key.encode()
            elif type(key) not in (int, float, bool):
                # The hash of nested tuples that share their items may take forever.
                raise TypeError(f"an entry's name is a {type(key).__name__}")
            if key in values:
                raise ValueError(f"the entry {key!r:.80} occurs twice")
            values[key] = value
        self._push(values)

    def _global(self, argument: str) -> None:
        # `pickletools` separates module and name by a space.
        name = argument.replace(" ", ".", 1)
        if name not in _GLOBALS:
            raise CheckpointError(
                "contains objects other than tensors; loading it could run code, so it is refused",
                path=self._path,
                found=f"{name[:80]!r}",
                expected="a dictionary of tensors",
                hint="use a safetensors file",
            )
        self._push(_GLOBALS[name])

    def _reduce(self) -> None:
        arguments = self._pop(tuple)
        function = self._stack.pop()
        # A pickle can put no other callables on the stack than those of `_GLOBALS`.
        self._push(function(*arguments))

    def _build(self) -> None:
        # The state has attributes, such as the versions of modules in a `state_dict`.
        self._stack.pop()
        if not isinstance(self._stack[-1], (dict, Other)):
            raise TypeError(f"a {type(self._stack[-1]).__name__} has no state")

    def _storage(self) -> None:
        # The fourth item is the device on which the storage was.
        kind, dtype, key, _, count, *view = self._pop(tuple)
        if kind != "storage" or not isinstance(dtype, DType) or type(key) not in (str, int):
            raise TypeError("a persistent id that is not a storage")
        if any(part is not None for part in view):
            raise ValueError(
                "a storage is a view of another storage, as in files from torch before version 0.4"
            )
        storage = Storage(str(key), dtype, check_size(count))
        if self.storages.setdefault(storage.key, storage) != storage:
            raise ValueError(f"storage {storage.key!r:.80} has two sizes or types")
        self._push(storage)


def make_unreadable_error(path: Path, error: Exception) -> CheckpointError:
    """Build the error for a file that `torch.save` did not write, or that is damaged."""
    detail = " ".join(str(error).split())[:200] or type(error).__name__
    return make_damaged_file_error(f"cannot be read: {detail}", path)


def _rebuild_ordered_dict(*arguments: Any) -> dict[Any, Any]:
    if arguments:
        raise ValueError("an ordered dictionary that is not filled item by item")
    return {}


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, *extra_arguments: Any
) -> Reference | Other:
    """Rebuild a tensor as torch's ``_rebuild_tensor`` and ``_rebuild_tensor_v2`` do: as
    `_rebuild_typed_tensor`, with the type of the storage.
    """
    # `_rebuild_tensor` has only the four named arguments.
    requires_grad, hooks, *metadata = extra_arguments or (None, None)
    return _rebuild_typed_tensor(
        storage, offset, shape, stride, requires_grad, hooks, storage.dtype, *metadata
    )


def _rebuild_typed_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Reference | Other:
    """Rebuild a tensor as torch's ``_rebuild_tensor_v3`` does."""
    if metadata:
        return Other("a conjugate or negated view")
    if not isinstance(storage, Storage) or not isinstance(dtype, DType):
        raise TypeError("a tensor without a storage or a dtype")
    tensor = Reference(
        storage=storage,
        dtype=dtype,
        offset=check_size(offset),
        shape=check_sizes(shape),
        stride=check_sizes(stride),
    )
    if len(tensor.shape) != len(tensor.stride):
        raise ValueError("a tensor's shape and strides differ in length")
    end = (tensor.offset + compute_extent(tensor.shape, tensor.stride)) * dtype.itemsize
    # A tensor without elements may begin anywhere.
    if end > storage.nbytes and 0 not in tensor.shape:
        raise ValueError(f"a tensor ends at byte {end} of a storage of {storage.nbytes}")
    return tensor


def _rebuild_from_type(function: Any, kind: Any, arguments: Any, *unused_arguments: Any) -> Any:
    """Rebuild a tensor that has attributes, as torch's ``_rebuild_from_type_v2`` does."""
    # Any other class may give the elements another meaning.
    if (
        kind is not _FUNCTIONS["torch.Tensor"]
        and kind is not _FUNCTIONS["torch.nn.parameter.Parameter"]
    ):
        return Other("a tensor of another class")
    return function(*arguments)


def _rebuild_parameter(data: Any, *unused_arguments: Any) -> Any:
    return data


def _make_other_builder(name: str) -> Callable[..., Other]:
    """Make a function that, whatever its arguments, gives the `Other` of this name."""

    def build(*_: Any) -> Other:
        return Other(name)

    return build


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _make_other_builder(name) for name in _OTHERS},
    "collections.OrderedDict": _rebuild_ordered_dict,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_typed_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
}


def _collect_globals() -> dict[str, Any]:
    """Collect what a pickle may name: functions, dtypes, and storages, of which only the dtype
    matters.
    """
    values: dict[str, Any] = dict(_FUNCTIONS)
    for dtype in DType:
        values[f"torch.{dtype}"] = dtype
    for module in _STORAGE_MODULES:
        for name, dtype in _STORAGES.items():
            values[f"{module}.{name}"] = dtype
    return values


_GLOBALS: dict[str, Any] = _collect_globals()
# All that torch's reader knows, and no more.
_OPCODES: dict[str, Callable[[Unpickler, Any], object]] = {
    "PROTO": lambda unpickler, _: None,
    "NONE": Unpickler._push,
    "NEWTRUE": lambda unpickler, _: unpickler._push(True),
    "NEWFALSE": lambda unpickler, _: unpickler._push(False),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"), Unpickler._push
    ),
    # `pickletools` decodes these strings as Latin-1, and torch's reader as UTF-8.
    "SHORT_BINSTRING": lambda unpickler, text: unpickler._push(text.encode("latin-1").decode()),
    "EMPTY_TUPLE": lambda unpickler, _: unpickler._push(()),
    "EMPTY_LIST": lambda unpickler, _: unpickler._push([]),
    "EMPTY_DICT": lambda unpickler, _: unpickler._push({}),
    "EMPTY_SET": lambda unpickler, _: unpickler._push(Other("a set")),
    "MARK": lambda unpickler, _: unpickler._mark(),
    "TUPLE": lambda unpickler, _: unpickler._push(tuple(unpickler._since_mark())),
    "TUPLE1": lambda unpickler, _: unpickler._tuple(1),
    "TUPLE2": lambda unpickler, _: unpickler._tuple(2),
    "TUPLE3": lambda unpickler, _: unpickler._tuple(3),
    "APPEND": lambda unpickler, _: unpickler._append([unpickler._stack.pop()]),
    "APPENDS": lambda unpickler, _: unpickler._append(unpickler._since_mark()),
    "SETITEM": lambda unpickler, _: unpickler._set(
        [unpickler._stack.pop(-2), unpickler._stack.pop()]
    ),
    "SETITEMS": lambda unpickler, _: unpickler._set(unpickler._since_mark()),
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT"),
        lambda unpickler, index: unpickler._memo.update({index: unpickler._stack[-1]}),
    ),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda unpickler, index: unpickler._push(unpickler._memo[index])
    ),
    "GLOBAL": Unpickler._global,
    "BINPERSID": lambda unpickler, _: unpickler._storage(),
    # NEWOBJ calls a class, here a function of `_GLOBALS` that stands for it.
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda unpickler, _: unpickler._reduce()),
    "BUILD": lambda unpickler, _: unpickler._build(),
}
