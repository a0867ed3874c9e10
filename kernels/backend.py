"""The interface of kernel backends: products, and whatever else a backend provides, such as whole
decoder blocks.

B batch, T new tokens, D hidden size, H heads, K KV heads, Dh head size, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.qtensor import FIELDS, QuantTensor, concatenate_rows
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

CHUNK_ROWS = 16
"""See `Backend.prepare_chunks`."""

EXACT_MAX = 127
EXACT_COLUMNS = 32
"""See `Rounding`."""

OAI_ALPHA = 1.702
"""gpt-oss's factor on a gate before its sigmoid; compiled kernels support no other."""

Prepared = dict[str, Tensor]
"""A weight in the layout of a backend, see `Backend.prepare`."""


@dataclass(frozen=True)
class Rounding:
    """The allowed error of a product of activations x and a row w, relative to the product of norms
    ``|x| |w|``.

    Errors of float32 sums and of rounding the result to its dtype are added.

    Attributes:
        activations: from rounding activations, except *exact* ones, which are not rounded: in each
            run of `EXACT_COLUMNS` columns they are integers of at most `EXACT_MAX`, one of which is
            that or its negative, times one power of two; or all are zero.
        weights: from rounding weights.
        result: steps of its dtype that the result may be off by; half of one is rounding to the
            nearest.
    """

    activations: float
    weights: float
    result: float = 0.5


@dataclass(frozen=True)
class PreparedLinear:
    """A linear, or linears that share an input, fused; the bias is [O] in the model's dtype.
    *Stacked*, a linear of every expert of a layer: weights [E, ...], and the bias [E, O] in
    float32.

    Attributes:
        prepared: of a linear of floats, its ``weight`` [O, I] as it is stored.
        scheme: None for floats.
    """

    prepared: Prepared
    scheme: QuantScheme | None
    bias: Tensor | None


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that tokens are routed to.

    Attributes:
        router, router_bias: [E, D] in the model's dtype, and [E] in float32 or None.
        score_correction: float32 [E], added to scores for the choice of experts only; or None.
        gate_up, down: stacked.
        latent_in, latent_out: from hidden states to those that experts see, and back; or None.
        shared_gate: float32 [1, D], of the shared experts, or None.
        per_token: experts of a token.
        scores, normalized, normalization_eps, scaling, weighted_inputs: as of `ExpertsConfig`.
    """

    router: Tensor
    router_bias: Tensor | None
    score_correction: Tensor | None
    gate_up: PreparedLinear
    down: PreparedLinear
    latent_in: PreparedLinear | None
    latent_out: PreparedLinear | None
    shared_gate: Tensor | None
    per_token: int
    scores: str
    normalized: bool
    normalization_eps: float
    scaling: float
    weighted_inputs: bool


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of attention.

    Attributes:
        qkv: linears of queries, keys and values, as one if they are fused.
        q_norm, k_norm: of queries and keys, of each head [Dh] or the whole width.
        sinks: float32 [H].
        out: the last linear.
    """

    qkv: tuple[PreparedLinear, ...]
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    out: PreparedLinear


@dataclass(frozen=True)
class ShortConvWeights:
    """The weights of a short convolution between two gates (LFM2).

    Attributes:
        inputs: the linear of both gates and the convolution's inputs, [3 * D, D].
        convolution: float32 [K, D], the weight of the latest token last.
        bias: of the convolution, float32 [D], or None.
        out: the last linear.
    """

    inputs: PreparedLinear
    convolution: Tensor
    bias: Tensor | None
    out: PreparedLinear


@dataclass(frozen=True)
class GatedDeltaWeights:
    """The weights of a gated delta rule; all tensors are float32.

    Attributes:
        inputs: linears of the convolution's inputs, of the gates, and of the heads' shares and
            rates, in this order; or two, see `GatedDeltaConfig.joined`.
        convolution: [K, C], the weight of the latest token last.
        rate_bias: [H], added to rates.
        decay: [H], the logarithm of decay for a rate whose softplus is 1; negative.
        norm: [Dv], of what is read of each head.
        out: the last linear.
        key_heads, value_heads: the numbers of heads.
    """

    inputs: tuple[PreparedLinear, ...]
    convolution: Tensor
    rate_bias: Tensor
    decay: Tensor
    norm: Tensor
    out: PreparedLinear
    key_heads: int
    value_heads: int


