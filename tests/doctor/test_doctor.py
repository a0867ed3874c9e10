"""The doctor: each rule finds the folder that was broken for it, and nothing else; sound folders
have nothing.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import broken_folders as build
import families
import oracle
import pytest
import torch
from broken_folders import DOWN, HIDDEN, LINEARS, VOCABULARY, Q
from command import Capture, run
from error_parts import raises
from paths import ROOT
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.doctor.findings import RUNTIMES, Finding, Rule, rules
from quantkit.errors import RequestError
from quantkit.formats.codecs import vllm, vllm_settings

ALL = {rule.name: rule for theme in rules().values() for rule in theme}
FIRST = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Change = Callable[[build.Tensors, dict[str, Any]], object]


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A folder broken for one rule.

    Attributes:
        change: what is done to tensors and config before they are written.
        damage: what is done to the folder then.
        requested: the arguments of `diagnose`.
    """

    rule: str
    form: str = "floats"
    shards: int = 1
    change: Change = _nothing
    damage: Callable[[Path], object] = _nothing
    requested: dict[str, Any] = field(default_factory=dict)


DEEP = {"deep": True}


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["quantization_config"]
    return found


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    """Of compressed-tensors' first group."""
    found: dict[str, Any] = _settings(config)["config_groups"]["group_0"]["weights"]
    return found


def _second_group(targets: list[str], **weights: Any) -> Change:
    def change(_: build.Tensors, config: dict[str, Any]) -> None:
        own = {**_weights(config), **weights}
        _settings(config)["config_groups"]["group_1"] = {"targets": targets, "weights": own}

    return change


def _reencode(modules: list[str], encode: Callable[[torch.Tensor], build.Tensors]) -> Change:
    """Give modules another scheme than the others have."""

    def change(tensors: build.Tensors, _: dict[str, Any]) -> None:
        source = build.floats()
        for module in modules:
            for name in [name for name in tensors if name.startswith(f"{module}.")]:
                del tensors[name]
            tensors |= {
                f"{module}.{leaf}": one for leaf, one in encode(source[f"{module}.weight"]).items()
            }

    return change


def _both(*changes: Change) -> Change:
    return lambda tensors, config: [change(tensors, config) for change in changes]


def _without(*names: str) -> Change:
    return lambda tensors, _: [tensors.pop(name) for name in names]


def _configured(**changes: Any) -> Change:
    return lambda _, config: config.update(changes)


def _setting(**changes: Any) -> Change:
    return lambda _, config: _settings(config).update(changes)


def _filled(name: str, value: float, rows: slice = slice(None)) -> Change:
    return lambda tensors, _: tensors[name][rows].fill_(value)


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, _: tensors.update({name: change(tensors[name])})


