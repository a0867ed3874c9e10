"""The C++ kernels on torch's tensors: each operator allocates what it returns and calls a function
of C.

B batch, T new tokens, D hidden size, H heads, K KV heads, Dh head size, E experts. An operator
raises `RuntimeError` with the kernels' reason for operands that do not fit. In a graph that
`torch.compile` traces it is a torch operator.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from quantkit.tensors.huge_pages import allocate_bytes
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import Codes, Scales

_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.uint8: 4,
    torch.int64: 5,
}
# The kernels refuse a tensor of any other dtype, with a message.
_OTHER = len(_TYPES)
# torch's methods of this class have no type annotations.
_LIBRARY: Any = torch.library.Library
_DIMS = 4
# The struct of ``tensor.h`` for each number of dimensions: the address, the type, the number of
# dimensions and the sizes, padded to `_DIMS` of them.
_VIEWS = [struct.Struct(f"@{3 + dims}q{8 * (_DIMS - dims)}x") for dims in range(_DIMS + 1)]
# None in a list of tensors, where there is a struct for each.
_MISSING = _VIEWS[0].pack(0, 0, -1)
# Of codes that are no integers, the tables of ``planes.h`` by their numbers.
_TABLES = {Codes.TABLE: 1, Codes.E2M1: 2}
# Bytes before a packed weight's numbers, which say how it is packed.
_HEADER_BYTES = 64

BlockOperands = tuple[str, Sequence[Tensor | None], Sequence[Tensor | None], tuple[Any, ...]]
"""The name of a block's mixer, the tensors of the mixer and of the feed-forward, in the order of
``operands.h``, and the block's settings in that of ``quantkit_add_block``.
"""


class CppOperators:
    """A library's operators.

    Attributes:
        library: the functions of C.
        name: of the kernels, see `load_kernels`.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.library = library
        self.name = name
        self._functions: dict[str, Any] = {}
        for function_name, types in _FUNCTIONS.items():
            self._functions[function_name] = _function(library, function_name, *types)
        library.quantkit_instructions.restype = ctypes.c_char_p
        library.quantkit_new_blocks.restype = ctypes.c_void_p
        library.quantkit_free_blocks.argtypes = [ctypes.c_void_p]
        self._blocks: dict[int, tuple[ctypes.c_void_p, int]] = {}
        self._numbers = itertools.count()
        self._traced = _LIBRARY(f"quantkit_{name.replace('-', '_')}", "FRAGMENT")
        for operator, (schema, make_output) in _TRACED.items():
            run = getattr(self, operator)
            self._traced.define(operator + schema)
            self._traced.impl(operator, run, "CPU")
            register_fake(f"{self._traced.ns}::{operator}", make_output, lib=self._traced)
            # Outside of graphs, callers skip torch's dispatcher.
            setattr(self, operator, _traceable(run, getattr(self.namespace, operator)))

    @property
    def namespace(self) -> Any:
        """Return the torch operators."""
        return getattr(torch.ops, self._traced.ns)

    def instructions(self) -> str:
        """Return the instruction set."""
        name: bytes = self.library.quantkit_instructions()
        return name.decode()

    def pack(self, chunks: Iterable[QuantTensor], rows: int, *, exact: bool) -> Tensor:
        """Pack a weight [O, I] into bytes; `exact` is for activations of 16 bits, O is `rows`. It
        comes in chunks of rows, so that the codes of a large weight need not be in memory at once,
        a byte each; all chunks but the last have a multiple of 16 rows.
        """
        packed: Tensor | None = None
        first = 0
        for chunk in chunks:
            fields = _list_fields(chunk)
            layout = (rows, chunk.scheme.bits, _TABLES.get(chunk.scheme.codes, 0), exact)
            if packed is None:
                count = ctypes.c_int64()
                self._call("packed_bytes", *fields, *layout, ctypes.addressof(count))
                packed = allocate_bytes(count.value)
            self._call("pack", *fields, *layout, first, torch.get_num_threads(), packed)
            first += len(chunk.codes)
            # Before the next chunk is read.
            del chunk, fields
        if packed is None or first != rows:
            raise RuntimeError(f"expected chunks of {rows} rows, found {first}")
        return packed

    def join(self, packed: Sequence[Tensor]) -> Tensor:
        """Copy packed weights with the same columns one after the other; their rows are then those
        of one weight.
        """
        return torch.cat(list(packed), out=allocate_bytes(sum(weight.numel() for weight in packed)))

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        """Compute ``x @ weight.T + bias``: [..., I] to [..., O]; O is `rows`."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], rows))
        self._call("linear", x, packed, bias, rows, torch.get_num_threads(), y)
        return y

    def rows(self, packed: Tensor, index: Tensor, columns: int) -> Tensor:
        """Dequantize rows of a packed weight to float32 [N, I], by index [N]; I is `columns`."""
        y = index.new_empty((*index.shape, columns), dtype=torch.float32)
        self._call("rows", packed, index.contiguous(), columns, y)
        return y

    def cached_attention(
        self,
        queries: Tensor,
        keys: Tensor,
        key_scales: Tensor | None,
        values: Tensor,
        value_scales: Tensor | None,
        positions: Tensor,
        slots: Tensor | None,
        window: int,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to a cache, see `ScoredAttention`; a window of 0 is all."""
        batch, heads, tokens, size = queries.shape
        out = queries.new_empty((batch, tokens, heads * size))
        self._call(
            "cached_attention",
            queries.contiguous(),
            keys,
            key_scales,
            values,
            value_scales,
            positions,
            slots,
            window,
            scale,
            softcap,
            sinks,
            torch.get_num_threads(),
            out,
        )
        return out

    def float_linear(self, x: Tensor, weight: Tensor, exact: bool = True) -> Tensor:
        """Compute ``x @ weight.T`` with a weight of floats [O, I], in the dtype of x. Products with
        bfloat16 that need not be `exact` may round x to it.
        """
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        self._call("float_linear", x, weight, exact, torch.get_num_threads(), y)
        return y

    def rotations(
        self, positions: Tensor, frequencies: Tensor, scale: float, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Compute cosine and sine of positions, see `StepKernels`."""
        if frequencies.dim() > 1:
            # One row of frequencies for each position. Sequences may share positions.
            shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
                positions.shape, frequencies.shape[:-1]
            )
            frequencies = frequencies.expand(*shape, -1).contiguous()
            positions = positions.expand(shape)
        cosine = frequencies.new_empty((*positions.shape, head_dim))
        sine = torch.empty_like(cosine)
        self._call("rotations", positions.contiguous(), frequencies, scale, cosine, sine)
        return cosine, sine

    def norm(self, x: Tensor, weight: Tensor, eps: float, is_centered: bool = False) -> Tensor:
        """Compute the norm of float32 rows, see `StepKernels`."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._call("norm", x, weight, eps, is_centered, torch.get_num_threads(), y)
        return y

    def find_likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Find the likeliest tokens, see `FindLikeliest`."""
        tokens = logits.new_empty(len(logits), dtype=torch.int64)
        checked = torch.empty_like(tokens)
        self._call("likeliest", logits.contiguous(), torch.get_num_threads(), tokens, checked)
        return tokens, checked

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        """Copy weights of one shape one after the other: packed ones to [E, bytes], floats [O, I]
        to [E, O, I].
        """
        first = weights[0]
        is_packed = first.dtype == torch.uint8
        for weight in weights:
            fits = weight.shape == first.shape and weight.dtype == first.dtype
            # The head says the shape and the scheme.
            if is_packed and fits:
                fits = torch.equal(weight[:_HEADER_BYTES], first[:_HEADER_BYTES])
            if not fits:
                raise RuntimeError("the weights have different shapes or schemes")
        memory = allocate_bytes(len(weights) * first.nbytes)
        stacked = memory.view(first.dtype).view(len(weights), *first.shape)
        return torch.stack(list(weights), out=stacked)

    def experts(
        self,
        x: Tensor,
        shares: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activation: str,
        limit: float | None,
        exact: bool = True,
    ) -> Tensor:
        """Run the chosen experts of each row, see `ExpertKernel`; `exact` is for experts of floats,
        see `float_linear`.
        """
        # The kernels add each expert's output in float32.
        y = torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
        self._call(
            "experts",
            x.float().contiguous(),
            shares,
            chosen,
            gate_up,
            gate_up_bias,
            down,
            down_bias,
            activation,
            limit,
            exact,
            torch.get_num_threads(),
            y,
        )
        return y.to(x.dtype)

    def prepare_blocks(self, blocks: Sequence[BlockOperands], exact: bool = True) -> Blocks:
        """Register blocks that follow each other, whose operands are checked once. `exact` is for
        products with floats, see `float_linear`.
        """
        tensors: list[Tensor | None] = []
        for _, mixing, feed_forward, _ in blocks:
            tensors += mixing
            tensors += feed_forward
        prepared = Blocks(next(self._numbers), tensors)
        pointer = ctypes.c_void_p(self.library.quantkit_new_blocks())
        self._blocks[prepared.number] = pointer, len(blocks)
        # The end of the process frees the memory as well.
        weakref.finalize(prepared, self._forget, prepared.number).atexit = False
        for mixer, mixing, feed_forward, settings in blocks:
            self._call(
                "add_block",
                pointer,
                mixer,
                mixing,
                len(mixing),
                feed_forward,
                len(feed_forward),
                *settings,
                exact,
            )
        return prepared

    def _forget(self, number: int) -> None:
        pointer, _ = self._blocks.pop(number)
        self.library.quantkit_free_blocks(pointer)

    def run_blocks(
        self,
        x: Tensor,
        blocks: int,
        angles: Sequence[Tensor],
        query_scales: Sequence[Tensor | None],
        positions: Tensor,
        slots: Tensor | None,
        cached: Sequence[Tensor],
        prefill: bool,
    ) -> None:
        """Update hidden states, float32 [B, T, D].

        Args:
            blocks: their number.
            angles: of each block, cosine and sine.
            query_scales, positions, slots, prefill: see `BlockStep`; `prefill` is its
                `is_prefill`.
            cached: of each block keys and values, in int8 each with its scales, or as many states;
                empty without a cache.
        """
        pointer, count = self._blocks[blocks]
        stored = list[Tensor | None](cached)
        if len(stored) == 2 * count:
            # Float rows without scales: the kernels expect two tensors for each.
            stored = []
            for rows in cached:
                stored += (rows, None)
        numbers = len(angles), len(query_scales)
        if numbers != (2 * count, count) or len(stored) not in (0, 4 * count):
            raise RuntimeError(f"expected angles, scales and cached rows of {count} blocks")
        self._call(
            "run_blocks",
            pointer,
            x,
            angles,
            query_scales,
            positions,
            slots,
            stored or None,
            prefill,
            torch.get_num_threads(),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        error = self._functions[name](*arguments)
        if error is not None:
            raise RuntimeError(error.decode())


def _list_fields(weight: QuantTensor) -> tuple[Tensor | None, ...]:
    """List the tensors of a weight as ``operators.cpp`` takes them."""

    # The kernels read memory without gaps; parts of a sharded weight have some.
    def lay_out(field: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        if field is None:
            return None
        return field.to(dtype).contiguous() if dtype else field.contiguous()

    # Integers that are multiplied by outer scales are float16 in a `QuantTensor`.
    inner = None if weight.outer is None else torch.int8
    if weight.scheme.scales is Scales.POWERS:
        # The table has twice the numbers of the codes. bfloat16 has all of these powers of two.
        scale = lay_out(weight.scale.float() / 2, torch.bfloat16)
    else:
        scale = lay_out(weight.scale, inner)
    return (
        lay_out(weight.codes),
        scale,
        lay_out(weight.zero),
        lay_out(weight.minimum, inner),
        lay_out(weight.outer),
        lay_out(weight.outer_minimum),
    )


class Blocks:
    """Blocks that a library has checked; it reads their tensors for as long as they are referred
    to.

    Attributes:
        number: of these blocks, for `CppOperators.run_blocks`.
    """

    def __init__(self, number: int, tensors: Sequence[Tensor | None]) -> None:
        self.number = number
        self._tensors = tensors


def _traceable(run: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        return run(*arguments)

    return call


class _View:
    """Converts a tensor or None to the struct of ``tensor.h``. ctypes calls `from_param`, and keeps
    the result until the function returns.
    """

    @staticmethod
    def from_param(tensor: Tensor | None) -> bytes | None:
        if tensor is None:
            return None
        dims = tensor.dim()
        if not (tensor.is_cpu and tensor.is_contiguous() and dims <= _DIMS):
            layout = f"{tuple(tensor.shape)} in steps of {tensor.stride()} on {tensor.device}"
            raise RuntimeError(f"expected a contiguous tensor on the CPU, found {layout}")
        return _VIEWS[dims].pack(
            tensor.data_ptr(), _TYPES.get(tensor.dtype, _OTHER), dims, *tensor.shape
        )


class _Views:
    """Converts a list of tensors to structs, one after the other."""

    @staticmethod
    def from_param(tensors: Sequence[Tensor | None] | None) -> bytes | None:
        if tensors is None:
            return None
        # Most tensors of a step occur again: each layer has the same angles.
        views: dict[int, bytes] = {}
        for tensor in tensors:
            if id(tensor) not in views:
                views[id(tensor)] = _View.from_param(tensor) or _MISSING
        return b"".join([views[id(tensor)] for tensor in tensors])


class _Output:
    """Converts a tensor to the address of its numbers."""

    @staticmethod
    def from_param(tensor: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())


class _Optional:
    """Converts a number; None becomes NaN."""

    @staticmethod
    def from_param(value: float | None) -> ctypes.c_double:
        return ctypes.c_double(math.nan if value is None else value)


class _Text:
    @staticmethod
    def from_param(text: str) -> bytes:
        return text.encode()


_INT = ctypes.c_int64
_FLOAT = ctypes.c_double
_THREADS = ctypes.c_int
_FLAG = ctypes.c_bool
_WEIGHT = (*[_View] * 6, _INT, _INT, _INT, _FLAG)
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "packed_bytes": (*_WEIGHT, ctypes.c_void_p),
    "pack": (*_WEIGHT, _INT, _THREADS, _Output),
    "linear": (*[_View] * 3, _INT, _THREADS, _Output),
    "rows": (_View, _View, _INT, _Output),
    "cached_attention": (*[_View] * 7, _INT, _FLOAT, _Optional, _View, _THREADS, _Output),
    "experts": (*[_View] * 7, _Text, _Optional, _FLAG, _THREADS, _Output),
    "float_linear": (_View, _View, _FLAG, _THREADS, _Output),
    "rotations": (_View, _View, _FLOAT, _View, _View),
    "norm": (_View, _View, _FLOAT, _FLAG, _THREADS, _Output),
    "likeliest": (_View, _THREADS, _Output, _Output),
    "add_block": (
        ctypes.c_void_p,
        _Text,
        *[_Views, _INT] * 2,
        *[_INT] * 4,
        *[_Optional] * 3,
        *[_FLAG] * 2,
        _Text,
        _Optional,
        _FLOAT,
        _FLAG,
        _FLOAT,
        _FLAG,
        _INT,
        *[_FLAG] * 2,
        *[_FLOAT] * 2,
        *[_FLAG] * 2,
    ),
    "run_blocks": (ctypes.c_void_p, _View, *[_Views] * 2, *[_View] * 2, _Views, _FLAG, _THREADS),
}
"""What the functions of ``operators.cpp`` that return an error's message take."""


def _function(library: ctypes.CDLL, name: str, *types: Any) -> Any:
    function = getattr(library, f"quantkit_{name}")
    function.argtypes = types
    function.restype = ctypes.c_char_p
    return function


_TRACED: dict[str, tuple[str, Callable[..., Any]]] = {
    "linear": (
        "(Tensor x, Tensor packed, Tensor? bias, int rows) -> Tensor",
        lambda x, packed, bias, rows: x.new_empty(*x.shape[:-1], rows),
    ),
    "rows": (
        "(Tensor packed, Tensor index, int columns) -> Tensor",
        lambda packed, index, columns: packed.new_empty(*index.shape, columns, dtype=torch.float32),
    ),
    "cached_attention": (
        (
            "(Tensor queries, Tensor keys, Tensor? key_scales, Tensor values, Tensor? value_scales,"
            " Tensor positions, Tensor? slots, int window, float scale, float? softcap=None,"
            " Tensor? sinks=None) -> Tensor"
        ),
        lambda q, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1] * q.shape[3]),
    ),
    "float_linear": (
        "(Tensor x, Tensor weight, bool exact=True) -> Tensor",
        lambda x, weight, exact=True: x.new_empty(*x.shape[:-1], weight.shape[0]),
    ),
    "experts": (
        (
            "(Tensor x, Tensor shares, Tensor chosen, Tensor gate_up, Tensor? gate_up_bias, Tensor"
            " down, Tensor? down_bias, str activation, float? limit, bool exact=True) -> Tensor"
        ),
        lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    ),
    "run_blocks": (
        (
            "(Tensor(a!) x, int blocks, Tensor[] angles, Tensor?[] query_scales, Tensor positions,"
            " Tensor? slots, Tensor(b!)[] cached, bool prefill) -> ()"
        ),
        lambda *_: None,
    ),
}
"""Schemas of torch operators, and what they return while traced."""
