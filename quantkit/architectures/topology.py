"""The one description of a model's tensors: for each layer its linears by role, in the order of the
data flow.

Naming, calibration, fusion at load, the splits of tensor parallelism and of XLA, estimates and the
rules of runtimes read it; nothing else defines the linears and what they share. It only depends on
the features in a `ModelConfig`; a family's names on disk are in its own file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from quantkit.architectures.config import LayerConfig, ModelConfig, OpaqueTensor
from quantkit.architectures.names import BLOCK, CANONICAL

SPLIT = frozenset(
    {
        "query",
        "query_and_gate",
        "kv",
        "full_query",
        "full_kv",
        "heads",
        "intermediate",
        "wide_intermediate",
        "vocab",
        "expert_intermediate",
        "shared_intermediate",
        "latent_query",
        "latent_kv",
        "latent_value",
    }
)
"""Sizes that tensor parallelism splits over processes or devices; all others are replicated."""


_MLP_SITES = ("mlp.", "expert.", "shared_expert.")
"""What the names of sites in the feed-forward branch begin with."""


@dataclass(frozen=True)
class Linear:
    """A linear layer by its role.

    Attributes:
        role: such as ``attention.q``, ``mlp.down``, ``expert.up``, ``head``.
        dims: its outputs and inputs, as names of `sizes`.
        site: its input; the linears of a layer with the same site have the same input, so they
            share a Hessian.
        fused: the role of the linear that replaces all linears with the same value, with their rows
            concatenated.
        bias: whether it has one.
        rotary: whether its rows are rotary pairs, head by head.
        quantizable: whether it may be quantized; not a router, as a token's choice of experts
            should not change.
    """

    role: str
    dims: tuple[str, str]
    site: str
    fused: str | None = None
    bias: bool = False
    rotary: bool = False
    quantizable: bool = True

    @property
    def parallel(self) -> Literal["column", "row", "replicated"]:
        """Choose how tensor parallelism splits it: by outputs, by inputs (then the results are
        summed), or not.
        """
        if self.dims[0] in SPLIT:
            return "column"
        if self.dims[1] in SPLIT:
            return "row"
        return "replicated"


@dataclass(frozen=True)
class Vector:
    """A tensor that does not belong to a linear: a norm's weight, attention sinks.

    Attributes:
        leaf: the last part of its name, after the module; may be empty.
    """

    role: str
    dims: tuple[str, ...]
    leaf: str = "weight"


@dataclass(frozen=True)
class ExpertBank:
    """Experts with the same linears."""

    count: int
    linears: tuple[Linear, ...]


Item = Linear | Vector | ExpertBank


@dataclass(frozen=True)
class Parameter:
    """One tensor of a model.

    Attributes:
        dims: names of its `sizes`, one for each axis.
        linear: whose weight or bias it is.
        expert: the index of its expert.
    """

    role: str
    module: str
    leaf: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    layer: int | None = None
    expert: int | None = None
    linear: Linear | None = None

    @property
    def name(self) -> str:
        """Return the canonical name."""
        if self.leaf:
            return f"{self.module}.{self.leaf}"
        return self.module

    @property
    def is_linear_weight(self) -> bool:
        return self.linear is not None and self.leaf == "weight"

    @property
    def rotary(self) -> bool:
        """Return whether its rows are permuted head by head between layouts."""
        return self.linear is not None and self.linear.rotary

    @property
    def split_axis(self) -> int | None:
        """Find the axis that tensor parallelism splits; None if the tensor is replicated."""
        for axis, dim in enumerate(self.dims):
            if dim in SPLIT:
                return axis
        return None


@dataclass(frozen=True)
class InputGroup:
    """The linears of a layer with the same input, so that they share a Hessian.

    Attributes:
        modules: their names within the block.
        expert: the index of their expert, if they belong to one.
    """

    site: str
    linears: tuple[Linear, ...]
    modules: tuple[str, ...]
    expert: int | None = None

    @property
    def branch(self) -> str:
        """Return their residual branch of the block."""
        if self.site.startswith(_MLP_SITES):
            return "mlp"
        return "mixer"

    @property
    def writes(self) -> bool:
        """Return whether their output is added to the hidden states; then it is one linear."""
        return self.linears[0].dims[0] == "hidden"


def compute_sizes(config: ModelConfig) -> dict[str, int]:
    """Compute the numbers behind the names in `dims`."""
    counts = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "query": config.num_heads * config.head_dim,
        "query_and_gate": 2 * config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
        "heads": config.num_heads,
        "head_dim": config.head_dim,
        "one": 1,
    }
    if _has_full_sizes(config):
        full_head_dim = config.full_head_dim or config.head_dim
        counts |= {
            "full_query": config.num_heads * full_head_dim,
            "full_kv": (config.full_kv_heads or config.num_kv_heads) * full_head_dim,
            "full_head_dim": full_head_dim,
        }
    if config.wide_sharing_layers:
        counts["wide_intermediate"] = 2 * config.intermediate_size
    if config.layer_inputs is not None:
        counts |= {
            "layer_input": config.layer_inputs.size,
            "layer_inputs": config.num_layers * config.layer_inputs.size,
            "layer_inputs_vocab": config.layer_inputs.vocab_size,
        }
    if config.experts is not None:
        counts |= {
            "experts": config.experts.count,
            "expert_intermediate": config.experts.size,
            "shared_intermediate": config.experts.shared_size,
            "expert_hidden": config.experts.latent_size,
        }
    if config.short_conv is not None:
        counts |= {
            # Two gates and the convolution's inputs.
            "short_conv_in": 3 * config.hidden_size,
            "short_conv_size": config.short_conv.size,
        }
    if config.gated_delta is not None:
        delta = config.gated_delta
        counts |= {
            "gated_delta_qkv": delta.num_channels,
            "gated_delta_qkvz": delta.num_channels + delta.value_heads * delta.value_dim,
            "gated_delta_two_heads": 2 * delta.value_heads,
            "gated_delta_value": delta.value_heads * delta.value_dim,
            "gated_delta_value_dim": delta.value_dim,
            "gated_delta_heads": delta.value_heads,
            "gated_delta_size": delta.convolution,
        }
    if config.mamba2 is not None:
        mamba = config.mamba2
        counts |= {
            # The gate, the convolution's inputs, and a step size for each head.
            "mamba2_in": mamba.inner_size + mamba.num_channels + mamba.heads,
            "mamba2_channels": mamba.num_channels,
            "mamba2_inner": mamba.inner_size,
            "mamba2_heads": mamba.heads,
            "mamba2_size": mamba.convolution,
        }
    if config.latent_attention is not None:
        latent = config.latent_attention
        counts |= {
            "query_rank": latent.query_rank or 0,
            "kv_rank": latent.kv_rank,
            "kv_rank_and_rope": latent.kv_rank + latent.rope_dim,
            "latent_query": config.num_heads * (latent.plain_dim + latent.rope_dim),
            "latent_kv": config.num_heads * (latent.plain_dim + latent.value_dim),
            "latent_value": config.num_heads * latent.value_dim,
        }
    return counts


def block_items(config: ModelConfig, layer: int) -> list[Item]:
    """List the items of a layer, in the order of the data flow."""
    before = config.norms in ("before", "both")
    after = config.norms in ("after", "both")
    features = config.layers[layer]
    mixer: list[Item] = []
    if config.latent_attention:
        mixer += _latent_attention(config)
    elif features.mixer != "none":
        mixer += _MIXERS[features.mixer](config, features)
    feed_forward: list[Item] = []
    is_wide = config.wide_sharing_layers and features.shares_kv
    if features.experts:
        feed_forward += _experts(config, is_wide=is_wide)
    elif features.feed_forward:
        size = "wide_intermediate" if is_wide else "intermediate"
        feed_forward += _iter_mlp(config, "mlp", (size, "hidden"), "mlp.in")
    items: list[Item] = []
    # The norms of the first branch have the same role for every mixer.
    for branch, inside in (("attention", mixer), ("mlp", feed_forward)):
        # A layer may have only one of them.
        if not inside:
            continue
        if before and not (branch == "mlp" and _has_no_second_norm(config, layer)):
            items.append(Vector(f"{branch}.norm", ("hidden",)))
        items += inside
        if after:
            items.append(Vector(f"{branch}.output_norm", ("hidden",)))
    if config.layer_inputs is not None:
        items += _LAYER_INPUT
    if config.layer_scales:
        items.append(Vector("layer_scale", ("one",), leaf=""))
    return items


def _has_no_second_norm(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has no norm before its feed-forward: parallel branches share the
    first norm, and experts may have norms of their own.
    """
    if config.parallel_branches:
        return True
    experts = config.experts
    return config.layers[layer].experts and experts is not None and experts.separate_norms


