"""The sound folders that inputs are mutated from, made on the spot by torch, safetensors and
quantkit.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.jobs.output import writer as output

MTIME_NS = 1_700_000_000 * 10**9
"""Of every source file: a journal remembers it."""
PARTIAL = "dst.partial"

DIM, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 1
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": DIM,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TYPES = [
    gguf.GGMLQuantizationType[name]
    for name in ("Q4_0", "Q8_0", "Q5_1", "Q4_1", "Q5_0", "BF16", "F32", "MXFP4")
]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Base:
    """One sound folder, or one with the interrupted run next to it.

    Attributes:
        files: contents by path, ``src/...`` or ``dst.partial/...``.
        whole: commands that it goes through as a whole: ``convert-hf``, ``quantize-int8`` and the
            like.
        light: whether it also goes through `inspect` and the opener alone.
    """

    name: str
    files: dict[str, bytes]
    whole: tuple[str, ...] = field(default=())
    light: bool = True


_FLOAT_JOBS = ("convert-hf", "convert-meta", "quantize-int8", "quantize-int4-g32")
# What each base goes through as a whole. A random model with a tokenizer would rightly be refused.
_WHOLE = {
    "meta-1": (),
    "meta-2": _FLOAT_JOBS,
    "meta-own": _FLOAT_JOBS,
    "meta-tiktoken": (),
    "meta-no-crc": _FLOAT_JOBS,
    "hf": (),
    "hf-sentencepiece": (),
    "hf-sharded": _FLOAT_JOBS,
    "bin": _FLOAT_JOBS,
    "bin-sharded": _FLOAT_JOBS,
    "bin-legacy": _FLOAT_JOBS,
    "int8": ("convert-hf", "verify"),
    "int4": ("convert-hf", "verify"),
    "converted": ("verify",),
    "resume-hf": ("resume-convert-hf",),
    "resume-meta": ("resume-convert-meta",),
    "resume-quantize": ("resume-quantize-int4-g32",),
    "demo-meta": _FLOAT_JOBS,
    "demo-hf": _FLOAT_JOBS,
    "demo-int4": ("convert-hf", "verify"),
    "gguf": (),
    "gguf-split": (),
    "gguf-types": (),
    "demo-gguf": ("convert-hf", "quantize-int8", "verify"),
    "demo-gguf-int4": ("verify",),
}
_NOT_LIGHT = {
    "converted",
    "resume-hf",
    "resume-meta",
    "resume-quantize",
    "demo-meta",
    "demo-hf",
    "demo-int4",
    "demo-gguf",
    "demo-gguf-int4",
}


def read_bases(folder: Path) -> list[Base]:
    """The bases that `write_bases` left in a folder."""
    found = []
    for name, whole in _WHOLE.items():
        paths = sorted(p for p in (folder / name).rglob("*") if p.is_file())
        files = {str(p.relative_to(folder / name)): p.read_bytes() for p in paths}
        found.append(Base(name, files, whole, name not in _NOT_LIGHT))
    return found


def write_bases(folder: Path) -> None:
    """Make ``folder/NAME/src``; with an interrupted run, ``folder/NAME/dst.partial`` too."""
    meta_1 = _new(folder, "meta-1")
    _meta(meta_1, shards=1, vocabulary=2048)
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", meta_1 / "tokenizer.model")
    _meta(_new(folder, "meta-2"), shards=2, vocabulary=96)
    tiktoken = _new(folder, "meta-tiktoken")
    (tiktoken / "tokenizer.model").write_bytes(_tiktoken(300))
    _meta(tiktoken, shards=1, vocabulary=300 + 256, rows_of_embedding=True)
    torch.serialization.set_crc32_options(False)
    try:
        _meta(_new(folder, "meta-no-crc"), shards=1, vocabulary=96)
    finally:
        torch.serialization.set_crc32_options(True)

    hf = _new(folder, "hf")
    _tokenizer_json(hf)
    _config(hf, vocab_size=300, rope_scaling=LLAMA3_ROPE, torch_dtype="float16")
    halves = {name: weight.half() for name, weight in _weights(300).items()}
    save_file(halves, hf / "model.safetensors", metadata={"format": "pt"})
    sharded = _new(folder, "hf-sharded")
    _config(sharded, vocab_size=96)
    _shards(sharded, "model", "safetensors")
    bin_single = _new(folder, "bin")
    _config(bin_single, vocab_size=96, torch_dtype="float32")
    torch.save(_views(), bin_single / "pytorch_model.bin")
    bin_sharded = _new(folder, "bin-sharded")
    _config(bin_sharded, vocab_size=96, tie_word_embeddings=True)
    _shards(bin_sharded, "pytorch_model", "bin", tied=True)
    legacy = _new(folder, "bin-legacy")
    _config(legacy, vocab_size=96, torch_dtype="float32")
    torch.save(_views(), legacy / "pytorch_model.bin", _use_new_zipfile_serialization=False)

    for name, scheme in (("int8", "int8"), ("int4", "int4-g32-asym")):
        quantkit.quantize(
            sharded, _home(folder, name), scheme, method="rtn", accept_quality_loss=True
        )
    quantkit.convert(bin_single, _home(folder, "converted"))
    quantkit.convert(sharded, _home(folder, "meta-own"), to="meta", mp=2)
    shutil.copytree(DEMO_MODEL, _home(folder, "demo-meta"), copy_function=shutil.copyfile)
    quantkit.convert(DEMO_MODEL, _home(folder, "demo-hf"))
    quantkit.quantize(DEMO_MODEL, _home(folder, "demo-int4"), "int4-g32", method="rtn")
    pieces = _new(folder, "hf-sentencepiece")
    _config(pieces, vocab_size=2048)
    save_file(_weights(2048), pieces / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / "demo-hf" / "src" / name, pieces / name)
    for name in ("resume-hf", "resume-meta", "resume-quantize"):
        _interrupted(folder, name)

    quantkit.convert(hf, _home(folder, "gguf"), to="gguf", source_check=False)
    quantkit.convert(
        hf, _home(folder, "gguf-split"), to="gguf", source_check=False, split_max_size=30_000
    )
    _with_types(folder / "gguf" / "src" / "model.gguf", _new(folder, "gguf-types") / "model.gguf")
    quantkit.convert(DEMO_MODEL, _home(folder, "demo-gguf"), to="gguf")
    quantkit.quantize(
        DEMO_MODEL, _home(folder, "demo-gguf-int4"), "int4-g32", method="rtn", to="gguf"
    )


def _home(folder: Path, name: str) -> Path:
    path = folder / name / "src"
    path.parent.mkdir(parents=True)
    return path


def _new(folder: Path, name: str) -> Path:
    path = _home(folder, name)
    path.mkdir()
    return path


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Weights so small that the model is nearly linear: quantizing it passes the gate."""
    return torch.empty(rows, columns).normal_(0, 0.05, generator=generator).bfloat16()


