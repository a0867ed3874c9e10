r"""Plan quantizations of published shapes, whose weights need not be there.

    python scripts/measure/plan_shapes.py [llama-7b qwen3-30b-a3b llama-70b] [--schemes \
        int4-g128,q4_k_m] [--device cuda] [--effort thorough]

Writes for each shape a folder with the config and a safetensors file of the right size, which takes
no space on file systems with sparse files, and prints what `quantkit plan quantize` says of time,
memory and disk, with the time of each step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quantkit
from quantkit.data.files import DEMO_MODEL

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "qwen3-30b-a3b": {
        **_LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
    },
}
"""Configs by name, in the shapes of published models."""
_BYTES = 2  # of a bfloat16


def list_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each tensor of a model."""
    width = config["hidden_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    experts = config.get("num_experts", 0)
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    yield "lm_head.weight", (config["vocab_size"], width)
    yield "model.norm.weight", (width,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (width,)
        yield f"{prefix}self_attn.q_proj.weight", (queries, width)
        yield f"{prefix}self_attn.k_proj.weight", (keys, width)
        yield f"{prefix}self_attn.v_proj.weight", (keys, width)
        yield f"{prefix}self_attn.o_proj.weight", (width, queries)
        if experts:
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}self_attn.{norm}.weight", (head,)
            yield f"{prefix}mlp.gate.weight", (experts, width)
        inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        branches = [f"mlp.experts.{expert}." for expert in range(experts)] or ["mlp."]
        for branch in branches:
            yield f"{prefix}{branch}gate_proj.weight", (inner, width)
            yield f"{prefix}{branch}up_proj.weight", (inner, width)
            yield f"{prefix}{branch}down_proj.weight", (width, inner)


def write_folder(config: dict[str, Any], folder: Path) -> None:
    """Write a folder with a config, the packaged model's tokenizer, and weights that are a hole."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in list_tensors(config):
        count = 1
        for size in shape:
            count *= size
        start, end = end, end + count * _BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(SHAPES))
    parser.add_argument("--schemes", default="int4-g128")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--effort", default="default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.names:
            folder = Path(temporary) / name
            write_folder(SHAPES[name], folder)
            for scheme in options.schemes.split(","):
                plan = quantkit.plan.quantize(
                    folder,
                    Path(temporary) / "out",
                    scheme,
                    effort=options.effort,
                    device=options.device,
                )
                print(f"{name}, {scheme}")
                for line in plan.lines():
                    print(f"  {line}")


if __name__ == "__main__":
    main()