def _added_tensor(name: str, value: torch.Tensor) -> Change:
    return lambda tensors, _: tensors.update({name: value})


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def _edited(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: build.edit(folder, name, **changes)


def _written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _removed(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def _moved_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop("model.norm.weight")
    build.put(folder, INDEX, index)


def _without_metadata(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["metadata"]
    build.put(folder, INDEX, index)


def _outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["extra"] = "../other.safetensors"
    build.put(folder, INDEX, index)


def _second_file(folder: Path) -> None:
    """Tensors once more, in a second file that looks like the model's."""
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model-00001-of-00001.safetensors").write_bytes(content)


def _added(number: int) -> dict[str, Any]:
    return {**build.tokenizer()["added_tokens"][0], "id": number, "content": "<x>"}


def _words(*words: str) -> dict[str, Any]:
    """The model of a tokenizer.json."""
    return {
        "type": "WordLevel",
        "vocab": {word: index for index, word in enumerate(words)},
        "unk_token": words[0],
    }


def _randomized(folder: Path) -> None:
    """Let the tokenizer leave out merges at random."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"] |= {"type": "BPE", "merges": [], "dropout": 0.1}
    build.put(folder, "tokenizer.json", raw)


def _json_changed(name: str, *keys: str, value: Any) -> Callable[[Path], None]:
    """Give a place deep in a file of JSON another value."""

    def damage(folder: Path) -> None:
        raw = json.loads((folder / name).read_text())
        inner = raw
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        build.put(folder, name, raw)

    return damage


def _linked(name: str, to: str = "nowhere") -> Callable[[Path], object]:
    """A link in the place of a file."""
    return lambda folder: [(folder / name).unlink(), (folder / name).symlink_to(to)]


def _piped(name: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink(missing_ok=True), os.mkfifo(folder / name)]


def _indexed(file: str) -> Callable[[Path], None]:
    """One tensor that the index sends to a file."""
    return _json_changed(INDEX, "weight_map", "extra", value=file)


def _instruct(folder: Path) -> None:
    build.edit(folder, "config.json", _name_or_path="someone/Tiny-Instruct")


def _adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    build.put(folder, "adapter_config.json", {})


def _long_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
_ONE_OF_ONE = "model-00001-of-00001.safetensors"
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_ATTENTION = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
_GATE, _UP = (f"model.layers.1.mlp.{one}_proj" for one in ("gate", "up"))
_V_SCALE = "model.layers.1.self_attn.v_scale"
_Q_SCALE, _V_ZERO = _V_SCALE.replace("v_", "q_"), _V_SCALE.replace("scale", "zero_point")
_EXPERTS = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}


def _mixture(tensors: build.Tensors, config: dict[str, Any]) -> None:
    """A mixture of two experts, of which one layer's second is int8."""
    config.update(_EXPERTS)
    source = build.floats()
    for layer in range(build.LAYERS):
        prefix = f"model.layers.{layer}."
        for name in [name for name in tensors if name.startswith(f"{prefix}mlp.")]:
            del tensors[name]
        tensors[f"{prefix}block_sparse_moe.gate.weight"] = torch.randn(2, HIDDEN).bfloat16()
        for expert in range(2):
            for own, other in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
                weight = source[f"{prefix}mlp.{other}.weight"]
                bits = 8 if (layer, expert) == (1, 1) else 4
                module = f"{prefix}block_sparse_moe.experts.{expert}.{own}"
                tensors |= {
                    f"{module}.{leaf}": one for leaf, one in build.packed(weight, bits).items()
                }


def _mixed_experts(tensors: build.Tensors, config: dict[str, Any]) -> None:
    _mixture(tensors, config)
    _second_group([r"re:model\.layers\.1\..*experts\.1\..*"], num_bits=8)(tensors, config)


def _two_forms(tensors: build.Tensors, config: dict[str, Any]) -> None:
    """Experts apart, and one more than the config counts."""
    _mixed_experts(tensors, config)
    config["num_local_experts"] = 1


def _linear_attention(tensors: build.Tensors, config: dict[str, Any]) -> None:
    """A hybrid, whose second layer's attention is linear."""
    config.update(model_type="other")
    for name in [name for name in tensors if "layers.1.self_attn" in name]:
        tensors[name.replace("self_attn", "mixer")] = tensors.pop(name)
    tensors["model.layers.1.mixer.A_log"] = torch.zeros(4)


CASES = [
    # files
    Case("no-weights", damage=_removed("model.safetensors")),
    Case("adapter", damage=_adapter),
    Case("placeholder", shards=3, damage=_written(FIRST, _LFS)),
    Case(
        "placeholder", damage=_written("model.safetensors", b"<!DOCTYPE html><html>sign in</html>")
    ),
    Case("empty-file", shards=3, damage=_written(FIRST, b"")),
    Case("truncated-file", shards=3, damage=lambda folder: _cut(folder / FIRST)),
    Case("damaged-file", damage=_written("model.safetensors", struct.pack("<Q", 5) + b"[1,2]")),
    Case("missing-file", shards=3, damage=_removed(FIRST)),
    Case("missing-file", shards=3, damage=_removed(FIRST, INDEX)),
    Case("damaged-index", shards=3, damage=_written(INDEX, b"{}")),
    Case("damaged-index", shards=3, damage=_outside),
    Case("damaged-index", shards=3, damage=_without_metadata),
    Case("damaged-index", shards=3, damage=_indexed("foo.xyz")),
    Case("damaged-index", shards=3, damage=_indexed("x" * 5000 + ".safetensors")),
    Case("not-a-file", damage=_linked("config.json")),
    Case("not-a-file", damage=_linked("config.json", "config.json")),
    Case("not-a-file", damage=_piped("config.json")),
    Case("not-a-file", damage=_linked("tokenizer.json")),
    Case("not-a-file", damage=_linked("model.safetensors")),
    Case("not-a-file", damage=lambda folder: (folder / "added_tokens.json").symlink_to("nowhere")),
    Case(
        "not-a-file",
        damage=lambda folder: (folder / "preprocessor_config.json").symlink_to("nowhere"),
    ),
    Case("damaged-side-file", damage=_written("LICENSE", _LFS)),
    Case("damaged-side-file", damage=_written("chat_template.json", b"{")),
    Case("link-outside", damage=lambda folder: (folder / "LICENSE").symlink_to("/etc/hostname")),
    Case("stale-index", shards=3, damage=_moved_in_index),
    Case("tensor-twice", damage=_second_file),
    Case("no-index", shards=3, damage=_removed(INDEX)),
    Case("no-index", shards=3, damage=_removed(INDEX), requested={"runtime": "transformers"}),
    Case(
        "no-index",
        damage=lambda folder: (folder / "model.safetensors").rename(folder / _ONE_OF_ONE),
    ),
    Case(
        "stray-file",
        shards=3,
        damage=lambda folder: save_file({"x": torch.zeros(1)}, folder / "old.safetensors"),
    ),
    Case("no-config", damage=_removed("config.json")),
    Case("damaged-json", damage=_written("config.json", b'{"model_type": ')),
    # tensors
    Case("bad-config", change=_configured(num_attention_heads=0)),
    Case("bad-config", change=_configured(model_type=5)),
    Case("bad-config", change=_configured(rope_parameters=_ROPE, rope_theta=0)),
    Case("rope-conflict", change=_configured(rope_parameters={**_ROPE, "rope_theta": 5e5})),
    Case("not-read-here", "awq", change=_setting(version="gemv")),
    Case(
        "not-read-here", "mlx", change=lambda _, config: config["quantization"].update(mode="mxfp4")
    ),
    Case("unknown-setting", change=_configured(hidden_act="relu2")),
    Case("two-forms", "packed", change=_two_forms),
    Case("missing-tensor", change=_without(f"{DOWN}.weight")),
    Case("missing-tensor", change=_without("lm_head.weight")),
    Case("extra-tensor", change=_configured(num_hidden_layers=2)),
    Case(
        "extra-tensor", change=lambda tensors, _: tensors.update({f"{Q}.bias": torch.zeros(HIDDEN)})
    ),
    Case("wrong-shape", change=_changed(f"{DOWN}.weight", lambda weight: weight[:, :-1])),
    Case("wrong-type", change=_changed("model.norm.weight", lambda weight: weight.int())),
    Case("dropped-prediction", change=_configured(num_nextn_predict_layers=1)),
    Case("dropped-tower", change=_configured(vision_config={"depth": 2})),
    # quantized weights
    Case(
        "bad-settings", "packed", change=_setting(config_groups={"group_0": {"targets": "Linear"}})
    ),
    Case("bad-settings", "packed", change=_setting(ignore=["re:("])),
    Case("two-schemes", "packed", change=_second_group(["Linear"], num_bits=4, symmetric=False)),
    Case("names-nothing", "packed", change=_second_group(["model.layers.9.self_attn.q_proj"])),
    Case("not-quantized", "packed", change=_reencode([DOWN], lambda weight: {"weight": weight})),
    Case("not-quantized", "gptq", change=_reencode([DOWN], lambda weight: {"weight": weight})),
    Case("not-quantized", "awq", change=_reencode([DOWN], lambda weight: {"weight": weight})),
    Case(
        "not-quantized",
        "awq",
        change=_both(
            _configured(model_type="other"), _reencode([DOWN], lambda weight: {"weight": weight})
        ),
    ),
    Case("not-quantized", "fp8", change=_reencode([DOWN], lambda weight: {"weight": weight})),
    Case("not-in-config", "packed", change=_setting(ignore=["lm_head", DOWN])),
    Case("not-in-config", "awq", change=_setting(modules_to_not_convert=["1.mlp.down_proj"])),
    Case("not-in-config", "fp8", change=lambda _, config: config.pop("quantization_config")),
    Case("other-kind", "packed", change=_setting(format="int-quantized")),
    Case("bad-settings", "awq", change=_setting(quant_method=5)),
    Case("other-kind", "awq", change=_setting(quant_method="bitsandbytes")),
    Case("codes-type", "gptq", change=_changed(f"{DOWN}.qweight", lambda codes: codes.float())),
    Case(
        "codes-type", "packed", change=_changed(f"{DOWN}.weight_scale", lambda scale: scale.short())
    ),
    Case("incomplete", "packed", change=_without(f"{DOWN}.weight_scale")),
    Case("incomplete", "packed", change=_without(f"{DOWN}.weight_packed")),
    Case("incomplete", "packed-asym", change=_without(f"{DOWN}.weight_zero_point")),
    Case("incomplete", "gptq", change=_without(f"{DOWN}.qzeros")),
    Case("incomplete", "mlx", change=_without(f"{DOWN}.scales")),
    Case("incomplete", "fp8", change=_without(f"{DOWN}.weight_scale_inv")),
    Case(
        "codes-shape",
        "packed",
        change=_changed(f"{DOWN}.weight_packed", lambda codes: codes[:, :-1]),
    ),
    Case("codes-shape", "mlx", change=_changed(f"{DOWN}.weight", lambda codes: codes[:-1])),
    Case(
        "scale-shape",
        "packed",
        change=_changed(f"{DOWN}.weight_scale", lambda scale: scale[:, :-1]),
    ),
    Case("scale-shape", "fp8", change=_changed(f"{DOWN}.weight_scale_inv", torch.t)),
    Case("scale-shape", "awq", change=_changed(f"{DOWN}.scales", lambda scale: scale[:-1])),
    Case(
        "scale-shape", "gptq-asym", change=_changed(f"{DOWN}.qzeros", lambda zeros: zeros[:, :-1])
    ),
    Case("uneven-groups", "gptq", change=_setting(group_size=48)),
    Case(
        "fused-schemes",
        "packed",
        change=_both(
            _reencode([_UP], lambda weight: build.packed(weight, 8)),
            _second_group([_UP], num_bits=8),
        ),
    ),
    Case(
        "fused-schemes",
        "packed",
        change=_both(
            _reencode([Q], lambda weight: {"weight": weight}), _setting(ignore=["lm_head", Q])
        ),
    ),
    Case("expert-schemes", "packed", change=_mixed_experts),
    Case("tp-groups", "packed", requested={"tp": 4}),
    Case("tp-groups", "fp8", requested={"tp": 4}),
    Case("tp-heads", requested={"tp": 3}),
    Case("act-order", "packed", change=lambda _, config: _weights(config).update(actorder="group")),
    Case(
        "quantized-embedding",
        "packed",
        change=_both(
            _reencode(["model.embed_tokens"], build.packed), _second_group(["model.embed_tokens"])
        ),
    ),
    Case("low-bit-state", "packed", change=_linear_attention),
    Case("low-bit-state", "gptq", change=_linear_attention),
    Case("low-bit-state", "mlx", change=_linear_attention),
    Case("zero-version", "gptq", change=_setting(checkpoint_format="gptq_v2")),
    Case("zero-version", "gptq-v2", change=_setting(checkpoint_format="gptq")),
    Case("zero-version", "gptq-asym", change=_setting(checkpoint_format="gptq_v2"), requested=DEEP),
    Case("kv-scales-missing", "packed-kv", change=_without(_V_SCALE)),
    Case(
        "kv-scales-missing",
        "packed-kv",
        change=_without(_V_SCALE, _V_SCALE.replace("v_scale", "k_scale")),
    ),
    Case("kv-no-scales", "packed", change=_setting(kv_cache_scheme=build.KV_SCHEME)),
    Case("kv-no-scales", "fp8", change=_setting(kv_cache_scheme="static")),
    Case("kv-no-scheme", "packed-kv", change=_setting(kv_cache_scheme=None)),
    Case("kv-no-scheme", change=lambda tensors, _: tensors.update(build.kv_scales())),
    Case("kv-scale-value", "packed-kv", change=_filled(_V_SCALE, float("nan"))),
    Case("kv-scale-value", "packed-kv", change=_filled(_V_SCALE, float("inf"))),
    Case("kv-scale-value", "packed-kv", change=_filled(_V_SCALE, 0)),
    Case("kv-scale-value", "packed-kv", change=_filled(_V_SCALE, -0.1)),
    Case("kv-scale-value", "packed-kv", change=_changed(_V_SCALE, lambda scale: scale.short())),
    Case("kv-scale-value", "packed-kv", change=_added_tensor(_Q_SCALE, torch.tensor([-0.1]))),
    Case(
        "kv-scale-value", "packed-kv", change=_added_tensor(_Q_SCALE, torch.tensor([float("nan")]))
    ),
    Case(
        "kv-scale-value", "packed-kv", change=_added_tensor(_V_ZERO, torch.tensor([float("nan")]))
    ),
    Case("kv-scale-shape", "packed-kv", change=_changed(_V_SCALE, lambda scale: scale.repeat(2))),
    Case("kv-scale-shape", "packed-kv", change=_added_tensor(_V_ZERO, torch.zeros(2))),
    Case("kv-scale-shape", "packed-kv", change=_added_tensor(_Q_SCALE, torch.ones(4))),
    Case(
        "kv-no-zero-points",
        "packed-kv",
        change=_setting(kv_cache_scheme={**build.KV_SCHEME, "symmetric": False}),
    ),
    Case(
        "kv-no-zero-points",
        "packed-kv",
        change=_both(
            _setting(kv_cache_scheme={**build.KV_SCHEME, "symmetric": False}),
            _added_tensor(_V_ZERO, torch.zeros(1)),
        ),
    ),
    Case("bad-settings", "packed-kv", change=_setting(kv_cache_scheme=[8])),
    Case("bad-settings", "packed-kv", change=_setting(kv_cache_scheme={"num_bits": "x"})),
    # text
    Case("no-tokenizer", damage=_removed("tokenizer.json", "tokenizer_config.json")),
    Case("damaged-tokenizer", damage=_written("tokenizer.json", b'{"model": {}}')),
    Case("damaged-tokenizer", damage=_written("tokenizer_config.json", b"{")),
    Case("damaged-tokenizer", damage=_edited("tokenizer.json", pre_tokenizer={"type": "Foo"})),
    Case(
        "damaged-tokenizer",
        damage=_edited("tokenizer.json", model={**_words("<unk>"), "type": "Foo"}),
    ),
    Case(
        "damaged-tokenizer",
        damage=_json_changed("tokenizer.json", "model", "vocab", "w3", value=-1),
    ),
    Case(
        "damaged-tokenizer",
        damage=_edited("tokenizer.json", added_tokens=[{"id": 1e999, "content": "<x>"}]),
    ),
    Case("damaged-tokenizer", damage=_written("tokenizer.model", _LFS)),
    Case("damaged-tokenizer", damage=_written("tokenizer.model", b"no model")),
    Case("damaged-tokenizer", damage=_written("added_tokens.json", b"")),
    Case("damaged-tokenizer", damage=_edited("tokenizer_config.json", additional_special_tokens=5)),
    Case("tokenizer-conflict", damage=_edited("tokenizer_config.json", split_special_tokens=True)),
    Case(
        "tokenizer-conflict", damage=_edited("tokenizer_config.json", extra_special_tokens=["w3"])
    ),
    Case(
        "tokenizer-conflict",
        damage=_edited(
            "tokenizer_config.json", added_tokens_decoder={"3": {"content": "w3", "special": True}}
        ),
    ),
    Case("unknown-token", damage=_edited("tokenizer_config.json", bos_token="nowhere")),
    Case("unknown-token", damage=_edited("tokenizer_config.json", sep_token="<sep>")),
    Case(
        "tokenizer-too-large", damage=_edited("tokenizer.json", added_tokens=[_added(VOCABULARY)])
    ),
    Case("tokenizer-too-small", damage=_edited("tokenizer.json", model=_words("<s>", "</s>"))),
    Case("random-tokens", damage=_randomized),
    Case("vocabulary", "mlx", change=_configured(vocab_size=VOCABULARY + 1)),
    Case("token-out-of-range", damage=_edited("generation_config.json", pad_token_id=VOCABULARY)),
    Case("end-tokens", damage=_edited("tokenizer_config.json", eos_token="w7")),
    Case(
        "no-chat-template",
        damage=lambda folder: [_instruct(folder), _removed("chat_template.jinja")(folder)],
    ),
    Case("damaged-template", damage=_written("chat_template.jinja", b"{% for m in %}")),
    Case("damaged-template", damage=_written("chat_template.jinja", b"")),
    Case(
        "no-generation-config",
        damage=lambda folder: [_instruct(folder), _removed("generation_config.json")(folder)],
    ),
    Case(
        "bad-generation-config",
        damage=_edited("generation_config.json", do_sample=True, top_p="high"),
    ),
    Case("bad-generation-config", damage=_edited("generation_config.json", max_new_tokens=0)),
    # one runtime
    Case("other-container", requested={"runtime": "llama.cpp"}),
    Case("other-method", "mlx", requested={"runtime": "vllm"}),
    Case("other-method", "packed", requested={"runtime": "mlx"}),
    Case("gptq-zeros", "gptq-asym", requested={"runtime": "vllm"}),
    Case("gptq-order", "gptq", change=_setting(desc_act=True), requested={"runtime": "vllm"}),
    Case(
        "vllm-settings",
        "packed",
        change=_setting(sparsity_config={"targets": ["Linear"]}),
        requested={"runtime": "vllm"},
    ),
    Case(
        "vllm-names",
        "gptq",
        change=_both(
            _reencode(_ATTENTION, lambda weight: build.gptq(weight, 8)),
            _setting(dynamic={rf"+:^{re.escape(name)}$": {"bits": 8} for name in _ATTENTION}),
        ),
        requested={"runtime": "vllm"},
    ),
    Case(
        "vllm-head",
        "gptq",
        change=_both(_reencode(["lm_head"], build.gptq), _setting(lm_head=True)),
        requested={"runtime": "vllm"},
    ),
    Case("packed-zeros", "packed-asym", requested={"runtime": "transformers"}),
    Case("column-groups", "gptq", requested={"runtime": "mlx"}),
    Case("no-cpu-kernel", "packed-8", requested={"runtime": "vllm"}),
    Case("unknown-family", change=_configured(model_type="other"), requested={"runtime": "vllm"}),
    # numbers
    Case("nan", change=_filled(f"{DOWN}.weight", float("nan"), slice(3, 4)), requested=DEEP),
    Case(
        "nan",
        "packed",
        change=_filled(f"{DOWN}.weight_scale", float("inf"), slice(1)),
        requested=DEEP,
    ),
    Case("never-written", change=_filled(f"{DOWN}.weight", 0), requested=DEEP),
    Case("never-written", change=_filled("model.norm.weight", 0), requested=DEEP),
    Case(
        "never-written",
        "packed",
        change=_filled(f"{DOWN}.weight_packed", 0x77777777),
        requested=DEEP,
    ),
    Case("never-written", "awq", change=_filled(f"{DOWN}.scales", 0), requested=DEEP),
    Case("partly-written", change=_filled(f"{DOWN}.weight", 0, slice(40, None)), requested=DEEP),
    Case("equal-scales", "packed", change=_filled(f"{DOWN}.weight_scale", 0.01), requested=DEEP),
    Case("zero-scales", "gptq", change=_filled(f"{DOWN}.scales", 0, slice(3)), requested=DEEP),
    Case(
        "absurd-scale",
        "packed",
        change=_filled(f"{DOWN}.weight_scale", 1e9, slice(1)),
        requested=DEEP,
    ),
    Case(
        "negative-scales",
        "packed",
        change=_changed(f"{DOWN}.weight_scale", torch.neg),
        requested=DEEP,
    ),
    Case("tied-head", change=_configured(tie_word_embeddings=True), requested=DEEP),
    Case(
        "column-order",
        "gptq",
        change=_changed(f"{DOWN}.g_idx", lambda order: order.flip(0)),
        requested=DEEP,
    ),
]


def _named(case: Case) -> str:
    return f"{case.rule}-{case.form}"


def _names(found: quantkit.Diagnosis) -> set[str]:
    return {finding.rule.name for finding in found.findings}


@pytest.mark.sampled(54)
@pytest.mark.parametrize("case", CASES, ids=_named)
def test_a_folder_that_is_broken_for_a_rule_is_found_by_it_alone(
    case: Case, tmp_path: Path
) -> None:
    tensors, config = build.tensors(case.form), json.loads(json.dumps(build.FORMATS[case.form][1]))
    case.change(tensors, config)
    folder = build.write(tmp_path / "model", tensors, config, case.shards)
    case.damage(folder)
    found = quantkit.diagnose(folder, **case.requested)
    assert _names(found) == {case.rule}, found.lines()
    assert found.is_broken == (
        ALL[case.rule].severity_for(case.requested.get("runtime")) == "error"
    )


@pytest.mark.parametrize("form", build.FORMATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_sound_folders_have_nothing(form: str, shards: int, tmp_path: Path) -> None:
    folder = build.make(tmp_path / "model", form, shards)
    assert _names(quantkit.diagnose(folder, deep=True, tp=2)) == set()


def test_a_tied_matrix_that_is_stored_as_the_head_alone_is_sound(tmp_path: Path) -> None:
    tensors, config = build.tensors("floats"), dict(build.FORMATS["floats"][1])
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    config["tie_word_embeddings"] = True
    assert _names(quantkit.diagnose(build.write(tmp_path / "model", tensors, config))) == set()


@pytest.mark.parametrize("form", ["floats", "packed-8", "int8", "fp8"])
def test_linear_attention_of_eight_bits_is_sound(form: str, tmp_path: Path) -> None:
    tensors, config = build.tensors(form), dict(build.FORMATS[form][1])
    _linear_attention(tensors, config)
    assert _names(quantkit.diagnose(build.write(tmp_path / "model", tensors, config))) == set()


GGUF_CASES: list[tuple[str, Change, dict[str, Any]]] = [
    ("gguf-keys", lambda _, metadata: metadata.pop("llama.block_count"), {}),
    ("gguf-keys", lambda _, metadata: metadata.pop("tokenizer.ggml.merges"), {}),
    ("gguf-keys", lambda _, metadata: metadata.update({"llama.attention.head_count_kv": [1]}), {}),
    ("gguf-vocabulary", lambda _, metadata: metadata["tokenizer.ggml.tokens"].append("more"), {}),
    ("gguf-pre", lambda _, metadata: metadata.pop("tokenizer.ggml.pre"), {}),
    ("gguf-tokenizer", lambda _, metadata: metadata.update({"tokenizer.ggml.model": "foo"}), {}),
    ("no-tokenizer", lambda _, metadata: metadata.pop("tokenizer.ggml.tokens"), {}),
    (
        "token-out-of-range",
        lambda _, metadata: metadata.update({"tokenizer.ggml.eos_token_id": VOCABULARY}),
        {},
    ),
    (
        "no-chat-template",
        lambda _, metadata: metadata.update({"general.name": "Tiny Instruct"}),
        {},
    ),
    (
        "damaged-template",
        lambda _, metadata: metadata.update({"tokenizer.chat_template": "{% if"}),
        {},
    ),
    ("missing-tensor", lambda tensors, _: tensors.pop("blk.1.ffn_down.weight"), {}),
    ("extra-tensor", lambda _, metadata: metadata.update({"llama.block_count": 2}), {}),
    ("wrong-shape", _changed("blk.1.ffn_up.weight", lambda weight: weight[:-32]), {}),
    ("nan", _filled("blk.1.ffn_up.weight", float("nan"), slice(1)), DEEP),
    ("never-written", _filled("blk.1.ffn_up.weight", 0), DEEP),
    ("other-container", _nothing, {"runtime": "mlx"}),
]


@pytest.mark.parametrize(
    ("rule", "change", "requested"), GGUF_CASES, ids=[rule for rule, _, _ in GGUF_CASES]
)
def test_a_gguf_file_that_is_broken_for_a_rule_is_found_by_it_alone(
    rule: str, change: Change, requested: dict[str, Any], tmp_path: Path
) -> None:
    tensors, metadata = build.gguf_tensors(), build.gguf_metadata()
    change(tensors, metadata)
    path = build.write_gguf(tmp_path / "tiny.gguf", tensors, metadata)
    assert _names(quantkit.diagnose(path, **requested)) == {rule}


DAMAGED = [(_cut, "truncated-file"), (lambda path: path.write_bytes(b"x"), "damaged-file")]


@pytest.mark.parametrize(("damage", "rule"), DAMAGED)
def test_damaged_gguf_files(damage: Callable[[Path], object], rule: str, tmp_path: Path) -> None:
    path = build.write_gguf(tmp_path / "tiny.gguf", build.gguf_tensors(), build.gguf_metadata())
    assert _names(quantkit.diagnose(path, deep=True, runtime="llama.cpp")) == set()
    damage(path)
    assert _names(quantkit.diagnose(path)) == {rule}


AGAINST: list[tuple[str, Change, Change]] = [
    ("out-of-line", _nothing, _changed(f"{DOWN}.weight_packed", lambda codes: codes.flip(0))),
    ("changed", _nothing, _changed("model.norm.weight", lambda weight: weight + 1)),
    ("other-model", _configured(rope_theta=500000.0), _nothing),
]


@pytest.mark.parametrize(
    ("rule", "of_source", "change"), AGAINST, ids=[rule for rule, _, _ in AGAINST]
)
def test_how_far_a_folder_is_from_its_source(
    rule: str, of_source: Change, change: Change, tmp_path: Path
) -> None:
    before, config = build.tensors("floats"), build.config()
    of_source(before, config)
    source = build.write(tmp_path / "source", before, config)
    sound = build.make(tmp_path / "sound", "packed")
    found = quantkit.diagnose(sound, against=source)
    if rule != "other-model":
        assert _names(found) == set()
        assert {layer.module for layer in found.layers} == set(LINEARS)
        assert all(0.03 < layer.error < layer.bound for layer in found.layers)
    tensors = build.tensors("packed")
    change(tensors, config)
    broken = build.write(tmp_path / "broken", tensors, build.FORMATS["packed"][1])
    found = quantkit.diagnose(broken, against=source)
    assert _names(found) == {rule}
    if rule == "out-of-line":
        assert [finding.location for finding in found.findings] == [DOWN]
        assert found.layers[0].module == DOWN


def test_a_source_is_there_and_in_floats(tmp_path: Path, capfd: Capture) -> None:
    folder = build.make(tmp_path / "model", "packed")
    with raises(RequestError, path=tmp_path / "nothing"):
        quantkit.diagnose(folder, against=tmp_path / "nothing")
    with raises(RequestError, path=folder, options=["against"]):
        quantkit.diagnose(folder, against=folder)
    code, _, err = run(capfd, "doctor", "")
    assert code == RequestError.exit_code
    assert "PATH" in err


def test_models_without_a_head_are_called_otherwise(tmp_path: Path) -> None:
    tensors = {
        name.removeprefix("model."): one
        for name, one in build.floats().items()
        if name != "lm_head.weight"
    }
    found = quantkit.diagnose(
        build.write(tmp_path / "model", tensors, build.config(architectures=["LlamaModel"]))
    )
    assert _names(found) == set()
    assert any("LlamaModel is not known here" in one for one in found.left_out)


def test_names_that_no_terminal_shows_are_spelled_out(tmp_path: Path) -> None:
    folder = build.write(
        tmp_path / "model", build.floats(), build.config(model_type="a\ud800\x1b[31m")
    )
    assert r"a\ud800\x1b[31m" in " ".join(
        quantkit.diagnose(folder).lines()[:2]
    )  # the path may be long


def test_every_rule_has_a_case() -> None:
    tried = {case.rule for case in CASES} | {rule for rule, _, _ in (*GGUF_CASES, *AGAINST)}
    elsewhere = {
        "unusual-norm",
        "not-as-written",
        *(rule.name for rule in rules()["Predictions, where the model is run"]),
    }  # test_doctor_deep.py
    elsewhere |= {"mtp-not-ignored", "quantized-tower"}  # test_doctor_parts.py
    elsewhere |= {"vllm-loader", "vllm-tiles"}  # test_vllm.py
    assert tried | elsewhere | {"refused", "other-scheme", "slow-groups"} == set(ALL)


def test_names_in_settings_may_have_long_numbers(tmp_path: Path) -> None:
    tensors, config = build.tensors("packed"), json.loads(json.dumps(build.FORMATS["packed"][1]))
    _settings(config)["ignore"] += [f"model.layers.{'9' * 5000}.mlp.down_proj", "*.gate"]
    folder = build.write(tmp_path / "model", tensors, config)
    diagnosis = quantkit.diagnose(folder, runtime="vllm")
    assert [
        finding for finding in diagnosis.findings if diagnosis.severity(finding) == "error"
    ] == []


def test_scalars_of_other_bits_and_groups_are_reported_for_vllm(tmp_path: Path) -> None:
    tensors, config = build.tensors("packed"), json.loads(json.dumps(build.FORMATS["packed"][1]))
    _weights(config).update(num_bits=16)
    _weights(config).update(group_size=16)
    folder = build.write(tmp_path / "model", tensors, config)
    assert {"other-scheme", "slow-groups"} <= _names(quantkit.diagnose(folder, runtime="vllm"))


def test_many_of_one_kind_are_reported_once_with_their_count(tmp_path: Path) -> None:
    tensors = build.tensors("packed")
    lost = [name for name in tensors if name.endswith("weight_scale")]
    for name in lost:
        del tensors[name]
    folder = build.write(tmp_path / "model", tensors, build.FORMATS["packed"][1])
    lines = quantkit.diagnose(folder).lines()
    entries = [line for line in lines if "incomplete" in line]
    assert len(entries) == 1
    assert entries[0].endswith(f" and {len(lost) - 1} more")
    assert max(map(len, lines)) <= 100


def test_what_a_runtime_minds_is_an_error_for_it_alone(tmp_path: Path) -> None:
    folder = build.make(tmp_path / "model")
    _removed("tokenizer.json", "tokenizer_config.json")(folder)
    assert not quantkit.diagnose(folder).is_broken
    assert quantkit.diagnose(folder, runtime="vllm").is_broken


@pytest.mark.parametrize("requested", [{"runtime": "ollama"}, {"tp": 0}, {"tp": "2"}, {"deep": 1}])
def test_arguments_that_make_no_sense(requested: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        quantkit.diagnose(build.make(tmp_path / "model"), **requested)


def test_nothing_there_and_no_weights(tmp_path: Path) -> None:
    with raises(RequestError, path=tmp_path / "nothing"):
        quantkit.diagnose(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with raises(RequestError, "*.safetensors", path=tmp_path / "notes.txt"):
        quantkit.diagnose(tmp_path / "notes.txt")


def test_the_command_reports_and_ends_with_its_code(tmp_path: Path, capfd: Capture) -> None:
    folder = build.make(tmp_path / "model", "gptq-asym")
    code, out, _ = run(capfd, "doctor", folder)
    assert code == 0
    assert "--deep" in out
    code, out, _ = run(capfd, "doctor", folder, "--for", "vllm", "--json", tmp_path / "found.json")
    assert code == 12
    (reported,) = [line for line in out.splitlines() if line.strip().startswith("error ")]
    assert reported.split() == [
        "error",
        "gptq-zeros",
        "model.layers.0.mlp.down_proj",
        "and",
        "20",
        "more",
    ]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["broken"]
    assert found["findings"][0]["remedy"] == ALL["gptq-zeros"].remedy
    assert found["runtime"] == "vllm"


def test_a_meta_folder_is_read_strictly(tmp_path: Path) -> None:
    folder = tmp_path / "meta"
    quantkit.convert(build.make(tmp_path / "model"), folder, to="meta", mp=2, source_check=False)
    assert _names(quantkit.diagnose(folder, deep=True)) == set()
    (folder / "tokenizer.model").write_bytes(b"junk")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    assert _names(quantkit.diagnose(folder)) == {"damaged-tokenizer"}
    (folder / "tokenizer.model").unlink()
    assert _names(quantkit.diagnose(folder)) == {"no-tokenizer"}
    build.edit(folder, "params.json", n_layers=2)
    assert _names(quantkit.diagnose(folder)) == {"no-tokenizer", "refused"}


def test_mistrals_own_layout(tmp_path: Path) -> None:
    folder = build.make(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "config.json").rename(folder / "params.json")
    (folder / "README.md").unlink(missing_ok=True)
    os.mkfifo(folder / "README.md")
    assert "Mistral's own layout" in quantkit.diagnose(folder, deep=True, runtime="vllm").lines()[0]
    assert _names(quantkit.diagnose(folder, runtime="vllm")) == set()
    assert _names(quantkit.diagnose(folder, runtime="transformers")) == {"other-container"}


@pytest.mark.parametrize(
    ("line", "is_instruct"),
    [
        ("base_model: someone/Tiny-Instruct", True),
        ("  - someone/Tiny-Chat  ", True),
        ("- base_model: a/b-it", True),
        ("base_model: Tiny-Instruct and more", True),
        ("see someone/Tiny-Instruct", False),
        ("base_model:", False),
        ("base_model: someone/Tiny", False),
        ("Tiny-Instruct", False),
    ],
)
def test_a_model_card_names_the_base_model(line: str, is_instruct: bool, tmp_path: Path) -> None:
    """Thousands of blanks make no difference."""
    folder = build.make(tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "README.md").write_text(f"---\n{line}\n---\n" + "\n" * 2000 + " " * 2000)
    assert ("no-generation-config" in _names(quantkit.diagnose(folder))) == is_instruct


SOUND = {
    "llama-biases": None,
    "qwen2": "int8",
    "qwen3": "int4-g32",
    "gemma": None,
    "gemma2": "int4-g32-asym",
    "gemma3": None,
    "phi3": "int4-g32",
    "granite": None,
    "glm4": "int8",
    "mixtral": "int4-g32",
    "qwen3-moe": None,
    "gpt-oss": None,
    "deepseek-v3": None,
    "olmo2": None,
    "smollm3": "int4-g64",
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", SOUND)
def test_families_as_transformers_and_quantkit_write_them_have_nothing(
    case: str, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": 2} if case not in ("qwen3-moe", "gemma2") else {}
    folder = oracle.save(families.make(case, **changes), tmp_path / case)
    build.put(folder, "tokenizer.json", build.tokenizer())
    build.edit(
        folder, "config.json", num_nextn_predict_layers=None
    )  # which transformers drops, and counts
    assert _names(quantkit.diagnose(folder, deep=True, runtime="transformers")) == set()
    if (scheme := SOUND[case]) is not None:
        made = tmp_path / "quantized"
        quantkit.quantize(
            folder, made, scheme, method="rtn", source_check=False, accept_quality_loss=True
        )
        found = quantkit.diagnose(made, deep=True, against=folder)
        assert {
            finding.rule.name for finding in found.findings if finding.rule.severity != "note"
        } == set()
        assert found.layers


def test_one_file_of_weights(tmp_path: Path) -> None:
    folder = build.make(tmp_path / "model")
    assert _names(quantkit.diagnose(folder / "model.safetensors", deep=True)) == set()
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q}.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "one.safetensors")
    assert _names(quantkit.diagnose(tmp_path / "one.safetensors", deep=True)) == {"nan"}


def test_docs_list_every_rule() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    reported = {cells[0].strip("| `"): cells[1:] for cells in rows}
    assert list(reported) == list(ALL)
    for name, rule in ALL.items():
        severity = rule.severity + (f", breaks {', '.join(rule.breaks)}" if rule.breaks else "")
        assert reported[name] == [severity, rule.checks, rule.source + " |"], name


def test_all_rules_that_are_reported_are_listed() -> None:
    code = "".join(
        path.read_text() for path in (Path(quantkit.__file__).parent / "doctor").glob("*.py")
    )
    passed_on = (vllm, vllm_settings)
    code += "".join(Path(module.__file__).read_text() for module in passed_on)
    assert (
        set(re.findall(r'finding\(\s*"([^"]+)"', code))
        <= set(ALL)
        <= set(re.findall(r'"([a-z0-9-]+)"', code))
    )


def test_rules_are_named_and_reported_for_people() -> None:
    assert all(
        len(rule.name) <= 22 and rule.remedy and not rule.checks.endswith(".")
        for rule in ALL.values()
    )
    assert all(set(rule.breaks) <= set(RUNTIMES) for rule in ALL.values())
    assert Finding(ALL["nan"], "a", "b").to_json()["severity"] == "error"
    assert isinstance(ALL["nan"], Rule)
