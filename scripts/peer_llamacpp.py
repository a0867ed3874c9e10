"""llama.cpp on random weights of TinyLlama's shape, to be held against ours by `measure_cpu.py` and `measure_batch.py`.

    PYTHON scripts/peer_llamacpp.py FOLDER --serve Q4_0 [--threads 2] [--context 2048] [--sequences 8]

PYTHON has llama-cpp-python and gguf. The model is made in FOLDER and kept. Says how many bytes of weights it
reads for a token; then, for each line on standard input that names a measurement, or holds prompts as JSON, its
tokens per second.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

DIM, HIDDEN, LAYERS, HEADS, SHARED, VOCABULARY, CONTEXT = 2048, 5632, 22, 32, 4, 32000, 2048
TYPES = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
         "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}  # fmt: skip


def make_source(path: Path) -> None:
    """A float model with a vocabulary of nothing but bytes and unused tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    tokens = [f"<{index}>".encode() for index in range(VOCABULARY)]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * VOCABULARY)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, dtype=np.float32) * 0.02
        writer.add_tensor(name, values.astype(np.float16) if len(shape) > 1 else np.ones(shape, np.float32))

    add("token_embd.weight", VOCABULARY, DIM)
    add("output_norm.weight", DIM)
    add("output.weight", VOCABULARY, DIM)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", DIM)
        add(block + "ffn_norm.weight", DIM)
        for name, rows, columns in (
            ("attn_q", DIM, DIM), ("attn_k", DIM // HEADS * SHARED, DIM), ("attn_v", DIM // HEADS * SHARED, DIM),
            ("attn_output", DIM, DIM), ("ffn_gate", HIDDEN, DIM), ("ffn_up", HIDDEN, DIM), ("ffn_down", DIM, HIDDEN),
        ):  # fmt: skip
            add(f"{block}{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.gguf"
    if not path.exists():
        source = folder / "F16.gguf"
        if not source.exists():
            make_source(source)
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = TYPES[kind]
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options))
        if failed:
            raise SystemExit(f"llama.cpp could not make {path}")
    return path


class Session:
    """One model and context."""

    def __init__(self, path: Path, threads: int, context: int, sequences: int, *, unified: bool) -> None:
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
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

    def batched(self, sequences: int, count: int) -> float:
        self.clear()
        self.run(list(range(1, sequences + 1)), 0, sequences)
        started = time.perf_counter()
        for step in range(count):
            self.run(list(range(1, sequences + 1)), 1 + step, sequences)
        return sequences * count / (time.perf_counter() - started)

    def likeliest(self, row: int) -> int:
        """The token with the largest logit in a row of the last run."""
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (VOCABULARY,)).argmax())

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


def weight_bytes(path: Path) -> int:
    """Of what is read for each token: all but the embedding."""
    tensors = gguf.GGUFReader(path).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors if tensor.name != "token_embd.weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--serve", required=True, choices=TYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--split", action="store_true", help="each sequence has a cache of its own")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # to live as long as the library
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    path = make(options.folder, options.serve)
    session = Session(path, options.threads, options.context, options.sequences, unified=not options.split)
    measures = {
        "decode": lambda: session.decoding(48),
        "decode batch 8": lambda: session.batched(8, 8),
        "prefill 128": lambda: session.prefill(128),
        "prefill 512": lambda: session.prefill(512),
    }
    print(weight_bytes(path), flush=True)
    for line in sys.stdin:
        if line.startswith("{"):
            print(session.together(**json.loads(line)), flush=True)
        else:
            print(measures[line.strip()](), flush=True)


if __name__ == "__main__":
    main()
