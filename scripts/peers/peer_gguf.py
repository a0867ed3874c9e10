"""Hold GGUF files that quantkit writes against llama.cpp: logits, codes, greedy texts, prompts of
conversations.

    .venv/bin/python scripts/peers/peer_gguf.py make OUT [--steps 150]
    .venv/bin/python scripts/peers/peer_gguf.py check PYTHON OUT FOLDER...

The first makes a few small models, each trained a little, with tokenizers of their families' kinds.
The second converts each folder's model to a float32 file, and quantizes it to Q8_0 and Q4_0 by way
of a Hugging Face folder, the latter also with the embedding in Q8_0; PYTHON, which has
llama-cpp-python, computes with them. Prints a table in Markdown, and exits with 1 if a figure is
out of its bounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import MODELS, MXFP4, make, text

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared import llama
from shared.processes import Worker
from shared.tables import print_header, print_row

TOKENS, PROMPT, NEW = 200, 12, 50
LOGITS, KL, TIE = 2e-3, 1e-3, 0.05
# llama.cpp's table of GELU has larger effects in Gemma 4, and changes the choice of experts.
GELU, GELU_KL = "gemma4", 1e-4
KEPT = "MXFP4"
SCHEMES: dict[str, dict[str, Any]] = {
    "Q8_0": {"scheme": "int8"},
    "Q4_0": {"scheme": "int4-g64"},
    "Q4_0-embedding": {"scheme": "int4-g64", "embedding": "int8"},
}
TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of  Spain?\n"},
]


# Ours


class Ours:
    """A model in a folder or a file, in float32 on plain products."""

    def __init__(self, path: Path) -> None:
        import quantkit

        self.model, self.tokenizer = quantkit.load(
            path, dtype="fp32", backend="reference", device="cpu"
        )
        self.path = path

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """[T, V]"""
        import torch

        with torch.no_grad():
            found = self.model(torch.tensor([list(tokens)]), torch.arange(len(tokens)))
        return np.asarray(found[0].float().numpy())

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            found.append(int(self.logits(found)[-1].argmax()))
        return found[len(tokens) :]

    def talk(self) -> list[int] | None:
        import quantkit
        from quantkit.errors import QuantkitError

        try:
            return quantkit.chat_format(self.path, self.tokenizer).encode(TALK)
        except QuantkitError:
            return None


class Theirs:
    """llama.cpp in a separate process, with one file."""

    def __init__(self, python: Path, file: Path) -> None:
        command = [python, __file__, "serve", file]
        self._worker = Worker(command, name="llama.cpp", environment={"OMP_NUM_THREADS": "1"})

    def request(self, **question: Any) -> Any:
        """Return what `serve` answers to a question."""
        return json.loads(self._worker.ask(json.dumps(question)))

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """[T, V]"""
        return np.load(self.request(logits=list(tokens)))

    def close(self) -> None:
        """End the process."""
        self._worker.end()


def check(python: Path, out: Path, folders: Sequence[Path]) -> bool:
    """Whether all figures are within their bounds."""
    import quantkit

    figures = ("largest difference of logits", "mean KL", "largest KL", "greedy", "codes")
    print_header("model", "file", *figures, "tokens", "talk")
    good = True
    for folder in folders:
        # A folder of codes becomes one file, which keeps them.
        kinds = [KEPT] if folder.name == MXFP4 else ["F32", *SCHEMES]
        for kind in kinds:
            file, source = out / f"{folder.name}-{kind}.gguf", folder
            for path in out.glob(f"{folder.name}-{kind}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if kind == "F32":
                quantkit.convert(folder, file, dtype="fp32", source_check=False)
            elif kind == KEPT:
                quantkit.convert(folder, file, source_check=False)
            else:
                source = out / f"{folder.name}-{kind}"
                quantkit.quantize(
                    folder,
                    source,
                    **SCHEMES[kind],
                    method="rtn",
                    source_check=False,
                    accept_quality_loss=True,
                )
                quantkit.convert(source, file, source_check=False)
            good &= compare(python, folder.name, kind, source, file)
    return good


def compare(python: Path, name: str, kind: str, source: Path, file: Path) -> bool:
    from quantkit.text.tokenizer import prompt_start

    ours, theirs = Ours(source), Theirs(python, file)
    words = text()
    own = ours.tokenizer.encode(words)
    tokens = own[: min(TOKENS, ours.model.config.max_context - 1)]
    a, b = ours.logits(tokens), theirs.logits(tokens)
    difference, (mean, largest) = float(np.abs(a - b).max()), divergence(a, b)
    prompt = tokens[:PROMPT]
    text_ids = ours.greedy(prompt, NEW)
    followed = ours.logits([*prompt, *text_ids])[PROMPT - 1 : -1]
    best = np.sort(followed, -1)
    clear = best[:, -1] - best[:, -2] > TIE
    same = theirs.logits([*prompt, *text_ids])[PROMPT - 1 : -1].argmax(-1) == np.asarray(text_ids)
    # llama.cpp adds no more than a BOS before text, and a note says so.
    added = prompt_start(ours.tokenizer)
    expected = own if len(added) < 2 else own[len(added) :]
    same_tokens = theirs.request(tokens=words) == expected
    talk, their_talk = ours.talk(), theirs.request(talk=TALK)
    codes = "" if kind == "F32" else str(equal_codes(source, file))
    theirs.close()
    template = "none" if talk is None and their_talk is None else str(talk == their_talk)
    print_row(
        name,
        kind,
        f"{difference:.2g}",
        f"{mean:.2g}",
        f"{largest:.2g}",
        f"{same.sum()} of {len(same)}, {(~same & clear).sum()} clear ones missed",
        codes,
        same_tokens,
        template,
    )
    if kind != "F32":
        close = mean <= KL
    elif name.startswith(GELU):
        close = mean <= GELU_KL
    else:
        close = difference <= LOGITS
    return bool(
        close
        and not (~same & clear).any()
        and same_tokens
        and template != "False"
        and codes != "False"
    )


def divergence(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return mean and largest KL in nats a token, of rows of logits [T, V]."""
    p, q = (llama.log_softmax(logits.astype(np.float64)) for logits in (a, b))
    kl = (np.exp(p) * (p - q)).sum(-1)
    return float(kl.mean()), float(kl.max())


