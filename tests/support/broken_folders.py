"""Tiny folders and files in many formats, built by hand so that a test may break one of them in
any way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.files.gguf_io import build_header, padding
from quantkit.files.gguf_types import GgmlType, GgufTensor
from quantkit.tensors.qtensor import pack_int32

LAYERS, HIDDEN, MIDDLE, VOCABULARY, GROUP = 3, 64, 128, 96, 32
KV = 32
_SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MIDDLE, HIDDEN),
    "mlp.up_proj": (MIDDLE, HIDDEN),
    "mlp.down_proj": (HIDDEN, MIDDLE),
}
LINEARS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(LAYERS)
    for name, shape in _SHAPES.items()
}
Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"

Tensors = dict[str, Tensor]


def config(settings: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The config.json of a small Llama."""
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        **changes,
    }
    return found if settings is None else {**found, "quantization_config": dict(settings)}


def floats() -> Tensors:
    """All tensors of that model."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(0.1).bfloat16()

    found = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    found |= {f"{name}.weight": random(*shape) for name, shape in LINEARS.items()}
    norms = [
        f"model.layers.{layer}.{one}"
        for layer in range(LAYERS)
        for one in ("input", "post_attention")
    ]
    found |= {f"{name}_layernorm.weight": 1 + random(HIDDEN) for name in norms}
    return {**found, "model.norm.weight": 1 + random(HIDDEN)}


def _codes(weight: Tensor, bits: int, zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [O, I], scales and zero points [O, G] of a weight."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // GROUP, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    top = (1 << bits) - 1
    scale = ((high - low) / top if zero else grouped.abs().amax(-1) / (top / 2)).half()
    point = (
        (-low / scale.float()).round().clamp(0, top)
        if zero
        else torch.full_like(low, 1 << (bits - 1))
    )
    codes = (grouped / scale.float().unsqueeze(-1) + point.unsqueeze(-1)).round().clamp(0, top)
    return codes.view(rows, columns).byte(), scale, point.byte()


def packed(weight: Tensor, bits: int = 4, *, zero: bool = False) -> Tensors:
    """compressed-tensors."""
    codes, scale, point = _codes(weight, bits, zero)
    found = {
        "weight_packed": pack_int32(codes, bits),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return {**found, "weight_zero_point": pack_int32(point.t(), bits).t()} if zero else found


def gptq(weight: Tensor, bits: int = 4, *, zero: bool = False, less: int = 1) -> Tensors:
    """GPTQ; `less` is what zero points are stored less than they are."""
    codes, scale, point = _codes(weight, bits, zero)
    point = point.clamp(min=1) - less
    return {
        "qweight": pack_int32(codes, bits).t(),
        "qzeros": pack_int32(point.t(), bits),
        "scales": scale.t(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(weight: Tensor) -> Tensors:
    """AWQ's GEMM."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    codes, scale, point = _codes(weight, 4, zero=True)

    def words(values: Tensor) -> Tensor:
        return pack_int32(values.view(len(values), -1, 8)[..., order].reshape(values.shape), 4)

    return {
        "qweight": words(codes.t().contiguous()),
        "qzeros": words(point.t().contiguous()),
        "scales": scale.t(),
    }


def mlx(weight: Tensor) -> Tensors:
    """MLX's affine."""
    codes, scale, point = _codes(weight, 4, zero=True)
    bias = -scale.float() * point
    words = pack_int32(codes, 4).view(torch.uint32)
    return {"weight": words, "scales": scale.bfloat16(), "biases": bias.bfloat16()}