def _has_full_sizes(config: ModelConfig) -> bool:
    """Return whether layers without a window have other sizes of attention than the others."""
    return config.full_head_dim is not None or config.full_kv_heads is not None


def parameters(config: ModelConfig) -> list[Parameter]:
    """List every tensor of a model, layer by layer, in the order of files."""
    if config.tensors is not None:
        return [_describe_opaque(tensor) for tensor in config.tensors]
    counts = compute_sizes(config)
    tensors = list(_parameters(Vector("embedding", ("vocab", "hidden")), counts, None))
    if config.layer_inputs is not None:
        for layer_inputs_item in _LAYER_INPUTS:
            tensors += _parameters(layer_inputs_item, counts, None)
    # Computed once for equal layers.
    items: dict[LayerConfig, list[Item]] = {}
    for layer, features in enumerate(config.layers):
        if features not in items:
            items[features] = block_items(config, layer)
        for item in items[features]:
            if isinstance(item, ExpertBank):
                for expert in range(item.count):
                    for linear in item.linears:
                        tensors += _parameters(linear, counts, layer, expert)
            else:
                tensors += _parameters(item, counts, layer)
    tensors += _parameters(Vector("norm", ("hidden",)), counts, None)
    # Files do not store a head that is the embedding.
    if not config.tied_embeddings:
        tensors += _parameters(HEAD, counts, None)
    return tensors


