"""`ModelConfig`: what a model computes, as features of its blocks, layer by layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

from quantkit.architectures.rope import RopeConfig
from quantkit.errors import CheckpointError


class Limits:
    """Upper bounds of a config, and the range of a norm's epsilon, far beyond what is published:
    objects are made for each layer before the tensors are compared with the config, and
    `plan.generate` reads configs without tensors.
    """

    layers = 1024
    heads = 2**16
    width = 2**24
    # The largest signed 32-bit integer.
    context = 2**31 - 1
    experts = 2**12
    convolution = 2**10
    eps = (1e-30, 1.0)


@dataclass(frozen=True)
class LayerConfig:
    """The features of one layer, which may differ between the layers of a model.

    Attributes:
        window: how many positions attention sees, its own included; None for all.
        chunk: the length of the chunks of positions whose tokens see each other only; None if all
            are one.
        rotary: whether queries and keys get rotary positions.
        experts: whether the feed-forward is a mixture of experts.
        shares_kv: whether attention takes the keys and values of the latest layer before it that
            computes some, and has a window if this one has.
        mixer: what moves information from token to token: ``attention``, or ``short_conv``,
            ``gated_delta`` or ``mamba2``, which have no window and no rotary positions; ``none`` in
            a layer that is only a feed-forward.
        feed_forward: whether the layer has a feed-forward after its mixer.
    """

    window: int | None = None
    rotary: bool = True
    experts: bool = False
    mixer: str = "attention"
    feed_forward: bool = True
    chunk: int | None = None
    shares_kv: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts.

    Attributes:
        count: experts in a layer.
        size: intermediate size of one expert.
        per_token: experts that a token is sent to: those with the highest router scores.
        shared_size: intermediate size of all shared experts, which get every token; 0 if there are
            none.
        latent_size: width of the states that experts see, which a linear projects down, and another
            one up after them; 0 for the hidden size. Shared experts and the router see the latter.
        shared_gate: whether the output of shared experts is multiplied by the sigmoid of a separate
            gate.
        normalized: whether the weights of the chosen experts are scaled to add up to 1.
        bias: whether an expert's linears have biases.
        router_bias: whether the router has one.
        score_correction: whether a separate bias corrects the choice of experts (2408.15664).
        float32_router: whether the router's logits are computed in float32.
        scores: what becomes of the router's logits: ``softmax`` over the experts, or ``sigmoid`` of
            each.
        normalization_eps: added to the sum by which weights are divided.
        scaling: a factor of the weights after that.
        separate_norms: whether the router, the chosen experts and the shared ones each read hidden
            states that a norm of their own has normalized, and the outputs of the latter two get
            another norm each; the router's also has a factor of each dimension.
        expert_scales: whether the weight of each expert has a learnt factor.
        weighted_inputs: whether weights multiply the inputs of the chosen experts, instead of their
            outputs.
    """

    count: int
    size: int
    per_token: int
    shared_size: int = 0
    latent_size: int = 0
    shared_gate: bool = False
    normalized: bool = True
    bias: bool = False
    router_bias: bool = False
    score_correction: bool = False
    float32_router: bool = False
    scores: str = "softmax"
    normalization_eps: float = 0.0
    scaling: float = 1.0
    separate_norms: bool = False
    expert_scales: bool = False
    weighted_inputs: bool = False


