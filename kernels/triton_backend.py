"""The GPU backend: Triton kernels, for NVIDIA and AMD GPUs."""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.backend import (
    Backend,
    BlockKernel,
    ExpertKernel,
    OfferedKernels,
    Prepared,
    PreparedLinear,
    Rounding,
    apply_gate,
    count_scale_bytes,
)
from quantkit.kernels.build import cache_folder
from quantkit.kernels.triton_tiles import (
    CACHED_FILE,
    TOKENS,
    UNIT,
    gpu_spec,
    read_measured_configs,
    save_configs,
)
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec

TUNE_SETTING = "QUANTKIT_TUNE"
"""Environment variable: 1 measures tile configs at load for shapes that have none."""

BLOCKS_SETTING = "QUANTKIT_BLOCKS"
"""Environment variable: 0 runs the modules of all blocks instead of the kernels for whole
blocks.
"""

# Words of a weight, below which measuring is not worth it.
_TUNE_WORDS = 1 << 17
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GROUPS = (32, 64, 128)
# Tokens up to which attention is bound by reading the cache.
_FEW_TOKENS = 16
# Steps by which a product is off where torch's matmul adds parts of it in 16 bits, as it does by
# default.
_PARTS = 1.0
# The interpreter truncates floats to bfloat16.
_TRUNCATES = os.environ.get("TRITON_INTERPRET") == "1"
_MIN_CAPABILITY = {torch.bfloat16: (8, 0), torch.float16: (7, 5), torch.float32: (7, 5)}
"""NVIDIA's compute capability that Triton needs for activations of a dtype."""


