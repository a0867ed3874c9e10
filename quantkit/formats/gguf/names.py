"""The names of a model and its tensors in llama.cpp's files, for reading and writing."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import EXPERT_ROLES, DiskTensor, Place, build_disk_tensors
from quantkit.architectures.families import FAMILIES
from quantkit.architectures.families.family import (
    Family,
    GgufArchitecture,
    StackedExperts,
    StoredPart,
)
from quantkit.architectures.names import GGUF_NAMES
from quantkit.architectures.topology import Parameter
from quantkit.errors import UnsupportedError

ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_SHORT = "rope_factors_short.weight"
"""Factors that divide the frequency of each rotary pair: always, beyond the original context,
within it.
"""
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)

_QKV = "attention.qkv"
_GATE_UP = "blk.{layer}.ffn_gate_up_exps"
_GATE_UP_ROLES = ("expert.gate", "expert.up")

# Of Mamba-2: the decay of each head's state, and the weight of what skips the state.
_HEAD_NUMBERS = (".ssm_a", ".ssm_d")


def has_merged_qkv(config: ModelConfig, names: Collection[str]) -> bool:
    """Return whether a file with tensors of these names stores queries, keys and values of
    attention as one tensor.
    """
    for number, layer in enumerate(config.layers):
        if layer.mixer == "attention":
            return f"{GGUF_NAMES[_QKV].format(layer=number)}.weight" in names
    return False


@functools.cache
def sharing_families() -> dict[str, list[Family]]:
    """Group the families that are read and written by the name of their architecture in
    llama.cpp's files.
    """
    families_by_architecture: dict[str, list[Family]] = {}
    for family in FAMILIES.values():
        for name in family.gguf_architectures:
            families_by_architecture.setdefault(name, []).append(family)
    return families_by_architecture


def gguf_architecture(config: ModelConfig) -> GgufArchitecture:
    """Look up the architecture of a model in llama.cpp.

    Raises:
        UnsupportedError: if GGUF has no such model, or quantkit does not write it.
    """
    family = FAMILIES.get(config.architecture)
    if family is None or family.gguf is None or config.tensors is not None:
        model_types: list[str] = []
        for sharing in sharing_families().values():
            model_types += [supported_family.model_type for supported_family in sharing]
        model_types = list(dict.fromkeys(model_types))
        raise UnsupportedError(
            "this architecture cannot be written as GGUF",
            found=config.architecture,
            expected=", ".join(sorted(model_types)),
        )
    if config.experts is not None and family.gguf_sparse is not None:
        return family.gguf_sparse
    return family.gguf


def has_merged_experts(names: Collection[str]) -> bool:
    """Return whether a file with tensors of these names stores gate and up of experts as one."""
    ending = _GATE_UP.removeprefix("blk.{layer}")
    return any(name.endswith(f"{ending}.weight") for name in names)


def gguf_tensors(
    config: ModelConfig, *, merged_qkv: bool = False, stored: Collection[str] = ()
) -> list[DiskTensor]:
    """List the tensors of a model's file in the order of writing, with the canonical ones that
    each of them stores.

    A tensor of all experts is [E, O, I]; a norm's weight is `get_norm_offset` larger than the
    canonical one. Raises `UnsupportedError`, see `gguf_architecture`.

    Args:
        merged_qkv: whether queries, keys and values are one tensor, as llama.cpp accepts of every
            architecture.
        stored: the names of an existing file's tensors, which may be older ones.
    """
    architecture = gguf_architecture(config)
    if merged_qkv:
        architecture = replace(architecture, fused=(*architecture.fused, _QKV))
    parameter_by_name: dict[str, Parameter] = {}
    merged_experts = has_merged_experts(stored)

    def locate_parameter(parameter: Parameter) -> tuple[str, StackedExperts | None]:
        if merged_experts and parameter.role in _GATE_UP_ROLES:
            name = f"{_GATE_UP.format(layer=parameter.layer)}.weight"
            stacked: StackedExperts | None = StackedExperts(_GATE_UP, _GATE_UP_ROLES)
        else:
            name = _name(architecture, parameter)
            stacked = _find_expert_stack(parameter)
        parameter_by_name[name] = parameter
        return name, stacked

    whole_tensors = build_disk_tensors(
        config, locate_parameter, interleaved=architecture.interleaved_rotary
    )
    parts_by_role = architecture.parts(config)
    disk_tensors = []
    for tensor in whole_tensors:
        parameter = parameter_by_name[tensor.name]
        older_module = architecture.older_names.get(parameter.role, "")
        older_name = f"{older_module.format(layer=parameter.layer)}.{parameter.leaf}"
        if older_name in stored:
            disk_tensors.append(replace(tensor, name=older_name))
            continue
        disk_tensors += _divide(tensor, parameter, parts_by_role.get(parameter.role, ()))
    # llama.cpp requires a head of these architectures, so a tied embedding is written twice.
    if config.tied_embeddings and architecture.tied is False:
        embedding = disk_tensors[0]
        place = Place(embedding.parts[0], embedding.shape)
        disk_tensors.append(DiskTensor("output.weight", embedding.shape, (place,)))
    return disk_tensors


def is_unread(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is one that a file may have and llama.cpp does not compute with: of
    the keys and values of a layer that takes those of another one.
    """
    for number, layer in enumerate(config.layers):
        if not layer.shares_kv:
            continue
        for role in ("attention.k", "attention.v", "attention.k_norm"):
            if name == f"{GGUF_NAMES[role].format(layer=number)}.weight":
                return True
    return False


