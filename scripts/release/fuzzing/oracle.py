"""An independent reading of a checkpoint: torch.load without mmap, safetensors' and gguf's own
readers, zipfile's CRC.

Nothing here imports quantkit. Names are Hugging Face's, rotary rows in its order. A reading may
refuse a folder: any exception is a refusal.
"""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

_META = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GGUF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GGUF_CODES = ("Q4_0", "Q8_0")
_GGUF_EXACT = ("Q4_0", "Q5_0", "Q8_0")  # of embedding and head, which float32 has exactly
_UNSEEN = 1e-17  # errors whose squares a search in float32 may lose
_WEIGHTED = 3.0  # a group may lose more where the errors of other inputs count more
_COLUMNS = ("attention.wo", "feed_forward.w2")
_DERIVED = re.compile(r"(.*\.)?(rope\.freqs|freqs_cis|rotary_emb\.\w+)")


class Refused(Exception):
    """The folder is no checkpoint that this reading knows."""


def read(folder: Path, *, checksums: bool = True) -> dict[str, Tensor]:
    """All tensors of a folder as stored, by Hugging Face's names; Meta's shards joined, rotary rows
    in order.

    Args:
        checksums: hold the records of a zip against their CRC.

    Raises:
        Exception: of whatever kind, where a reader refuses, a CRC is wrong, or a record is too
            short.
    """
    found: dict[str, Tensor] = {}
    for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{kind}.index.json"
        if index.is_file():
            listed = json.loads(index.read_text())["weight_map"]
            files = {file: _load(folder / file, checksums) for file in sorted(set(listed.values()))}
            found = {name: files[file][name] for name, file in listed.items()}
        else:
            for path in sorted(folder.glob(f"{stem}*.{kind}")):
                found.update(_load(path, checksums))
        if found:
            break
    else:
        files = sorted(folder.glob("*.gguf"))
        found = _of_gguf(files) if files else _joined(folder, checksums)
    return {name: tensor for name, tensor in found.items() if not _DERIVED.fullmatch(name)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> str | None:
    """How two readings differ to the bit, None if they do not; a head that is absent is the
    embedding.
    """
    a, b = _untied(a), _untied(b)
    if difference := sorted(set(a) ^ set(b)):
        return f"tensor {difference[0]} is in one only"
    for name, tensor in a.items():
        if problem := differs(tensor, b[name]):
            return f"tensor {name}: {problem}"
    return None


def plain_nans(value: Tensor) -> Tensor:
    """Weights with every NaN the same, as where they were computed."""
    return value.masked_fill(value.isnan(), torch.nan)


def as_numbers(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A reading whose floats are all float32."""
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in found.items()
    }


def differs(a: Tensor, b: Tensor) -> str | None:
    """How two tensors differ to the bit, None if they do not."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    if torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    ):
        return None
    return f"largest difference {(a.double() - b.double()).abs().max().item():.3g}"


def dequantized(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compressed-tensors layers as floats: (code - zero point) * scale in float32; other tensors
    as they are.
    """
    found = {name: tensor for name, tensor in stored.items() if ".weight_" not in name}
    for name, packed in stored.items():
        if name.endswith("_packed"):
            found[name.removesuffix("_packed")] = _layer(
                stored, name.removesuffix("_packed"), packed
            ).values
    return found


def rounded(stored: dict[str, Tensor], source: dict[str, Tensor]) -> str | None:
    """Where a quantized model is not a rounding of its source, with each weight at its nearest code
    and no group much further from the source than on the scale that spans it; None if it is one.
    """
    source = _untied(source)
    plain = _untied({name: tensor for name, tensor in stored.items() if ".weight_" not in name})
    packed = {
        name.removesuffix("_packed"): t for name, t in stored.items() if name.endswith("_packed")
    }
    if difference := sorted((set(plain) | set(packed)) ^ set(source)):
        return f"tensor {difference[0]} is in one only"
    for name, tensor in plain.items():
        if name not in packed and (problem := differs(tensor, source[name])):
            return f"tensor {name}: {problem}"
    for name, words in packed.items():
        problem = _badly_rounded(stored, name, words, source[name].float())
        if problem is not None:
            return f"tensor {name}: {problem}"
    return None


def _badly_rounded(
    stored: dict[str, Tensor], name: str, packed: Tensor, weight: Tensor
) -> str | None:
    """What is wrong with the rounding of one layer."""
    layer = _layer(stored, name, packed)
    if layer.values.shape != weight.shape:
        return f"{list(layer.values.shape)} against {list(weight.shape)}"
    dtype = stored[name + "_scale"].dtype
    info = torch.finfo(dtype)
    # What steps of subnormal scales may be wrong by.
    smallest = 256 * info.smallest_normal * info.eps
    wanted = weight / layer.step + layer.zero
    clipped = ((wanted < 0) & (layer.codes == 0)) | (
        (wanted > layer.top) & (layer.codes == layer.top)
    )
    excess = (layer.values - weight).abs() - (0.5 * layer.step.abs() * (1 + 1e-3) + smallest)
    if not bool(((excess <= 0) | clipped).all()):
        return f"{excess.max().item():.3g} beyond half a step"
    shape = *stored[name + "_scale"].shape, -1
    found = _norms((layer.values - weight).view(shape))
    spanning = _norms(
        _spanning_errors(weight.view(shape), layer.top, name + "_zero_point" in stored, dtype)
    )
    more = found - spanning * _WEIGHTED - smallest - _UNSEEN
    if not bool((more <= 0).all()):
        return f"the error of a group exceeds {_WEIGHTED:g} times that on the scale that spans it"
    return None


def _spanning_errors(weight: Tensor, top: int, zeros: bool, dtype: torch.dtype) -> Tensor:
    """Errors of groups [O, G, S] on the scales, stored in a float type, that spread their largest
    magnitudes, or with zero points their ranges, over all codes.
    """
    low, high = (
        weight.amin(-1, keepdim=True).clamp(max=0),
        weight.amax(-1, keepdim=True).clamp(min=0),
    )
    span = (high - low) / top if zeros else torch.maximum(high, -low) / (top / 2)
    step = span.to(dtype).float()
    zero = (-low / step).round().clamp(0, top) if zeros else (top + 1) // 2
    values = ((weight / step).round().add(zero).clamp(0, top) - zero) * step
    return torch.where(step > 0, values - weight, weight)


def _norms(groups: Tensor) -> Tensor:
    return torch.linalg.vector_norm(groups, dim=-1, dtype=torch.float64)


@dataclass(frozen=True)
class _Layer:
    """One layer's codes [O, I], from 0 to `top`; the zero point and the step at each of them,
    and their values.
    """

    codes: Tensor
    top: int
    zero: Tensor
    step: Tensor

    @property
    def values(self) -> Tensor:
        return (self.codes - self.zero) * self.step


def _layer(stored: dict[str, Tensor], name: str, packed: Tensor) -> _Layer:
    rows, columns = stored[name + "_shape"].tolist()
    scale = stored[name + "_scale"].float()
    bits, group = packed.shape[1] * 32 // columns, columns // scale.shape[1]
    zero = torch.full_like(scale, 1 << (bits - 1))
    if name + "_zero_point" in stored:
        zero = _unpacked(stored[name + "_zero_point"].T, bits)[:, :rows].T
    wide = (one.repeat_interleave(group, 1) for one in (zero, scale))
    return _Layer(_unpacked(packed, bits)[:, :columns], (1 << bits) - 1, *wide)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes [..., N] of int32 words, least significant bits first."""
    shifts = torch.arange(0, 32, bits)
    return ((words.unsqueeze(-1).long() >> shifts) & ((1 << bits) - 1)).flatten(-2).float()


def _untied(found: dict[str, Tensor]) -> dict[str, Tensor]:
    if "lm_head.weight" in found or "model.embed_tokens.weight" not in found:
        return found
    return {**found, "lm_head.weight": found["model.embed_tokens.weight"]}


def _load(path: Path, checksums: bool) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value: Any = torch.load(path, map_location="cpu", mmap=False, weights_only=True)
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            _check_records(path, checksums)
    return value["model"] if set(value) == {"model"} else value


def _check_records(path: Path, checksums: bool) -> None:
    """Hold the headers of the pickle and of all data against the zip's directory, and their bytes
    against their CRC.

    torch itself holds the records' sizes against the pickle. A file whose CRC are all 0 was written
    with its CRC switched off.
    """
    try:
        archive = zipfile.ZipFile(path)
    except NotImplementedError:
        if checksums:
            raise
        return  # a feature that zipfile lacks says nothing of the bytes; torch has read them
    with archive:
        infos = archive.infolist()
        known = any(info.CRC for info in infos)
        for info in infos:
            if "/data/" in info.filename or info.filename.endswith("data.pkl"):
                with archive.open(info) as record:
                    if checksums and known:
                        record.read()


def _joined(folder: Path, checksums: bool) -> dict[str, Tensor]:
    """Meta's shards as one model."""
    params = json.loads((folder / "params.json").read_text())
    shards = [_load(path, checksums) for path in sorted(folder.glob("consolidated.*.pth"))]
    head = params.get("head_dim")
    head = int(params["dim"]) // int(params["n_heads"]) if head is None else int(head)
    found = {}
    for name in shards[0]:
        if _DERIVED.fullmatch(name):
            continue
        match = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name)
        if match is None or match[2] not in _META:
            raise Refused(f"no weight of the architecture: {name}")
        parts = [shard[name] for shard in shards]
        if parts[0].dim() == 1:
            whole = parts[0]
        elif match[2] == "tok_embeddings":
            whole = torch.cat(parts, 0 if parts[0].shape[1] == int(params["dim"]) else 1)
        else:
            whole = torch.cat(parts, 1 if match[2] in _COLUMNS else 0)
        if match[2] in ("attention.wq", "attention.wk"):
            whole = (
                whole.view(-1, head // 2, 2, whole.shape[1]).transpose(1, 2).reshape(whole.shape)
            )
        found[f"{'model.' + match[1] if match[1] else ''}{_META[match[2]]}.weight"] = whole
    return found


def _of_gguf(paths: Sequence[Path]) -> dict[str, Tensor]:
    """A Llama in GGUF: floats as they are stored, all else in float32; what has no codes here in
    the type of most matrices that are floats, but an embedding and a head.
    """
    readers = [gguf.GGUFReader(path) for path in paths]
    keys = {
        name: field.contents()
        for name, field in readers[0].fields.items()
        if name.startswith(("llama.", "gen"))
    }
    if keys["general.architecture"] != "llama":
        raise Refused("no Llama")
    heads = {"attn_q": int(keys["llama.attention.head_count"])}
    heads["attn_k"] = int(keys.get("llama.attention.head_count_kv", heads["attn_q"]))
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.tensor_type.name in _GGUF_FLOATS:
            sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    common = _GGUF_FLOATS[sizes.most_common(1)[0][0]] if sizes else torch.bfloat16
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        if tensor.name == "rope_freqs.weight":
            continue
        if match is None or match[2] not in _GGUF:
            raise Refused(f"no weight of the architecture: {tensor.name}")
        kind, shape = tensor.tensor_type, [int(size) for size in reversed(tensor.shape)]
        value = torch.from_numpy(gguf.dequantize(tensor.data, kind).copy()).view(shape)
        if kind.name not in (_GGUF_EXACT if match[1] is None else _GGUF_CODES):
            value = value.to(_GGUF_FLOATS.get(kind.name, common))
        if match[2] in heads:
            count = heads[match[2]]
            value = (
                value.view(count, shape[0] // count // 2, 2, shape[1])
                .transpose(1, 2)
                .reshape(shape)
            )
        found[f"{f'model.layers.{match[1]}.' if match[1] else ''}{_GGUF[match[2]]}.weight"] = (
            plain_nans(value)
        )
    return found
