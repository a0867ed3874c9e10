"""The CPU backends: fused C++ kernels over integer activations.

Activations become integers with one scale per token and 32 columns: of 16 bits in the exact mode
(relative error about 2e-5), of 8 bits in the fast one (about 5e-3).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UnsupportedError
from quantkit.kernels import backend
from quantkit.kernels.backend import (
    Backend,
    BlockKernel,
    ExpertKernel,
    OfferedKernels,
    Prepared,
    PreparedLinear,
    Rounding,
    StepKernels,
)
from quantkit.kernels.cpu_layout import COLUMNS, count_packed_bytes, explain_unsupported_scheme
from quantkit.kernels.cpu_operators import BlockOperands, CppOperators
from quantkit.kernels.library import load_kernels
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The largest integers that activations become.
_EXACT_MAX = 127 * 256
_FAST_MAX = 127
# The fast mode rounds activations to bfloat16, by half a step at most, where it multiplies that.
_BF16_ROUNDING = torch.finfo(torch.bfloat16).eps / 2
BLOCK_FEATURES = frozenset(
    {
        "qkv_bias",
        "output_bias",
        "mlp_bias",
        "qk_norm",
        "clip_qkv",
        "window",
        "chunk",
        "rotary",
        "query_scale",
        "query_scaling_beta",
        "attention_scale",
        "attention_softcap",
        "sinks",
        "attention_gate",
        "leading_rotary",
        "mixer",
        "short_conv",
        "gated_delta",
        "mamba2",
        "feed_forward",
        "norms",
        "centered_norms",
        "qk_norm_after_rotary",
        "parallel_branches",
        "residual_multiplier",
        "mlp_gate",
        "activation",
        "activation_limit",
        "experts",
        "score_correction",
        "float32_router",
        "scores",
        "normalization_eps",
        "scaling",
        "latent_size",
        "weighted_inputs",
    }
)


class CpuBackend(Backend):
    """Products of integers, with the weight packed once into rows side by side; `exact` is with
    16-bit activations.
    """

    def __init__(self, name: str, *, exact: bool) -> None:
        self.name = name
        self._exact = exact
        # `explain_unsupported` sets it: to load the kernels may need a compiler, and may fail.
        self._operators: Any = None

    def explain_unsupported(
        self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """Explain as `Backend` does; for a supported case, also load the kernels, which the other
        methods then use.
        """
        if device.type != "cpu":
            return "runs on CPUs"
        if dtype not in _DTYPES:
            return f"activations are {dtype}"
        reason = explain_unsupported_scheme(scheme)
        if reason is not None:
            return reason
        try:
            self._operators = load_kernels()
        except UnsupportedError as error:
            return str(error)
        return None

    def rounding(self, dtype: torch.dtype) -> Rounding:
        # Where m is the largest of 32 activations, each is off by m / (2 max) at most, and their
        # product with w by m / (2 max) |w|_1. There |w|_1 <= sqrt(32) |w| and m <= |x|; over all
        # columns, Cauchy and Schwarz.
        if self._exact:
            largest = _EXACT_MAX
        else:
            largest = _FAST_MAX
        return Rounding(math.sqrt(COLUMNS) / (2 * largest), 0)

    def count_bytes(self, spec: TensorSpec) -> int:
        return count_packed_bytes(spec)

    def prepare(self, weight: QuantTensor) -> Prepared:
        return self.prepare_chunks([weight], len(weight.codes))

    def prepare_chunks(self, chunks: Iterable[QuantTensor], rows: int) -> Prepared:
        return {"packed": self._operators.pack(chunks, rows, exact=self._exact)}

    def join(self, parts: Sequence[Prepared]) -> Prepared:
        return {"packed": self._operators.join([part["packed"] for part in parts])}

    def dequantize_rows(
        self, prepared: Prepared, scheme: QuantScheme, in_features: int, index: Tensor
    ) -> Tensor:
        result: Tensor = self._operators.rows(prepared["packed"], index.contiguous(), in_features)
        return result

    def linear(
        self,
        x: Tensor,
        prepared: Prepared,
        scheme: QuantScheme,
        out_features: int,
        bias: Tensor | None,
    ) -> Tensor:
        if bias is not None:
            bias = bias.to(x.dtype)
        product: Tensor = self._operators.linear(x, prepared["packed"], bias, out_features)
        return product

    def offer_kernels(self) -> OfferedKernels | None:
        operators = self._operators

        def attend_to_cache(
            queries: Tensor,
            keys: CachedRows,
            values: CachedRows,
            positions: Tensor,
            slots: Tensor | None,
            window: int | None,
            scale: float | None,
            softcap: float | None,
            sinks: Tensor | None,
        ) -> Tensor:
            if scale is None:
                scale = queries.shape[-1] ** -0.5
            if sinks is not None:
                sinks = sinks.float()
            # The kernels take a window of 0 for all positions.
            scores = window or 0, scale, softcap, sinks
            mixed: Tensor = operators.cached_attention(
                queries, *keys, *values, positions, slots, *scores
            )
            return mixed

        def experts(
            rows: Tensor,
            weights: Tensor,
            chosen: Tensor,
            gate_up: PreparedLinear,
            down: PreparedLinear,
            activation: str,
            limit: float | None,
        ) -> Tensor:
            linears = *_extract_weight(gate_up), *_extract_weight(down)
            summed: Tensor = operators.experts(
                rows, weights, chosen, *linears, activation, limit, self._exact
            )
            return summed

        return OfferedKernels(
            attend_to_cache,
            float_linear=partial(_multiply_floats, operators, self._exact),
            float_rounding=0.0 if self._exact else _BF16_ROUNDING,
            block=BlockKernel(
                partial(prepare_blocks, operators, exact=self._exact), BLOCK_FEATURES, torch.float32
            ),
            experts=ExpertKernel(operators.stack, experts, takes_floats=True, takes_ungated=True),
            step=StepKernels(operators.rotations, operators.norm, operators.find_likeliest),
            single_threaded=_single_threaded,
        )


def _multiply_floats(operators: CppOperators, exact: bool, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a weight of floats, see `CppOperators.float_linear`."""
    return operators.float_linear(x, weight, exact)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Run torch on one thread, see `OfferedKernels.single_threaded`; do nothing without OpenMP."""
    functions = ctypes.PyDLL(None)
    try:
        count = functions.omp_get_max_threads
        set_count = functions.omp_set_num_threads
    except AttributeError:
        yield
        return
    before = count()
    set_count(1)
    try:
        yield
    finally:
        set_count(before)


def prepare_blocks(
    operators: CppOperators,
    layers: Sequence[tuple[backend.BlockWeights, backend.BlockSettings]],
    dtype: torch.dtype,
    *,
    exact: bool = True,
) -> backend.RunBlocks | None:
    """Prepare blocks, see `BlockKernel`, for float32 hidden states [B, T, D], updated in place.
    Linears may be quantized or floats, and those that share an input need not be fused.
    """
    operands = []
    has_rotary = []
    for weights, settings in layers:
        # The kernels of experts take gate and up as one weight.
        if weights.experts is not None and len(weights.gate_up) > 1:
            return None
        operands.append(_operands(weights, settings))
        has_rotary.append(settings.rotary)
    blocks = operators.prepare_blocks(operands, exact)

    def run(x: Tensor, step: backend.BlockStep) -> Tensor:
        angles: list[Tensor] = []
        for rotary, (cosine, sine) in zip(has_rotary, step.angles, strict=True):
            if rotary:
                angles += (cosine, sine)
            else:
                # The kernels always rotate: by an angle of zero, nothing changes.
                angles += (torch.ones_like(cosine), torch.zeros_like(sine))
        operators.run_blocks(
            x,
            blocks.number,
            angles,
            step.query_scales,
            step.positions,
            step.slots,
            [] if step.cached is None else _list_cached(step.cached),
            step.is_prefill,
        )
        return x

    return run


def _list_cached(
    cached: Sequence[tuple[CachedRows, CachedRows] | tuple[Tensor, ...]],
) -> list[Tensor]:
    """List the cached tensors of all layers, the same number of each: keys and values, with their
    scales if they are codes, or states in their place.
    """
    layers: list[list[Tensor]] = []
    for layer in cached:
        tensors: list[Tensor] = []
        for part in layer:
            if isinstance(part, CachedRows):
                tensors += part.tensors()
            else:
                tensors.append(part)
        # A layer without a mixer caches nothing, and its kernels read nothing.
        layers.append(tensors or [torch.empty(0)])
    count = max(2, *(len(tensors) for tensors in layers))
    listed: list[Tensor] = []
    for tensors in layers:
        if len(tensors) < count:
            # The kernels read the first state in the place of keys, the last in that of values.
            tensors = [tensors[0]] * (count // 2) + [tensors[-1]] * (count // 2)
        listed += tensors
    return listed


def _list_mixer(mixer: backend.MixerWeights) -> tuple[str, list[Tensor | None]]:
    """Return a mixer's name, and its tensors without the norms around it, as the kernels take
    them.
    """
    if isinstance(mixer, backend.ShortConvWeights):
        tensors = [
            *_extract_weight(mixer.inputs),
            mixer.convolution,
            mixer.bias,
            *_extract_weight(mixer.out),
        ]
        return "short_conv", tensors
    if isinstance(mixer, backend.GatedDeltaWeights):
        tensors = [
            *_list_parts(mixer.inputs, 4),
            mixer.convolution,
            mixer.rate_bias,
            mixer.decay,
            mixer.norm,
            *_extract_weight(mixer.out),
        ]
        return ("joined_delta" if len(mixer.inputs) == 2 else "gated_delta"), tensors
    if isinstance(mixer, backend.Mamba2Weights):
        tensors = [
            *_extract_weight(mixer.inputs),
            mixer.convolution,
            mixer.convolution_bias,
            mixer.step_bias,
            mixer.decay,
            mixer.skip,
            mixer.step_limits,
            mixer.norm,
            *_extract_weight(mixer.out),
        ]
        return "mamba2", tensors
    tensors = [
        *_list_parts(mixer.qkv, 3),
        mixer.q_norm,
        mixer.k_norm,
        mixer.sinks,
        *_extract_weight(mixer.out),
    ]
    return "attention", tensors


def _operands(weights: backend.BlockWeights, settings: backend.BlockSettings) -> BlockOperands:
    """Order a block's weights of the mixer and of the feed-forward, and its settings, as the
    kernels take them.
    """
    mixer = weights.mixer
    name = "none"
    first_half: list[Tensor | None] = []
    if mixer is not None:
        name, mixing = _list_mixer(mixer)
        first_half = [weights.input_norm, *mixing, weights.mixer_output_norm]
    heads = settings.num_heads, settings.num_kv_heads
    if isinstance(mixer, backend.GatedDeltaWeights):
        heads = mixer.value_heads, mixer.key_heads
    elif isinstance(mixer, backend.Mamba2Weights):
        heads = mixer.heads, mixer.groups
    second_half: list[Tensor | None] = []
    # Zero experts per token stand for none; the other settings are then ignored.
    routing = (0, False, True, 0.0, 1.0, False)
    experts = weights.experts
    if experts is not None:
        shared = [*_list_parts(weights.gate_up, 1), *_extract_weight(weights.down)]
        second_half = [
            weights.mlp_norm,
            experts.router,
            experts.router_bias,
            experts.score_correction,
            *_extract_weight(experts.latent_in),
            *_extract_weight(experts.gate_up),
            *_extract_weight(experts.down),
            *_extract_weight(experts.latent_out),
            *shared,
            experts.shared_gate,
            weights.mlp_output_norm,
        ]
        routing = (
            experts.per_token,
            experts.scores == "sigmoid",
            experts.normalized,
            experts.normalization_eps,
            experts.scaling,
            experts.weighted_inputs,
        )
    elif weights.down is not None:
        second_half = [
            weights.mlp_norm,
            *_list_parts(weights.gate_up, 2),
            *_extract_weight(weights.down),
            weights.mlp_output_norm,
        ]
    return (
        name,
        first_half,
        second_half,
        (
            *heads,
            settings.window or 0,
            settings.chunk or 0,
            settings.attention_scale,
            settings.attention_softcap,
            settings.clip_qkv,
            settings.attention_gate,
            settings.qk_norm_after_rotary,
            settings.activation,
            settings.activation_limit,
            settings.norm_eps,
            settings.centered_norms,
            settings.residual_multiplier,
            settings.parallel_branches,
            *routing,
        ),
    )


def _list_parts(linears: Sequence[PreparedLinear], count: int) -> list[Tensor | None]:
    """List weights and biases of linears that share an input, up to `count` of them; None for
    those that are missing.
    """
    tensors: list[Tensor | None] = []
    for linear in linears:
        tensors += _extract_weight(linear)
    return tensors + [None] * (2 * count - len(tensors))


def _extract_weight(linear: PreparedLinear | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight, packed or as floats, and the bias of a linear."""
    if linear is None:
        return None, None
    bias = linear.bias
    # Blocks compute in float32, whatever the model's dtype.
    if bias is not None:
        bias = bias.float()
    # The kernels tell the two by their dtype.
    return linear.prepared.get("packed", linear.prepared.get("weight")), bias


CPU_EXACT = CpuBackend("cpu-exact", exact=True)
CPU_FAST = CpuBackend("cpu-fast", exact=False)
