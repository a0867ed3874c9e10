"""Models of unknown architecture: their tensors are copied and their linears quantized, but they
are not run.

transformers identifies a linear layer if it knows the model's class, otherwise its name does: see
`infer_roles_by_name`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from quantkit.architectures.config import LayerConfig, Limits, ModelConfig, OpaqueTensor
from quantkit.architectures.rope import RopeConfig

LINEARS = frozenset(
    {
        # attention
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "out_proj",
        "qkv_proj",
        "W_pack",
        "Wqkv",
        "wq",
        "wk",
        "wv",
        "wo",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "query_key_value",
        "query",
        "key",
        "value",
        "q_lin",
        "k_lin",
        "v_lin",
        "out_lin",
        "qkv",
        "q",
        "k",
        "v",
        "o",
        # feed-forward, those of experts among them
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "w1",
        "w2",
        "w3",
        "fc1",
        "fc2",
        "fc_in",
        "fc_out",
        "dense",
        "dense_h_to_4h",
        "dense_4h_to_h",
        "wi",
        "wi_0",
        "wi_1",
        "lin1",
        "lin2",
        "linear_fc1",
        "linear_fc2",
        # states
        "in_proj",
        "x_proj",
    }
)
"""The last parts of the names of linear layers, if transformers does not identify them."""
HEADS = frozenset(
    {"lm_head", "embed_out", "output_projection", "proj_out", "score", "classifier", "decoder"}
)
ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "wg", "gate_network"})
# Modules that choose the tokens which attention reads: DeepSeek Sparse Attention and its relatives.
_INDEXERS = frozenset({"indexer"})
# Parts of the names of linears with one output per expert.
_ROUTING = ("gate", "router", "classifier")
# Mamba's code does not read this weight through its module.
NEVER = frozenset({"dt_proj"})
_READ_OUT = ("out_proj", "o_proj")
_TOWER = re.compile(
    r"(vision|visual|vit|image|video|audio|sound|speech|multi_?modal|mm|sam|patch_merge)(_.*)?|.*_(vision|audio)"
    r"|(.*_)?(projectors?|aligner|connector|q_?former|merger|resampler(_model)?)|vqmodel|language_projection|mlp1|mlp_AR"
)
"""Names of parts for images and sound, and of what leads from them to the language model."""
_TABLE = re.compile(
    r"emb|(^|\.)(wte|wpe|shared)$|norm|(^|\.)ln_|conv|position|relative|rotary|patch|bias$",
    re.IGNORECASE,
)
# How the names of modules begin that predict further tokens.
_EXTRA = ("mtp", "nextn")
_STACKED = re.compile(r"(.*\bexperts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")
_SIDE_BY_SIDE = {"gate_up_proj": ("gate_proj", "up_proj")}
# Of the number of a layer. Longer ones do not count layers, and Python refuses to parse very long
# ones.
_MAX_DIGITS = 9
_BEFORE_LAYERS = frozenset({"model", "language_model", "text_model", "transformer", "backbone"})
_LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config")
_FLOAT_TYPES = ("float32", "float16", "bfloat16")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
)

_STATE_MARKS = frozenset(
    {
        "A_log",
        "dt_bias",
        "in_proj_ba",
        "in_proj_qkvz",  # Mamba, gated delta nets
        "time_decay",
        "x_r",
        "recurrent_param",
        "rglru",  # RWKV, RG-LRU
        "learnable_ttt_lr_weight",
        "short_filter",  # TTT, Hyena
        "igate_preact",
        "fgate_preact",  # xLSTM
        "slope_rate",
        "output_gate",
        "g_norm",
        "g_norm_swish_gate",
        # Lightning attention and its like.
        "gk_proj",
    }
)
"""Tensors and modules that are only in modules with a state."""
_STATE_NAMES = frozenset(
    {
        "linear_attn",
        "linear_attention",
        "mamba",
        "mamba2",
        "ssm",
        "delta_net",
        "mlstm_layer",
        "slstm_layer",
        "retention",
    }
)
"""Names of such modules within a layer, for files without their marks."""

# Inputs of a convolution over tokens; those over sound have more.
_NUM_SHORT = 4


def _list_short_filters() -> frozenset[tuple[int, int]]:
    shapes = set()
    for size in range(1, _NUM_SHORT + 1):
        shapes.add((1, size))
        shapes.add((size, 1))
    return frozenset(shapes)


_SHORT_FILTERS = _list_short_filters()
"""Shapes of one channel, in the layouts of torch and MLX."""


def opaque_config(
    raw: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> ModelConfig:
    """Describe a model by its tensors, in the order of the output: shape and type of each by name.
    Of the config.json only the values that `inspect` shows are used, and the float type.
    """
    text = _language(raw)
    # Blocks are numbered in the order of their first tensors: an encoder and a decoder may both
    # have a block 0.
    layers: dict[str, int] = {}
    opaque_tensors = []
    for name, (shape, dtype) in tensors.items():
        block = _cut_block_name(name)
        layer: int | None = None
        if block is not None:
            layer = layers.setdefault(block, len(layers))
        opaque_tensors.append(OpaqueTensor(name, shape, str(dtype), layer=layer))
    heads = _size(text, "num_attention_heads", "n_head", "num_heads")
    hidden = _size(text, "hidden_size", "d_model", "n_embd")
    default_head_dim = hidden // heads if heads else 0
    return ModelConfig(
        architecture=_architecture(raw),
        vocab_size=_size(text, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(text, "intermediate_size", "d_ff", "n_inner"),
        layers=(LayerConfig(),) * max(1, len(layers)),
        num_heads=heads,
        num_kv_heads=_size(text, "num_key_value_heads") or heads,
        head_dim=_size(text, "head_dim") or default_head_dim,
        norm_eps=0.0,
        rope=RopeConfig(),
        max_context=_size(text, "max_position_embeddings", "n_positions", "max_target_positions"),
        # Each stored tensor is separate.
        tied_embeddings=False,
        dtype=_dtype(raw, text, tensors),
        bos_token_id=None,
        eos_token_ids=(),
        tensors=tuple(opaque_tensors),
    )


def with_roles(
    config: ModelConfig,
    roles: Mapping[str, tuple[str, str | None]],
    unstored: tuple[str, ...] | None = None,
) -> ModelConfig:
    """Set the roles of a model's linears' weights: role and alias, see `OpaqueTensor`, by tensor
    name.
    """
    assert config.tensors is not None
    tensors = []
    for tensor in config.tensors:
        if tensor.name in roles:
            role, alias = roles[tensor.name]
            tensors.append(replace(tensor, role=role, alias=alias))
        else:
            tensors.append(tensor)
    return replace(config, tensors=tuple(tensors), unstored=unstored)


@dataclass(frozen=True)
class Hints:
    """What follows for linears from a model's config.json and the names of its tensors.

    Attributes:
        experts: the possible numbers of experts.
        tied: whether an output head is a copy of the embedding.
        multimodal: whether the model has parts other than language.
        recurrent: the modules that carry a state, by all their names.
    """

    experts: frozenset[int]
    tied: bool
    multimodal: bool
    recurrent: frozenset[str]

    @classmethod
    def of(cls, raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Hints:
        """Derive them from a config.json, and the shapes of all tensors by name."""
        experts: set[int] = set()
        for settings in (raw, _language(raw)):
            for key in _EXPERTS:
                count = settings.get(key)
                # A count of 1 would match every linear with one output.
                if type(count) is int and count > 1:
                    experts.add(count)
        part_keys = (*_LANGUAGE, "vision_config", "audio_config")
        multimodal = any(isinstance(raw.get(key), dict) for key in part_keys)
        return cls(frozenset(experts), is_tied(raw), multimodal, recurrent_modules(shapes))

    def is_recurrent(self, module: str) -> bool:
        """Return whether a linear is in a module that carries a state; vision and audio parts
        process all tokens at once.
        """
        return is_within(module, self.recurrent) and not self.is_tower(module)

    def role(self, tensor: OpaqueTensor, module: str) -> str | None:
        """Infer the role of the weight of a linear, whose `module` is on disk or in readers; None
        for a plain linear.
        """
        *parents, last = module.split(".")
        if last in ROUTERS or last.endswith("_router") or last in NEVER:
            return "float"
        # A router may be a module with a linear inside.
        if not ROUTERS.isdisjoint(parents):
            return "float"
        # As a router chooses experts, an indexer chooses tokens.
        if not _INDEXERS.isdisjoint(parents):
            return "float"
        # A word such as "gate" alone does not tell: `gate_proj` is no router.
        per_expert = tensor.shape[0] in self.experts and last not in LINEARS
        if per_expert and any(word in last for word in _ROUTING):
            return "float"
        if last == "lm_head":
            return "float" if self.tied else "head"
        if self.is_tower(module):
            return "tower"
        if self.is_recurrent(module) or self.is_recurrent(tensor.module):
            return "recurrent"
        return None

    def is_tower(self, module: str) -> bool:
        """Return whether a module is in a part for images or sound, or leads from one to the
        language model.
        """
        return self.multimodal and any(_TOWER.fullmatch(part) for part in module.split("."))


def infer_roles_by_name(
    raw: Mapping[str, Any], tensors: Sequence[OpaqueTensor]
) -> dict[str, tuple[str, str | None]]:
    """Infer the roles of tensors that follow from their names: of matrices with a name in
    `LINEARS`, and of those in modules that carry a state. Those of layers that predict further
    tokens have none.
    """
    roles: dict[str, tuple[str, str | None]] = {}
    hints = Hints.of(raw, {tensor.name: tensor.shape for tensor in tensors})
    for tensor in tensors:
        if not may_be_linear(tensor) or is_extra_layer(tensor.name, raw):
            continue
        role = hints.role(tensor, tensor.module)
        last = tensor.module.rpartition(".")[2]
        if role == "recurrent" and last not in LINEARS and is_table(tensor.name):
            role = None
        elif role is None and last in LINEARS:
            role = "linear"
        elif role is None and last in HEADS:
            role = "float" if hints.tied else "head"
        if role is not None:
            roles[tensor.name] = (role, None)
    return roles


def may_be_linear(tensor: OpaqueTensor) -> bool:
    """Return whether a tensor has the shape, type and name of a linear's weight."""
    matrix = len(tensor.shape) == 2 and 0 not in tensor.shape and tensor.name.endswith(".weight")
    return matrix and tensor.dtype in _FLOAT_TYPES