class TritonBackend(Backend):
    """Words of codes, multiplied as they are or converted to floats in registers, whichever is
    faster for the shape.
    """

    name = "triton"

    def explain_unsupported(
        self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not interpreted:
            return "runs on GPUs"
        if dtype not in _DTYPES:
            return f"activations are {dtype}"
        # Blocks of llama.cpp have minima, or scales of scales.
        of_int4 = scheme.is_int4 and scheme.group_size in _GROUPS and scheme.scales is Scales.FLOATS
        if not (scheme == QuantScheme(8, None) or of_int4):
            return "serves int8 per row, and int4 in groups of 32, 64 or 128"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        # torch reports AMD's GPUs as "cuda" too; their versions are not compute capabilities.
        if device.type == "cuda" and torch.version.hip is None:
            device_capability = torch.cuda.get_device_capability(device)
            if device_capability < _MIN_CAPABILITY[dtype]:
                needed = ".".join(map(str, _MIN_CAPABILITY[dtype]))
                return (
                    f"{dtype} needs compute capability {needed}, this GPU has"
                    f" {'.'.join(map(str, device_capability))}"
                )
        return None

    def rounding(self, dtype: torch.dtype) -> Rounding:
        # Activations stay as they are. Weights become floats of their dtype, each off by half a
        # step of that at most, unless the path keeps them exact. With float32, torch's matmul may
        # use TF32 for weights and activations.
        if dtype == torch.float32:
            return Rounding(0, 2**-10)
        if _TRUNCATES and dtype == torch.bfloat16:
            steps = 1.0
        else:
            steps = 0.5
        return Rounding(0, (steps + _PARTS) * torch.finfo(dtype).eps, steps)

    def count_bytes(self, spec: TensorSpec) -> int:
        assert spec.scheme is not None
        # Words are padded to whole units of columns.
        padded_columns = -(-spec.shape[1] // UNIT) * UNIT
        code_bytes = spec.shape[0] * padded_columns * spec.scheme.bits // 8
        return code_bytes + count_scale_bytes(spec)

    def prepare(self, weight: QuantTensor) -> Prepared:
        from quantkit.kernels import triton_linear  # noqa: F401  (registers the operator)
        from quantkit.kernels.triton_skinny import allocate_counters
        from quantkit.kernels.triton_words import pack

        words = pack(weight.codes, weight.scheme.bits)
        scale = _pad_groups(weight.scale, weight)
        if weight.zero is None:
            zero = {}
        else:
            zero = {"zero": _pad_groups(weight.zero, weight)}
        # The counters are allocated once: a launch leaves them at zero for the next.
        prepared = {
            "words": words,
            "scale": scale,
            **zero,
            "arrived": allocate_counters(len(words), words.device),
        }
        if os.environ.get(TUNE_SETTING) == "1" and words.is_cuda and words.numel() >= _TUNE_WORDS:
            _tune_shape(prepared, weight)
        return prepared

    def dequantize_rows(
        self, prepared: Prepared, scheme: QuantScheme, in_features: int, index: Tensor
    ) -> Tensor:
        from quantkit.kernels.triton_words import unpack

        codes = unpack(prepared["words"][index], scheme.bits)[:, :in_features]
        groups = scheme.groups(in_features)
        if "zero" in prepared:
            zero = prepared["zero"][index, :groups]
        else:
            zero = None
        return QuantTensor(
            codes.contiguous(), prepared["scale"][index, :groups], zero, scheme
        ).dequantize()

    def offer_kernels(self) -> OfferedKernels:
        # Importing these modules registers their operators.
        from quantkit.kernels import triton_attention, triton_experts  # noqa: F401
        from quantkit.kernels.triton_block import FEATURES, prepare_blocks
        from quantkit.kernels.triton_projections import MAX_TOKENS

        block = None
        if os.environ.get(BLOCKS_SETTING) != "0":
            block = BlockKernel(prepare_blocks, FEATURES, max_tokens=MAX_TOKENS, needs_cache=True)
        return OfferedKernels(
            _attend_to_cache, _FEW_TOKENS, block=block, experts=ExpertKernel(torch.stack, _experts)
        )

    def linear(
        self,
        x: Tensor,
        prepared: Prepared,
        scheme: QuantScheme,
        out_features: int,
        bias: Tensor | None,
    ) -> Tensor:
        product: Tensor = torch.ops.quantkit_triton.linear(
            x.reshape(-1, x.shape[-1]),
            prepared["words"],
            prepared["scale"],
            prepared.get("zero"),
            bias,
            scheme.group_size,
            prepared["arrived"],
        )
        return product.view(*x.shape[:-1], out_features)


def _attend_to_cache(
    queries: Tensor,
    keys: CachedRows,
    values: CachedRows,
    positions: Tensor,
    slots: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to a cache, see `ScoredAttention`."""
    operands = queries, *keys, *values, positions, slots, window, scale, softcap, sinks
    mixed: Tensor = torch.ops.quantkit_triton.cached_attention(*operands, None, None)
    return mixed


def _experts(
    rows: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: PreparedLinear,
    down: PreparedLinear,
    activation: str,
    limit: float | None,
) -> Tensor:
    """Run the chosen experts of each row, see `ExpertKernel`."""
    gate, up = _of_chosen(rows, chosen, gate_up).chunk(2, dim=-1)
    outputs = _of_chosen(apply_gate(gate, up, activation, limit), chosen, down)
    # Weighted and added in float32, rounded once.
    return (outputs.float() * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def _of_chosen(x: Tensor, chosen: Tensor, linear: PreparedLinear) -> Tensor:
    """Multiply tokens [N, I] or [N, K, I] by a linear of each token's experts [N, K], to
    [N, K, O].
    """
    # A bank of experts has quantized weights only.
    assert linear.scheme is not None
    words = linear.prepared["words"]
    scale = linear.prepared["scale"]
    zero = linear.prepared.get("zero")
    operands = x, words, scale, zero, linear.bias, chosen, linear.scheme.group_size
    product: Tensor = torch.ops.quantkit_triton.grouped_linear(*operands)
    return product


def _pad_groups(values: Tensor, weight: QuantTensor) -> Tensor:
    """Pad scales or zero points [O, G] with zeros for the groups that fill the last unit."""
    size = weight.scheme.group_size
    if size is None:
        missing = 0
    else:
        missing = -weight.shape[1] % UNIT // size
    return F.pad(values, (0, missing)).contiguous()


def _tune_shape(prepared: Prepared, weight: QuantTensor) -> None:
    """Measure tile configs for a shape that has none on this GPU, and keep them in the cache
    folder.
    """
    from quantkit.kernels.triton_tune import tune

    rows, columns = weight.shape
    if weight.scheme.group_size is None:
        scheme = "int8"
    else:
        scheme = f"int4-g{weight.scheme.group_size}"
    gpu = gpu_spec(weight.codes.device)
    measured_shapes = read_measured_configs().get(gpu.name, {}).get(scheme, {})
    if f"{rows}x{columns}" not in measured_shapes:
        save_configs(
            cache_folder() / CACHED_FILE,
            gpu,
            scheme,
            rows,
            columns,
            tune(prepared, scheme, columns, TOKENS),
        )


TRITON = TritonBackend()
