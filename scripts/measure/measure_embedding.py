r"""What an int8 embedding saves and costs, on random weights in the shape of Qwen3-0.6B: tied,
151,936 tokens.

    python scripts/measure/measure_embedding.py FOLDER [--layers 28] [--scheme int4-g128] \
        [--rounds 5]

The source is made in FOLDER, and kept. Says of it rounded, with the embedding in bfloat16 and in
int8, the size of the weights in a file, what is held in memory, tokens a second (the two in turn,
the median of the rounds, and that of the ratios of the pairs), and by how much logits differ,
relative to their norm: from the source's, and between the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantkit.architectures.families import config_from_hf
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import parameters
from quantkit.evals.timing import Decoding, count_loaded_bytes
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.compressed_weights import PackQuantized
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.quantize.scheme_map import SchemeMap
from quantkit.model.layerwise import Batch, head_logits, layerwise_hidden
from quantkit.model.load import load_model
from quantkit.quality.gate import RtnBaseline
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.ratios import median_ratio

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 3072, 16, 8, 128, 151936
TOKENS, NEW = 64, 32


def make(folder: Path, layers: int) -> None:
    """Write a folder of random weights."""
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for parameter in parameters(config_from_hf(raw, folder)):
        value = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if len(parameter.shape) > 1:
            value.normal_(0, 0.02, generator=generator)
        tensors[parameter.name] = value
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


def round_source(source: StoredCheckpoint, scheme: str, embedding: str | None) -> RtnBaseline:
    """Return the source as rounding makes it; a file of it has the same codes."""
    overrides = () if embedding is None else (Override(EMBEDDING, QuantScheme.parse(embedding)),)
    schemes = SchemeMap.of(Recipe(QuantScheme.parse(scheme), overrides), source.config).schemes
    return RtnBaseline(source, schemes)


def count_stored_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of its tensors as compressed-tensors packs them."""
    total = 0
    for name in checkpoint.names():
        spec = checkpoint.info(name)
        stored = [StoredTensor(name, spec.dtype, spec.shape)]
        if spec.scheme:
            stored = PackQuantized(spec.scheme).list_stored_tensors(spec)
        total += sum(tensor.nbytes for tensor in stored)
    return total


def compute_logits(checkpoint: Checkpoint) -> torch.Tensor:
    """Return the logits [T, V] of random tokens."""
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
    folder = options.folder / "floats"
    if not folder.exists():
        make(folder, options.layers)
    source = open_checkpoint(folder)
    checkpoints = {
        "bfloat16 embedding": round_source(source, options.scheme, None),
        "int8 embedding": round_source(source, options.scheme, "int8"),
    }
    decoding = {}
    memory = {}
    for name, checkpoint in checkpoints.items():
        model = load_model(checkpoint)
        memory[name] = count_loaded_bytes(model)
        decoding[name] = Decoding(model, 1, NEW, None)
    rates: dict[str, list[float]] = {name: [] for name in checkpoints}
    for _ in range(options.rounds):
        for name, run in decoding.items():
            rates[name].append(NEW / run.run())
    for name, checkpoint in checkpoints.items():
        print(
            f"{name}: {count_stored_bytes(checkpoint) / 1e6:.0f} MB, {memory[name] / 1e6:.0f} MB"
            f" held, {statistics.median(rates[name]):.1f} tokens a second",
            flush=True,
        )
    ratio = median_ratio(rates["int8 embedding"], rates["bfloat16 embedding"])
    print(f"int8 next to bfloat16: {ratio:.2f} x the tokens a second", flush=True)
    reference = compute_logits(source)
    plain, quantized = (compute_logits(checkpoint) for checkpoint in checkpoints.values())
    pairs = {
        "bfloat16 embedding": (plain, reference),
        "int8 embedding": (quantized, reference),
        "int8 next to bfloat16": (quantized, plain),
    }
    for name, (logits, expected) in pairs.items():
        distance = (logits - expected).norm() / expected.norm()
        print(f"{name}: logits off by {distance.item():.4f}")


if __name__ == "__main__":
    main()
