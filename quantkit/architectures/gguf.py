"""What llama.cpp's files call a model and its tensors: one table for reading and writing.

Sources: llama.cpp's converter (what it writes of each family) and its loader (what it does with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, Place, disk_tensor, rotary_order
from quantkit.architectures.families.family import StackedExperts
from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import UnsupportedError

_BLOCK = "blk.{layer}."
NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention.norm": _BLOCK + "attn_norm",
    "attention.q": _BLOCK + "attn_q",
    "attention.k": _BLOCK + "attn_k",
    "attention.v": _BLOCK + "attn_v",
    "attention.qkv": _BLOCK + "attn_qkv",
    "attention.output": _BLOCK + "attn_output",
    "attention.q_norm": _BLOCK + "attn_q_norm",
    "attention.k_norm": _BLOCK + "attn_k_norm",
    "attention.output_norm": _BLOCK + "post_attention_norm",
    "mlp.norm": _BLOCK + "ffn_norm",
    "mlp.gate": _BLOCK + "ffn_gate",
    "mlp.up": _BLOCK + "ffn_up",
    "mlp.gate_up": _BLOCK + "ffn_up",
    "mlp.down": _BLOCK + "ffn_down",
    "mlp.output_norm": _BLOCK + "post_ffw_norm",
    "router": _BLOCK + "ffn_gate_inp",
    "expert.gate": _BLOCK + "ffn_gate_exps",
    "expert.up": _BLOCK + "ffn_up_exps",
    "expert.down": _BLOCK + "ffn_down_exps",
    "shared_expert.router": _BLOCK + "ffn_gate_inp_shexp",
    "shared_expert.gate": _BLOCK + "ffn_gate_shexp",
    "shared_expert.up": _BLOCK + "ffn_up_shexp",
    "shared_expert.down": _BLOCK + "ffn_down_shexp",
}
"""Modules by role."""

ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""By what each pair of dimensions turns more slowly: always, in texts longer than the original context, in others."""
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)

_EXPERTS = ("expert.gate", "expert.up", "expert.down")


@dataclass(frozen=True)
class GgufArchitecture:
    """A model as llama.cpp knows it, by ``general.architecture``.

    Attributes:
        families: that it is, by their ``model_type``; which of them a file is follows from its keys.
        keys: of its own that it may have beside those of all.
        interleaved_rotary: whether the two rows of a pair that turns lie side by side.
        fused: roles of linears that are one tensor.
        windows: how many layers it takes for one period of windows, of which the last sees everything, unless a file
            says otherwise; None where llama.cpp lets all layers see everything, whatever a file says.
        biases: which linears may have one: ``qkv``, ``output`` (of attention), ``mlp``.
        rope_freqs: whether it takes frequencies that are slowed down one by one.
        long_rope: whether it takes those of LongRoPE.
        partial_rotary: whether some dimensions of a head may stay as they are.
        normalized: whether the shares of a token's experts are scaled to add up to 1; None where it has no experts.
        tied: whether the head is the embedding: True always, False never, None where a file has no head.
        full_width: whether its heads must be as wide as the model together.
        wide_scale_layers: a number of layers with which attention is scaled by the hidden size over the heads.
    """

    name: str
    families: tuple[str, ...]
    keys: tuple[str, ...] = ()
    interleaved_rotary: bool = False
    fused: tuple[str, ...] = ()
    windows: int | None = None
    biases: tuple[str, ...] = ()
    rope_freqs: bool = False
    long_rope: bool = False
    partial_rotary: bool = False
    normalized: bool | None = None
    tied: bool | None = None
    full_width: bool = False
    wide_scale_layers: int | None = None