HEAD = Linear("head", ("vocab", "hidden"), "head.in")
# The vectors of all layers, and what a layer does with its own. They are small, except for the
# embedding.
_LAYER_INPUTS: tuple[Linear | Vector, ...] = (
    Vector("layer_inputs.embedding", ("layer_inputs_vocab", "layer_inputs")),
    Linear(
        "layer_inputs.projection", ("layer_inputs", "hidden"), "layer_inputs.in", quantizable=False
    ),
    Vector("layer_inputs.norm", ("layer_input",)),
)
_LAYER_INPUT: tuple[Linear | Vector, ...] = (
    Linear("layer_input.gate", ("layer_input", "hidden"), "layer_input.in", quantizable=False),
    Linear(
        "layer_input.projection", ("hidden", "layer_input"), "layer_input.out", quantizable=False
    ),
    Vector("layer_input.norm", ("hidden",)),
)
# Linears of a model of unknown architecture, whose dimensions have no names.
_OPAQUE = Linear("linear", ("", ""), "")
_OPAQUE_FLOAT = Linear("float", ("", ""), "", quantizable=False)


def linear_columns(config: ModelConfig) -> dict[str, int]:
    """Count the inputs of every linear module that may be quantized."""
    columns: dict[str, int] = {}
    for parameter in parameters(config):
        linear = parameter.linear
        if parameter.is_linear_weight and linear and linear.quantizable:
            columns[parameter.module] = parameter.shape[1]
    return columns


def collect_default_floats(config: ModelConfig) -> frozenset[str]:
    """Collect the linear modules that stay floats unless a recipe names them: output heads,
    `recurrent_linears`, and in a model of unknown architecture linears of vision and audio parts.
    """
    if config.tensors is None:
        return recurrent_linears(config) | {CANONICAL[HEAD.role]}
    modules = set()
    for tensor in config.tensors:
        if tensor.role in ("head", "tower", "recurrent"):
            modules.add(tensor.module)
    return frozenset(modules)


def recurrent_linears(config: ModelConfig) -> frozenset[str]:
    """Collect the linear modules that write or read a state carried from token to token: of linear
    attention and state spaces, in models of unknown architecture also of short convolutions.
    """
    modules = set()
    if config.gated_delta is not None or config.mamba2 is not None:
        for parameter in parameters(config):
            is_recurrent = parameter.role.startswith(("gated_delta.", "mamba2."))
            if is_recurrent and parameter.linear is not None and parameter.linear.quantizable:
                modules.add(parameter.module)
    for tensor in config.tensors or ():
        if tensor.role == "recurrent":
            modules.add(tensor.module)
    return frozenset(modules)


def list_summed_modules(config: ModelConfig) -> list[str]:
    """List the modules whose results must be summed in tensor parallelism: linears whose inputs
    are split, and mixtures of experts, each as a whole.
    """
    modules = []
    for layer, features in enumerate(config.layers):
        for item in block_items(config, layer):
            if not isinstance(item, Linear) or item.parallel != "row":
                continue
            # The outputs of experts are added up within the mixture, whose sum is communicated
            # once.
            if features.experts and item.role.startswith(("expert.", "shared_expert.")):
                continue
            modules.append(CANONICAL[item.role].format(layer=layer))
        if features.experts:
            modules.append(CANONICAL["router"].rpartition(".")[0].format(layer=layer))
    return modules


