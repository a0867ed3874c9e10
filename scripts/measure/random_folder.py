r"""Write a Hugging Face folder of random weights for a config.json, for measuring speed.

    python scripts/measure/random_folder.py CONFIG TOKENIZER DST [--seed 0]

CONFIG is a folder with a config.json, TOKENIZER one whose tokenizer has no more tokens than the
embedding has rows. transformers makes the weights, in bfloat16. `convert` and `quantize` need
`--no-source-check`, as the model cannot predict text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("dst", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(options.config)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    if len(tokenizer) > config.vocab_size:
        parser.error(f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}")
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.dst)
    tokenizer.save_pretrained(options.dst)


if __name__ == "__main__":
    main()
