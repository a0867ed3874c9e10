"""Models of which nothing is known but their tensors: carried through, and their linears rounded, never run.

A linear layer is told by transformers where it knows the model's class, else by its name: see `named_roles`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.architectures.config import MAX_CONTEXT, LayerConfig, ModelConfig, OpaqueTensor
from quantkit.architectures.recurrent import is_within, recurrent_modules
from quantkit.architectures.rope import RopeConfig

LINEARS = frozenset(
    {
        # attention
        "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "W_pack", "Wqkv", "wq", "wk", "wv", "wo",
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "query_key_value", "query", "key", "value",
        "q_lin", "k_lin", "v_lin", "out_lin", "qkv", "q", "k", "v", "o",
        # feed-forward, those of experts among them
        "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2", "fc_in", "fc_out",
        "dense", "dense_h_to_4h", "dense_4h_to_h", "wi", "wi_0", "wi_1", "lin1", "lin2", "linear_fc1", "linear_fc2",
        # states
        "in_proj", "x_proj",
    }
)  # fmt: skip
"""The last parts of names that linear layers have, where transformers does not say which are."""
HEADS = frozenset({"lm_head", "embed_out", "output_projection", "proj_out", "score", "classifier", "decoder"})
ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "wg", "gate_network"})
_ROUTING = ("gate", "router", "classifier")  # in names of as many outputs as there are experts
NEVER = frozenset({"dt_proj"})  # read by other means than through its module
_TOWER = re.compile(r"(vision|visual|vit|image|audio|multi_?modal|mm)(_.*)?|.*_(vision|audio)")
_TABLE = re.compile(
    r"emb|(^|\.)(wte|wpe|shared)$|norm|(^|\.)ln_|conv|position|relative|rotary|patch|bias$", re.IGNORECASE
)
_EXTRA = frozenset({"mtp", "mtp_layers", "mtp_block", "nextn", "nextn_layers"})
_BEFORE_LAYERS = frozenset({"model", "language_model", "text_model", "transformer", "backbone"})
_LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config")
_FLOAT_TYPES = ("float32", "float16", "bfloat16")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts", "n_experts",
)  # fmt: skip


def opaque_config(raw: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> ModelConfig:
    """A model as its tensors tell it; of its config.json no more is taken than `inspect` shows, and its float type.

    Args:
        raw: the config.json.
        tensors: shape and type of each by its name, in the order of the output.
    """
    text = _language(raw)
    layers: dict[str, int] = {}
    found = []
    for name, (shape, dtype) in tensors.items():
        block = _block(name)
        layer = None if block is None else layers.setdefault(block, len(layers))
        found.append(OpaqueTensor(name, shape, str(dtype), layer=layer))
    heads = _whole(text, "num_attention_heads", "n_head", "num_heads")
    hidden = _whole(text, "hidden_size", "d_model", "n_embd")
    return ModelConfig(
        architecture=_architecture(raw),
        vocab_size=_whole(text, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_whole(text, "intermediate_size", "d_ff", "n_inner"),
        layers=(LayerConfig(),) * max(1, len(layers)),
        num_heads=heads,
        num_kv_heads=_whole(text, "num_key_value_heads") or heads,
        head_dim=_whole(text, "head_dim") or (hidden // heads if heads else 0),
        norm_eps=0.0,
        rope=RopeConfig(),
        max_context=_whole(text, "max_position_embeddings", "n_positions", "max_target_positions"),
        tied_embeddings=False,  # each tensor that is there stands for itself
        dtype=_dtype(raw, text, tensors),
        bos_token_id=None,
        eos_token_ids=(),
        tensors=tuple(found),
    )


def with_roles(
    config: ModelConfig, roles: Mapping[str, tuple[str, str | None]], unstored: tuple[str, ...] | None = None
) -> ModelConfig:  # fmt: skip
    """The same model, told which of its tensors are weights of linears.

    Args:
        roles: role and alias, as `OpaqueTensor` has them, by tensor name.
        unstored: see `ModelConfig`.
    """
    assert config.tensors is not None
    told = (
        replace(tensor, role=roles[tensor.name][0], alias=roles[tensor.name][1]) if tensor.name in roles else tensor
        for tensor in config.tensors
    )
    return replace(config, tensors=tuple(told), unstored=unstored)


@dataclass(frozen=True)
class Hints:
    """What a model's config.json and the names of its tensors tell of its linears.

    Attributes:
        experts: how many experts the model's mixtures have.
        tied: whether an output head is the embedding over again.
        sided: whether the model has parts besides that for language.
        recurrent: the modules that carry a state, by any name that they have.
    """

    experts: frozenset[int]
    tied: bool
    sided: bool
    recurrent: frozenset[str]

    @classmethod
    def of(cls, raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Hints:
        """
        Args:
            raw: the config.json.
            shapes: of all tensors, by name.
        """
        return cls(_expert_counts(raw), is_tied(raw), _has_language_part(raw), recurrent_modules(shapes))

    def is_recurrent(self, module: str) -> bool:
        """Whether a linear is in a module that carries a state; parts for pictures and sound see all at once."""
        return is_within(module, self.recurrent) and not self._is_tower(module)

    def role(self, tensor: OpaqueTensor, module: str) -> str | None:
        """The role of a linear's weight where more is known of it than that it is one; None where it is not.

        Args:
            module: the linear's, on disk or as readers call it.
        """
        *parents, last = module.split(".")
        routes = tensor.shape[0] in self.experts and last not in LINEARS and any(word in last for word in _ROUTING)
        if last in ROUTERS or last in NEVER or routes or not ROUTERS.isdisjoint(parents):
            return "float"
        if last == "lm_head":
            return "float" if self.tied else "head"
        if self._is_tower(module):
            return "tower"
        return "recurrent" if self.is_recurrent(module) or self.is_recurrent(tensor.module) else None

    def _is_tower(self, module: str) -> bool:
        return self.sided and any(_TOWER.fullmatch(part) for part in module.split("."))


def named_roles(raw: Mapping[str, Any], tensors: Sequence[OpaqueTensor]) -> dict[str, tuple[str, str | None]]:
    """The roles of tensors as their names alone tell them: matrices whose module is called as in `LINEARS`, and those
    in modules that carry a state."""
    found: dict[str, tuple[str, str | None]] = {}
    hints = Hints.of(raw, {tensor.name: tensor.shape for tensor in tensors})
    for tensor in tensors:
        if not may_be_linear(tensor):
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
            found[tensor.name] = (role, None)
    return found


def may_be_linear(tensor: OpaqueTensor) -> bool:
    """Whether a tensor has the shape, type and name that the weight of a linear has."""
    matrix = len(tensor.shape) == 2 and 0 not in tensor.shape and tensor.name.endswith(".weight")
    return matrix and tensor.dtype in _FLOAT_TYPES


def carried_modules(config: ModelConfig) -> list[str]:
    """The modules whose weights are carried though they may be those of linears that only some readers know, such as
    further layers that predict tokens; none of a model that runs."""
    return [tensor.module for tensor in config.tensors or () if not tensor.role and may_be_linear(tensor)]


def is_extra_layer(name: str, raw: Mapping[str, Any]) -> bool:
    """Whether a tensor is in a layer that predicts further tokens: beyond those that a config.json counts, or so
    named."""
    text, parts = _language(raw), name.split(".")
    if not _EXTRA.isdisjoint(parts):
        return True
    count = _whole(text, "num_hidden_layers", "n_layer", "num_layers")
    at = parts.index("layers") + 1 if "layers" in parts[:-1] else 0
    language = all(part in _BEFORE_LAYERS for part in parts[: max(0, at - 1)])
    return bool(count and at and language and parts[at].isdecimal() and int(parts[at]) >= count)


def is_table(name: str) -> bool:
    """Whether a tensor's name is that of an embedding, a norm, a convolution or a table of positions."""
    return _TABLE.search(".".join(name.removesuffix(".weight").split(".")[-2:])) is not None