def input_groups(config: ModelConfig, layer: int) -> list[InputGroup]:
    """Group the linears of a layer that may be quantized by their input, in the order of the data
    flow.
    """
    groups: dict[tuple[str, int | None], list[Linear]] = {}
    for linear, expert in _linears(config, layer):
        if linear.quantizable:
            groups.setdefault((linear.site, expert), []).append(linear)
    input_group_list = []
    for (site, expert), linears in groups.items():
        modules = tuple(_within(linear.role, expert) for linear in linears)
        input_group_list.append(InputGroup(site, tuple(linears), modules, expert))
    return input_group_list


def layer_kinds(config: ModelConfig) -> dict[int, int]:
    """Count the layers of each kind with different linears, by the first layer of the kind."""
    first_layers: dict[tuple[str, bool, bool, bool, bool], int] = {}
    repeats: dict[int, int] = {}
    for index, layer in enumerate(config.layers):
        # Layers without a window may have other linears than those with one.
        is_full = layer.window is None and (config.values_are_keys or _has_full_sizes(config))
        kind = layer.mixer, layer.feed_forward, layer.experts, is_full, layer.shares_kv
        first = first_layers.setdefault(kind, index)
        repeats[first] = repeats.get(first, 0) + 1
    return repeats


def count_head_layers(config: ModelConfig) -> int:
    """Count the layers with as many weights as the output head, at least one: progress is reported
    in layers, and with a vocabulary of 262,144 the head of a small model takes longer than all its
    blocks.
    """
    head_weights = config.vocab_size * config.hidden_size
    block_weights = 0
    if config.tensors is not None:
        for tensor in config.tensors:
            if tensor.layer is not None:
                block_weights += math.prod(tensor.shape)
    else:
        counts = compute_sizes(config)
        for layer, repeats in layer_kinds(config).items():
            for group in input_groups(config, layer):
                # An expert computes only the tokens that the router sends to it.
                share_of_tokens = 1.0
                if config.experts is not None and group.expert is not None:
                    share_of_tokens = config.experts.per_token / config.experts.count
                for linear in group.linears:
                    rows = counts[linear.dims[0]]
                    columns = counts[linear.dims[1]]
                    block_weights += int(repeats * share_of_tokens * rows * columns)
    return max(1, round(head_weights * config.num_layers / max(1, block_weights)))


