"""Refuse NaN and Inf before they reach a file or a figure."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantkit.base.messages import Message, Option
from quantkit.errors import NonFiniteError
from quantkit.tensors.float_codes import LARGEST
from quantkit.tensors.qtensor import QuantTensor, row_chunks
from quantkit.tensors.scheme import TABLE, Codes

_HINT = Message(
    "use the source's own dtype or repair it; ",
    Option("allow_nonfinite", value=True),
    " writes it anyway",
)
_OF_CODES = Message(
    "repair the source; ", Option("allow_nonfinite", value=True), " copies its scales anyway"
)


def cast_finite(
    tensor: Tensor,
    dtype: torch.dtype,
    name: str,
    path: Path,
    allow_nonfinite: bool,
    hint: str = _HINT,
) -> Tensor:
    """Cast a tensor to another float type, unless values are or become NaN or Inf, or all become
    zero.

    Raises:
        NonFiniteError: naming the tensor and the count; also if all values become zero, and some
            were not.
    """
    if tensor.dtype == dtype:
        cast = tensor
    else:
        cast = tensor.to(dtype)
    if allow_nonfinite:
        return cast
    if all_finite(cast):
        # Among the float types of models, only float16 has a smaller range than its sources.
        narrowed = dtype == torch.float16 and tensor.dtype != dtype
        if narrowed and not cast.any() and tensor.any():
            raise NonFiniteError(
                f"tensor '{name}' contains only values that round to zero in {dtype}",
                path=path,
                found=f"at most {tensor.abs().max().item():.3g}",
                hint=Message("use ", Option("dtype", value="bf16")),
            )
        return cast
    before = _count_nonfinite(tensor)
    after = _count_nonfinite(cast)
    if before:
        problem = f"{before} values that are NaN or Inf"
    else:
        problem = f"{after} values that overflow {dtype}"
    raise NonFiniteError(
        f"tensor '{name}' contains {problem}",
        path=path,
        found=f"{after} of {cast.numel()}",
        hint=hint,
    )


def require_finite_codes(value: QuantTensor, name: str, path: Path, allow_nonfinite: bool) -> None:
    """Check that the weights that codes mean are numbers in float32.

    Raises:
        NonFiniteError: naming the tensor and the count.
    """
    if allow_nonfinite:
        return
    fields = [value.scale, value.minimum, value.outer, value.outer_minimum]
    stored = [field for field in fields if field is not None]
    # Integer codes are below the number of levels, and small floats and tables go up to their
    # largest, so no weight exceeds these sums.
    if value.scheme.codes is Codes.TABLE:
        largest_code: float = max(map(abs, TABLE))
    else:
        largest_code = LARGEST.get(value.scheme.codes, value.scheme.levels)
    bounds = value.scale.float().abs() * largest_code
    if value.minimum is not None:
        bounds = bounds + value.minimum.float().abs()
    if all(map(all_finite, [*stored, bounds])):
        return
    count = sum(map(_count_nonfinite, stored))
    total = sum(field.numel() for field in stored)
    what = "scales" if value.minimum is None else "scales or minima"
    problem = f"{what} that are NaN or Inf"
    if not count:
        for start, stop in row_chunks(*value.shape):
            count += _count_nonfinite(value.rows(start, stop).dequantize())
        total = value.codes.numel()
        problem = "values that overflow float32 when dequantized"
    if count:
        raise NonFiniteError(
            f"tensor '{name}' contains {count} {problem}",
            path=path,
            found=f"{count} of {total}",
            hint=_OF_CODES,
        )


def all_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or Inf; one pass without temporaries, except for types that
    torch does not compare.
    """
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.is_complex() or tensor.itemsize == 1:
        return _count_nonfinite(tensor) == 0
    # NaN becomes both the smallest and the largest value.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def require_finite_logits(logits: Tensor, path: Path | None = None) -> Tensor:
    """Check a model's logits and return them.

    Raises:
        NonFiniteError: if one is NaN or Inf; names the model's path, if that is known.
    """
    if not all_finite(logits):
        raise nonfinite_logits(path, logits.dtype)
    return logits


def nonfinite_logits(
    path: Path | None = None, dtype: torch.dtype = torch.float32
) -> NonFiniteError:
    """Build the error that `require_finite_logits` raises for logits of a float type."""
    hint = "compare it with its source: quantkit verify"
    if dtype == torch.float16:
        hint = Message(
            "some models, Gemma among them, have hidden states too large for float16: run it with ",
            Option("dtype", value="bf16"),
        )
    return NonFiniteError("the model's logits are NaN or Inf", path=path, hint=hint)


def _count_nonfinite(tensor: Tensor) -> int:
    matrix = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    # torch does not tell the finite values of its float8 types.
    if tensor.itemsize == 1:
        wide = torch.float32
    else:
        wide = tensor.dtype
    count = 0
    for start, stop in row_chunks(matrix.shape[0], matrix.shape[1]):
        chunk = matrix[start:stop].to(wide)
        count += int((~torch.isfinite(chunk)).sum())
    return count
