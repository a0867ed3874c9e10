"""The peak of memory while a model is loaded: its weights once, and little else."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

import quantkit
from quantkit.base.memory import reset_peak
from quantkit.files.located import read_part_headers
from quantkit.formats.detect import open_checkpoint

# A chunk of codes as they are stored and as they are read, and what kernels keep for the shapes
# that they multiply.
_SPARE_BYTES = 25_000_000

_MEASURE = """
import json, sys, torch
from quantkit.base.memory import malloc_trim, peak_bytes, reset_peak, resident_bytes
from quantkit.evals.timing import count_loaded_bytes
from quantkit.model.load import load_model

small, large = sys.argv[1:]
# Libraries, kernels and their self-tests take memory once.
load_model(small, device="cpu", allow_slow=True)
malloc_trim()
before = resident_bytes()
# What reading a large tokenizer leaves: free memory in the allocator's heap below a used block.
blocks = [torch.ones(2000) for _ in range(8_000)]
last = blocks[-1]
del blocks
reset_peak()
model = load_model(large, device="cpu", allow_slow=True)
print(json.dumps([peak_bytes() - before, count_loaded_bytes(model)]))
"""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 170 MB: one block with linears that are large in float32, and a large
    embedding.
    """
    model = oracle.make(
        "llama",
        hidden_size=512,
        intermediate_size=32768,
        num_hidden_layers=1,
        vocab_size=65536,
        tie_word_embeddings=True,
    )
    return oracle.save(model.to(torch.bfloat16), tmp_path_factory.mktemp("wide") / "model")


@pytest.mark.slow
@pytest.mark.skipif(not reset_peak(), reason="this system does not tell a process's peak")
@pytest.mark.parametrize(
    "options",
    [{}, {"scheme": "int8"}, {"scheme": "int4-g32"}],
    ids=str,
)
def test_weights_are_in_memory_once_while_they_are_loaded(
    options: dict[str, Any], wide_model: Path, tmp_path: Path
) -> None:
    small = oracle.save(oracle.make("llama").to(torch.bfloat16), tmp_path / "small" / "model")
    paths = []
    for source in (small, wide_model):
        if options:
            made = quantkit.quantize(
                source,
                tmp_path / f"{source.parent.name}-{options['scheme']}",
                method="rtn",
                source_check=False,
                accept_quality_loss=True,
                **options,
            )
            paths.append(made.path)
        else:
            paths.append(source)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    peak, loaded = json.loads(done.stdout)
    assert peak < 1.15 * loaded + _SPARE_BYTES


def test_a_checkpoint_keeps_no_vocabulary(
    real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    file = quantkit.convert(real_shape("smollm"), tmp_path / "model.gguf", source_check=False).path
    tokens = read_part_headers(file)[0].metadata["tokenizer.ggml.tokens"]
    checkpoint = open_checkpoint(file)
    gc.collect()
    copies = []
    for value in gc.get_objects():
        if type(value) is list and value is not tokens and value == tokens:
            copies.append(value)
    assert not copies
    assert checkpoint.names()
