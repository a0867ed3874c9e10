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

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 3072, 16, 8, 128, 151936
TOKENS, NEW = 64, 32


def make(folder: Path, layers: int) -> None:
    """A folder of random weights."""
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
    for one in parameters(config_from_hf(raw, folder)):
        value = torch.ones(one.shape, dtype=torch.bfloat16)
        tensors[one.name] = (
            value if len(one.shape) == 1 else value.normal_(0, 0.02, generator=generator)
        )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


def rounded(source: StoredCheckpoint, scheme: str, embedding: str | None) -> RtnBaseline:
    """The source as rounding makes it; a file of it has the same codes."""
    overrides = () if embedding is None else (Override(EMBEDDING, QuantScheme.parse(embedding)),)
    schemes = SchemeMap.of(Recipe(QuantScheme.parse(scheme), overrides), source.config).schemes
    return RtnBaseline(source, schemes)


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Of its tensors as compressed-tensors packs them."""
    total = 0
    for name in checkpoint.names():
        spec = checkpoint.info(name)
        floats = [StoredTensor(name, spec.dtype, spec.shape)]
        total += sum(
            one.nbytes
            for one in (
                PackQuantized(spec.scheme).list_stored_tensors(spec) if spec.scheme else floats
            )
        )
    return total


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    """Of random tokens, [T, V]."""
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
    made = {
        "bfloat16 embedding": rounded(source, options.scheme, None),
        "int8 embedding": rounded(source, options.scheme, "int8"),
    }
    decoding, held = {}, {}
    for name, checkpoint in made.items():
        model = load_model(checkpoint)
        held[name] = count_loaded_bytes(model)
        decoding[name] = Decoding(model, 1, NEW, None)
    rates: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, one in decoding.items():
            rates[name].append(NEW / one.run())
    for name, checkpoint in made.items():
        print(
            f"{name}: {stored_bytes(checkpoint) / 1e6:.0f} MB, {held[name] / 1e6:.0f} MB held,"
            f" {statistics.median(rates[name]):.1f} tokens a second",
            flush=True,
        )
    ratios = [after / before for before, after in zip(*rates.values(), strict=True)]
    print(
        f"int8 next to bfloat16: {statistics.median(ratios):.2f} x the tokens a second", flush=True
    )
    right, base, found = (logits(one) for one in (source, *made.values()))
    off = {
        "bfloat16 embedding": (base, right),
        "int8 embedding": (found, right),
        "int8 next to bfloat16": (found, base),
    }
    for name, (one, other) in off.items():
        print(f"{name}: logits off by {((one - other).norm() / other.norm()).item():.4f}")


if __name__ == "__main__":
    main()
