"""Products with weights of floats that may be of another dtype than what they are multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from quantkit.tensors.qtensor import QuantTensor, float_rows, row_chunks

Product = Callable[[Tensor, Tensor], Tensor]
"""``x @ weight.T``, [..., I] to [..., O] in the dtype of x, whatever float dtype the weight has."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """A `Product` through torch."""
    return F.linear(x, weight) if x.dtype == weight.dtype else wide_product(x, weight).to(x.dtype)


def wide_product(x: Tensor, weight: Tensor | QuantTensor) -> Tensor:
    """``x @ weight.T`` in float32, [..., I] to [..., O], the weight made float32 some rows at a time."""
    return wide_products([x], weight)[0]


def wide_products(xs: Sequence[Tensor], weight: Tensor | QuantTensor) -> list[Tensor]:
    """`wide_product` of each x, with the same bits as alone; the weight is made float32 once for all."""
    wide = [x.float() for x in xs]
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for x in wide]
    for start, stop in row_chunks(*weight.shape):
        rows = float_rows(weight, start, stop)
        for x, out in zip(wide, outs, strict=True):
            out[..., start:stop] = F.linear(x, rows)
    return outs


def for_few_rows(few: Product, most: int) -> Product:
    """A `Product` that is good for so many rows of x, with torch's for more."""

    def chosen(x: Tensor, weight: Tensor) -> Tensor:
        return (few if x.numel() <= most * x.shape[-1] else product)(x, weight)

    return chosen
