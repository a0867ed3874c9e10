"""GGUF files of tiny models of transformers, made as llama.cpp's converter makes them: names by the
gguf package's own table, and its writer and quantizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Types = Mapping[str, gguf.GGMLQuantizationType]
F32 = gguf.GGMLQuantizationType.F32
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "bamba": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
}
_SCALES = {"router.scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}
# Those without a leaf of their own in transformers.
_LEAVES = {
    "A_log": "",
    "dt_bias": ".bias",
    "expert_bias": ".bias",
}
_FLOATS = (".bias", "conv1d.weight", ".ssm_a", ".ssm_d", ".ssm_norm.weight")
_TABLE_NAMES = {"dt_bias": "dt_proj"}
_PERMUTED = {
    gguf.MODEL_ARCH.LLAMA,
    gguf.MODEL_ARCH.GRANITE,
    gguf.MODEL_ARCH.SMOLLM3,
    gguf.MODEL_ARCH.MISTRAL3,
    gguf.MODEL_ARCH.GRANITE_HYBRID,
    gguf.MODEL_ARCH.NEMOTRON_H,
    gguf.MODEL_ARCH.NEMOTRON_H_MOE,
}


def tensors_of(model: Any) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors that the converter makes of a model of transformers."""
    config = model.config
    arch = _ARCHITECTURES[config.model_type]
    if arch is gguf.MODEL_ARCH.NEMOTRON_H and "moe" in config.layers_block_type:
        arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("in_proj_qkvz.weight"):
            block = name.replace("model.layers.", "blk.").partition(".linear_attn.")[0]
            channels, gates = _by_kind(value.detach().float(), config)
            found[f"{block}.attn_qkv.weight"] = channels
            found[f"{block}.attn_gate.weight"] = gates
            continue
        stored, value = _on_disk(name, value.detach().float(), config)
        for own, part in _apart(stored, value, config.model_type).items():
            stem, _, leaf = own.rpartition(".")
            if leaf in _LEAVES:
                mapped = names.get_name(f"{stem}.{_TABLE_NAMES.get(leaf, leaf)}")
                found[f"{mapped}{_LEAVES[leaf]}"] = _changed(part, own, arch, config)
                continue
            leaf = leaf if leaf in ("weight", "bias") else "weight"
            mapped = names.get_name(own if leaf not in own else stem)
            for ending, tensor in _SCALES.items():
                if own.endswith(ending):
                    mapped = f"blk.{own.split('.')[2]}.{tensor}"
                    leaf = "scale"
            assert mapped is not None, own
            if not mapped.endswith((".ssm_a", ".ssm_d")):
                mapped = f"{mapped}.{leaf}"
            found[mapped] = _changed(part, own, arch, config)
    if config.model_type == "gemma4_text":
        found["rope_freqs.weight"] = _unrotated(config)
    return {name: value.contiguous().numpy() for name, value in found.items()}


def _unrotated(config: Any) -> Tensor:
    """The factors of frequencies, which leave most dimensions of Gemma 4 as they are."""
    full = next(
        number for number, kind in enumerate(config.layer_types) if kind == "full_attention"
    )
    pairs = config.per_layer_config[full].head_dim // 2
    part = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    factors = torch.full((pairs,), 1e30)
    factors[: int(pairs * part)] = 1
    return factors


def _on_disk(name: str, value: Tensor, config: Any) -> tuple[str, Tensor]:
    """A tensor of a hybrid or of Gemma 4 as the converter finds it, with the name that it looks
    up.
    """
    if config.model_type == "gemma4_text":
        suffixed = name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj"))
        return f"{name}.weight" if suffixed else name, value
    if config.model_type not in ("granitemoehybrid", "bamba", "nemotron_h"):
        return name, value
    if config.model_type == "nemotron_h":
        renamed = name.replace("model.", "backbone.", 1).replace("dt_bias", "dt.bias")
        renamed = renamed.replace("e_score_correction_bias", "e_score_correction.bias")
        if ".experts." in renamed:
            renamed = renamed.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        return renamed, value
    renamed = name.replace("dt_bias", "dt_proj.bias").replace("moe.router", "moe.router.layer")
    # The feed-forward of every token, which is the only one of a dense model.
    stem = "mlp.shared_expert." if getattr(config, "num_local_experts", 0) else "mlp."
    for shared, own in (("input_linear", "gate_up_proj"), ("output_linear", "down_proj")):
        renamed = renamed.replace(f"shared_mlp.{shared}", f"{stem}{own}")
    renamed = renamed.replace("block_sparse_moe.experts", "mlp.experts")
    return renamed, value


