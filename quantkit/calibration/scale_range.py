"""The dtype in which GPTQ finds scales, so that the output's format can store them; settled before
anything is solved.

GPTQ, AWQ and GGUF store scales in float16, whose range is much smaller than that of bfloat16 and
float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.architectures.names import EMBEDDING
from quantkit.base.messages import Message, Option, join_messages
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import Reason, choose_codec
from quantkit.formats.codecs.table import NATIVE
from quantkit.model.load import narrow_to_floats
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import all_finite
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn, relative_error
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec

# Weights up to this have scales that float16 stores in every scheme; those of trained models are
# smaller by far.
_PLAIN_WEIGHT = 1024.0
# GPTQ adds what other weights lost, so that a scale may be larger than the weights alone need.
_HEADROOM = 2.0
# A bfloat16 number is a float16 number too if it is at least 2**-17. A searched scale may be half
# of the largest weight's.
_SMALLEST_BFLOAT16_SCALE = 2.0**-16
# Scales of weights below this are subnormal numbers in float16, which have fewer digits, or 0.
_SMALL_WEIGHT = 2.0**-8
_MAX_ERROR_GROWTH = 1.25
# Offered instead of a scheme that the native format lacks.
_NATIVE_SCHEME = "int4-g32"


def choose_scale_dtype(source: Checkpoint, output: Iterable[TensorSpec]) -> torch.dtype:
    """Choose the dtype in which GPTQ finds the scales of all linears: the model's, unless a format
    does not store it.

    For a format with float16 scales, all weights are read once.

    Args:
        source: of the weights.
        output: the tensors of the output, or of its several results.

    Raises:
        NonFiniteError: if the scales of a weight are too large or too small for the type in which a
            format stores them.
    """
    model = DType(source.config.dtype)
    specs = [spec for spec in output if spec.scheme is not None and not spec.scheme.of_small_floats]
    stored = {spec.dtype for spec in specs}
    if DType.FLOAT16 not in stored:
        return model.torch
    has_small_scales = False
    for spec in {spec.name: spec for spec in specs if spec.dtype is DType.FLOAT16}.values():
        assert spec.scheme is not None
        weight = narrow_to_floats(source.load(spec.name)).flatten(0, -2)
        # A small weight of float16 has smaller scales.
        _require_stored_scales(weight, spec, spec.scheme, source)
        if spec.scheme.scales is Scales.FLOATS:
            has_small_scales |= _has_small_scale(weight, spec.scheme)
    is_wider = model.itemsize > DType.FLOAT16.itemsize
    # Another result that stores bfloat16 scales could not hold float16 ones.
    if is_wider or (has_small_scales and stored == {DType.FLOAT16}):
        return torch.float16
    return model.torch


def scale_out_of_range(
    name: str,
    dtype: DType,
    source: Checkpoint,
    values: str = "too large",
    scheme: QuantScheme | None = None,
) -> NonFiniteError:
    """Return the error for a weight whose scales a dtype cannot hold, with what helps. Another
    dtype of the source does not, if the format stores float16.

    Args:
        scheme: of the weight; None if every format has it.
    """
    module = name.removesuffix(".weight")
    ways: list[str] = [Message(Option("keep", value=module), " leaves it unquantized")]
    if module == EMBEDDING:
        ways = ["do not quantize the embedding"]
    if dtype is DType.FLOAT16 and source.config.dtype != DType.FLOAT16:
        way = Message(Option("to", value=NATIVE.name))
        if scheme is not None and isinstance(choose_codec(NATIVE, scheme), Reason):
            # Such as for K-quants, which GGUF alone has.
            way += Message(" with ", Option("scheme", value=_NATIVE_SCHEME))
        ways.append(Message(way, f" stores scales in {source.config.dtype}"))
    problem = f"tensor '{name}' has values {values} for scales in {dtype}"
    return NonFiniteError(problem, path=source.path, hint=join_messages(", or ", ways))


def has_finite_scales(weight: QuantTensor) -> bool:
    """Return whether all scales and minima of a quantized weight are finite."""
    scales = (weight.scale, weight.outer, weight.outer_minimum, weight.minimum)
    return all(all_finite(scale) for scale in scales if scale is not None)


def widen_scales(weight: QuantTensor, dtype: DType) -> QuantTensor:
    """Return a weight whose float16 scales are stored as float32, for a result next to one that
    stores float16.
    """
    if weight.scheme.scales is not Scales.FLOATS or dtype.itemsize <= weight.scale.dtype.itemsize:
        return weight
    return replace(weight, scale=weight.scale.to(dtype.torch))


def _require_stored_scales(
    weight: Tensor, spec: TensorSpec, scheme: QuantScheme, source: Checkpoint
) -> None:
    """Round weights of unusual sizes to nearest, and raise a `NonFiniteError` if float16 does
    not hold the scales.
    """
    row_maxima = weight.abs().amax(dim=-1).float()
    large_rows = weight[(row_maxima > _PLAIN_WEIGHT) & row_maxima.isfinite()]
    if len(large_rows) and not has_finite_scales(
        quantize_rtn(large_rows.float() * _HEADROOM, scheme, torch.float16)
    ):
        raise scale_out_of_range(spec.name, spec.dtype, source, scheme=scheme)
    maximum = float(row_maxima.max())
    if not 0 < maximum < _SMALL_WEIGHT:
        return
    # Rounding does not depend on the magnitude of a weight, as long as its scales are precise.
    normalized = weight.float() / maximum
    expected_error = relative_error(quantize_rtn(normalized, scheme, torch.float16), normalized)
    error = relative_error(quantize_rtn(weight, scheme, torch.float16), weight)
    if error > expected_error * _MAX_ERROR_GROWTH:
        raise scale_out_of_range(spec.name, spec.dtype, source, values="too small", scheme=scheme)


def _has_small_scale(weight: Tensor, scheme: QuantScheme) -> bool:
    """Return whether a group of a weight [O, I] has a scale that bfloat16 rounds to a number that
    float16 does not have.
    """
    rows, columns = weight.shape
    group_maxima = weight.view(rows, scheme.groups(columns), -1).abs().amax(dim=-1).float()
    scales = group_maxima * (2 / scheme.levels)
    return bool(((scales > 0) & (scales < _SMALLEST_BFLOAT16_SCALE)).any())
