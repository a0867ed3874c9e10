"""Mutations of JSON that keep it JSON, or nearly so: types, keys, doubles, huge and absurd
values.
"""

from __future__ import annotations

import copy
import json
import math
from random import Random
from typing import Any


class Raw(str):
    """Text that stands in the file as it is."""


class Pairs(list[tuple[str, Any]]):
    """An object that may have a key twice."""


_STRINGS = (
    "",
    "x",
    "64",
    "../victim",
    "/etc/passwd",
    "..",
    "a\x00b",
    "\ud800",
    "re:(",
    "re:(a|.)*(a|.)*X",
    "Linear",
    "re:.*",
    "model.safetensors",
    "bfloat16",
    "float16",
    "qwen2",
    "qwen3",
    "mistral",
    "llama",
    "full_attention",
    "F32",
    "BF16",
    "F8_E4M3",
    "I32",
    "yarn",
    "linear",
    "dynamic",
    "x" * 5000,
)
_NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    8,
    31,
    33,
    4096,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    200_000_000,
    0.0,
    -0.0,
    0.5,
    64.0,
    1e-320,
    1e308,
    -1e308,
    math.nan,
    math.inf,
    -math.inf,
)
_RAW = (
    Raw("1e400"),
    Raw("-1e400"),
    Raw("9" * 400),
    Raw("9" * 5000),
    Raw("[" * 3000 + "]" * 3000),
    Raw("01"),
    Raw(""),
    Raw("undefined"),
    Raw('"\\ud800"'),
    Raw("1" + "0" * 25 + ".0"),
)
# Keys that readers look for, with values that make some sense of them.
_KNOWN: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (
        None,
        [],
        Pairs([("type", "linear"), ("factor", 2)]),
        Pairs(
            [
                ("rope_type", "llama3"),
                ("factor", 8.0),
                ("low_freq_factor", 0),
                ("high_freq_factor", 4.0),
                ("original_max_position_embeddings", 32),
            ]
        ),
        Pairs([("rope_type", "yarn"), ("factor", 4.0)]),
    ),
    "rope_parameters": (
        Pairs([("rope_theta", 1e4), ("rope_type", "default")]),
        Pairs([("rope_type", 5)]),
        [1],
    ),
    "sliding_window": (16, None, 0, "16"),
    "layer_types": (["full_attention"], [5, 6], "x", [["a"], ["b"]]),
    "head_dim": (8, 16, 0, 7, "8"),
    "torch_dtype": ("float32", "float16", [], Pairs()),
    "dtype": ("float32", 5),
    "num_key_value_heads": (1, 2, 4, 3, 0),
    "n_kv_heads": (1, 2, 4, 3, 0),
    "n_heads": (2, 8, 4.0, "4"),
    "num_attention_heads": (2, 8, 4.0, "4"),
    "tie_word_embeddings": (True, "false", []),
    "eos_token_id": ([2, 3], -1, [[1]], 10**40, "2"),
    "bos_token_id": ([1], -1, {}, "a"),
    "use_scaled_rope": (True, 1, "x"),
    "rope_scaling_factor": (0, 8, "8", -1),
    "attention_bias": (True, "no"),
    "mlp_bias": (True,),
    "use_sliding_window": (True, 1),
    "max_window_layers": (1, -1, "1"),
    "model_type": (["llama"], "qwen2", Pairs()),
    "quantization_config": (
        None,
        [],
        "x",
        Pairs([("quant_method", "gptq"), ("bits", 4)]),
        Pairs([("quant_method", "compressed-tensors")]),
    ),
    "targets": (None, [5], ["re:("], ["Linear", "re:.*"], "Linear", ["re:(a|.)*(a|.)*X"]),
    "ignore": ([5], "x", ["re:("], ["lm_head"], ["re:.*q_proj"]),
    "group_size": (-1, 0, 32.0, 7, 2**40, "32"),
    "num_bits": (4.0, "4", 3, True, 8),
    "symmetric": (None, "x", False),
    "strategy": ("group", "channel", []),
    "weight_map": (None, [], Pairs(), Pairs([("model.norm.weight", "../victim")])),
    "hidden_dim": (64, "64"),
    "__metadata__": (None, [], Pairs([("a", 1)]), Pairs([("format", "pt")])),
    "format_version": (0, 2, 1.5, "1"),
    "add_bos_token": ("x", None),
    "bos_token": (5, [], Pairs([("content", 5)]), Pairs([("content", [])])),
    "eos_token": (5, [], Pairs([("content", Pairs())])),
    "tensors": (-1, 10**6, 0, "1"),
    "vocab_size": (-1, 96, 0),
}


