"""Mutations of pickles: opcodes dropped, doubled and swapped, numbers at their edges, code that
must not run.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from random import Random

from fuzzing.raw import mutate_bytes

MARKER = "marker"
"""What code in a pickle would leave in the working folder."""

_CODE = (
    b"cposix\nsystem\n(S'touch marker'\ntR.",
    b"c__builtin__\nexec\n(S\"open('marker','w')\"\ntR.",
    b"c__builtin__\neval\n(S\"open('marker','w')\"\ntR.",
    b"cbuiltins\nopen\n(S'marker'\nS'w'\ntR.",
    b"csubprocess\ncheck_call\n(S'touch marker'\nNNNNNNNI00\nI01\ntR.",
    b"\x80\x02ctorch.hub\nload\n(S'.'\ntR.",
    b"\x80\x02ctorch\nload\n(S'src'\ntR.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    b"\x80\x02ccollections\nOrderedDict\n)R(S'a'\nI5\nu.",
    b"\x80\x02cnumpy\nload\n(S'marker'\ntR.",
)
_VALUES = (
    None,
    {},
    [],
    5,
    "x",
    {"a": 5},
    {"model": {}},
    {"model": {"a": None}},
    {5: 6},
    {"a": {"b": {}}},
    [[]],
    (1, 2),
    {"model": []},
    {"tok_embeddings.weight": "x"},
    b"x",
    10**40,
)
_SIZES = {"BININT": "<i", "BININT1": "<B", "BININT2": "<H"}
_EDGES = (0, 1, -1, 2, 255, 65535, 2**31 - 1, -(2**31))


def mutate_pickle(rng: Random, data: bytes, others: list[bytes]) -> tuple[bytes, str]:
    """One mutation of a pickle, and what it was; it need not keep its length."""
    kind = rng.choice(
        ("bytes", "opcode", "opcode", "opcode", "number", "number", "code", "value", "prefix")
    )
    if kind == "code":
        code = rng.choice(_CODE)
        return code, f"code {code[:30]!r}"
    if kind == "prefix":  # runs before the tensors are read, and leaves them as they are
        code = rng.choice(_CODE)
        return code[:-1] + b"0" + data, f"code {code[:30]!r} before the pickle"
    if kind == "value":
        value = rng.choice(_VALUES)
        return pickle.dumps(value, protocol=2), f"pickle of {value!r}"[:70]
    places = _opcodes(data)
    if kind == "bytes" or len(places) < 3:
        return mutate_bytes(rng, data, others)
    index = rng.randrange(len(places) - 1)
    name, start = places[index]
    stop = places[index + 1][1]
    if kind == "number":
        numbers = [(n, s) for n, s in places if n in _SIZES]
        if numbers:
            name, start = rng.choice(numbers)
            form = _SIZES[name]
            old = struct.unpack_from(form, data, start + 1)[0]
            new = rng.choice((*_EDGES, old + 1, old - 1, old * 2, old // 2))
            end = start + 1 + struct.calcsize(form)
            # LONG1.
            wide = b"\x8a\x08" + struct.pack("<q", rng.choice((2**63 - 1, -(2**63), 2**40)))
            if rng.random() < 0.15:
                return data[:start] + wide + data[end:], f"number {old} at {start} is huge"
            return data[:start] + b"J" + struct.pack("<i", _within(new)) + data[
                end:
            ], f"number {old} at {start}: {new}"
    how = rng.choice(("dropped", "doubled", "swapped", "replaced"))
    piece = data[start:stop]
    if how == "dropped":
        return data[:start] + data[stop:], f"opcode {name} at {start} dropped"
    if how == "doubled":
        return data[:stop] + piece + data[stop:], f"opcode {name} at {start} doubled"
    if how == "swapped":
        other = rng.randrange(len(places) - 1)
        first, second = sorted((index, other))
        if first == second:
            return data[:start] + data[stop:], f"opcode {name} at {start} dropped"
        a, b = places[first][1], places[first + 1][1]
        c, d = places[second][1], places[second + 1][1]
        return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[
            d:
        ], f"opcodes at {a} and {c} swapped"
    byte = rng.choice(pickletools.opcodes).code.encode("latin-1")
    return data[:start] + byte + data[start + 1 :], f"opcode {name} at {start} is now {byte!r}"


def _within(number: int) -> int:
    return max(-(2**31), min(number, 2**31 - 1))


def _opcodes(data: bytes) -> list[tuple[str, int]]:
    """Names and places of a pickle's opcodes, as far as it is one."""
    found: list[tuple[str, int]] = []
    try:
        for opcode, _, position in pickletools.genops(data):
            found.append((opcode.name, position or 0))
    except Exception:  # whatever is wrong, what came before it can be mutated
        return found
    return found
