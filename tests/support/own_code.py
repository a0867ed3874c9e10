"""Folders with code: a model that transformers does not know, whose classes are in Python files
next to the weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import oracle
import torch
from torch import nn

AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
RAN = "QUANTKIT_TEST_OWN_CODE"
"""The environment variable with the path of a file that exists once the code was run."""
_NOTE = f"""import os
from pathlib import Path

Path(os.environ[{RAN!r}]).touch()
"""
FILES = {
    "configuration_own.py": f"""{_NOTE}
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "modeling_own.py": f"""{_NOTE}
from torch import nn
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig
from .scaled_own import FACTOR


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * FACTOR


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = Scaled(config.vocab_size, config.hidden_size)
        self.post_init()
""",
    "scaled_own.py": "FACTOR = 4.0\n",
}
"""Of a Llama whose embeddings are multiplied."""


def with_code(source: Path, folder: Path, model_type: str = "own") -> Path:
    """A copy of a Llama's folder with the code."""
    oracle.copy(source, folder)
    oracle.edit_json(
        folder / "config.json",
        model_type=model_type,
        auto_map=AUTO_MAP,
        architectures=["OwnForCausalLM"],
    )
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def same_as_llama(folder: Path, target: Path) -> Path:
    """A Llama in transformers' own class that computes the same as a folder with the code."""
    oracle.copy(folder, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    del config["auto_map"]
    (target / "config.json").write_text(json.dumps(config))
    model = oracle.load(target)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    with torch.no_grad():
        embedding.weight *= 4.0
    return oracle.save(model, target)