def float8(weight: Tensor) -> Tensors:
    """FP8 in blocks of 32 by 32."""
    rows, columns = weight.shape
    scale = (
        torch.full((rows // 32, columns // 32), 0.01)
        + torch.rand(rows // 32, columns // 32) * 0.001
    )
    return {"weight": (weight.float() / 0.01).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def int8(weight: Tensor) -> Tensors:
    """compressed-tensors' int-quantized."""
    scale = weight.float().abs().amax(-1, keepdim=True) / 127
    return {"weight": (weight.float() / scale).round().char(), "weight_scale": scale.bfloat16()}


KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
"""Of a key/value cache in FP8, as compressed-tensors has it."""


def kv_scales() -> Tensors:
    """The scales of such a cache, by the names of compressed-tensors."""
    names = [
        f"model.layers.{layer}.self_attn.{one}_scale" for layer in range(LAYERS) for one in "kv"
    ]
    return {name: torch.tensor([0.01 + place / 64]).bfloat16() for place, name in enumerate(names)}


def groups(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors."""
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        **weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}
        },
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
MLX = {"group_size": GROUP, "bits": 4, "mode": "affine"}
CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
ASYM = {"symmetric": False}

FORMATS: dict[str, tuple[Callable[[Tensor], Tensors] | None, dict[str, Any]]] = {
    "floats": (None, config()),
    "packed": (packed, config(groups())),
    "packed-asym": (lambda weight: packed(weight, zero=True), config(groups(**ASYM))),
    "packed-kv": (packed, config({**groups(), "kv_cache_scheme": KV_SCHEME})),
    "packed-8": (lambda weight: packed(weight, 8), config(groups(num_bits=8))),
    "int8": (int8, config(groups("int-quantized", **CHANNEL))),
    "gptq": (gptq, config(GPTQ)),
    "gptq-v2": (
        lambda weight: gptq(weight, less=0),
        config({**GPTQ, "checkpoint_format": "gptq_v2"}),
    ),
    "gptq-asym": (lambda weight: gptq(weight, zero=True), config({**GPTQ, "sym": False})),
    "awq": (awq, config(AWQ)),
    "fp8": (float8, config(FP8)),
    "mlx": (mlx, {**config(), "quantization": MLX}),
}
"""By name: how a linear lies, and the config.json."""


def tensors(form: str) -> Tensors:
    """Of the model in a format."""
    encode, found = FORMATS[form][0], floats()
    if encode is None:
        return found
    for name in LINEARS:
        found |= {
            f"{name}.{leaf}": one for leaf, one in encode(found.pop(f"{name}.weight")).items()
        }
    return found | (kv_scales() if form.endswith("-kv") else {})


def tokenizer() -> dict[str, Any]:
    """A tokenizer.json of words."""
    words = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"w{index}": index for index in range(3, VOCABULARY)},
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": index, "content": word, "special": True, **flags}
        for word, index in list(words.items())[:3]
    ]
    return {
        "added_tokens": added,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }


def write(folder: Path, found: Tensors, settings: Mapping[str, Any], shards: int = 1) -> Path:
    """A folder with a tokenizer, a chat template and settings of generation."""
    folder.mkdir(parents=True)
    found = {name: one.contiguous() for name, one in found.items()}
    names = list(found)
    if shards == 1:
        save_file(found, folder / "model.safetensors")
    else:
        index = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            own = names[shard::shards]
            save_file({name: found[name] for name in own}, folder / file)
            index |= dict.fromkeys(own, file)
        put(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    put(folder, "config.json", settings)
    put(folder, "tokenizer.json", tokenizer())
    put(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    put(folder, "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    return folder


def make(folder: Path, form: str = "floats", shards: int = 1) -> Path:
    """A sound folder."""
    return write(folder, tensors(form), FORMATS[form][1], shards)


def put(folder: Path, name: str, value: Any) -> None:
    """A file of JSON."""
    (folder / name).write_text(json.dumps(value))


def edit(folder: Path, name: str, **changes: Any) -> None:
    """Change keys of a file of JSON; None takes one away."""
    before = json.loads((folder / name).read_text())
    put(
        folder,
        name,
        {key: value for key, value in {**before, **changes}.items() if value is not None},
    )


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_OTHERS = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
}


def gguf_tensors() -> Tensors:
    """The model's tensors by llama.cpp's names."""
    found = {}
    for name, tensor in floats().items():
        module = name.removesuffix(".weight")
        _, _, rest = module.partition("model.layers.")
        layer, _, within = rest.partition(".")
        own = f"blk.{layer}.{_GGUF_NAMES[within]}" if rest else _GGUF_OTHERS[module]
        found[f"{own}.weight"] = tensor.float()
    return found


def gguf_metadata() -> dict[str, Any]:
    """What a file says besides."""
    words = tokenizer()["model"]["vocab"]
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MIDDLE,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(words),
        "tokenizer.ggml.token_type": [1] * VOCABULARY,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(path: Path, found: Tensors, metadata: Mapping[str, Any]) -> Path:
    """A file in float32."""
    listed = [GgufTensor(name, GgmlType.F32, tuple(one.shape)) for name, one in found.items()]
    data = b"".join(
        raw + padding(len(raw))
        for raw in (one.contiguous().numpy().tobytes() for one in found.values())
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build_header(metadata, listed) + data)
    return path
