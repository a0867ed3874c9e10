r"""Make a Meta checkpoint of random weights in the shape of Llama 2, for measuring.

    python scripts/measure/synthetic_checkpoint.py DST [--layers 9] [--shards 4] [--dim 4096] \
        [--hidden 11008]

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
    """Return one model-parallel shard.

    It has rows of q, k, v, gate, up and head, and columns of the others.
    """
    generator = torch.Generator().manual_seed(rank)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(
            0, 0.02, generator=generator
        )

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


def write(dst: Path, *, dim: int, hidden: int, layers: int, shards: int) -> None:
    """Write the checkpoint into a new folder."""
    dst.mkdir(parents=True)
    params = {
        "dim": dim,
        "n_layers": layers,
        "n_heads": max(1, dim // HEAD),
        "norm_eps": 1e-5,
        "vocab_size": -1,
        "multiple_of": min(256, hidden),
        "ffn_dim_multiplier": hidden / (8 * dim // 3),
    }
    (dst / "params.json").write_text(json.dumps(params))
    shutil.copy(DEMO_MODEL / "tokenizer.model", dst)
    for rank in range(shards):
        torch.save(shard(dim, hidden, layers, shards, rank), dst / f"consolidated.{rank:02d}.pth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dst", type=Path)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=11008)
    options = parser.parse_args()
    write(
        options.dst,
        dim=options.dim,
        hidden=options.hidden,
        layers=options.layers,
        shards=options.shards,
    )


if __name__ == "__main__":
    main()
