"""What an int8 embedding saves and costs, on random weights in the shape of Qwen3-0.6B: tied, 151,936 tokens.

    python scripts/measure_embedding.py FOLDER [--layers 28] [--scheme int4-g128] [--rounds 5]

The models are made in FOLDER, and kept. Says of each the size of its weights, what is held in memory, tokens a second
(the models in turn, the median of the rounds), and by how much its logits differ from those of the source and of the
model whose embedding has its floats, relative to their norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from safetensors.torch import save_file

import quantkit
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.topology import parameters
from quantkit.evals.timing import Decoding, loaded_bytes
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch, head_logits, layerwise_hidden
from quantkit.model.load import load_model

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 3072, 16, 8, 128, 151936
TOKENS, NEW = 64, 32


def make(folder: Path, layers: int) -> None:
    """A folder of random weights."""
    raw = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "torch_dtype": "bfloat16", "hidden_act": "silu",
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for one in parameters(config_from_hf(raw, folder)):
        value = torch.ones(one.shape, dtype=torch.bfloat16)
        tensors[one.name] = value if len(one.shape) == 1 else value.normal_(0, 0.02, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


def logits(folder: Path) -> torch.Tensor:
    """Of random tokens, [T, V]."""
    checkpoint = open_checkpoint(folder)
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    (hidden,) = layerwise_hidden(checkpoint, [Batch.from_start(tokens)])
    return head_logits(checkpoint, [hidden[0]])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    source = options.folder / "floats"
    if not source.exists():
        make(source, options.layers)
    folders = {}
    for name, embedding in (("bfloat16 embedding", None), ("int8 embedding", "int8")):
        folders[name] = options.folder / f"{options.scheme}-{embedding or 'bf16'}"
        if not folders[name].exists():
            quantkit.quantize(
                source, folders[name], options.scheme, method="rtn", embedding=embedding, accept_quality_loss=True
            )
    right = logits(source)
    found = {name: logits(folder) for name, folder in folders.items()}
    base = found["bfloat16 embedding"]
    decoding, held = {}, {}
    for name, folder in folders.items():
        model = load_model(folder)
        held[name] = loaded_bytes(model)
        decoding[name] = Decoding(model, 1, NEW, None)
    rates: dict[str, list[float]] = {name: [] for name in folders}
    for _ in range(options.rounds):
        for name, one in decoding.items():
            rates[name].append(NEW / one.run())
    for name, folder in folders.items():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        off, added = (((found[name] - other).norm() / other.norm()).item() for other in (right, base))
        print(
            f"{name}: {size / 1e6:.0f} MB, {held[name] / 1e6:.0f} MB held, {statistics.median(rates[name]):.1f} tokens"
            f" a second, logits off by {off:.4f} from the source, {added:.4f} from the bfloat16 embedding's"
        )


if __name__ == "__main__":
    main()