def _expert_counts(raw: Mapping[str, Any]) -> frozenset[int]:
    """How many experts a config.json says that mixtures have."""
    values = (part.get(key) for part in (raw, _language(raw)) for key in _EXPERTS)
    return frozenset(one for one in values if type(one) is int and one > 1)


def is_tied(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the output head is the embedding."""
    return any(part.get("tie_word_embeddings") is True for part in (raw, _language(raw)))


def _has_language_part(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json sets the part for language apart from others."""
    return any(isinstance(raw.get(key), dict) for key in (*_LANGUAGE, "vision_config", "audio_config"))


def with_dtype(raw: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json of the same model in another float type, wherever it names one."""
    found: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            found[key] = with_dtype(value, dtype)
        else:
            found[key] = dtype if key in _DTYPE_KEYS and isinstance(value, str) else value
    return found


def _language(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the part for language, which may be all of it."""
    return next((raw[key] for key in _LANGUAGE if isinstance(raw.get(key), dict)), raw)


def _architecture(raw: Mapping[str, Any]) -> str:
    """What a config.json calls the model."""
    classes = raw.get("architectures")
    names = [raw.get("model_type"), *(classes if isinstance(classes, list) else [])]
    return next((name for name in names if isinstance(name, str) and name), "unknown")


def _block(name: str) -> str | None:
    """The name of the block that a tensor is in: up to its first number."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return None if place is None else ".".join(parts[: place + 1])


def _whole(values: Mapping[str, Any], *keys: str) -> int:
    """The first of some sizes that is there; 0 if none is."""
    found = (values.get(key) for key in keys)
    return next((one for one in found if type(one) is int and 0 <= one <= MAX_CONTEXT), 0)


def _dtype(
    raw: Mapping[str, Any], text: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> str:  # fmt: skip
    """The float type that a config.json names; else the one that most numbers have."""
    for values in (raw, text):
        for key in _DTYPE_KEYS:
            named = values.get(key)
            if isinstance(named, str) and named.removeprefix("torch.") in _FLOAT_TYPES:
                return named.removeprefix("torch.")
    counts: Counter[str] = Counter()
    for shape, dtype in tensors.values():
        counts[dtype] += math.prod(shape) if dtype in _FLOAT_TYPES else 0
    return max(_FLOAT_TYPES, key=lambda dtype: counts[dtype])
