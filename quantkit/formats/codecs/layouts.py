"""The layouts of all methods of quantization, and the suffixes of their tensors: what folders are
recognized by, without the codecs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.layout import Layout, Shape, Shapes, count_words
from quantkit.tensors.dtypes import DType

# compressed-tensors.
PACKED = "weight_packed"
SHAPE = "weight_shape"
GLOBAL_SCALE = "weight_global_scale"
PLAIN = "weight"
SCALE = "weight_scale"
ZERO_POINT = "weight_zero_point"
GROUPS = "weight_g_idx"
# GPTQ and AWQ.
QWEIGHT = "qweight"
QZEROS = "qzeros"
SCALES = "scales"
G_IDX = "g_idx"
# MLX, which names codes and scales as others do.
BIASES = "biases"
# torchao.
TORCHAO_CODES = "_weight_qdata"
TORCHAO_SCALE = "_weight_scale"
# bitsandbytes. The first are appended to the name of a weight, which has one of the states.
STATES = {"NF4": ".quant_state.bitsandbytes__nf4", "FP4": ".quant_state.bitsandbytes__fp4"}
ABSMAX = ".absmax"
CODE_MAP = ".quant_map"
NESTED_ABSMAX = ".nested_absmax"
NESTED_MAP = ".nested_quant_map"
# The largest magnitude of each row of a weight in int8.
SCB = "SCB"
FORMAT = "weight_format"
# MXFP4.
BLOCKS = "_blocks"
EXPONENTS = "_scales"

FLOAT8_TYPES = (
    DType.FLOAT8_E4M3FN,
    DType.FLOAT8_E5M2,
    DType.FLOAT8_E4M3FNUZ,
    DType.FLOAT8_E5M2FNUZ,
)


def _compute_packed_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    # One scale for a whole weight is a vector or a scalar.
    one_scale: list[Shape] = [(1,), ()] if group_size is None else []
    return {
        PACKED: [(rows, count_words(columns, bits))],
        SCALE: [(rows, groups), *one_scale],
        SHAPE: [(2,)],
        # Zero points are packed along the outputs; before version 0.9 they were bytes.
        ZERO_POINT: [(count_words(rows, bits), groups), (rows, groups), *one_scale],
        GROUPS: [(columns,)],
    }


def _compute_plain_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    scales: list[Shape] = [(rows, groups)]
    if group_size is None:
        scales += [(1,), (), (rows,)]
    return {PLAIN: [(rows, columns)], SCALE: scales, ZERO_POINT: scales, GROUPS: [(columns,)]}


def _compute_fp4_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    return {PACKED: [(rows, columns // 2)], SCALE: [(rows, groups)], GLOBAL_SCALE: [(1,), ()]}


def _compute_gptq_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    return {
        QWEIGHT: [(count_words(columns, bits), rows)],
        QZEROS: [(groups, count_words(rows, bits))],
        SCALES: [(groups, rows)],
        G_IDX: [(columns,)],
    }


def packs_outputs(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether codes are packed along the outputs, as in AWQ: they have the width of their
    zero points.
    """
    codes = tensors[QWEIGHT]
    zeros = tensors.get(QZEROS)
    return zeros is not None and codes.shape[-1:] == zeros.shape[-1:]


def _is_evidently_gptq(tensors: Mapping[str, StoredTensor]) -> bool:
    return not packs_outputs(tensors)


def _compute_awq_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    packed = count_words(rows, bits)
    groups = math.ceil(columns / (group_size or columns))
    return {QWEIGHT: [(columns, packed)], QZEROS: [(groups, packed)], SCALES: [(groups, rows)]}


def _compute_mlx_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    return {
        PLAIN: [(rows, count_words(columns, bits))],
        SCALES: [(rows, groups)],
        BIASES: [(rows, groups)],
    }


def _compute_float8_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    scales: list[Shape]
    if block is not None:
        scales = [(math.ceil(rows / block[0]), math.ceil(columns / block[1]))]
    else:
        scales = [(rows, 1), (rows,)]
        if group_size is None:
            scales += [(1,), ()]
    return {"weight": [(rows, columns)], "weight_scale_inv": scales, "weight_scale": scales}


PACKED_CODES = Layout(
    "packed integers of compressed-tensors",
    PACKED,
    (SCALE,),
    ((SHAPE,),),
    if_asymmetric=(ZERO_POINT,),
    zeros=ZERO_POINT,
    floats=(SCALE,),
    integers=(PACKED, SHAPE, ZERO_POINT, GROUPS),
    shapes=_compute_packed_shapes,
)
FP4 = Layout(
    "packed small floats of compressed-tensors",
    PACKED,
    (SCALE,),
    code_types=(DType.UINT8,),
    bits=4,
    optional_suffixes=(GLOBAL_SCALE, "input_global_scale"),
    shapes=_compute_fp4_shapes,
)
INT8 = Layout(
    "int8",
    PLAIN,
    (SCALE, "weight_scale_inv"),
    code_types=(DType.INT8,),
    bits=8,
    floats=(SCALE,),
    integers=(ZERO_POINT, GROUPS),
    shapes=_compute_plain_shapes,
    unpacked=True,
    excluded=SCB,
)
GPTQ = Layout(
    "codes of GPTQ",
    QWEIGHT,
    (SCALES,),
    ((QZEROS,),),
    packed_outputs=QZEROS,
    zeros=QZEROS,
    floats=(SCALES,),
    integers=(QWEIGHT, QZEROS, G_IDX),
    shapes=_compute_gptq_shapes,
    is_evident=_is_evidently_gptq,
)
AWQ = Layout(
    "codes of AWQ",
    QWEIGHT,
    (SCALES,),
    ((QZEROS,),),
    packed_outputs=QWEIGHT,
    zeros=QZEROS,
    floats=(SCALES,),
    integers=(QWEIGHT, QZEROS, G_IDX),
    shapes=_compute_awq_shapes,
    is_evident=packs_outputs,
)
MLX = Layout(
    "codes of MLX",
    PLAIN,
    (SCALES,),
    code_types=(DType.UINT32,),
    floats=(SCALES, BIASES),
    shapes=_compute_mlx_shapes,
)
FLOAT8 = Layout(
    "FP8",
    "weight",
    ("weight_scale", "weight_scale_inv"),
    code_types=FLOAT8_TYPES,
    bits=8,
    shapes=_compute_float8_shapes,
    unpacked=True,
)
MXFP4 = Layout("MXFP4", BLOCKS, (EXPONENTS,), bits=4, joint="")
TORCHAO = Layout(
    "torchao",
    TORCHAO_CODES,
    (TORCHAO_SCALE, "_weight_scale_and_zero"),
    prefixes=("_weight_",),
    floats=(TORCHAO_SCALE,),
    integers=(TORCHAO_CODES,),
)
FOUR_BITS = Layout(
    "4-bit codes of bitsandbytes",
    PLAIN,
    (PLAIN + ABSMAX,),
    ((PLAIN + CODE_MAP,), tuple(PLAIN + suffix for suffix in STATES.values())),
    code_types=(DType.UINT8,),
    bits=4,
    optional_suffixes=(PLAIN + NESTED_ABSMAX, PLAIN + NESTED_MAP),
    prefixes=("weight.quant_state.",),
)
EIGHT_BITS = Layout(
    "int8 of bitsandbytes",
    PLAIN,
    (SCB,),
    code_types=(DType.INT8,),
    bits=8,
    optional_suffixes=(FORMAT,),
    unpacked=True,
    is_evident=lambda tensors: SCB in tensors,
)