_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
_ALL = ("qkv", "output", "mlp")
_FOUND = (
    GgufArchitecture(
        "llama", ("llama", "mistral", "mixtral"), keys=_EXPERT_KEYS[:2], interleaved_rotary=True, biases=_ALL,
        rope_freqs=True, long_rope=True, normalized=True,
    ),
    GgufArchitecture("qwen2", ("qwen2",), biases=("qkv",)),
    GgufArchitecture("qwen3", ("qwen3",)),
    GgufArchitecture(
        "qwen2moe", ("qwen2_moe",), keys=(*_EXPERT_KEYS, "expert_shared_feed_forward_length"), biases=("qkv",),
        normalized=False, tied=False,
    ),
    GgufArchitecture("qwen3moe", ("qwen3_moe",), keys=_EXPERT_KEYS, normalized=True),
    GgufArchitecture(
        "olmoe", ("olmoe",), keys=_EXPERT_KEYS[:2], normalized=False, tied=False, full_width=True
    ),
    GgufArchitecture("gemma", ("gemma",), tied=True),
    GgufArchitecture("gemma2", ("gemma2",), keys=_SOFTCAPS, windows=2, tied=True, wide_scale_layers=46),
    GgufArchitecture(
        "gemma3", ("gemma3_text",), keys=("rope.freq_base_swa", _SOFTCAPS[1]), windows=6, wide_scale_layers=62
    ),
    GgufArchitecture(
        "phi3", ("phi3",), fused=("attention.qkv", "mlp.gate_up"), long_rope=True, partial_rotary=True,
        full_width=True,
    ),
    GgufArchitecture("olmo2", ("olmo2", "olmo3"), keys=("rope.freq_base_swa",), windows=4, tied=False, full_width=True),
    GgufArchitecture(
        "granite", ("granite",), keys=_SCALES, interleaved_rotary=True, biases=_ALL, rope_freqs=True, long_rope=True
    ),
    GgufArchitecture("smollm3", ("smollm3",), interleaved_rotary=True),
)  # fmt: skip
ARCHITECTURES: Mapping[str, GgufArchitecture] = {found.name: found for found in _FOUND}
"""Those that are read and written, by their names in files."""
_BY_FAMILY = {family: found for found in _FOUND for family in found.families}


def gguf_architecture(config: ModelConfig) -> GgufArchitecture:
    """What llama.cpp takes a model for.

    Raises:
        UnsupportedError: if GGUF has no such model, or quantkit does not write it.
    """
    found = _BY_FAMILY.get(config.architecture)
    if found is None or config.tensors is not None:
        raise UnsupportedError(
            "the architecture is not written as GGUF", found=config.architecture, expected=", ".join(sorted(_BY_FAMILY))
        )
    return found


def gguf_tensors(config: ModelConfig) -> list[DiskTensor]:
    """The tensors of a model's file, in the order in which they are written, with the canonical ones that each is
    made of. One of all experts is [E, O, I]; a norm's weight holds `stored_offset` more than the canonical one.

    Raises:
        UnsupportedError: see `gguf_architecture`.
    """
    architecture = gguf_architecture(config)
    orders = [
        rotary_order(config.head_dim, config.rope_of(layer).rotary_dim, interleaved=architecture.interleaved_rotary)
        for layer in range(config.num_layers)
    ]
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters(config):
        groups.setdefault(_name(architecture, parameter), []).append(parameter)
    found = [
        disk_tensor(name, _stacked(parts[0]), parts, None if parts[0].layer is None else orders[parts[0].layer])
        for name, parts in groups.items()
    ]
    if config.tied_embeddings and architecture.tied is False:
        embedding = found[0]
        found.append(DiskTensor("output.weight", embedding.shape, (Place(embedding.parts[0], embedding.shape),)))
    return found


def keeps_float32(tensor: DiskTensor) -> bool:
    """Whether a tensor is in float32 whatever the model's type, as llama.cpp wants it: norms, biases, routers."""
    return len(tensor.shape) == 1 or tensor.name.endswith((".bias", "_inp.weight", "_inp_shexp.weight"))


def stored_offset(config: ModelConfig, tensor: DiskTensor) -> float:
    """What the weight of a norm has been added in a file; 0 for all other tensors."""
    return config.norm_offset if tensor.name.endswith("_norm.weight") else 0.0


def _name(architecture: GgufArchitecture, parameter: Parameter) -> str:
    linear = parameter.linear
    role = linear.fused if linear is not None and linear.fused in architecture.fused else parameter.role
    assert role is not None
    if role not in NAMES:
        raise UnsupportedError("the architecture is not written as GGUF", found=f"'{parameter.name}'")
    return f"{NAMES[role].format(layer=parameter.layer)}.{parameter.leaf}"


def _stacked(parameter: Parameter) -> StackedExperts | None:
    """How the tensor that a parameter is part of holds experts, if it does."""
    return StackedExperts(NAMES[parameter.role], (parameter.role,)) if parameter.role in _EXPERTS else None