def _apart(name: str, value: Tensor, kind: str) -> dict[str, Tensor]:
    """Experts as the converter has them: gate and up apart."""
    # Those of gpt-oss have gate and up in turn, and those of Llama 4 inputs before outputs as well.
    interleaved = kind == "gpt_oss"
    stem = name.removesuffix(".weight")
    base, experts, role = stem.rpartition("experts.")
    if kind == "granitemoehybrid" and name.endswith("gate_up_proj.weight"):
        halves = zip(("gate_proj", "up_proj"), value.chunk(2), strict=True)
        return {name.replace("gate_up_proj", part): half for part, half in halves}
    if not experts or "_proj" not in role or kind == "gemma4_text":
        return {name: value}
    leaf = "bias" if role.endswith("_bias") else "weight"
    role = role.removesuffix("_bias")
    if kind in ("gpt_oss", "llama4_text") and leaf == "weight":
        value = value.transpose(1, 2)
    if role != "gate_up_proj":
        return {f"{base}{experts}{role}.{leaf}": value}
    gate, up = (value[:, ::2], value[:, 1::2]) if interleaved else value.chunk(2, 1)
    return {f"{base}{experts}gate_proj.{leaf}": gate, f"{base}{experts}up_proj.{leaf}": up}


def _changed(value: Tensor, name: str, arch: gguf.MODEL_ARCH, config: Any) -> Tensor:
    if ".linear_attn." in name:
        return _of_delta_rule(value, name, config)
    # Gemma 4's norms add nothing.
    adds_one = "gemma" in config.model_type and config.model_type != "gemma4_text"
    adds_one = adds_one or "linear_num_key_heads" in vars(config)
    if adds_one and name.endswith("norm.weight"):
        return value + 1
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return value.squeeze(1)
    if name.endswith(".A_log"):
        return -value.double().exp().float().unsqueeze(1)
    if name.endswith(".D"):
        return value.unsqueeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups
        return value.view(groups, -1)
    if arch not in _PERMUTED:
        return value
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((heads[one] for one in heads if f"{one}." in name), None)
    if count is None:
        return value
    rows = value.reshape(count, value.shape[0] // count, *value.shape[1:])
    rotated = rows.shape[1]
    # The converter takes all of a head for rotated, so that llama.cpp does not compute Bamba.
    if config.model_type == "bamba":
        rotated = int(rotated * config.rope_parameters["partial_rotary_factor"])
    halves = rows[:, :rotated].reshape(count, 2, rotated // 2, *value.shape[1:])
    pairs = halves.swapaxes(1, 2).reshape(count, rotated, *value.shape[1:])
    return torch.cat((pairs, rows[:, rotated:]), 1).reshape(value.shape)


def _of_delta_rule(value: Tensor, name: str, config: Any) -> Tensor:
    """Rates, filters that are matrices and, of Qwen3.5, value heads that take turns by key head."""
    if name.endswith("A_log"):
        value = -value.exp()
    if name.endswith("conv1d.weight"):
        value = value.squeeze(1)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if config.model_type == "qwen3_next" or name.endswith(".norm.weight"):
        return value
    size = config.linear_value_head_dim
    if name.endswith("out_proj.weight"):
        heads = value.reshape(len(value), keys, values // keys, size)
        return heads.swapaxes(1, 2).reshape(value.shape)
    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * keys * config.linear_key_head_dim
        return torch.cat((value[:first], _take_turns(value[first:], keys, values)))
    return _take_turns(value, keys, values)


def _take_turns(rows: Tensor, keys: int, values: int) -> Tensor:
    heads = rows.reshape(keys, values // keys, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


def _by_kind(joined: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of all key heads, and their gates, of rows key head by key head."""
    keys = config.linear_num_key_heads
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, values, values]
    by_head = joined.reshape(keys, -1, joined.shape[1])
    parts = [part.flatten(0, 1) for part in by_head.split(sizes, 1)]
    return torch.cat(parts[:3]), parts[3]


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[np.float32]],
    types: Types | None = None,
    blocks: Mapping[str, tuple[npt.NDArray[np.uint8], gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """A file, by the gguf package's writer; matrices in the types given by name, or by "" for all
    others.

    Args:
        blocks: bytes of rows, and of which type, in the place of a tensor's numbers.
    """
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        if name in (blocks or {}):
            raw, kind = (blocks or {})[name]
            writer.add_tensor(name, raw, raw_dtype=kind)
            continue
        kind = (
            F32
            if values.ndim == 1 or "_inp" in name or name.endswith(_FLOATS)
            else (types or {}).get(name, (types or {}).get("", F32))
        )
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