def list_copied_modules(config: ModelConfig) -> list[str]:
    """List the modules whose weights are copied although they may be linears in some readers,
    such as layers that predict further tokens, or experts in one tensor; none for a model that
    runs.
    """
    modules: list[str] = []
    for tensor in config.tensors or ():
        if not tensor.role:
            modules += possible_linears(tensor)
    return modules


def possible_linears(tensor: OpaqueTensor) -> list[str]:
    """List the linears whose weights a tensor may contain, by the names of their modules in
    readers: one, or those of all experts.
    """
    if may_be_linear(tensor):
        return [tensor.module]
    if len(tensor.shape) != 3 or tensor.dtype not in _FLOAT_TYPES:
        return []
    stacked = _STACKED.fullmatch(tensor.name)
    if stacked is None:
        return []
    linears = _SIDE_BY_SIDE.get(stacked[2], (stacked[2],))
    modules: list[str] = []
    for expert in range(tensor.shape[0]):
        for linear in linears:
            modules.append(f"{stacked[1]}.{expert}.{linear}")
    return modules


def is_extra_layer(name: str, raw: Mapping[str, Any]) -> bool:
    """Return whether a tensor is in a layer that predicts further tokens: by its name, or beyond a
    config.json's layers.
    """
    if any(part.startswith(_EXTRA) for part in name.split(".")):
        return True
    return layer_beyond(name, raw) is not None