def group_fused_linears(config: ModelConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """Group the linears that are fused when a model is loaded, in order, by the name of the fused
    one within the block.
    """
    groups: dict[str, list[str]] = {}
    for linear, expert in _linears(config, layer):
        if linear.fused is not None:
            fused = _within(linear.fused, expert)
            groups.setdefault(fused, []).append(_within(linear.role, expert))
    return {fused: tuple(modules) for fused, modules in groups.items()}


def _attention(config: ModelConfig, layer: LayerConfig) -> Iterator[Item]:
    # Layers without a window may have sizes of their own.
    kind = "full_" if layer.window is None and _has_full_sizes(config) else ""
    query = f"{kind}query"
    projected = "query_and_gate" if config.attention_gate else query
    kv = f"{kind}kv"
    sizes = [("q", projected)]
    if not layer.shares_kv:
        sizes.append(("k", kv))
        if not (config.values_are_keys and layer.window is None):
            sizes.append(("v", kv))
    for part, size in sizes:
        yield Linear(
            role=f"attention.{part}",
            dims=(size, "hidden"),
            site="attention.in",
            fused="attention.qkv" if len(sizes) > 1 else None,
            bias=config.qkv_bias,
            # Rotary positions apply to queries and keys only.
            rotary=part != "v",
        )
    yield Linear("attention.output", ("hidden", query), "attention.out", bias=config.output_bias)
    # Bare norms have no weights.
    if config.qk_norm in ("head", "width"):
        per_head = config.qk_norm == "head"
        yield Vector("attention.q_norm", (f"{kind}head_dim" if per_head else query,))
        if not layer.shares_kv:
            yield Vector("attention.k_norm", (f"{kind}head_dim" if per_head else kv,))
    if config.sinks:
        yield Vector("attention.sinks", ("heads",), leaf="")


def _short_conv(config: ModelConfig, layer: LayerConfig) -> Iterator[Item]:
    assert config.short_conv is not None
    bias = config.short_conv.bias
    yield Linear("short_conv.in", ("short_conv_in", "hidden"), "short_conv.in", bias=bias)
    yield Vector("short_conv.filter", ("hidden", "one", "short_conv_size"))
    if bias:
        yield Vector("short_conv.filter", ("hidden",), leaf="bias")
    yield Linear("short_conv.out", ("hidden", "hidden"), "short_conv.out", bias=bias)


def _gated_delta(config: ModelConfig, layer: LayerConfig) -> Iterator[Item]:
    site = "gated_delta.in"
    assert config.gated_delta is not None
    # The last ones are numbers for each head, which decide what a state keeps and what it takes up.
    if config.gated_delta.joined:
        yield Linear("gated_delta.qkvz", ("gated_delta_qkvz", "hidden"), site)
        role = "gated_delta.write_decay"
        yield Linear(role, ("gated_delta_two_heads", "hidden"), site, quantizable=False)
    else:
        yield Linear("gated_delta.qkv", ("gated_delta_qkv", "hidden"), site)
        yield Linear("gated_delta.gate", ("gated_delta_value", "hidden"), site)
        for part in ("write", "decay"):
            role = f"gated_delta.{part}"
            yield Linear(role, ("gated_delta_heads", "hidden"), site, quantizable=False)
    yield Vector("gated_delta.filter", ("gated_delta_qkv", "one", "gated_delta_size"))
    yield Vector("gated_delta.decay_bias", ("gated_delta_heads",), leaf="")
    yield Vector("gated_delta.log_rate", ("gated_delta_heads",), leaf="")
    yield Vector("gated_delta.norm", ("gated_delta_value_dim",))
    yield Linear("gated_delta.out", ("hidden", "gated_delta_value"), "gated_delta.out")


def _mamba2(config: ModelConfig, layer: LayerConfig) -> Iterator[Item]:
    mamba = config.mamba2
    assert mamba is not None
    yield Linear("mamba2.in", ("mamba2_in", "hidden"), "mamba2.in", bias=mamba.bias)
    yield Vector("mamba2.filter", ("mamba2_channels", "one", "mamba2_size"))
    if mamba.convolution_bias:
        yield Vector("mamba2.filter", ("mamba2_channels",), leaf="bias")
    for part in ("step_bias", "log_rate", "skip"):
        yield Vector(f"mamba2.{part}", ("mamba2_heads",), leaf="")
    yield Vector("mamba2.norm", ("mamba2_inner",))
    yield Linear("mamba2.out", ("hidden", "mamba2_inner"), "mamba2.out", bias=mamba.bias)


_MIXERS: dict[str, Callable[[ModelConfig, LayerConfig], Iterator[Item]]] = {
    "attention": _attention,
    "gated_delta": _gated_delta,
    "mamba2": _mamba2,
    "short_conv": _short_conv,
}
"""The items of a layer's mixer, by `LayerConfig.mixer`."""


def _latent_attention(config: ModelConfig) -> Iterator[Item]:
    assert config.latent_attention is not None
    low_rank = config.latent_attention.query_rank is not None
    fused: str | None = None
    if low_rank:
        fused = "attention.qkv_down"
        yield Linear("attention.q_down", ("query_rank", "hidden"), "attention.in", fused)
    else:
        yield Linear("attention.q", ("latent_query", "hidden"), "attention.in", fused)
    yield Linear("attention.kv_down", ("kv_rank_and_rope", "hidden"), "attention.in", fused)
    if low_rank:
        yield Vector("attention.q_down_norm", ("query_rank",))
        yield Linear("attention.q_up", ("latent_query", "query_rank"), "attention.q_up.in")
    yield Vector("attention.kv_down_norm", ("kv_rank",))
    yield Linear("attention.kv_up", ("latent_kv", "kv_rank"), "attention.kv_up.in")
    yield Linear(
        "attention.output", ("hidden", "latent_value"), "attention.out", bias=config.output_bias
    )


def _experts(config: ModelConfig, *, is_wide: bool) -> Iterator[Item]:
    experts = config.experts
    assert experts is not None
    yield Linear(
        "router", ("experts", "hidden"), "mlp.in", bias=experts.router_bias, quantizable=False
    )
    if experts.score_correction:
        yield Vector("router.score_correction", ("experts",), leaf="")
    if experts.expert_scales:
        yield Vector("router.expert_scales", ("experts",), leaf="")
    if experts.separate_norms:
        yield Vector("router.scale", ("hidden",), leaf="")
        yield Vector("expert.norm", ("hidden",))
        yield Vector("expert.output_norm", ("hidden",))
        if experts.shared_size:
            yield Vector("shared_expert.norm", ("hidden",))
            yield Vector("shared_expert.output_norm", ("hidden",))
    if experts.shared_gate:
        yield Linear("shared_expert.router", ("one", "hidden"), "mlp.in", quantizable=False)
    # Small, and of every token, so they stay floats like the router.
    if experts.latent_size:
        for part, dims in (
            ("in", ("expert_hidden", "hidden")),
            ("out", ("hidden", "expert_hidden")),
        ):
            site = f"expert.latent_{part}"
            yield Linear(f"expert.latent_{part}", dims, site, quantizable=False)
    outer = "expert_hidden" if experts.latent_size else "hidden"
    dims = "expert_intermediate", outer
    yield ExpertBank(
        experts.count, tuple(_iter_mlp(config, "expert", dims, "expert.in", bias=experts.bias))
    )
    if experts.shared_size:
        # Where layers differ in width, shared experts are the dense feed-forward (Gemma 4).
        dims = "wide_intermediate" if is_wide else "shared_intermediate", "hidden"
        yield from _iter_mlp(config, "shared_expert", dims, "mlp.in", bias=False)


def _iter_mlp(
    config: ModelConfig, role: str, dims: tuple[str, str], site: str, bias: bool | None = None
) -> Iterator[Linear]:
    """Yield a feed-forward of an inner and an outer size; `bias` is by default that of dense
    ones.
    """
    inner, outer = dims
    if bias is None:
        bias = config.mlp_bias
    if config.mlp_gate:
        for part in ("gate", "up"):
            yield Linear(
                role=f"{role}.{part}",
                dims=(inner, outer),
                site=site,
                fused=f"{role}.gate_up",
                bias=bias,
            )
    else:
        yield Linear(f"{role}.up", (inner, outer), site, bias=bias)
    yield Linear(f"{role}.down", (outer, inner), f"{role}.out", bias=bias)


def _linears(config: ModelConfig, layer: int) -> Iterator[tuple[Linear, int | None]]:
    for item in block_items(config, layer):
        if isinstance(item, Linear):
            yield item, None
        elif isinstance(item, ExpertBank):
            for expert in range(item.count):
                for linear in item.linears:
                    yield linear, expert


def _parameters(
    item: Linear | Vector, counts: Mapping[str, int], layer: int | None, expert: int | None = None
) -> Iterator[Parameter]:
    module = CANONICAL[item.role].format(layer=layer, expert=expert)
    linear: Linear | None = None
    leaves: dict[str, tuple[str, ...]] = {}
    if isinstance(item, Linear):
        linear = item
        leaves["weight"] = item.dims
        if item.bias:
            leaves["bias"] = item.dims[:1]
    else:
        leaves[item.leaf] = item.dims
    for leaf, dims in leaves.items():
        shape = tuple(counts[dim] for dim in dims)
        yield Parameter(
            role=item.role,
            module=module,
            leaf=leaf,
            dims=dims,
            shape=shape,
            layer=layer,
            expert=expert,
            linear=linear,
        )


def _describe_opaque(tensor: OpaqueTensor) -> Parameter:
    """Describe a tensor of a model of unknown architecture: a linear's weight, or one that is
    copied unchanged.
    """
    if not tensor.role:
        return Parameter(
            role="", module=tensor.name, leaf="", dims=(), shape=tensor.shape, layer=tensor.layer
        )
    if tensor.role == "embedding":
        return Parameter(
            role=tensor.role,
            module=tensor.module,
            leaf="weight",
            dims=(),
            shape=tensor.shape,
            layer=tensor.layer,
        )
    if tensor.role == "float":
        linear = _OPAQUE_FLOAT
    else:
        linear = _OPAQUE
    return Parameter(
        role=tensor.role,
        module=tensor.module,
        leaf="weight",
        dims=linear.dims,
        shape=tensor.shape,
        layer=tensor.layer,
        linear=linear,
    )


def _within(role: str, expert: int | None) -> str:
    """Build a module's name within its block."""
    return CANONICAL[role].removeprefix(BLOCK).format(expert=expert)