def mutate_json(rng: Random, data: bytes) -> tuple[bytes, str] | None:
    """One structured mutation, and what it was; None if the bytes are no JSON, or too deep for
    Python code.
    """
    try:
        changed, what = _mutated(rng, json.loads(data, object_pairs_hook=Pairs))
        return dump(changed).encode("utf-8", "surrogatepass"), what
    except (ValueError, RecursionError):
        return None


def dump(value: Any) -> str:
    """JSON text, with whatever `Raw` holds and keys as often as they are listed."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump(item)}" for key, item in value) + "}"
    if isinstance(value, dict):
        return dump(Pairs(value.items()))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(dump(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=not isinstance(value, str) or "\ud800" not in value)


def _mutated(rng: Random, root: Any) -> tuple[Any, str]:
    places = list(_places(root))
    if not places or rng.random() < 0.03:
        value = _edge(rng)
        return value, f"root = {_short(value)}"
    container, index, path = rng.choice(places)
    old = _at(container, index)
    kind = rng.choice(
        (
            "edge",
            "edge",
            "edge",
            "type",
            "step",
            "drop",
            "double",
            "rename",
            "copy",
            "known",
            "known",
        )
    )
    if kind == "known":
        objects = [(c, p) for c, _, p in places if isinstance(c, Pairs)]
        if objects:
            where, path = rng.choice(objects)
            key = rng.choice(list(_KNOWN))
            value = rng.choice(_KNOWN[key])
            present = [i for i, (name, _) in enumerate(where) if name == key]
            if present:
                where[present[0]] = (key, value)
            else:
                where.append((key, value))
            return root, f"{path.rpartition('.')[0]}.{key} = {_short(value)}"
    if kind == "drop":
        del container[index]
        return root, f"{path} dropped"
    if kind == "double" and isinstance(container, Pairs):
        container.append((container[index][0], _edge(rng) if rng.random() < 0.7 else old))
        return root, f"{path} doubled with {_short(container[-1][1])}"
    if kind == "rename" and isinstance(container, Pairs):
        key = rng.choice(
            [
                container[index][0] + "x",
                "",
                rng.choice(_STRINGS),
                rng.choice(places)[2].split(".")[-1],
            ]
        )
        container[index] = (key, old)
        return root, f"{path} renamed to {_short(key)}"
    if kind == "copy":
        other, position, origin = rng.choice(places)
        return _put(
            root, container, index, copy.deepcopy(_at(other, position))
        ), f"{path} = value of {origin}"
    if kind == "step" and isinstance(old, int) and not isinstance(old, bool):
        value = old + rng.choice((-1, 1, 2, -2, 64, -64, 2**31, 2**63))
    elif kind == "type":
        value = _other_type(rng, old)
    else:
        value = _edge(rng)
    return _put(root, container, index, value), f"{path} = {_short(value)}"


def _places(value: Any, path: str = "") -> list[tuple[Any, int, str]]:
    """Every value as its container, index and path; of a long object some hundred."""
    found: list[tuple[Any, int, str]] = []
    waiting = [(value, path)]
    while waiting and len(found) < 5000:
        item, where = waiting.pop(0)
        if isinstance(item, Pairs):
            children = [(index, f"{where}.{key}", child) for index, (key, child) in enumerate(item)]
        elif isinstance(item, list):
            children = [(index, f"{where}.{index}", child) for index, child in enumerate(item)]
        else:
            continue
        for index, name, child in children:
            found.append((item, index, name))
            waiting.append((child, name))
    return found


def _at(container: Any, index: int) -> Any:
    return container[index][1] if isinstance(container, Pairs) else container[index]


def _put(root: Any, container: Any, index: int, value: Any) -> Any:
    container[index] = (container[index][0], value) if isinstance(container, Pairs) else value
    return root


def _edge(rng: Random) -> Any:
    return rng.choice(
        (
            rng.choice(_STRINGS),
            rng.choice(_NUMBERS),
            rng.choice(_NUMBERS),
            rng.choice(_RAW),
            None,
            True,
            False,
            [],
            Pairs(),
            [[]],
            [None],
            [0, 0],
            [-1, 2**63],
            Pairs([("a", 1)]),
        )
    )


def _other_type(rng: Random, old: Any) -> Any:
    choices: list[Any] = [[old], Pairs([("value", old)]), None]
    if isinstance(old, (int, float)) and not isinstance(old, bool):
        choices += [str(old), float(old) if abs(old) < 1e300 else 0.5, bool(old), -old]
    elif isinstance(old, list):
        choices += [
            dict(enumerate(map(str, old[:5]))),
            str(old[:5]),
            len(old),
            [*old, *old[:1]],
            old[:-1],
        ]
    elif isinstance(old, str):
        choices += [len(old), [*old[:5]], old + "x", old[:-1], old.upper()]
    return rng.choice(choices)


def _short(value: Any) -> str:
    text = dump(value) if not isinstance(value, dict) else repr(value)
    return ascii(text if len(text) <= 60 else text[:57] + "...")