@dataclass(frozen=True)
class Mamba2Weights:
    """The weights of Mamba-2; all tensors are float32.

    Attributes:
        inputs: the linear of gates, the convolution's inputs and the heads' steps.
        convolution, convolution_bias: [K, C], the weight of the latest token last; [C] or None.
        step_bias, skip: [H], added to steps; factors of values that are read besides the state.
        decay: [H], the logarithm of decay for a step of 1; negative.
        step_limits: [2], which steps are clamped to.
        norm: [H * P], of each group's heads.
        out: the last linear.
        heads, groups: their numbers.
    """

    inputs: PreparedLinear
    convolution: Tensor
    convolution_bias: Tensor | None
    step_bias: Tensor
    decay: Tensor
    skip: Tensor
    step_limits: Tensor
    norm: Tensor
    out: PreparedLinear
    heads: int
    groups: int


MixerWeights = AttentionWeights | ShortConvWeights | GatedDeltaWeights | Mamba2Weights


@dataclass(frozen=True)
class BlockWeights:
    """The weights of a decoder block; None for those that it lacks. Norms are float32, with their
    offset.

    Attributes:
        input_norm, mlp_norm: before the mixer and the feed-forward, the same one if these are
            parallel; the others with "output" after them.
        gate_up, down: of the feed-forward, or of the shared experts; without either, `gate_up` is
            empty, and without a gate it is the other linear alone. Linears that share an input are
            one if they are fused; otherwise each is by itself, in this order.
    """

    input_norm: Tensor | None
    mixer: MixerWeights | None
    mixer_output_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: tuple[PreparedLinear, ...]
    down: PreparedLinear | None
    mlp_output_norm: Tensor | None
    experts: RoutedExperts | None


@dataclass(frozen=True)
class BlockSettings:
    """The settings of a decoder block; fields as of `ModelConfig` and `LayerConfig`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    chunk: int | None
    rotary: bool
    attention_scale: float | None
    attention_softcap: float | None
    clip_qkv: float | None
    attention_gate: bool
    qk_norm_after_rotary: bool
    activation: str
    activation_limit: float | None
    activation_alpha: float
    norm_eps: float
    centered_norms: bool
    residual_multiplier: float
    parallel_branches: bool


@dataclass(frozen=True)
class BlockStep:
    """The inputs of a step in addition to hidden states.

    Attributes:
        positions: rising in each sequence, [T] or [B, T].
        slots: of the sequences in the cache, [B]; None is 0, 1, 2, ...
        query_scales: of each layer factors of queries, float32 [T] or [B, T], or None.
        is_prefill: the tokens see nothing in the cache yet.
        angles: of each layer cosine and sine, float32 [T, R] or [B, T, R], for the first R
            dimensions of a head.
        cached: of each layer keys and values [slots, K, S, Dh], or its states, float32 [slots, ...]
            each; None without a cache.
    """

    positions: Tensor
    slots: Tensor | None
    query_scales: Sequence[Tensor | None]
    is_prefill: bool
    angles: Sequence[tuple[Tensor, Tensor]]
    cached: Sequence[tuple[CachedRows, CachedRows] | tuple[Tensor, ...]] | None


RunBlocks = Callable[[Tensor, BlockStep], Tensor]
"""Maps hidden states [B, T, D] to those after all blocks; it may reuse their memory."""


@dataclass(frozen=True)
class BlockKernel:
    """A kernel for whole decoder blocks.

    Attributes:
        prepare: converts the blocks of a model, once, at load, for hidden states of a dtype;
            returns None if it does not support one of them.
        features: what it supports besides RMS norms before both branches, rotary grouped-query
            attention and SwiGLU: names of fields of `ModelConfig`, `LayerConfig`, `RopeConfig` and
            `ExpertsConfig` that may differ from their defaults. Models with other features run
            without it.
        dtype: of hidden states; None is the model's.
        max_tokens: largest supported B * T of a step; None is any number.
        needs_cache: it supports only steps over a cache.
    """

    prepare: Callable[[Sequence[tuple[BlockWeights, BlockSettings]], torch.dtype], RunBlocks | None]
    features: frozenset[str]
    dtype: torch.dtype | None = None
    max_tokens: int | None = None
    needs_cache: bool = False


ScoredAttention = Callable[
    [
        Tensor,
        CachedRows,
        CachedRows,
        Tensor,
        Tensor | None,
        int | None,
        float | None,
        float | None,
        Tensor | None,
    ],
    Tensor,
]
"""Attention over a cache: queries [B, H, T, Dh]; cached keys and values [slots, K, S, Dh]; the
queries' positions, [T] or [B, T]; the sequences' slots [B], None for 0, 1, 2, ...; the window, None
for all; and of the scores the scale, None for 1 over the root of Dh, the soft cap or None, and the
heads' sinks [H] or None. To [B, T, H * Dh].
"""


@dataclass(frozen=True)
class ExpertKernel:
    """A kernel for the experts of a layer. It reads the weights of the chosen experts only, and can
    be captured.

    Attributes:
        stack: stacks one of the tensors that `prepare` returned for each expert to [E, ...].
        run: for rows [N, D], weights [N, K] in float32 and numbers [N, K] of the chosen experts,
            each one's gate and up side by side, and down, both stacked, the activation and its
            limit as in `ModelConfig`: the weighted sums [N, D] in the dtype of the rows.
        takes_floats: whether it also takes weights of floats, as `PreparedLinear` has them.
        takes_ungated: whether it also takes experts without gates, whose only first linear is in
            the place of gate and up.
    """

    stack: Callable[[list[Tensor]], Tensor]
    run: Callable[
        [Tensor, Tensor, Tensor, PreparedLinear, PreparedLinear, str, float | None], Tensor
    ]
    takes_floats: bool = False
    takes_ungated: bool = False


FindLikeliest = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Finds the tokens [N] of the largest logits in float32 [N, V], of equal ones the first, and
returns them, and again with -1 for each row whose logits are NaN or Inf.
"""


