"""Time `quantkit doctor` on the headers of a folder of Llama 3 70B's size, whose files are sparse:
all holes, no data.

    python scripts/measure/measure_doctor.py [DST] [--layers 80] [--runs 3] [--floats]

int4 in groups of 128 unless floats are requested. Each run is a separate process, imports included,
and must import no torch. Prints one line of JSON: the seconds of each run, tensors, bytes, and what
was found.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quantkit.files.safetensors_io import build_header
from quantkit.files.tensor_file import StoredTensor
from quantkit.tensors.dtypes import DType

HIDDEN, MIDDLE, KV, VOCABULARY = 8192, 28672, 1024, 128256
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MIDDLE, HIDDEN),
    "mlp.up_proj": (MIDDLE, HIDDEN),
    "mlp.down_proj": (HIDDEN, MIDDLE),
}
GROUP, SHARD = 128, 5 * 10**9
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
        }
    },
}
RUN = """
import sys, time
start = time.perf_counter()
from quantkit.cli.main import main
try:
    main(["doctor", sys.argv[1], "--tp", "8", "--for", "vllm"])
except SystemExit as stop:
    code = stop.code
print(code, "torch" in sys.modules)
"""


def tensors(layers: int, floats: bool) -> list[StoredTensor]:
    """All of the model."""

    def plain(name: str, *shape: int) -> StoredTensor:
        return StoredTensor(f"{name}.weight", DType.BFLOAT16, shape)

    found = [plain("model.embed_tokens", VOCABULARY, HIDDEN)]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in LINEARS.items():
            module = prefix + name
            if floats:
                found.append(plain(module, rows, columns))
                continue
            found += [
                StoredTensor(f"{module}.weight_packed", DType.INT32, (rows, columns // 8)),
                StoredTensor(f"{module}.weight_scale", DType.BFLOAT16, (rows, columns // GROUP)),
                StoredTensor(f"{module}.weight_shape", DType.INT64, (2,)),
            ]
        found += [plain(f"{prefix}{one}_layernorm", HIDDEN) for one in ("input", "post_attention")]
    return [*found, plain("model.norm", HIDDEN), plain("lm_head", VOCABULARY, HIDDEN)]


def shards(listed: list[StoredTensor]) -> list[list[StoredTensor]]:
    """The tensors file by file."""
    found: list[list[StoredTensor]] = [[]]
    for tensor in listed:
        if found[-1] and sum(one.nbytes for one in found[-1]) + tensor.nbytes > SHARD:
            found.append([])
        found[-1].append(tensor)
    return found


def make(folder: Path, layers: int, floats: bool) -> list[StoredTensor]:
    """A folder whose files are as long as their headers say, and take no room on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = tensors(layers, floats)
    files = shards(listed)
    index = {}
    for number, own in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header = build_header(own)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor.nbytes for tensor in own))
        index |= {tensor.name: name for tensor in own}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
    }
    words = {f"w{number}": number for number in range(VOCABULARY)}
    contents = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": index},
        "config.json": config if floats else {**config, "quantization_config": SETTINGS},
        "tokenizer.json": {"model": {"vocab": words}, "added_tokens": []},
        "generation_config.json": {"eos_token_id": 128001},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dst", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--floats", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.dst or Path(scratch) / "model"
        listed = make(folder, options.layers, options.floats)
        times = []
        for _ in range(options.runs):
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", RUN, str(folder)], capture_output=True, text=True, check=True
            )
            times.append(round(time.perf_counter() - start, 2))
        lines = done.stdout.splitlines()
    if lines[-1] != "0 False":
        raise SystemExit(f"it found something, or imported torch:\n{done.stdout}")
    size = sum(math.prod(one.shape) * one.dtype.itemsize for one in listed)
    print(json.dumps({"seconds": times, "tensors": len(listed), "bytes": size, "found": lines[1]}))


if __name__ == "__main__":
    main()