@dataclass(frozen=True)
class LayerInputsConfig:
    """A vector of each token for each layer, from an embedding of its own, which the layer adds
    through a gate (Gemma 4).

    Attributes:
        size: of a vector.
        vocab_size: rows of the embedding.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True)
class QueryScaleConfig:
    """A factor of the queries of layers without rotary positions, which grows with the position:
    1 + strength log(1 + floor((position + 1) / floor)) (2501.19399, as in Llama 4).
    """

    strength: float
    floor: int


@dataclass(frozen=True)
class ShortConvConfig:
    """A short convolution between two gates, in place of attention (LFM2, 2511.23404).

    Attributes:
        size: the tokens that it sees, its own included.
        bias: whether the convolution and the linears around it have biases.
    """

    size: int
    bias: bool = False

    def state_shapes(self, hidden_size: int) -> tuple[tuple[int, ...], ...]:
        """Compute the shapes of the states of a sequence: the convolution's inputs of the latest
        tokens.
        """
        return ((self.size - 1, hidden_size),)


@dataclass(frozen=True)
class GatedDeltaConfig:
    """A gated delta rule in place of attention (2412.06464, as in Qwen3-Next).

    Attributes:
        key_heads, value_heads: heads of queries and keys, and of values; several of the latter
            share one of the former.
        key_dim, value_dim: their sizes.
        convolution: the tokens that the convolution of queries, keys and values sees.
        joined: whether one linear has the queries, keys, values and gates of each key head in turn,
            and another what each takes up and forgets, as in Qwen3-Next; else the first has all
            queries, all keys and all values, and the others are linears of their own.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: int
    joined: bool = False

    @property
    def num_channels(self) -> int:
        """Compute the channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_shapes(self, hidden_size: int) -> tuple[tuple[int, ...], ...]:
        """Compute the shapes of the states of a sequence: the convolution's inputs of the latest
        tokens, and a matrix for each head.
        """
        matrices = self.value_heads, self.key_dim, self.value_dim
        return (self.convolution - 1, self.num_channels), matrices


@dataclass(frozen=True)
class Mamba2Config:
    """A state space in place of attention (Mamba-2, 2405.21060).

    Attributes:
        heads, head_size: heads of values, and their size.
        groups: groups of heads, which share what writes to a state and what reads it, and a norm.
        state_size: the rows of a head's state, each of which has the head's size.
        convolution: the tokens that the convolution sees.
        convolution_bias: whether it has a bias.
        bias: whether the linears have one.
        step_limits: the range of step sizes, outside of which they are clamped.
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    convolution: int
    convolution_bias: bool = True
    bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner_size(self) -> int:
        """Compute the width of all heads."""
        return self.heads * self.head_size

    @property
    def num_channels(self) -> int:
        """Compute the channels of the convolution: the values of all heads, and what the groups
        write and read by.
        """
        return self.inner_size + 2 * self.groups * self.state_size

    def state_shapes(self, hidden_size: int) -> tuple[tuple[int, ...], ...]:
        """Compute the shapes of the states of a sequence: the convolution's inputs of the latest
        tokens, and a matrix for each head.
        """
        matrices = self.heads, self.state_size, self.head_size
        return (self.convolution - 1, self.num_channels), matrices


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Attention whose queries, keys and values come from low-rank states (DeepSeek-V2, 2405.04434).

    Attributes:
        query_rank: rank of the queries' state; None if they are projected directly.
        kv_rank: rank of the state that keys and values share.
        rope_dim, plain_dim: the dimensions of a head's queries and keys that are rotated, and the
            others.
        value_dim: the size of a head's values.
    """

    query_rank: int | None
    kv_rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the weight of a linear is in a tensor on disk: that of all experts of a module, or one
    that has inputs before outputs.

    Attributes:
        name, shape: of that tensor; [E, ...] of all experts.
        expert: the index along its first axis; None if it contains no experts.
        first, step: the first row there, and the distance between rows.
        transposed: whether inputs come before outputs there.
        apart: whether readers want each linear by itself in a folder with any quantized weights.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None
    first: int = 0
    step: int = 1
    transposed: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class OpaqueTensor:
    """A tensor of a model that is known by its tensors only.

    Attributes:
        dtype: the type of its elements, or of the floats that they encode.
        role: the kind of weight: ``linear``; ``head`` or ``tower``, an output head or a linear of a
            vision or audio part, which stay floats unless a recipe names them; ``recurrent``, a
            linear in a module with a state, which stays a float unless a recipe names it alone;
            ``float``, a linear that always does: a router, a tied head; ``embedding``, the
            embedding, if it is to be quantized. Empty for all other tensors.
        layer: the number of its block, if it is in one.
        alias: the name of a linear's module in readers, if it differs from the name on disk.
        stack: of a linear that is part of another tensor, or transposed, as long as its weight is
            not quantized: where it is there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = ""
    layer: int | None = None
    alias: str | None = None
    stack: Stack | None = dataclasses.field(default=None, compare=False)

    @property
    def module(self) -> str:
        """Return the module of a linear's weight."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a decoder's arithmetic; nothing about weights on disk.

    Attributes:
        architecture: the family, by its name in config.json (``model_type``).
        layers: the features of each layer.
        dtype: the float type of the checkpoint: ``float32``, ``float16`` or ``bfloat16``.
        qk_norm: norms of queries and keys: of each ``head``, over the whole ``width``, of each head
            without weights in layers with rotary positions, ``bare``, or None.
        clip_qkv: the absolute value at which queries, keys and values are clipped.
        norms: the position of a layer's norms: ``before`` attention and feed-forward, ``after``
            them, or ``both``.
        norm_offset: an offset of every norm's weight.
        centered_norms: whether a norm subtracts the mean of the hidden states first (1607.06450);
            norms of queries and keys never do.
        parallel_branches: whether the feed-forward has the input of attention, after the same
            norm, instead of what attention has added to it.
        qk_norm_after_rotary: whether norms of queries and keys come after their rotation.
        wide_norms: whether a norm multiplies by its weight in float32, and rounds to the dtype of
            the model afterwards. Norms with an offset do so in any case.
        value_norm: whether each head's values get a norm without weights.
        layer_scales: whether the hidden states after each layer are multiplied by a learnt number.
        full_head_dim, full_kv_heads: the size of heads, and the number of KV heads, of layers
            without a window, if they differ from those of the others.
        layer_inputs: vectors of tokens for each layer, or None.
        wide_sharing_layers: whether the feed-forward of layers that share keys and values is twice
            as wide.
        values_are_keys: whether layers without a window have no projection of values, and take
            that of keys, before its norm and rotation.
        mlp_gate: whether feed-forwards have a gate.
        activation: of the feed-forward's gate: ``silu``, ``gelu_tanh`` or ``swiglu_oai``, gpt-oss's
            with its limits; without a gate ``relu2``, the square of what is positive.
        activation_limit: the bound at which ``swiglu_oai`` clamps gate and up.
        activation_alpha: the factor of its gate before the sigmoid.
        attention_scale: the factor of attention scores; None is 1 over the root of head_dim.
        attention_softcap, logit_softcap: soft caps of attention scores and logits, by tanh.
        sinks: whether each head has a learnt sink logit.
        attention_gate: whether what a head mixes is multiplied by the sigmoid of a gate, whose
            rows follow the head's queries in their linear.
        leading_rotary: whether the rotated dimensions of a head come first; else both halves of a
            head begin with theirs. It makes a difference for partial rotary positions only.
        embedding_multiplier, logit_multiplier: factors of embeddings and logits.
        residual_multiplier: the factor of each branch's output.
        query_scale: of queries in layers without rotary positions; None for no scaling.
        window_rope: rotary positions of layers with a window, if they differ from those of the
            others.
        tensors: all tensors of a model that is known by them only (see `families.opaque`); else
            None.
        unstored: linear modules that readers have and no tensor is the weight of; None if unknown.
        run_by: what runs a model known by its tensors only, such as ``transformers 5.23.0``; None
            if nothing does.
        code: the folder with the model's own code, which runs it because the user trusts it; None
            if the model does not need code from its folder.
        media_tokens: the tokens that stand for images, video or sound, of which the model is given
            none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_context: int
    tied_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    clip_qkv: float | None = None
    norms: str = "before"
    norm_offset: float = 0.0
    centered_norms: bool = False
    parallel_branches: bool = False
    qk_norm_after_rotary: bool = False
    wide_norms: bool = False
    value_norm: bool = False
    layer_scales: bool = False
    full_head_dim: int | None = None
    full_kv_heads: int | None = None
    layer_inputs: LayerInputsConfig | None = None
    wide_sharing_layers: bool = False
    values_are_keys: bool = False
    mlp_gate: bool = True
    activation: str = "silu"
    activation_limit: float | None = None
    activation_alpha: float = 1.702
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    attention_gate: bool = False
    leading_rotary: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    query_scale: QueryScaleConfig | None = None
    window_rope: RopeConfig | None = None
    experts: ExpertsConfig | None = None
    latent_attention: LatentAttentionConfig | None = None
    short_conv: ShortConvConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    mamba2: Mamba2Config | None = None
    tensors: tuple[OpaqueTensor, ...] | None = dataclasses.field(default=None, repr=False)
    unstored: tuple[str, ...] | None = None
    run_by: str | None = None
    code: Path | None = None
    media_tokens: tuple[int, ...] = ()

    @property
    def runnable(self) -> bool:
        """Return whether the decoder can run the model."""
        return self.tensors is None

    @property
    def measurable(self) -> bool:
        """Return whether the decoder or transformers can run the model, so that its logits can be
        computed.
        """
        return self.runnable or self.run_by is not None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @property
    def attention_layers(self) -> list[int]:
        """List the numbers of the layers with attention."""
        return [number for number, layer in enumerate(self.layers) if layer.mixer == "attention"]

    @property
    def caching_layers(self) -> list[int]:
        """List the numbers of the layers that compute keys and values."""
        return [layer for layer in self.attention_layers if not self.layers[layer].shares_kv]

    @property
    def kv_sources(self) -> tuple[int | None, ...]:
        """Find the layer whose keys and values each layer shares; None if it computes its own."""
        latest: dict[bool, int] = {}
        sources: list[int | None] = []
        for number, layer in enumerate(self.layers):
            has_window = layer.window is not None
            if layer.shares_kv:
                sources.append(latest[has_window])
            else:
                latest[has_window] = number
                sources.append(None)
        return tuple(sources)

    def intermediate_size_of(self, layer: int) -> int:
        """Return the width of a layer's feed-forward."""
        return self._double_if_wide(layer, self.intermediate_size)

    def compute_shared_size(self, layer: int) -> int:
        """Return the width of a layer's shared experts."""
        assert self.experts is not None
        return self._double_if_wide(layer, self.experts.shared_size)

    def _double_if_wide(self, layer: int, width: int) -> int:
        is_wide = self.wide_sharing_layers and self.layers[layer].shares_kv
        return 2 * width if is_wide else width

    @property
    def keeps_states(self) -> bool:
        """Return whether a layer keeps states of a sequence, which cannot go back to an earlier
        token, in place of keys and values of each token.
        """
        return any(layer.mixer not in ("attention", "none") for layer in self.layers)

    def state_shapes(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Compute the shapes of the states that a layer keeps of each sequence; none for attention,
        which keeps keys and values of each token.
        """
        mixers = {
            "short_conv": self.short_conv,
            "gated_delta": self.gated_delta,
            "mamba2": self.mamba2,
        }
        mixer = mixers.get(self.layers[layer].mixer)
        if mixer is None:
            return ()
        return mixer.state_shapes(self.hidden_size)

    def rope_of(self, layer: int) -> RopeConfig:
        """Choose the rotary positions of a layer by whether it has a window."""
        if self.window_rope and self.layers[layer].window is not None:
            return self.window_rope
        return self.rope

    def head_dim_of(self, layer: int) -> int:
        """Return the size of a layer's heads."""
        if self.full_head_dim is not None and self.layers[layer].window is None:
            return self.full_head_dim
        return self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        """Return the number of a layer's KV heads."""
        if self.full_kv_heads is not None and self.layers[layer].window is None:
            return self.full_kv_heads
        return self.num_kv_heads

    @property
    def features(self) -> frozenset[str]:
        """Collect the fields of the config, and of its layers, that are not at their defaults."""
        # A set, because the layers of a model are of one or two kinds.
        parts: tuple[ModelConfig | LayerConfig, ...] = (self, *set(self.layers))
        names: set[str] = set()
        for part in parts:
            for field in fields(part):
                # A field without a default describes every model, so it is no feature of one.
                if field.default is MISSING or field.name in _NOT_COMPUTED:
                    continue
                if field.default != getattr(part, field.name):
                    names.add(field.name)
        return frozenset(names)

    @property
    def follows_length(self) -> bool:
        """Return whether rotary angles depend on the length of the sequence."""
        if self.rope.follows_length:
            return True
        return self.window_rope is not None and self.window_rope.follows_length

    @property
    def rope_switch(self) -> int | None:
        """Find the longest sequence with LongRoPE's short factors, if longer ones exist: these use
        other angles at all positions, so that cached keys must be computed again.
        """
        ropes = (self.rope, self.window_rope or self.rope)
        ends = []
        for rope in ropes:
            if rope.type == "longrope" and rope.original_context:
                ends.append(rope.original_context)
        if ends and min(ends) < self.max_context:
            return min(ends)
        return None

    @property
    def max_unscaled_context(self) -> int:
        """Return the longest sequence whose angles do not depend on its length."""
        return min(self.max_context, self.rope_switch or self.max_context)

    @property
    def max_positions(self) -> int:
        """Compute the maximum length of a sequence: beyond the trained context if the scaling grows
        with the length.
        """
        if self.rope.type != "dynamic":
            return self.max_context
        # A factor below 1 does not shorten the context that the model was trained with.
        return int(self.max_context * max(self.rope.factor, 1.0))

    def validate(self, path: object) -> ModelConfig:
        """Check the config and return it; raises `CheckpointError` if sizes do not fit, or a token
        of the config is not in the vocabulary.
        """
        full_head_dim = self.full_head_dim or self.head_dim
        for kv_heads in (self.num_kv_heads, self.full_kv_heads or self.num_kv_heads):
            if self.num_heads % kv_heads:
                raise CheckpointError(
                    "attention heads are not a multiple of the KV heads",
                    path=str(path),
                    found=f"{self.num_heads} and {kv_heads}",
                )
        for head_dim in (self.head_dim, full_head_dim):
            if head_dim % 2 or not head_dim:
                raise CheckpointError(
                    "head_dim must be even for rotary embedding", path=str(path), found=head_dim
                )
        self.rope.require_fits(full_head_dim, path)
        if self.window_rope is not None:
            self.window_rope.require_fits(self.head_dim, path)
        if self.experts is not None and self.experts.per_token > self.experts.count:
            raise CheckpointError(
                "there are more experts per token than experts",
                path=str(path),
                found=self.experts.per_token,
                expected=f"at most {self.experts.count}",
            )
        # Dynamic scaling raises a number to the power of head_dim / (head_dim - 2).
        if self.rope.type == "dynamic" and self.head_dim == 2:
            raise CheckpointError(
                "head_dim must be above 2 for dynamic rope scaling", path=str(path), found=2
            )
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and token >= self.vocab_size:
                raise CheckpointError(
                    "the BOS token or an EOS token is not in the vocabulary",
                    path=str(path),
                    found=token,
                    expected=f"at most {self.vocab_size - 1}",
                )
        return self

    def with_dtype(self, dtype: str) -> ModelConfig:
        """Return the same model in another float type."""
        return replace(self, dtype=dtype)

    def differences(self, other: ModelConfig) -> list[str]:
        """List the differences between two models except for the float type, such as
        ``hidden_size 128 against 256``.
        """
        # Layers are compared one by one below: a message with all of them would be unreadable.
        skipped = {"dtype", "bos_token_id", "eos_token_ids", "layers"} | _NOT_COMPUTED
        differences = _list_differences(self, other, skipped)
        differences += _list_tensor_differences(self.tensors, other.tensors)
        if self.num_layers != other.num_layers:
            differences.append(f"num_layers {self.num_layers} against {other.num_layers}")
        else:
            differences += _list_layer_differences(self.layers, other.layers)
        return differences


_NOT_COMPUTED = frozenset({"tensors", "unstored", "run_by", "code", "media_tokens"})
"""Fields that say nothing of what the decoder computes."""

_Part = (
    ModelConfig
    | RopeConfig
    | ExpertsConfig
    | LatentAttentionConfig
    | LayerInputsConfig
    | QueryScaleConfig
    | ShortConvConfig
    | GatedDeltaConfig
    | Mamba2Config
)


def _list_differences(
    part: _Part, other: _Part, skipped: Collection[str] = (), inside: str = ""
) -> list[str]:
    """List the differences between two configs, or parts of them, field by field."""
    differences = []
    for field in fields(part):
        if field.name in skipped:
            continue
        first = getattr(part, field.name)
        second = getattr(other, field.name)
        if isinstance(first, _Part) and isinstance(second, _Part):
            differences += _list_differences(first, second, inside=f"{field.name}.")
        elif first != second:
            differences.append(
                f"{inside}{field.name} {_format_value(first)} against {_format_value(second)}"
            )
    return differences


def _list_layer_differences(
    first_layers: tuple[LayerConfig, ...], second_layers: tuple[LayerConfig, ...]
) -> list[str]:
    """List the differences between layers: one line for each field, with the first layer that
    differs.
    """
    differences = []
    for field in fields(LayerConfig):
        pairs = []
        for first_layer, second_layer in zip(first_layers, second_layers, strict=True):
            pairs.append((getattr(first_layer, field.name), getattr(second_layer, field.name)))
        differing = [index for index, (first, second) in enumerate(pairs) if first != second]
        if differing:
            first, second = map(_format_value, pairs[differing[0]])
            if len(differing) > 1:
                ending = f" and {len(differing) - 1} more"
            else:
                ending = ""
            differences.append(
                f"{field.name} {first} against {second} in layer {differing[0]}{ending}"
            )
    return differences


def _list_tensor_differences(
    first_tensors: tuple[OpaqueTensor, ...] | None, second_tensors: tuple[OpaqueTensor, ...] | None
) -> list[str]:
    """Describe the first tensor that one model lacks or has in another shape, and count such
    tensors.
    """
    if first_tensors is None or second_tensors is None:
        if first_tensors is second_tensors:
            return []
        return ["one is known by its tensors only, the other is not"]
    first = {tensor.name: tensor.shape for tensor in first_tensors}
    second = {tensor.name: tensor.shape for tensor in second_tensors}
    # A union of dicts keeps the order of the tensors, which a set would not.
    differing = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if not differing:
        return []
    name = differing[0]
    difference = (
        f"tensor '{name}' {_format_shape(first.get(name))} against"
        f" {_format_shape(second.get(name))}"
    )
    if len(differing) > 1:
        difference += f" and {len(differing) - 1} more"
    return [difference]


def _format_shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "none"
    return str(list(shape))


def _format_value(value: object) -> str:
    """Format a value of a config for messages."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # JSON files write 10000 as well as 10000.0.
        if value.is_integer() and abs(value) < Limits.context:
            return str(int(value))
        return repr(value)
    if isinstance(value, _Part):
        settings = []
        for field in fields(value):
            settings.append(f"{field.name} {_format_value(getattr(value, field.name))}")
        return ", ".join(settings)
    return str(value)