@dataclass(frozen=True)
class StepKernels:
    """What a step computes besides its blocks and products.

    Attributes:
        rotations: for positions [..., T], frequencies in float32, [P] or [..., 1 or T, P], a scale
            and the head size: cosine and sine, float32 [..., T, Dh]; see `rope.compute_rotations`.
        norm: for float32 hidden states [..., D], a float32 weight [D] with its offset, and
            epsilon: the root-mean-square norm (1910.07467); or, if a flag says so, the centered one
            (1607.06450).
    """

    rotations: Callable[[Tensor, Tensor, float, int], tuple[Tensor, Tensor]]
    norm: Callable[[Tensor, Tensor, float, bool], Tensor]
    find_likeliest: FindLikeliest


@dataclass(frozen=True)
class OfferedKernels:
    """What a backend provides for the rest of a model, in addition to linears; None where it
    provides nothing.

    Attributes:
        cached_attention: see `ScoredAttention`.
        cached_attention_max_tokens: tokens T up to which it is faster than torch's attention; None
            is any number.
        float_linear: ``x @ weight.T`` with a weight of floats, in the dtype of x, whatever the
            weight's.
        float_rounding: relative error of activations in products with weights of floats.
        block: for whole decoder blocks.
        experts: for mixtures of experts.
        step: for the rest of a step.
        single_threaded: a context in which torch's operations run on the calling thread. Threads
            that torch wakes up spin for milliseconds on processors that the kernels need.
    """

    cached_attention: ScoredAttention | None = None
    cached_attention_max_tokens: int | None = None
    float_linear: Callable[[Tensor, Tensor], Tensor] | None = None
    float_rounding: float = 0.0
    block: BlockKernel | None = None
    experts: ExpertKernel | None = None
    step: StepKernels | None = None
    single_threaded: Callable[[], AbstractContextManager[None]] | None = None


