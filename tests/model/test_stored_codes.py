"""GGUF models in llama.cpp's block types on a CPU: run as they are stored, with the logits of the
weights that the gguf package dequantizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import oracle
import pytest
import torch
from block_bytes import dequantize, draw_blocks
from torch import Tensor

from quantkit.files.gguf_types import GgmlType
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.gguf.config import build_metadata
from quantkit.kernels.cpu_operators import CppOperators
from quantkit.model import linear, load
from quantkit.model.decoder import Decoder
from quantkit.model.linear import QuantEmbedding, QuantLinear
from quantkit.model.load import load_model
from quantkit.tensors.qtensor import QuantTensor

pytestmark = pytest.mark.cpu_kernels

LEAVES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MIXES: dict[str, dict[str, GgmlType]] = {
    "k-quants": {
        "": GgmlType.Q4_K,
        "attn_v": GgmlType.Q6_K,
        "ffn_up": GgmlType.Q5_K,
        "ffn_down": GgmlType.Q6_K,
        "token_embd": GgmlType.Q4_K,
        "output": GgmlType.Q6_K,
    },
    "low-bits": {
        "": GgmlType.Q2_K,
        "attn_v": GgmlType.Q4_K,
        "ffn_down": GgmlType.Q3_K,
        "attn_output": GgmlType.IQ4_XS,
        "token_embd": GgmlType.Q3_K,
        "output": GgmlType.Q5_K,
    },
    "small-blocks": {
        "": GgmlType.Q5_0,
        "attn_v": GgmlType.Q8_0,
        "attn_k": GgmlType.Q4_1,
        "ffn_gate": GgmlType.Q4_0,
        "ffn_down": GgmlType.Q5_1,
        "attn_output": GgmlType.IQ4_NL,
        "token_embd": GgmlType.Q5_0,
        "output": GgmlType.Q8_0,
    },
}
"""By tensor; "" is for all others."""


def save(
    path: Path, mix: dict[str, GgmlType], *, tied: bool = False, **changes: Any
) -> tuple[Any, Path]:
    """Write a tiny model with random blocks; return the model of transformers that has the same
    weights, and the file.
    """
    model = oracle.make(
        "qwen2",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    source = open_checkpoint(oracle.save(model, path / "floats"))
    tensors = gguf_files.tensors_of(model)
    blocks = {}
    state = dict(model.named_parameters())
    for name, values in tensors.items():
        if values.ndim == 1:
            continue
        _, _, leaf = name.removesuffix(".weight").rpartition(".")
        kind = mix.get(leaf, mix[""])
        raw = draw_blocks(kind, values.shape[0], values.shape[1], size=0.02)
        blocks[name] = raw.numpy(), gguf.GGMLQuantizationType[kind.name]
        state[find_parameter(name)].data.copy_(dequantize(kind, raw))
    file = gguf_files.write(
        path / "model.gguf",
        build_metadata(source.config) | {"tokenizer.ggml.eos_token_id": 2},
        tensors,
        blocks=blocks,
    )
    return model, file


def find_parameter(name: str) -> str:
    """Find the name that transformers has for a tensor of a GGUF file."""
    stem = name.removesuffix(".weight")
    if stem == "token_embd":
        return "model.embed_tokens.weight"
    if stem == "output":
        return "lm_head.weight"
    _, layer, leaf = stem.split(".")
    return f"model.layers.{layer}.{LEAVES[leaf]}.weight"


def compute_logits(model: Decoder, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(tokens, torch.arange(tokens.shape[1])).float()
    return logits


@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast"])
@pytest.mark.parametrize("mix", MIXES)
def test_block_types_run_as_they_are_stored(mix: str, backend: str, tmp_path: Path) -> None:
    expected_model, file = save(tmp_path, MIXES[mix])
    model = load_model(file, device="cpu", dtype=torch.float32, backend=backend)
    floats = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    assert floats == []
    assert isinstance(model.lm_head, QuantLinear)
    # Attention and feed-forward run as whole blocks, although the types of their weights differ.
    assert model.ops.blocks is not None
    tolerance = {"cpu-exact": 1e-3, "cpu-fast": 0.1}[backend]
    for count, batch in ((1, 1), (7, 1), (19, 3)):
        tokens = oracle.random_tokens(count, batch)
        expected = oracle.logits(expected_model, tokens)
        error = (compute_logits(model, tokens) - expected).norm() / expected.norm()
        assert error < tolerance, (count, batch)


def test_an_embedding_in_blocks_is_looked_up_row_by_row(tmp_path: Path) -> None:
    """In fewer bytes than codes of a byte each, with the values of gguf."""
    for tied in (True, False):
        folder = tmp_path / str(tied)
        folder.mkdir()
        expected_model, file = save(folder, MIXES["k-quants"], tied=tied)
        model = load_model(file, device="cpu", dtype=torch.float32)
        embedding = model.model.embed_tokens
        assert isinstance(embedding, QuantEmbedding)
        right = expected_model.model.embed_tokens.weight.detach()
        every = torch.arange(len(right))
        assert torch.equal(embedding(every), right)
        held = sum(buffer.nbytes for buffer in embedding.buffers())
        assert held < 0.75 * right.numel()
        assert (embedding.head is model.lm_head) == tied


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_a_large_weight_is_packed_in_chunks_of_rows(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_model, file = save(tmp_path, MIXES["k-quants"], tied=tied)
    whole = load_model(file, device="cpu", dtype=torch.float32)
    monkeypatch.setattr(load, "COPY_BYTES", 1000)
    monkeypatch.setattr(linear, "_CODES", 40 * 256)
    sizes: list[int] = []
    pack = CppOperators.pack

    def note_chunks(
        self: CppOperators, chunks: Iterable[QuantTensor], rows: int, *, exact: bool
    ) -> Tensor:
        noted = []
        for chunk in chunks:
            sizes.append(len(chunk.codes))
            noted.append(chunk)
        return pack(self, noted, rows, exact=exact)

    monkeypatch.setattr(CppOperators, "pack", note_chunks)
    model = load_model(file, device="cpu", dtype=torch.float32)
    # A multiple of the rows of a band.
    assert 32 in sizes
    tokens = oracle.random_tokens(9)
    assert torch.equal(compute_logits(model, tokens), compute_logits(whole, tokens))
    right = expected_model.model.embed_tokens.weight.detach()
    assert torch.equal(model.model.embed_tokens(torch.arange(len(right))), right)


def test_floats_are_read_where_no_kernels_run_codes(tmp_path: Path) -> None:
    expected_model, file = save(tmp_path, MIXES["k-quants"])
    model = load_model(file, device="cpu", dtype=torch.float32, backend="reference")
    quantized = [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    assert quantized == []
    tokens = oracle.random_tokens(5)
    expected = oracle.logits(expected_model, tokens)
    assert (compute_logits(model, tokens) - expected).norm() < 1e-4 * expected.norm()
