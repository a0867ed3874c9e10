"""Linears with float weights and with quantized weights; embeddings of codes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.late import LateModule
from quantkit.kernels.backend import CHUNK_ROWS, Backend, Prepared
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import FIELDS, QuantTensor, float_rows, row_chunks
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from quantkit.kernels import dispatch
else:
    dispatch = LateModule("quantkit.kernels.dispatch")

# Elements of a weight that are converted to float32 at a time.
_FLOAT_ELEMENTS = 1 << 21
# Chunks have a multiple of this many rows, because matrix products are slow for other numbers.
_TILE = 16
# Rows of an embedding in a backend's self-test.
_TRIED = 64
# Codes, a byte each, in a chunk of a `StoredWeight`. Formats that store a weight by columns read
# all of it for each chunk of rows, so chunks are not smaller.
_CODES = 1 << 23

_log = logging.getLogger(__name__)

FloatLinear = Callable[[Tensor, Tensor], Tensor]
"""``x @ weight.T``, [..., I] to [..., O] in the dtype of x, whatever float dtype the weight has."""


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply with torch; a `FloatLinear`."""
    if x.dtype == weight.dtype:
        return F.linear(x, weight)
    return float32_linears([x], weight)[0].to(x.dtype)


def float32_linears(xs: Sequence[Tensor], weight: Tensor | QuantTensor) -> list[Tensor]:
    """Compute ``x @ weight.T`` in float32 for each x, [..., I] to [..., O], with the same bits as
    in separate calls.

    The weight is converted to float32 once for all of them, in chunks of rows.
    """
    wide = [x.float() for x in xs]
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for x in wide]
    count, columns = weight.shape
    chunk = max(_TILE, _FLOAT_ELEMENTS // max(columns, 1) // _TILE * _TILE)
    for start, stop in row_chunks(count, columns, chunk * columns):
        rows = float_rows(weight, start, stop)
        # One product per x: joined, their bits would depend on the size of all.
        for x, out in zip(wide, outs, strict=True):
            out[..., start:stop] = times(x.flatten(0, -2), rows.t()).view(*x.shape[:-1], -1)
    return outs


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight [O, I] that is read in chunks of rows.

    Attributes:
        load: reads some of its rows.
        unit: rows that are read together, such as those of a head.
    """

    shape: tuple[int, int]
    scheme: QuantScheme
    scale_dtype: torch.dtype
    load: Callable[[TensorSlice | None], QuantTensor]
    unit: int = 1

    def chunks(self) -> Iterator[QuantTensor]:
        """Read all rows, some at a time; all chunks but the last have a multiple of `CHUNK_ROWS`
        rows.
        """
        rows, columns = self.shape
        unit = math.lcm(self.unit, CHUNK_ROWS)
        step = max(unit, _CODES // columns // unit * unit)
        if step >= rows:
            yield self.load(None)
            return
        for start in range(0, rows, step):
            yield self.load(TensorSlice(0, ((start, min(start + step, rows)),)))

    def take(self, index: Tensor) -> QuantTensor:
        """Read rows by their numbers [N]."""
        return self.load(TensorSlice(0, tuple((row, row + 1) for row in index.tolist())))

    def to(self, device: torch.device | str) -> QuantTensor:
        """Read the whole weight to a device."""
        return self.load(None).to(device)


@dataclass(frozen=True)
class StackedWeights:
    """The rows of stored weights, one weight after the other; see `stack_weights`."""

    weights: Sequence[StoredWeight]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the sizes [O, I] of all weights together."""
        rows = sum(weight.shape[0] for weight in self.weights)
        return rows, self.weights[0].shape[1]

    @property
    def scheme(self) -> QuantScheme:
        """Return the scheme of each weight."""
        return self.weights[0].scheme

    @property
    def scale_dtype(self) -> torch.dtype:
        """Return the dtype of the scales of each weight."""
        return self.weights[0].scale_dtype

    def chunks(self) -> Iterator[QuantTensor]:
        """Read all rows, some at a time."""
        for weight in self.weights:
            yield from weight.chunks()


def stack_weights(weights: Sequence[StoredWeight]) -> StackedWeights | None:
    """Stack the rows of weights without reading them; None where they differ in scheme or dtype of
    the scales, or one but the last would end within a chunk's unit of rows.
    """
    if len({(weight.scheme, weight.scale_dtype) for weight in weights}) != 1:
        return None
    if any(weight.shape[0] % CHUNK_ROWS for weight in weights[:-1]):
        return None
    return StackedWeights(weights)


class QuantLinear(nn.Module):
    """``x @ weight.T + bias`` through a kernel backend; the backend's tensors are its buffers.

    Attributes:
        scheme: of the weight, or of its first rows if `joined` ones follow.
        joined: schemes of rows that follow, with which `join_linears` has made it.
    """

    def __init__(
        self,
        weight: QuantTensor | StoredWeight | StackedWeights,
        bias: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        allowed: Sequence[Backend],
    ) -> None:
        """
        Raises:
            RequestError: if none of the allowed backends supports the weight, see `select_backend`.
        """
        super().__init__()
        self.joined: tuple[QuantScheme, ...] = ()
        self.scheme = weight.scheme
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, QuantTensor):
            self.scale_dtype = weight.scale.dtype
        else:
            self.scale_dtype = weight.scale_dtype
        self.backend = dispatch.select_backend(
            weight.scheme, device, dtype, self.scale_dtype, allowed
        )
        if isinstance(weight, QuantTensor):
            self._register(self.backend.prepare(weight.to(device)))
        else:
            # Unlike a loop's variable, `map` does not keep a chunk while the next one is read.
            chunks = map(methodcaller("to", device), weight.chunks())
            self._register(self.backend.prepare_chunks(chunks, self.out_features))
        if bias is None:
            self.bias = None
        else:
            self.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)

    def _register(self, prepared: Prepared) -> None:
        self._prepared_names = tuple(prepared)
        for name, tensor in prepared.items():
            self.register_buffer(name, tensor)

    @property
    def backend_tensors(self) -> dict[str, Tensor]:
        """Collect the backend's tensors by name."""
        # Read from the buffers each time: moving the module replaces them, and a bank of experts
        # sets views.
        return {name: getattr(self, name) for name in self._prepared_names}

    def rows(self, index: Tensor) -> Tensor:
        """Dequantize rows of the weight by index [N], as float32 [N, I]."""
        return self.backend.dequantize_rows(
            self.backend_tensors, self.scheme, self.in_features, index
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.linear(
            x, self.backend_tensors, self.scheme, self.out_features, self.bias
        )


def join_linears(linears: Sequence[QuantLinear], bias: Tensor | None) -> QuantLinear | None:
    """Join the rows of linears without biases in the first one, and add a bias [O]; None if their
    backends differ, or do not join weights of different schemes.
    """
    first, *following = linears
    if any(linear.backend is not first.backend for linear in following):
        return None
    prepared = first.backend.join([linear.backend_tensors for linear in linears])
    if prepared is None:
        return None
    first._register(prepared)
    first.joined = tuple(linear.scheme for linear in following)
    first.out_features = sum(linear.out_features for linear in linears)
    if bias is not None:
        first.bias = nn.Parameter(bias, requires_grad=False)
    return first


def embedding_rows(tokens: Tensor, weight: Tensor | QuantTensor) -> Tensor:
    """Look up the rows [..., D] of tokens [...]: floats in their dtype, codes dequantized to
    float32.
    """
    if isinstance(weight, Tensor):
        return F.embedding(tokens, weight)
    return weight.take(tokens.flatten()).dequantize().view(*tokens.shape, -1)


class QuantEmbedding(nn.Module):
    """An embedding [V, D] of codes, whose rows are rounded once, to the activations' dtype.

    With a `head` made from the same weight, rows are those of the head, in the layout of its
    backend: a tied head needs no second copy, and codes of few bits take no byte each. Otherwise
    the codes keep their layout.
    """

    def __init__(
        self,
        weight: QuantTensor | StoredWeight,
        device: torch.device,
        dtype: torch.dtype,
        head: QuantLinear | None = None,
    ) -> None:
        super().__init__()
        self.scheme = weight.scheme
        self.num_embeddings, self.embedding_dim = weight.shape
        self._dtype = dtype
        self.head: QuantLinear | None = None
        if head is not None and self._gives_rows(head, weight):
            self.head = head
        if self.head is None:
            on_device = weight.to(device)
            for name in FIELDS:
                self.register_buffer(name, getattr(on_device, name))

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens, [...] to [..., D]."""
        if self.head is not None:
            rows = self.head.rows(tokens.flatten()).view(*tokens.shape, -1)
        else:
            fields = {name: getattr(self, name) for name in FIELDS}
            rows = embedding_rows(tokens, QuantTensor(**fields, scheme=self.scheme))
        return rows.to(self._dtype)

    def _gives_rows(self, head: QuantLinear, weight: QuantTensor | StoredWeight) -> bool:
        """Test whether the head's backend returns the exact rows of its weight, and log a warning
        if it does not.
        """
        # Evenly spread, with the first and the last row, where layouts may have padding.
        index = torch.linspace(0, self.num_embeddings - 1, min(_TRIED, self.num_embeddings)).long()
        device = next(iter(head.backend_tensors.values())).device
        right = weight.take(index).dequantize()
        reason = kernel_failure(lambda: torch.equal(head.rows(index.to(device)).cpu(), right))
        if reason is not None:
            _log.warning(
                "rows of the embedding by '%s' %s; its codes are held twice",
                head.backend.name,
                reason,
            )
        return reason is None


def kernel_failure(same_as_torch: Callable[[], bool]) -> str | None:
    """Run a comparison with torch and describe a failure as the verb phrase of a warning; None if
    the kernels agree.
    """
    try:
        if same_as_torch():
            return None
        return "are wrong on this machine"
    except Exception as error:
        # Drivers and compilers have their own exception types. Their messages may have many lines;
        # a warning is one.
        return f"fail on this machine ({describe_foreign_error(error)})"
