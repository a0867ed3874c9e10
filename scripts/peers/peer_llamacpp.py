r"""llama.cpp on random weights of a shape, or on a file, to be compared with ours by
`measure_cpu.py`, `measure_batch.py` and `measure_files.py`.

    PYTHON scripts/peers/peer_llamacpp.py FOLDER --serve Q4_0 [--shape SHAPE] [--threads 2] \
        [--context 2048] [--sequences 8]
    PYTHON scripts/peers/peer_llamacpp.py FILE.gguf --serve file [...]

PYTHON has llama-cpp-python and gguf. The model is made in FOLDER, in a folder of its shape, and
kept. Says how many bytes of weights it reads for a token; then, for each line on standard input
that names a measurement, or holds prompts as JSON, its tokens per second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared import llama


@dataclass(frozen=True)
class Shape:
    """Sizes as `quantkit.evals.synthetic` has them for a shape of this name; `experts` is how many,
    and how many of them take a token.
    """

    arch: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: tuple[int, int] | None = None
    vocabulary: int = 32000
    context: int = 2048


SHAPES = {
    "tinyllama-1.1b": Shape("llama", 2048, 5632, 22, 32, 4, 64),
    "qwen3-moe-2.7b": Shape("qwen3moe", 2048, 384, 16, 16, 4, 128, (64, 8), 30000),
}
TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
FILE = "file"


def list_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes; vectors and routers are float32 on disk."""
    hidden, inner, kv = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
    queries = shape.heads * shape.head_dim
    bank = () if shape.experts is None else (shape.experts[0],)
    of_experts = "_exps" if bank else ""
    yield "token_embd.weight", (shape.vocabulary, hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            yield f"{block}{norm}.weight", (hidden,)
        if shape.arch == "qwen3moe":
            for norm in ("attn_q_norm", "attn_k_norm"):
                yield f"{block}{norm}.weight", (shape.head_dim,)
            yield f"{block}ffn_gate_inp.weight", (*bank, hidden)
        for name, rows, columns in (
            ("attn_q", queries, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, queries),
        ):
            yield f"{block}{name}.weight", (rows, columns)
        for name, rows, columns in (
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            yield f"{block}ffn_{name}{of_experts}.weight", (*bank, rows, columns)


def make_source(path: Path, shape: Shape) -> None:
    """A float model with a vocabulary of nothing but bytes and unused tokens, written tensor by
    tensor.
    """
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts is not None:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
        writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_tokenizer_model("llama")
    tokens = [f"<{index}>".encode() for index in range(shape.vocabulary)]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * shape.vocabulary)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * shape.vocabulary)
    random = np.random.default_rng(0)
    dtypes = {
        name: np.dtype(np.float32 if len(sizes) == 1 or "gate_inp" in name else np.float16)
        for name, sizes in list_tensors(shape)
    }
    for name, sizes in list_tensors(shape):
        writer.add_tensor_info(name, sizes, dtypes[name], math.prod(sizes) * dtypes[name].itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, sizes in list_tensors(shape):
        if len(sizes) == 1:
            values = np.ones(sizes, np.float32)
        else:
            values = random.standard_normal(sizes, dtype=np.float32) * np.float32(0.02)
        writer.write_tensor_data(values.astype(dtypes[name]))
    writer.close()


def make(folder: Path, kind: str, shape: Shape) -> Path:
    """Return the quantized file in a folder, made if it is not there."""
    path = folder / f"{kind}.gguf"
    if not path.exists():
        source = folder / "F16.gguf"
        if not source.exists():
            make_source(source, shape)
        llama.quantize_file(str(source), str(path), kind)
    return path


class Session:
    """One model and context."""

    def __init__(
        self, path: Path, threads: int, context: int, sequences: int, *, unified: bool
    ) -> None:
        loading = llama_cpp.llama_model_default_params()
        # Of a mapped file the system may drop pages while the other candidate is measured.
        loading.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = context, 512, 512
        options.n_threads = options.n_threads_batch = threads
        options.n_seq_max, options.kv_unified = sequences, unified
        self._context = llama_cpp.llama_init_from_model(self._model, options)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def run(self, tokens: list[int], position: int, sequences: int = 1, sequence: int = 0) -> None:
        """Tokens of one sequence, or one token each of several."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, sequences)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position + (0 if sequences > 1 else index)
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = index if sequences > 1 else sequence
            batch.logits[index] = sequences > 1 or index == len(tokens) - 1
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp failed")
        llama_cpp.llama_synchronize(self._context)
        llama_cpp.llama_batch_free(batch)

    def decoding(self, count: int) -> float:
        self.clear()
        self.run(list(range(1, 17)), 0)
        self.run([17], 16)
        started = time.perf_counter()
        for step in range(count):
            self.run([18 + step], 17 + step)
        return count / (time.perf_counter() - started)

    def decode_after(self, prompt: int, count: int) -> float:
        """Tokens per second after a prompt, which is not timed."""
        self.clear()
        for start in range(0, prompt, 512):
            size = min(512, prompt - start)
            self.run(list(range(1, size + 1)), start)
        self.run([17], prompt)
        started = time.perf_counter()
        for step in range(count):
            self.run([18 + step], prompt + 1 + step)
        return count / (time.perf_counter() - started)

    def time_batches(self, sequences: int, count: int) -> float:
        self.clear()
        self.run(list(range(1, sequences + 1)), 0, sequences)
        started = time.perf_counter()
        for step in range(count):
            self.run(list(range(1, sequences + 1)), 1 + step, sequences)
        return sequences * count / (time.perf_counter() - started)

    def likeliest(self, row: int) -> int:
        """The token with the largest logit in a row of the last run."""
        return int(
            np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(self._context, row), (self._vocabulary,)
            ).argmax()
        )

    def together(self, prompts: list[list[int]], new: int) -> float:
        """New tokens after the first of each prompt, greedily."""
        self.clear()
        tokens = []
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), 512):
                self.run(prompt[start : start + 512], start, sequence=sequence)
            tokens.append(self.likeliest(-1))
        started = time.perf_counter()
        for step in range(new - 1):
            self.run(tokens, len(prompts[0]) + step, len(prompts))
            tokens = [self.likeliest(row) for row in range(len(prompts))]
        return len(prompts) * (new - 1) / (time.perf_counter() - started)

    def prefill(self, count: int) -> float:
        self.clear()
        started = time.perf_counter()
        self.run(list(range(1, count + 1)), 0)
        return count / (time.perf_counter() - started)


def weight_bytes(path: Path, experts: tuple[int, int] | None) -> int:
    """Of what is read for each token: all but an embedding that is not the head too, and of experts
    as many as take one.
    """
    count, per_token = experts or (1, 1)
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    return sum(
        size * per_token // count if "_exps" in name else size for name, size in tensors.items()
    )


def read_resident_bytes() -> int:
    """Return the bytes of memory that this process holds, pages of mapped files with them."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--serve", required=True, choices=[*TYPES, FILE])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", default="tinyllama-1.1b", choices=SHAPES)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--split", action="store_true", help="each sequence has a separate cache")
    options = parser.parse_args()
    llama.silence()
    llama_cpp.llama_backend_init()
    if options.serve == FILE:
        path, experts = options.folder, None
    else:
        folder = options.folder / options.shape
        folder.mkdir(parents=True, exist_ok=True)
        shape = SHAPES[options.shape]
        path, experts = make(folder, options.serve, shape), shape.experts
    resident_before = read_resident_bytes()
    session = Session(
        path, options.threads, options.context, options.sequences, unified=not options.split
    )
    measures = {
        "decode": lambda: session.decoding(48),
        "decode batch 8": lambda: session.time_batches(8, 8),
        "prefill 128": lambda: session.prefill(128),
        "prefill 512": lambda: session.prefill(512),
        "decode after 8192": lambda: session.decode_after(8192, 16),
        "memory": lambda: read_resident_bytes() - resident_before,
    }
    print(weight_bytes(path, experts), flush=True)
    for line in sys.stdin:
        if line.startswith("{"):
            print(session.together(**json.loads(line)), flush=True)
        else:
            print(measures[line.strip()](), flush=True)


if __name__ == "__main__":
    main()