def _weights(vocabulary: int, *, tied: bool = False) -> dict[str, Tensor]:
    """A random model by Hugging Face's names."""
    generator = torch.Generator().manual_seed(vocabulary)
    kv = DIM // HEADS * KV_HEADS
    norm = torch.ones(DIM, dtype=torch.bfloat16)
    found = {
        "model.embed_tokens.weight": _random(vocabulary, DIM, generator),
        "model.norm.weight": norm,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found[prefix + "input_layernorm.weight"] = norm.clone()
        found[prefix + "post_attention_layernorm.weight"] = norm.clone()
        for name, rows, columns in (
            ("self_attn.q_proj", DIM, DIM),
            ("self_attn.k_proj", kv, DIM),
            ("self_attn.v_proj", kv, DIM),
            ("self_attn.o_proj", DIM, DIM),
            ("mlp.gate_proj", FEED_FORWARD, DIM),
            ("mlp.up_proj", FEED_FORWARD, DIM),
            ("mlp.down_proj", DIM, FEED_FORWARD),
        ):
            found[f"{prefix}{name}.weight"] = _random(rows, columns, generator)
    if not tied:
        found["lm_head.weight"] = _random(vocabulary, DIM, generator)
    return found


def _views() -> dict[str, Tensor]:
    """A random model in float32, of which some tensors share a storage and one is transposed."""
    found = {name: weight.float() for name, weight in _weights(96).items()}
    down = "model.layers.0.mlp.down_proj.weight"
    found[down] = found[down].T.contiguous().T
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    joined = torch.cat([found[name] for name in names])
    found.update(zip(names, joined.split([len(found[name]) for name in names]), strict=True))
    return found


def _config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}, indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [2], "top_p": 0.9})
    )


def _shards(folder: Path, stem: str, kind: str, *, tied: bool = False) -> None:
    weights = _weights(96, tied=tied)
    names = sorted(weights)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"{stem}-{number:05d}-of-00002.{kind}"
        weight_map.update(dict.fromkeys(part, file))
        chosen = {name: weights[name] for name in part}
        if kind == "safetensors":
            save_file(chosen, folder / file, metadata={"format": "pt"})
        else:
            torch.save(chosen, folder / file)
    index = {
        "metadata": {"total_size": sum(w.nbytes for w in weights.values())},
        "weight_map": weight_map,
    }
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index, indent=2))


