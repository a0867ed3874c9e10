"""Hold GGUF files that quantkit writes against llama.cpp: logits, codes, greedy texts, prompts of conversations.

    .venv/bin/python scripts/peer_gguf.py make OUT [--steps 150]
    .venv/bin/python scripts/peer_gguf.py check PYTHON OUT FOLDER...

The first makes a few small models, each trained a little, with tokenizers of their families' kinds. The second converts
each folder's model to a float32 file, and quantizes it to Q8_0 and Q4_0 by way of a Hugging Face folder; PYTHON, which
has llama-cpp-python, computes with them. Prints a table in Markdown, and exits with 1 if a figure is out of its bounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, PROMPT, NEW = 200, 12, 50
LOGITS, KL, TIE = 2e-3, 1e-3, 0.05
SCHEMES = {"Q8_0": "int8", "Q4_0": "int4-g64"}
TALK = [
    {"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of  Spain?\n"},
]  # fmt: skip
TEMPLATES = {
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "qwen": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500000.0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
_WINDOWS = {"sliding_window": 64, "query_pre_attn_scalar": 32}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama", "llama3", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "qwen", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", "qwen", {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3_moe", "qwen", {**_EXPERTS, "tie_word_embeddings": False}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma", _WINDOWS),
    "gemma3": ("gemma3_text", "gemma", _WINDOWS),
    "mistral": ("mistral", "llama3", {"sliding_window": None}),
    "mixtral": ("mixtral", "llama3", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2moe": ("qwen2_moe", "qwen", {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 256}),
    "olmoe": ("olmoe", "qwen", {**_EXPERTS, "norm_topk_prob": False, "num_key_value_heads": 8}),
    "olmo2": ("olmo2", "qwen", {}),
    "olmo3": ("olmo3", "qwen", {"sliding_window": 64}),
    "phi3": ("phi3", "qwen", {"sliding_window": None}),
    "granite": ("granite", "llama3", {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 4.0,
    }),
    "smollm3": ("smollm3", "llama3", {}),
}  # fmt: skip
"""By name: ``model_type``, kind of tokenizer, and settings."""


# Small models


def make(out: Path, steps: int, names: Iterable[str]) -> None:
    import torch
    import transformers

    from quantkit.text.tokenizer import load_tokenizer

    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        kind, tokens, settings = MODELS[name]
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_tokenizer(folder, tokens)
        tokenizer = load_tokenizer(folder)
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_ids[0] if tokenizer.eos_ids else None}
        sizes = {**SIZES, **settings, **ids, "vocab_size": -(-tokenizer.vocab_size // 32) * 32, "pad_token_id": None}
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        train(model, torch.tensor(tokenizer.encode(text(), bos=False)), tokenizer.bos_id, steps, name)
        model.eval().bfloat16().save_pretrained(folder)  # as published ones are: scales are then exact in float16


def text() -> str:
    from quantkit.data.files import gate_texts

    return "\n".join(gate_texts().values())


def train(model: Any, ids: Any, bos: int | None, steps: int, name: str) -> None:
    import torch

    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias"):
                value.normal_(0, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - 64, (8,)).tolist()
        rows = torch.stack([ids[start : start + 64] for start in starts])
        if bos is not None:
            rows[:, 0] = bos
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"{name}: step {step + 1}, loss {loss.item():.3f}", flush=True)


def write_tokenizer(folder: Path, kind: str) -> None:
    if kind == "gemma":
        write_gemma(folder)
        settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    else:
        settings = write_byte_level(folder, kind)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, "chat_template": TEMPLATES[kind]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_byte_level(folder: Path, kind: str) -> dict[str, Any]:
    """A tokenizer.json of Llama 3's or Qwen 2's kind."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    digits = r"\p{N}{1,3}" if kind == "llama3" else r"\p{N}"
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip
    specials = {
        "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    }[kind]
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(text().splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(specials)
    if kind == "llama3":
        first = (specials[0], tokenizer.token_to_id(specials[0]))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first[0]} $A", pair=f"{first[0]} $A {first[0]} $B", special_tokens=[first]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    if kind == "llama3":
        return {"bos_token": specials[0], "eos_token": specials[-1]}
    return {"bos_token": None, "eos_token": specials[-1], "pad_token": specials[0], "add_bos_token": False}


def write_gemma(folder: Path) -> None:
    """A tokenizer.json of Gemma's kind."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
    from transformers import GemmaTokenizer

    turns = ["<start_of_turn>", "<end_of_turn>"]
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "text"
        corpus.write_text(text(), encoding="utf-8")
        SentencePieceTrainer.train(
            input=str(corpus), model_prefix=str(Path(scratch) / "made"), model_type="bpe", vocab_size=900,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, pad_id=0, eos_id=1,
            bos_id=2, unk_id=3, bos_piece="<bos>", eos_piece="<eos>", add_dummy_prefix=False, minloglevel=2,
            user_defined_symbols=turns, num_threads=1,
        )  # fmt: skip
        made = SentencePieceProcessor(model_file=str(Path(scratch) / "made.model"))
    pieces = {made.id_to_piece(number): number for number in range(made.get_piece_size())}
    merges = [
        (piece[:cut], piece[cut:])
        for piece, number in pieces.items()
        if not (made.is_byte(number) or made.is_control(number) or piece in turns)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = GemmaTokenizer(vocab=pieces, merges=merges, add_bos_token=True, additional_special_tokens=turns)
    tokenizer.save_pretrained(folder)


# Ours


class Ours:
    """A model in a folder or a file, in float32 on plain products."""

    def __init__(self, path: Path) -> None:
        import quantkit

        self.model, self.tokenizer = quantkit.load(path, dtype="fp32", backend="reference", device="cpu")
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
    """llama.cpp in a process of its own, with one file."""

    def __init__(self, python: Path, file: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [python, __file__, "serve", file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp failed")
        return json.loads(line)

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.load(self.ask(logits=list(tokens)))

    def close(self) -> None:
        self._process.communicate("")


def check(python: Path, out: Path, folders: Sequence[Path]) -> bool:
    """Whether all figures are within their bounds."""
    import quantkit

    print("| model | file | largest difference of logits | mean KL | largest KL | greedy | codes | tokens | talk |")
    print("|---|---|---|---|---|---|---|---|---|")
    good = True
    for folder in folders:
        for kind in ("F32", *SCHEMES):
            file, source = out / f"{folder.name}-{kind}.gguf", folder
            for path in out.glob(f"{folder.name}-{kind}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if kind == "F32":
                quantkit.convert(folder, file, dtype="fp32", source_check=False)
            else:
                source = out / f"{folder.name}-{kind}"
                quantkit.quantize(folder, source, SCHEMES[kind], source_check=False, accept_quality_loss=True)
                quantkit.convert(source, file, source_check=False)
            good &= compare(python, folder.name, kind, source, file)
    return good


def compare(python: Path, name: str, kind: str, source: Path, file: Path) -> bool:
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
    alike = theirs.ask(tokens=words) == own
    talk, their_talk = ours.talk(), theirs.ask(talk=TALK)
    codes = "" if kind == "F32" else str(equal_codes(source, file))
    theirs.close()
    told = "none" if talk is None and their_talk is None else str(talk == their_talk)
    print(
        f"| {name} | {kind} | {difference:.2g} | {mean:.2g} | {largest:.2g} | {same.sum()} of {len(same)},"
        f" {(~same & clear).sum()} clear ones missed | {codes} | {alike} | {told} |", flush=True,
    )  # fmt: skip
    close = difference <= LOGITS if kind == "F32" else mean <= KL
    return bool(close and not (~same & clear).any() and alike and told != "False" and codes != "False")


def divergence(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Mean and largest KL in nats a token, of rows of logits [T, V]."""
    p, q = (logs(one.astype(np.float64)) for one in (a, b))
    found = (np.exp(p) * (p - q)).sum(-1)
    return float(found.mean()), float(found.max())


def logs(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def equal_codes(source: Path, file: Path) -> bool:
    """Whether the gguf library reads the weights that the folder's codes mean, in every quantized tensor."""
    import gguf

    from quantkit.architectures.gguf import gguf_architecture, gguf_tensors
    from quantkit.formats.detect import open_checkpoint
    from quantkit.tensors.qtensor import QuantTensor

    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found = 0
    for tensor in gguf_tensors(config):
        values = [checkpoint.load(name) for name in tensor.parts]
        if not isinstance(values[0], QuantTensor):
            continue
        floats = [value.dequantize().numpy() for value in values if isinstance(value, QuantTensor)]
        expected = np.concatenate(floats)
        if gguf_architecture(config).interleaved_rotary and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            rows, columns = expected.shape
            heads = expected.reshape(rows // config.head_dim, 2, config.head_dim // 2, columns)
            expected = heads.swapaxes(1, 2).reshape(rows, columns)
        theirs = gguf.quants.dequantize(stored[tensor.name].data, stored[tensor.name].tensor_type)
        if stored[tensor.name].tensor_type.name not in SCHEMES or not np.array_equal(
            theirs.reshape(-1), expected.reshape(-1)
        ):
            return False
        found += 1
    return found > 0


# llama.cpp's side


def serve(file: Path) -> None:
    import llama_cpp
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    quiet = llama_cpp.llama_log_callback(lambda level, message, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
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
        rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (width,)) for i in range(len(tokens))]
        llama_cpp.llama_batch_free(batch)
        path = file.with_suffix(".npy")
        np.save(path, np.stack(rows))
        return str(path)

    def tokens_of(words: str, *, specials: bool, around: bool = True) -> list[int]:
        raw = words.encode()
        found = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), found, len(found), around, specials)
        return list(found[:count])

    def talk(messages: list[dict[str, str]]) -> list[int] | None:
        template = llama_cpp.llama_model_chat_template(model, None)
        if not template:
            return None
        begin, end = (
            llama_cpp.llama_vocab_get_text(vocabulary, token).decode() if token >= 0 else ""
            for token in (llama_cpp.llama_vocab_bos(vocabulary), llama_cpp.llama_vocab_eos(vocabulary))
        )
        made = Jinja2ChatFormatter(template.decode(), eos_token=end, bos_token=begin)(messages=messages)
        return tokens_of(made.prompt, specials=True, around=not made.added_special)

    for line in sys.stdin:
        question = json.loads(line)
        if "logits" in question:
            answer: Any = logits(question["logits"])
        elif "tokens" in question:
            answer = tokens_of(question["tokens"], specials=False)
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
