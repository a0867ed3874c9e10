"""Products with weights of floats and with quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.kernels.dispatch import select_backend
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import QuantTensor, float_rows, row_chunks

_FLOAT_ELEMENTS = 1 << 21  # of a weight that are float32 at a time
_TILE = 16  # matrix products are slow for other numbers of rows

FloatLinear = Callable[[Tensor, Tensor], Tensor]
"""``x @ weight.T``, [..., I] to [..., O] in the dtype of x, whatever float dtype the weight has."""


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The `FloatLinear` of torch."""
    return F.linear(x, weight) if x.dtype == weight.dtype else float32_linear(x, weight).to(x.dtype)


def float32_linear(x: Tensor, weight: Tensor | QuantTensor) -> Tensor:
    """``x @ weight.T`` in float32, [..., I] to [..., O]; the weight is converted to float32 some rows at a time."""
    return float32_linears([x], weight)[0]


def float32_linears(xs: Sequence[Tensor], weight: Tensor | QuantTensor) -> list[Tensor]:
    """`float32_linear` of each x, with the same bits as alone; the weight is converted once for all."""
    wide = [x.float() for x in xs]
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for x in wide]
    count, columns = weight.shape
    chunk = max(_TILE, _FLOAT_ELEMENTS // max(columns, 1) // _TILE * _TILE)
    for start, stop in row_chunks(count, columns, chunk * columns):
        rows = float_rows(weight, start, stop)
        for x, out in zip(wide, outs, strict=True):
            out[..., start:stop] = times(x.flatten(0, -2), rows.t()).view(*x.shape[:-1], -1)
    return outs


class QuantLinear(nn.Module):
    """``x @ weight.T + bias`` through a kernel backend; the backend's tensors are its buffers."""

    def __init__(
        self,
        weight: QuantTensor,
        bias: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        backend: str | None = None,
    ) -> None:
        """
        Raises:
            RequestError, UnsupportedError: see `select_backend`.
        """
        super().__init__()
        self.scheme, self.scale_dtype = weight.scheme, weight.scale.dtype
        self.out_features, self.in_features = weight.shape
        self.backend = select_backend(weight.scheme, device, dtype, weight.scale.dtype, backend)
        prepared = self.backend.prepare(weight.to(device))
        self._prepared_names = tuple(prepared)
        for name, tensor in prepared.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.to(device, dtype), requires_grad=False)

    @property
    def backend_name(self) -> str:
        return self.backend.name

    @property
    def prepared(self) -> dict[str, Tensor]:
        """The backend's tensors by name."""
        return {name: getattr(self, name) for name in self._prepared_names}

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.prepared, self.scheme, self.out_features, self.bias)
