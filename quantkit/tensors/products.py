"""Matrix products on a CPU: of float32 through oneDNN, and of bfloat16 where the processor
multiplies it.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

BFLOAT16_SETTING = "QUANTKIT_BF16"
"""Environment variable that forbids bfloat16 on a CPU where it is 0, and requests it on a GPU
where it is 1.
"""

# Multiplications; for fewer, the call itself takes the time.
MIN_MULTIPLICATIONS = 1 << 20
# With fewer rows, reading the matrix takes the time.
_FEWEST_ROWS = 16
# A symmetric sum is computed in as many strips, which leave out most of what is below the diagonal.
_STRIPS = 16
# Of a product that is only added up: less than what the allocator maps anew each time.
PRODUCT_ELEMENTS = 7 << 18
# Sizes that are multiples of this are multiplied as they are.
_STEP = 64
# Other sizes are padded to multiples of this, so that oneDNN gets few different shapes.
_WIDE_STEP = 128
_CPU = torch.device("cpu")


def times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``a @ b``, [M, K] and [K, N] to [M, N].

    torch leaves float32 to MKL, which is half as fast as oneDNN on processors of AMD, and faster on
    Intel's; both sum in float32.
    """
    of_float32 = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    large = a.shape[0] >= _FEWEST_ROWS and a.shape[0] * b.numel() >= MIN_MULTIPLICATIONS
    if not (of_float32 and large and _is_faster_through_onednn()):
        return a @ b
    rows, inner = a.shape
    padding = _compute_padding(inner)
    if padding:
        a = F.pad(a, (0, padding))
        b = F.pad(b, (0, 0, 0, padding))
    # The operator of torch's compiler: `F.linear` leaves float32 to MKL.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        _make_dense(_pad_rows(a)), _make_dense(b).t(), None, "none", [], ""
    )
    return product[:rows]


def add_square_(total: Tensor, columns: Tensor) -> None:
    """Add ``columns @ columns.T`` of [I, N] to the upper triangle of [I, I]; below the
    diagonal, only parts are added.
    """
    step = _choose_strip(len(columns))
    width = max(step, PRODUCT_ELEMENTS // step)
    for start in range(0, len(columns), step):
        for first in range(start, len(columns), width):
            row_part = slice(start, start + step)
            column_part = slice(first, first + width)
            total[row_part, column_part].add_(times(columns[row_part], columns[column_part].t()))


def fill_lower_(total: Tensor) -> None:
    """Complete the symmetric matrix [I, I] that `add_square_` added to."""
    step = _choose_strip(len(total))
    for start in range(0, total.shape[0], step):
        stop = start + step
        total[stop:, start:stop] = total[start:stop, stop:].t()


def _choose_strip(width: int) -> int:
    """Choose the number of rows of a symmetric sum that are added to together."""
    return -(-width // (_STRIPS * _STEP)) * _STEP


def multiplies_bfloat16(device: torch.device = _CPU) -> bool:
    """Return whether a processor multiplies bfloat16, and nothing forbids it (torch's
    `ATEN_CPU_CAPABILITY` may); or a GPU does, and this is requested.
    """
    setting = os.environ.get(BFLOAT16_SETTING)
    if device.type == "cuda":
        return setting == "1" and torch.cuda.get_device_capability(device) >= (8, 0)
    if setting == "0" or device.type != "cpu" or not _onednn_is_built_in():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    # Private functions, which other releases of torch may lack.
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        is_supported = getattr(torch.cpu, name, None)
        if is_supported is not None and is_supported():
            return True
    return False


def compute_dtype(device: torch.device) -> torch.dtype:
    """Choose the dtype in which calibration samples are multiplied on their way through a model."""
    if multiplies_bfloat16(device):
        return torch.bfloat16
    return torch.float32


def bfloat16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x @ weight.T`` in float32, [..., I] and [O, I] to [..., O], with both factors and
    the result rounded to bfloat16; the weight is bfloat16 already.
    """
    rows = x.bfloat16().flatten(0, -2)
    if rows.device.type == "cpu":
        padded = _pad_rows(rows)
    else:
        padded = rows
    return F.linear(padded, weight)[: len(rows)].float().view(*x.shape[:-1], len(weight))


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute products of float32 on a GPU without TF32, and sums of bfloat16 in float32, whatever
    the process has set.
    """
    matmul = torch.backends.cuda.matmul
    previous_precision = matmul.fp32_precision
    previous_reduction = matmul.allow_bf16_reduced_precision_reduction
    matmul.fp32_precision = "ieee"
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.fp32_precision = previous_precision
        matmul.allow_bf16_reduced_precision_reduction = previous_reduction


@functools.cache
def _is_faster_through_onednn() -> bool:
    """Return whether this is an x86 processor for which torch has nothing faster, and has oneDNN's
    operator.
    """
    x86 = platform.machine() in ("x86_64", "AMD64")
    faster = x86 and not (_is_intel() and torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return faster and _onednn_is_built_in() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_intel() -> bool:
    processors = Path("/proc/cpuinfo")
    # On Linux `platform.processor` may be empty.
    if processors.exists():
        return "GenuineIntel" in processors.read_text()
    return "GenuineIntel" in platform.processor()


def _onednn_is_built_in() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _pad_rows(rows: Tensor) -> Tensor:
    """Append rows of zeros to rows [N, I], if their number is to be padded."""
    padding = _compute_padding(len(rows))
    if padding:
        return F.pad(rows, (0, 0, 0, padding))
    return rows


def _compute_padding(size: int) -> int:
    """Compute by how much a size is padded: oneDNN keeps a kernel for every shape that it gets, and
    experts are sent any number of tokens. The block sizes of the solver are not padded.
    """
    if size % _STEP:
        return -size % _WIDE_STEP
    return 0


def _make_dense(matrix: Tensor) -> Tensor:
    """Copy a matrix with gaps between its rows: oneDNN's linear is fast only without them."""
    if matrix.is_contiguous() or matrix.t().is_contiguous():
        return matrix
    # Keep the order of elements in memory, so that the copy reads whole runs.
    if matrix.stride(0) == 1:
        return matrix.t().contiguous().t()
    return matrix.contiguous()