def equal_codes(source: Path, file: Path) -> bool:
    """Whether the gguf library reads the weights that the folder's codes mean, in every
    quantized tensor.
    """
    import gguf

    from quantkit.formats.detect import open_checkpoint, with_codes
    from quantkit.formats.gguf.names import gguf_architecture, gguf_tensors
    from quantkit.tensors.qtensor import QuantTensor

    checkpoint = with_codes(open_checkpoint(source))
    config = checkpoint.config
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found = 0
    for tensor in gguf_tensors(config):
        values = [checkpoint.load(name) for name in tensor.parts]
        if not isinstance(values[0], QuantTensor):
            continue
        floats = [value.dequantize().numpy() for value in values if isinstance(value, QuantTensor)]
        expected = np.concatenate(floats)
        if gguf_architecture(config).interleaved_rotary and tensor.name.endswith(
            ("attn_q.weight", "attn_k.weight")
        ):
            rows, columns = expected.shape
            # Canonical rows of a rotary pair are half a head apart, and so are the other rows.
            heads = expected.reshape(rows // config.head_dim, 2, config.head_dim // 2, columns)
            rotated = (config.rope.rotary_dim or config.head_dim) // 2
            first, others = heads[:, :, :rotated], heads[:, :, rotated:]
            if config.leading_rotary:
                rows_of_heads = expected.reshape(len(heads), config.head_dim, columns)
                first = rows_of_heads[:, : 2 * rotated].reshape(len(heads), 2, rotated, columns)
                others = rows_of_heads[:, 2 * rotated :]
            pairs = first.swapaxes(1, 2).reshape(len(heads), -1, columns)
            others = others.reshape(len(heads), -1, columns)
            expected = np.concatenate((pairs, others), 1).reshape(rows, columns)
        theirs = gguf.quants.dequantize(stored[tensor.name].data, stored[tensor.name].tensor_type)
        if stored[tensor.name].tensor_type.name not in ("Q8_0", "Q4_0", KEPT) or not np.array_equal(
            theirs.reshape(-1), expected.reshape(-1)
        ):
            return False
        found += 1
    return found > 0


# llama.cpp's side


def serve(file: Path) -> None:
    import llama_cpp
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    llama.silence()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(file).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp does not load {file}")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, options)
    width = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def logits(tokens: list[int]) -> str:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, index, 1
            batch.seq_id[index][0], batch.logits[index] = 0, True
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama.cpp failed")
        rows = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (width,))
            for i in range(len(tokens))
        ]
        llama_cpp.llama_batch_free(batch)
        path = file.with_suffix(".npy")
        np.save(path, np.stack(rows))
        return str(path)

    def talk(messages: list[dict[str, str]]) -> list[int] | None:
        template = llama_cpp.llama_model_chat_template(model, None)
        if not template:
            return None
        begin, end = (
            llama_cpp.llama_vocab_get_text(vocabulary, token).decode() if token >= 0 else ""
            for token in (
                llama_cpp.llama_vocab_bos(vocabulary),
                llama_cpp.llama_vocab_eos(vocabulary),
            )
        )
        made = Jinja2ChatFormatter(template.decode(), eos_token=end, bos_token=begin)(
            messages=messages
        )
        return llama.tokenize(vocabulary, made.prompt, specials=True, around=not made.added_special)

    for line in sys.stdin:
        question = json.loads(line)
        if "logits" in question:
            answer: Any = logits(question["logits"])
        elif "tokens" in question:
            answer = llama.tokenize(vocabulary, question["tokens"], specials=False)
        elif "ends" in question:
            answer = llama.list_end_tokens(vocabulary)
        else:
            answer = talk(question["talk"])
        print(json.dumps(answer), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("--steps", type=int, default=150)
    making.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    checking = commands.add_parser("check")
    checking.add_argument("python", type=Path)
    checking.add_argument("out", type=Path)
    checking.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "make":
        make(options.out, options.steps, options.models)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if not check(options.python, options.out, options.folders):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
