r"""Hold quantkit's reading of files that llama.cpp's own quantizer made against the gguf package
and llama.cpp.

    .venv/bin/python scripts/peers/peer_gguf_quantizer.py PYTHON OUT FOLDER... \
        [--kinds Q4_0 Q8_0 Q4_K_M Q6_K]

Each folder's model is written as a float16 file in OUT, which PYTHON, with llama-cpp-python,
quantizes. Every tensor must be what the gguf package dequantizes it to: to the bit in float32,
rounded once where it is read in another type; with the codes counted that were read as such. Logits
of 200 tokens are compared with llama.cpp's, which rounds activations to 8 bits. Prints a table in
Markdown, and exits with 1 if a tensor differs or KL is out of its bound.
`scripts/peers/peer_gguf.py make` makes folders.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import text
from peer_gguf import TOKENS, Ours, Theirs, divergence

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared import llama
from shared.processes import run_peer
from shared.tables import print_header, print_row

KINDS = ("Q4_0", "Q8_0", "Q4_K_M", "Q6_K")
KL = 1e-3


def check(python: Path, out: Path, folder: Path, kind: str) -> bool:
    """Whether one file is read as it is meant."""
    import quantkit

    source, file = out / f"{folder.name}-F16.gguf", out / f"{folder.name}-{kind}.gguf"
    if not source.exists():
        quantkit.convert(folder, source, dtype="fp16", source_check=False)
    run_peer(python, __file__, "quantize", source, file, kind)
    tensors, coded, differing = compare(file)
    ours, theirs = Ours(file), Theirs(python, file)
    tokens = ours.tokenizer.encode(text())[: min(TOKENS, ours.model.config.max_context - 1)]
    a, b = ours.logits(tokens), theirs.logits(tokens)
    theirs.close()
    mean, largest = divergence(a, b)
    agreement = float((a.argmax(-1) == b.argmax(-1)).mean())
    largest_difference = np.abs(a - b).max()
    print_row(
        folder.name,
        kind,
        tensors,
        coded,
        len(differing),
        f"{largest_difference:.2g}",
        f"{mean:.2g}",
        f"{largest:.2g}",
        f"{agreement:.1%}",
    )
    for name in differing[:3]:
        print(f"differs: {name}", file=sys.stderr)
    return not differing and mean <= KL


def compare(file: Path) -> tuple[int, int, list[str]]:
    """How many tensors of the model there are, how many were read as codes, and which are not
    what gguf says.
    """
    import gguf
    import torch

    from quantkit.formats.detect import open_checkpoint
    from quantkit.formats.gguf.names import get_norm_offset, gguf_architecture, gguf_tensors
    from quantkit.tensors.qtensor import QuantTensor

    checkpoint = open_checkpoint(file)
    config = checkpoint.config
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    count, coded, differing = 0, 0, []
    for tensor in gguf_tensors(config):
        raw = stored[tensor.name]
        meant = torch.from_numpy(gguf.quants.dequantize(raw.data, raw.tensor_type).copy()).view(
            tensor.shape
        )
        for place in tensor.places:
            value = checkpoint.load(place.name)
            if place.rearranged or place.name.endswith(".A_log"):
                if isinstance(value, QuantTensor):
                    coded, value = coded + 1, value.dequantize()
                count += 1
                if not is_same_in_its_order(value, meant, place):
                    differing.append(place.name)
                continue
            expected = meant if place.expert is None else meant[place.expert]
            expected = expected[place.first : place.first + place.shape[0]] - get_norm_offset(
                config, tensor
            )
            if gguf_architecture(config).interleaved_rotary and tensor.name.endswith(
                ("attn_q.weight", "attn_k.weight")
            ):
                heads = expected.view(-1, config.head_dim // 2, 2, expected.shape[1])
                expected = heads.transpose(1, 2).reshape(expected.shape)
            if isinstance(value, QuantTensor):
                coded, value = coded + 1, value.dequantize()
            count += 1
            if not torch.equal(value.float(), expected.to(value.dtype).float()):
                differing.append(place.name)
    return count, coded, differing


def is_same_in_its_order(value: Any, meant: Any, place: Any) -> bool:
    """Whether a canonical tensor is what a file means, with rows and columns in an order of its
    own, and rates in place of logarithms.
    """
    import torch

    for axis, ranges in enumerate((place.row_ranges, place.column_ranges)):
        if ranges is not None:
            order = [number for first, stop in ranges for number in range(first, stop)]
            value = value.index_select(axis, torch.tensor(order))
    if place.name.endswith(".A_log"):
        return torch.allclose(-value.float().exp(), meant, rtol=1e-6, atol=0)
    return torch.equal(value.float(), meant.to(value.dtype).float())


def quantize(source: str, file: str, kind: str, only: str = "") -> None:
    """Quantize by llama.cpp; with `--linears-only`, the embedding and the head stay floats."""
    import llama_cpp

    settings = {}
    if only == "--linears-only":
        settings["token_embedding_type"] = llama_cpp.GGML_TYPE_F32
        settings["output_tensor_type"] = llama_cpp.GGML_TYPE_F32
    llama.silence()
    llama.quantize_file(source, file, kind, nthread=1, **settings)


def main() -> None:
    if sys.argv[1:2] == ["quantize"]:
        quantize(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    figures = ("largest difference of logits", "mean KL", "largest KL", "same likeliest")
    print_header("model", "quantizer's", "tensors", "as codes", "unlike gguf", *figures)
    passes = [
        check(options.python, options.out, folder, kind)
        for folder in options.folders
        for kind in options.kinds
    ]
    if not all(passes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