def layer_beyond(name: str, raw: Mapping[str, Any]) -> int | None:
    """Read the number of the layer that a tensor is in, if it is beyond those that a config.json
    counts.
    """
    count = _num_layers(raw)
    parts = name.split(".")
    if not count or "layers" not in parts[:-1]:
        return None
    place = parts.index("layers")
    # The config counts the layers of the language model, not those of a vision tower.
    if any(part not in _BEFORE_LAYERS for part in parts[:place]):
        return None
    number = parts[place + 1]
    if not number.isdecimal() or len(number) > _MAX_DIGITS:
        return None
    layer = int(number)
    return layer if layer >= count else None


def _num_layers(raw: Mapping[str, Any]) -> int:
    """Read the number of layers from a config.json; 0 if it does not state it."""
    return _size(_language(raw), "num_hidden_layers", "n_layer", "num_layers")


def list_ignored_extra_layers(tensors: Sequence[OpaqueTensor], raw: Mapping[str, Any]) -> list[str]:
    """List the entries by which compressed-tensors leaves the layers that predict further tokens
    unquantized: the names of their linears, and patterns.

    Runtimes build some of these modules under names that no tensor has: q, k and v as one linear,
    all experts as one module (vllm#53387, sglang#35797). Unless they are ``mtp.layers``, vLLM
    counts such layers on from those of the model, and SGLang has ``model.decoder`` for one.
    """
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    layers: dict[int, None] = {}
    for tensor in tensors:
        if tensor.role or not is_extra_layer(tensor.name, raw):
            continue
        linears = possible_linears(tensor)
        if not linears:
            continue
        names |= dict.fromkeys(linears)
        layer = layer_beyond(tensor.name, raw)
        if layer is not None:
            layers[layer] = None
            continue
        parts = tensor.name.split(".")
        place = next(index for index, part in enumerate(parts) if part.startswith(_EXTRA))
        patterns[f"re:^{re.escape('.'.join(parts[: place + 1]))}.*"] = None
        # Except for `mtp.layers`, the numbers continue those of the model's layers.
        if place > 0 or parts[1].isdecimal():
            number = next((int(part) for part in parts[place:] if part.isdecimal()), 0)
            layers[_num_layers(raw) + number] = None
    prefixes = "|".join(sorted(_BEFORE_LAYERS))
    for layer in layers:
        patterns[rf"re:^(({prefixes})\.)*layers\.{layer}\..*"] = None
    if layers and not any(tensor.name.startswith("model.decoder.") for tensor in tensors):
        patterns[r"re:^model\.decoder\..*"] = None
    # A class may have more layers than its config counts, so a pattern that matches a quantized
    # module is left out.
    quantizable = [tensor.module for tensor in tensors if tensor.role]
    entries = [*names]
    for pattern in patterns:
        expression = pattern.removeprefix("re:")
        if not any(re.match(expression, module) for module in quantizable):
            entries.append(pattern)
    return entries


