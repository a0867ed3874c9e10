"""Make a Meta checkpoint of random weights in the shape of Llama 2, for measuring.

    python scripts/synthetic_checkpoint.py DST [--layers 9] [--shards 4]

Nine layers in four shards are 4.2 GB. There is no tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

DIM, HIDDEN, HEADS, VOCABULARY = 4096, 11008, 32, 32000


def shard(layers: int, shards: int, rank: int) -> dict[str, torch.Tensor]:
    """One model-parallel shard: rows of q, k, v, gate, up and head; columns of the others."""
    generator = torch.Generator().manual_seed(rank)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    state = {"tok_embeddings.weight": random(VOCABULARY, DIM // shards)}
    for layer in range(layers):
        prefix = f"layers.{layer}."
        for name in ("wq", "wk", "wv"):
            state[f"{prefix}attention.{name}.weight"] = random(DIM // shards, DIM)
        state[f"{prefix}attention.wo.weight"] = random(DIM, DIM // shards)
        state[f"{prefix}feed_forward.w1.weight"] = random(HIDDEN // shards, DIM)
        state[f"{prefix}feed_forward.w2.weight"] = random(DIM, HIDDEN // shards)
        state[f"{prefix}feed_forward.w3.weight"] = random(HIDDEN // shards, DIM)
        for name in ("attention_norm", "ffn_norm"):
            state[f"{prefix}{name}.weight"] = torch.ones(DIM, dtype=torch.bfloat16)
    state["norm.weight"] = torch.ones(DIM, dtype=torch.bfloat16)
    state["output.weight"] = random(VOCABULARY // shards, DIM)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dst", type=Path)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--shards", type=int, default=4)
    options = parser.parse_args()
    options.dst.mkdir(parents=True)
    params = {"dim": DIM, "n_layers": options.layers, "n_heads": HEADS, "multiple_of": 256, "norm_eps": 1e-5}
    (options.dst / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
    for rank in range(options.shards):
        torch.save(shard(options.layers, options.shards, rank), options.dst / f"consolidated.{rank:02d}.pth")


if __name__ == "__main__":
    main()