def _meta(folder: Path, *, shards: int, vocabulary: int, rows_of_embedding: bool = False) -> None:
    """A random Meta checkpoint; its rotary rows are as random as any, so none need be permuted."""
    generator = torch.Generator().manual_seed(shards)
    kv = DIM // HEADS * KV_HEADS
    params = {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "norm_eps": 1e-5,
        "vocab_size": -1,
        "multiple_of": 32,
        "max_seq_len": 64,
    }
    (folder / "params.json").write_text(json.dumps(params))
    for rank in range(shards):
        rows, columns = (
            (vocabulary // shards, DIM) if rows_of_embedding else (vocabulary, DIM // shards)
        )
        state = {"tok_embeddings.weight": _random(rows, columns, generator)}
        for layer in range(LAYERS):
            prefix = f"layers.{layer}."
            for name, rows, columns in (
                ("attention.wq", DIM // shards, DIM),
                ("attention.wk", kv // shards, DIM),
                ("attention.wv", kv // shards, DIM),
                ("attention.wo", DIM, DIM // shards),
                ("feed_forward.w1", FEED_FORWARD // shards, DIM),
                ("feed_forward.w2", DIM, FEED_FORWARD // shards),
                ("feed_forward.w3", FEED_FORWARD // shards, DIM),
            ):
                state[f"{prefix}{name}.weight"] = _random(rows, columns, generator)
            for name in ("attention_norm", "ffn_norm"):
                state[f"{prefix}{name}.weight"] = torch.ones(DIM, dtype=torch.bfloat16)
        state["rope.freqs"] = torch.ones(DIM // HEADS // 2)
        state["norm.weight"] = torch.ones(DIM, dtype=torch.bfloat16)
        state["output.weight"] = _random(vocabulary // shards, DIM, generator)
        torch.save(state, folder / f"consolidated.{rank:02d}.pth")


def _tiktoken(count: int) -> bytes:
    tokens = [bytes([byte]) for byte in range(256)] + [b"t" + bytes([97 + n]) for n in range(26)]
    tokens += [b"th" + bytes([97 + n]) for n in range(count - len(tokens))]
    return b"".join(
        base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)
    )


def _tokenizer_json(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: rank for rank, token in enumerate(["<unk>", "<s>", "</s>", *alphabet, "th", "the"])
    }
    engine = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<s>", "</s>"])
    engine.save(str(folder / "tokenizer.json"))
    bos_token = {"content": "<s>", "__type": "AddedToken"}
    settings = {"bos_token": bos_token, "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _with_types(source: Path, path: Path) -> None:
    """A GGUF file with its matrices in several types."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for one in reader.fields.values():
        if not one.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(
                one.name, one.contents(), one.types[0], one.types[1] if len(one.types) > 1 else None
            )
    for number, tensor in enumerate(reader.tensors):
        kind, values = tensor.tensor_type, gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            kind = _TYPES[number % len(_TYPES)]
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interrupted(folder: Path, name: str) -> None:
    """A source, and what an interrupted run on it left, with several lines in the journal."""
    src = _home(folder, name)
    shutil.copytree(folder / "hf-sharded" / "src", src)
    for file in src.iterdir():
        os.utime(file, ns=(MTIME_NS, MTIME_NS))
    dst = folder / name / "dst"

    def stop(phase: str, done: int, total: int, _: str) -> None:
        if phase in ("convert", "quantize") and 2 * done >= total:
            raise KeyboardInterrupt

    usual = output.SAFE_POINT_BYTES
    output.SAFE_POINT_BYTES = 5_000  # the journal of so small a model would have one line
    try:
        if name == "resume-quantize":
            quantkit.quantize(src, dst, "int4-g32", method="rtn", progress=stop)
        else:
            to, mp = name.removeprefix("resume-"), 1 if name == "resume-hf" else 2
            quantkit.convert(src, dst, to=to, mp=mp, progress=stop)
    except KeyboardInterrupt:
        return
    finally:
        output.SAFE_POINT_BYTES = usual
    raise RuntimeError(f"{name}: the run was not interrupted")


def in_a_child(work: Any, *arguments: Any) -> None:
    """Run something in a forked process, so that this one starts no threads and can be forked
    again.

    Raises:
        RuntimeError: if it failed; its traceback is on stderr.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            warnings.simplefilter("ignore")
            work(*arguments)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("the base models could not be made")


def targets(bases: list[Base], *, whole: bool) -> Iterator[tuple[Base, str]]:
    """Every file that a light or a whole trial may mutate."""
    for base in bases:
        if base.whole if whole else base.light:
            yield from ((base, path) for path in base.files)