def keeps_float32(tensor: DiskTensor) -> bool:
    """Return whether llama.cpp wants a tensor in float32 whatever the model's type: norms, biases,
    routers, filters of convolutions.
    """
    # Routers are `ffn_gate_inp`, and `ffn_gate_inp_shexp` for shared experts.
    return len(tensor.shape) == 1 or tensor.name.endswith(
        (
            ".bias",
            "_inp.weight",
            "_inp_shexp.weight",
            "shortconv.conv.weight",
            "ssm_conv1d.weight",
        )
    )


def get_stored_shape(config: ModelConfig, tensor: DiskTensor) -> tuple[int, ...]:
    """Return the shape in a file: filters of convolutions [C, 1, K] are matrices, and so are the
    numbers of the heads of Mamba-2, [H, 1], and its norm, a row for each group.
    """
    if tensor.stacked is None and len(tensor.shape) == 3 and tensor.shape[1] == 1:
        return tensor.shape[0], tensor.shape[2]
    if config.mamba2 is not None:
        if tensor.name.endswith(_HEAD_NUMBERS):
            return *tensor.shape, 1
        if tensor.name.endswith(".ssm_norm.weight"):
            return config.mamba2.groups, tensor.shape[0] // config.mamba2.groups
    return tensor.shape


def get_norm_offset(config: ModelConfig, tensor: DiskTensor) -> float:
    """Return the offset that a file adds to the weight of a norm; 0 for all other tensors."""
    # The norm of a delta rule has none in any family.
    if tensor.name.endswith("_norm.weight") and not tensor.name.endswith(".ssm_norm.weight"):
        return config.norm_offset
    return 0.0


def stores_decay_rates(tensor: DiskTensor) -> bool:
    """Return whether a tensor has the rates at which states decay, less than 0, while the canonical
    one has the logarithms of their sizes.
    """
    return tensor.name.endswith(".ssm_a")


def _divide(
    tensor: DiskTensor, parameter: Parameter, parts: Sequence[StoredPart]
) -> list[DiskTensor]:
    """Divide a tensor with one canonical one, or rearrange it, as an architecture stores it."""
    divided: list[DiskTensor] = []
    for part in parts:
        name = tensor.name
        if part.module is not None:
            name = f"{part.module.format(layer=parameter.layer)}.{parameter.leaf}"
        place = replace(tensor.places[0], row_ranges=part.rows, column_ranges=part.columns)
        shape = tensor.shape
        if part.rows is not None:
            shape = (sum(stop - start for start, stop in part.rows), *shape[1:])
        divided.append(replace(tensor, name=name, shape=shape, places=(place,)))
    return divided or [tensor]


def _name(architecture: GgufArchitecture, parameter: Parameter) -> str:
    linear = parameter.linear
    if linear is not None and linear.fused in architecture.fused:
        role = linear.fused
    else:
        role = parameter.role
    assert role is not None
    template = architecture.names.get(role) or GGUF_NAMES.get(role)
    if template is None:
        raise UnsupportedError(
            "this architecture cannot be written as GGUF", found=f"'{parameter.name}'"
        )
    name = template.format(layer=parameter.layer)
    if parameter.leaf:
        name = f"{name}.{parameter.leaf}"
    return name


def _find_expert_stack(parameter: Parameter) -> StackedExperts | None:
    """Describe how the tensor with a parameter stacks all experts, if it does."""
    if parameter.role in EXPERT_ROLES:
        return StackedExperts(GGUF_NAMES[parameter.role], (parameter.role,))
    return None
