"""Make a Meta checkpoint of random weights in the shape of Llama 2, for measuring.

    python scripts/synthetic_checkpoint.py DST [--layers 9] [--shards 4] [--dim 4096] [--hidden 11008]

Nine layers in four shards are 4.2 GB. The tokenizer is that of the packaged model, which knows
fewer tokens than the embedding has rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from quantkit.data.files import DEMO_MODEL

HEAD, VOCABULARY = 128, 32000


def shard(dim: int, hidden: int, layers: int, shards: int, rank: int) -> dict[str, torch.Tensor]:
    """One model-parallel shard: rows of q, k, v, gate, up and head; columns of the others."""
    generator = torch.Generator().manual_seed(rank)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    state = {"tok_embeddings.weight": random(VOCABULARY, dim // shards)}
    for layer in range(layers):
        prefix = f"layers.{layer}."
        for name in ("wq", "wk", "wv"):
            state[f"{prefix}attention.{name}.weight"] = random(dim // shards, dim)
        state[f"{prefix}attention.wo.weight"] = random(dim, dim // shards)
        state[f"{prefix}feed_forward.w1.weight"] = random(hidden // shards, dim)
        state[f"{prefix}feed_forward.w2.weight"] = random(dim, hidden // shards)
        state[f"{prefix}feed_forward.w3.weight"] = random(hidden // shards, dim)
        for name in ("attention_norm", "ffn_norm"):
            state[f"{prefix}{name}.weight"] = torch.ones(dim, dtype=torch.bfloat16)
    state["norm.weight"] = torch.ones(dim, dtype=torch.bfloat16)
    state["output.weight"] = random(VOCABULARY // shards, dim)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dst", type=Path)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=11008)
    options = parser.parse_args()
    options.dst.mkdir(parents=True)
    params = {"dim": options.dim, "n_layers": options.layers, "n_heads": options.dim // HEAD, "norm_eps": 1e-5}
    sizes = {"vocab_size": -1, "multiple_of": 256, "ffn_dim_multiplier": options.hidden / (8 * options.dim // 3)}
    (options.dst / "params.json").write_text(json.dumps({**params, **sizes}))
    shutil.copy(DEMO_MODEL / "tokenizer.model", options.dst)
    for rank in range(options.shards):
        state = shard(options.dim, options.hidden, options.layers, options.shards, rank)
        torch.save(state, options.dst / f"consolidated.{rank:02d}.pth")


if __name__ == "__main__":
    main()