def is_table(name: str) -> bool:
    """Return whether a tensor is an embedding, a norm, a convolution or a table of positions, by
    its name.
    """
    # Parts further up say what a module belongs to, not what the tensor is.
    last_parts = name.removesuffix(".weight").split(".")[-2:]
    return _TABLE.search(".".join(last_parts)) is not None


def is_tied(raw: Mapping[str, Any]) -> bool:
    """Return whether the output head is the embedding, by a config.json."""
    return any(part.get("tie_word_embeddings") is True for part in (raw, _language(raw)))


def with_dtype(raw: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Copy a config.json with another float type, in all places that state one."""
    changed: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            changed[key] = with_dtype(value, dtype)
        elif key in _DTYPE_KEYS and isinstance(value, str):
            changed[key] = dtype
        else:
            changed[key] = value
    return changed


def _language(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the settings of the language model, which may be the whole config.json."""
    for key in _LANGUAGE:
        settings = raw.get(key)
        if isinstance(settings, dict):
            return settings
    return raw


def _architecture(raw: Mapping[str, Any]) -> str:
    """Read the model's architecture from a config.json."""
    names = [raw.get("model_type")]
    classes = raw.get("architectures")
    if isinstance(classes, list):
        names += classes
    for name in names:
        if isinstance(name, str) and name:
            return name
    return "unknown"


def _cut_block_name(name: str) -> str | None:
    """Cut the name of a tensor's block out of its name: up to the first number."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return None


def _size(values: Mapping[str, Any], *keys: str) -> int:
    """Return the first size that exists; 0 if there is none."""
    for key in keys:
        size = values.get(key)
        # Such a model is not run, so an invalid size is ignored instead of refused.
        if type(size) is int and 0 <= size <= Limits.context:
            return size
    return 0


def _dtype(
    raw: Mapping[str, Any],
    text: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
) -> str:
    """Read the float type from a config.json; without it, choose that of most elements."""
    for values in (raw, text):
        for key in _DTYPE_KEYS:
            dtype_name = values.get(key)
            if not isinstance(dtype_name, str):
                continue
            dtype_name = dtype_name.removeprefix("torch.")
            if dtype_name in _FLOAT_TYPES:
                return dtype_name
    counts: Counter[str] = Counter()
    for shape, dtype in tensors.values():
        if dtype in _FLOAT_TYPES:
            counts[dtype] += math.prod(shape)
    return max(_FLOAT_TYPES, key=lambda dtype: counts[dtype])


def recurrent_modules(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Find the names of all modules that carry a state from token to token: linear attention,
    state spaces and short convolutions.

    Rounding errors there accumulate in the state: published models with 4 bits in it write garbage
    (openvinotoolkit/nncf#4217, huggingface/optimum-intel#1722). `shapes` are those of all tensors,
    in any layout.
    """
    modules = set()
    for name, shape in shapes.items():
        parts = name.split(".")
        # The tensor, and its module.
        for index in range(max(0, len(parts) - 2), len(parts)):
            if parts[index] in _STATE_MARKS:
                modules.add(".".join(parts[:index]))
        for index, part in enumerate(parts):
            if part in _STATE_NAMES and any(map(str.isdecimal, parts[:index])):
                modules.add(".".join(parts[: index + 1]))
        short = len(shape) == 3 and shape[1:] in _SHORT_FILTERS and parts[-1] == "weight"
        if short and len(parts) > 2 and "conv" in parts[-2]:
            *parents, parent = parts[:-2]
            # The module with the convolution, unless this is the whole block.
            if any(map(str.isdecimal, parents)) and not parent.isdecimal():
                modules.add(".".join(parts[:-2]))
    return frozenset(modules - {""})


def may_change_state(module: str) -> bool:
    """Return whether a linear of such a module may change its state: all but the output projection,
    whose input is read from the state, so that its errors do not reach the next token.
    """
    return module.rpartition(".")[2] not in _READ_OUT


def is_within(module: str, modules: Set[str]) -> bool:
    """Return whether a module is one of some modules, or inside one."""
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return bool(module)