class Backend:
    """One way to multiply activations by a quantized weight.

    This one, the reference, dequantizes as `QuantTensor` defines it and multiplies in float32:
    correct on every device, for all schemes but small floats, and slow. The others override all
    methods and are tested against it.
    """

    name: str = "reference"

    def explain_unsupported(
        self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """Explain why the backend does not support this case; None if it does."""
        if scheme.of_small_floats:
            return "does not run weights of small floats"
        if dtype.is_floating_point:
            return None
        return f"activations are {dtype}"

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """Return the allowed error of products of activations of `dtype`; the self-test at load
        checks it.
        """
        return Rounding(0, 0)

    def count_bytes(self, spec: TensorSpec) -> int:
        """Count the bytes of what `prepare` returns for a quantized weight [O, I]; about, where the
        layout depends on the machine.
        """
        assert spec.scheme is not None
        # A byte for each code.
        return math.prod(spec.shape) + count_scale_bytes(spec)

    def prepare(self, weight: QuantTensor) -> Prepared:
        """Convert a weight to the layout of `linear`, once, at load; it is never saved."""
        prepared: Prepared = {}
        for name in FIELDS:
            tensor = getattr(weight, name)
            if tensor is not None:
                prepared[name] = tensor
        return prepared

    def prepare_chunks(self, chunks: Iterable[QuantTensor], rows: int) -> Prepared:
        """Prepare a weight of `rows` rows that comes in chunks of rows, each but the last with a
        multiple of `CHUNK_ROWS` rows.
        """
        return self.prepare(concatenate_rows(list(chunks)))

    def join(self, parts: Sequence[Prepared]) -> Prepared | None:
        """Join the rows of prepared weights with different schemes to those of one; None if the
        backend multiplies weights of one scheme only.
        """
        return None

    def dequantize_rows(
        self, prepared: Prepared, scheme: QuantScheme, in_features: int, index: Tensor
    ) -> Tensor:
        """Dequantize rows of the weight by index [N] to float32 [N, I], for an embedding that is
        tied to the head.
        """
        weight = _to_weight(prepared, scheme)
        # Only the requested rows become floats: the whole embedding would be a second, larger copy.
        return weight.take(index).dequantize()

    def offer_kernels(self) -> OfferedKernels | None:
        """Return what else the backend provides; None if nothing."""
        return None

    def linear(
        self,
        x: Tensor,
        prepared: Prepared,
        scheme: QuantScheme,
        out_features: int,
        bias: Tensor | None,
    ) -> Tensor:
        """Compute ``x @ weight.T + bias``: [..., I] to [..., O] in the dtype of x; `out_features`
        is O.
        """
        weight = _to_weight(prepared, scheme).dequantize()
        # float32 throughout, rounded once at the end: the other backends are tested against this.
        if bias is None:
            wide_bias = None
        else:
            wide_bias = bias.float()
        return F.linear(x.float(), weight, wide_bias).to(x.dtype)


def count_scale_bytes(spec: TensorSpec) -> int:
    """Count the bytes of the scales of a quantized weight [O, I], and of its zero points or
    minima.
    """
    assert spec.scheme is not None
    num_groups = spec.shape[0] * spec.scheme.groups(spec.shape[1])
    group_bytes = spec.dtype.itemsize
    if spec.scheme.has_minima:
        group_bytes += spec.dtype.itemsize
    elif not spec.scheme.symmetric:
        group_bytes += 1
    return num_groups * group_bytes


def _to_weight(prepared: Prepared, scheme: QuantScheme) -> QuantTensor:
    """Build the weight that the reference has prepared."""
    tensors = {name: prepared.get(name) for name in FIELDS}
    return QuantTensor(**tensors, scheme=scheme)  # type: ignore[arg-type]


REFERENCE = Backend()


def apply_gate(
    gate: Tensor, up: Tensor, activation: str, limit: float | None, alpha: float = OAI_ALPHA
) -> Tensor:
    """Multiply an activated gate by `up`, [..., F] each; it may reuse their memory."""
    if activation == "silu":
        # Autograd needs the values of the gate for the gradient of SiLU.
        return F.silu(gate, inplace=not gate.requires_grad).mul_(up)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    assert activation == "swiglu_oai", activation
    if limit is not None:
        # gpt-oss limits the gate from above only, and `up` on both sides.
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))
